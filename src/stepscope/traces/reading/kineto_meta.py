"""What a Kineto file says of itself, beside its events."""

from __future__ import annotations

from typing import Any

from stepscope.traces.model.columns import TraceMeta

__all__ = ["meta_of"]


def meta_of(header: dict[str, Any], path: str) -> TraceMeta:
    """Only what has the type that it should."""
    world = _dict(header.get("distributedInfo"))
    return TraceMeta(
        path=path,
        rank=_count(world.get("rank")),
        world_size=_count(world.get("world_size")),
        backend=_text(world.get("backend")),
        host=_text(header.get("hostname")) or _text(header.get("host_name")),
        origin_ns=_int(header.get("baseTimeNanoseconds")) or 0,
        devices=_dicts(header.get("deviceProperties")),
        groups=_dicts(world.get("pg_config")),
        with_stack=bool(header.get("with_stack")),
        record_shapes=bool(header.get("record_shapes")),
        profile_memory=bool(header.get("profile_memory")),
    )


def _int(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    number = _int(value)
    return number if number is not None and 0 <= number < 2**31 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(each for each in value if isinstance(each, dict)) if isinstance(value, list) else ()
