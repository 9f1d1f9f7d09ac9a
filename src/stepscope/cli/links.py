"""Links that open the page, and when they contain the token.

    http://127.0.0.1:7070/#token=…              the list of runs
    http://127.0.0.1:7070/#/run/night?token=…   one of them

The token follows the ``#``: a browser does not send that part, and the page removes it from the address before it does
anything else. A link contains the token only on a terminal. Output to a file or a pipe may be kept or read by others,
and gets the link without it.
"""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

__all__ = ["opened_in_browser", "page_link"]


def page_link(url: str, run: str = "", token: str = "") -> str:
    """Link to one run or to the list, with or without the token."""
    place = f"/#/run/{quote(run, safe='')}" if run else "/#"
    if not token:
        return f"{url}{place if run else ''}"
    return f"{url}{place}{'?' if run else ''}token={quote(token, safe='')}"


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
