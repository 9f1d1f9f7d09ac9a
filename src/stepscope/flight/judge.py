"""Judge the dumps of a job: which rank blocks it, why, and which ranks wait for it. Pure.

The questions are ordered by certainty: did a rank fail on its own; did its device stop; did it diverge from the others;
does every rank wait, directly or indirectly, for it; do ranks wait for each other; did it leave no dump. If nothing is
waiting, nothing is wrong, whatever else the dumps show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepscope.flight.alignment import Divergence, Group, usually_follows
from stepscope.flight.dump import HOST_BACKENDS, Dump, GroupKey
from stepscope.flight.stacks import FailureText, RankLog, group_stacks, user_frame
from stepscope.flight.verdict import (
    Accused,
    Case,
    Edge,
    Place,
    Verdict,
    build_case,
    cycle_in,
    ends_of,
    grid_of,
    group_rows,
    missing_rows,
    place_of,
    reaching,
    split_at,
    split_of,
    waits_for,
    waits_of,
)
from stepscope.flight.wording import call_name, frame_text, operation_text, parting_frame, ranks_text, site_frame
from stepscope.records.hang import Frame, HangKind, ThreadStack, WaitingIn

__all__ = ["judge"]


# -- reasons ----------------------------------------------------------------------------------------------------------
# Sentences: why a rank is accused, and where it is.


def accuse(case: Case, rank: int, reason: str) -> Accused:
    return Accused(rank=rank, reason=reason, at=where_is(case, rank))


def where_is(case: Case, rank: int) -> Frame | None:
    """The line of user code that the rank is at: from its stack, else from its last recorded call."""
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
    telling = call_name(next(one.operation(sequence) for one in group.progress.values() if one.pending), sequence)
    return f"never saw {telling} in {group.name} complete, although {ranks_text(ended)} did; its device has stopped"


def lost_reason(lost_peer: bool) -> str:
    return "left no dump, and others lost their connection to it" if lost_peer else "left no dump"


def accuse_diverged(case: Case, group: Group, left: Divergence, rank: int, *, past: bool) -> Accused:
    """Accuse a rank of divergence; the line is where its path leaves that of the others, not where it is now."""
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


def went_past(case: Case, group: Group, left: Divergence) -> tuple[int, ...]:
    """Ranks that skipped the call that the others wait in and continued; empty if they made another call instead.

    If the call occurred before, what followed it then decides; on its first occurrence, the side that is further on in
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


def _further_on(case: Case, group: Group, left: Divergence) -> list[tuple[int, ...]]:
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
    """The call site of a rank: as recorded, or from its stack if it waits there now."""
    recorded = group.progress[rank].site(sequence)
    operation = group.progress[rank].operation(sequence)
    ahead = operation is not None and operation.backend not in HOST_BACKENDS  # of the device: the stack says nothing
    if recorded or ahead or group.waiting.get(rank) != sequence:
        return recorded
    return next((thread.frames for thread in case.stacks.get(rank, ()) if thread.main), ())


def missing_reason(case: Case, rank: int, owed: Sequence[Edge], place: Place | None) -> str:
    """Why a rank that others wait for is accused. ``owed``: all waits for it."""
    first = most_telling_edge(owed, [rank])
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
        f"{ranks_text(culprits, start=True)} {verb} not called {call_name(edge.operation, edge.sequence)} of "
        f"{edge.group.name}; {ranks_text(waiting)} {waits} in it."
    )


def most_telling_edge(edges: Iterable[Edge], culprits: Collection[int]) -> Edge:
    """The wait for these ranks in the collective with the most such waits; the first called of several."""
    blamed = set(culprits)
    many: Counter[tuple[GroupKey, int]] = Counter()
    firsts: dict[tuple[int, int], Edge] = {}
    for edge in edges:
        if edge.waited in blamed:
            many[edge.group.key, edge.sequence] += 1
            first = firsts.setdefault((id(edge.group), edge.sequence), edge)
            if edge.waiter < first.waiter:
                firsts[id(edge.group), edge.sequence] = edge
    return min(
        firsts.values(), key=lambda e: (-many[e.group.key, e.sequence], first_called_ns(e.group, e.sequence), e.waiter)
    )


