"""Events of a Kineto (Chrome) trace: cut out of the text, decoded with exact times, repaired where needed.

Only fields that an analysis uses are defined. msgspec fills the classes directly from the bytes, one class per phase
(``ph``), and skips all other fields. It searches for a key starting after the last field found, so fields are in the
order in which Kineto writes them; every additional field costs each event a little. ``ts`` and ``dur`` are
microseconds, whole or with three decimals.

The text comes as pieces of JSON, each an array of events, for files of any size in little memory.

A trace is ``{…header…, "traceEvents": [event, …], …trailer…}``, or the bare array. The text arrives in blocks; each is
cut after its last complete event. The end of an event is guessed from ``}, {`` and proved by decoding: a piece cut
anywhere else is not valid JSON, whatever nesting and strings it contains. A piece that is not valid however it is cut
is scanned event by event and repaired where possible.

Limits apply to text without events (``LONGEST_HEAD``, ``LONGEST_EVENT``), never to the whole file.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from stepscope.errors import TraceError
from stepscope.traces.model.columns import Ints

__all__ = [
    "LATEST_NS",
    "NO_ARGS",
    "UNREADABLE",
    "Args",
    "Begin",
    "End",
    "EventDecoder",
    "EventText",
    "FlowEnd",
    "FlowStart",
    "Instant",
    "Metadata",
    "NoEvent",
    "OldInstant",
    "Piece",
    "Slice",
    "ns_of_text",
    "ns_of_us",
]

# -- repair -----------------------------------------------------------------------------------------------------------
# Almost valid JSON, as some profilers wrote it, made valid. ``nan``, ``inf`` and ``N/A`` occur in place of numbers
# (bandwidths of copies that took no time), Windows paths have single backslashes, and names have raw control
# characters, halves of surrogate pairs or invalid UTF-8. Invalid numbers become null; the rest is kept as far as
# possible.

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
    """Repair the text as far as possible, without a guarantee that it is valid; valid text is unchanged."""
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


# -- scanning event by event ------------------------------------------------------------------------------------------
# For the few pieces that are not valid JSON as a whole: the end of the list, the end of a truncated file, and broken
# events. Events that are almost valid are repaired. Others are left out and counted, up to the next text that looks
# like an event.

UNREADABLE = (ValueError, RecursionError)
"""What decoders raise: errors of msgspec and json and invalid UTF-8 are ValueErrors."""
NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{)")
LAST_BRACE = re.compile(r"\}(?=\s*[,\]])")
"""Possibly the end of an event: another item or the end of the list follows."""
NEXT = re.compile(r"\s*([,\]])?\s*")
PARTS = 16
"""Guesses at where a broken event ends: it may contain ``}, {``."""
NEAR_END = 16
"""Characters: longer than any JSON word or escape that may be cut off."""
MENDABLE = 1 << 20
"""Longer events are not worth the time."""


@dataclass(kw_only=True)
class Scan:
    events: list[bytes] = field(default_factory=list)
    """JSON objects, as far as the standard library can tell."""
    rest: bytes = b""
    """The text after them: the start of the next event, or the trailer."""
    ended: bool = False
    """The list's closing bracket was found."""
    lost: int = 0
    mended: int = 0
    cut: bool = False
    """The last text ends inside an event."""


def scan(text: bytes, *, last: bool, most_lost: int) -> Scan:
    """Scan a text; ``last``: it is the end of the file, ``most_lost``: give up after this many lost events."""
    letters = text.decode("latin-1")  # one character per byte, so that positions match
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
    """Return the end of the value that starts at ``at``, or 0 and whether more text could not help."""
    try:
        return VALUES.raw_decode(letters, at)[1], True
    except json.JSONDecodeError as error:
        return 0, error.pos < len(letters) - NEAR_END and not error.msg.startswith("Unterminated string")
    except UNREADABLE:
        return 0, True


def _mended_at(text: bytes, letters: str, at: int) -> tuple[bytes, int, int]:
    """Repair the event at ``at``; return it, its end (0 if it failed) and the number of guesses."""
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
    raise ValueError("NaN and Infinity are not valid JSON")


VALUES = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_no_number, object_pairs_hook=len)
"""Only finds where a value ends; the values are discarded."""


