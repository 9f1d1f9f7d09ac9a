"""Findings about the loss and all gradients: not numbers (loss_nan, nan_gradients), a jump (loss_spike), an explosion.

They cost no time, but a run that trains on NaN is lost from that step on.  The values are the script's own: what it
gave to ``stepscope.note``, or what its framework logged (``recorder/hooks/notes.py``); what the recorder saw of loss
and gradient norm itself (``recorder/hooks/loss.py``); and samples of the layers, which show where it began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.attempts import attempts_of
from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.diagnosis.rules.layers.gradients import (
    EXPLODING_ADVICE,
    History,
    NonFinite,
    explosion_of,
    find_exploding,
    first_nonfinite,
    first_of_trails,
)
from stepscope.judge import thresholds
from stepscope.judge.statistics import spread
from stepscope.records.finding import SEVERITIES, Finding, Severity
from stepscope.records.series import SEEN_EVENT, RunData, is_learning_rate, is_loss, noted_health, noted_numbers
from stepscope.records.text import named_ranks

__all__ = ["find_loss"]

NAN_ADVICE = (
    "Nothing is learned from there on: stop the job, and resume from a checkpoint before that step.",
    "Repeat the last good steps under torch.autograd.set_detect_anomaly(True), which names the operation.",
    "Usual causes: too high a learning rate, log(0) or a division by 0, a bad sample, fp16 without a GradScaler.",
)
COMPUTED_ADVICE = (
    NAN_ADVICE[0],
    NAN_ADVICE[1],
    "Usual causes: log(0), a division by 0, the gradient of a root at 0, a bad sample, fp16 without a GradScaler.",
)
"""It was computed in forward or backward: the weights were numbers."""
UPDATE_ADVICE = (
    NAN_ADVICE[0],
    "Its gradients were finite: check the learning rate of that step, and the optimizer's eps, betas and weight decay.",
    "Look for other code that changes weights: an average of them, a loaded checkpoint, clamping, weights in fp16.",
    "torch.autograd.set_detect_anomaly would find nothing: no operation of forward or backward made it.",
)
"""It is in the weights, although no gradient was NaN."""
EVALUATION_ADVICE = (
    "Look at the evaluation first: an empty batch, a mean of nothing, or half precision that training scales.",
    "If the training loss follows, stop the job, and resume from a checkpoint before that step.",
)
PASSING_ADVICE = (
    "With fp16 and a GradScaler a few of these are normal: the scaler skips such a step.",
    "Otherwise look at the batches of these steps: an empty one or one without labels makes a mean of nothing.",
)
DROPPED_ADVICE = (
    "Nothing is learned while every step is dropped: stop the job, and resume from a checkpoint before that step.",
    "Repeat a step under torch.autograd.set_detect_anomaly(True), which names the operation.",
)
SPIKE_ADVICE = (
    "Look at the batches of these steps and at what changed there: learning rate, data, sequence length.",
    "If it recurs: a lower learning rate, a longer warm-up, or clip_grad_norm_.",
)
PASSING = "share"
"""In the evidence if numbers came again."""
JUMPS_AT_MOST = 1000
"""Values looked at closely in one curve."""
HELD_OUT = ("eval", "val", "test")
"""Names that contain these are of other data: they come rarely, and jump with what is evaluated."""


@dataclass(frozen=True, kw_only=True)
class _Curve:
    name: str
    rank: int
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    seen: bool
    """Whether the recorder saw it, rather than the script noted it."""

    @property
    def is_loss(self) -> bool:
        return is_loss(self.name)

    @property
    def kind(self) -> str:
        return "loss_nan" if self.is_loss else "nan_gradients"

    @property
    def bad(self) -> NDArray[np.bool_]:
        return ~np.isfinite(self.values)

    @property
    def is_training(self) -> bool:
        """Whether it is of the steps themselves: not of other data, and not the best so far."""
        return not _is_held_out(self) and "best" not in self.name.lower()

    @property
    def bad_at_end(self) -> int:
        """How many of the last values in a row are no numbers."""
        good = np.flatnonzero(~self.bad)
        return len(self.values) - (int(good[-1]) + 1 if len(good) else 0)


def find_loss(run: RunData, view: View, histories: Sequence[History]) -> list[Finding]:
    """At most one ``loss_nan`` or ``nan_gradients``, else at most one ``loss_spike`` or ``exploding_gradients``."""
    curves = _curves(run)
    losses = [curve for curve in curves if curve.is_loss]
    gradients = [curve for curve in curves if not curve.is_loss]
    training = [curve for curve in losses if curve.is_training]
    noted = _not_a_number(training, view) or _not_a_number(gradients, view)
    lasting = [found for found in noted if PASSING not in found.evidence]
    sampled = first_nonfinite(view)
    sampled = _earlier(sampled, _of_trails(losses, sampled, view) if lasting or sampled is not None else None)
    if sampled is not None:
        return [_begun_at(lasting[0], sampled) if lasting else _of_layers(sampled, view)]
    if noted:
        return noted
    exploding = [*find_exploding(view, histories), *_exploding(gradients, view)]
    exploding = [found for found in exploding if not _improves(losses, found)]
    spikes = _spike(_preferred(losses), view)
    staying = [_with_jump(exploding[0], spikes)] if exploding else spikes
    staying = staying or _evaluation_lost(losses, view, trains=bool(training))
    return [_after_rate(found, run) for found in staying]


def _curves(run: RunData) -> list[_Curve]:
    current = {(series.rank, series.identity.pid) for series in attempts_of(run)[-1].series}
    points: defaultdict[tuple[str, int, bool], dict[int, float]] = defaultdict(dict)
    for event in run.events:
        step, rank = event.get("step"), event.get("rank")
        if type(step) is not int or type(rank) is not int or (rank, event.get("pid")) not in current:
            continue
        for name, value in noted_health(event).items():
            points[name, rank, event["event"] == SEEN_EVENT][step] = value
    return [
        _Curve(
            name=name,
            rank=rank,
            steps=np.array(sorted(own)),
            values=np.array([own[step] for step in sorted(own)]),
            seen=seen,
        )
        for (name, rank, seen), own in points.items()
    ]


def _preferred(losses: Sequence[_Curve]) -> list[_Curve]:
    """What the script says about its loss, if it says anything: it knows what belongs together."""
    noted = [curve for curve in losses if not curve.seen and not _is_held_out(curve)]
    return noted or [curve for curve in losses if curve.seen]


# -- loss_nan ---------------------------------------------------------------------------------------------------------


def _not_a_number(curves: Sequence[_Curve], view: View) -> list[Finding]:
    lost = [curve for curve in curves if curve.bad_at_end]
    if lost:
        first = min(lost, key=lambda curve: int(curve.steps[-curve.bad_at_end]))
        return [_lost(first, [curve for curve in curves if curve.name == first.name], view)]
    passing = [curve for curve in curves if curve.bad.any()]
    return [_passing(max(passing, key=lambda curve: int(curve.bad.sum())), view)] if passing else []


def _evaluation_lost(losses: Sequence[_Curve], view: View, *, trains: bool) -> list[Finding]:
    """An evaluation gives no number any more; ``trains``: while the training loss is finite.

    Scripts note NaN or infinity between evaluations and before the first one: that says nothing, so it has to last
    longer than ever before.
    """
    lost = [curve for curve in losses if _is_held_out(curve) and curve.bad_at_end > _longest_gap(curve)]
    if not lost:
        return []
    first = min(lost, key=lambda curve: int(curve.steps[-curve.bad_at_end]))
    found = _lost(first, [curve for curve in losses if curve.name == first.name], view)
    return [replace(found, severity="info" if trains else "warning", advice=EVALUATION_ADVICE)]


def _longest_gap(curve: _Curve) -> int:
    """How many values in a row were no numbers before a number came; without any number, all of them."""
    good = np.flatnonzero(~curve.bad)
    gaps = np.diff(good, prepend=-1) - 1
    return max(int(gaps.max()), thresholds.LOST_NOTES - 1) if len(good) else len(curve.values)


def _lost(curve: _Curve, of_name: Sequence[_Curve], view: View) -> Finding:
    """From some step on no value is a number."""
    since = len(curve.steps) - curve.bad_at_end
    step = int(curve.steps[since])
    good = since - 1
    ranks = tuple(sorted({each.rank for each in of_name if each.bad_at_end}))
    first, spread_at = _first_ranks(curve, of_name)
    everywhere = len(ranks) == len({each.rank for each in of_name}) and not first
    ranks = first or ranks
    who = "" if everywhere else f" of {named_ranks(ranks).lower()}"
    before = ""
    if good >= 0:
        before = f"; it was {_value(float(curve.values[good]))} at step {int(curve.steps[good]):,}"
    when = f"from step {step:,} on" if curve.bad_at_end > 1 else f"at step {step:,}, the last one noted"
    if curve.seen and good >= 0 and curve.bad_at_end > 1 and (known := int(curve.steps[good]) + 1) < step:
        when = f"from a step between {known:,} and {step:,} on"  # not every loss was read
    if first:
        when += f", and that of the others from step {spread_at:,}"
    return _finding(
        curve.kind,
        # The last value alone may be a step that a GradScaler skips.
        "critical" if curve.bad_at_end >= thresholds.LOST_NOTES else "warning",
        f"{_called(curve)}{who} is {_word(curve.values[since])} {when}{before}.",
        curve,
        view,
        ranks=() if everywhere else ranks,
        steps=(step, int(curve.steps[-1])),
        evidence={"first_step": step, "last_good": float(curve.values[good]) if good >= 0 else None},
        advice=NAN_ADVICE,
    )


def _first_ranks(curve: _Curve, of_name: Sequence[_Curve]) -> tuple[tuple[int, ...], int]:
    """The ranks where it began, and the step at which it had reached all: the exchange of gradients spreads it.

    Nothing if it began everywhere at once, did not reach all ranks, or is not known step by step.
    """
    own = [each for each in of_name if each.seen and curve.seen]
    if not all(each.bad_at_end for each in own):
        return (), 0
    begun = {each.rank: int(each.steps[-each.bad_at_end]) for each in own}
    good = {each.rank: int(each.steps[-each.bad_at_end - 1]) for each in own if each.bad_at_end < len(each.steps)}
    step = min(begun.values(), default=0)
    first = tuple(sorted(rank for rank, at in begun.items() if at == step))
    if len(first) == len(begun) or any(good.get(rank, -1) < step for rank in begun if rank not in first):
        return (), 0
    return first, max(begun.values())


def _of_trails(losses: Sequence[_Curve], sampled: NonFinite | None, view: View) -> NonFinite | None:
    """What the norms of the last steps say, of those since the last loss, or else sample, that was a number."""
    known: dict[int, tuple[int, int | None]] = {}
    for curve in losses:
        if curve.seen and curve.bad_at_end:
            good = len(curve.steps) - curve.bad_at_end - 1
            known[curve.rank] = int(curve.steps[good + 1]), int(curve.steps[good]) if good >= 0 else None
    goods = [good for _, good in known.values() if good is not None]
    of_sample = 0 if sampled is None or sampled.good_step is None else sampled.good_step
    return first_of_trails(view, known, since=min(goods, default=of_sample))


def _earlier(sampled: NonFinite | None, noted: NonFinite | None) -> NonFinite | None:
    """Of what samples and kept norms say: the earlier, and at the same step the one that knows the layer."""
    if sampled is None or noted is None or sampled.dropped:
        return noted if sampled is None else sampled
    sure = sampled.exact and sampled.layer is not None and sampled.step <= noted.step
    return sampled if sure else noted


def _begun_at(found: Finding, sampled: NonFinite) -> Finding:
    """Add where it began, according to the layers, unless they show it only after the loss did."""
    if not sampled.dropped and sampled.step > int(found.evidence["first_step"]):
        sampled = replace(sampled, layer=None, where=None, ranks=())
    first = f"; first {sampled.origin}, {sampled.when}" if sampled.origin else _update(sampled)
    severity = found.severity if sampled.dropped else "critical"
    return replace(
        found,
        severity=max(found.severity, severity, key=SEVERITIES.index),
        title=f"{found.title[:-1]}{first}.",
        ranks=sampled.ranks or found.ranks,
        evidence={**found.evidence, **sampled.evidence},
        advice=_advice(sampled),
    )


def _update(sampled: NonFinite) -> str:
    if sampled.where != "update":
        return ""
    return f"; the update of step {sampled.step:,} made the weights {sampled.word}, its gradients were finite"


def _of_layers(sampled: NonFinite, view: View) -> Finding:
    first = f", first {sampled.origin}" if sampled.origin else ""
    if sampled.where == "update":
        title = f"The update of step {sampled.step:,} made the weights {sampled.word}, its gradients were finite."
    elif sampled.dropped:
        title = (
            f"No update was applied in the last {sampled.dropped} sampled steps, from step {sampled.step:,} on: "
            f"gradients are {sampled.word}{first}."
        )
    else:
        title = f"Gradients and weights became {sampled.word} {sampled.when}{first}."
    return Finding(
        kind="nan_gradients",
        severity="warning" if sampled.dropped else "critical",
        title=title,
        ranks=sampled.ranks,
        steps=(sampled.step, sampled.last_step),
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={"first_step": sampled.step, **sampled.evidence},
        advice=_advice(sampled),
    )


def _advice(sampled: NonFinite) -> tuple[str, ...]:
    """NaN that was computed needs another remedy than NaN that the update put into the weights."""
    if sampled.where == "update":
        return UPDATE_ADVICE
    advice = DROPPED_ADVICE if sampled.dropped else NAN_ADVICE if sampled.where is None else COMPUTED_ADVICE
    return advice[0], _look_at(sampled), *advice[1:]


def _look_at(sampled: NonFinite) -> str:
    if sampled.layer is None or sampled.narrowed:
        return "With --layers every from that checkpoint on, the samples show the layer."
    if sampled.where == "forward":
        return f"The inputs of {sampled.layer} were finite: look at what it computes, what uses it, and the batch."
    return f"The gradient was bad when it reached {sampled.layer}: look at what forward() does with its output."


def _passing(curve: _Curve, view: View) -> Finding:
    """Numbers come again after it."""
    at = curve.steps[curve.bad]
    share = len(at) / len(curve.steps)
    often = f"{len(at):,} of {len(curve.steps):,} noted values" if len(at) > 1 else "one noted value"
    return _finding(
        curve.kind,
        "warning" if share >= thresholds.PASSING_NAN_SHARE and len(at) > 1 else "info",
        f"{_called(curve)} was {_word(curve.values[curve.bad][0])} in {often}, first at step {int(at[0]):,}; "
        "the values after it are numbers.",
        curve,
        view,
        steps=(int(at[0]), int(at[-1])),
        evidence={"first_step": int(at[0]), PASSING: round(share, 4)},
        advice=PASSING_ADVICE,
    )


def _word(value: float) -> str:
    return "NaN" if np.isnan(value) else "infinite"


# -- loss_spike -------------------------------------------------------------------------------------------------------


def _spike(curves: Sequence[_Curve], view: View) -> list[Finding]:
    """A jump from which the loss has not come back; others are left to the chart."""
    found = []
    for curve in curves:
        if _is_held_out(curve) or not np.isfinite(curve.values).all():
            continue
        at = _jump(curve.values)
        if at is not None:
            found.append((int(curve.steps[at]), curve, at))
    if not found:
        return []
    step, curve, at = min(found, key=lambda each: each[0])
    before = float(np.median(curve.values[at - thresholds.SPIKE_BEFORE : at]))
    after = float(np.median(curve.values[at:]))
    return [
        _finding(
            "loss_spike",
            # From backward alone it is not known whether it is still the same loss: a second stage has another one.
            "info" if curve.seen else "warning",
            f"{_called(curve)} jumped from {_value(before)} to {_value(after)} at step {step:,} and has "
            f"not come back in {int(curve.steps[-1]) - step:,} steps.",
            curve,
            view,
            steps=(step, int(curve.steps[-1])),
            evidence={"first_step": step, "before": before, "after": after},
            advice=SPIKE_ADVICE,
        )
    ]


def _is_held_out(curve: _Curve) -> bool:
    return any(word in curve.name.lower() for word in HELD_OUT)


def _jump(values: NDArray[np.float64]) -> int | None:
    """The first value after which all are far above what was usual before; None: there is no such value."""
    needed, later = thresholds.SPIKE_BEFORE, thresholds.SPIKE_AFTER
    if len(values) < needed + later:
        return None
    least = np.minimum.accumulate(values[::-1])[::-1]  # [N]; the lowest from there on
    windows = np.lib.stride_tricks.sliding_window_view(values[:-later], needed)
    above = np.flatnonzero(least[needed : needed + len(windows)] > windows.max(axis=1)) + needed
    for at in above[:JUMPS_AT_MOST]:
        before = values[at - needed : at]
        typical = float(np.median(before))
        far = typical + max(thresholds.LOSS_JUMP_SPREADS * spread(before), thresholds.LOSS_JUMP_SHARE * abs(typical))
        if least[at] > far:
            return int(at)
    return None


# -- exploding_gradients ----------------------------------------------------------------------------------------------


def _exploding(curves: Sequence[_Curve], view: View) -> list[Finding]:
    """The same for norms of every step, before they are clipped."""
    found = []
    for curve in curves:
        if not np.isfinite(curve.values).all():
            continue
        thin = max(1, len(curve.steps) // thresholds.EXPLODING_VALUES)
        explosion = explosion_of(
            curve.values[::thin],
            curve.steps[::thin],
            thresholds.EXPLODING_TIMES,
            least_before=thresholds.SPIKE_BEFORE,
            least_after=thresholds.SPIKE_AFTER,
        )
        if explosion is not None:
            found.append((int(curve.steps[explosion.at * thin]), curve, explosion))
    if not found:
        return []
    step, curve, explosion = min(found, key=lambda each: each[0])
    return [
        _finding(
            "exploding_gradients",
            "warning",
            f"{_called(curve)} is {explosion.title} from step {step:,} on.",
            curve,
            view,
            steps=(step, int(curve.steps[-1])),
            evidence={"layer": None, "first_step": step, **explosion.evidence},
            advice=EXPLODING_ADVICE,
        )
    ]


def _improves(losses: Sequence[_Curve], exploding: Finding) -> bool:
    """Whether the loss is no higher since the gradients became large: then that does no harm."""
    step = int(exploding.evidence["first_step"])
    known = []
    for curve in losses:
        before, after = curve.values[curve.steps < step], curve.values[curve.steps >= step]
        if min(len(before), len(after)) >= thresholds.LOST_NOTES and not _is_held_out(curve):
            known.append(float(np.median(after)) <= float(np.median(before)))
    return bool(known) and all(known)


def _with_jump(exploding: Finding, spikes: Sequence[Finding]) -> Finding:
    """One cause: the loss jumps because of the gradients."""
    if not spikes:
        return exploding
    jump = {key: spikes[0].evidence[key] for key in ("name", "before", "after")}
    step = int(spikes[0].evidence["first_step"])
    return replace(
        exploding,
        title=f"{exploding.title[:-1]}; the loss jumped from {_value(jump['before'])} to {_value(jump['after'])} "
        f"at step {step:,}.",
        evidence={**exploding.evidence, "loss": {**jump, "first_step": step}},
    )


def _after_rate(found: Finding, run: RunData) -> Finding:
    """The same, with a learning rate that rose shortly before it."""
    rose = _risen_rate(run, int(found.evidence["first_step"]))
    if rose is None:
        return found
    before, after, at = rose
    because = f"the learning rate rose from {_value(before)} to {_value(after)} at step {at:,}"
    return replace(
        found,
        title=f"{found.title[:-1]}; {because}.",
        evidence={**found.evidence, "learning_rate": {"before": before, "after": after, "step": at}},
        advice=("Check the learning rate's schedule first: it rose just before.", *found.advice)[:3],
    )


def _risen_rate(run: RunData, step: int) -> tuple[float, float, int] | None:
    """Before, after and the step, if a rate rose for good: two optimizers that take turns have two rates."""
    current = {series.identity.pid for series in attempts_of(run)[-1].series}
    curves: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for event in run.events:
        at, pid = event.get("step"), event.get("pid")
        if type(at) is int and step - thresholds.RATE_STEPS <= at <= step and pid in current:
            for name, value in noted_numbers(event).items():
                if is_learning_rate(name):
                    curves[name, pid][at] = value
    for rates in curves.values():
        steps = sorted(rates)
        for place, at in enumerate(steps[1:], start=1):
            most = max(rates[step] for step in steps[:place])
            if 0 < thresholds.RATE_ROSE * most <= min(rates[step] for step in steps[place:]):
                return rates[steps[place - 1]], rates[at], at
    return None


# -- words ------------------------------------------------------------------------------------------------------------


def _value(value: float) -> str:
    return f"{value:.4g}"


def _called(curve: _Curve) -> str:
    what = "The loss" if curve.is_loss else "The gradient norm"
    return what if curve.name in ("loss", "grad_norm") else f"{what} {curve.name!r}"


def _finding(
    kind: str,
    severity: Severity,
    title: str,
    curve: _Curve,
    view: View,
    *,
    ranks: tuple[int, ...] = (),
    steps: tuple[int, int],
    evidence: dict[str, float | int | None],
    advice: tuple[str, ...],
) -> Finding:
    return Finding(
        kind=kind,
        severity=severity,
        title=title,
        ranks=ranks,
        steps=steps,
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={"name": curve.name, "noted_by": curve.rank, "notes": len(curve.steps), **evidence},
        advice=advice,
        confidence={"loss_spike": 0.8, "exploding_gradients": 0.85}.get(kind, 1.0),
    )
