"""Walking back through a step's dependencies: legs, their segments by cause, and routes to each collective.

A *leg* is a walk back from the end of the step, or from the arrival at a collective, to the end of the previous
collective on that walk, to the start of the step, or to the point where it meets an earlier leg, whose way it shares
from there on. All legs of a step therefore form a forest, linear in the trace however many collectives overlap.

A leg's *pieces* are disjoint and contiguous, from its end downwards: a thread, a work item, or the delay before one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Codes, Ints, Kind, Rows
from stepscope.traces.model.tables import distinct
from stepscope.traces.model.window import Window, padded
from stepscope.traces.path.graph import CAUSES, Cause, Graph, HostLine, Via, expanded

__all__ = ["Routes", "Segments", "StepWalk", "routes_of", "summed", "walk_back", "walk_step"]


# -- legs -------------------------------------------------------------------------------------------------------------

NOTHING, STREAM, LAUNCH = int(Via.NOTHING), int(Via.STREAM), int(Via.LAUNCH)
"""Plain integers compare much faster."""


class What(IntEnum):
    THREAD = 0
    WORK = 1
    DELAY = 2
    CHAIN = 3
    """A chain of work items, down from one of them, including the delays between them."""


class Piece(NamedTuple):
    start_ns: int
    end_ns: int
    what: What
    which: int
    """A thread or a work item."""


@dataclass(kw_only=True)
class Leg:
    end_ns: int
    """Where the walk began."""
    pieces: list[Piece] = field(default_factory=list)
    """The latest first; none is empty."""
    collective: int = -1
    """The collective at which it ended, at ``reached_ns``."""
    joined: int = -1
    """The leg whose way it shares from ``reached_ns`` downwards."""
    reached_ns: int = 0


@dataclass(kw_only=True)
class StepWalk:
    legs: list[Leg]
    """The first starts at the end of the step."""
    of_collective: dict[int, int]
    """By work item: the leg back from its start."""
    floor_ns: int
    """Where it ends."""


def walk_step(graph: Graph, step: int, collectives: list[int]) -> StepWalk:
    """Walk one step; ``collectives``: work items whose legs are required in addition to those on the path."""
    walker = _Walker(graph, step)
    walker.from_end()
    return _walked(walker, collectives[::-1])


def walk_back(graph: Graph, work: int, floor_ns: int) -> StepWalk:
    """Walk back from the end of a work item, through as many steps as needed."""
    walker = _Walker(graph, len(graph.window.steps) - 1)
    walker.floor_ns = floor_ns
    walker.from_work(work)
    return _walked(walker, [])


def _walked(walker: _Walker, wanted: list[int]) -> StepWalk:
    done = 0
    while True:
        # Collectives on the path come first, so that the path does not join another leg.
        while done < len(walker.legs):
            reached = walker.legs[done].collective
            done += 1
            if reached >= 0:
                walker.from_collective(reached)
        if not wanted:
            return StepWalk(legs=walker.legs, of_collective=walker.of_collective, floor_ns=walker.floor_ns)
        walker.from_collective(wanted.pop())


class _Walker:
    def __init__(self, graph: Graph, step: int) -> None:
        self.graph, self.step, self.main = graph, graph.window.steps[step], graph.main[step]
        self.floor_ns = self.step.start_ns
        self.legs: list[Leg] = []
        self.of_collective: dict[int, int] = {}
        self.seen_exits: dict[tuple[int, int], tuple[int, int]] = {}
        """By thread and exit: the leg that passed through it, and when it reached the stretch above."""
        self.seen_chains: dict[int, tuple[int, int]] = {}
        """By head: the leg that went down the chain, and when it reached it."""

    def from_end(self) -> None:
        graph, end_ns = self.graph, self.step.end_ns
        self.legs.append(Leg(end_ns=end_ns))
        if not self.step.name:
            # The whole trace is one step, which ends with whatever ends last.
            latest = max(range(len(graph.row)), key=graph.end_ns.__getitem__, default=-1)
            if latest >= 0 and graph.end_ns[latest] >= end_ns:
                return self._go(-1, latest, end_ns)
        return self._go(self.main, -1, end_ns)

    def from_work(self, work: int) -> None:
        end_ns = self.graph.end_ns[work]
        self.legs.append(Leg(end_ns=end_ns))
        self._go(-1, work, end_ns)

    def from_collective(self, work: int) -> None:
        if work in self.of_collective:
            return
        self.of_collective[work] = len(self.legs)
        leg = Leg(end_ns=max(self.graph.start_ns[work], self.floor_ns))
        self.legs.append(leg)
        thread, before, at_ns = self._due_to(work, leg)
        self._go(thread, before, at_ns)

    def _piece(self, leg: Leg, start_ns: int, end_ns: int, what: What, index: int) -> None:
        start_ns = max(start_ns, self.floor_ns)
        if end_ns > start_ns:
            leg.pieces.append(Piece(start_ns, end_ns, what, index))

    def _due_to(self, work: int, leg: Leg) -> tuple[int, int, int]:
        """Find what the start depended on: a thread or a work item, and when; record the delay before the start."""
        graph = self.graph
        via, start_ns = graph.via[work], graph.start_ns[work]
        if via == LAUNCH:
            thread, before, at_ns = graph.launch_thread[work], -1, graph.launched_ns[work]
        elif via == NOTHING:
            thread, before, at_ns = self.main, -1, start_ns
        else:
            before = graph.before[work] if via == STREAM else graph.awaited[work]
            thread, at_ns = -1, graph.end_ns[before]
            if at_ns >= start_ns:
                return -1, before, start_ns
        if at_ns < start_ns:
            self._piece(leg, at_ns, min(start_ns, leg.end_ns), What.DELAY, work)
        return thread, before, at_ns

    def _go(self, thread: int, work: int, at_ns: int) -> None:
        """Walk the newest leg to its end, from a thread or a work item at an instant."""
        leg, floor_ns, collective = self.legs[-1], self.floor_ns, self.graph.collective
        while at_ns > floor_ns:
            if work >= 0:
                if collective[work]:
                    leg.collective, leg.reached_ns = work, at_ns
                    return
                head = self._along_chain(leg, work, at_ns)
                if head < 0:
                    return
                thread, work, at_ns = self._due_to(head, leg)
            elif thread >= 0:
                moved = self._along_thread(leg, thread, at_ns)
                if moved is None:
                    return
                thread, work, at_ns = moved
            else:
                self._piece(leg, floor_ns, at_ns, What.THREAD, -1)
                break
        leg.reached_ns = floor_ns

    def _along_chain(self, leg: Leg, work: int, at_ns: int) -> int:
        """Walk down to the head of the chain; −1 if the leg is finished."""
        own = len(self.legs) - 1
        head = self.graph.chains.head[work]
        other, since_ns = self.seen_chains.setdefault(head, (own, at_ns))
        if other != own:
            leg.joined, leg.reached_ns = other, max(min(since_ns, at_ns), self.floor_ns)
            self._piece(leg, leg.reached_ns, at_ns, What.CHAIN, work)
            return -1
        start_ns = self.graph.start_ns[head]
        self._piece(leg, start_ns, at_ns, What.CHAIN, work)
        if start_ns <= self.floor_ns:
            leg.reached_ns = self.floor_ns
            return -1
        return head

    def _along_thread(self, leg: Leg, thread: int, at_ns: int) -> tuple[int, int, int] | None:
        """Walk down to the next exit that this leg has not passed; None if it is finished."""
        own = len(self.legs) - 1
        exits = self.graph.exits.get(thread)
        number = bisect_right(exits.at_ns, at_ns) - 1 if exits else -1
        while self.seen_exits.get((thread, number), (-1, 0))[0] == own and number >= 0:
            number -= 1
        other, since_ns = self.seen_exits.setdefault((thread, number), (own, at_ns))
        if other != own:
            leg.joined, leg.reached_ns = other, max(min(since_ns, at_ns), self.floor_ns)
            self._piece(leg, leg.reached_ns, at_ns, What.THREAD, thread)
            return None
        if exits is None or number < 0 or exits.at_ns[number] <= self.floor_ns:
            self._piece(leg, self.floor_ns, at_ns, What.THREAD, thread)
            leg.reached_ns = self.floor_ns
            return None
        exit_ns = exits.at_ns[number]
        self._piece(leg, exit_ns, at_ns, What.THREAD, thread)
        via, target = exits.via[number], exits.target[number]
        if via == Via.THREAD:
            return target, -1, exit_ns
        if via == Via.END:
            return -1, target, exit_ns
        return self._before_start(leg, target, exit_ns)

    def _before_start(self, leg: Leg, work: int, at_ns: int) -> tuple[int, int, int]:
        """Handle a full queue: the device began a work item, which made room."""
        start_ns = min(self.graph.start_ns[work], at_ns)
        self._piece(leg, start_ns, at_ns, What.WORK, work)
        thread, before, due_ns = self._due_to(work, leg)
        return thread, before, min(due_ns, start_ns)


# -- segments ---------------------------------------------------------------------------------------------------------
# The pieces of walks as segments, each with its cause, its name and its operator.

DENSE: Final = 1 << 18
BLOCK: Final = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces of walks, as columns."""

    start_ns: Ints
    end_ns: Ints
    what: Ints
    index: Ints
    node: Ints
    """The route node it belongs to."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    start_ns: Ints
    end_ns: Ints
    cause: NDArray[np.int8]
    """``Cause``."""
    name: Codes
    """Of the innermost slice or the work item (for a delay, the delayed one); −1: none."""
    operator: Codes
    """The operator that it belongs to; −1: none."""
    place: NDArray[np.int32]
    """A thread (index into ``Trace.threads``), or the one that represents a stream; −1: none."""
    node: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, which: Any) -> Segments:
        return Segments(**{each.name: getattr(self, each.name)[which] for each in fields(self)})


def summed(key: Ints, time_ns: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """Return the distinct keys (0 to ``size``), ascending, with the sum of their times and their counts."""
    if size <= DENSE + 4 * len(key):
        # Sums of float64 are exact up to 2⁵³ ns, which is 104 days.
        count = np.bincount(key, minlength=1)
        groups = np.flatnonzero(count)
        return groups, np.bincount(key, time_ns, minlength=1)[groups].astype(np.int64), count[groups]
    # In blocks, as sorting needs several times their size; each has few distinct keys.
    blocks = [_summed(key[at : at + BLOCK], time_ns[at : at + BLOCK]) for at in range(0, max(len(key), 1), BLOCK)]
    found, times, counts = (np.concatenate(columns) for columns in zip(*blocks, strict=True))
    groups, which = distinct(found)
    return groups, np.bincount(which, times).astype(np.int64), np.bincount(which, counts).astype(np.int64)


def _summed(key: Ints, time_ns: Ints) -> tuple[Ints, Ints, Ints]:
    groups, which = distinct(key)
    return groups, np.bincount(which, time_ns).astype(np.int64), np.bincount(which)


def segments_of(graph: Graph, pieces: Pieces) -> Segments:
    """Convert pieces to segments, in no particular order."""
    on_thread = np.flatnonzero(pieces.what == What.THREAD)
    chains = np.flatnonzero(pieces.what == What.CHAIN)
    works = np.flatnonzero((pieces.what == What.WORK) | (pieces.what == What.DELAY))
    parts = [_of_work(graph, pieces, works), _of_chains(graph, pieces, chains)]
    threads = pieces.index[on_thread]
    operator = _operators(graph.window)
    for thread in np.unique(threads).tolist():
        which = on_thread[threads == thread]
        line = graph.lines.get(thread)
        parts.append(_nowhere(pieces, which) if line is None else _of_thread(graph, line, pieces, which, operator))
    columns = {each.name: [getattr(part, each.name) for part in parts] for each in fields(Segments)}
    parts.clear()
    # Column by column, so that at most one column exists twice.
    return Segments(**{name: np.concatenate(columns.pop(name)) for name in list(columns)})


def _operators(window: Window) -> Rows:
    """Return the slice itself if it is an operator, else the operator that contains it; −1: none; [slices]."""
    is_op = np.zeros(len(window.trace), bool)
    is_op[window.rows_of((Kind.OP,))] = True
    return window.calls.nearest(is_op)


def _of_chains(graph: Graph, pieces: Pieces, which: Ints) -> Segments:
    of, start_ns, until_ns, work, delay = expanded(
        graph.chains, graph.columns.end_ns, pieces.start_ns[which], pieces.end_ns[which], pieces.index[which]
    )
    what = np.where(delay > 0, int(What.DELAY), int(What.WORK))
    node = pieces.node[which][of]
    single = Pieces(start_ns=start_ns, end_ns=until_ns, what=what, index=work, node=node)
    return _of_work(graph, single, np.arange(len(work)))


def _of_work(graph: Graph, pieces: Pieces, which: Ints) -> Segments:
    window, slices = graph.window, graph.window.trace.slices
    work = pieces.index[which]
    row = graph.row[work]
    kernel = slices.kind[row] == Kind.KERNEL
    cause = np.where(kernel, Cause.COMPUTE, Cause.COPY)
    cause = np.where(graph.columns.collective[work], Cause.COMMUNICATION, cause)
    via = graph.columns.via[work]
    launched = (via == LAUNCH) | (via == NOTHING)
    delay = np.where(launched, Cause.LAUNCH_DELAY, Cause.KERNEL_GAP)
    owner = window.owner[row]
    return Segments(
        start_ns=pieces.start_ns[which],
        end_ns=pieces.end_ns[which],
        cause=np.where(pieces.what[which] == What.DELAY, delay, cause).astype(np.int8),
        name=slices.name[row],
        operator=np.where(owner >= 0, slices.name[owner], -1).astype(np.int32),
        place=slices.thread[row],
        node=pieces.node[which].astype(np.int32),
    )


def _of_thread(graph: Graph, line: HostLine, pieces: Pieces, which: Ints, operator: Rows) -> Segments:
    slices = graph.window.trace.slices
    start_ns, end_ns = pieces.start_ns[which], pieces.end_ns[which]
    first, last = line.at(start_ns), line.at(end_ns - 1)
    count = last - first + 1
    at = np.arange(int(count.sum())) + np.repeat(first - np.cumsum(count) + count, count)
    # Of the pieces of the line, which are fewer, or as many; −1 stands for no slice.
    names = padded(slices.name)
    return Segments(
        start_ns=np.maximum(line.start_ns[at], np.repeat(start_ns, count)),
        end_ns=np.minimum(line.ends_ns[at], np.repeat(end_ns, count)),
        cause=graph.causes[line.thread][at],
        name=names[line.row][at],
        operator=names[padded(operator)[line.row]][at],
        place=np.full(len(at), line.thread, np.int32),
        node=np.repeat(pieces.node[which].astype(np.int32), count),
    )


def _nowhere(pieces: Pieces, which: Ints) -> Segments:
    none = np.full(len(which), -1, np.int32)
    return Segments(
        start_ns=pieces.start_ns[which],
        end_ns=pieces.end_ns[which],
        cause=np.full(len(which), int(Cause.OTHER), np.int8),
        name=none,
        operator=none,
        place=none,
        node=pieces.node[which].astype(np.int32),
    )


# -- routes -----------------------------------------------------------------------------------------------------------
# How a rank reached the end of each step and each of its collectives: the forest of its walks, summed up.
#
# A *node* is a stretch of a walk; its parent is the stretch before it in time. A node is either the time inside one
# collective or lies between collectives. There are a few nodes per collective, none per event. A path over several
# ranks is made of these.

TOP = 4
"""Names kept per node."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    parent: Ints
    """[nodes]; the previous node in time; −1: the step began there."""
    step: Ints
    """[nodes]; index of the step that counts."""
    exchange: Ints
    """[nodes]; index into the rank's exchanges if the node is the time inside one; −1 otherwise."""
    on_path: NDArray[np.bool_]
    """[nodes]; part of the step's own critical path."""
    causes_ns: Ints
    """[nodes, causes]"""
    top_name: Ints
    """[nodes, TOP]; the longest names first, as indices into ``names``; −1: no more, or no name."""
    top_cause: Ints
    top_ns: Ints
    names: tuple[str, ...]
    """Of operators on the host and kernels on the device."""
    ends: Ints
    """[steps]; the node at the end of the step."""
    arrivals: Ints
    """[exchanges]; the node before the arrival; −1: it began outside of the steps."""