# -- pieces of text ---------------------------------------------------------------------------------------------------

Events = TypeVar("Events")

BOM = b"\xef\xbb\xbf"
HEAD = re.compile(rb'"traceEvents"\s*:\s*\[')
VISIBLE = re.compile(rb"\S")
BARE = re.compile(rb"\s*\[\s*(?:(?=[{\]])|\Z)")
BETWEEN = re.compile(rb"\}\s*,\s*\{")
NO_EVENTS = re.compile(rb"\s*\]")
LONGEST_HEAD = 64 << 20
"""A file without events up to here is not a trace; a longer trailer is not read to its end."""
LONGEST_EVENT = 16 << 20
HEADS = 16
"""Number of ``traceEvents`` keys tried to find the one at the top level."""
CUTS = 3
"""Guesses at where the last event of a block ends, before all its events are scanned."""
LOST = 1000
"""Unreadable events after which the rest of the file is ignored."""


class EventText(Generic[Events]):
    """An iterator of decoded pieces; the other attributes (``header``, ``truncated`` …) are complete afterwards."""

    def __init__(self, blocks: Iterable[bytes], decode: Callable[[bytes], Events]) -> None:
        """``decode`` takes a JSON array and raises one of ``UNREADABLE`` if it is not valid."""
        self._blocks = iter(blocks)
        self._decode = decode
        self.header: dict[str, Any] = {}
        """The top-level fields besides the events."""
        self.truncated: str | None = None
        self.lost = 0
        """Events that are not valid JSON."""
        self.mended = 0
        """Invalid events, or pieces with invalid UTF-8, that were repaired."""
        self._before: bytes | None = None
        """The text before the list; None for a bare list."""
        self._ended = False
        self._heads = 0
        self._wait = 0
        """Minimum length of the text before scanning it again is worthwhile."""
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
        """Return the text after the list's opening bracket; store the text before it as part of the header."""
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
                raise TraceError("is HTML, not a trace" if start == b"<" else "is not JSON")
            else:
                blank += len(text)
                text.clear()
            if len(text) + blank > LONGEST_HEAD or self._heads > HEADS:
                break
        head = HEAD.search(text)
        if head:
            # The text before it is broken beyond repair, or the list is nested: use its events anyway.
            self._before = b"{"
            return bytes(text[head.end() :])
        raise TraceError(_no_events(text, blank))

    def _own_head(self, text: bytearray, start: int) -> re.Match[bytes] | None:
        """Find the key at the top level of the document, not a nested one."""
        for head in HEAD.finditer(text, start):
            self._heads += 1
            if self._heads > HEADS:
                break
            if _document(bytes(text[: head.start()]), b"}") is not None:
                return head
        return None

    def _complete(self, rest: bytes, block: bytes) -> tuple[Events | None, bytes]:
        """Return the complete events of a block and of the rest before it, and the new rest."""
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
            self.truncated = f"{LONGEST_EVENT >> 20} MiB of it contain no complete event"
        return piece, text

    def _scanned(self, text: bytes, *, last: bool) -> tuple[Events | None, bytes]:
        found = scan(text, last=last, most_lost=LOST - self.lost)
        self.lost += found.lost
        self.mended += found.mended
        self._ended = found.ended
        if found.cut:
            self.truncated = "it ends in the middle of an event"
        elif self.lost > LOST:
            self.truncated = f"more than {LOST} of its events are not valid JSON"
        elif last and not found.ended and self._before is not None:
            self.truncated = "its event list is not closed"
        piece = self._try(b",".join(found.events)) if found.events else None
        if piece is None and found.events:
            piece = self._try(b",".join(filter(None, map(self._readable, found.events))))
        return piece, found.rest

    def _readable(self, event: bytes) -> bytes | None:
        """Return an event that the standard library can read if the decoder can read it too, repaired if needed."""
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
        """Decode header and trailer together, as the document without its events."""
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
    """Find the last ``}, {`` whose brace is before ``end``."""
    while (end := text.rfind(b"}", 0, end)) >= 0:
        between = BETWEEN.match(text, end)
        if between is not None:
            return between
    return None


