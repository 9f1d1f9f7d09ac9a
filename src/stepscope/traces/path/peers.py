"""What if a rank, or several, came to each collective as their peers do?

Every rank's way to a collective, from the collective before on its path or from the step's start, is one *leg*; a
collective is done for each of its ranks as long after the last arrival as it was.  The rank's legs are made as long as
the median of its peers' to the same collective, where they were longer, and all arrivals counted anew (of several ranks
at once, peers are all others).  Its first step
begins with its peers' (the median), if it began later: what held it up before the trace is its doing, too.  Only what
was critical to each arrival is known here, so the gain is at most this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median_low
from typing import TYPE_CHECKING

from stepscope.errors import TraceError
from stepscope.traces.path.job_path import JobRanks
from stepscope.traces.path.whatif import Change, WhatIf

if TYPE_CHECKING:
    from stepscope.traces.rank import RankAnalysis
    from stepscope.traces.ranks.collectives import CollectivesAnalysis

__all__ = ["like_peers"]


@dataclass(frozen=True, kw_only=True)
class _Leg:
    place: int
    step: int
    """Index of the rank's steps."""
    goal: tuple[int, int]
    """The collective it leads to; or −1 and the number of the step that ends."""
    after: int
    """The collective it comes from; −1: the step's start."""
    lag_ns: int
    """From the end of that collective, on this rank, to where the leg begins; at most 0."""
    length_ns: int


def like_peers(
    analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis, change: Change, also: Sequence[int] = ()
) -> WhatIf:
    """``change``: ``rank:3=peers``; ``also``: other ranks that come as their peers do at the same time."""
    ranks = [analysis.rank for analysis in analyses]
    if change.rank not in ranks:
        raise TraceError(f"what-if {change.text!r}: there is no trace of rank {change.rank}")
    if len(ranks) < 2:
        raise TraceError(f"what-if {change.text!r} needs the traces of several ranks")
    job = JobRanks(analyses, collectives)
    legs = [leg for place in range(len(ranks)) for leg in _legs(job, place)]
    places = {ranks.index(rank) for rank in (change.rank, *also)}
    earlier_ns = {(place, 0): _earlier(job, place, places) for place in places}
    was, now = _ends(job, legs), _ends(job, _levelled(legs, places), earlier_ns)
    before_ns, after_ns, last = [], [], 0
    for number in job.numbers:
        latest = job.latest(number)
        index = job.at[latest][number]
        start_ns, end_ns = job.bounds(latest, index)
        kept_ns = earlier_ns.get((latest, index), 0)
        last = max(now[number], key=lambda place: (now[number][place], -place))
        before_ns.append(end_ns - start_ns)
        after_ns.append(end_ns - start_ns - (max(was[number].values()) - now[number][last]) + kept_ns)
    return WhatIf(
        change=change,
        steps=tuple(job.numbers),
        before_ns=tuple(before_ns),
        after_ns=tuple(after_ns),
        limits_ns={f"rank {ranks[last]}": after_ns[-1]} if after_ns else {},
    )


def _legs(job: JobRanks, place: int) -> list[_Leg]:
    routes, exchanges = job.routes[place], job.analyses[place].exchanges
    whole, lengths = job.whole[place], job.lengths[place]
    durations = (exchanges.end_ns - exchanges.start_ns).tolist()
    tops = [(node, step, -1) for step, node in enumerate(routes.ends.tolist())]
    tops += [
        (node, int(routes.step[node]), whole[exchange])
        for exchange, node in enumerate(routes.arrivals.tolist())
        if node >= 0 and whole[exchange] >= 0
    ]
    out = []
    for top, step, target in tops:
        node, length_ns, after, lag_ns = top, 0, -1, 0
        while node >= 0:
            exchange = int(routes.exchange[node])
            if exchange >= 0 and whole[exchange] >= 0 and routes.arrivals[exchange] >= 0:
                after, lag_ns = whole[exchange], lengths[node] - durations[exchange]
                break
            length_ns += lengths[node]
            node = int(routes.parent[node])
        number = job.analyses[place].steps[step].number
        goal = (target, -1) if target >= 0 else (-1, number)
        leg = _Leg(place=place, step=step, goal=goal, after=after, lag_ns=lag_ns, length_ns=length_ns)
        out.append(leg)
    return out


def _levelled(legs: list[_Leg], places: Set[int]) -> list[_Leg]:
    """With the legs of some ranks no longer than is usual among the others with the same goal."""
    peers: dict[tuple[int, int], list[int]] = {}
    for leg in legs:
        if leg.place not in places:
            peers.setdefault(leg.goal, []).append(leg.length_ns)

    def levelled(leg: _Leg) -> _Leg:
        if leg.place not in places or leg.goal not in peers:
            return leg
        return replace(leg, length_ns=min(leg.length_ns, median_low(peers[leg.goal])))

    return [levelled(leg) for leg in legs]


def _earlier(job: JobRanks, place: int, places: Set[int]) -> int:
    """By how much the rank's first step began later than is usual among the others."""
    if not job.analyses[place].steps:
        return 0
    number = job.analyses[place].steps[0].number
    peers = [job.bounds(at, own[number])[0] for at, own in enumerate(job.at) if at not in places and number in own]
    return max(job.bounds(place, 0)[0] - median_low(peers), 0) if peers else 0


def _ends(
    job: JobRanks, legs: list[_Leg], earlier_ns: Mapping[tuple[int, int], int] | None = None
) -> dict[int, dict[int, int]]:
    """By the step's number and place: when it ends, on the common clock.

    ``earlier_ns``: by how much some steps begin earlier than they did, by place and index.
    """
    earlier_ns = earlier_ns or {}
    done = {}
    """By collective and place: when that rank is done with it."""
    members: dict[int, list[int]] = {}
    for (whole, place), entry in job.entry.items():
        done[whole, place] = job.end_ns(place, entry)
        members.setdefault(whole, []).append(place)
    to: dict[int, list[_Leg]] = {}
    for leg in legs:
        to.setdefault(leg.goal[0], []).append(leg)

    def arrival(leg: _Leg) -> int:
        if leg.after >= 0:
            return done[leg.after, leg.place] + leg.lag_ns + leg.length_ns
        return job.bounds(leg.place, leg.step)[0] - earlier_ns.get((leg.place, leg.step), 0) + leg.length_ns

    for whole in sorted(members, key=job.arrived_ns.__getitem__):
        arrivals = [arrival(leg) for leg in to.get(whole, [])]
        # Of a rank that came to it outside of the steps nothing is known.
        if len(arrivals) == len(members[whole]):
            for place in members[whole]:
                done[whole, place] += max(arrivals) - job.arrived_ns[whole]
    out: dict[int, dict[int, int]] = {}
    for leg in to.get(-1, []):
        out.setdefault(leg.goal[1], {})[leg.place] = arrival(leg)
    return out
