"""The ranks of a job together: which files are the job, tables of all ranks, the critical path over ranks.

Everything that only shows when ranks are compared. The findings are added by ``findings.py``.

Which file is which rank: the latest recording of each rank counts, and files that cannot belong to one job do not.

A folder often holds several recordings of the same job (``schedule(repeat=3)``), so a rank has several files: the
latest of each rank counts. A file without a rank gets the lowest free number. Such files of one process at different
times are recordings of one rank.

Files that cannot belong to one job are not compared: different world sizes, or recordings more than an hour apart
(clocks of hosts may differ by less). The set with most ranks counts; of several such sets, the latest. The report says
so first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count, pairwise
from statistics import median_low
from typing import Any, Final, TypeVar

import numpy as np

from stepscope.errors import TraceError
from stepscope.records.finding import Finding
from stepscope.records.text import count_text, named_ranks, ns_text
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.model.tables import Table, table_of
from stepscope.traces.path.graph import CAUSES, Cause
from stepscope.traces.path.whatif import Change, WhatIf
from stepscope.traces.rank import RankAnalysis
from stepscope.traces.rank_collectives import OPS
from stepscope.traces.ranks.clocks import Clocks
from stepscope.traces.ranks.collectives import CollectivesAnalysis

__all__ = ["JobAnalysis", "JobPath", "assign_ranks", "distributed_table", "job_path", "like_peers", "one_per_rank"]

# -- critical path over ranks -----------------------------------------------------------------------------------------
# The critical path of each step over all ranks: which rank a step waited for, and what delayed that rank.
#
# The walk uses aligned clocks (``ranks/clocks.py``). It starts at the rank whose step ends last and follows that rank's
# own path (``Routes`` in ``path/walk.py``) back to the previous collective. If another rank arrived last there, the
# time after that arrival is the transfer, and the walk continues at the last rank with the path to its arrival. Waiting
# is thus replaced by what was waited for. The walk ends at the start of the step of the rank where it began, so its
# length is exactly that step. If a rank's own step begins later than that, the walk continues in its previous step.
#
# Exact: the length, which rank arrived last, and every sum by cause up to the last stretch. Approximate: the last
# stretch is cut in proportion, not at an instant; only the few names that took most of each stretch are kept, the rest
# has only its cause.

Key = TypeVar("Key")
BEFORE = "the end of the step"
UNSEEN = "(before its own step began)"
COMMUNICATION = int(Cause.COMMUNICATION)
OTHER = int(Cause.OTHER)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What one rank did on the path before a collective, for one cause; or the transfer of that collective."""

    rank: int
    before: str
    """``all_reduce 3``, the third of the step; or the end of the step."""
    cause: str
    name: str
    """The operator or kernel that took most of it; ``""`` if nothing has a name."""
    time_ns: int


@dataclass(frozen=True, kw_only=True)
class JobStep:
    number: int
    rank: int
    """The rank whose step ends last; ``length_ns`` is the length of its step."""
    length_ns: int
    by_rank: dict[int, int]
    """``by_rank`` and ``by_cause`` each add up to the length."""
    by_cause: dict[str, int]
    stretches: tuple[Stretch, ...]
    """Longest first; they add up to the length."""

    @property
    def main(self) -> Stretch | None:
        return self.stretches[0] if self.stretches else None


@dataclass(frozen=True, kw_only=True)
class JobPath:
    steps: tuple[JobStep, ...]
    table: Table
    """The ``job_path`` table."""

    @property
    def length_ns(self) -> int:
        return sum(step.length_ns for step in self.steps)

    @property
    def by_rank(self) -> dict[int, int]:
        return _total([step.by_rank for step in self.steps])

    @property
    def by_cause(self) -> dict[str, int]:
        return _total([step.by_cause for step in self.steps])


