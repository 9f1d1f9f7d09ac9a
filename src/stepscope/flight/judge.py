"""Who holds the job up, by the dumps of its ranks.  Pure.

The order of the questions is the order of certainty: did a rank fail by itself; did its device stop; did it leave the
path of the others; does everybody wait, in the end, for it; do they wait for each other; is there no trace of it.
Where nothing is left waiting, nothing is wrong, whatever else the dumps show.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepscope.flight.align import Group
from stepscope.flight.case import Case, build_case, place_of
from stepscope.flight.entries import Dump
from stepscope.flight.picture import grid_of, group_rows, missing_rows, split_at, split_of, waits_of
from stepscope.flight.reasons import (
    accused,
    crashed_reason,
    departed,
    device_reason,
    in_group,
    lost_reason,
    missing_reason,
    missing_title,
    telling,
    waiting_in,
    went_past,
    when,
)
from stepscope.flight.stacks import group_stacks
from stepscope.flight.titan import RankLog
from stepscope.flight.verdict import Accused, Verdict
from stepscope.flight.waits import Edge, cycle_in, ends_of, reaching, waits_for
from stepscope.flight.wording import called, ranks_text
from stepscope.records.hang import HangKind, ThreadStack

__all__ = ["judge"]

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
    """The verdict on one job; dumps in any order.  ``unreadable``: ranks whose dump is there but says nothing."""
    case = build_case(dumps, stacks=stacks, errors=errors, world=world, unreadable=unreadable)
    found = _decide(case)
    return _finished(found, case, logs, problems)


def _decide(case: Case) -> Verdict:
    for question in (_failed, _devices, _departed, _at_the_end, _each_other, _all_joined, _in_p2p):
        verdict = question(case)
        if verdict is not None:
            return verdict
    return Verdict(healthy=True, kind=None, title=_healthy_title(case))


def _failed(case: Case) -> Verdict | None:
    """Ranks that failed by themselves; what others then said of closed connections does not count."""
    own = [rank for rank, failure in sorted(case.failures.items()) if failure.own]
    if not own:
        return None
    first = case.failures[own[0]]
    what = f"{first.type}: {first.message}" if first.message else first.type
    return Verdict(
        healthy=False,
        kind="rank_crashed",
        title=f"{ranks_text(own, start=True)} failed by {'itself' if len(own) == 1 else 'themselves'}: {what}.",
        culprits=tuple(accused(case, rank, crashed_reason(case.failures[rank])) for rank in own),
        victims=_rest(case, own),
        **_where(case, own),
    )


def _devices(case: Case) -> Verdict | None:
    """Ranks whose device has not ended what has ended on their peers."""
    lagging = sorted(case.lagging)
    if not lagging:
        return None
    group, sequence = case.lagging[lagging[0]]
    what = called(group.progress[lagging[0]].operation(sequence), sequence)
    decided = 2 * len(lagging) <= len(case.dumps)
    return Verdict(
        healthy=False,
        kind="hang_device",
        title=(
            f"The device of {ranks_text(lagging)} stands still: {what} of {group.name} has ended on its peers and not "
            "there."
        ),
        culprits=tuple(accused(case, r, device_reason(*case.lagging[r])) for r in lagging) if decided else (),
        suspects=() if decided else tuple(lagging),
        undecidable=not decided,
        victims=_rest(case, lagging),
        group=group.key[0],
        description=group.key[1],
        sequence=sequence,
        waiting_in=waiting_in(group, lagging[0], sequence),
    )


def _departed(case: Case) -> Verdict | None:
    """Ranks that did something else than the others."""
    if not case.departures:
        return None
    group, left = min(case.departures, key=lambda one: when(one[0], one[1].sequence))
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
            f"{ranks_text(suspects, start=True)} are not at the same {left.differs} in collective {left.sequence} of "
        )
        title += f"{group.name}, and it cannot be told which side is wrong."
        return Verdict(title=title, undecidable=True, suspects=suspects, victims=_rest(case, suspects), **about)
    title = f"{ranks_text(left.ranks, start=True)} left the path of the others at collective {left.sequence} of "
    title += f"{group.name}: another {left.differs}."
    if past:
        what = called(group.progress[others[0]].operation(left.sequence), left.sequence)
        title = f"{ranks_text(past, start=True)} went past {what} of {group.name} without calling it."
    return Verdict(
        title=title,
        culprits=tuple(departed(case, group, left, rank, past=bool(past)) for rank in left.ranks),
        victims=_rest(case, left.ranks),
        **about,
    )


def _ended_unlike(group: Group, sequence: int, stuck: int) -> tuple[str, ...]:
    """Of ranks that called different things there, and went on."""
    if any(not one.has_ended(sequence) for one in group.progress.values()):
        return ()
    now = group.waiting[stuck]
    what = called(group.progress[stuck].operation(now), now)
    told = (
        f"Number {sequence} ended all the same: NCCL does not compare calls. What the ranks sent from then on did not "
    )
    return (f"{told}fit together, until they stood still in {what}.",)


def _at_the_end(case: Case) -> Verdict | None:
    """Ranks that all others wait for, and that wait for nobody."""
    ends = ends_of(case.edges)
    certain = [rank for rank in ends if rank in case.dumps or _seen_elsewhere(case, rank)]
    if not certain:
        return _without_dump(case, ends)
    if _in_flight(case):
        return None
    edge = telling(case.edges, certain)
    owed = waits_for(case.edges, certain)
    places = {rank: place_of(case.stacks.get(rank, ())) for rank in certain}
    kind: HangKind = "hang_missing_collective"
    if all(place is not None and place.doing == "input" for place in places.values()):
        kind = "hang_input"
    return Verdict(
        healthy=False,
        kind=kind,
        title=missing_title(case, edge, certain),
        culprits=tuple(accused(case, rank, missing_reason(case, rank, owed[rank], places[rank])) for rank in certain),
        victims=tuple(sorted(reaching(case.edges, certain) - set(certain))),
        group=edge.group.key[0],
        description=edge.group.key[1],
        sequence=edge.sequence,
        waiting_in=waiting_in(edge.group, edge.waiter, edge.sequence),
        first_divergence=split_at(edge),
    )


def _seen_elsewhere(case: Case, rank: int) -> bool:
    """Whether its stack, where there is one without a dump, shows it anywhere but in a collective."""
    place = place_of(case.stacks.get(rank, ()))
    return place is not None and place.doing != "collective"


def _without_dump(case: Case, ends: Sequence[int]) -> Verdict | None:
    """Everybody waits for ranks that left no dump."""
    if not ends:
        return None
    edge = telling(case.edges, ends)
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
        f"{called(edge.operation, edge.sequence)} of {edge.group.name}.",
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
    """Ranks that wait for each other in a circle; those in the rarer of two groups, if one is rarer."""
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
        culprits=tuple(accused(case, rank, reasons[rank]) for rank in sorted(blamed)),
        victims=tuple(sorted((reaching(case.edges, ranks) | set(ranks)) - set(blamed))),
        group=first.group.key[0],
        description=first.group.key[1],
        sequence=first.sequence,
        waiting_in=waiting_in(first.group, first.waiter, first.sequence),
        first_divergence=split_at(first),
        cycle=tuple(f"rank {edge.waiter} waits for rank {edge.waited} in {in_group(edge)}" for edge in cycle),
    )


def _all_joined(case: Case) -> Verdict | None:
    """Everybody called it, nobody saw its end: the device or the network, or it was still under way."""
    stuck = [
        (group, rank) for group in case.groups for rank, one in group.progress.items() if one.pending and not one.failed
    ]
    if not stuck:
        return None
    if _in_flight(case) and case.edges:
        return None
    group, rank = min(stuck, key=lambda one: when(one[0], one[0].progress[one[1]].pending[0]))
    sequence = group.progress[rank].pending[0]
    operation = group.progress[rank].operation(sequence)
    members = sorted(group.waiting)
    alone = len(group.members) == 1
    on_host = operation is None or operation.backend in ("gloo", "mpi", "")
    return Verdict(
        healthy=False,
        kind="hang_unknown" if on_host else "hang_device",
        title=(
            f"{ranks_text(members, start=True)} called {called(operation, sequence)} of {group.name}, and it hangs: "
            f"{'the network, or it was still under way' if on_host else 'its device or the network stands still'}."
        ),
        culprits=(accused(case, rank, "called it, and its device never came to the end"),) if alone else (),
        undecidable=not alone,
        suspects=() if alone else tuple(members),
        victims=tuple(sorted(case.waiting - {rank})) if alone else (),
        group=group.key[0],
        description=group.key[1],
        sequence=sequence,
        waiting_in=waiting_in(group, rank, sequence),
    )


def _in_p2p(case: Case) -> Verdict | None:
    """Nothing recorded stands, but stacks show ranks in send or recv, which gloo does not record."""
    inside = [r for r, threads in sorted(case.stacks.items()) if (p := place_of(threads)) and p.doing == "p2p"]
    if not inside:
        return None
    return Verdict(
        healthy=False,
        kind="hang_unknown",
        title=f"{ranks_text(inside, start=True)} wait in send or recv, which the recorder does not tell more about.",
        undecidable=True,
        suspects=tuple(inside),
    )


def _in_flight(case: Case) -> bool:
    """Whether this is but a job at work: dumps are not taken at one instant, and someone is always first.

    Fewer than half of a group wait, each in one collective only, and all others had come to the one before; and nothing
    besides (stacks, errors, ranks without a dump) speaks of a stop.
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
    """The verdict with the picture around it."""
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
    """The collective in which others wait for those, if any do."""
    if not any(edge.waited in culprits for edge in case.edges):
        return {}
    edge = telling(case.edges, culprits)
    return {
        "group": edge.group.key[0],
        "description": edge.group.key[1],
        "sequence": edge.sequence,
        "waiting_in": waiting_in(edge.group, edge.waiter, edge.sequence),
        "first_divergence": split_at(edge),
    }


def _rest(case: Case, culprits: Collection[int]) -> tuple[int, ...]:
    """Everybody else who waits, or gave up waiting."""
    waiting = case.waiting | {edge.waiter for edge in case.edges} | set(case.failures)
    return tuple(sorted(waiting - set(culprits)))


def _waiters(edges: Sequence[Edge], culprits: Collection[int]) -> list[int]:
    blamed = set(culprits)
    return sorted({edge.waiter for edge in edges if edge.waited in blamed})


def _and(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _healthy_title(case: Case) -> str:
    if not case.dumps:
        return "There is no dump to judge by."
    if case.waiting:
        return f"Nothing stands for sure in the dumps of {ranks_text(case.dumps)}."
    return f"Nothing stands: all that {ranks_text(case.dumps)} called has ended."


def _flight_note(case: Case) -> tuple[str, ...]:
    if not case.edges:
        return ()
    edge = telling(case.edges, {edge.waited for edge in case.edges})
    who = ranks_text(_waiters(case.edges, {edge.waited for edge in case.edges}), start=True)
    when_so = "as happens when dumps are not taken at the same instant; stacks would tell a stop from that."
    return (f"{who} had come to {in_group(edge)} before the others, {when_so}",)
