"""Attempts of an elastic job, and which attempt an error belongs to.

A job that is restarted (``torchrun --max-restarts``) leaves the errors of all its attempts in one folder.  An error
written by a recorded process belongs to that process's attempt; any other is assigned by its time.  An attempt that
failed before it was recorded is known by its errors alone.  A process that starts the ranks, a launcher or a script
that does not train itself, is not an attempt: its error belongs to the last one that had begun by then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from stepscope.records.series import RankError, RankSeries, RunData

__all__ = ["Attempt", "attempts_of", "from_launcher"]

LAUNCHER_ERRORS = ("ChildFailedError", "SignalException", "ProcessRaisedException", "ProcessExitedException")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    number: int
    series: tuple[RankSeries, ...]
    """By rank; empty if nothing of it was recorded."""
    errors: tuple[RankError, ...]
    """By time, including those of launchers."""
    is_last: bool
    oom_killed: frozenset[int]
    """Ranks that the kernel killed because memory ran out."""
    world_size: int | None
    """Ranks of the job according to the attempt's own processes, else to any attempt; None: unknown."""


def attempts_of(run: RunData) -> tuple[Attempt, ...]:
    """All attempts that left anything, the last one last; never empty.  Some jobs are restarted thousands of times."""
    series: dict[int, list[RankSeries]] = {}
    for one in run.ranks:
        series.setdefault(one.identity.attempt, []).append(one)
    errors: dict[int, list[RankError]] = {}
    own: list[RankError] = []
    secondary: list[RankError] = []
    for error in sorted(run.errors, key=lambda error: error.wall_ns):
        (secondary if from_launcher(error) or (series and error.script) else own).append(error)
    if own:
        recorded = _Recorded(series)
        for error in own:
            errors.setdefault(recorded.attempt_of(error), []).append(error)
    known = sorted({*series, *errors}) or [0]
    if secondary:
        starts = _Starts({number: _start_ns(series.get(number, ()), errors.get(number, ())) for number in known})
        for error in secondary:
            errors.setdefault(starts.latest(error.wall_ns, otherwise=known[0]), []).append(error)
    worlds = {number: max(one.identity.world_size for one in ranks) for number, ranks in series.items()}
    largest = max(worlds.values(), default=None)
    starved = {event.get("pid") for event in run.events if event.get("event") == "rank_end" and event.get("oom_kill")}
    return tuple(
        Attempt(
            world_size=worlds.get(number, largest),
            number=number,
            is_last=number == known[-1],
            series=tuple(sorted(series.get(number, ()), key=lambda one: one.rank)),
            errors=tuple(sorted(errors.get(number, ()), key=lambda error: error.wall_ns)),
            oom_killed=frozenset(one.rank for one in series.get(number, ()) if one.identity.pid in starved),
        )
        for number in known
    )


def from_launcher(error: RankError) -> bool:
    """Whether a launcher reports about its ranks; some launchers do not know that they have no rank themselves."""
    return error.rank is None or bool(error.exit_codes) or error.type in LAUNCHER_ERRORS


class _Recorded:
    """The attempts with any recorded process."""

    def __init__(self, series: Mapping[int, Sequence[RankSeries]]) -> None:
        self._by_pid: dict[int, set[int]] = {}
        self._by_rank: dict[tuple[int, int | None], RankSeries] = {}
        for number, ranks in series.items():
            for one in ranks:
                self._by_pid.setdefault(one.identity.pid, set()).add(number)
                self._by_rank.setdefault((number, one.rank), one)
        self._first = min(series, default=0)
        self._starts = _Starts({number: _start_ns(ranks, ()) for number, ranks in series.items()})

    def attempt_of(self, error: RankError) -> int:
        """By the process that wrote it; else by its time."""
        wrote = self._by_pid.get(error.pid, set())
        if len(wrote) == 1:
            return next(iter(wrote))
        if not self._by_rank:
            return 0
        number = self._starts.latest(error.wall_ns, otherwise=max(self._first - 1, 0))
        there = self._by_rank.get((number, error.rank))
        if there is not None and there.ended_wall_ns and 0 < there.ended_wall_ns < error.wall_ns:
            return number + 1  # that attempt's process of this rank was gone by then
        return number


class _Starts:
    """Start times of attempts."""

    def __init__(self, starts: Mapping[int, int]) -> None:
        in_time = sorted(starts.items(), key=lambda pair: pair[1])
        self._begun_ns = [start_ns for _, start_ns in in_time]
        self._latest = list(accumulate((number for number, _ in in_time), max))

    def latest(self, wall_ns: int, *, otherwise: int) -> int:
        """The last attempt that had begun by then; without a time, the last of all."""
        begun = bisect_right(self._begun_ns, wall_ns) if wall_ns else len(self._latest)
        return self._latest[begun - 1] if begun else otherwise


def _start_ns(series: Sequence[RankSeries], errors: Sequence[RankError]) -> int:
    return min((one.anchor_wall_ns for one in series), default=min((error.wall_ns for error in errors), default=0))
