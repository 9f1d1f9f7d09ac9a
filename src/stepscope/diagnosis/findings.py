"""Diagnose a run: apply every family of rules, rank the findings, or report that nothing is wrong.

The order of the rules matters: each explains some of the time, and the next works on what is left
(``engine/claims.py``).  Ranks come first, because one late rank shows in every rank's step, followed by what the ranks
exchange; then pauses in training, single slow steps and trends; then what takes time on all ranks alike.  Memory and
machine findings explain no time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.claims import longer_by_passes, unexplained_steps
from stepscope.diagnosis.engine.processor_wait import waited_ns, waiting_shares
from stepscope.diagnosis.engine.settings import (
    accumulation_setting,
    copy_setting,
    frameworks_of,
    loader_setting,
    phase_advice,
    runs_own_loop,
)
from stepscope.diagnosis.engine.view import View, cost_of, lower_median_rank, view_of, where_stopped
from stepscope.diagnosis.engine.window import Window, build_window
from stepscope.diagnosis.rules.between_steps import STOPS, STOPS_ADVICE, find_between_steps, find_wait_heavy, stops_of
from stepscope.diagnosis.rules.bounds import find_bounds, find_compute_bound, less_compute_advice
from stepscope.diagnosis.rules.communication import find_communication
from stepscope.diagnosis.rules.crashes import find_crashes
from stepscope.diagnosis.rules.hangs import find_disagreement, find_hangs, led_by_hangs, with_stalls
from stepscope.diagnosis.rules.imbalance import find_uneven, find_uneven_batches
from stepscope.diagnosis.rules.layers.gradients import find_silent, histories_of
from stepscope.diagnosis.rules.layers.replicas import find_desync, find_no_exchange
from stepscope.diagnosis.rules.loss import find_loss
from stepscope.diagnosis.rules.machine import find_machine, others_fill
from stepscope.diagnosis.rules.memory import find_memory, without_forecast
from stepscope.diagnosis.rules.network import led_by_network
from stepscope.diagnosis.rules.spikes import find_spikes, without_looks
from stepscope.diagnosis.rules.stragglers import find_stragglers
from stepscope.diagnosis.rules.trends import find_trends
from stepscope.judge import thresholds
from stepscope.judge.chain import Claim
from stepscope.judge.statistics import longest, mean_rank, median_rank, shortest
from stepscope.records.finding import SEVERITIES, Finding, as_remark, highest, worded_for
from stepscope.records.finding_cost import finding_order
from stepscope.records.hang import HangKind
from stepscope.records.paths import HOOKS_INSTALLED, HOOKS_MISSED
from stepscope.records.series import RunData, Unrecorded
from stepscope.records.text import count_text, ms_text, share_text

__all__ = ["AT_ONCE", "Change", "Watched", "collecting_text", "diagnose", "follow", "live_window", "look"]


# -- healthy or too little data ---------------------------------------------------------------------------------------
# When nothing is wrong, or nothing can be concluded, say so plainly and name the largest remaining opportunity.  A
# small one needs no action.  A large one is not a fault we can name, but not a clean bill of health either, so the
# title says what it is instead of "no bottleneck".

Floats = NDArray[np.float64]

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
    if sum(one.reason == "compile" for one in window.warmup) > seen / 2:
        return title, ("torch.compile recompiled in most steps, probably because shapes change; mark them as dynamic.",)
    return title, () if alive else (f"Record at least {thresholds.MIN_STEPS} steps beyond warm-up.",)


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


# -- findings ---------------------------------------------------------------------------------------------------------

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

CHANGES = frozenset({"drift", "change_point", "throughput_drop"})


OUT_OF_MEMORY = ("oom_host", "oom_cuda", "oom_kernel")
"""Causes of a crash (``rules/crashes.py``)."""


def diagnose(
    run: RunData, window: Window | None = None, *, reached: bool = False, alive: bool = False
) -> list[Finding]:
    """Return all findings, what stopped the job first, then by ``finding_order``; never empty, never an exception.

    ``window``: the steps to judge, all of them by default; ``reached``: whether the recorder is known to have got into
    any process, recorded or not; ``alive``: whether the job is still running.
    """
    window = build_window(run) if window is None else window
    view = view_of(window)
    hangs = find_hangs(run)
    if all(hang.kind == "rank_crashed" for hang in hangs):  # the first to die may only have waited too long
        hangs = find_disagreement(run) or hangs
    crashes = find_crashes(run, alive=alive)
    survived = [crash for crash in crashes if crash.severity == "info"]
    stopped = led_by_hangs(hangs, [crash for crash in crashes if crash not in survived])
    slow = with_stalls(run, [claim.finding for claim in _explained(view)])
    if any(crash.evidence.get("cause") in OUT_OF_MEMORY for crash in stopped):
        slow = [without_forecast(finding) for finding in slow]
    histories = histories_of(view)
    values = [
        *find_loss(run, view, histories),
        *find_desync(view),
        *find_no_exchange(view),
        *find_silent(view, histories),
    ]
    values += find_uneven_batches(view)
    slow = sorted([*slow, *values], key=finding_order, reverse=True)
    # A crash is reported whatever it costs, and after one there is no point in asking for more steps.
    insufficient = [] if stopped else find_insufficient(run, window, view, reached=reached, alive=alive)
    findings = [*stopped, *slow, *insufficient, *survived]
    if all(finding.severity == "info" and finding.kind in REMARKS for finding in findings):
        compute = [claim.finding for claim in find_compute_bound(view)]
        findings = [*find_healthy(view), *findings, *compute]
    return [worded_for(finding, len(window.ranks)) for finding in findings]


def _explained(view: View) -> list[Claim]:
    claims = find_stragglers(view)
    late = {rank for claim in claims for rank in claim.finding.ranks}
    claims += find_uneven(view, late)
    network = led_by_network(view, find_communication(view), claims)
    bounds = find_bounds(view, network)
    claims += network
    known = {claim.finding.phase for claim in claims}
    late = {rank for claim in claims if claim.finding.phase == "other" for rank in claim.finding.ranks}
    between = find_between_steps(view, known, late=late)
    # Time known only by its place in the step may have begun at some step, or come and go.
    claims += [claim for claim in between if claim.finding.phase != "other"]
    spikes = find_spikes(view, unexplained_steps(view, claims), claims)
    spikes = [claim for claim in spikes if not _is_burst(claim, bounds)]
    outside = _outside(view, between, [claim for claim in spikes if not _is_irregular(claim.finding)], known, late)
    spikes = [claim for claim in spikes if not _is_part(claim, outside)]
    if any(_is_irregular(claim.finding) for claim in spikes):  # those that remain have their own cost
        outside = _outside(view, between, spikes, known, late)
    claims += spikes
    rare = [claim for claim in spikes if _is_rare(claim)]
    bounds = find_bounds(view, network, rare) if rare else bounds
    trends = find_trends(view, unexplained_steps(view, claims))
    told = _one_cause([*outside, *bounds], trends)
    changes = [claim for claim in told if claim.finding.kind in CHANGES and claim.finding.phase == "other"]
    if changes:  # count the same time in one cost only
        still = {claim.finding.kind for claim in told}
        less = {claim.finding.kind: claim for claim in _outside(view, between, [*spikes, *changes], known, late)}
        first = {claim.finding.kind for claim in outside}
        told = [claim for claim in told if claim.finding.kind not in first]
        told += [claim for kind, claim in less.items() if kind in still]
    claims += told
    return [*_symptoms(view, claims, find_machine(view)), *find_memory(view)]


def _outside(
    view: View, between: list[Claim], spikes: list[Claim], known: Collection[str | None], late: Collection[int]
) -> list[Claim]:
    """Time in no phase, minus what slow steps and pauses in training (``between``) already have in their cost.

    Empty where a host without device times may just be waiting for its device.
    """
    if view.hides_device or not view.enough:
        return []
    told_ns = np.zeros(len(view.steps))
    for claim in spikes:
        if claim.finding.phase == "other":
            told_ns += claim.explained_ns
    stops = [claim for claim in between if claim.finding.phase != "other"]
    if stops:
        in_phases_ns = np.sum(list(stops_of(view).values()), axis=0)
        told_ns += np.maximum(np.sum([claim.explained_ns for claim in stops], axis=0) - in_phases_ns, 0.0)
    again = [] if stops else find_between_steps(view, known, told_ns=told_ns, late=late)
    inside_ns = np.maximum(told_ns - lower_median_rank(view.between_ns), 0.0)
    return [
        *(claim for claim in again if claim.finding.phase == "other"),
        *find_wait_heavy(view, inside_ns, late=late),
    ]


def _one_cause(always: list[Claim], trends: list[Claim]) -> list[Claim]:
    """Merge a bound and a trend that are in one phase and are mostly the same time.

    A phase that takes long because it started to, or grew, is reported as the change, with the line where it was seen.
    If the change alone would not be a warning, the phase counts.
    """
    kept, changed = list(always), list(trends)
    for phase in always:
        for at, trend in enumerate(changed):
            same = phase.finding.phase == trend.finding.phase is not None and not phase.finding.ranks
            both_ns = float(np.minimum(phase.explained_ns, trend.explained_ns).sum())
            if not same or both_ns < thresholds.EXPLAINS_SHARE * float(phase.explained_ns.sum()):
                continue
            if trend.finding.severity == "info" and phase.finding.severity != "info":
                del changed[at]
            else:
                kept.remove(phase)
                changed[at] = _seen_at(trend, phase.finding)
            break
    return [*changed, *kept]


def _seen_at(trend: Claim, phase: Finding) -> Claim:
    """Add the line that the other finding names, and take its severity if it is higher."""
    place, found = phase.evidence.get("place"), trend.finding
    found = replace(found, severity=highest(found.severity, phase.severity))
    if place:
        found = replace(
            found,
            title=f"{found.title[:-1]}, mostly in {place}." if found.kind != "throughput_drop" else found.title,
            evidence={**found.evidence, "place": place},
            advice=(f"Look at {place}: the sampled stacks were there.", *found.advice),
        )
    return replace(trend, finding=found)


def _is_part(claim: Claim, outside: list[Claim]) -> bool:
    """Whether irregular slow steps are part of the time outside all phases anyway."""
    if claim.finding.phase != "other" or not _is_irregular(claim.finding):
        return False
    told_ns = sum((one.explained_ns for one in outside), np.zeros(len(claim.explained_ns)))
    covered_ns = float(np.minimum(claim.explained_ns, told_ns).sum())
    return covered_ns >= thresholds.EXPLAINS_SHARE * float(claim.explained_ns.sum())


def _is_burst(claim: Claim, bounds: list[Claim]) -> bool:
    """Whether the long steps come every few steps in a phase that bounds the job anyway: lagging workers, say."""
    period = claim.finding.evidence.get("period")
    often = isinstance(period, int) and period <= thresholds.BURST_PERIOD
    return often and any(bound.finding.phase == claim.finding.phase for bound in bounds)


def _is_rare(claim: Claim) -> bool:
    """Whether long steps are a warning and rare: then they are not part of a bottleneck as well."""
    return claim.finding.severity != "info" and float((claim.explained_ns > 0).mean()) * thresholds.BURST_PERIOD <= 1


def _symptoms(view: View, claims: list[Claim], machine: list[Claim]) -> list[Claim]:
    """Lower a finding that follows from another one to ``info``.

    A job that waits for something shows as an idle GPU; pipeline stages wait for each other when one of them is slow.
    If other programs take a machine's CPUs, some steps and stretches get longer and the late rank changes, or one rank
    is late for a while.
    """
    uneven = any(claim.finding.severity != "info" and _of_ranks(claim.finding) for claim in claims)
    claims = [_as_info(claim) if uneven and claim.finding.kind == "pipeline_bubble" else claim for claim in claims]
    waited = waited_ns(view) if claims else None
    crowded = any(claim.finding.kind == "cpu_saturated" and claim.finding.severity != "info" for claim in machine)
    crowded = crowded or (waited is not None and _waits(view, waited)) or others_fill(view)
    costly = any(claim.finding.severity != "info" for claim in claims)
    told = [_as_info(claim) if crowded and _of_crowding(view, claim.finding, waited) else claim for claim in claims]
    if waited is not None and not crowded:
        told = [_as_info(claim) if _only_waits(view, claim, waited) else claim for claim in told]
    seen = [_as_info(claim) if costly and claim.finding.kind == "low_gpu_utilization" else claim for claim in machine]
    return [*told, *seen]


def _of_crowding(view: View, finding: Finding, waited: Floats | None) -> bool:
    varying = finding.kind == "imbalance" and finding.evidence.get("by") == "steps"
    uneven = _is_irregular(finding) or varying or finding.kind in UNEVEN
    return uneven or _is_over(view, finding) or _is_disturbed(view, finding, waited)


UNEVEN = ("rotating_straggler", "pipeline_bubble", "drift", "change_point", "throughput_drop", "slow_collective")
"""Kinds that a busy machine causes as well."""
BOTTLENECKS = {
    "input_bound": thresholds.INPUT_SHARE,
    "h2d_bound": thresholds.H2D_SHARE,
    "comm_bound": thresholds.COMM_SHARE,
    "optimizer_bound": thresholds.OPTIMIZER_SHARE,
    "wait_heavy": thresholds.OTHER_SHARE,
    "between_steps": thresholds.BETWEEN_SHARE,
}
"""Where the time goes on all ranks alike, with the share from which on each is reported."""


def _waits(view: View, waited: Floats) -> bool:
    """Whether some rank spends a good part of its work waiting for a processor."""
    shares = waiting_shares(view, waited, slice(None))
    return bool(np.nanmax(shares, initial=0.0) >= thresholds.WAITING_SHARE)


def _is_disturbed(view: View, finding: Finding, waited: Floats | None) -> bool:
    """Whether a bottleneck of all ranks may be no more than their waiting for a processor.

    Nobody knows in which phase they waited.  Where it is not known how long, the fastest steps count, which other
    programs disturbed least.
    """
    least = BOTTLENECKS.get(finding.kind)
    if finding.kind == "between_steps" and finding.phase in STOPS and waited is not None:
        had = 1.0 - min(float(np.nanmean(waited)) / float(np.nanmean(view.work_ns)), thresholds.WAITING_AT_MOST)
        return bool(finding.cost["share"] * had < thresholds.BETWEEN_SHARE)
    if least is None or finding.ranks or finding.phase not in view.phases or finding.phase in STOPS:
        return False
    durations_ns = lower_median_rank(view.between_ns if finding.kind == "between_steps" else view.phase(finding.phase))
    if waited is None:
        fast = view.step_ns <= np.quantile(view.step_ns, thresholds.UNDISTURBED_STEPS)
        return float(durations_ns[fast].sum()) < least * float(view.step_ns[fast].sum())
    return float(durations_ns.mean()) - float(np.nanmean(waited)) < least * float(view.step_ns.mean())


def _only_waits(view: View, claim: Claim, waited: Floats) -> bool:
    """Whether the steps that a change or a stretch makes longer would be as short as the others without waiting."""
    hit = claim.explained_ns > 0
    if claim.finding.kind not in (*UNEVEN, "stall", "jitter") or hit.all() or not hit.any():
        return False
    shares = np.minimum(longest(waited / view.wall_ns), thresholds.WAITING_AT_MOST)
    known = ~np.isnan(shares)
    if not known[hit].any() or not known[~hit].any():
        return False
    inside, outside = float(np.nanmean(shares[hit])), float(np.nanmean(shares[~hit]))
    left_ns = float(view.step_ns[hit].mean()) * (1.0 - inside) / (1.0 - outside) - float(view.step_ns[~hit].mean())
    return left_ns < thresholds.EXPLAINS_SHARE * float(claim.explained_ns[hit].mean())


def _is_over(view: View, finding: Finding) -> bool:
    """Whether a rank computed more slowly for a while and then recovered."""
    slow = finding.kind in ("compute_straggler", "straggler")
    return slow and finding.steps is not None and finding.steps[1] < view.span[1]


def _is_irregular(finding: Finding) -> bool:
    return finding.kind == "jitter" and finding.evidence.get("period") is None


def _of_ranks(finding: Finding) -> bool:
    """Whether it names ranks that the others wait for."""
    return finding.kind.endswith("straggler") or (finding.kind == "imbalance" and bool(finding.ranks))


def _as_info(claim: Claim) -> Claim:
    return replace(claim, finding=as_remark(claim.finding))


# -- live -------------------------------------------------------------------------------------------------------------
# The same rules while a job runs, without flicker: a finding is shown once it persists, and kept until it is gone.
#
# Each look judges one window over the last ``LIVE_STEPS`` steps.  A finding that holds at two looks at least
# ``CONFIRM_STEPS`` apart is shown; it is withdrawn after ``RELEASE_STEPS`` steps in which no look found it.  Its
# severity rises at once and falls only after as many steps.  A crash or a hang is shown at once, and withdrawn as soon
# as it is over.
#
#     watch = ()
#     while running:
#         run = open_run(path)
#         watch, changes = look(run, watch)

AT_ONCE = frozenset(get_args(HangKind))
"""Includes crashes."""
NO_ALARM = frozenset({"healthy", "insufficient_data", "compute_bound"})
"""Kinds for when there is nothing to report."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    finding: Finding
    """As last found, with the severity that is shown."""
    first_step: int
    """Step of the look that first found it."""
    last_step: int
    """Step of the last look that found it."""
    severe_step: int
    """Step of the last look that found it as severe as it is shown."""
    shown: bool


