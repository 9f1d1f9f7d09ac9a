"""When nothing is wrong, or nothing can be said: say so plainly, with the largest opportunity that remains.

While that is small nothing needs to be done; a large one is no fault that we can name, but no clean bill either, and
the sentence says what it is instead of "no bottleneck".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.framework_advice import accumulation, frameworks_of
from stepscope.diagnosis.passes import longer_by_passes
from stepscope.diagnosis.robust import longest, mean_rank, median_rank, shortest
from stepscope.diagnosis.shares import where_stopped
from stepscope.diagnosis.unclaimed import STOPS, STOPS_ADVICE
from stepscope.diagnosis.view import View, cost_of
from stepscope.diagnosis.window import Window
from stepscope.records.finding import Finding
from stepscope.records.series import RunData
from stepscope.records.units import count_text, ms_text, share_text

__all__ = ["find_healthy", "find_insufficient"]

Floats = NDArray[np.float64]

EVERY_STEP = {
    "input": "waiting for input",
    "h2d": "copying to the device",
    "comm": "waiting for peers or the network",
    "other": "work outside model and optimizer",
}
"""Phases of every step that are not the training itself, in words."""
SLOWEST_RANK = "waiting for whichever rank is slowest"
SLOW_STEPS = "a few slow steps"

ADVICE = {
    EVERY_STEP["other"]: (
        'Put "with stepscope.phase(name):" around parts of the loop to see which of them it is.',
        "Usual ones: .item(), printing and logging every step, metrics, copies between tensors and numpy.",
    ),
    EVERY_STEP["input"]: (
        "Waits this short are what making a batch costs in Python: larger batches, or batches sliced from one tensor.",
    ),
    EVERY_STEP["h2d"]: ("pin_memory=True and .to(device, non_blocking=True) hide the copy behind the computation.",),
    **{words: (STOPS_ADVICE[phase],) for phase, words in STOPS.items()},
    SLOWEST_RANK: ("No rank is slow for good: look for work that varies from batch to batch (sequence lengths).",),
    SLOW_STEPS: ('See what they have in common: stepscope sql "select * from steps order by wall_ns desc limit 5".',),
}


def find_insufficient(run: RunData, window: Window, view: View, *, reached: bool = False) -> list[Finding]:
    """Too little to judge: what there is, and what therefore cannot be said.

    ``reached``: the recorder got into some process, though none of them may have trained.
    """
    if len(view.steps) >= thresholds.MIN_STEPS:
        return []
    title, advice = _too_little(run, window, len(view.steps), reached=reached)
    return [
        Finding(
            kind="insufficient_data",
            severity="info",
            title=title,
            steps=(int(window.steps[0]), int(window.steps[-1])) if len(window.steps) else None,
            cost=cost_of(view, np.zeros(len(view.steps))),
            evidence={
                "steps": len(window.steps),
                "steady_steps": len(view.steps),
                "needed": thresholds.MIN_STEPS,
                "ranks": len(window.ranks),
                "processes": len(run.ranks),
            },
            advice=advice,
        )
    ]


def _too_little(run: RunData, window: Window, steady: int, *, reached: bool) -> tuple[str, tuple[str, ...]]:
    if not run.ranks and reached:
        return (
            "Nothing was recorded: no process that the recorder got into trained a PyTorch model.",
            (
                "It begins with the first forward that needs gradients, backward or optimizer.step().",
                "If the training runs in a process beyond a container, ssh or python -I, it cannot be seen from here.",
            ),
        )
    if not run.ranks:
        return (
            "Nothing was recorded: the recorder never got into a training process.",
            (
                "Its way in is the environment (PYTHONPATH): python -I or -E, env -i, a container, ssh keep it out.",
                "Where that cannot be changed, import stepscope; stepscope.init() at the top of the script does it.",
            ),
        )
    if not window.ranks:
        return (
            "No training step was recorded, so nothing can be said about speed.",
            (
                "A step ends when the step() of a torch optimizer returns, and none did.",
                'If parameters are updated by hand, put "with stepscope.step():" around the body of the training loop.',
            ),
        )
    seen = len(window.steps)
    if not seen:
        return (
            "No step is complete on all ranks yet, so ranks cannot be compared.",
            ("Look again when every rank has finished some steps.",),
        )
    apart = f" ({seen - steady} of {seen} set apart as warm-up)" if seen > steady else ""
    cannot = "bottlenecks and stragglers" if len(window.ranks) > 1 else "bottlenecks"
    few = f"Only {count_text(steady, 'steady step')}" if steady else "No steady step"
    title = f"{few} to judge by{apart}: {cannot} cannot be told from chance."
    if sum(one.reason == "compile" for one in window.warmup) > seen / 2:
        return title, ("torch.compile compiled in most steps: shapes that change each step (mark them dynamic).",)
    return title, (f"Record at least {thresholds.MIN_STEPS} steps beyond warm-up.",)


def find_healthy(view: View) -> list[Finding]:
    if len(view.steps) < thresholds.MIN_STEPS:
        return []
    opportunities = _opportunities(view)
    name, saved_ns = max(opportunities.items(), key=lambda item: float(item[1].sum()))
    cost = cost_of(view, saved_ns)
    large = bool(cost["share"] >= thresholds.LARGE_SHARE)
    if cost["share"] < thresholds.OPPORTUNITY_SHARE:
        name, cost = "", cost_of(view, np.zeros(len(view.steps)))
        title = "No bottleneck found; forward, backward and optimizer take nearly all of the step."
        advice: tuple[str, ...] = ("Faster from here means less compute: autocast, torch.compile, a larger batch.",)
    else:
        title = (_large_title if large else _small_title)(view, name, saved_ns, share_text(cost["share"]))
        advice = _advice(view, name) if large else ()
    return [
        Finding(
            kind="healthy",
            severity="info",
            title=title,
            phase=_phase_of(name) if large else None,
            steps=(int(view.steps[0]), int(view.steps[-1])),
            cost=cost,
            evidence={**_evidence(view, name, opportunities), "large": large},
            advice=advice,
            confidence=0.9,
        )
    ]


def _advice(view: View, name: str) -> tuple[str, ...]:
    if name != EVERY_STEP["comm"]:
        return ADVICE.get(name, ())
    if view.window.stages:
        return ("Stages of a pipeline wait while it fills and drains: more microbatches in a step make that less.",)
    setting = None if view.accumulates else accumulation(frameworks_of(view.facts))
    ddp = "no_sync() between steps" if view.facts.get("ddp") and not view.accumulates else None
    fewer = f", or {setting or ddp}," if setting or ddp else ""
    return (f"The ranks are alike, so it is the exchange itself: larger batches{fewer} need fewer.",)


def _large_title(view: View, name: str, saved_ns: Floats, share: str) -> str:
    if name == SLOW_STEPS:
        return f"{share} of the time went into a few slow steps: {_worst_step(view, saved_ns)}."
    if name == SLOWEST_RANK:
        return f"{share} of the time goes by waiting for whichever rank is slowest; it is not always the same one."
    if name in STOPS.values():
        return f"{share} of the time is {name}: {_now_and_then(view, name)}."
    per_step = f"{ms_text(float(saved_ns.mean()) / 1e6)} of {ms_text(float(view.step_ns.mean()) / 1e6)}"
    if name == EVERY_STEP["other"]:
        return f"{share} of the step is outside input, forward, backward and optimizer: {per_step}."
    return f"{share} of the step goes by while {name}: {per_step}."


def _small_title(view: View, name: str, saved_ns: Floats, share: str) -> str:
    if name == SLOW_STEPS:
        return f"No lasting bottleneck found, but {share} of the time went into {name}: {_worst_step(view, saved_ns)}."
    if name == SLOWEST_RANK:
        return f"No lasting bottleneck found; {name} takes {share} of the time."
    if name in STOPS.values():
        return f"No bottleneck found. Beside the training itself the most goes to {name}: {_now_and_then(view, name)}."
    per_step = f"{ms_text(float(saved_ns.mean()) / 1e6)} of {ms_text(float(view.step_ns.mean()) / 1e6)} per step"
    return f"No bottleneck found. Beside the training itself the most goes to {name}: {per_step}."


def _now_and_then(view: View, name: str) -> str:
    took = longest(view.phase(_phase_of(name) or ""))
    each = ms_text(float(took[took > 0].mean()) / 1e6)
    return f"{each} in {int((took > 0).sum()):,} of {count_text(len(took), 'step')}"


def _worst_step(view: View, saved_ns: Floats) -> str:
    """The slowest of the slow steps, and the phase in which most of what they are too long lies."""
    slow = saved_ns > 0
    at = int(np.where(slow, view.step_ns, 0.0).argmax())
    excess = {name: _over_median(mean_rank(view.phase(name)))[slow].sum() for name in view.phases}
    phase, most = max(excess.items(), key=lambda item: float(item[1]), default=("", 0.0))
    mostly = most >= thresholds.EXPLAINS_SHARE * saved_ns.sum()
    where = f", most of it in {phase}" if mostly else ""
    return f"step {int(view.steps[at])} took {ms_text(view.step_ns[at] / 1e6)}{where}"


def _opportunities(view: View) -> dict[str, Floats]:
    """What each step could save at most, by name.

    Of a phase of every step what all ranks have of it, so the wait of some is not counted as the network's.  Steps are
    not called slow for what evaluation, checkpoints and further backward passes take.
    """
    found: dict[str, Floats] = {}
    stopped = np.zeros_like(view.wall_ns)
    for phase, words in EVERY_STEP.items():
        if phase in view.phases:
            found[words] = shortest(view.phase(phase))
    for phase, words in STOPS.items():
        if phase in view.phases:
            found[words] = where_stopped(view, view.phase(phase))
            stopped += view.phase(phase)
    if len(view.ranks) > 1 and view.comm_measured:
        work_ns = view.work_ns - stopped
        found[SLOWEST_RANK] = longest(work_ns) - median_rank(work_ns)
    found[SLOW_STEPS] = _over_median(view.step_ns - where_stopped(view, stopped) - longer_by_passes(view))
    return found


def _over_median(values: Floats) -> Floats:
    return np.maximum(values - np.median(values), 0.0)


def _phase_of(name: str) -> str | None:
    return next((phase for phase, words in {**EVERY_STEP, **STOPS}.items() if words == name), None)


def _evidence(view: View, name: str, opportunities: dict[str, Floats]) -> dict[str, Any]:
    total = float(view.step_ns.sum()) or 1.0
    return {
        "opportunity": name or None,
        "opportunities": {words: round(float(saved.sum()) / total, 4) for words, saved in opportunities.items()},
        "steps_used": len(view.steps),
        "step_ms": round(view.median_step_ns / 1e6, 3),
    }
