"""Sentences: why a rank is accused, what stands where.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from stepscope.flight.align import Group
from stepscope.flight.case import Case, Place
from stepscope.flight.combine import HOST_BACKENDS
from stepscope.flight.compare import Departure, usually_follows
from stepscope.flight.entries import GroupKey
from stepscope.flight.failures import FailureText
from stepscope.flight.stacks import user_frame
from stepscope.flight.verdict import Accused
from stepscope.flight.waits import Edge
from stepscope.flight.wording import called, frame_text, operation_text, parting_frame, ranks_text, site_frame
from stepscope.records.hang import Frame, WaitingIn

__all__ = [
    "accused",
    "crashed_reason",
    "departed",
    "device_reason",
    "in_group",
    "lost_reason",
    "missing_reason",
    "missing_title",
    "telling",
    "waiting_in",
    "went_past",
    "when",
]


def accused(case: Case, rank: int, reason: str) -> Accused:
    return Accused(rank=rank, reason=reason, at=where_is(case, rank))


def where_is(case: Case, rank: int) -> Frame | None:
    """The line of the user's code: by its stack, else where it called what it did last."""
    frame = user_frame(case.stacks.get(rank, ()))
    if frame is not None or rank not in case.dumps or case.stacks.get(rank):
        return frame
    calls = [
        (one.trace.created_ns[-1], one.site(one.trace.sequences[-1]))
        for group in case.groups
        if (one := group.progress.get(rank)) is not None and one.trace.sequences
    ]
    site = max(calls, key=lambda call: call[0])[1] if calls else ()
    return site_frame(site)


def crashed_reason(failure: FailureText) -> str:
    return f"raised {failure.type}{': ' if failure.message else ''}{failure.message}"


def device_reason(group: Group, sequence: int) -> str:
    ended = [rank for rank, one in group.progress.items() if one.has_ended(sequence)]
    telling = called(next(one.operation(sequence) for one in group.progress.values() if one.pending), sequence)
    return f"has not seen the end of {telling} of {group.name}, which {ranks_text(ended)} did: its device stopped"


def lost_reason(lost_peer: bool) -> str:
    return "left no dump, and others lost their connection to it" if lost_peer else "left no dump"


def departed(case: Case, group: Group, left: Departure, rank: int, *, past: bool) -> Accused:
    """The line is where its path parts from that of the others, not where it stands now."""
    mine = next(side for side in left.sides if rank in side)
    others = next((side for side in left.sides if not set(side) & set(left.ranks)), left.sides[0])
    ours, theirs = (_site(case, group, side[0], left.sequence) for side in (mine, others))
    at = parting_frame(ours, theirs)
    did, they = (
        _did(group, mine[0], left.sequence, at),
        _did(group, others[0], left.sequence, parting_frame(theirs, ours)),
    )
    reason = f"{did} where {ranks_text(others)} {they}"
    if past:
        reason = f"left out the call that {ranks_text(others)} made ({they.removeprefix('called ')}), and {did}"
    return Accused(rank=rank, reason=reason, at=at)


def went_past(case: Case, group: Group, left: Departure) -> tuple[int, ...]:
    """Those that left out what the others wait in, and went on: nobody, if they called something else in its place.

    Told by what came next whenever it was called before; the first time it is called, by which side is further on in
    the same function.
    """
    if left.differs == "call site" or len(left.sides) != 2:
        return ()
    one, other = left.sides
    usual = {
        side: usually_follows(group, side[0], back[0], left.sequence) for side, back in ((one, other), (other, one))
    }
    past = [side for side, follows in usual.items() if follows]
    if not past and left.differs == "operation" and not any(follows is False for follows in usual.values()):
        past = _further_on(case, group, left)
    return past[0] if len(past) == 1 and set(left.ranks) <= set(past[0]) else ()


def _further_on(case: Case, group: Group, left: Departure) -> list[tuple[int, ...]]:
    paths = [_site(case, group, side[0], left.sequence) for side in left.sides]
    one, other = parting_frame(paths[0], paths[1]), parting_frame(paths[1], paths[0])
    if one is None or other is None or (one.file, one.function) != (other.file, other.function):
        return []
    return [
        side
        for side, mine, theirs in zip(left.sides, (one, other), (other, one), strict=True)
        if mine.line > theirs.line
    ]


