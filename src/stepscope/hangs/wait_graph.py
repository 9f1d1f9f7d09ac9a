"""Which ranks wait for which, in which call: one graph for live hangs and for dumps. Pure.

A ``Wait`` is one call that has not ended: the ranks that wait in it, and the ranks that have not joined it. A rank that
others wait for and that waits for none blocks the job; if there is no such rank, ranks wait for each other in a circle.
A thousand ranks that wait for one are one ``Wait``, not a thousand pairs.

Two sources make waits of the same form: Flight Recorders, which number the calls (``hangs/recorded.py``), and what the
hosts of the ranks do (``hangs/case.py``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from stepscope.flight.wording import group_text
from stepscope.hangs.alignment import Group
from stepscope.records.hang import WaitingIn

__all__ = ["Wait", "WaitGraph", "circles", "cycle_sentences", "is_p2p"]

P2P_CALLS = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")

Step = tuple[int, int, WaitingIn]
"""Of a cycle: a rank, the rank that it waits for, and the call in which it does."""


def is_p2p(call: WaitingIn | None) -> bool:
    return call is not None and (call.peer is not None or call.op in P2P_CALLS)


@dataclass(frozen=True, kw_only=True)
class Wait:
    waiters: tuple[int, ...]
    missing: tuple[int, ...]
    """The ranks that have not joined the call, in order."""
    call: WaitingIn
    """As the first of the waiters made it."""
    group: Group | None = None
    """The progress of the group's members, if Flight Recorders know it."""
    called_ns: int = 0
    """When any rank first made the call; 0: not known."""


class WaitGraph:
    def __init__(self, waits: Iterable[Wait] = ()) -> None:
        self.waits = tuple(wait for wait in waits if wait.waiters and wait.missing)
        self.waiters = frozenset(rank for wait in self.waits for rank in wait.waiters)
        self.missing = frozenset(rank for wait in self.waits for rank in wait.missing)

    @property
    def ends(self) -> tuple[int, ...]:
        """Ranks that others wait for and that wait for none."""
        return tuple(sorted(self.missing - self.waiters))

    def waits_for(self, ranks: Iterable[int]) -> list[Wait]:
        wanted = set(ranks)
        return [wait for wait in self.waits if not wanted.isdisjoint(wait.missing)]

    def most_telling(self, ranks: Collection[int]) -> Wait | None:
        """The wait for these ranks in the call with the most pairs that wait; of several, the one called first."""
        wanted = set(ranks)
        pairs: Counter[tuple[str, str, int | None]] = Counter()
        found = self.waits_for(wanted)
        for wait in found:
            pairs[_call_key(wait.call)] += len(wait.waiters) * len(wanted.intersection(wait.missing))
        return min(found, key=lambda wait: (-pairs[_call_key(wait.call)], wait.called_ns, wait.waiters), default=None)

    def circle(self) -> tuple[int, ...]:
        """Ranks that all wait for each other, directly or indirectly; of several such circles the lowest ranks'."""
        return min(circles(self._edges()), default=())

    def cycle(self, start: int) -> tuple[Step, ...]:
        """The shortest way from a rank back to itself, or empty."""
        rows: dict[int, list[Wait]] = {}
        for wait in self.waits:
            for rank in wait.waiters:
                rows.setdefault(rank, []).append(wait)
        came: dict[int, Step] = {}
        queue = deque([start])
        while queue:
            rank = queue.popleft()
            for wait in rows.get(rank, ()):
                for other in wait.missing:
                    if other not in came:
                        came[other] = (rank, other, wait.call)
                        queue.append(other)
                    if other == start:
                        return _unwound(came, start)
        return ()

    def _edges(self) -> dict[int, tuple[int, ...]]:
        """From ranks to their waits (negative numbers), and from those to the ranks that are missing."""
        edges: dict[int, list[int]] = {}
        for number, wait in enumerate(self.waits, 1):
            edges[-number] = list(wait.missing)
            for rank in wait.waiters:
                edges.setdefault(rank, []).append(-number)
        return {node: tuple(after) for node, after in edges.items()}


def circles(edges: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The strongly connected components with a cycle, each as its sorted ranks: the nodes from 0 up (Tarjan)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    found: list[tuple[int, ...]] = []
    for start in edges:
        if start in index:
            continue
        work: list[tuple[int, int]] = [(start, 0)]
        while work:
            node, at = work.pop()
            if at == 0:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            following = edges.get(node, ())
            if at > 0:
                low[node] = min(low[node], low[following[at - 1]])
            while at < len(following) and following[at] in index:
                if following[at] in on_stack:
                    low[node] = min(low[node], index[following[at]])
                at += 1
            if at < len(following):
                work += [(node, at + 1), (following[at], 0)]
            elif low[node] == index[node]:
                component = [stack.pop()]
                while component[-1] != node:
                    component.append(stack.pop())
                on_stack.difference_update(component)
                if len(component) > 1:
                    found.append(tuple(sorted(rank for rank in component if rank >= 0)))
    return sorted(found)


def cycle_sentences(cycle: Iterable[Step]) -> tuple[str, ...]:
    """``rank 0 waits for rank 2 in mesh_dp (all_reduce 4)``, one per rank."""
    return tuple(_step_text(*step) for step in cycle)


def _step_text(rank: int, other: int, call: WaitingIn) -> str:
    text = f"rank {rank} waits for rank {other}"
    if is_p2p(call):
        return f"{text} ({call.op})"
    number = f" {call.sequence}" if call.sequence is not None else ""
    name = f"{call.op}{number}".strip()
    return f"{text} in {group_text(call) or 'a group'}" + (f" ({name})" if name else "")


def _unwound(came: Mapping[int, Step], start: int) -> tuple[Step, ...]:
    way = [came[start]]
    while way[-1][0] != start:
        way.append(came[way[-1][0]])
    return tuple(reversed(way))


def _call_key(call: WaitingIn) -> tuple[str, str, int | None]:
    return call.group, call.description, call.sequence
