"""Events, samples as curves, stacks, and the nodes of a run.

Samples are what the agents measured on hosts, processes, GPUs and the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.api.resource import Parameter, Resource
from stepscope.hub.api.responses import ApiError
from stepscope.hub.live.lines import of_kind, parse_raw
from stepscope.hub.live.registry import ENDED
from stepscope.hub.open_run import OpenRun
from stepscope.records.text import count_text, ns_text
from stepscope.reports.event_text import event_document
from stepscope.store.documents import NodeInfo
from stepscope.store.live.sample_files import OVER, span_of
from stepscope.store.paths import SAMPLES, STACKS

__all__ = [
    "RESOURCES",
    "WHO",
    "NodeHead",
    "NodeNow",
    "NodesCopy",
    "copy_nodes",
    "events_document",
    "node_problems",
    "nodes_document",
    "nodes_of",
    "sample_series",
    "samples_document",
    "stacks_document",
]


# -- sample series ----------------------------------------------------------------------------------------------------
# Samples as curves: one per host, process or GPU, each figure in bins of time, for display next to the steps.

Statistic = Literal["mean", "max", "min", "last"]
WHO: Mapping[str, tuple[str, ...]] = {
    "host": ("node",),
    "process": ("node", "rank", "pid"),
    "gpu": ("node", "index"),
    "probe": ("node", "peer"),
}
"""By kind, what identifies a curve; for any other kind, its node."""
_NO_FIGURE = ("wall_ns", "mono_ns", "pid", "rank", "index", "kind", "node", "host", "span_s", "over")
_NAMES = ("host", "uuid", "name")


def sample_series(
    lines: Sequence[Mapping[str, Any]],
    *,
    kind: str,
    fields: Sequence[str],
    span_ns: tuple[int | None, int | None],
    bins: int,
    statistic: Statistic,
    most: int,
) -> dict[str, Any]:
    """Return at most ``most`` curves; ``left_out`` counts the rest.  Without ``fields``, all numeric fields."""
    curves: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    who = WHO.get(kind, ("node",))
    for line in lines:
        at = line.get("wall_ns")
        within = type(at) is int and (span_ns[0] or 0) <= at and (span_ns[1] is None or at <= span_ns[1])
        if line.get("kind") == kind and within:
            curves.setdefault(tuple(_plain(line.get(name)) for name in who), []).append(line)
    keys = sorted(curves, key=_order)[:most]
    walls = [line["wall_ns"] for key in keys for line in curves[key]]
    first, last = (span_ns[0] or min(walls), max(walls)) if walls else (0, 0)
    width = max(1, -(-(last - first + 1) // bins))
    count = (last - first) // width + 1 if walls else 0
    rows = []
    for key in keys:
        own = curves[key]
        place = np.array([(line["wall_ns"] - first) // width for line in own], np.intp)
        figures = fields or sorted({name for line in own for name in line if name not in _NO_FIGURE})
        weights = _weights(own)
        values = {name: _binned(own, name, place, count, statistic, weights) for name in figures}
        about = {name: own[-1][name] for name in _NAMES if isinstance(own[-1].get(name), str)}
        known = {name: column for name, column in values.items() if column is not None}
        rows.append({**dict(zip(who, key, strict=True)), **about, "values": known})
    starts = [first + width * at for at in range(count)]
    return {"kind": kind, "stat": statistic, "wall_ns": starts, "bin_ns": width, "series": rows} | {
        "left_out": len(curves) - len(keys)
    }


def _weights(lines: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Return the seconds that each sample represents: thinned samples of earlier hours say so; the rest by spacing."""
    spans_s = np.array([span_of(line) for line in lines], np.float64)
    if not spans_s.any():
        return np.ones(len(lines))
    fine = np.array([line["wall_ns"] for line in lines], np.float64)[spans_s == 0]
    apart_s = float(np.median(np.diff(fine))) / 1e9 if len(fine) > 1 else 1.0
    return np.where(spans_s > 0, spans_s, max(apart_s, 1e-3))