def _site(case: Case, group: Group, rank: int, sequence: int) -> tuple[Frame, ...]:
    """From where a rank called it: as recorded, or by its stack if it waits there now."""
    recorded = group.progress[rank].site(sequence)
    operation = group.progress[rank].operation(sequence)
    ahead = operation is not None and operation.backend not in HOST_BACKENDS  # of its device: its stack tells nothing
    if recorded or ahead or group.waiting.get(rank) != sequence:
        return recorded
    return next((thread.frames for thread in case.stacks.get(rank, ()) if thread.main), ())


def missing_reason(case: Case, rank: int, owed: Sequence[Edge], place: Place | None) -> str:
    """``owed``: all waits for it."""
    first = telling(owed, [rank])
    text = f"has not called {in_group(first)}"
    if len({(edge.group.key, edge.sequence) for edge in owed}) > 1:
        text += f" and {len({(edge.group.key, edge.sequence) for edge in owed}) - 1} more"
    if place is not None and place.doing == "p2p":
        return f"{text}: it is in {place.call}, which no rank answers"
    if place is not None and place.doing == "collective":
        return f"{text}: it is in {place.call}"
    if place is not None and place.doing == "input":
        return f"{text}: it waits for its next batch"
    if place is not None:
        return f"{text}: it is elsewhere in its own code"
    progress = [one for group in case.groups if (one := group.progress.get(rank)) is not None]
    idle = not any(one.pending or one.trace.p2p for one in progress)
    return f"{text}; nothing is pending on it: its host stopped issuing" if idle else text


def missing_title(case: Case, edge: Edge, culprits: Sequence[int]) -> str:
    blamed = set(culprits)
    waiting = sorted({e.waiter for e in case.edges if e.group is edge.group and e.waited in blamed})
    verb = "has" if len(culprits) == 1 else "have"
    waits = "waits" if len(waiting) == 1 else "wait"
    return (
        f"{ranks_text(culprits, start=True)} {verb} not called {called(edge.operation, edge.sequence)} of "
        f"{edge.group.name}; {ranks_text(waiting)} {waits} in it."
    )


def telling(edges: Iterable[Edge], culprits: Collection[int]) -> Edge:
    """Of the waits for these: in the collective in which most wait for most of them, and of such the first called."""
    blamed = set(culprits)
    many: Counter[tuple[GroupKey, int]] = Counter()
    firsts: dict[tuple[int, int], Edge] = {}
    for edge in edges:
        if edge.waited in blamed:
            many[edge.group.key, edge.sequence] += 1
            first = firsts.setdefault((id(edge.group), edge.sequence), edge)
            if edge.waiter < first.waiter:
                firsts[id(edge.group), edge.sequence] = edge
    return min(firsts.values(), key=lambda e: (-many[e.group.key, e.sequence], when(e.group, e.sequence), e.waiter))


def when(group: Group, sequence: int) -> int:
    """When that one was first called, by anybody."""
    times = [
        one.trace.created_ns[at]
        for one in group.progress.values()
        if (at := one.place(sequence)) is not None and one.trace.created_ns[at] > 0
    ]
    return min(times, default=0)


def in_group(edge: Edge) -> str:
    return f"{called(edge.operation, edge.sequence)} of {edge.group.name}"


def waiting_in(group: Group, rank: int, sequence: int) -> WaitingIn:
    operation = group.progress[rank].operation(sequence) if rank in group.progress else None
    sizes = (operation.input_sizes or operation.output_sizes) if operation else ()
    return WaitingIn(
        group=group.key[0],
        description=group.key[1],
        sequence=sequence,
        op=operation.name if operation else "",
        sizes=" ".join(str(list(size)) for size in sizes[:4]),
        dtypes=" ".join(operation.dtypes[:4]) if operation else "",
    )


def _did(group: Group, rank: int, sequence: int, frame: Frame | None) -> str:
    operation = group.progress[rank].operation(sequence)
    at = frame_text(frame)
    return f"called {operation_text(operation) if operation else 'nothing'}{' at ' if at else ''}{at}"