def first_called_ns(group: Group, sequence: int) -> int:
    """When any rank first called it."""
    times = [
        one.trace.created_ns[at]
        for one in group.progress.values()
        if (at := one.place(sequence)) is not None and one.trace.created_ns[at] > 0
    ]
    return min(times, default=0)


def in_group(edge: Edge) -> str:
    return f"{call_name(edge.operation, edge.sequence)} of {edge.group.name}"


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


# -- verdict ----------------------------------------------------------------------------------------------------------

NO_STACKS: Mapping[int, tuple[ThreadStack, ...]] = {}
NO_ERRORS: Mapping[int, str] = {}
NO_LOGS: Mapping[int, RankLog] = {}


def judge(
    dumps: Sequence[Dump],
    *,
    stacks: Mapping[int, tuple[ThreadStack, ...]] = NO_STACKS,
    errors: Mapping[int, str] = NO_ERRORS,
    logs: Mapping[int, RankLog] = NO_LOGS,
    world: int | None = None,
    unreadable: Collection[int] = (),
    problems: Sequence[str] = (),
) -> Verdict:
    """The verdict on one job, from dumps in any order. ``unreadable``: ranks whose dump exists but cannot be read."""
    case = build_case(dumps, stacks=stacks, errors=errors, world=world, unreadable=unreadable)
    found = _decide(case)
    return _finished(found, case, logs, problems)


def _decide(case: Case) -> Verdict:
    for question in (_failed, _devices, _diverged, _at_the_end, _each_other, _all_joined, _in_p2p):
        verdict = question(case)
        if verdict is not None:
            return verdict
    return Verdict(healthy=True, kind=None, title=_healthy_title(case))


def _failed(case: Case) -> Verdict | None:
    """Ranks that failed on their own; errors of other ranks about closed connections do not count."""
    own = [rank for rank, failure in sorted(case.failures.items()) if failure.own]
    if not own:
        return None
    first = case.failures[own[0]]
    what = f"{first.type}: {first.message}" if first.message else first.type
    return Verdict(
        healthy=False,
        kind="rank_crashed",
        title=f"{ranks_text(own, start=True)} failed by {'itself' if len(own) == 1 else 'themselves'}: {what}.",
        culprits=tuple(accuse(case, rank, crashed_reason(case.failures[rank])) for rank in own),
        victims=_rest(case, own),
        **_where(case, own),
    )


def _devices(case: Case) -> Verdict | None:
    """Ranks whose device has not ended what has ended on their peers."""
    lagging = sorted(case.lagging)
    if not lagging:
        return None
    group, sequence = case.lagging[lagging[0]]
    what = call_name(group.progress[lagging[0]].operation(sequence), sequence)
    decided = 2 * len(lagging) <= len(case.dumps)
    return Verdict(
        healthy=False,
        kind="hang_device",
        title=(
            f"The device of {ranks_text(lagging)} is stuck: {what} of {group.name} has ended on its peers and not "
            "there."
        ),
        culprits=tuple(accuse(case, r, device_reason(*case.lagging[r])) for r in lagging) if decided else (),
        suspects=() if decided else tuple(lagging),
        undecidable=not decided,
        victims=_rest(case, lagging),
        group=group.key[0],
        description=group.key[1],
        sequence=sequence,
        waiting_in=waiting_in(group, lagging[0], sequence),
    )


