"""A piece of text → its events, with times in integer nanoseconds, exactly as the text has them.

A double tells microseconds with three decimals apart up to 2⁴³ (a clock that counts from boot).  Larger ones with
decimals (since 1970) are read once more, as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
import numpy as np

from stepscope.traces.model.columns import Ints
from stepscope.traces.reading.kineto_events import EVENT
from stepscope.traces.reading.kineto_lenient import read_leniently
from stepscope.traces.reading.scanning import UNREADABLE

__all__ = ["LATEST_NS", "EventDecoder", "Piece", "ns_of_text", "ns_of_us"]

EXACT_US: Final = 2.0**43
LATEST_NS: Final = 2**61
"""Either way from 0: so that differences and sums of times stay in 64 bits; since 1970 it is the year 2043."""
NOWHERE: Final = LATEST_NS + 1


class OnlyTime(msgspec.Struct, gc=False):
    ts: msgspec.Raw = msgspec.Raw()


class EventDecoder:
    def __init__(self) -> None:
        self.wrong = 0
        """Events with a field that cannot be read."""
        self._typed = msgspec.json.Decoder(list[EVENT])
        self._each = msgspec.json.Decoder(list[msgspec.Raw])
        self._times = msgspec.json.Decoder(list[OnlyTime])

    def __call__(self, text: bytes) -> Piece:
        """Raises one of ``UNREADABLE`` where the text is no JSON array."""
        try:
            return Piece(self, text, self._typed.decode(text))
        except msgspec.ValidationError:
            read = [read_leniently(bytes(raw)) for raw in self._each.decode(text)]
        self.wrong += sum(wrong for _, wrong in read)
        return Piece(self, text, [event for event, _ in read])

    def literal_times(self, text: bytes) -> list[bytes]:
        """``ts`` of every event as it stands there; empty: it has none."""
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
        """Whether ``ts`` of the events is in nanoseconds already."""

    def placed(self, events: Sequence[Any]) -> tuple[Sequence[Any], Ints]:
        """Some of its events, without those that say no usable time, and when they began."""
        if not events:
            return events, np.empty(0, np.int64)
        times_ns = self._times_ns(events)
        if times_ns is None:
            self._read_exactly()
            times_ns = self._times_ns(events)
            assert times_ns is not None  # it is in nanoseconds now
        there = np.abs(times_ns) <= LATEST_NS
        if not there.all():
            return [event for event, ok in zip(events, there.tolist(), strict=True) if ok], times_ns[there]
        return events, times_ns

    def _times_ns(self, events: Sequence[Any]) -> Ints | None:
        """None: a double does not tell them."""
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
    """Microseconds with at most three decimals → nanoseconds: whole and decimals apart, so that nothing is lost."""
    whole = np.floor(values)
    return np.asarray(whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64), np.int64)


def ns_of_text(text: bytes) -> int:
    """Of microseconds as they stand in the file, perhaps quoted; ``NOWHERE``: they are no time."""
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
