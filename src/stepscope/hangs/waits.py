"""Who waits for whom: a graph of ranks and of the calls they wait in, and the circles in it.

A rank waits in a call, and a call waits for those of its group that are not in it; a send or recv waits for its peer.
With calls as nodes of their own, a thousand ranks that wait for one are a thousand edges and not a million.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepscope.flight.combine import OF_GLOO
from stepscope.hangs.situation import Situation
from stepscope.hangs.words import group_text
from stepscope.records.hang import WaitingIn

__all__ = ["Waits", "circles", "cycle_text", "is_p2p", "waits_of"]

Node = tuple[str, int]
"""``("", rank)``, or the name of a group and 0."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    edges: Mapping[Node, tuple[Node, ...]]
    elsewhere: frozenset[int]
    """Ranks of other hosts that are waited for, or not known not to be."""


def is_p2p(waiting: WaitingIn | None) -> bool:
    return waiting is not None and (waiting.peer is not None or waiting.op in ("send", "recv", "isend", "irecv"))


def waits_of(situation: Situation) -> Waits:
    edges: dict[Node, tuple[Node, ...]] = {}
    elsewhere: set[int] = set()
    here = situation.ranks
    for rank in situation.waiting:
        waiting = situation.doings[rank].waiting_in
        if waiting is None:
            continue
        if is_p2p(waiting):
            missing = set() if waiting.peer is None or _answers(situation, rank, waiting) else {waiting.peer}
            edges["", rank] = tuple(("", peer) for peer in missing if peer in here)
        else:
            call = (f"in {_queue_of(waiting)}", 0)
            edges["", rank] = (call,)
            if call in edges:
                continue
            missing = {other for other in situation.members_of(waiting) if not _joined(situation, other, waiting)}
            edges[call] = tuple(("", other) for other in sorted(missing) if other in here)
        elsewhere |= {other for other in missing if other not in here}
    return Waits(edges=edges, elsewhere=frozenset(elsewhere))


def _joined(situation: Situation, rank: int, waiting: WaitingIn) -> bool:
    """Whether this rank waits in the same group, or may: what group it is, is not always known."""
    doing = situation.doings.get(rank)
    own = doing.waiting_in if doing is not None and rank in situation.waiting else None
    return (
        own is not None
        and not is_p2p(own)
        and (_queue_of(own) == _queue_of(waiting) or not (own.group and waiting.group))
    )


def _queue_of(waiting: WaitingIn) -> str:
    """Its group, or gloo's half of one that NCCL is in, too: calls in the one do not meet calls in the other."""
    return f"{waiting.group}{OF_GLOO}" if waiting.description.endswith(OF_GLOO) else waiting.group


def _answers(situation: Situation, rank: int, waiting: WaitingIn) -> bool:
    """Whether the peer of a send or recv is in the call that goes with it."""
    doing = situation.doings.get(waiting.peer) if waiting.peer is not None else None
    other = doing.waiting_in if doing is not None and doing.rank in situation.waiting else None
    if other is None or not is_p2p(other) or other.peer not in (rank, None):
        return False
    return ("send" in other.op) != ("send" in waiting.op)


def circles(edges: Mapping[Node, tuple[Node, ...]]) -> list[tuple[int, ...]]:
    """Ranks that wait for themselves by way of one another: strongly connected, each set in order (Tarjan)."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    on_stack: set[Node] = set()
    stack: list[Node] = []
    found: list[tuple[int, ...]] = []
    for start in sorted(edges):
        if start in index:
            continue
        work: list[tuple[Node, int]] = [(start, 0)]
        while work:
            node, at = work.pop()
            if at == 0:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            nexts = edges.get(node, ())
            if at > 0:
                low[node] = min(low[node], low[nexts[at - 1]])
            while at < len(nexts) and nexts[at] in index:
                if nexts[at] in on_stack:
                    low[node] = min(low[node], index[nexts[at]])
                at += 1
            if at < len(nexts):
                work += [(node, at + 1), (nexts[at], 0)]
            elif low[node] == index[node]:
                found += _component(node, stack, on_stack)
    return sorted(found)


def _component(node: Node, stack: list[Node], on_stack: set[Node]) -> list[tuple[int, ...]]:
    """Take the set that ``node`` closes off the stack; the ranks in it, where it is a circle."""
    members = []
    while True:
        member = stack.pop()
        on_stack.discard(member)
        members.append(member)
        if member == node:
            break
    ranks = sorted(number for name, number in members if not name)
    return [tuple(ranks)] if len(members) > 1 and ranks else []


def cycle_text(situation: Situation, waits: Waits, ranks: Sequence[int]) -> tuple[str, ...]:
    """The shortest way from the first of these back to itself, a sentence a rank."""
    way = _way_round(waits.edges, ("", ranks[0]))
    stops = [number for name, number in way if not name]
    return tuple(
        _wait_text(one, other, situation.doings[one].waiting_in)
        for one, other in zip(stops, [*stops[1:], stops[0]], strict=True)
    )


def _wait_text(one: int, other: int, waiting: WaitingIn | None) -> str:
    said = f"rank {one} waits for rank {other}"
    if waiting is None:
        return said
    if is_p2p(waiting):
        return f"{said} ({waiting.op})"
    number = f" {waiting.sequence}" if waiting.sequence is not None else ""
    call = f"{waiting.op}{number}".strip()
    return f"{said} in {group_text(waiting) or 'a group'}" + (f" ({call})" if call else "")


def _way_round(edges: Mapping[Node, tuple[Node, ...]], start: Node) -> list[Node]:
    came: dict[Node, Node] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for after in edges.get(node, ()):
            if after == start:
                way = [node]
                while way[-1] != start:
                    way.append(came[way[-1]])
                return way[::-1]
            if after not in came:
                came[after] = node
                queue.append(after)
    return [start]
