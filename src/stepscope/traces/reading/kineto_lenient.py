"""Events with fields of another type than they should have: each field is read by itself, as far as it makes sense.

Numbers may be quoted or whole numbers written with decimals; what is null is not there; what cannot be read is not
there either, and the event counts as wrong.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec

from stepscope.traces.reading.kineto_events import PHASES, Ignored, NoEvent
from stepscope.traces.reading.scanning import UNREADABLE

__all__ = ["read_leniently"]

FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
STRING = msgspec.json.Decoder(str)
MOST_DIGITS = 300


def read_leniently(text: bytes) -> tuple[Any, bool]:
    """An event, ``NoEvent`` if it is none; and whether something in it was wrong."""
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
    """None: it cannot be read as that."""
    if kind is msgspec.Raw:
        return msgspec.Raw(text)
    kinds = typing.get_args(kind) or (kind,)
    for each in kinds:
        value = READERS[each](text)
        if value is not None:
            return value
    return None


def _number(text: bytes) -> Decimal | None:
    """Quoted or not; None: it is none, or beyond all use."""
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
