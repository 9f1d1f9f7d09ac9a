"""What if one or more ranks arrived at each collective like their peers?

A rank's way to a collective, from the previous collective on its path or from the start of the step, is one *leg*. A
collective ends on each of its ranks as long after the last arrival as it did in the trace. The rank's legs are cut to
the median of its peers' legs to the same collective, and all arrivals are recomputed (for several ranks at once, the
peers are all others). If its first step began later than the median of its peers', it begins with them: a delay from
before the trace counts too. Only what was critical to each arrival is known here, so this is an upper bound of the
gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median_low

from stepscope.errors import TraceError
from stepscope.judge.replay import Meeting, replay
from stepscope.traces.across_ranks.arrivals import CollectivesAnalysis
from stepscope.traces.across_ranks.job_path import JobRanks
from stepscope.traces.path.whatif import Change, WhatIf
from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["like_peers"]


@dataclass(frozen=True, kw_only=True)
class _Leg:
    place: int
    step: int
    """Index into the rank's steps."""
    goal: tuple[int, int]
    """The collective it leads to; or −1 and the number of the step that ends."""
    after: int
    """The collective it starts from; −1 is the start of the step."""
    lag_ns: int
    """From the end of that collective on this rank to the start of the leg; at most 0."""
    length_ns: int


def like_peers(
    analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis, change: Change, also: Sequence[int] = ()
) -> WhatIf:
    """Replay the job with ``change`` (``rank:3=peers``).

    ``also``: further ranks that match their peers at the same time.
    """
    ranks = [analysis.rank for analysis in analyses]
    if change.rank not in ranks:
        raise TraceError(f"what-if {change.text!r}: no trace for rank {change.rank}")
    if len(ranks) < 2:
        raise TraceError(f"what-if {change.text!r} needs the traces of several ranks")
    job = JobRanks(analyses, collectives)
    legs = [leg for place in range(len(ranks)) for leg in _legs(job, place)]
    places = {ranks.index(rank) for rank in (change.rank, *also)}
    earlier_ns = {(place, 0): _earlier(job, place, places) for place in places}
    plan = _Plan(job, legs)
    was, now = plan.ends(legs), plan.ends(_leveled(legs, places), earlier_ns)
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


def _leveled(legs: list[_Leg], places: Set[int]) -> list[_Leg]:
    """Shorten the legs of some ranks to the median of the others with the same goal."""
    peers: dict[tuple[int, int], list[int]] = {}
    for leg in legs:
        if leg.place not in places:
            peers.setdefault(leg.goal, []).append(leg.length_ns)

    def leveled(leg: _Leg) -> _Leg:
        if leg.place not in places or leg.goal not in peers:
            return leg
        return replace(leg, length_ns=min(leg.length_ns, median_low(peers[leg.goal])))

    return [leveled(leg) for leg in legs]


def _earlier(job: JobRanks, place: int, places: Set[int]) -> int:
    """Return how much later the rank's first step began than the median of the others."""
    if not job.analyses[place].steps:
        return 0
    number = job.analyses[place].steps[0].number
    peers = [job.bounds(at, own[number])[0] for at, own in enumerate(job.at) if at not in places and number in own]
    return max(job.bounds(place, 0)[0] - median_low(peers), 0) if peers else 0


class _Plan:
    """Legs and collectives as meetings; the same for all lengths.

    The activities are the legs, followed by what each rank does in each collective after the last arrival.
    """

    def __init__(self, job: JobRanks, legs: Sequence[_Leg]) -> None:
        self.job = job
        activity = {key: len(legs) + at for at, key in enumerate(job.entry)}
        """Key: collective and place."""
        self.traced_ns = [0] * len(legs) + [job.end_ns(place, entry) for (_, place), entry in job.entry.items()]
        self.transfers_ns = [
            end_ns - job.arrived_ns[whole]
            for (whole, _), end_ns in zip(job.entry, self.traced_ns[len(legs) :], strict=True)
        ]
        members: dict[int, list[int]] = {}
        for (whole, _), index in activity.items():
            members.setdefault(whole, []).append(index)
        to: dict[int, list[int]] = {}
        for at, leg in enumerate(legs):
            to.setdefault(leg.goal[0], []).append(at)

        def on_the_way(at: int) -> Meeting:
            leg = legs[at]
            return Meeting((at,), (activity[leg.after, leg.place],) if leg.after >= 0 else ())

        self.meetings = []
        for whole in sorted(members, key=job.arrived_ns.__getitem__):
            arriving = to.get(whole, [])
            # The arrival of a rank that came outside of its steps is unknown: such a collective stays where it was.
            if len(arriving) == len(members[whole]):
                self.meetings += [on_the_way(at) for at in arriving]
                self.meetings.append(Meeting(tuple(members[whole]), tuple(arriving)))
        self.last = to.get(-1, [])
        self.meetings += [on_the_way(at) for at in self.last]

    def ends(
        self, legs: Sequence[_Leg], earlier_ns: Mapping[tuple[int, int], int] | None = None
    ) -> dict[int, dict[int, int]]:
        """Return when each step ends on the common clock, by step number and place.

        ``earlier_ns``: how much earlier some steps begin than in the trace, by place and index.
        """
        earlier_ns = earlier_ns or {}

        def length(leg: _Leg) -> int:
            if leg.after >= 0:
                return leg.lag_ns + leg.length_ns
            return self.job.bounds(leg.place, leg.step)[0] - earlier_ns.get((leg.place, leg.step), 0) + leg.length_ns

        lengths = [*map(length, legs), *self.transfers_ns]
        ends = replay(self.meetings, lengths, self.traced_ns.copy(), lambda before, _: max(before, default=0))
        out: dict[int, dict[int, int]] = {}
        for at in self.last:
            out.setdefault(legs[at].goal[1], {})[legs[at].place] = ends[at]
        return out