def _binned(
    lines: Sequence[Mapping[str, Any]],
    name: str,
    place: NDArray[np.intp],
    count: int,
    statistic: Statistic,
    weights: NDArray[np.float64],
) -> list[float | None] | None:
    """Bin one field; None if it is not numeric."""
    values = np.array([_figure(_of(line, name, statistic)) for line in lines], np.float64)
    known = np.isfinite(values)
    if not known.any():
        return None
    at, values, weights = place[known], values[known], weights[known]
    found = np.full(count, np.nan)
    if statistic == "mean":
        total, weight = np.bincount(at, values * weights, count), np.bincount(at, weights, count)
        found = np.where(weight > 0, total / np.where(weight > 0, weight, 1), np.nan)
    elif statistic == "last":
        found[at] = values
    else:
        fill = -np.inf if statistic == "max" else np.inf
        found[:] = fill
        (np.maximum if statistic == "max" else np.minimum).at(found, at, values)
        found[found == fill] = np.nan
    return [None if value != value else value for value in found.tolist()]


def _of(line: Mapping[str, Any], name: str, statistic: Statistic) -> Any:
    """Return a field of a sample; for one that represents many, their combined value."""
    over = line.get(OVER)
    kept = over.get(statistic) if isinstance(over, dict) else None
    found = kept.get(name) if isinstance(kept, dict) else None
    return line.get(name) if found is None else found


def _figure(value: Any) -> float:
    """Return a number; a nonempty list counts as 1: the mean of ``throttle_reasons`` is then a share of the time."""
    if isinstance(value, list):
        return float(bool(value))
    return value if type(value) in (int, float) else np.nan


def _plain(value: Any) -> Any:
    """Return a value that can be a key; anything unexpected becomes text."""
    return value if isinstance(value, str | int | float | None) else str(value)


def _order(key: tuple[Any, ...]) -> tuple[tuple[bool, float, str], ...]:
    return tuple((isinstance(part, str), part if isinstance(part, int | float) else 0, str(part)) for part in key)


# -- nodes ------------------------------------------------------------------------------------------------------------
# The nodes of a run: which joined (``nodes.json``), their ranks, and their last samples.

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
"""Lines searched for the last host sample of a node."""
_MOST_SPANS = 64


@dataclass(frozen=True, kw_only=True)
class NodeNow:
    node: str
    """As in samples and events."""
    hosts: list[str]
    ranks: int
    live_ranks: int
    rank_spans: list[list[int]] = field(default_factory=list)
    """Its ranks: first and last of each consecutive stretch, for a limited number of stretches."""
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


SILENT_NS = 30 * 10**9
CLOCK_OFF_NS = 10**9
MEMORY_LEFT = 0.05
"""The share of the memory below which a node is nearly full."""
_ERRORS = {
    "net_errors_ps": "network errors",
    "net_drops_ps": "dropped packets",
    "ib_errors_ps": "InfiniBand errors",
}


def node_problems(node: NodeNow, now_ns: int, *, live: bool) -> list[str]:
    """Return the problems of a node in words.  ``now_ns``: by the hub's clock; ``live``: silence is a problem."""
    found: list[str] = []
    if live and node.bye is None and node.heard_wall_ns is not None and now_ns - node.heard_wall_ns > SILENT_NS:
        found.append(f"silent for {ns_text(now_ns - node.heard_wall_ns, whole=True)}")
    if live and node.live_ranks < node.ranks:
        found.append(f"{count_text(node.ranks - node.live_ranks, 'rank')} ended")
    status = node.bye.get("status") if isinstance(node.bye, Mapping) else None
    if isinstance(status, str) and status not in ("finished", "orphaned"):
        found.append(f"ended: {status}")
    if not live and node.bye is None and node.number:
        found.append("did not report how it ended")
    if node.refused:
        found.append(f"{count_text(node.refused, 'frame')} refused")
    if abs(node.offset_ns or 0) > CLOCK_OFF_NS:
        found.append("clock is off; times are corrected")
    total, left = node.sample.get("mem_total"), node.sample.get("mem_available")
    if total and left is not None and left / total < MEMORY_LEFT:
        found.append("memory is nearly full")
    return found + [text for key, text in _ERRORS.items() if (node.sample.get(key) or 0) > 0]


