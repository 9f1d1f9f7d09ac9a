"""The critical path of each step over all ranks: which rank a step waited for, and what delayed that rank.

The walk uses aligned clocks (``clocks.py``). It starts at the rank whose step ends last and follows that rank's
own path (``Routes`` in ``path/walk.py``) back to the previous collective. If another rank arrived last there, the
time after that arrival is the transfer, and the walk continues at the last rank with the path to its arrival. Waiting
is thus replaced by what was waited for. The walk ends at the start of the step of the rank where it began, so its
length is exactly that step. If a rank's own step begins later than that, the walk continues in its previous step.

Exact: the length, which rank arrived last, and every sum by cause up to the last stretch. Approximate: the last
stretch is cut in proportion, not at an instant; only the few names that took most of each stretch are kept, the rest
has only its cause.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from stepscope.traces.across_ranks.arrivals import CollectivesAnalysis
from stepscope.traces.collective_calls import OPS
from stepscope.traces.model.tables import Table, table_of
from stepscope.traces.model.window import STEP
from stepscope.traces.path.graph import CAUSES, Cause
from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["JobPath", "JobRanks", "job_path"]

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
            names[key]["" if STEP.match(each.name) else each.name] += each.time_ns
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