class _Nodes:
    """Growing lists of nodes and their pieces."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.step: list[int] = []
        self.work: list[int] = []
        """The collective whose time the node is; −1: none."""
        self.pieces: list[tuple[int, int, int, int, int]] = []

    def add(self, step: int, work: int = -1) -> int:
        self.parent.append(-1)
        self.step.append(step)
        self.work.append(work)
        return len(self.parent) - 1


def routes_of(graph: Graph, walks: list[StepWalk], exchanges: Rows) -> tuple[Routes, Segments]:
    """Build the routes and the segments of all nodes; ``exchanges``: the slices of the rank's exchanges."""
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
    """Add the nodes of a step's legs; return the first node of each, [legs]."""
    cuts: list[set[int]] = [set() for _ in walk.legs]
    for leg in walk.legs:
        if leg.joined >= 0:
            cuts[leg.joined].add(leg.reached_ns)
    at: list[dict[int, int]] = []
    """[legs]; the node that begins (going back) at each cut instant."""
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
    """Assign each piece to its node, cutting it where it spans several; both go back in time."""
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
    """Map work items to their exchanges."""
    by_row = {row: at for at, row in enumerate(rows.tolist())}
    works = np.flatnonzero(graph.columns.collective)
    pairs = zip(works.tolist(), graph.row[works].tolist(), strict=True)
    return {work: by_row[row] for work, row in pairs if row in by_row}


