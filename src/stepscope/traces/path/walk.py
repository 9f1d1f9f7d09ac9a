"""Walking back through a step's dependencies, from an instant to what it was due to.

A *leg* is a walk from the step's end, or from the arrival at a collective, back to the end of the collective before on
that walk, or to the step's start; or to where it meets a leg walked earlier, whose way it shares from there on.  So all
legs of a step are a forest, linear in the trace however many collectives overlap.

A leg's *pieces* are disjoint and without holes, from its end down: a thread, a work, or the delay before a work.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from stepscope.traces.path.graph import Graph, Via

__all__ = ["Leg", "Piece", "StepWalk", "What", "walk_back", "walk_step"]


NOTHING, STREAM, LAUNCH = int(Via.NOTHING), int(Via.STREAM), int(Via.LAUNCH)
"""Plain numbers compare much faster."""


class What(IntEnum):
    THREAD = 0
    WORK = 1
    DELAY = 2
    CHAIN = 3
    """Of works, down from one of them; with the delays between them."""


class Piece(NamedTuple):
    start_ns: int
    end_ns: int
    what: What
    which: int
    """A thread or a work."""


@dataclass(kw_only=True)
class Leg:
    end_ns: int
    """Where the walk began."""
    pieces: list[Piece] = field(default_factory=list)
    """The latest first; none empty."""
    collective: int = -1
    """The work at whose ``reached_ns`` it ended."""
    joined: int = -1
    """The leg that it shares the way with from ``reached_ns`` down."""
    reached_ns: int = 0


@dataclass(kw_only=True)
class StepWalk:
    legs: list[Leg]
    """The first is from the step's end."""
    of_collective: dict[int, int]
    """By work: the leg from its start back."""
    floor_ns: int
    """Where it ends."""


def walk_step(graph: Graph, step: int, collectives: list[int]) -> StepWalk:
    """``collectives``: works of which the legs are wanted; those on the path have theirs in any case."""
    walker = _Walker(graph, step)
    walker.from_end()
    return _walked(walker, collectives[::-1])


def walk_back(graph: Graph, work: int, floor_ns: int) -> StepWalk:
    """From the end of a work, through as many steps as it takes."""
    walker = _Walker(graph, len(graph.window.steps) - 1)
    walker.floor_ns = floor_ns
    walker.from_work(work)
    return _walked(walker, [])


def _walked(walker: _Walker, wanted: list[int]) -> StepWalk:
    done = 0
    while True:
        # Those that the path leads to come first, so that the path joins no other leg.
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
        """By thread and exit: the leg that has gone through it, and when it came to the stretch above."""
        self.seen_chains: dict[int, tuple[int, int]] = {}
        """By head: the leg that has gone down it, and when it came to it."""

    def from_end(self) -> None:
        graph, end_ns = self.graph, self.step.end_ns
        self.legs.append(Leg(end_ns=end_ns))
        if not self.step.name:
            # All of the trace is one step, which ends with whatever ends last.
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
        """What the work's start was due to: a thread or a work, and when; the delay until the start is put down."""
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
        """The leg made last, from a thread or a work at an instant, to its end."""
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
        """Down to the work at the head of the chain; −1: the leg is done."""
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
        """Down to the next exit that this leg has not gone through; None: it is done."""
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
        """A full queue: the device began a work, which made room."""
        start_ns = min(self.graph.start_ns[work], at_ns)
        self._piece(leg, start_ns, at_ns, What.WORK, work)
        thread, before, due_ns = self._due_to(work, leg)
        return thread, before, min(due_ns, start_ns)
