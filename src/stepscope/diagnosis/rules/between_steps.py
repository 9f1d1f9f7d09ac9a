"""Time that is neither model nor data: ``between_steps`` and ``wait_heavy``.

``between_steps`` is what pauses training from one step to the next: checkpoints, evaluation, logging, and the phases
that users name.  It is named by the phase, or by the line of code that the ranks' stacks show.  ``wait_heavy`` is the
part of ``other`` inside a step, which no hook and no name explains.

What only one rank does between its steps is ``between_steps`` too, with that rank (``rules/stragglers.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.code_location import CHECKPOINT, EVALUATION, seen_at
from stepscope.diagnosis.engine.settings import frameworks_of, phase_advice
from stepscope.diagnosis.engine.view import (
    View,
    cost_of,
    is_even,
    lower_median_rank,
    ordinary_steps,
    steps_having,
    stretches_with,
    time_share_of,
    where_stopped,
)
from stepscope.judge import thresholds
from stepscope.judge.chain import Claim
from stepscope.judge.statistics import longest
from stepscope.records.finding import Finding, Severity
from stepscope.records.steps import BUILTIN_PHASES, COMM_HOOK_PHASE, FLAG_SAMPLED, GRAPH_PHASE
from stepscope.records.text import count_text, ms_text, share_text

__all__ = ["STOPS", "STOPS_ADVICE", "find_outside", "find_pauses"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

STOPS = {"eval": "evaluation", "checkpoint": "checkpointing"}
"""Phases that pause training, on whichever rank they run, in words."""
STOPS_SEEN = {"eval": EVALUATION, "checkpoint": CHECKPOINT}
"""The words for a code location that is part of them."""
STOPS_ADVICE = {
    "eval": "Evaluate less often, on fewer or larger batches (it needs no memory for gradients under "
    "torch.inference_mode()), or in a separate job on the saved checkpoints.",
    "checkpoint": "Save less often, or in the background: torch.distributed.checkpoint.async_save copies once.",
}
INFERENCE = "inference without gradients"
"""What ``eval`` is where nearly every step has it: a teacher, a reference or reward model, a frozen encoder."""
INFERENCE_ADVICE = (
    "A teacher, a reference or a frozen model: compute its outputs once and save them, or make it faster "
    "(a larger batch, bfloat16, torch.compile, torch.inference_mode()). For an evaluation: run it less often."
)
AROUND = "around"
"""Key for everything else that steps with a pause do, among parts identified by name."""
OTHERS_NAMED = 2
"""Parts besides the largest that a title names; more are counted."""
SCHEDULE_ADVICE = "Mostly the schedule itself, which splits the batch, sends and receives: fewer, larger microbatches."
SAME_BYTES = "Save from one rank, or a shard from each, but not the same bytes from every rank."


def stops_of(view: View) -> dict[str, Floats]:
    """[S] by phase; how much longer each step is because of evaluation, checkpoints and the user's own phases."""
    own = (*BUILTIN_PHASES, GRAPH_PHASE, COMM_HOOK_PHASE)
    names = [name for name in view.phases if name in STOPS or name not in own]
    # A phase in every step is a part of the step like any other, and takes what the median rank has of it.
    return {
        name: lower_median_rank(view.phase(name))
        if _in_every_step(view, name)
        else where_stopped(view, view.phase(name))
        for name in names
    }


def _in_every_step(view: View, name: str) -> bool:
    return float((lower_median_rank(view.phase(name)) > 0).mean()) > thresholds.BOTTLENECK_SHARE


def find_pauses(view: View, known: Collection[str | None]) -> list[Claim]:
    """What pauses training and is known by name.  ``known``: phases in which a rank is already known to be late."""
    claim = _between_steps(view, known, np.zeros(len(view.steps)), ())
    return [] if claim is None or claim.finding.phase == "other" else [claim]


def find_outside(
    view: View, known: Collection[str | None], *, pauses: Sequence[Claim], explained_ns: Floats, late: Collection[int]
) -> list[Claim]:
    """Time in no phase, between steps and inside them: known only by its place in the step.

    ``pauses``: the claims of ``find_pauses``.  ``explained_ns`` [S]: what other findings already report of ``other``.
    ``late``: ranks that are late in ``other``.
    """
    if pauses:  # they include what else is done in these steps, and have the time between steps in their cost
        in_phases_ns = np.sum(list(stops_of(view).values()), axis=0)
        paused_ns = np.sum([claim.explained_ns for claim in pauses], axis=0)
        explained_ns = explained_ns + np.maximum(paused_ns - in_phases_ns, 0.0)

    def between(taken_ns: Floats) -> Claim | None:
        claim = _between_steps(view, known, explained_ns + taken_ns, late)
        return claim if claim is not None and claim.finding.phase == "other" else None

    def inside(taken_ns: Floats) -> Claim | None:
        between_ns = lower_median_rank(view.between_ns)
        return _wait_heavy(view, np.maximum(explained_ns + taken_ns - between_ns, 0.0), late)

    nothing_ns = np.zeros(len(view.steps))
    counts = [inside] if pauses else [between, inside]
    return [replace(claim, recount=count) for count in counts if (claim := count(nothing_ns)) is not None]


