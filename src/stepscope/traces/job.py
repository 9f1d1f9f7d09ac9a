"""The ranks of a job together: which files are the job, the table of ranks, and what the job's analysis holds.

The findings are added by ``findings.py``.

Which file is which rank: the latest recording of each rank counts, and files that cannot belong to one job do not.

A folder often holds several recordings of the same job (``schedule(repeat=3)``), so a rank has several files: the
latest of each rank counts. A file whose content has no rank has the one in its name, if any (``rank_3.json``), or else
gets the lowest free number. Nameless files of one process at different times are recordings of one rank.

Files that cannot belong to one job are not compared: different world sizes, or recordings more than an hour apart
(clocks of hosts may differ by less). The set with most ranks counts; of several such sets, the latest. The report says
so first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from stepscope.records.finding import Finding
from stepscope.records.text import count_text, named_ranks, ns_text
from stepscope.traces.across_ranks.arrivals import CollectivesAnalysis
from stepscope.traces.across_ranks.clocks import Clocks
from stepscope.traces.across_ranks.job_path import JobPath
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.model.tables import Table, table_of
from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["CommonSteps", "JobAnalysis", "assign_ranks", "common_steps", "distributed_table", "one_per_rank"]

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

    def step_numbers(self, rank: int) -> frozenset[int]:
        """The numbers of the rank's steps that count, for ``window_of``."""
        return next(analysis.step_numbers for analysis in self.ranks if analysis.rank == rank)


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


KEPT_SHARE = 0.5
"""Of the steps of the median rank, at least; otherwise a single short trace would take away all evidence."""


@dataclass(frozen=True, kw_only=True)
class CommonSteps:
    """Ranks whose recordings ended (or began) at different steps are only compared over those that all have."""

    numbers: tuple[int, ...]
    """Ascending."""
    ranks: tuple[int, ...]
    """Those that have others, too: to be analyzed again, with only these steps."""

    @property
    def notice(self) -> str:
        first, last = self.numbers[0], self.numbers[-1]
        which = f"step {first} counts" if first == last else f"steps {first} to {last} count"
        return f"only {which}: {named_ranks(self.ranks).lower()} recorded more, which other ranks' traces do not have"


def common_steps(analyses: Sequence[RankAnalysis]) -> CommonSteps | None:
    """Find the steps that all ranks have; None if these are all steps, or too few to judge by.

    While a rank that stopped recording first writes its trace, its peers wait for it in steps that it did not record.
    A trace that was cut off while it was written says nothing about that.
    """
    numbers = {each.rank: each.step_numbers for each in analyses if each.steps and not each.meta.truncated}
    if not numbers:
        return None
    shared = _longest_run(frozenset.intersection(*numbers.values()))
    longer = tuple(rank for rank, own in numbers.items() if own != set(shared))
    enough = len(shared) >= KEPT_SHARE * median(map(len, numbers.values()))
    return CommonSteps(numbers=shared, ranks=longer) if shared and longer and enough else None


def _longest_run(numbers: Collection[int]) -> tuple[int, ...]:
    """The longest stretch without gaps, the first of several; ascending."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    longest: list[int] = max(runs, key=len, default=[])
    return tuple(longest)


def assign_ranks(metas: Sequence[TraceMeta]) -> RankAssignment:
    of_names = ranks_of_names(metas)
    chosen = _assigned([replace(meta, rank=of_names.get(at, meta.rank)) for at, meta in enumerate(metas)])
    used = sorted(at for at in of_names if chosen.ranks[at] is not None)
    if used and (len(metas) > 1 or of_names[used[0]]):
        example = f"{Path(metas[used[0]].path).name} is rank {of_names[used[0]]}"
        files = "1 file has" if len(used) == 1 else f"{len(used)} files have"
        chosen.notices.append(f"{files} a rank only in the name, which is used: {example}")
    return chosen


RANK_NAMES: Final = re.compile(r"(?<![a-z])(rank|worker)[_.-]?(\d{1,6})(?![0-9])", re.IGNORECASE)
NUMBERED: Final = re.compile(r"(?<![a-z])trace[_.-]?(\d{1,6})\.(?=json|sqlite|pt\.)", re.IGNORECASE)
"""Many scripts number their traces by rank, as many by step: see ``ranks_of_names``."""


def ranks_of_names(metas: Sequence[TraceMeta]) -> dict[int, int]:
    """Return the ranks in the names of those files whose content has none.

    ``trace_7.json`` may be rank 7 or step 7. Such numbers count if those of several files are 0, 1, 2 … without a gap.
    A number that is the rank in another file's content, or too large for the world, is ignored.
    """
    nameless = [at for at, meta in enumerate(metas) if meta.rank is None]
    paths = Counter(meta.path for meta in metas)
    taken = {meta.rank for meta in metas}
    found: dict[int, int] = {}
    numbered: dict[int, int] = {}
    for at in nameless:
        meta = metas[at]
        if paths[meta.path] > 1:
            continue  # several processes in one file
        name = Path(meta.path).name
        named, number = RANK_NAMES.search(name), NUMBERED.match(name)
        if named:
            found[at] = int(named[2])
        elif number:
            numbered[at] = int(number[1])
    if len(numbered) > 1 and sorted(numbered.values()) == list(range(len(numbered))):
        found = {**numbered, **found}
    return {at: rank for at, rank in found.items() if rank not in taken and rank < (metas[at].world_size or 1 << 62)}


def _assigned(metas: Sequence[TraceMeta]) -> RankAssignment:
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
    repeated = [at for at in left_out if recordings[at] in latest and metas[at].world_size in worlds]
    foreign = sorted({*left_out}.difference(repeated))
    later = sum(metas[at].origin_ns > metas[latest[recordings[at]]].origin_ns for at in repeated)
    notices = [*_of_recordings(metas, len(repeated) - later, later), *_of_names(given, len(rank_at))]
    return RankAssignment(
        ranks=[rank_at.get(at) for at in range(len(metas))],
        notices=notices,
        mixed=_mixed(metas, part, foreign) if foreign else None,
    )


def _of_recordings(metas: Sequence[TraceMeta], earlier: int, later: int) -> list[str]:
    whose = "the same ranks" if any(meta.rank is not None for meta in metas) else "the same process"
    notices = []
    if earlier:
        notices.append(f"{count_text(earlier, 'file')} of an earlier recording of {whose} left out: the latest is used")
    if later:
        notices.append(f"{count_text(later, 'file')} of a later recording left out: it has fewer ranks")
    return notices


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
