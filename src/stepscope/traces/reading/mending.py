"""JSON that is almost right, as profilers wrote it at times, made right.

``nan``, ``inf`` and ``N/A`` stand where a number should (bandwidths of copies that took no time), Windows paths have
single backslashes, names have raw control characters, halves of surrogate pairs or bytes that are no UTF-8.  Numbers
that are none become null; the rest is kept as far as it can be told.
"""

from __future__ import annotations

import re

__all__ = ["mended"]

TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[^\s"\[\]{},:]+', re.DOTALL)
"""A string, or a word outside of strings."""
FINE = re.compile(rb"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
CONTROL = re.compile(rb"[\x00-\x1f]")
ESCAPE = re.compile(
    rb"\\(?:(?P<whole>u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|[\"\\/bfnrt])"
    rb"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|(?P<code>u[0-9a-fA-F]{4}))?"
)
UNKNOWN = rb"\ufffd"


def mended(text: bytes) -> bytes:
    """Not surely valid, but more so than before; what was valid stays as it is."""
    return TOKEN.sub(_token, text.decode("utf-8", "replace").encode())


def _token(match: re.Match[bytes]) -> bytes:
    token = match.group()
    if not token.startswith(b'"'):
        return token if FINE.fullmatch(token) else b"null"
    if CONTROL.search(token):
        token = CONTROL.sub(lambda raw: b"\\u%04x" % raw.group()[0], token)
    return ESCAPE.sub(_escape, token) if b"\\" in token else token


def _escape(match: re.Match[bytes]) -> bytes:
    if match["half"]:
        return UNKNOWN
    return match.group() if match["whole"] or match["code"] else rb"\\"
