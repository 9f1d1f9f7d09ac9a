"""Which attempt of a job each process belongs to, whatever its launcher counted.  Functions of their arguments, no I/O.

An attempt is one round of the job: every rank is claimed at most once in it, and all agree on how many there are.
A launcher's restart count does not tell the rounds apart.  torchrun counts only failures of its own workers: when a
node joins or leaves, all are started again and nothing is counted, and the torchrun of a node that took another's
place counts from nought.  So it is told by what cannot be otherwise: between two processes of which one came after
the other's end, and which claim the same rank, or say different sizes of the job, or have different counts on one
host, a round must have begun.  Each such pair is a stretch of time with a boundary in it somewhere; the fewest
boundaries that do for all stretches are the rounds, each put as early as it can be, when the last process that was
replaced had ended, because a launcher ends its old workers before it starts new ones.

For the same reason an end may be noticed late, by an agent that was killed or a machine that is overloaded, and yet
not count as late: a process whose successor has a higher count had ended when the first process with that count began
on its host, unless it was seen at work after that.

Two that claim the same rank at the same time need no boundary, and one of them is told as a second process of its
rank (``store/assemble.py``).  Nor does a process that never made a step, unless its launcher counted or it came after
one that did not end in order: a script that prepares or evaluates is no attempt of the job.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

__all__ = ["Claim", "settle_attempts"]

SLACK_NS = 10**9
"""So much after a process began may another's end be noticed and still count as before it: clocks of two hosts differ
a little, and ends are seen late.  Starting a rank anew takes longer."""
_END, _BEGIN = 0, 1


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A process that says which rank it is.  Times are of one clock, the hub's where there is one."""

    rank: int
    world_size: int
    host: str
    restarts: int
    """What its launcher counted."""
    began_ns: int
    until_ns: int | None
    """When it ended or, of one that was lost, was last known to live; None: it lives."""
    active_ns: int = 0
    """When it was last seen at work."""
    made_steps: bool = True
    in_order: bool = False
    """Whether it ended of itself and well."""


@dataclass(slots=True)
class _Ended:
    """The last process that ended, and the last that ended with another value than that one."""

    value: int | None = None
    last_ns: int | None = None
    other_ns: int | None = None

    def add(self, value: int, at_ns: int) -> None:
        """Ends come in order of time."""
        if value != self.value:
            self.value, self.other_ns = value, self.last_ns
        self.last_ns = at_ns

    def unlike(self, value: int) -> int | None:
        return self.other_ns if value == self.value else self.last_ns


def settle_attempts(claims: Sequence[Claim]) -> list[int]:
    """The attempt of each, in the order given: growing with time, and never less than what its launcher counted."""
    boundaries = _boundaries(_stretches(_ended_in_time(claims)))
    rounds = [bisect_right(boundaries, claim.began_ns) for claim in claims]
    counted: dict[int, int] = {}
    for claim, number in zip(claims, rounds, strict=True):
        counted[number] = max(counted.get(number, 0), claim.restarts)
    numbers: dict[int, int] = {}
    before = -1
    for number in sorted(counted):
        before = numbers[number] = max(before + 1, counted[number])
    return [numbers[number] for number in rounds]


def _ended_in_time(claims: Sequence[Claim]) -> list[Claim]:
    """With ends that were noticed only after the launcher had started the next round put where they belong."""
    of_count: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    of_rank: defaultdict[tuple[str, int], list[Claim]] = defaultdict(list)
    for claim in sorted(claims, key=lambda claim: claim.began_ns):
        of_count[claim.host, claim.restarts].append(claim.began_ns)
        of_rank[claim.host, claim.rank].append(claim)
    followed = {id(claim): later for same in of_rank.values() for claim, later in pairwise(same)}
    settled = []
    for claim in claims:
        later, until_ns = followed.get(id(claim)), claim.until_ns
        if until_ns is not None and later is not None and later.restarts > claim.restarts:
            begun = of_count[claim.host, later.restarts]
            after = begun[bisect_right(begun, claim.began_ns) :]
            if after and claim.active_ns < after[0]:
                until_ns = min(until_ns, after[0])
        settled.append(replace(claim, until_ns=until_ns))
    return settled


def _stretches(claims: Sequence[Claim]) -> list[tuple[int, int]]:
    """From a process's end to another's beginning: in each of them, ends included, a round began."""
    ranks: dict[tuple[int, bool], int] = {}
    worlds: defaultdict[bool, _Ended] = defaultdict(_Ended)
    counts: defaultdict[tuple[str, object], _Ended] = defaultdict(_Ended)
    begun: dict[int, Claim] = {}
    found: list[tuple[int, int]] = []
    for at_ns, kind, index in _events(claims):
        claim = claims[index]
        if kind == _END:
            for key in (("host", claim.host), ("rank", claim.rank)):
                counts[key].add(claim.restarts, at_ns)
            if claim.made_steps:
                ranks[claim.rank, claim.in_order] = at_ns
                worlds[claim.in_order].add(claim.world_size, at_ns)
            continue
        ended = [
            counts["host", claim.host].unlike(claim.restarts),
            counts["rank", claim.rank].unlike(claim.restarts),
        ]
        for in_order in (False, True) if claim.made_steps else (False,):
            ended += [ranks.get((claim.rank, in_order)), worlds[in_order].unlike(claim.world_size)]
        found += [(end_ns, claim.began_ns) for end_ns in ended if end_ns is not None]
        earlier = begun.get(claim.rank)
        if earlier is not None and earlier.restarts != claim.restarts and earlier.began_ns < claim.began_ns:
            found.append((earlier.began_ns + 1, claim.began_ns))  # never seen to end, but its launcher counted on
        begun[claim.rank] = claim
    return found


def _events(claims: Sequence[Claim]) -> list[tuple[int, int, int]]:
    """Beginnings and ends in order of time; an end as early as it counts."""
    events = [(claim.began_ns, _BEGIN, index) for index, claim in enumerate(claims)]
    for index, claim in enumerate(claims):
        if claim.until_ns is not None:
            events.append((max(claim.until_ns - SLACK_NS, claim.began_ns + 1), _END, index))
    return sorted(events)


def _boundaries(stretches: Iterable[tuple[int, int]]) -> list[int]:
    """The fewest instants such that each stretch has one, each as early as it can be."""
    found: list[int] = []
    first_end = latest_start = None
    for start, end in sorted(stretches, key=lambda stretch: stretch[1]):
        if first_end is None or latest_start is None or start > first_end:
            first_end, latest_start = end, start
            found.append(start)
        else:
            latest_start = max(latest_start, start)
        # Ends counted from a little earlier: what began in that little while is of the round that ended.
        found[-1] = min(latest_start + SLACK_NS, first_end)
    return found
