"""The events of a Chrome trace as pieces of JSON text; broken pieces are scanned and repaired.

The events of a Chrome trace as pieces of text, each a JSON array: a file of any size in little memory.

A trace is ``{…header…, "traceEvents": [event, …], …trailer…}``, or the bare array.  The text arrives in blocks; each is
cut after the last event that is complete in it.  Where an event ends is guessed by ``}, {`` and proved by decoding: a
piece that was cut anywhere else is no valid JSON, whatever the nesting and the strings in it.  A piece that is none
however it is cut is looked at event by event (``scanning.py``).

Limits are on what stands without an event (``LONGEST_HEAD``, ``LONGEST_EVENT``), never on the whole.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from stepscope.errors import TraceError

__all__ = ["UNREADABLE", "EventText"]


# -- mending ----------------------------------------------------------------------------------------------------------
# JSON that is almost right, as profilers wrote it at times, made right.
#
# ``nan``, ``inf`` and ``N/A`` stand where a number should (bandwidths of copies that took no time), Windows paths have
# single backslashes, names have raw control characters, halves of surrogate pairs or bytes that are no UTF-8.  Numbers
# that are none become null; the rest is kept as far as it can be told.

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


# -- scanning ---------------------------------------------------------------------------------------------------------
# A piece of a list of events, looked at event by event: for the few pieces that are no valid JSON as a whole.
#
# That is where the list ends, where a file is cut off, and where an event is broken.  Events that are all but valid are
# mended (``mending.py``); those that cannot be are left out and counted, up to the next thing that looks like an event.

UNREADABLE = (ValueError, RecursionError)
"""What decoders raise: msgspec's and json's errors and wrong UTF-8 are ValueErrors."""
NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{)")
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
                following = NEXT_EVENT.search(letters, at)
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


# -- text -------------------------------------------------------------------------------------------------------------

Events = TypeVar("Events")

BOM = b"\xef\xbb\xbf"
HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
VISIBLE = re.compile(rb"\S")
BARE = re.compile(rb"\s*\[\s*(?:(?=[{\]])|\Z)")
BETWEEN = re.compile(rb"\}\s*,\s*\{")
NO_EVENTS = re.compile(rb"\s*\]")
LONGEST_HEAD = 64 << 20
"""Without events until there, the file is none of ours; of a trailer that is longer the rest is not read."""
LONGEST_EVENT = 16 << 20
HEADS = 16
"""Keys named ``traceEvents`` that are looked at to find the one that is not inside of something."""
CUTS = 3
"""Guesses at where the last event of a block ends, before all events are looked at."""
LOST = 1000
"""Events that cannot be read: with more of them the rest is not looked at."""


class EventText(Generic[Events]):
    """Iterating gives decoded pieces; afterwards the rest is known: ``header``, ``truncated`` …"""

    def __init__(self, blocks: Iterable[bytes], decode: Callable[[bytes], Events]) -> None:
        """``decode`` takes a JSON array and raises one of ``UNREADABLE`` where it is none."""
        self._blocks = iter(blocks)
        self._decode = decode
        self.header: dict[str, Any] = {}
        """What stands beside the events."""
        self.truncated: str | None = None
        self.lost = 0
        """Events that are no valid JSON."""
        self.mended = 0
        """Events, or pieces with bytes that are no text, that were none but could be mended."""
        self._before: bytes | None = None
        """None: of a bare list."""
        self._ended = False
        self._heads = 0
        self._wait = 0
        """How long the text must be before it is worth another look."""
        self._barren = 0
        """Bytes since the last event."""

    def __iter__(self) -> Iterator[Events]:
        first, rest = self._to_first_event(), b""
        for block in itertools.chain((first,), self._blocks):
            piece, rest = self._complete(rest, block)
            if piece is not None:
                yield piece
            if self._ended or self.truncated:
                break
        else:
            piece, rest = self._scanned(rest, last=True)
            if piece is not None:
                yield piece
        self._close(rest)

    def _to_first_event(self) -> bytes:
        """What follows the list's bracket; what stands before is kept as the header's part."""
        text, searched, blank = bytearray(), 0, 0
        for block in self._blocks:
            text += block
            if len(text) < len(BOM) and BOM.startswith(text):
                continue
            if text.startswith(BOM):
                del text[: len(BOM)]
            first = VISIBLE.search(text)
            start = first.group() if first else b""
            if start == b"[":
                bare = BARE.match(text)
                if bare is None:
                    raise TraceError("is a JSON list, but not of events")
                if bare.end() < len(text):
                    return bytes(text[bare.end() :])
            elif start == b"{":
                head = self._own_head(text, max(0, searched - 64))
                if head is not None:
                    self._before = bytes(text[: head.start()])
                    return bytes(text[head.end() :])
                searched = len(text)
            elif start:
                raise TraceError("is HTML, not a trace" if start == b"<" else "is no JSON, let alone a trace")
            else:
                blank += len(text)
                text.clear()
            if len(text) + blank > LONGEST_HEAD or self._heads > HEADS:
                break
        head = HEAD.search(text)
        if head:
            # What stands before is broken beyond mending, or the list is inside of something: events are events.
            self._before = b"{"
            return bytes(text[head.end() :])
        raise TraceError(_no_events(text, blank))

    def _own_head(self, text: bytearray, start: int) -> re.Match[bytes] | None:
        """The key that is the document's own, not one of something inside it."""
        for head in HEAD.finditer(text, start):
            self._heads += 1
            if self._heads > HEADS:
                break
            if _document(bytes(text[: head.start()]), b"}") is not None:
                return head
        return None

    def _complete(self, rest: bytes, block: bytes) -> tuple[Events | None, bytes]:
        """The complete events of a block, with the rest of what came before it, and what is left now."""
        if len(rest) + len(block) < self._wait:
            self._barren += len(block)
            return None, rest + block
        end = len(block)
        for _ in range(CUTS):
            between = _last_between(block, end)
            if between is None:
                break
            end = between.start()
            piece = self._try(rest, memoryview(block)[: end + 1])
            if piece is not None:
                self._wait = self._barren = 0
                return piece, block[between.end() - 1 :]
        text = rest + block
        self._barren += len(block)
        piece, text = self._scanned(text, last=False)
        self._wait = 0 if piece is not None else 2 * len(text)
        self._barren = len(text) if piece is not None else self._barren
        if self._barren > LONGEST_EVENT and not self._ended:
            self.truncated = f"{LONGEST_EVENT >> 20} MiB of it hold no complete event"
        return piece, text

    def _scanned(self, text: bytes, *, last: bool) -> tuple[Events | None, bytes]:
        found = scan(text, last=last, most_lost=LOST - self.lost)
        self.lost += found.lost
        self.mended += found.mended
        self._ended = found.ended
        if found.cut:
            self.truncated = "it ends in the middle of an event"
        elif self.lost > LOST:
            self.truncated = f"more than {LOST} of its events are no valid JSON"
        elif last and not found.ended and self._before is not None:
            self.truncated = "its list of events does not end"
        piece = self._try(b",".join(found.events)) if found.events else None
        if piece is None and found.events:
            piece = self._try(b",".join(filter(None, map(self._readable, found.events))))
        return piece, found.rest

    def _readable(self, event: bytes) -> bytes | None:
        """An event that the standard library can read, if the decoder can, too."""
        if self._try(event) is not None:
            return event
        if self._try(whole := mended(event)) is not None:
            self.mended += 1
            return whole
        self.lost += 1
        return None

    def _try(self, *parts: bytes | memoryview) -> Events | None:
        text = b"".join((b"[", *parts, b"]"))
        try:
            return self._decode(text)
        except UnicodeDecodeError:
            pass
        except UNREADABLE:
            return None
        try:
            piece = self._decode(text.decode("utf-8", "replace").encode())
        except UNREADABLE:
            return None
        self.mended += 1
        return piece

    def _close(self, text: bytes) -> None:
        """Header and trailer together are the document without its events."""
        if self._before is None:
            return
        after = bytearray(text if self._ended else b"}")
        if self._ended:
            for block in self._blocks:
                after += block
                if len(after) > LONGEST_HEAD:
                    break
        header = _document(self._before, bytes(after))
        if header is None:
            self.truncated = self.truncated or "it ends in the middle of what follows its events"
            header = _document(self._before, b"}")
        self.header = header or {}


def _last_between(text: bytes, end: int) -> re.Match[bytes] | None:
    """The last ``}, {`` whose brace stands before ``end``."""
    while (end := text.rfind(b"}", 0, end)) >= 0:
        between = BETWEEN.match(text, end)
        if between is not None:
            return between
    return None


def _document(before: bytes, after: bytes) -> dict[str, Any] | None:
    """The document with an empty list of events, mended if it must be."""
    text = before + b'"traceEvents":[]' + after
    document = _decoded(text)
    if document is None and len(text) < MENDABLE:
        document = _decoded(mended(text))
    return document if isinstance(document, dict) else None


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return None


def _no_events(text: bytearray, blank: int) -> str:
    if not text:
        return "is empty" if not blank else "has nothing but blanks in it"
    if BARE.match(text):
        return "is cut off before its first event"
    where = f"in its first {LONGEST_HEAD >> 20} MiB" if len(text) + blank > LONGEST_HEAD else "in it"
    return f"is no trace: there is no list of traceEvents {where}"
