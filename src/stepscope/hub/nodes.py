"""The nodes of a run, put together from who joined (``nodes.json``), whose ranks there are and what was last sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepscope.hub.model.registry import ENDED
from stepscope.hub.runs import OpenRun
from stepscope.store.paths import SAMPLES

__all__ = ["NodeNow", "nodes_of"]

MOST_SAMPLED = 2048
"""Nodes whose last samples are looked up for one answer."""
_FIGURES = (
    "cpu_percent",
    "load1",
    "mem_total",
    "mem_available",
    "net_rx_bps",
    "net_tx_bps",
    "net_errors_ps",
    "net_drops_ps",
    "tcp_retrans_ps",
    "tcp_timeouts_ps",
    "ib_rx_bps",
    "ib_tx_bps",
    "ib_errors_ps",
)
_TAIL = 64
"""Lines looked at for the last host's sample of a node."""


@dataclass(frozen=True, kw_only=True)
class NodeNow:
    node: str
    """As samples and events call it."""
    hosts: list[str]
    ranks: int
    live_ranks: int
    number: int | None = None
    address: str | None = None
    offset_ns: int | None = None
    rtt_ns: int | None = None
    joined_wall_ns: int | None = None
    heard_wall_ns: int | None = None
    bye: dict[str, Any] | None = None
    frames: int = 0
    rows: int = 0
    bytes: int = 0
    duplicates: int = 0
    refused: int = 0
    sample: dict[str, Any] = field(default_factory=dict)
    """The last figures of its host."""


def nodes_of(run: OpenRun) -> list[NodeNow]:
    """By name; those that joined but have no rank yet as well."""
    live = run.live
    registry, of = live.registry, live.registry.of
    rings = live.ring_of
    counts = np.bincount(of["node"][rings], minlength=len(registry.nodes)) if len(rings) else np.zeros(0, int)
    alive = rings[(of["state"][rings] < ENDED) & (of["ended_wall_ns"][rings] == 0)]
    living = np.bincount(of["node"][alive], minlength=len(registry.nodes)) if len(alive) else np.zeros(0, int)
    hosts: dict[int, set[str]] = {}
    for node, host in {(int(n), int(h)) for n, h in zip(of["node"][: registry.count], of["host"][: registry.count])}:
        hosts.setdefault(node, set()).add(registry.hosts[host])
    joined = {str(info.node): info for info in run.nodes() if not info.replaced_by}
    names = sorted({*registry.nodes, *joined, *live.said.nodes(SAMPLES)}, key=lambda name: (len(name), name))
    places = {name: place for place, name in enumerate(registry.nodes)}
    found = []
    for name in names:
        place, info = places.get(name, -1), joined.get(name)
        said: dict[str, Any] = {}
        if info is not None:
            keys = ("address", "offset_ns", "rtt_ns", "joined_wall_ns", "heard_wall_ns", "bye", "frames", "rows")
            said = {key: getattr(info, key) for key in (*keys, "bytes", "duplicates", "refused")}
            said["number"] = info.node
        own = hosts.get(place) or ({info.host} if info is not None else set())
        found.append(
            NodeNow(
                node=name,
                hosts=sorted(own),
                ranks=int(counts[place]) if 0 <= place < len(counts) else 0,
                live_ranks=int(living[place]) if 0 <= place < len(living) else 0,
                sample=last_figures(run, name) if len(found) < MOST_SAMPLED else {},
                **said,
            )
        )
    return found


def last_figures(run: OpenRun, node: str) -> dict[str, Any]:
    last = run.live.said.last(SAMPLES, node, "host", look_at=_TAIL)
    return {} if last is None else {name: last[name] for name in ("wall_ns", *_FIGURES) if name in last}