def _between_steps(
    view: View, known: Collection[str | None], explained_ns: Floats, late: Collection[int]
) -> Claim | None:
    """One finding, named by the largest part."""
    parts = {name: took for name, took in stops_of(view).items() if name not in known}
    between_ns = _between(view)
    if between_ns is not None:
        parts["other"] = np.maximum(between_ns - explained_ns, 0.0)
    counted = {name: took for name, took in parts.items() if _counts(view, name, took)}
    around_ns = _around(view, counted)
    if around_ns is not None:
        counted[AROUND] = around_ns
    saved_ns = np.minimum(np.sum(list(counted.values()), axis=0), view.step_ns) if counted else None
    if saved_ns is None or float(saved_ns.sum()) < thresholds.BETWEEN_SHARE * float(view.step_ns.sum()):
        return None
    ordered = sorted(counted, key=lambda name: (name != AROUND, float(counted[name].sum())), reverse=True)
    largest = ordered[0]
    if largest == "other":
        place = seen_at(view, besides=late, between=True)
    else:
        place = seen_at(view, _alone(view, largest), phase=largest)
    cost = cost_of(view, saved_ns)
    finding = Finding(
        kind="between_steps",
        severity="info" if _is_wanted(view, largest, cost["share"], place) else _severity(cost["share"]),
        title=f"{_title(view, largest, counted[largest], place)}{_with(view, counted, ordered, cost['share'])}.",
        ranks=_alone(view, largest),
        phase=largest,
        steps=view.span,
        cost=cost,
        evidence=_evidence(view, counted, place),
        advice=_advice_on(view, counted, ordered, place),
        confidence=0.95 if place or largest != "other" else 0.85,
    )
    return Claim(finding=finding, explained_ns=saved_ns)


def _around(view: View, counted: Mapping[str, Floats]) -> Floats | None:
    """[S]; what else makes steps with a pause longer: a framework does more for an evaluation than call the model.

    Only what most of these steps have, in no phase: a single slow one among them is unrelated.  And not if it is more
    than the pauses, which are then a side effect of it, unless the ranks' stacks show that it is part of them.
    """
    names = [name for name in counted if name != "other" and not _in_every_step(view, name)]
    if not names or view.hides_device:
        return None
    stops_ns = np.nan_to_num(np.sum([view.phase(name) for name in names], axis=0))
    other_ns = np.nan_to_num(view.phase("other"))
    around_ns = np.zeros_like(other_ns)
    for rank, stops in enumerate(stops_ns):
        hit = stops > 0
        if hit.any() and not hit.all():
            more = np.maximum(other_ns[rank, hit] - np.median(other_ns[rank, ~hit]), 0.0)
            around_ns[rank, hit] = np.minimum(more, 2 * np.median(more))
    plain = ~(stops_ns > 0).any(axis=0)
    if not plain.any() or not (_is_less(around_ns, stops_ns) or _seen_stopping(view, names, ~plain)):
        return None
    longer = where_stopped(view, stops_ns + around_ns) - where_stopped(view, stops_ns)
    left = view.step_ns - np.median(view.step_ns[plain]) - np.sum(list(counted.values()), axis=0)
    longer = np.clip(np.minimum(longer - counted.get("other", 0.0), left), 0.0, None)
    return longer if float(longer.sum()) > 0 else None


def _is_less(around_ns: Floats, stops_ns: Floats) -> bool:
    return float(around_ns.sum()) <= float(stops_ns.sum())


def _seen_stopping(view: View, names: Collection[str], hit: NDArray[np.bool_]) -> bool:
    """Whether the ranks' stacks in these steps show that it is part of the pause."""
    place = seen_at(view, steps={int(step) for step in view.steps[hit]})
    return any(place.startswith(f"{STOPS_SEEN[name]}:") for name in names if name in STOPS_SEEN)


