"""The nodes of a run: who joined (``nodes.json``), whose ranks there are, what was last sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.registry import ENDED
from stepscope.hub.open_run import OpenRun
from stepscope.store.paths import SAMPLES

__all__ = ["NodeNow", "nodes_of"]

_SENT = (
    *("address", "offset_ns", "rtt_ns", "joined_wall_ns", "heard_wall_ns", "bye"),
    *("frames", "rows", "bytes", "duplicates", "refused"),
)
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
_MOST_SPANS = 64


@dataclass(frozen=True, kw_only=True)
class NodeNow:
    node: str
    """As samples and events call it."""
    hosts: list[str]
    ranks: int
    live_ranks: int
    rank_spans: list[list[int]] = field(default_factory=list)
    """Which ranks: first and last of each stretch of neighbours, at most so many stretches."""
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


def nodes_of(run: OpenRun, start: int, limit: int) -> tuple[int, list[NodeNow]]:
    """How many there are, and some of them by name; those that joined but have no rank yet as well."""
    live = run.live
    registry = live.registry
    joined = {str(info.node): info for info in run.nodes() if not info.replaced_by}
    names = sorted({*registry.nodes, *joined, *live.said.nodes(SAMPLES)}, key=lambda name: (len(name), name))
    places = {name: place for place, name in enumerate(registry.nodes)}
    ranks, living, hosts = _counted(run)
    spans = _spans(run)
    found: list[NodeNow] = []
    for name in names[start : start + limit]:
        place, info = places.get(name), joined.get(name)
        own = hosts.get(-1 if place is None else place) or ({info.host} if info is not None else {name})
        found.append(
            NodeNow(
                node=name,
                hosts=sorted(own),
                ranks=0 if place is None else int(ranks[place]),
                live_ranks=0 if place is None else int(living[place]),
                rank_spans=[] if place is None else spans.get(place, []),
                number=None if info is None else info.node,
                sample=_last_figures(run, name),
                **({} if info is None else {key: getattr(info, key) for key in _SENT}),
            )
        )
    return len(names), found


def _counted(run: OpenRun) -> tuple[NDArray[np.intp], NDArray[np.intp], dict[int, set[str]]]:
    """By the registry's number of a node: ranks, those that run, and the hosts that its ranks say they are on."""
    registry, of, rings = run.live.registry, run.live.registry.of, run.live.ring_of
    alive = rings[(of["state"][rings] < ENDED) & (of["ended_wall_ns"][rings] == 0)]
    count = len(registry.nodes)
    hosts: dict[int, set[str]] = {}
    pairs = np.unique(np.stack([of["node"][: registry.count], of["host"][: registry.count]]), axis=1)
    for node, host in pairs.T.tolist():
        hosts.setdefault(node, set()).add(registry.hosts[host])
    return np.bincount(of["node"][rings], minlength=count), np.bincount(of["node"][alive], minlength=count), hosts


def _spans(run: OpenRun) -> dict[int, list[list[int]]]:
    """By the registry's number of a node, the stretches of ranks that it has."""
    of, rings = run.live.registry.of, run.live.ring_of
    if not len(rings):
        return {}
    node, shown = of["node"][rings].astype(np.int64), of["shown"][rings].astype(np.int64)
    order = np.lexsort((shown, node))
    node, shown = node[order], shown[order]
    begins = np.flatnonzero(np.concatenate(([True], (np.diff(node) != 0) | (np.diff(shown) != 1))))
    ends = np.append(begins[1:], len(node)) - 1
    found: dict[int, list[list[int]]] = {}
    for place, first, last in zip(node[begins].tolist(), shown[begins].tolist(), shown[ends].tolist(), strict=True):
        own = found.setdefault(place, [])
        if len(own) < _MOST_SPANS:
            own.append([first, last])
    return found


def _last_figures(run: OpenRun, node: str) -> dict[str, Any]:
    last = run.live.said.last(SAMPLES, node, "host", look_at=_TAIL)
    return {} if last is None else {name: last[name] for name in ("wall_ns", *_FIGURES) if name in last}