def _diverged(case: Case) -> Verdict | None:
    """Ranks that made another call than the others."""
    if not case.departures:
        return None
    group, left = min(case.departures, key=lambda one: first_called_ns(one[0], one[1].sequence))
    past = went_past(case, group, left)
    if past:
        left = replace(left, ranks=past)
    others = [rank for side in left.sides for rank in side if rank not in left.ranks]
    waiting = group.waiting
    stuck = next((rank for rank in others if rank in waiting), next(iter(waiting)))
    about: dict[str, Any] = {
        "healthy": False,
        "kind": "hang_missing_collective" if past else "hang_mismatch",
        "group": group.key[0],
        "description": group.key[1],
        "sequence": left.sequence,
        "waiting_in": waiting_in(group, stuck, waiting[stuck]),
        "first_divergence": split_of(group, left),
        "evidence": _ended_unlike(group, left.sequence, stuck) if left.differs != "call site" else (),
    }
    if not left.ranks:
        suspects = tuple(sorted(rank for side in left.sides for rank in side))
        title = (
            f"{ranks_text(suspects, start=True)} disagree on the {left.differs} of collective {left.sequence} in "
            f"{group.name}; the dumps do not show which side is wrong."
        )
        return Verdict(title=title, undecidable=True, suspects=suspects, victims=_rest(case, suspects), **about)
    title = f"{ranks_text(left.ranks, start=True)} diverged from the others at collective {left.sequence} of "
    title += f"{group.name}: another {left.differs}."
    if past:
        what = call_name(group.progress[others[0]].operation(left.sequence), left.sequence)
        title = f"{ranks_text(past, start=True)} skipped {what} of {group.name}."
    return Verdict(
        title=title,
        culprits=tuple(accuse_diverged(case, group, left, rank, past=bool(past)) for rank in left.ranks),
        victims=_rest(case, left.ranks),
        **about,
    )


def _ended_unlike(group: Group, sequence: int, stuck: int) -> tuple[str, ...]:
    """A note on ranks that made different calls there and continued."""
    if any(not one.has_ended(sequence) for one in group.progress.values()):
        return ()
    now = group.waiting[stuck]
    what = call_name(group.progress[stuck].operation(now), now)
    told = f"Collective {sequence} still completed, because NCCL does not check that calls match."
    return (f"{told} After it the ranks were out of step, until they hung in {what}.",)


def _at_the_end(case: Case) -> Verdict | None:
    """Ranks that all others wait for and that wait for no other rank."""
    ends = ends_of(case.edges)
    certain = [rank for rank in ends if rank in case.dumps or _seen_elsewhere(case, rank)]
    if not certain:
        return _without_dump(case, ends)
    if _in_flight(case):
        return None
    edge = most_telling_edge(case.edges, certain)
    owed = waits_for(case.edges, certain)
    places = {rank: place_of(case.stacks.get(rank, ())) for rank in certain}
    kind: HangKind = "hang_missing_collective"
    if all(place is not None and place.doing == "input" for place in places.values()):
        kind = "hang_input"
    return Verdict(
        healthy=False,
        kind=kind,
        title=missing_title(case, edge, certain),
        culprits=tuple(accuse(case, rank, missing_reason(case, rank, owed[rank], places[rank])) for rank in certain),
        victims=tuple(sorted(reaching(case.edges, certain) - set(certain))),
        group=edge.group.key[0],
        description=edge.group.key[1],
        sequence=edge.sequence,
        waiting_in=waiting_in(edge.group, edge.waiter, edge.sequence),
        first_divergence=split_at(edge),
    )


def _seen_elsewhere(case: Case, rank: int) -> bool:
    """Whether the stack of a rank without a dump shows it outside a collective."""
    place = place_of(case.stacks.get(rank, ()))
    return place is not None and place.doing != "collective"


