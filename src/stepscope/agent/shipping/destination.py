"""Which hub a node sends to.  Apart from how, which an agent without a hub need not load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Destination"]


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A hub, and who we are to it; ``hub`` in the ``run.json`` of a spool."""

    url: str
    run: str
    """The name that was asked for."""
    node: int
    nnodes: int

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Destination | None:
        """None where it says nothing, or nothing of ours."""
        said = meta.get("hub")
        if not isinstance(said, dict):
            return None
        url, run, node, nnodes = (said.get(name) for name in ("url", "run", "node", "nnodes"))
        if not (isinstance(url, str) and isinstance(run, str) and type(node) is int and type(nnodes) is int):
            return None
        return cls(url=url, run=run, node=node, nnodes=nnodes)
