"""What Stepscope says of a run, whole or cut off after a step, and how soon it says the right thing."""

from __future__ import annotations

from fakes.cut import cut

from league.score import names_fault
from league.truth import Claim, Truth, claim_of
from stepscope.records.series import RunData
from stepscope.reports import summarize

__all__ = ["detected_after", "verdict"]

STAYS = 5
"""Prefixes in a row, after the first, that must say it too: a verdict that comes and goes is none."""


def verdict(run: RunData, *, alive: bool = False) -> list[Claim]:
    """The findings that a reader of the summary would see; the only place where the league asks for a diagnosis."""
    return [claim_of(finding) for finding in summarize(run, alive=alive, logs=("main.log",))["findings"]]


def detected_after(run: RunData, truth: Truth, ranks: int) -> int | None:
    """How many steps with the fault it took until it was named and stayed so; None: never, or it has no start."""
    last = min((int(series.steps["step"][-1]) for series in run.ranks if len(series.steps)), default=-1)
    if truth.start is None or last < truth.start:
        return None
    streak = 0
    for step in range(truth.start, last + 1):
        named = names_fault(truth, verdict(cut(run, step), alive=True), ranks)
        streak = streak + 1 if named else 0
        if streak > STAYS:
            return step - STAYS - truth.start + 1
    return last - streak + 1 - truth.start + 1 if streak else None
