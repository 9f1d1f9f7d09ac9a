"""Decide which attempt of a job each process belongs to, independent of the launcher's count.

An attempt is one round of the job: every rank is claimed at most once in it, and all agree on the world size.  A
launcher's restart count does not identify rounds.  torchrun counts only failures of its workers: when a node joins or
leaves, all workers restart without being counted, and a torchrun on a replacement node counts from zero.

So rounds are derived from what must be true.  If one process began after another's end, and the two claim the same
rank, or report different world sizes, or have different counts on one host, then a round began in between.  Each such
pair is a stretch of time that contains a boundary.  The smallest set of boundaries that covers all stretches gives
the rounds.  Each boundary is placed as early as possible, when the last replaced process had ended, because a
launcher ends its old workers before it starts new ones.

For the same reason an end that was noticed late (the agent was killed, the machine was overloaded) does not count as
late: a process whose successor has a higher count had ended when the first process with that count began on its host,
unless it was seen working after that.

Two processes that claim the same rank at the same time need no boundary; one of them is reported as a second process
of its rank (``store/rank_series.py``).  A process without steps needs none either, unless its launcher counted or it
came after a process that did not end normally: a script that prepares or evaluates is not an attempt of the job.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

__all__ = ["RankClaim", "settle_attempts"]

SLACK_NS = 10**9
"""An end noticed this long after another process began still counts as before it: the clocks of two hosts differ a
little, and ends are noticed late.  Restarting a rank takes longer."""
_END, _GONE, _BEGIN = 0, 1, 2
"""When a process may have ended, for the next one of its rank; when it had ended, for all others; when one began."""


@dataclass(frozen=True, kw_only=True)
class RankClaim:
    """A process that claims a rank.  All times are on one clock, the hub's if there is one."""

    rank: int
    world_size: int
    host: str
    restarts: int
    """The launcher's restart count."""
    began_ns: int
    until_ns: int | None
    """When it ended or, if it was lost, was last known to be alive; None: it is alive."""
    active_ns: int = 0
    """When it was last seen working."""
    made_steps: bool = True
    in_order: bool = False
    """Whether it ended normally and without an error."""


@dataclass(slots=True)
class _Ended:
    """The last process that ended, and the last one that ended with a different value."""

    value: int | None = None
    last_ns: int | None = None
    other_ns: int | None = None

    def add(self, value: int, at_ns: int) -> None:
        """Add an end; ends arrive in order of time."""
        if value != self.value:
            self.value, self.other_ns = value, self.last_ns
        self.last_ns = at_ns

    def unlike(self, value: int) -> int | None:
        return self.other_ns if value == self.value else self.last_ns


def settle_attempts(claims: Sequence[RankClaim]) -> list[int]:
    """Return the attempt of each claim: increasing with time, and never less than the launcher's count."""
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


def _ended_in_time(claims: Sequence[RankClaim]) -> list[RankClaim]:
    """Move each end that was noticed after the launcher had started the next round to where it belongs."""
    of_count: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    of_rank: defaultdict[tuple[str, int], list[RankClaim]] = defaultdict(list)
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


def _stretches(claims: Sequence[RankClaim]) -> list[tuple[int, int]]:
    """Stretches from one process's end to another's beginning: in each, both ends included, a round began."""
    ranks: dict[tuple[int, bool], int] = {}
    worlds: defaultdict[bool, _Ended] = defaultdict(_Ended)
    counts: defaultdict[tuple[str, object], _Ended] = defaultdict(_Ended)
    begun: dict[int, RankClaim] = {}
    found: list[tuple[int, int]] = []
    for at_ns, kind, index in _events(claims):
        claim = claims[index]
        if kind == _END:
            counts["rank", claim.rank].add(claim.restarts, at_ns)
            if claim.made_steps:
                ranks[claim.rank, claim.in_order] = at_ns
            continue
        if kind == _GONE:
            counts["host", claim.host].add(claim.restarts, at_ns)
            if claim.made_steps:
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
            found.append((earlier.began_ns + 1, claim.began_ns))  # its end was never seen, but the launcher counted
        begun[claim.rank] = claim
    return found


def _events(claims: Sequence[RankClaim]) -> list[tuple[int, int, int]]:
    """Return beginnings and ends in order of time; each end as early as it counts."""
    events = [(claim.began_ns, _BEGIN, index) for index, claim in enumerate(claims)]
    for index, claim in enumerate(claims):
        if claim.until_ns is not None:
            end_ns = max(claim.until_ns - SLACK_NS, claim.began_ns + 1)
            # The peers of its round began in the first half of even a short life.
            middle_ns = (claim.began_ns + claim.until_ns) // 2
            events += [(end_ns, _END, index), (max(end_ns, middle_ns), _GONE, index)]
    return sorted(events)


def _boundaries(stretches: Iterable[tuple[int, int]]) -> list[int]:
    """Return the fewest instants such that each stretch contains one, each as early as possible."""
    found: list[int] = []
    first_end = latest_start = None
    for start, end in sorted(stretches, key=lambda stretch: stretch[1]):
        if first_end is None or latest_start is None or start > first_end:
            first_end, latest_start = end, start
            found.append(start)
        else:
            latest_start = max(latest_start, start)
        # Ends count SLACK_NS early; a process that began within that time belongs to the round that ended.
        found[-1] = min(latest_start + SLACK_NS, first_end)
    return found