def _document(before: bytes, after: bytes) -> dict[str, Any] | None:
    """Decode the document with an empty list of events, repaired if needed."""
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
        return "is empty" if not blank else "contains only whitespace"
    if BARE.match(text):
        return "is cut off before its first event"
    where = f"in its first {LONGEST_HEAD >> 20} MiB" if len(text) + blank > LONGEST_HEAD else "in it"
    return f"is not a trace: there is no list of traceEvents {where}"


# -- event classes ----------------------------------------------------------------------------------------------------

Number = int | float
MISSING: Final = float("nan")


class Args(msgspec.Struct, gc=False, frozen=True):
    """Arguments of slices of all kinds: separating the kinds first would cost more than it saves."""

    external: int = msgspec.field(name="External id", default=-1)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=-1)
    device: int = -1
    stream: int = -1
    correlation: int = -1
    external_old: int = msgspec.field(name="external id", default=-1)
    bytes: int = -1
    blocks_per_sm: Number | None = msgspec.field(name="blocks per SM", default=None)
    warps_per_sm: Number | None = msgspec.field(name="warps per SM", default=None)
    occupancy: Number | None = msgspec.field(name="est. achieved occupancy %", default=None)
    registers: int = msgspec.field(name="registers per thread", default=-1)
    shared_bytes: int = msgspec.field(name="shared memory", default=-1)
    graph: int = msgspec.field(name="graph id", default=-1)
    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    stack: str = msgspec.field(name="Call stack", default="")
    module: str = msgspec.field(name="Module Hierarchy", default="")
    python_parent: int | None = msgspec.field(name="Python parent id", default=None)
    python: int = msgspec.field(name="Python id", default=-1)
    python_module: int | None = msgspec.field(name="Python module id", default=None)
    on_stream: int = msgspec.field(name="wait_on_stream", default=-1)
    record_correlation: int = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)
    collective: str = msgspec.field(name="Collective name", default="")
    in_elements: int = msgspec.field(name="In msg nelems", default=-1)
    out_elements: int = msgspec.field(name="Out msg nelems", default=-1)
    group_size: int = msgspec.field(name="Group size", default=-1)
    dtype: str = ""
    group: str = msgspec.field(name="Process Group Name", default="")
    description: str = msgspec.field(name="Process Group Description", default="")
    ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=msgspec.Raw())
    seq: int = msgspec.field(name="Seq", default=-1)


class MemoryArgs(msgspec.Struct, gc=False, frozen=True):
    device_type: int = msgspec.field(name="Device Type", default=-1)
    device: int = msgspec.field(name="Device Id", default=-1)
    address: int = msgspec.field(name="Addr", default=-1)
    bytes: int = msgspec.field(name="Bytes", default=0)
    allocated: int = msgspec.field(name="Total Allocated", default=-1)
    reserved: int = msgspec.field(name="Total Reserved", default=-1)


class NamedArgs(msgspec.Struct, gc=False, frozen=True):
    name: str = ""


NO_ARGS: Final = Args()


