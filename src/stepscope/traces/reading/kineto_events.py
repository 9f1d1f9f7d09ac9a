"""Events of a Kineto (Chrome) trace: their fields, decoding with exact times, and events with fields of a wrong type.

Only fields that an analysis uses are defined. msgspec fills the classes directly from the bytes, one class per phase
(``ph``), and skips all other fields. It searches for a key starting after the last field found, so fields are in the
order in which Kineto writes them; every additional field costs each event a little. ``ts`` and ``dur`` are
microseconds, whole or with three decimals.
"""

from __future__ import annotations

import functools
import operator
import typing
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
import numpy as np

from stepscope.traces.model.columns import Ints
from stepscope.traces.reading.event_text import UNREADABLE

__all__ = [
    "LATEST_NS",
    "NO_ARGS",
    "Args",
    "Begin",
    "End",
    "EventDecoder",
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


def _filled(kind: Any, fields: dict[str, msgspec.Raw]) -> tuple[Any, bool]:
    values, wrong = {}, False
    for field in msgspec.structs.fields(kind):
        text = bytes(fields.get(field.encode_name, b"null"))
        if text == b"null":
            continue
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            try:
                values[field.name], inner = _filled(field.type, FIELDS.decode(text))
            except UNREADABLE:
                inner = True
            wrong |= inner
            continue
        value = _value(field.type, text)
        if value is None:
            wrong = True
        else:
            values[field.name] = value
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
            return whole * 1000 if max(whole.max(), -whole.min()) <= LATEST_NS // 1000 else None
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
