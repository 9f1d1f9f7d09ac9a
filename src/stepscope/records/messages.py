"""Text for a terminal: what others wrote made harmless, and lines of our own for the user.

Host names, run names, commands, tracebacks, errors of files: all of it may be somebody else's.  Whatever a terminal
would obey, or would hide, is shown as an escape instead: control characters of both sets (C0 and C1), marks that turn
the direction of writing, characters without a shape, and halves of characters that could not be encoded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["printable", "printable_document", "say"]

TEXT = "\n\t"
"""What a text of several lines may have besides."""


def printable(text: str, *, keep: str = "", mark: str = "") -> str:
    """The text with everything unprintable escaped, or replaced by ``mark``; ``keep``: what is wanted all the same."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else mark or c.encode("unicode_escape").decode() for c in text)


def printable_document(value: Any) -> Any:
    """A document of JSON with all its texts, and its keys, as ``printable``; line ends and tabs stay."""
    if isinstance(value, str):
        return printable(value, keep=TEXT)
    if isinstance(value, Mapping):
        return {printable_document(key): printable_document(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [printable_document(inner) for inner in value]
    return value


def say(message: str) -> None:
    """A line of ours on the error output."""
    print(f"stepscope: {printable(message, keep=TEXT)}", file=sys.stderr, flush=True)
