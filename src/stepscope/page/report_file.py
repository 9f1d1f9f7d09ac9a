"""``report.html``: the page with a run's data inside, in one file that needs nothing else.

    html = report_file(title="night", data=packed)      # None: the page was not built

It is put together from parts, not filled into a template: the head below, the built style sheet and script, and the
data as base64, in which no tag can end anything.  The browser is told to run nothing but that very script, by its
checksum, and to ask nobody for anything; a run cannot say otherwise, whatever its name or its logs contain.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence

from stepscope.page.assets import INDEX, find_asset

__all__ = ["DATA_ID", "report_file"]

DATA_ID = "stepscope-data"
"""Of the element that the page looks for (``web/src/api/copy-bytes.ts``)."""
NOSCRIPT = "This page draws a training run with JavaScript. The same figures without it: stepscope report RUN."
_ASSET = re.compile(r'(?:src|href)="\./(assets/[^"]+)"')
_END_OF_SCRIPT = re.compile(rb"<(?=/script|script|!--)", re.IGNORECASE)
_END_OF_STYLE = re.compile(rb"<(?=/style)", re.IGNORECASE)


def report_file(*, title: str, data: bytes) -> bytes | None:
    """None: there is no built page to put it into."""
    index = find_asset(INDEX)
    if index is None:
        return None
    # Within a string or a regular expression \x3c is the same character, and script stands nowhere else behind a "<".
    names = _ASSET.findall(index.data.decode())
    script = _END_OF_SCRIPT.sub(rb"\\x3c", _together(names, ".js"))
    style = _END_OF_STYLE.sub(rb"\\3c ", _together(names, ".css"))
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


def _together(names: Sequence[str], kind: str) -> bytes:
    assets = [find_asset(name) for name in names if name.endswith(kind)]
    return b"".join(asset.data for asset in assets if asset is not None)


def _checksum(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