def job_path(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> JobPath:
    """Walk the critical path of every step; ``analyses`` in rank order, as the collectives were matched."""
    job = JobRanks(analyses, collectives)
    steps = tuple(_step(job, number) for number in job.numbers)
    return JobPath(steps=steps, table=_table(steps))


class JobRanks:
    """Ranks on one clock, with their shared collectives; a rank's *place* is its index."""

    def __init__(self, analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> None:
        self.analyses = analyses
        self.routes = [analysis.path.routes for analysis in analyses]
        shifts = collectives.clocks.shifts
        self.shift_ns = [analysis.meta.origin_ns - shifts.get(analysis.rank, 0) for analysis in analyses]
        """Offset that puts each rank's times on the common clock."""
        self.whole = [collectives.whole_of(each.rank, len(each.exchanges)).tolist() for each in analyses]
        self.labels = [_labels(analysis) for analysis in analyses]
        self.last: list[int] = collectives.split.last.tolist()
        self.arrived_ns: list[int] = collectives.split.arrived_ns.tolist()
        pairs = collectives.pairs
        # Key: collective and place. Value: index among the rank's exchanges.
        self.entry = dict(
            zip(zip(pairs.whole.tolist(), pairs.rank.tolist(), strict=True), pairs.entry.tolist(), strict=True)
        )
        self.at = [{step.number: index for index, step in enumerate(analysis.steps)} for analysis in analyses]
        self.numbers = sorted({number for numbers in self.at for number in numbers})
        self.lengths = [routes.causes_ns.sum(axis=1).tolist() for routes in self.routes]

    def bounds(self, place: int, index: int) -> tuple[int, int]:
        """Return the start and end of a step on the common clock."""
        step = self.analyses[place].steps[index]
        return step.start_ns + self.shift_ns[place], step.end_ns + self.shift_ns[place]

    def end_ns(self, place: int, exchange: int) -> int:
        """Return the end of one of a rank's collectives on the common clock."""
        analysis = self.analyses[place]
        return int(analysis.exchanges.end_ns[exchange]) - analysis.meta.origin_ns + self.shift_ns[place]

    def latest(self, number: int) -> int:
        """Return the place of the rank whose step ``number`` ends last."""
        there = [place for place, numbers in enumerate(self.at) if number in numbers]
        return max(there, key=lambda place: (self.bounds(place, self.at[place][number])[1], -place))


def _step(job: JobRanks, number: int) -> JobStep:
    place = job.latest(number)
    index = job.at[place][number]
    start_ns, end_ns = job.bounds(place, index)
    walk = _Walk(job, start_ns)
    walk.go(place, index, end_ns)
    return walk.result(number, job.analyses[place].rank, end_ns - start_ns)


class _Walk:
    def __init__(self, job: JobRanks, floor_ns: int) -> None:
        self.job, self.floor_ns = job, floor_ns
        self.sums: dict[tuple[int, str, int], int] = defaultdict(int)
        """Keyed by place, what it came before, and cause."""
        self.names: dict[tuple[int, str, int], Counter[str]] = defaultdict(Counter)

    def go(self, place: int, index: int, now_ns: int) -> None:
        """Walk back from the end of a rank's step."""
        job = self.job
        node, before = int(job.routes[place].ends[index]), BEFORE
        while now_ns > self.floor_ns:
            if node < 0:
                # The rank's own step begins here, later than the step that the walk started from.
                place, node, now_ns = self._earlier(place, now_ns, before)
                before = BEFORE if node >= 0 else before
                continue
            routes = job.routes[place]
            exchange, length_ns = int(routes.exchange[node]), job.lengths[place][node]
            if exchange < 0:
                self._take(place, node, before, min(length_ns, now_ns - self.floor_ns), length_ns)
                node, now_ns = int(routes.parent[node]), now_ns - length_ns
                continue
            before = job.labels[place][exchange]
            whole = job.whole[place][exchange]
            last = job.last[whole] if whole >= 0 else place
            arrived_ns = job.arrived_ns[whole] if whole >= 0 else 0
            theirs = job.entry.get((whole, last), -1)
            arrival = int(job.routes[last].arrivals[theirs]) if theirs >= 0 else -1
            if last != place and arrival >= 0 and now_ns - length_ns < arrived_ns <= now_ns:
                self._put(place, before, COMMUNICATION, now_ns - max(arrived_ns, self.floor_ns))
                place, node, now_ns, before = last, arrival, arrived_ns, job.labels[last][theirs]
            else:
                self._put(place, before, COMMUNICATION, min(length_ns, now_ns - self.floor_ns))
                node, now_ns = int(routes.parent[node]), now_ns - length_ns

    def _earlier(self, place: int, now_ns: int, before: str) -> tuple[int, int, int]:
        """Jump to the end of the rank's last step before an instant; without one, the time has no known cause."""
        job = self.job
        index = bisect_right(job.analyses[place].steps, now_ns - job.shift_ns[place], key=lambda step: step.end_ns) - 1
        cause = OTHER if index < 0 else int(Cause.HOST_PYTHON)
        until_ns = self.floor_ns if index < 0 else max(job.bounds(place, index)[1], self.floor_ns)
        self._put(place, before, cause, now_ns - until_ns)
        if index < 0:
            self.names[place, before, cause][UNSEEN] += now_ns - until_ns
        return place, -1 if index < 0 else int(job.routes[place].ends[index]), until_ns

    def _put(self, place: int, before: str, cause: int, time_ns: int) -> None:
        if time_ns:
            self.sums[place, before, cause] += time_ns

    def _take(self, place: int, node: int, before: str, part_ns: int, whole_ns: int) -> None:
        """Add a node's time by cause; a node that begins before the step counts in proportion."""
        routes = self.job.routes[place]
        taken = 0
        passed = 0
        for cause, time_ns in enumerate(routes.causes_ns[node].tolist()):
            if not time_ns:
                continue
            passed += time_ns
            upto = passed * part_ns // whole_ns if whole_ns else 0
            self._put(place, before, cause, upto - taken)
            taken = upto
        for name, cause, time_ns in zip(
            routes.top_name[node].tolist(), routes.top_cause[node].tolist(), routes.top_ns[node].tolist(), strict=True
        ):
            if name >= 0 and time_ns:
                self.names[place, before, cause][routes.names[name]] += time_ns

    def result(self, number: int, rank: int, length_ns: int) -> JobStep:
        ranks = [analysis.rank for analysis in self.job.analyses]
        stretches = []
        by_rank: Counter[int] = Counter()
        by_cause: Counter[str] = Counter()
        for key, time_ns in self.sums.items():
            place, before, cause = key
            name = max(self.names[key].items(), key=lambda each: (each[1], each[0]), default=("", 0))[0]
            stretches.append(Stretch(rank=ranks[place], before=before, cause=CAUSES[cause], name=name, time_ns=time_ns))
            by_rank[ranks[place]] += time_ns
            by_cause[CAUSES[cause]] += time_ns
        stretches.sort(key=lambda each: (-each.time_ns, each.rank, each.before, each.cause))
        return JobStep(
            number=number,
            rank=rank,
            length_ns=length_ns,
            by_rank=_most_first(by_rank),
            by_cause=_most_first(by_cause),
            stretches=tuple(stretches),
        )


def _labels(analysis: RankAnalysis) -> list[str]:
    """Return the operation and its number within the step, [exchanges]."""
    counts: Counter[tuple[int, int]] = Counter()
    out = []
    for op, step in zip(analysis.exchanges.op.tolist(), analysis.exchanges.step.tolist(), strict=True):
        counts[op, step] += 1
        out.append(f"{'collective' if OPS[op] == 'unknown' else OPS[op]} {counts[op, step]}")
    return out


def _table(steps: tuple[JobStep, ...]) -> Table:
    sums: Counter[tuple[int, str, str]] = Counter()
    names: dict[tuple[int, str, str], Counter[str]] = defaultdict(Counter)
    seen: Counter[tuple[int, str, str]] = Counter()
    for step in steps:
        for each in step.stretches:
            key = (each.rank, each.before, each.cause)
            sums[key] += each.time_ns
            seen[key] += 1
            # A step's own name does not say where in it the time was spent.
            names[key]["" if each.name.startswith("ProfilerStep") else each.name] += each.time_ns
    whole_ns = sum(step.length_ns for step in steps)
    rows = [
        (rank, before, cause, names[rank, before, cause].most_common(1)[0][0], time_ns, time_ns / whole_ns, seen[key])
        for key, time_ns in sorted(sums.items(), key=lambda each: (-each[1], each[0]))
        for rank, before, cause in (key,)
    ]
    columns = ("rank", "before", "cause", "mostly", "time_ns", "time_share", "steps")
    note = "Where a rank waited for another, the path continues on the last to arrive; it is as long as the steps."
    return table_of("job_path", "Critical path over all ranks", columns, rows, limit=200, note=note)


def _total(many: list[dict[Key, int]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for each in many:
        total.update(each)
    return _most_first(total)


def _most_first(sums: Counter[Key]) -> dict[Key, int]:
    return dict(sums.most_common())


# -- job analysis -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobAnalysis:
    ranks: tuple[RankAnalysis, ...]
    """In rank order."""
    collectives: CollectivesAnalysis
    distributed: Table
    """One row per rank."""
    path: JobPath
    findings: tuple[Finding, ...] = ()
    """The most severe and costly first."""
    verdict: str = ""
    notices: tuple[str, ...] = ()
    """Remarks on the files and on how they were compared."""
    mixed: str | None = None
    """Why the files cannot belong to one job and which were left out; None if they can."""

    @property
    def clocks(self) -> Clocks:
        return self.collectives.clocks


# -- ranks like their peers -------------------------------------------------------------------------------------------
# What if one or more ranks arrived at each collective like their peers?
#
# A rank's way to a collective, from the previous collective on its path or from the start of the step, is one *leg*. A
# collective ends on each of its ranks as long after the last arrival as it did in the trace. The rank's legs are cut to
# the median of its peers' legs to the same collective, and all arrivals are recomputed (for several ranks at once, the
# peers are all others). If its first step began later than the median of its peers', it begins with them: a delay from
# before the trace counts too. Only what was critical to each arrival is known here, so this is an upper bound of the
# gain.


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
    was, now = _ends(job, legs), _ends(job, _leveled(legs, places), earlier_ns)
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


def _ends(
    job: JobRanks, legs: list[_Leg], earlier_ns: Mapping[tuple[int, int], int] | None = None
) -> dict[int, dict[int, int]]:
    """Return when each step ends on the common clock, by step number and place.

    ``earlier_ns``: how much earlier some steps begin than in the trace, by place and index.
    """
    earlier_ns = earlier_ns or {}
    done = {}
    """Key: collective and place. Value: when that rank is done with it."""
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
        # The arrival of a rank that came outside of its steps is unknown.
        if len(arrivals) == len(members[whole]):
            for place in members[whole]:
                done[whole, place] += max(arrivals) - job.arrived_ns[whole]
    out: dict[int, dict[int, int]] = {}
    for leg in to.get(-1, []):
        out.setdefault(leg.goal[1], {})[leg.place] = arrival(leg)
    return out


# -- table of ranks ---------------------------------------------------------------------------------------------------
# How much each rank computed, communicated and waited, and how its steps varied.
#
# *overlap share*: the part of the rank's communication during which it also computed; *exposed*: the rest. *wait* and
# *transfer* cover collectives that were matched over ranks. They sum the rank's own durations, so two concurrent
# collectives count twice; *comm* counts instants. Device times come from ``temporal``, those of a rank without device
# work from its host (``HostTimes``). *pace* is the length of a step (``Pace``); the other step times are of the
# profiler steps that count, on the host.

COLUMNS = (
    *("rank", "measured", "span_ns", "compute_ns", "comm_ns", "overlap_ns", "overlap_share", "exposed_comm_ns"),
    *("memory_ns", "idle_ns", "collectives", "wait_ns", "transfer_ns", "last_count"),
    *("steps", "pace_ns", "step_mean_ns", "step_median_ns", "step_std_ns", "step_min_ns", "step_max_ns"),
)


def distributed_table(analyses: Sequence[RankAnalysis], collectives: CollectivesAnalysis) -> Table:
    """One row per rank, without a limit."""
    rows = [(*_times(each), *_exchanged(each, collectives), *_steps(each)) for each in analyses]
    note = (
        "overlap_share: share of communication hidden behind compute; wait and transfer: of collectives that are also"
        " in other ranks' traces; pace: of a step, on the device if that takes longer; step…: on the host"
    )
    return table_of("distributed", "Ranks side by side", COLUMNS, rows, limit=len(rows), note=note)


def _times(analysis: RankAnalysis) -> tuple[Any, ...]:
    host, device = analysis.exchanges.host, analysis.temporal
    figures, measured = (device, "device") if host is None else (host, "host")
    share = figures.overlap_ns / figures.comm_ns if figures.comm_ns else None
    return (
        *(analysis.rank, measured, figures.span_ns, figures.compute_ns, figures.comm_ns, figures.overlap_ns, share),
        *(figures.comm_ns - figures.overlap_ns, device.memory_ns if host is None else None, figures.idle_ns),
    )


def _exchanged(analysis: RankAnalysis, collectives: CollectivesAnalysis) -> tuple[Any, ...]:
    rank = analysis.rank
    return (
        *(len(analysis.exchanges), collectives.wait_ns[rank], collectives.own_transfer_ns[rank]),
        collectives.last_counts[rank],
    )


def _steps(analysis: RankAnalysis) -> tuple[Any, ...]:
    times = np.array([step.end_ns - step.start_ns for step in analysis.steps if step.name], np.int64)
    if not len(times):
        return 0, None, None, None, None, None, None
    return (
        len(times),
        analysis.pace.step_ns,
        *(round(float(each(times))) for each in (np.mean, np.median, np.std, np.min, np.max)),
    )


# -- which file is which rank -----------------------------------------------------------------------------------------

APART_NS: Final = 3600 * 10**9
A_DATE_NS: Final = 10**18
"""In the year 2001: lower values do not count from 1970, but perhaps from when the host was started."""
NAMED: Final = 3
"""How many of the left-out files are named."""


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    ranks: list[int | None]
    """[traces]; None: left out."""
    notices: list[str]
    """The decisions, in words."""
    mixed: str | None = None
    """Why the files cannot belong to one job; None if they can."""


def one_per_rank(analyses: Sequence[RankAnalysis]) -> tuple[list[RankAnalysis], RankAssignment]:
    """Return one analysis per rank, in rank order, and the decisions."""
    chosen = assign_ranks([analysis.meta for analysis in analyses])
    found = {
        rank: analysis if analysis.rank == rank else replace(analysis, rank=rank)
        for rank, analysis in zip(chosen.ranks, analyses, strict=True)
        if rank is not None
    }
    return [found[rank] for rank in sorted(found)], chosen


def assign_ranks(metas: Sequence[TraceMeta]) -> RankAssignment:
    recordings = _recordings(metas)
    parts = [part for job in _jobs(metas) for part in _at_one_time(metas, job)]
    part = max(parts, key=lambda part: (len({recordings[at] for at in part}), _latest(metas, part)), default=[])
    latest: dict[int, int] = {}
    for at in sorted(part, key=lambda at: (metas[at].origin_ns, at)):
        latest[recordings[at]] = at
    named = {rank: at for at in latest.values() if (rank := metas[at].rank) is not None}
    nameless = sorted(at for at in latest.values() if metas[at].rank is None)
    free = (number for number in count() if number not in named)
    given = dict(zip(free, nameless, strict=False))
    rank_at = {at: rank for rank, at in (named | given).items()}
    left_out = [at for at in range(len(metas)) if at not in rank_at]
    worlds = {None, *_worlds(metas, part)}
    again = [at for at in left_out if recordings[at] in latest and metas[at].world_size in worlds]
    foreign = sorted({*left_out}.difference(again))
    later = sum(metas[at].origin_ns > metas[latest[recordings[at]]].origin_ns for at in again)
    notices = [*_of_recordings(metas, len(again) - later, later), *_of_names(given, len(rank_at))]
    return RankAssignment(
        ranks=[rank_at.get(at) for at in range(len(metas))],
        notices=notices,
        mixed=_mixed(metas, part, foreign) if foreign else None,
    )


def _of_recordings(metas: Sequence[TraceMeta], earlier: int, later: int) -> list[str]:
    whose = "the same ranks" if any(meta.rank is not None for meta in metas) else "the same process"
    told = []
    if earlier:
        told.append(f"{count_text(earlier, 'file')} of an earlier recording of {whose} left out: the latest is used")
    if later:
        told.append(f"{count_text(later, 'file')} of a later recording left out: it has fewer ranks")
    return told


def _of_names(given: dict[int, int], ranks: int) -> list[str]:
    if not given or ranks < 2:
        return []
    files = "1 file does" if len(given) == 1 else f"{len(given)} files do"
    return [f"{files} not specify a rank; treated as {named_ranks(tuple(given)).lower()}"]


def _recordings(metas: Sequence[TraceMeta]) -> list[int]:
    """Return the same number for recordings of one rank, [traces]."""
    numbers: dict[object, int] = {}
    out = [0] * len(metas)
    ends_ns: dict[object, list[int]] = {}
    for at in sorted(range(len(metas)), key=lambda at: metas[at].origin_ns):
        meta = metas[at]
        key: object = meta.rank
        if meta.rank is None:
            process = (meta.host, meta.pid, tuple(str(each.get("name")) for each in meta.devices))
            # The same pid at the same time is a process of another host or another container.
            lanes = ends_ns.setdefault(process, [])
            before = (lane for lane, end_ns in enumerate(lanes) if meta.pid is not None and end_ns <= meta.origin_ns)
            lane = next(before, len(lanes))
            lanes[lane : lane + 1] = [meta.origin_ns + max(meta.length_ns, 1)]
            key = (process, lane)
        out[at] = numbers.setdefault(key, len(numbers))
    return out


def _jobs(metas: Sequence[TraceMeta]) -> list[list[int]]:
    """Group by world size; files without one may belong to any."""
    worlds = _worlds(metas, range(len(metas)))
    if not worlds:
        return [[*range(len(metas))]] if metas else []
    return [[at for at, meta in enumerate(metas) if meta.world_size in (world, None)] for world in worlds]


def _worlds(metas: Sequence[TraceMeta], which: Iterable[int]) -> list[int]:
    return sorted({world for at in which if (world := metas[at].world_size) is not None})


def _at_one_time(metas: Sequence[TraceMeta], job: Sequence[int]) -> list[list[int]]:
    """Split where two consecutive files are far apart in time."""
    ordered = sorted(job, key=lambda at: metas[at].origin_ns)
    cuts = [
        place
        for place, (at, after) in enumerate(pairwise(ordered), 1)
        if metas[at].origin_ns > A_DATE_NS and metas[after].origin_ns - metas[at].origin_ns > APART_NS
    ]
    return [ordered[start:end] for start, end in pairwise([0, *cuts, len(ordered)])]


def _latest(metas: Sequence[TraceMeta], part: Sequence[int]) -> int:
    return max(metas[at].origin_ns for at in part)


def _mixed(metas: Sequence[TraceMeta], part: Sequence[int], foreign: Sequence[int]) -> str:
    reasons = []
    worlds = _worlds(metas, [*part, *foreign])
    if len(worlds) > 1:
        reasons.append(f"their world sizes are {', '.join(map(str, worlds[:-1]))} and {worlds[-1]}")
    apart_ns = max(min(abs(metas[at].origin_ns - metas[other].origin_ns) for other in part) for at in foreign)
    if apart_ns > APART_NS:
        reasons.append(f"they were recorded {ns_text(apart_ns)} apart")
    names = ", ".join(metas[at].path for at in foreign[:NAMED])
    more = f" and {len(foreign) - NAMED} more" if len(foreign) > NAMED else ""
    return (
        f"These files do not seem to belong to one job: {', and '.join(reasons)}. Left out: {names}{more}; compare two "
        "recordings with --against."
    )
