"""The built page: its files as the hub serves them, and the page as one file with the data of a report inside.

Building a wheel or ``make page`` creates the files (web/build_page.py). Where that failed they are missing, everything
else works, and ``unbuilt.txt`` has the reason. Names contain a checksum, so a browser may cache the files forever; only
``index.html`` is requested again.

Links open the page, and contain the token only where that is safe.

    http://127.0.0.1:7070/#token=…              the list of runs
    http://127.0.0.1:7070/#/run/night?token=…   one of them

The token follows the ``#``: a browser does not send that part, and the page removes it from the address before it does
anything else. A link contains the token only on a terminal. Output to a file or a pipe may be kept or read by others,
and gets the link without it.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import mimetypes
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

__all__ = [
    "INDEX",
    "Asset",
    "explain_unbuilt",
    "find_asset",
    "is_built",
    "opened_in_browser",
    "pack",
    "report_file",
]

# -- assets -----------------------------------------------------------------------------------------------------------

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
REASON = "unbuilt.txt"
_BEST = 9


@dataclass(frozen=True, kw_only=True)
class Asset:
    data: bytes
    media_type: str

    @cached_property
    def packed(self) -> bytes:
        """The data compressed with gzip."""
        return gzip.compress(self.data, _BEST, mtime=0)


def is_built() -> bool:
    return (STATIC / INDEX).is_file()


def explain_unbuilt() -> str:
    """Say that there is no page, why, and what to do."""
    try:
        reason = (STATIC / REASON).read_text().strip()
    except OSError:
        reason = ""
    because = f" ({reason})" if reason else ""
    return f"the page was not built{because}; run `make page` in a checkout, or install Stepscope again with a network"


@lru_cache(maxsize=16)
def find_asset(name: str) -> Asset | None:
    """Return ``index.html`` or ``assets/NAME``; None for anything else."""
    folder, _, file = name.rpartition("/")
    if folder not in ("", "assets") or file.startswith(".") or (not folder and file != INDEX):
        return None
    try:
        data = (STATIC / folder / file).read_bytes()
    except (OSError, ValueError):
        return None
    kind = mimetypes.guess_type(file)[0] or "application/octet-stream"
    return Asset(data=data, media_type=kind)


# -- data -------------------------------------------------------------------------------------------------------------
# The container of a report's data (``web/src/api/copy-bytes.ts`` reads it):
#
#     0    4s   magic  b"STCP"
#     4    u16  version
#     6    u16  0
#     8    u32  length of the JSON that follows
#     12   ...  JSON: ``{"run", …}`` for a copy of a run, ``{"report": {…}, …}`` for a trace or Flight Recorder dumps
#          ...  blobs, which the JSON refers to by offset from its end
#
# The whole container is gzipped once.

HEAD = struct.Struct("<4sHHI")
MAGIC = b"STCP"
VERSION = 1


def pack(text: bytes, blobs: bytes = b"") -> bytes:
    """Pack a JSON document and its blobs for ``report_file``."""
    return gzip.compress(HEAD.pack(MAGIC, VERSION, 0, len(text)) + text + blobs, _BEST, mtime=0)


# -- one file ---------------------------------------------------------------------------------------------------------
# The page with the data of a run, a trace or Flight Recorder dumps inside, in one self-contained file.
#
#     html = report_file(title="night", data=pack(text))      # None: the page was not built
#
# It is assembled, not filled into a template: the head below, the built style sheet and script, and the data as base64,
# in which no tag can end anything.  The content security policy allows only that script, by its checksum, and no
# requests; the data cannot override it, whatever names, paths or logs it contains.

DATA_ID = "stepscope-data"
"""Id of the element that the page looks for (``web/src/api/copy-bytes.ts``)."""
NOSCRIPT = "This page needs JavaScript. Without it: stepscope report, trace and flight print text."
_ASSET_LINK = re.compile(r'(?:src|href)="\./(assets/[^"]+)"')
_END_OF_SCRIPT = re.compile(rb"<(?=/script|script|!--)", re.IGNORECASE)
_END_OF_STYLE = re.compile(rb"<(?=/style)", re.IGNORECASE)


def report_file(*, title: str, data: bytes) -> bytes | None:
    """Build the file; None if the page was not built."""
    index = find_asset(INDEX)
    if index is None:
        return None
    # In a string or a regular expression, \x3c is the same character, and "<" precedes "script" nowhere else.
    names = _ASSET_LINK.findall(index.data.decode())
    script = _END_OF_SCRIPT.sub(rb"\\x3c", _join_assets(names, ".js"))
    style = _END_OF_STYLE.sub(rb"\\3c ", _join_assets(names, ".css"))
    if not script:
        return None
    policy = (
        f"default-src 'none'; script-src {_checksum(script)}; style-src {_checksum(style)}; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    return b"".join(
        (
            b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'.encode(),
            b'<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            b'<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n',
            f"<title>{html.escape(_printable(title))} · Stepscope</title>\n".encode(),
            b'<link rel="icon" href="data:,">\n<style>',
            style,
            b'</style>\n</head>\n<body>\n<div id="app"></div>\n',
            f"<noscript>{html.escape(NOSCRIPT)}</noscript>\n".encode(),
            f'<script type="application/octet-stream" id="{DATA_ID}">'.encode(),
            base64.b64encode(data),
            b'</script>\n<script type="module">',
            script,
            b"</script>\n</body>\n</html>\n",
        )
    )


def _join_assets(names: Sequence[str], kind: str) -> bytes:
    assets = [find_asset(name) for name in names if name.endswith(kind)]
    return b"".join(asset.data for asset in assets if asset is not None)


def _checksum(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


# -- links ------------------------------------------------------------------------------------------------------------


@contextmanager
def opened_in_browser(link: str) -> Iterator[bool]:
    """Show the link in the user's browser; yield whether one could be started.

    Command lines are visible to every user of the machine. The browser is therefore given a file that only its owner
    can read and that redirects to the link; the file is removed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="stepscope-open-", dir=_folder()) as folder:
        page = Path(folder) / "open.html"
        fd = os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(_redirect(link))
        import webbrowser  # not needed by a launcher, which only makes links

        yield webbrowser.open(page.as_uri())


def _folder() -> str | None:
    """The user's runtime folder, which is removed with the session; else the default for temporary files."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    return folder if folder and os.access(folder, os.W_OK | os.X_OK) else None


def _redirect(link: str) -> str:
    address = html.escape(link, quote=True)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Stepscope</title>'
        f'<meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0; url={address}"></head>'
        f'<body><p><a href="{address}" rel="noreferrer">Open the page</a></p></body></html>\n'
    )
