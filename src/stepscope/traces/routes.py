"""How a rank came to the end of each step and to each of its collectives: the forest of its walks, in sums.

A *node* is a stretch of a walk; its parent is what came before it in time.  A node is one collective's time, or lies
between collectives.  Size: some nodes per collective, none per event; this is what a path over several ranks is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.columns import Ints
from stepscope.traces.graph import Graph
from stepscope.traces.segments import CAUSES, Pieces, Segments, segments_of
from stepscope.traces.walk import Piece, StepWalk, What

__all__ = ["Routes", "routes_of"]

TOP = 4
"""Names kept of each node."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    parent: Ints
    """[nodes]; the node before it in time; −1: the step began there."""
    step: Ints
    """[nodes]; index of the step that counts."""
    exchange: Ints
    """[nodes]; index into the rank's exchanges, if the node is the time in one; −1: none."""
    on_path: NDArray[np.bool_]
    """[nodes]; part of the step's own critical path."""
    causes_ns: Ints
    """[nodes, causes]"""
    top_name: Ints
    """[nodes, few]; what took most, most first: indices of ``names``; −1: no more, or no name."""
    top_cause: Ints
    top_ns: Ints
    names: tuple[str, ...]
    """Of operators on the host, of kernels on the device."""
    ends: Ints
    """[steps]; the node at the step's end."""
    arrivals: Ints
    """[exchanges]; the node before the arrival at it; −1: it began outside of the steps, or there was nothing before."""
    linked: NDArray[np.bool_]
    """[exchanges]; ``arrivals`` is known."""


class _Nodes:
    """Nodes as they grow, and the pieces in them."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.step: list[int] = []
        self.work: list[int] = []
        """The collective that the node is the time in; −1: none."""
        self.pieces: list[tuple[int, int, int, int, int]] = []

    def add(self, step: int, work: int = -1) -> int:
        self.parent.append(-1)
        self.step.append(step)
        self.work.append(work)
        return len(self.parent) - 1


def routes_of(graph: Graph, walks: list[StepWalk], exchanges: tuple[Ints, Ints] | None) -> tuple[Routes, Segments]:
    """``exchanges``: their starts and ends, as the trace counts time.  With the segments of all nodes."""
    nodes = _Nodes()
    ends: list[int] = []
    tops: list[dict[int, int]] = []
    for step, walk in enumerate(walks):
        top = _add_walk(graph, nodes, step, walk)
        ends.append(top[0])
        tops.append({work: top[leg] for work, leg in walk.of_collective.items()})
    table = np.array(nodes.pieces, np.int64).reshape(-1, 5)
    names = ("start_ns", "end_ns", "what", "index", "node")
    segments = segments_of(graph, Pieces(**{name: table[:, at] for at, name in enumerate(names)}))
    on_path = np.zeros(len(nodes.parent), bool)
    for end in ends:
        while end >= 0:
            on_path[end] = True
            end = nodes.parent[end]
    number = _exchange_numbers(graph, exchanges)
    count = 0 if exchanges is None else len(exchanges[0])
    arrivals, linked = np.full(count, -1, np.int64), np.zeros(count, bool)
    for step, by_work in enumerate(tops):
        for work, node in by_work.items():
            exchange = number.get(work, -1)
            inside = graph.start_ns[work] >= graph.window.steps[step].start_ns
            if exchange >= 0 and inside:
                arrivals[exchange], linked[exchange] = node, True
    sums = _sums(graph, segments, len(nodes.parent))
    routes = Routes(
        parent=np.array(nodes.parent, np.int64),
        step=np.array(nodes.step, np.int64),
        exchange=np.array([number.get(work, -1) for work in nodes.work], np.int64),
        on_path=on_path,
        ends=np.array(ends, np.int64),
        arrivals=arrivals,
        linked=linked,
        **sums,
    )
    return routes, segments


def _add_walk(graph: Graph, nodes: _Nodes, step: int, walk: StepWalk) -> list[int]:
    """The nodes of a step's legs; [legs]: the first of each."""
    cuts: list[set[int]] = [set() for _ in walk.legs]
    for leg in walk.legs:
        if leg.joined >= 0:
            cuts[leg.joined].add(leg.reached_ns)
    at: list[dict[int, int]] = []
    """[legs]; the node that begins (going back) at each instant where one does."""
    bottoms = []
    for leg, own_cuts in zip(walk.legs, cuts, strict=True):
        instants = [leg.end_ns, *sorted(own_cuts - {leg.end_ns}, reverse=True)]
        made = {instant: nodes.add(step) for instant in instants}
        ids = list(made.values())
        for later, earlier in zip(ids, ids[1:], strict=False):
            nodes.parent[later] = earlier
        _cut_pieces(nodes, leg.pieces, instants, ids)
        at.append(made)
        bottoms.append(ids[-1])
    for leg, bottom in zip(walk.legs, bottoms, strict=True):
        if leg.joined >= 0:
            nodes.parent[bottom] = at[leg.joined][leg.reached_ns]
        elif leg.collective >= 0:
            inside = nodes.add(step, leg.collective)
            start_ns = max(graph.start_ns[leg.collective], graph.window.steps[step].start_ns)
            if leg.reached_ns > start_ns:
                nodes.pieces.append((start_ns, leg.reached_ns, What.WORK, leg.collective, inside))
            nodes.parent[bottom] = inside
            before = walk.of_collective[leg.collective]
            nodes.parent[inside] = at[before][walk.legs[before].end_ns]
    return [made[leg.end_ns] for made, leg in zip(at, walk.legs, strict=True)]


