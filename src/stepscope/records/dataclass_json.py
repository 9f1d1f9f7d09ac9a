"""Frozen dataclasses as plain JSON values and back, checking each field against its annotation.

A field may be ``int``, ``float``, ``bool``, ``str``, a ``Literal``, ``X | None``, ``tuple[X, ...]``, another such
dataclass, or ``dict[str, Any]`` (any JSON whose numbers every reader can represent).
"""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["decoded", "encoded"]

T = TypeVar("T")

_LARGEST = (1 << 63) - 1
_HIDDEN = dict.fromkeys([*range(32), *range(127, 160)], " ")
"""Control characters: displayed text must not control the terminal."""
_KNOWN: dict[type, dict[str, tuple[Any, bool]]] = {}
"""Evaluated annotations: they are text at first, and evaluating them takes long for a thousand ranks."""


def encoded(value: Any) -> Any:
    """A dataclass as a dict, a tuple as a list, recursively."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [encoded(element) for element in value]
    return {key: encoded(element) for key, element in value.items()} if isinstance(value, dict) else value


def decoded(kind: type[T], raw: object) -> T:
    """Build a ``kind`` from ``raw``; ValueError if it is not one.  Unknown keys are ignored."""
    if not isinstance(raw, dict):
        raise ValueError(f"not a {kind.__name__}")  # noqa: TRY004  # like every other error in the data
    values = {}
    for name, (hint, needed) in _fields(kind).items():
        if name in raw:
            values[name] = _value(hint, raw[name], name)
        elif needed:
            raise ValueError(f"a {kind.__name__} without {name}")
    return kind(**values)


def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """The type of each field, and whether it is required."""
    if kind not in _KNOWN:
        hints = get_type_hints(kind)
        needed = {field.name: field.default is MISSING and field.default_factory is MISSING for field in fields(kind)}
        _KNOWN[kind] = {name: (hints[name], must) for name, must in needed.items()}
    return _KNOWN[kind]


def _value(hint: Any, raw: Any, name: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = next(argument for argument in get_args(hint) if argument is not type(None))
        return None if raw is None else _value(inner, raw, name)
    if origin is tuple and isinstance(raw, list):
        return tuple(_value(get_args(hint)[0], element, name) for element in raw)
    if origin is Literal and isinstance(raw, str) and raw in get_args(hint):
        return raw
    if origin is dict and isinstance(raw, dict):
        return _plain(raw, name)
    if isinstance(hint, type) and is_dataclass(hint):
        return decoded(hint, raw)
    if hint is float and type(raw) in (int, float):
        return float(_plain(raw, name))
    if hint in (int, bool, str) and type(raw) is hint:
        return _plain(raw, name)
    raise ValueError(f"{name} cannot be {str(raw)[:40]!r}")


def _plain(raw: Any, name: str) -> Any:
    """JSON as it is, if its numbers are finite and fit in 64 bits; text without terminal control characters."""
    if isinstance(raw, str):
        return raw.encode("utf-8", "replace").decode().translate(_HIDDEN)
    if isinstance(raw, dict):
        return {_plain(key, name): _plain(value, name) for key, value in raw.items()}
    if isinstance(raw, list):
        return [_plain(value, name) for value in raw]
    odd = (type(raw) is int and abs(raw) > _LARGEST) or (type(raw) is float and not math.isfinite(raw))
    if odd or not (raw is None or type(raw) in (int, float, bool)):
        raise ValueError(f"{name} has an invalid number")
    return raw
