"""How a rank came to the end of each step and to each of its collectives: the forest of its walks, in sums.

A *node* is a stretch of a walk; its parent is what came before it in time.  A node is one collective's time, or lies
between collectives.  There are some nodes per collective, none per event: a path over several ranks is made of these.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.path.causes import CAUSES, Cause
from stepscope.traces.path.graph import Graph
from stepscope.traces.path.segments import Pieces, Segments, segments_of, summed
from stepscope.traces.path.walk import Piece, StepWalk, What

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
    """[exchanges]; the node before the arrival at it; −1: it began outside of the steps."""


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


def routes_of(graph: Graph, walks: list[StepWalk], exchanges: Rows) -> tuple[Routes, Segments]:
    """``exchanges``: their slices.  With the segments of all nodes."""
    nodes = _Nodes()
    ends: list[int] = []
    tops: list[dict[int, int]] = []
    for step, walk in enumerate(walks):
        top = _add_walk(graph, nodes, step, walk)
        ends.append(top[0])
        tops.append({work: top[leg] for work, leg in walk.of_collective.items()})
    table = np.array(nodes.pieces, np.int64).reshape(-1, 5)
    columns = ("start_ns", "end_ns", "what", "index", "node")
    segments = segments_of(graph, Pieces(**{column: table[:, at] for at, column in enumerate(columns)}))
    on_path = np.zeros(len(nodes.parent), bool)
    for end in ends:
        node = end
        while node >= 0:
            on_path[node] = True
            node = nodes.parent[node]
    number = _exchange_numbers(graph, exchanges)
    arrivals = np.full(len(exchanges), -1, np.int64)
    for step, by_work in enumerate(tops):
        for work, node in by_work.items():
            exchange = number.get(work, -1)
            inside = graph.start_ns[work] >= graph.window.steps[step].start_ns
            if exchange >= 0 and inside:
                arrivals[exchange] = node
    top_name, top_cause, top_ns, names = _tops(graph, segments, len(nodes.parent))
    length_ns, size = segments.end_ns - segments.start_ns, len(nodes.parent) * len(CAUSES)
    by_cause = segments.node.astype(np.int64) * len(CAUSES) + segments.cause
    causes_ns = np.bincount(by_cause, length_ns, size).astype(np.int64)
    routes = Routes(
        parent=np.array(nodes.parent, np.int64),
        step=np.array(nodes.step, np.int64),
        exchange=np.array([number.get(work, -1) for work in nodes.work], np.int64),
        on_path=on_path,
        ends=np.array(ends, np.int64),
        arrivals=arrivals,
        causes_ns=causes_ns.reshape(-1, len(CAUSES)),
        top_name=top_name,
        top_cause=top_cause,
        top_ns=top_ns,
        names=names,
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
        instants = [leg.end_ns]
        if own_cuts:
            instants += sorted(own_cuts - {leg.end_ns}, reverse=True)
        made = {instant: nodes.add(step) for instant in instants}
        ids = list(made.values())
        for later, earlier in itertools.pairwise(ids):
            nodes.parent[later] = earlier
        _cut_pieces(nodes, leg.pieces, instants, ids)
        at.append(made)
        bottoms.append(ids[-1])
    for leg, bottom in zip(walk.legs, bottoms, strict=True):
        if leg.joined >= 0:
            nodes.parent[bottom] = at[leg.joined][leg.reached_ns]
        elif leg.collective >= 0:
            inside = nodes.add(step, leg.collective)
            start_ns = max(graph.start_ns[leg.collective], walk.floor_ns)
            if leg.reached_ns > start_ns:
                nodes.pieces.append((start_ns, leg.reached_ns, What.WORK, leg.collective, inside))
            nodes.parent[bottom] = inside
            before = walk.of_collective[leg.collective]
            nodes.parent[inside] = at[before][walk.legs[before].end_ns]
    return [made[leg.end_ns] for made, leg in zip(at, walk.legs, strict=True)]


def _cut_pieces(nodes: _Nodes, pieces: list[Piece], instants: list[int], ids: list[int]) -> None:
    """Each piece to the node that it lies in, cut where it lies in several; both go back in time."""
    if len(ids) == 1:
        nodes.pieces += [(*piece, ids[0]) for piece in pieces]
        return
    number = 0
    for start_ns, piece_end_ns, what, index in pieces:
        end_ns = piece_end_ns
        while number + 1 < len(ids) and end_ns <= instants[number + 1]:
            number += 1
        while number + 1 < len(ids) and start_ns < instants[number + 1]:
            nodes.pieces.append((instants[number + 1], end_ns, what, index, ids[number]))
            number += 1
            end_ns = instants[number]
        nodes.pieces.append((start_ns, end_ns, what, index, ids[number]))


def _exchange_numbers(graph: Graph, rows: Rows) -> dict[int, int]:
    """By work: the exchange that it is."""
    by_row = {row: at for at, row in enumerate(rows.tolist())}
    works = [work for work, is_one in enumerate(graph.collective) if is_one]
    return {work: by_row[row] for work, row in zip(works, graph.row[works].tolist(), strict=True) if row in by_row}


def _tops(graph: Graph, segments: Segments, count: int) -> tuple[Ints, Ints, Ints, tuple[str, ...]]:
    """What took most of each node: names, causes and times; and what the names are."""
    width = len(graph.window.trace.strings) + 1
    on_host = ~np.isin(segments.cause, (Cause.COMPUTE, Cause.COMMUNICATION, Cause.COPY))
    code = np.where(on_host & (segments.operator >= 0), segments.operator, segments.name).astype(np.int64) + 1
    key = (segments.node.astype(np.int64) * len(CAUSES) + segments.cause) * width + code
    groups, time, _ = summed(key, segments.end_ns - segments.start_ns, count * len(CAUSES) * width)
    node = groups // (width * len(CAUSES))
    order = np.lexsort((-time, node))
    place = np.arange(len(order)) - np.searchsorted(node[order], node[order])
    kept, place = order[place < TOP], place[place < TOP]
    codes, short = np.unique(groups[kept] % width, return_inverse=True)
    top_name, top_cause = np.full((2, count, TOP), -1, np.int64)
    top_ns = np.zeros((count, TOP), np.int64)
    top_name[node[kept], place] = np.where(codes[short] > 0, short, -1)
    top_cause[node[kept], place] = groups[kept] // width % len(CAUSES)
    top_ns[node[kept], place] = time[kept]
    return top_name, top_cause, top_ns, tuple(graph.window.trace.text(code - 1) for code in codes.tolist())