def _alone(view: View, name: str) -> tuple[int, ...]:
    """The rank that does it while its peers, which do little of it, wait; empty if several do."""
    if name == "other" or len(view.ranks) < 2:
        return ()
    sums = np.nansum(view.phase(name), axis=1)
    most = int(np.argmax(sums))
    second = float(np.delete(sums, most).max())
    return (view.ranks[most],) if second <= thresholds.ALONE_SHARE * sums[most] else ()


def _between(view: View) -> Floats | None:
    """[S]; time between steps that is in no phase; on a device only as far as the device was idle."""
    between_ns = view.between_ns
    if view.clock == "device":
        between_ns = np.minimum(between_ns, view.phase("other"))
    used, _ = ordinary_steps(view)
    part = time_share_of(view, between_ns, used)
    if part.mean_ns < thresholds.OTHER_FLOOR_NS:
        return None
    return np.where(used, lower_median_rank(between_ns), 0.0)


def _counts(view: View, name: str, took: Floats) -> bool:
    if name == "other":
        return stretches_with(took, view.step_ns, thresholds.BETWEEN_SHARE) >= thresholds.BOTTLENECK_SHARE
    if name == "eval" and _share(view, took) >= thresholds.BETWEEN_SHARE:
        return True  # one at the end of an epoch may take a third of the run
    return int((took > 0).sum()) >= thresholds.STOPS_AT_LEAST


def _severity(share: float) -> Severity:
    return "critical" if share >= thresholds.BETWEEN_CRITICAL_SHARE else "warning"


def _is_wanted(view: View, name: str, share: float, place: str) -> bool:
    """Whether it is part of the job: inference in every step, a forward called directly, a usual evaluation."""
    usual = name == "eval" and share < thresholds.EVALUATION_SHARE
    return usual or _infers_always(view, name) or (name == "other" and _calls_forward(place))


def _infers_always(view: View, name: str) -> bool:
    """Whether models called without gradients are part of nearly every step, and so of training itself."""
    return name == "eval" and bool((longest(view.phase(name)) > 0).mean() > thresholds.BOTTLENECK_SHARE)


def _words(view: View, name: str) -> str:
    return INFERENCE if _infers_always(view, name) else STOPS.get(name, f"the phase {name!r}")


def _share(view: View, took: Floats) -> float:
    return float(cost_of(view, took)["share"])


def _title(view: View, name: str, took: Floats, place: str) -> str:
    """The title for one part, without its full stop."""
    share = share_text(_share(view, took))
    where = f", mostly in {place}" if place else ""
    if name == "other" and _calls_forward(place):
        return (
            f"{share} of the training time is the model's forward, called directly: {_each(took, 'each time')}{where}"
        )
    if name == "other":
        return f"{share} of the training time passes between steps: {_each(took, 'each time')}{where}"
    what = _words(view, name)
    raw_ns = longest(view.phase(name))
    hit = raw_ns > 0
    alone = _alone(view, name)
    who = f" on rank {alone[0]}" if alone else ""
    if hit.mean() <= thresholds.BOTTLENECK_SHARE:
        often = _in_some_steps(raw_ns, hit)
    else:
        often = f"{ms_text(float(raw_ns[hit].mean()) / 1e6)} of every step"
    return f"{share} of the training time is {what}{who}: {often}{where}"


def _each(took: Floats, every: str) -> str:
    """``4.2 ms of every step``, or if most steps have hardly any of it ``17 ms each in 99 of 397 steps``."""
    there = took > 0
    if there.mean() > thresholds.BOTTLENECK_SHARE and is_even(took[there]):
        return f"{ms_text(float(took[there].mean()) / 1e6)} {every}"
    return _in_some_steps(took, steps_having(took))


def _in_some_steps(took: Floats, hit: Bools) -> str:
    """The mean of the steps that have it, and how many do."""
    each = " each" if hit.sum() > 1 else ""
    return f"{ms_text(float(took[hit].mean()) / 1e6)}{each} in {int(hit.sum()):,} of {count_text(len(took), 'step')}"


def _with(view: View, parts: Mapping[str, Floats], ordered: Sequence[str], share: float) -> str:
    """What the cost includes besides the largest part; empty if it does not change the figure."""
    if share_text(share) == share_text(_share(view, parts[ordered[0]])):
        return ""
    rest = [name for name in ordered[1:] if name != AROUND or "other" not in ordered]
    if len(rest) > OTHERS_NAMED:
        what = f"{len(rest)} others"
    else:
        named = {name: _words(view, name) for name in STOPS}
        words = {"other": "the time between steps outside all phases", AROUND: "what else these steps do", **named}
        what = " and ".join(words.get(name, repr(name)) for name in rest)
    return f"; with {what} it is {share_text(share)}"


