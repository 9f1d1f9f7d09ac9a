"""Who wrote a ring: one process of one rank of one attempt."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["RankIdentity"]

LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class RankIdentity:
    """What a rank process knows of itself; it may learn more (its rank, its device) as the script goes on."""

    host: str
    pid: int
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    attempt: int = 0
    """Restart count of an elastic job."""
    backend: str = ""
    """``gloo``, ``nccl`` … once a process group exists."""
    device: str = "cpu"
    """Device type the steps run on: ``cpu``, ``cuda``, ``mps``, ``xpu``."""
    device_name: str = ""
    device_index: int = -1
    device_uuid: str = ""
    device_bytes: int = 0
    """Memory of the device, as torch says it; 0: not known."""
    device_timed: bool = False
    """Whether device times are recorded; elsewhere only host times are, and reports say so."""
    torch: str = ""
    python: str = ""
    script: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RankIdentity:
        """Read what ``to_json`` wrote; keys of a newer version are ignored, anything else odd is a ValueError."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, raw: object) -> RankIdentity:
        if not isinstance(raw, dict):
            raise ValueError("an identity is a JSON object")  # noqa: TRY004  # like every other fault of the bytes
        known: dict[str, Any] = {}
        for name, default, kind in _FIELDS:
            value: Any = raw.get(name, default)
            if type(value) is not kind or (type(value) is int and abs(value) > LARGEST):
                raise ValueError(f"{name} of an identity is {value!r}")
            known[name] = value
        return cls(**known)


_KINDS: dict[str, type] = {"str": str, "int": int, "bool": bool}
_FIELDS = tuple((field.name, field.default, _KINDS[str(field.type)]) for field in fields(RankIdentity))
"""Asked for once: a hub reads a hundred thousand identities when a large job begins."""