def _without_dump(case: Case, ends: Sequence[int]) -> Verdict | None:
    """All ranks wait for ranks that left no dump."""
    if not ends:
        return None
    edge = most_telling_edge(case.edges, ends)
    unread = [rank for rank in ends if rank in case.unreadable]
    lost_peer = any(not failure.own for failure in case.failures.values())
    decided = not unread and 2 * len(ends) <= len(case.world)
    kind: HangKind = "rank_crashed" if lost_peer else "rank_lost" if not unread else "hang_unknown"
    why = (
        "left no dump" if not unread else "has a dump that cannot be read" if len(ends) == 1 else "have no usable dump"
    )
    return Verdict(
        healthy=False,
        kind=kind,
        title=f"{ranks_text(ends, start=True)} {why}; {ranks_text(_waiters(case.edges, ends))} waited for it in "
        f"{call_name(edge.operation, edge.sequence)} of {edge.group.name}.",
        culprits=tuple(Accused(rank=rank, reason=lost_reason(lost_peer)) for rank in ends) if decided else (),
        suspects=() if decided else tuple(ends),
        undecidable=not decided,
        victims=tuple(sorted(reaching(case.edges, ends) - set(ends))),
        group=edge.group.key[0],
        description=edge.group.key[1],
        sequence=edge.sequence,
        waiting_in=waiting_in(edge.group, edge.waiter, edge.sequence),
        first_divergence=split_at(edge),
    )


def _each_other(case: Case) -> Verdict | None:
    """Ranks that wait for each other in a cycle; only those in the rarer of two groups, if one is rarer."""
    cycle = cycle_in(case.edges)
    if not cycle:
        return None
    ranks = [edge.waiter for edge in cycle]
    kinds: dict[str, list[int]] = {}
    for edge in cycle:
        kinds.setdefault(edge.group.name, []).append(edge.waiter)
    sides = sorted(kinds.values(), key=len)
    blamed = sides[0] if len(sides) > 1 and len(sides[0]) < len(sides[1]) else ranks
    first = cycle[0]
    reasons = {edge.waiter: f"waits for rank {edge.waited} in {in_group(edge)}" for edge in cycle}
    return Verdict(
        healthy=False,
        kind="hang_deadlock",
        title=f"{ranks_text(ranks, start=True)} wait for each other in a circle, in {_and(sorted(kinds))}.",
        culprits=tuple(accuse(case, rank, reasons[rank]) for rank in sorted(blamed)),
        victims=tuple(sorted((reaching(case.edges, ranks) | set(ranks)) - set(blamed))),
        group=first.group.key[0],
        description=first.group.key[1],
        sequence=first.sequence,
        waiting_in=waiting_in(first.group, first.waiter, first.sequence),
        first_divergence=split_at(first),
        cycle=tuple(f"rank {edge.waiter} waits for rank {edge.waited} in {in_group(edge)}" for edge in cycle),
    )


def _all_joined(case: Case) -> Verdict | None:
    """All ranks called it and none saw its end: the device or the network is stuck, or it was still in progress."""
    stuck = [
        (group, rank) for group in case.groups for rank, one in group.progress.items() if one.pending and not one.failed
    ]
    if not stuck:
        return None
    if _in_flight(case) and case.edges:
        return None
    group, rank = min(stuck, key=lambda one: first_called_ns(one[0], one[0].progress[one[1]].pending[0]))
    sequence = group.progress[rank].pending[0]
    operation = group.progress[rank].operation(sequence)
    members = sorted(group.waiting)
    alone = len(group.members) == 1
    on_host = operation is None or operation.backend in ("gloo", "mpi", "")
    return Verdict(
        healthy=False,
        kind="hang_unknown" if on_host else "hang_device",
        title=(
            f"{ranks_text(members, start=True)} called {call_name(operation, sequence)} of {group.name}, and it hangs: "
            f"{'the network, or it was still under way' if on_host else 'its device or the network is stuck'}."
        ),
        culprits=(accuse(case, rank, "called it, but its device never finished it"),) if alone else (),
        undecidable=not alone,
        suspects=() if alone else tuple(members),
        victims=tuple(sorted(case.waiting - {rank})) if alone else (),
        group=group.key[0],
        description=group.key[1],
        sequence=sequence,
        waiting_in=waiting_in(group, rank, sequence),
    )


