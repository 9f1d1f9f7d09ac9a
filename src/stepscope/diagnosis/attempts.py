"""Which attempt of an elastic job an error belongs to.

A job that is restarted (``torchrun --max-restarts``) leaves the errors of all its attempts in one folder.  An error
that a recorded process wrote belongs to that process's attempt; any other belongs where its time puts it.  An attempt
that failed before anything of it was recorded is known by its errors alone.  What starts the ranks, a launcher or a
script that does not train itself, is no attempt: its error belongs to the last one that had begun by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepscope.records.series import RankError, RankSeries, RunData

__all__ = ["Attempt", "attempts_of", "from_launcher"]

LAUNCHER_ERRORS = ("ChildFailedError", "SignalException", "ProcessRaisedException", "ProcessExitedException")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    number: int
    series: tuple[RankSeries, ...]
    """By rank; empty when nothing of it was recorded."""
    errors: tuple[RankError, ...]
    """By time; launchers' among them."""
    world_size: int | None
    """Ranks of the job, as the attempt's own processes say, else those of any attempt; None: nobody said."""


def attempts_of(run: RunData) -> tuple[Attempt, ...]:
    """All attempts that left anything, the last one last; never empty."""
    series: dict[int, list[RankSeries]] = {}
    for one in run.ranks:
        series.setdefault(one.identity.attempt, []).append(one)
    errors: dict[int, list[RankError]] = {}
    by_time = sorted(run.errors, key=lambda error: error.wall_ns)
    beside = [error for error in by_time if from_launcher(error) or (series and error.script)]
    for error in by_time:
        if error not in beside:
            errors.setdefault(_attempt_of(error, series), []).append(error)
    known = sorted({*series, *errors}) or [0]
    starts = {number: _start_ns(series.get(number, ()), errors.get(number, ())) for number in known}
    for error in beside:
        errors.setdefault(_latest(error.wall_ns, starts, otherwise=known[0]), []).append(error)
    worlds = {number: max(one.identity.world_size for one in ranks) for number, ranks in series.items()}
    return tuple(
        Attempt(
            world_size=worlds.get(number, max(worlds.values(), default=None)),
            number=number,
            series=tuple(sorted(series.get(number, ()), key=lambda one: one.rank)),
            errors=tuple(sorted(errors.get(number, ()), key=lambda error: error.wall_ns)),
        )
        for number in known
    )


def from_launcher(error: RankError) -> bool:
    """Whether a launcher speaks of its ranks; some do not know that they have no rank themselves."""
    return error.rank is None or bool(error.exit_codes) or error.type in LAUNCHER_ERRORS


def _attempt_of(error: RankError, series: Mapping[int, Sequence[RankSeries]]) -> int:
    wrote = [number for number, ranks in series.items() if any(one.identity.pid == error.pid for one in ranks)]
    if len(wrote) == 1:
        return wrote[0]
    if not series:
        return 0
    first = min(series)
    starts = {number: _start_ns(ranks, ()) for number, ranks in series.items()}
    number = _latest(error.wall_ns, starts, otherwise=max(first - 1, 0))
    there = next((one for one in series.get(number, ()) if one.rank == error.rank), None)
    if there is not None and there.ended_wall_ns and 0 < there.ended_wall_ns < error.wall_ns:
        return number + 1  # that attempt's process of this rank was gone by then
    return number


def _start_ns(series: Sequence[RankSeries], errors: Sequence[RankError]) -> int:
    return min((one.anchor_wall_ns for one in series), default=min((error.wall_ns for error in errors), default=0))


def _latest(wall_ns: int, starts: Mapping[int, int], *, otherwise: int) -> int:
    """The last attempt that had begun by then; without a time, the last of all."""
    if not wall_ns:
        return max(starts)
    return max((number for number, start_ns in starts.items() if start_ns <= wall_ns), default=otherwise)