def _cut_pieces(nodes: _Nodes, pieces: list[Piece], instants: list[int], ids: list[int]) -> None:
    """Each piece to the node that it lies in, cut where it lies in several; both go back in time."""
    number = 0
    for start_ns, end_ns, what, index in pieces:
        while number + 1 < len(ids) and end_ns <= instants[number + 1]:
            number += 1
        while number + 1 < len(ids) and start_ns < instants[number + 1]:
            nodes.pieces.append((instants[number + 1], end_ns, what, index, ids[number]))
            number += 1
            end_ns = instants[number]
        nodes.pieces.append((start_ns, end_ns, what, index, ids[number]))


def _exchange_numbers(graph: Graph, exchanges: tuple[Ints, Ints] | None) -> dict[int, int]:
    """By work: the exchange that it is, told by its start and end."""
    if exchanges is None:
        return {}
    by_time = {times: at for at, times in enumerate(zip(exchanges[0].tolist(), exchanges[1].tolist(), strict=True))}
    works = (work for work, is_one in enumerate(graph.collective) if is_one)
    found = ((work, by_time.get((graph.start_ns[work], graph.end_ns[work]), -1)) for work in works)
    return {work: at for work, at in found if at >= 0}


def _sums(graph: Graph, segments: Segments, count: int) -> dict[str, Ints | tuple[str, ...]]:
    length = segments.end_ns - segments.start_ns
    causes_ns = np.zeros(count * len(CAUSES), np.int64)
    np.add.at(causes_ns, segments.node * len(CAUSES) + segments.cause, length)
    named = np.where(segments.operator >= 0, segments.operator, segments.name)
    on_device = segments.cause <= 2
    code = np.where(on_device, segments.name, named).astype(np.int64) + 1
    width = len(graph.window.trace.strings) + 1
    groups, inverse = np.unique((segments.node * len(CAUSES) + segments.cause) * width + code, return_inverse=True)
    time = np.zeros(len(groups), np.int64)
    np.add.at(time, inverse, length)
    node = groups // (width * len(CAUSES))
    order = np.lexsort((-time, node))
    first = np.searchsorted(node[order], np.arange(count))
    place = np.arange(len(order)) - (first[node[order]] if len(order) else 0)
    kept, place = order[place < TOP], place[place < TOP]
    top = np.full((3, count, TOP), -1, np.int64)
    codes, short = np.unique(groups[kept] % width, return_inverse=True)
    top[0, node[kept], place] = np.where(codes[short] > 0, short, -1) if len(kept) else -1
    top[1, node[kept], place] = groups[kept] // width % len(CAUSES)
    top[2, node[kept], place] = time[kept]
    names = tuple(graph.window.trace.text(code - 1) for code in codes.tolist())
    return {
        "causes_ns": causes_ns.reshape(count, len(CAUSES)),
        "top_name": top[0],
        "top_cause": top[1],
        "top_ns": np.maximum(top[2], 0),
        "names": names,
    }