def _tops(graph: Graph, segments: Segments, count: int) -> tuple[Ints, Ints, Ints, tuple[str, ...]]:
    """Find what took most of each node: names, causes and times, and the texts of the names."""
    width = len(graph.window.trace.strings) + 1
    on_host = ~np.isin(segments.cause, (Cause.COMPUTE, Cause.COMMUNICATION, Cause.COPY))
    code = np.where(on_host & (segments.operator >= 0), segments.operator, segments.name).astype(np.int64) + 1
    key = (segments.node.astype(np.int64) * len(CAUSES) + segments.cause) * width + code
    groups, time, _ = summed(key, segments.end_ns - segments.start_ns, count * len(CAUSES) * width)
    node = groups // (width * len(CAUSES))
    order = np.lexsort((-time, node))
    place = np.arange(len(order)) - np.searchsorted(node[order], node[order])
    top, place = order[place < TOP], place[place < TOP]
    codes, short = distinct(groups[top] % width)
    top_name, top_cause = np.full((2, count, TOP), -1, np.int64)
    top_ns = np.zeros((count, TOP), np.int64)
    top_name[node[top], place] = np.where(codes[short] > 0, short, -1)
    top_cause[node[top], place] = groups[top] // width % len(CAUSES)
    top_ns[node[top], place] = time[top]
    return top_name, top_cause, top_ns, tuple(graph.window.trace.text(code - 1) for code in codes.tolist())