def _in_p2p(case: Case) -> Verdict | None:
    """Nothing recorded is pending, but stacks show ranks in send or recv, which gloo does not record."""
    inside = [r for r, threads in sorted(case.stacks.items()) if (p := place_of(threads)) and p.doing == "p2p"]
    if not inside:
        return None
    return Verdict(
        healthy=False,
        kind="hang_unknown",
        title=f"{ranks_text(inside, start=True)} wait in send or recv, about which the recorder has no details.",
        undecidable=True,
        suspects=tuple(inside),
    )


def _in_flight(case: Case) -> bool:
    """Whether the job is just running: dumps are not taken at the same instant, and one rank is always first.

    Fewer than half of a group wait, each in one collective only, and all others had reached the previous one; and
    nothing else (stacks, errors, ranks without a dump) indicates a stop.
    """
    if case.stacks or case.failures or case.dumpless or not case.edges:
        return False
    for edge in case.edges:
        progress = edge.group.progress
        waiters = [rank for rank in edge.group.waiting if not progress[rank].failed]
        ahead = len(progress[edge.waiter].pending) > 1 or progress[edge.waited].enqueued != edge.sequence - 1
        if ahead or 2 * len(waiters) >= len(edge.group.members) or progress[edge.waited].pending:
            return False
    return True


def _finished(found: Verdict, case: Case, logs: Mapping[int, RankLog], problems: Sequence[str]) -> Verdict:
    """Add groups, waits, grid, stacks and notes to the verdict."""
    asked = next((g for g in case.groups if (g.key[0], g.key[1]) == (found.group, found.description)), None)
    lost = [f"There is no dump of {ranks_text(missing)}." for missing in [case.dumpless] if missing and case.dumps]
    return replace(
        found,
        wait_for=waits_of(case.edges) if not found.healthy else (),
        groups=group_rows(case.groups),
        missing=missing_rows(case, found, logs) if not found.healthy else (),
        grid=grid_of(asked, found, case) if asked is not None else None,
        stacks=group_stacks(case.stacks) if not found.healthy else (),
        evidence=(*found.evidence, *(_flight_note(case) if found.healthy else ())),
        problems=(*problems, *lost),
        ranks=tuple(sorted(case.dumps)),
        world=len(case.world),
    )


def _where(case: Case, culprits: Sequence[int]) -> dict[str, Any]:
    """The collective in which others wait for the culprits, if any do."""
    if not any(edge.waited in culprits for edge in case.edges):
        return {}
    edge = most_telling_edge(case.edges, culprits)
    return {
        "group": edge.group.key[0],
        "description": edge.group.key[1],
        "sequence": edge.sequence,
        "waiting_in": waiting_in(edge.group, edge.waiter, edge.sequence),
        "first_divergence": split_at(edge),
    }


def _rest(case: Case, culprits: Collection[int]) -> tuple[int, ...]:
    """All other ranks that wait, or gave up waiting."""
    waiting = case.waiting | {edge.waiter for edge in case.edges} | set(case.failures)
    return tuple(sorted(waiting - set(culprits)))


def _waiters(edges: Sequence[Edge], culprits: Collection[int]) -> list[int]:
    blamed = set(culprits)
    return sorted({edge.waiter for edge in edges if edge.waited in blamed})


def _and(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _healthy_title(case: Case) -> str:
    if not case.dumps:
        return "There is no dump to analyze."
    if case.waiting:
        return f"The dumps of {ranks_text(case.dumps)} do not contain enough information to decide."
    return f"Nothing is pending: every call of {ranks_text(case.dumps)} has ended."


def _flight_note(case: Case) -> tuple[str, ...]:
    if not case.edges:
        return ()
    edge = most_telling_edge(case.edges, {edge.waited for edge in case.edges})
    who = ranks_text(_waiters(case.edges, {edge.waited for edge in case.edges}), start=True)
    when_so = "as happens when dumps are not taken at the same instant; stacks would distinguish that from a hang."
    return (f"{who} had reached {in_group(edge)} before the others, {when_so}",)
