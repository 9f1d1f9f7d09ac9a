"""What a cell of a notebook can show: a page in a frame; and whether there is such a cell at all."""

from __future__ import annotations

import html
import os
import sys
from typing import Any

__all__ = ["frame_of_address", "frame_of_page", "in_notebook", "in_vscode", "put", "told_above"]

VSCODE = ("VSCODE_PID", "VSCODE_CWD")
"""A kernel has the first of these where VS Code runs beside it, and the second where it came over SSH or from WSL."""
VSCODE_FILE = "__vsc_ipynb_file__"
"""Among a notebook's own variables; put there by VS Code, also where another hand started the kernel."""
SANDBOX = "allow-scripts allow-downloads allow-popups"
"""A page that comes with its data needs nothing of the notebook's: no cookies, no storage, no forms."""


def in_notebook() -> bool:
    """Whether what we show lands in a cell; in a terminal IPython it would be text."""
    return getattr(_shell(), "kernel", None) is not None


def in_vscode() -> bool:
    """Whether that cell is one of VS Code, which has an address of its own: it shows a page that comes with its data,
    but of any page on this machine an empty frame."""
    return any(name in os.environ for name in VSCODE) or VSCODE_FILE in getattr(_shell(), "user_ns", ())


def put(markup: str, plain: str) -> None:
    """Into the cell that runs now; ``plain`` for those who show no HTML."""
    display: Any = sys.modules["IPython"].display.display
    display({"text/html": markup, "text/plain": plain}, raw=True)


def frame_of_page(page: str, *, title: str, height: int) -> str:
    """With the page inside, so that it is kept in the notebook's file and needs no network."""
    return f'<iframe sandbox="{SANDBOX}" srcdoc="{html.escape(page)}" {_size(title, height)}></iframe>'


def frame_of_address(address: str, *, title: str, height: int) -> str:
    return f'<iframe src="{html.escape(address)}" {_size(title, height)}></iframe>'


def told_above(frame: str, *, link: str, words: str, hint: str) -> str:
    """A frame with a line above it, and what to do where it stays empty: not every notebook can, or may, show one."""
    opening = f'<a href="{html.escape(link)}" target="_blank" rel="noopener noreferrer">{html.escape(words)}</a>'
    return f"<p>{opening if link else html.escape(words)}. <small>{html.escape(hint)}</small></p>{frame}"


def _shell() -> Any:
    """IPython's, if there is one."""
    found: Any = sys.modules.get("IPython")
    return found.get_ipython() if found is not None else None


def _size(title: str, height: int) -> str:
    return f'title="{html.escape(title)}" width="100%" height="{height:d}" style="border: 0"'
