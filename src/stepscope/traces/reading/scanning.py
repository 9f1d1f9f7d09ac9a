"""A piece of a list of events, looked at event by event: for the few pieces that are no valid JSON as a whole.

That is where the list ends, where a file is cut off, and where an event is broken.  Events that are all but valid are
mended (``mending.py``); those that cannot be are left out and counted, up to the next thing that looks like an event.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from stepscope.traces.reading.mending import mended

__all__ = ["MENDABLE", "UNREADABLE", "Scan", "scan"]

UNREADABLE = (ValueError, RecursionError)
"""What decoders raise: msgspec's and json's errors and wrong UTF-8 are ValueErrors."""
BETWEEN = re.compile(r"\}\s*,\s*(?=\{)")
LAST_BRACE = re.compile(r"\}(?=\s*[,\]])")
"""Of an event, perhaps: something else or the list's end follows."""
NEXT = re.compile(r"\s*([,\]])?\s*")
PARTS = 16
"""Guesses at where a broken event ends: it may have ``}, {`` inside."""
NEAR_END = 16
"""Letters: longer than any word of JSON, or an escape, that may be cut off."""
MENDABLE = 1 << 20
"""Longer ones are not worth the time."""


@dataclass(kw_only=True)
class Scan:
    events: list[bytes] = field(default_factory=list)
    """JSON objects, as far as the standard library can tell."""
    rest: bytes = b""
    """What comes after them: the start of the next event, or the trailer."""
    ended: bool = False
    """The list's closing bracket was found."""
    lost: int = 0
    mended: int = 0
    cut: bool = False
    """The last text ends inside of an event."""


def scan(text: bytes, *, last: bool, most_lost: int) -> Scan:
    """``last``: nothing follows this text, so that what is not complete will never be; ``most_lost``: then give up."""
    letters = text.decode("latin-1")  # one letter per byte, so that positions are those of the bytes
    out = Scan()
    at = len(letters) - len(letters.lstrip())
    while at < len(letters) and out.lost <= most_lost:
        if letters[at] == "]":
            at, out.ended = at + 1, True
            break
        end, complete = _end_of(letters, at)
        event = text[at:end] if end else b""
        if not end and (complete or last):
            event, end, guesses = _mended_at(text, letters, at)
            out.mended += bool(end)
            if not end and (last or guesses == PARTS):
                out.lost += 1
                following = BETWEEN.search(letters, at)
                out.cut = following is None
                at = following.end() if following else len(letters)
                continue
        then = NEXT.match(letters, end)
        if not end or then is None or (then.end() == len(letters) and then[1] != "]" and not last):
            break
        if event.startswith(b"{"):
            out.events.append(event)
        else:
            out.lost += 1
        at, out.ended = then.end(), then[1] == "]"
        if out.ended:
            break
    if out.cut:
        out.lost -= 1
    out.rest = text[at:]
    return out


def _end_of(letters: str, at: int) -> tuple[int, bool]:
    """Where the value ends that starts there, 0: nowhere; and if so, whether more text could not help."""
    try:
        return VALUES.raw_decode(letters, at)[1], True
    except json.JSONDecodeError as error:
        return 0, error.pos < len(letters) - NEAR_END and not error.msg.startswith("Unterminated string")
    except UNREADABLE:
        return 0, True


def _mended_at(text: bytes, letters: str, at: int) -> tuple[bytes, int, int]:
    """An event that can be mended and where it ended, 0: there is none; and how many guesses that took."""
    guesses = 0
    for brace in LAST_BRACE.finditer(letters, at):
        if guesses == PARTS or brace.end() - at > MENDABLE:
            return b"", 0, PARTS
        guesses += 1
        event = mended(text[at : brace.end()])
        end, _ = _end_of(event.decode("latin-1"), 0)
        if end and not event[end:].strip():
            return event, brace.end(), guesses
    return b"", 0, guesses


def _no_number(_: str) -> Any:
    raise ValueError("NaN and Infinity are no JSON")


VALUES = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_no_number, object_pairs_hook=len)
"""Only where a value ends is asked of it: nothing of it is worth keeping."""
