"""After the chain: what to say when nothing is wrong, or when there is too little data to say anything.

A healthy run gets the largest remaining opportunity.  A small one needs no action.  A large one is not a fault that can
be named, but no clean bill of health either, so the title says what it is instead of "no bottleneck".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.claims import longer_by_passes
from stepscope.diagnosis.engine.settings import (
    accumulation_setting,
    copy_setting,
    frameworks_of,
    loader_setting,
    phase_advice,
    runs_own_loop,
)
from stepscope.diagnosis.engine.view import View, cost_of, where_stopped
from stepscope.diagnosis.engine.window import Window
from stepscope.diagnosis.rules.between_steps import STOPS, STOPS_ADVICE
from stepscope.diagnosis.rules.bounds import find_compute_bound, less_compute_advice
from stepscope.diagnosis.rules.spikes import without_looks
from stepscope.judge import thresholds
from stepscope.judge.statistics import longest, mean_rank, median_rank, shortest
from stepscope.records.finding import Finding
from stepscope.records.paths import HOOKS_INSTALLED, HOOKS_MISSED
from stepscope.records.series import RunData, Unrecorded
from stepscope.records.text import count_text, ms_text, share_text

__all__ = ["collecting_text", "find_insufficient", "led_by_health"]

Floats = NDArray[np.float64]

REMARKS = frozenset(
    {
        "jitter",
        "stall",
        "throughput_drop",
        "loss_nan",
        "nan_gradients",
        "loss_spike",
        "unused_parameters",
        "uneven_batches",
        "memory_creep",
        "memory_pressure",
        "memory_imbalance",
        "fragmentation",
        "low_gpu_utilization",
        "gpu_throttled",
        "cpu_saturated",
        "ram_pressure",
        "slow_network",
        "rank_crashed",
    }
)
"""Kinds that appear next to ``healthy``, rather than instead of it, unless they are warnings."""
EVERY_STEP = {
    "input": "waiting for input",
    "h2d": "copying to the device",
    "comm": "waiting for peers or the network",
    "other": "work outside model and optimizer",
}
"""Phases of every step other than the training itself, in words."""
SLOWEST_RANK = "waiting for whichever rank is slowest"
SLOW_STEPS = "a few slow steps"

ADVICE = {
    EVERY_STEP["input"]: (
        "Waits this short are the cost of making a batch in Python: use larger batches, or slice them from one tensor.",
    ),
    **{words: (STOPS_ADVICE[phase],) for phase, words in STOPS.items()},
    SLOWEST_RANK: ("No rank is always slow: look for work that varies from batch to batch (sequence lengths).",),
    SLOW_STEPS: ('See what they have in common: stepscope sql "select * from steps order by wall_ns desc limit 5".',),
}


def collecting_text(window: Window) -> str:
    """``Collecting: 3 of 10 steps.``: for a live run that has too few steps to be judged; empty if it has enough."""
    steady, seen = int(window.steady.sum()), len(window.steps)
    if steady >= thresholds.MIN_STEPS or not seen:
        return ""
    apart = f" ({seen - steady} more set aside as warm-up)" if seen > steady else ""
    return f"Collecting: {steady} of {thresholds.MIN_STEPS} steps{apart}."


def find_insufficient(
    run: RunData, window: Window, view: View, *, reached: bool = False, alive: bool = False
) -> list[Finding]:
    """Report too little data: what there is, and what therefore cannot be concluded.

    ``reached``: the recorder got into some process, although possibly none of them trained; ``alive``: more steps will
    come.
    """
    if len(view.steps) >= thresholds.MIN_STEPS:
        return []
    title, advice = _too_little(run, window, len(view.steps), reached=reached, alive=alive)
    return [
        Finding(
            kind="insufficient_data",
            severity="critical" if not run.ranks and _exit_code(run) else "info",
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


def _why_unrecorded(processes: Sequence[Unrecorded]) -> tuple[str, tuple[str, ...]]:
    """Explain an empty run by what its processes wrote at their end; torch that could not be hooked comes first."""
    failed = [each for each in processes if each.torch and each.hooks not in (HOOKS_INSTALLED, HOOKS_MISSED)]
    missed = [each for each in processes if each.torch and each.hooks == HOOKS_MISSED]
    hooked = [each for each in processes if each.torch and each.hooks == HOOKS_INSTALLED]
    by_hand = 'Put "import stepscope; stepscope.init()" after the imports at the top of the script.'
    if failed:
        return (
            f"Nothing was recorded: the hooks could not be installed in torch {failed[0].torch} ({failed[0].hooks}).",
            ("This is an error in Stepscope. Check that this version of torch is supported (`stepscope doctor`).",),
        )
    if missed:
        return (
            f"Nothing was recorded: {_named(missed)} loaded torch {missed[0].torch} without Python's import system.",
            (by_hand,),
        )
    begins = "Recording begins with the first forward that needs gradients, backward or optimizer.step()."
    elsewhere = "A process in a container, behind ssh or under python -I cannot be recorded from here."
    if hooked:
        return (
            f"Nothing was recorded: {_named(hooked)} imported torch {hooked[0].torch} and ended without training.",
            (begins, elsewhere),
        )
    return f"Nothing was recorded: {_named(processes)} ended without importing torch.", (elsewhere,)


def _named(processes: Sequence[Unrecorded]) -> str:
    names = sorted({each.script for each in processes if each.script not in ("", "-c")})
    return names[0] if len(names) == 1 else "the script"


def _exit_code(run: RunData) -> int:
    """The exit code of a job that failed; 0 if it did not, or was interrupted."""
    end = run.meta.get("end")
    code = end.get("exit_code") if isinstance(end, dict) and end.get("status") == "failed" else None
    return code if isinstance(code, int) else 0


def _too_little(
    run: RunData, window: Window, steady: int, *, reached: bool, alive: bool
) -> tuple[str, tuple[str, ...]]:
    hooks_missing = any(each.torch and each.hooks != HOOKS_INSTALLED for each in run.unrecorded)
    if not run.ranks and not hooks_missing and (code := _exit_code(run)):
        last = f": {run.last_line}" if run.last_line else "."
        return (
            f"The script ended with exit code {code} before it trained{last}",
            ("Nothing was recorded, because recording begins with the first training step.",),
        )
    if not run.ranks and run.unrecorded:
        return _why_unrecorded(run.unrecorded)
    if not run.ranks and reached:
        return (
            "Nothing was recorded: no process with the recorder loaded trained a PyTorch model.",
            (
                "Recording begins with the first forward that needs gradients, backward or optimizer.step().",
                "A process in a container, behind ssh or under python -I cannot be recorded from here.",
            ),
        )
    if not run.ranks:
        return (
            "Nothing was recorded: the recorder was not loaded in any training process.",
            (
                "It is loaded through PYTHONPATH: python -I or -E, env -i, a container or ssh can prevent that.",
                'If you cannot change that, put "import stepscope; stepscope.init()" at the top of the script.',
            ),
        )
    if not window.ranks:
        ends = "A step ends when the step() of a torch optimizer returns, and none did."
        by_hand = (
            'If parameters are updated by hand, put "with stepscope.step():" around the body of the training loop.'
        )
        own_loop = any(runs_own_loop(frameworks_of(series.facts)) for series in run.ranks)
        return (
            "No training step was recorded, so nothing can be said about speed.",
            (ends,) if own_loop else (ends, by_hand),
        )
    seen = len(window.steps)
    if not seen:
        return (
            "No step is complete on all ranks yet, so ranks cannot be compared.",
            ("Look again when every rank has finished some steps.",),
        )
    apart = f" ({seen - steady} of {seen} set aside as warm-up)" if seen > steady else ""
    cannot = "bottlenecks and stragglers" if len(window.ranks) > 1 else "bottlenecks"
    few = f"Only {count_text(steady, 'steady step')}" if steady else "No steady step"
    title = f"{few} to judge by{apart}: {cannot} cannot be separated from noise."
    if alive:
        title = collecting_text(window)
    if sum(step.reason == "compile" for step in window.warmup) > seen / 2:
        return title, ("torch.compile recompiled in most steps, probably because shapes change; mark them as dynamic.",)
    return title, () if alive else (f"Record at least {thresholds.MIN_STEPS} steps beyond warm-up.",)


def led_by_health(view: View, findings: Sequence[Finding]) -> list[Finding]:
    """The findings; if they are small remarks only, between what is healthy and what the time is spent on."""
    if any(finding.severity != "info" or finding.kind not in REMARKS for finding in findings):
        return list(findings)
    return [*find_healthy(view), *findings, *(claim.finding for claim in find_compute_bound(view))]


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
        advice: tuple[str, ...] = (less_compute_advice(view),)
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
    frameworks = frameworks_of(view.facts)
    if name == EVERY_STEP["other"]:
        return (
            phase_advice(frameworks, "the loop"),
            "Usual causes: .item(), printing and logging every step, metrics, copies between tensors and numpy.",
        )
    if name == EVERY_STEP["h2d"]:
        pin, copy = loader_setting(frameworks, "pin_memory", True), copy_setting(frameworks)
        ways, hide = (f"{pin} and {copy}", "hide") if copy else (pin, "hides")
        return (f"{ways} {hide} the copy behind the computation.",)
    if name != EVERY_STEP["comm"]:
        return ADVICE.get(name, ())
    if view.window.stages:
        return ("Pipeline stages wait while the pipeline fills and drains: more microbatches per step reduce that.",)
    setting = None if view.accumulates else accumulation_setting(frameworks)
    ddp = "no_sync() between steps" if view.facts.get("ddp") and not view.accumulates else None
    fewer = f", or {setting or ddp}," if setting or ddp else ""
    return (f"The ranks are alike, so the exchange itself is slow: larger batches{fewer} need fewer exchanges.",)


def _large_title(view: View, name: str, saved_ns: Floats, share: str) -> str:
    if name == SLOW_STEPS:
        return f"{share} of the training time went into a few slow steps: {_worst_step(view, saved_ns)}."
    if name == SLOWEST_RANK:
        return (
            f"{share} of the training time is spent waiting for whichever rank is slowest; "
            "it is not always the same one."
        )
    if name in STOPS.values():
        return f"{share} of the training time is {name}: {_now_and_then(view, name)}."
    per_step = f"{ms_text(float(saved_ns.mean()) / 1e6)} of {ms_text(float(view.step_ns.mean()) / 1e6)}"
    if name == EVERY_STEP["other"]:
        return f"{share} of the step is outside input, forward, backward and optimizer: {per_step}."
    return f"{share} of the step is spent {name}: {per_step}."


def _small_title(view: View, name: str, saved_ns: Floats, share: str) -> str:
    if name == SLOW_STEPS:
        slowest = _worst_step(view, saved_ns)
        return f"No lasting bottleneck found, but {share} of the training time went into {name}: {slowest}."
    if name == SLOWEST_RANK:
        return f"No lasting bottleneck found; {name} takes {share} of the training time."
    if name in STOPS.values():
        return f"No bottleneck found. Apart from training, most time goes to {name}: {_now_and_then(view, name)}."
    per_step = f"{ms_text(float(saved_ns.mean()) / 1e6)} of {ms_text(float(view.step_ns.mean()) / 1e6)} per step"
    return f"No bottleneck found. Apart from training, most time goes to {name}: {per_step}."


def _now_and_then(view: View, name: str) -> str:
    took = longest(view.phase(_phase_of(name) or ""))
    each = ms_text(float(took[took > 0].mean()) / 1e6)
    return f"{each} in {int((took > 0).sum()):,} of {count_text(len(took), 'step')}"


def _worst_step(view: View, saved_ns: Floats) -> str:
    """Describe the slowest of the slow steps, with the phase that holds most of their excess."""
    slow = saved_ns > 0
    at = int(np.where(slow, view.step_ns, 0.0).argmax())
    excess = {name: _over_median(mean_rank(view.phase(name)))[slow].sum() for name in view.phases}
    phase, most = max(excess.items(), key=lambda item: float(item[1]), default=("", 0.0))
    mostly = most >= thresholds.EXPLAINS_SHARE * saved_ns.sum()
    where = f", most of it in {phase}" if mostly else ""
    return f"step {int(view.steps[at])} took {ms_text(view.step_ns[at] / 1e6)}{where}"


def _opportunities(view: View) -> dict[str, Floats]:
    """The most each step could save, by name.

    For a phase of every step, only what all ranks have counts, so that a wait of some ranks is not attributed to the
    network.  Evaluation, checkpoints and extra backward passes do not make a step slow.
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
    own_ns = view.step_ns - where_stopped(view, stopped) - longer_by_passes(view)
    found[SLOW_STEPS] = _over_median(without_looks(view, own_ns))
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
