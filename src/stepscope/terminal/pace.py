"""The steps that figures are taken of, how fast they come, and for how long none has.  Pure.

All figures of the screen are of one stretch: that of the hub's table of ranks, its window over the last steps.  So the
phases add up to the step, and the table agrees with both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from stepscope.terminal.documents import Run
from stepscope.terminal.snapshot import Snapshot, StepRow

__all__ = [
    "recent",
    "row_steps",
    "steps_per_second",
    "still_s",
    "stretch_steps",
    "usual_wall_ns",
    "usual_words",
    "window_steps",
]

USUAL_WINDOW = 256
"""Steps, of a hub that does not say how many it holds."""
RATE_STEPS = 20
"""The rate is one of now, as on the page."""
STILL_S = 10.0
STILL_STEPS = 5
"""Without a step for longer than both, and it is no longer only a slow one."""


def recent(known: Snapshot) -> tuple[StepRow, ...]:
    """The stretch that figures are taken of."""
    steps = window_steps(known.run) or USUAL_WINDOW
    first = known.steps[-1].last - steps + 1 if known.steps else 0
    return tuple(row for row in known.steps if row.last >= first)


def window_steps(run: Run | None) -> int:
    """How many steps the hub's table of ranks is of; 0: it does not say."""
    return run.info.window.steps * max(1, run.info.window.stride) if run is not None else 0


def row_steps(row: StepRow) -> int:
    return max(1, row.last - row.first + 1)


def stretch_steps(known: Snapshot) -> int:
    return sum(map(row_steps, recent(known)))


def usual_wall_ns(known: Snapshot) -> float:
    """Of the steps of the stretch, each the mean over its ranks: the median, and of steps that are known only several
    together, which have none, the mean; 0: there are none."""
    rows = recent(known)
    if not rows:
        return 0.0
    if _one_by_one(rows):
        return statistics.median(row.mean_ns["wall"] for row in rows)
    return sum(row.mean_ns["wall"] * row_steps(row) for row in rows) / sum(map(row_steps, rows))


def usual_words(known: Snapshot) -> str:
    """What that figure is: ``median of 256``."""
    return f"{'median' if _one_by_one(recent(known)) else 'mean'} of {stretch_steps(known):,}"


def _one_by_one(rows: Sequence[StepRow]) -> bool:
    return all(row_steps(row) == 1 for row in rows)


def steps_per_second(known: Snapshot, now_wall_ns: int) -> float | None:
    """By the clock of the ranks; None unless steps come now."""
    if known.over or known.link != "live" or still_s(known, now_wall_ns) is not None:
        return None
    rows = known.steps[-RATE_STEPS - 1 :]
    if len(rows) < 2:
        return None
    took_ns, made = rows[-1].start_wall_ns - rows[0].start_wall_ns, rows[-1].first - rows[0].first
    return made / took_ns * 1e9 if took_ns > 0 and made > 0 else None


def still_s(known: Snapshot, now_wall_ns: int) -> float | None:
    """For how long no step has ended, where that is far longer than one takes; None: they come, or it is over.

    Steps that came here are believed before any clock: ours may differ from that of the ranks.
    """
    if known.over or known.link != "live" or not known.steps or not now_wall_ns:
        return None
    last = known.steps[-1]
    ended_ns = known.stepped_wall_ns
    if not ended_ns:
        created_ns = (known.run.context.created_wall_ns if known.run is not None else None) or 0
        ended_ns = max(int(last.start_wall_ns + last.mean_ns["wall"]), created_ns) if last.start_wall_ns > 0 else 0
    idle_s = (now_wall_ns - ended_ns) / 1e9 if ended_ns > 0 else 0.0
    return idle_s if idle_s > max(STILL_S, STILL_STEPS * usual_wall_ns(known) / 1e9) else None