def _evidence(view: View, parts: Mapping[str, Floats], place: str) -> dict[str, Any]:
    total_ns = float(view.step_ns.sum()) or 1.0
    return {
        "clock": view.clock,
        "shares": {name: round(float(took.sum()) / total_ns, 4) for name, took in parts.items()},
        "steps_with": {name: int((took > 0).sum()) for name, took in parts.items()},
        "place": place or None,
        "step_ms": round(view.median_step_ns / 1e6, 3),
        "steps_used": len(view.steps),
    }


def _advice_on(view: View, parts: Mapping[str, Floats], ordered: Sequence[str], place: str) -> tuple[str, ...]:
    """Advice on the largest part, and on the others that would be worth a warning on their own."""
    costly = [name for name in ordered[1:] if _share(view, parts[name]) >= thresholds.WARNING_SHARE]
    worth = [name for name in costly if name != AROUND]
    lines = [
        (INFERENCE_ADVICE,) if _infers_always(view, name) else _advice(view, name, place)
        for name in (ordered[0], *worth)
    ]
    return tuple(dict.fromkeys(line for several in lines for line in several))


def _advice(view: View, name: str, place: str) -> tuple[str, ...]:
    by_all = len(view.ranks) > 1 and not _alone(view, name)
    if name in STOPS_ADVICE:
        return (STOPS_ADVICE[name], *([SAME_BYTES] if name == "checkpoint" and by_all else []))
    if name != "other":
        return (f"Do {name!r} less often, in a background thread, or during the next step's computation.",)
    first = phase_advice(frameworks_of(view.facts), "what comes after optimizer.step()")
    if _calls_forward(place):
        return (FORWARD_ADVICE,)
    if place:
        first = f"Look at {place}: the sampled stacks were there."
    return first, "Usual causes: logging and printing every step, .item(), metrics, plots, writing files, gc.collect()."


FORWARD_ADVICE = (
    "Call the model, model(x), not model.forward(x): forward hooks do not run otherwise, and the time is not booked as "
    "forward."
)


def _calls_forward(place: str) -> bool:
    """Whether the stacks show the ``forward`` of a module, which the script calls itself."""
    return place.partition(",")[0].endswith(".forward")


def _wait_heavy(view: View, explained_ns: Floats, late: Collection[int]) -> Claim | None:
    if ((view.flags & FLAG_SAMPLED) > 0).any(axis=0).all():
        return None  # layers are sampled in every step: most of this time is ours
    if "other" not in view.phases:
        return None
    inside_ns = np.maximum(np.maximum(view.phase("other") - view.between_ns, 0.0) - explained_ns, 0.0)
    used, _ = ordinary_steps(view)
    part = time_share_of(view, inside_ns, used)
    shared_ns = np.where(used, lower_median_rank(inside_ns), 0.0)
    if part.share < thresholds.OTHER_SHARE or part.mean_ns < thresholds.OTHER_FLOOR_NS:
        return None
    if stretches_with(shared_ns, view.step_ns, thresholds.OTHER_SHARE) < thresholds.BOTTLENECK_SHARE:
        return None
    cost = cost_of(view, shared_ns)
    place = seen_at(view, besides=late, between=False)
    where = f", mostly in {place}" if place else ""
    # A pipeline's schedule splits the batch, sends, receives and waits in Python, below the line that calls it.
    schedule = view.window.stages and cost["share"] < thresholds.BETWEEN_CRITICAL_SHARE
    finding = Finding(
        kind="wait_heavy",
        severity="info" if schedule or _calls_forward(place) else _severity(cost["share"]),
        title=(
            f"{share_text(cost['share'])} of the training time lies inside the step but outside all phases: "
            f"{_each(shared_ns[used], 'of every step')}{where}."
        ),
        phase="other",
        steps=view.span,
        cost=cost,
        evidence={
            "clock": view.clock,
            "inside_share": round(part.share, 4),
            "inside_ms_per_step": round(part.mean_ns / 1e6, 3),
            "place": place or None,
            "longest_ms": round(float(longest(inside_ns).max()) / 1e6, 3),
            "step_ms": round(view.median_step_ns / 1e6, 3),
            "steps_used": int(used.sum()),
        },
        advice=(SCHEDULE_ADVICE if schedule else FORWARD_ADVICE,)
        if schedule or _calls_forward(place)
        else (
            f"Look at {place}." if place else phase_advice(frameworks_of(view.facts), "the step"),
            "Usual causes: clipping, norms with .item(), torch.cuda.synchronize(), copies to numpy, a lock, a barrier.",
        ),
        confidence=0.9,
    )
    return Claim(finding=finding, explained_ns=shared_ns)
