"""When nothing is wrong, or nothing can be said: say so plainly, with the largest opportunity that remains."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.robust import longest, median_rank, shortest
from stepscope.diagnosis.view import View, cost_of
from stepscope.diagnosis.window import Window
from stepscope.records.finding import Finding

__all__ = ["find_healthy", "find_insufficient"]

Floats = NDArray[np.float64]

SAVABLE = {
    "input": "waiting for input",
    "h2d": "copying to the device",
    "comm": "communication",
    "other": "work outside model and optimizer",
    "eval": "evaluation",
    "checkpoint": "checkpointing",
}
"""Phases that are not the training itself, in words."""
SLOWEST_RANK = "waiting for whichever rank is slowest"
SLOW_STEPS = "a few slow steps"


def find_insufficient(window: Window, view: View) -> list[Finding]:
    """Too little to judge: what there is, and what therefore cannot be said."""
    if len(view.steps) >= thresholds.MIN_STEPS:
        return []
    seen, steady = len(window.steps), len(view.steps)
    if not window.ranks:
        title = "No training step was recorded, so nothing can be said about speed."
        advice = (
            "A step ends when optimizer.step() returns; a loop without one can mark its steps with stepscope.step().",
        )
    elif not seen:
        title = "No step is complete on all ranks yet, so ranks cannot be compared."
        advice = ("Look again when every rank has finished some steps.",)
    else:
        compiled = sum(apart.reason == "compile" for apart in window.warmup)
        apart = f" ({seen - steady} of {seen} set apart as warm-up)" if seen > steady else ""
        title = (
            f"Only {steady} steady step{'s' if steady != 1 else ''} to judge by{apart}: "
            "bottlenecks and stragglers cannot be told from chance."
        )
        advice = (f"Record at least {thresholds.MIN_STEPS} steps beyond warm-up.",)
        if compiled > seen / 2:
            advice = ("torch.compile compiled in most steps: shapes that change each step (mark them dynamic).",)
    return [
        Finding(
            kind="insufficient_data",
            severity="info",
            title=title,
            steps=(int(window.steps[0]), int(window.steps[-1])) if seen else None,
            cost=cost_of(view, np.zeros(steady)),
            evidence={
                "steps": seen,
                "steady_steps": steady,
                "needed": thresholds.MIN_STEPS,
                "ranks": len(window.ranks),
            },
            advice=advice,
        )
    ]


def find_healthy(view: View) -> list[Finding]:
    if len(view.steps) < thresholds.MIN_STEPS:
        return []
    opportunities = _opportunities(view)
    name, saved_ns = max(opportunities.items(), key=lambda item: float(item[1].sum()), default=("", np.zeros(0)))
    share = float(saved_ns.sum() / view.step_ns.sum()) if len(saved_ns) and view.step_ns.sum() else 0.0
    if share < thresholds.OPPORTUNITY_SHARE:
        name, saved_ns = "", np.zeros(len(view.steps))
        title = "No bottleneck found; forward, backward and optimizer take nearly all of the step."
        advice: tuple[str, ...] = ("Faster from here means less compute: autocast, torch.compile, a larger batch.",)
    else:
        title = _title(view, name, saved_ns, share)
        advice = ()
    return [
        Finding(
            kind="healthy",
            severity="info",
            title=title,
            steps=(int(view.steps[0]), int(view.steps[-1])),
            cost=cost_of(view, saved_ns),
            evidence=_evidence(view, name, opportunities),
            advice=advice,
            confidence=0.9,
        )
    ]


def _title(view: View, name: str, saved_ns: Floats, share: float) -> str:
    if name == SLOW_STEPS:
        slowest = int(view.step_ns.argmax())
        worst = f"step {int(view.steps[slowest])} took {view.step_ns[slowest] / 1e6:,.4g} ms"
        return f"No lasting bottleneck found, but {share:.0%} of the time went into a few slow steps: {worst}."
    if name == SLOWEST_RANK:
        return f"No lasting bottleneck found; waiting for whichever rank is slowest takes {share:.0%} of the time."
    per_step = f"{float(saved_ns.mean()) / 1e6:.2g} of {float(view.step_ns.mean()) / 1e6:.3g} ms per step"
    return f"No bottleneck found. The largest opportunity left is {name}: {per_step}."


def _opportunities(view: View) -> dict[str, Floats]:
    """What each step could save at most, by name; of a phase what all ranks have of it, so the wait of some is not
    counted as the network's."""
    found: dict[str, Floats] = {}
    for phase, words in SAVABLE.items():
        if phase in view.phases:
            found[words] = shortest(view.phase(phase))
    if len(view.ranks) > 1 and view.comm_measured:
        found[SLOWEST_RANK] = longest(view.work_ns) - median_rank(view.work_ns)
    found[SLOW_STEPS] = np.maximum(view.step_ns - view.median_step_ns, 0.0)
    return found


def _evidence(view: View, name: str, opportunities: dict[str, Floats]) -> dict[str, Any]:
    total = float(view.step_ns.sum()) or 1.0
    return {
        "opportunity": name or None,
        "opportunities": {words: round(float(saved.sum()) / total, 4) for words, saved in opportunities.items()},
        "steps_used": len(view.steps),
        "step_ms": round(view.median_step_ns / 1e6, 3),
    }