@dataclass(frozen=True, kw_only=True)
class Change:
    what: Literal["shown", "worse", "withdrawn"]
    step: int
    finding: Finding


def live_window(run: RunData) -> Window:
    return build_window(run, last=_steps_back(run))


def look(
    run: RunData, watched: Sequence[Watched] = (), window: Window | None = None
) -> tuple[tuple[Watched, ...], tuple[Change, ...]]:
    """Judge the last steps of a run; return what to watch from now on, and what changed for a viewer.

    ``window``: the result of ``live_window``, for callers that need it too.
    """
    window = live_window(run) if window is None else window
    step = int(window.steps[-1]) if len(window.steps) else 0
    return follow(watched, diagnose(run, window, alive=run.meta.get("end") is None), step)


def _steps_back(run: RunData) -> int:
    """Enough steps to include enough timed ones where the device is timed only now and then."""
    timed = [series.device_steps["step"] for series in run.ranks if len(series.device_steps)]
    if not timed:
        return thresholds.LIVE_STEPS
    reach = max(int(own[-1]) - int(own[-thresholds.LIVE_TIMED_STEPS :][0]) + 1 for own in timed)
    return min(max(reach, thresholds.LIVE_STEPS), thresholds.LIVE_STEPS_AT_MOST)


def follow(
    watched: Sequence[Watched], findings: Sequence[Finding], step: int
) -> tuple[tuple[Watched, ...], tuple[Change, ...]]:
    """The hysteresis alone: compare the findings of a look at ``step`` with those watched so far."""
    held = {_key(finding): finding for finding in findings if finding.kind not in NO_ALARM}
    kept: list[Watched] = []
    changes: list[Change] = []
    for one in watched:
        finding = held.pop(_key(one.finding), None)
        if finding is not None:
            after, change = _found_again(one, finding, step)
            kept.append(after)
            changes += change
        elif step - one.last_step < _release_steps(one):
            kept.append(one)
        elif one.shown:
            changes.append(Change(what="withdrawn", step=step, finding=one.finding))
    for finding in held.values():
        shown = finding.kind in AT_ONCE
        kept.append(Watched(finding=finding, first_step=step, last_step=step, severe_step=step, shown=shown))
        changes += [Change(what="shown", step=step, finding=finding)] if shown else []
    return tuple(kept), tuple(changes)


def _found_again(one: Watched, finding: Finding, step: int) -> tuple[Watched, list[Change]]:
    was, now = SEVERITIES.index(one.finding.severity), SEVERITIES.index(finding.severity)
    severe_step = step if now >= was else one.severe_step
    if now < was and step - one.severe_step < thresholds.RELEASE_STEPS:
        finding = replace(finding, severity=one.finding.severity)
    confirmed = one.shown or step - one.first_step >= thresholds.CONFIRM_STEPS
    after = replace(one, finding=finding, last_step=step, severe_step=severe_step, shown=confirmed)
    if confirmed and not one.shown:
        return after, [Change(what="shown", step=step, finding=finding)]
    return after, [Change(what="worse", step=step, finding=finding)] if one.shown and now > was else []


def _release_steps(one: Watched) -> int:
    if one.finding.kind in AT_ONCE:
        return 0
    return thresholds.RELEASE_STEPS if one.shown else 1


def _key(finding: Finding) -> tuple[str, tuple[int, ...], str | None]:
    return finding.kind, finding.ranks, finding.phase