class NodeHead(NamedTuple):
    """A node without its samples."""

    name: str
    hosts: list[str]
    ranks: int
    live_ranks: int
    place: int | None
    """The registry's number; None: it has no rank yet."""
    info: NodeInfo | None
    """What the hub knows of it as a sender; None: it did not join over the network."""


@dataclass(frozen=True, kw_only=True)
class NodesCopy:
    """What the model knows of its nodes, copied in the event loop; ``heads`` may be called in any thread."""

    registered: list[str]
    sampled: list[str]
    joined: list[NodeInfo]
    ranks: list[int]
    """By the registry's number of a node, like the next one."""
    living: list[int]
    pairs: NDArray[np.int64]
    """Of each process, the registry's numbers of its node and of its host."""
    hosts: list[str]

    def heads(self) -> list[NodeHead]:
        """Return the nodes by name, including those that joined but have no rank yet."""
        joined = {str(info.node): info for info in self.joined if not info.replaced_by}
        places = {name: place for place, name in enumerate(self.registered)}
        hosts: dict[int, set[str]] = {}
        for pair in np.unique(self.pairs).tolist():
            hosts.setdefault(pair >> 32, set()).add(self.hosts[pair & 0xFFFFFFFF])
        found = []
        for name in sorted({*places, *joined, *self.sampled}, key=lambda name: (len(name), name)):
            place, info = places.get(name), joined.get(name)
            if place is None:
                found.append(NodeHead(name, [info.host if info is not None else name], 0, 0, None, info))
                continue
            own = sorted(hosts.get(place) or {info.host if info is not None else name})
            found.append(NodeHead(name, own, self.ranks[place], self.living[place], place, info))
        return found


def copy_nodes(run: OpenRun) -> NodesCopy:
    """Copy what the model knows of its nodes; only in the event loop."""
    registry, of, rings = run.live.registry, run.live.registry.of, run.live.ring_of
    alive = rings[(of["state"][rings] < ENDED) & (of["ended_wall_ns"][rings] == 0)]
    count, n = len(registry.nodes), registry.count
    ranks, living = (np.bincount(of["node"][own], minlength=count).tolist() for own in (rings, alive))
    return NodesCopy(
        registered=list(registry.nodes),
        sampled=list(run.live.received.nodes(SAMPLES)),
        joined=run.nodes(),
        ranks=ranks,
        living=living,
        pairs=of["node"][:n].astype(np.int64) << 32 | of["host"][:n].astype(np.int64),
        hosts=list(registry.hosts),
    )


def nodes_of(run: OpenRun, start: int, limit: int) -> tuple[int, list[NodeNow]]:
    """Return the number of nodes, and some of them by name."""
    heads, spans = copy_nodes(run).heads(), _spans(run)
    found = [
        NodeNow(
            node=head.name,
            hosts=head.hosts,
            ranks=head.ranks,
            live_ranks=head.live_ranks,
            rank_spans=[] if head.place is None else spans.get(head.place, []),
            number=None if head.info is None else head.info.node,
            sample=_last_figures(run, head.name),
            **({} if head.info is None else {key: getattr(head.info, key) for key in _SENT}),
        )
        for head in heads[start : start + limit]
    ]
    return len(heads), found


def _spans(run: OpenRun) -> dict[int, list[list[int]]]:
    """By the registry's number of a node, its stretches of ranks."""
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
    last = run.live.received.last(SAMPLES, node, "host", among=_TAIL)
    return {} if last is None else {name: last[name] for name in ("wall_ns", *_FIGURES) if name in last}


# -- resources --------------------------------------------------------------------------------------------------------

MOST_EVENTS = 10_000
MOST_CURVES = 1024
MOST_LINES = 1_000_000
"""Lines searched for one answer."""
MOST_PARSED = 20_000
"""Lines parsed for one answer: beyond that, every n-th of each source."""
NODES = Parameter(name="nodes", about="names, separated by commas; default: all", kind="texts", many=256)


