"""``nodes.json``: the nodes that sent something to a run, how far ahead their clocks are, and what became of them.

The hub writes it, as a whole each time; whoever opens the run reads it.  It stays when the run is sealed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from stepscope.store import atomic
from stepscope.store.paths import NODES
from stepscope.store.reading import read_document

__all__ = ["NodeInfo", "clock_offsets", "read_nodes", "read_refused", "write_nodes"]

SCHEMA = 1
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One sender: a node of the job, or a part of its life if it was started more than once."""

    node: int
    host: str
    spool: str
    """The random name of its own run directory."""
    address: str = ""
    offset_ns: int | None = None
    """What its clock is ahead of the hub's; None: no round trip said."""
    rtt_ns: int | None = None
    """The round trip that told it: half of it is how far off the offset may be."""
    joined_wall_ns: int = 0
    heard_wall_ns: int = 0
    """First and last heard of, by the hub's clock."""
    bye: dict[str, Any] | None = None
    """How its part of the job ended, as it said; None: it never did."""
    frames: int = 0
    rows: int = 0
    bytes: int = 0
    """What was taken of it."""
    duplicates: int = 0
    """Parts that it sent again."""
    refused: int = 0
    """Frames that were not taken."""
    replaced_by: str = ""
    """The spool of another sender that took over its number."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What it said of itself when it joined: command, python, platform."""

    @classmethod
    def from_dict(cls, raw: object) -> NodeInfo:
        """ValueError when a value is off; keys that are not known are passed."""
        if not isinstance(raw, dict):
            raise ValueError("a node is a JSON object")  # noqa: TRY004  # like every other fault of the bytes
        known: dict[str, Any] = {}
        for own in fields(cls):
            if own.name in raw:
                if not _fits(own.type, raw[own.name]):
                    raise ValueError(f"{own.name} of a node is {raw[own.name]!r}")
                known[own.name] = raw[own.name]
        missing = {"node", "host", "spool"} - set(known)
        if missing:
            raise ValueError(f"a node without {', '.join(sorted(missing))}")
        return cls(**known)


def write_nodes(run_dir: Path, nodes: Iterable[NodeInfo], *, refused: Mapping[str, int] | None = None) -> None:
    """``refused``: by reason, what came from nobody we know.  OSError when there is no room."""
    ordered = sorted(nodes, key=lambda one: (one.node, one.joined_wall_ns, one.spool))
    counts = {why: count for why, count in (refused or {}).items() if count}
    value = {"schema": SCHEMA, "nodes": [asdict(node) for node in ordered], "refused": counts}
    atomic.write_bytes(run_dir / NODES, (json.dumps(value, separators=(",", ":")) + "\n").encode())


def read_nodes(run_dir: Path) -> list[NodeInfo]:
    """By number and time of joining; none where there is no such file.  One that makes no sense is left out."""
    found = []
    listed = _read(run_dir).get("nodes")
    for raw in listed if isinstance(listed, list) else ():
        try:
            found.append(NodeInfo.from_dict(raw))
        except ValueError:
            continue
    return found


def read_refused(run_dir: Path) -> dict[str, int]:
    """By reason, how often somebody unknown was turned away."""
    said = _read(run_dir).get("refused")
    return {str(why): n for why, n in said.items() if _fits("int", n)} if isinstance(said, dict) else {}


def clock_offsets(nodes: Iterable[NodeInfo]) -> dict[str, int]:
    """What the clocks of other nodes are ahead, by spool; those that are not known to be are left out."""
    return {node.spool: node.offset_ns for node in nodes if node.offset_ns}


def _read(run_dir: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_document(run_dir / NODES))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) and raw.get("schema") == SCHEMA else {}


def _fits(kind: Any, value: object) -> bool:
    if kind in ("int", "int | None"):
        return (type(value) is int and abs(value) <= _LARGEST) or (value is None and kind != "int")
    if kind == "str":
        return isinstance(value, str)
    return isinstance(value, dict) or (value is None and "None" in str(kind))
