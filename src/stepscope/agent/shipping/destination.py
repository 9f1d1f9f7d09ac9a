"""The hub that a node sends to. Separate from the sending code, which an agent without a hub need not load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Destination"]


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A hub and this node's identity there; stored as ``hub`` in the ``run.json`` of a spool."""

    url: str
    run: str
    """The requested name."""
    node: int
    nnodes: int

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Destination | None:
        """Read the entry; return None if it is missing or invalid."""
        said = meta.get("hub")
        if not isinstance(said, dict):
            return None
        url, run, node, nnodes = (said.get(name) for name in ("url", "run", "node", "nnodes"))
        if not (isinstance(url, str) and isinstance(run, str) and type(node) is int and type(nnodes) is int):
            return None
        return cls(url=url, run=run, node=node, nnodes=nnodes)