def events_document(run: OpenRun, *, after: int = 0, limit: int = 1000, event: Sequence[str] = ()) -> dict[str, Any]:
    """``event``: kinds; none: all."""
    found = run.live.events(after, limit=limit)
    chosen = [event_document(record, over=run.over) for record in found if not event or record.get("event") in event]
    return {"total": run.live.received.events_seen, "next": found[-1]["number"] if found else after, "events": chosen}


async def samples_document(
    run: OpenRun,
    *,
    kind: str = "host",
    nodes: Sequence[str] | None = None,
    fields: Sequence[str] = (),
    first_ns: int | None = None,
    last_ns: int | None = None,
    bins: int = 512,
    stat: Statistic = "mean",
    limit: int = 256,
) -> dict[str, Any]:
    await run.sampled()
    raw = list(run.live.received.raw(SAMPLES, nodes or run.live.received.nodes(SAMPLES)))
    if len(raw) > MOST_LINES:
        raise ApiError(400, "too many samples for one request; select nodes with the parameter nodes")

    def made() -> dict[str, Any]:
        span_ns = first_ns, last_ns
        return sample_series(
            parse_raw(of_kind(raw, kind, span_ns, MOST_PARSED)),
            kind=kind,
            fields=fields,
            span_ns=span_ns,
            bins=bins,
            statistic=stat,
            most=limit,
        )

    return await asyncio.to_thread(made)


def stacks_document(
    run: OpenRun, *, rank: int | None = None, nodes: Sequence[str] | None = None, limit: int = 1000
) -> dict[str, Any]:
    found = run.live.stacks(nodes=nodes or None, limit=limit)
    return {"stacks": [stack for stack in found if rank is None or stack.get("rank") == rank], "file": STACKS}


async def nodes_document(run: OpenRun, *, start: int = 0, limit: int = 1000) -> dict[str, Any]:
    await run.sampled()
    total, found = nodes_of(run, start, limit)
    now_ns = max((max(node.heard_wall_ns or 0, node.sample.get("wall_ns") or 0) for node in found), default=0)
    rows = [asdict(node) | {"problems": node_problems(node, now_ns, live=not run.over)} for node in found]
    return {"total": total, "nodes": rows, "refused": run.refused()}


RESOURCES = (
    Resource(
        path="/api/v1/runs/{run}/events",
        about="Events, in the order in which the hub received them; pass next as after in the next request.",
        answer=lambda query: events_document(query.run, **query.values),
        parameters=(
            Parameter(name="after", about="number of the last event already received", default=0),
            Parameter(name="limit", about="maximum number", default=1000, least=1, most=MOST_EVENTS),
            Parameter(name="event", about="kinds of event to return, separated by commas", kind="texts", default=()),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/samples",
        about="Samples as curves: measurements of hosts, processes, GPUs or probes in time bins.",
        answer=lambda query: samples_document(query.run, **query.values),
        parameters=(
            Parameter(name="kind", about="source of the samples", kind="choice", default="host", choices=tuple(WHO)),
            NODES,
            Parameter(name="fields", about="fields to return, separated by commas", kind="texts", default=()),
            Parameter(name="first_ns", about="wall clock, nanoseconds since 1970"),
            Parameter(name="last_ns", about="wall clock, nanoseconds since 1970"),
            Parameter(name="bins", about="maximum number of bins", default=512, least=1, most=4096),
            Parameter(
                name="stat",
                about="statistic per bin",
                kind="choice",
                default="mean",
                choices=("mean", "max", "min", "last"),
            ),
            Parameter(name="limit", about="maximum number of curves", default=256, least=1, most=MOST_CURVES),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/stacks",
        about="Sampled stacks of ranks, by line.",
        answer=lambda query: stacks_document(query.run, **query.values),
        parameters=(
            Parameter(name="rank", about="only this rank"),
            NODES,
            Parameter(name="limit", about="maximum number", default=1000, least=1, most=10_000),
        ),
    ),
    Resource(
        path="/api/v1/runs/{run}/nodes",
        about="The nodes: ranks, clock, round trip, data sent, and latest sample.",
        answer=lambda query: nodes_document(query.run, **query.values),
        parameters=(
            Parameter(name="start", about="how many to skip", default=0),
            Parameter(name="limit", about="maximum number", default=1000, least=1, most=20_000),
        ),
    ),
)