class Slice(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    cat: str | None = None
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    dur: float = 0.0
    args: Args = NO_ARGS


class Begin(msgspec.Struct, gc=False, tag_field="ph", tag="B"):
    cat: str | None = None
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    args: Args = NO_ARGS


class End(msgspec.Struct, gc=False, tag_field="ph", tag="E"):
    """Ends the innermost open range of its thread."""

    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    args: Args = NO_ARGS


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    args: MemoryArgs = MemoryArgs()


class OldInstant(Instant, gc=False, tag_field="ph", tag="I"):
    """Chrome's former tag for instants."""


class FlowStart(msgspec.Struct, gc=False, tag_field="ph", tag="s"):
    id: int | str | None = None
    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    cat: str | None = None


class FlowEnd(FlowStart, gc=False, tag_field="ph", tag="f"):
    pass


class Metadata(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    args: NamedArgs = NamedArgs()


class Ignored(msgspec.Struct, gc=False, tag_field="ph", tag="C"):
    """Counters, asynchronous ranges, flow steps and all other Chrome events."""


class NoEvent(msgspec.Struct, gc=False):
    """A list item without a phase."""


OTHER_PHASES: Final = "bneSTpFtPNODRcVv(),"
NAMED: Final[tuple[Any, ...]] = (Slice, Begin, End, Instant, OldInstant, FlowStart, FlowEnd, Metadata)
PHASES: Final[dict[str, Any]] = {
    phase: msgspec.defstruct(f"Ignored{ord(phase)}", [], bases=(Ignored,), gc=False, tag_field="ph", tag=phase)
    for phase in OTHER_PHASES
} | {each.__struct_config__.tag: each for each in NAMED}
"""The classes by phase."""
EVENT: Final[Any] = functools.reduce(operator.or_, PHASES.values(), Ignored)


# -- lenient decoding -------------------------------------------------------------------------------------------------
# Events with fields of an unexpected type: each field is read separately, as far as it makes sense. Numbers may be
# quoted, and integers may have decimals. Null counts as missing. An unreadable field also counts as missing, and the
# event is counted as wrong.

FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
STRING = msgspec.json.Decoder(str)
MOST_DIGITS = 300


def read_leniently(text: bytes) -> tuple[Any, bool]:
    """Decode an event (``NoEvent`` if it is not one); also return whether something in it was wrong."""
    try:
        fields = FIELDS.decode(text)
        phase = _string(bytes(fields.get("ph", b'""')))
    except UNREADABLE:
        return NoEvent(), True
    if not phase:
        return NoEvent(), bool(fields)
    if phase not in PHASES:
        return Ignored(), False
    return _filled(PHASES[phase], fields)


_fields_of = functools.cache(msgspec.structs.fields)
"""Evaluating the annotations of a class takes 3 ms."""


def _filled(kind: Any, fields: dict[str, msgspec.Raw]) -> tuple[Any, bool]:
    values, wrong = {}, False
    for each in _fields_of(kind):
        text = bytes(fields.get(each.encode_name, b"null"))
        if text == b"null":
            continue
        if isinstance(each.type, type) and issubclass(each.type, msgspec.Struct):
            try:
                values[each.name], inner = _filled(each.type, FIELDS.decode(text))
            except UNREADABLE:
                inner = True
            wrong |= inner
            continue
        value = _value(each.type, text)
        if value is None:
            wrong = True
        else:
            values[each.name] = value
    return kind(**values), wrong


def _value(kind: Any, text: bytes) -> Any:
    """Convert to the given type; None if that is impossible."""
    if kind is msgspec.Raw:
        return msgspec.Raw(text)
    kinds = typing.get_args(kind) or (kind,)
    for each in kinds:
        value = READERS[each](text)
        if value is not None:
            return value
    return None


def _number(text: bytes) -> Decimal | None:
    """Parse a number, quoted or not; None if it is not a number or far out of range."""
    try:
        number = Decimal(_string(text) if text.startswith(b'"') else text.decode())
    except (ArithmeticError, *UNREADABLE):
        return None
    return number if number.is_finite() and abs(number.adjusted()) < MOST_DIGITS else None


def _whole(text: bytes) -> int | None:
    number = _number(text)
    return int(number) if number is not None and number == int(number) else None


def _real(text: bytes) -> float | None:
    number = _number(text)
    return None if number is None else float(number)


def _string(text: bytes) -> str:
    return STRING.decode(text)


def _words(text: bytes) -> str | None:
    try:
        return _string(text)
    except UNREADABLE:
        return None


READERS: dict[Any, Callable[[bytes], Any]] = {
    int: _whole,
    float: _real,
    str: _words,
    type(None): lambda _: None,
}


# -- exact times ------------------------------------------------------------------------------------------------------
# Times become integer nanoseconds, exactly as in the text. A double represents microseconds with three decimals up to
# 2⁴³ (a clock since boot). Larger ones with decimals (since 1970) are parsed again, as text.

EXACT_US: Final = 2.0**43
LATEST_NS: Final = 2**61
"""Distance from 0 in both directions, so that sums and differences fit in 64 bits; since 1970 it is the year 2043."""
NOWHERE: Final = LATEST_NS + 1


class OnlyTime(msgspec.Struct, gc=False):
    ts: msgspec.Raw = msgspec.Raw()


class EventDecoder:
    def __init__(self) -> None:
        self.wrong = 0
        """Events with an unreadable field."""
        self._typed = msgspec.json.Decoder(list[EVENT])
        self._each = msgspec.json.Decoder(list[msgspec.Raw])
        self._times = msgspec.json.Decoder(list[OnlyTime])

    def __call__(self, text: bytes) -> Piece:
        """Decode a JSON array; raise one of ``UNREADABLE`` if the text is not one."""
        try:
            return Piece(self, text, self._typed.decode(text))
        except msgspec.ValidationError:
            read = [read_leniently(bytes(raw)) for raw in self._each.decode(text)]
        self.wrong += sum(wrong for _, wrong in read)
        return Piece(self, text, [event for event, _ in read])

    def literal_times(self, text: bytes) -> list[bytes]:
        """Return the literal ``ts`` of every event; empty if missing."""
        try:
            return [bytes(event.ts) for event in self._times.decode(text)]
        except msgspec.ValidationError:
            return [self._literal_time(raw) for raw in self._each.decode(text)]

    def _literal_time(self, event: msgspec.Raw) -> bytes:
        try:
            return bytes(msgspec.json.decode(event, type=OnlyTime).ts)
        except UNREADABLE:
            return b""


class Piece:
    def __init__(self, decoder: EventDecoder, text: bytes, events: list[Any]) -> None:
        self.events = events
        self.size = len(text)
        self._decoder = decoder
        self._text = text
        self._in_ns = False
        """Whether ``ts`` of the events is already in nanoseconds."""

    def placed(self, events: Sequence[Any]) -> tuple[Sequence[Any], Ints]:
        """Return those of the given events that have a usable time, and their start times."""
        if not events:
            return events, np.empty(0, np.int64)
        times_ns = self._times_ns(events)
        if times_ns is None:
            self._read_exactly()
            times_ns = self._times_ns(events)
            assert times_ns is not None  # times are in nanoseconds now
        there = np.abs(times_ns) <= LATEST_NS
        if not there.all():
            return [event for event, ok in zip(events, there.tolist(), strict=True) if ok], times_ns[there]
        return events, times_ns

    def _times_ns(self, events: Sequence[Any]) -> Ints | None:
        """Convert the times; None if doubles are not exact enough."""
        values = [event.ts for event in events]
        if self._in_ns:
            return np.fromiter(values, np.int64, len(values))
        if set(map(type, values)) == {int}:
            try:
                whole = np.fromiter(values, np.int64, len(values))
            except OverflowError:
                return None
            return whole * 1000 if max(int(whole.max()), -int(whole.min())) <= LATEST_NS // 1000 else None
        try:
            times_us = np.array(values, np.float64)
        except OverflowError:
            return None
        missing = np.isnan(times_us)
        times_us[missing] = 0
        if np.abs(times_us).max() >= EXACT_US:
            return None
        times_ns = ns_of_us(times_us)
        times_ns[missing] = NOWHERE
        return times_ns

    def _read_exactly(self) -> None:
        for event, literal in zip(self.events, self._decoder.literal_times(self._text), strict=True):
            if hasattr(event, "ts"):
                event.ts = ns_of_text(literal)
        self._in_ns = True


def ns_of_us(values: Any) -> Ints:
    """Convert microseconds with at most three decimals to nanoseconds; whole and decimals separately, to be exact."""
    whole = np.floor(values)
    return np.asarray(whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64), np.int64)


def ns_of_text(text: bytes) -> int:
    """Convert literal microseconds, possibly quoted; ``NOWHERE`` if they are not a time."""
    text = text.strip(b'"')
    whole, _, decimals = text.partition(b".")
    if len(decimals) == 3 and decimals.isdigit() and len(whole) < 20:
        try:
            return _limited(int(whole + decimals))
        except ValueError:
            return NOWHERE
    try:
        number = Decimal(text.decode())
        if not number.is_finite() or abs(number) > LATEST_NS:
            return NOWHERE
        return _limited(int(number.scaleb(3).to_integral_value()))
    except (ArithmeticError, ValueError):
        return NOWHERE


def _limited(time_ns: int) -> int:
    return time_ns if abs(time_ns) <= LATEST_NS else NOWHERE
