"""Findings about the gradients of single layers: where they stop being numbers, explode, vanish, or are missing.

``nan_gradients`` comes together with the loss (``rules/loss.py``): one cause, one finding.  Everything here works on
samples of a few steps, so a step is known exactly only if it was sampled, and so was the one before.

What healthy runs do, and must not be accused of:

- Masks are infinite on purpose, and a gradient scaler, or the script, drops a step whose gradients are not finite.
  Only weights that are no longer numbers, or steps that are all dropped, are a fault.
- In a run of which every hundredth step is sampled, a part that is trained in other steps only (a GAN's other half, a
  second task) never shows a gradient.  So a layer without gradients must also have weights that do not learn.
- Layers behind one that begins at zero (LoRA, gates) have no gradient in the first steps; experts are idle at times.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.diagnosis.rules.layers.replicas import is_expert
from stepscope.judge import thresholds
from stepscope.records.finding import Finding
from stepscope.records.layers import LayerRecords, LayerSample, ModelTree
from stepscope.records.text import count_text, named_ranks

__all__ = [
    "EXPLODING_ADVICE",
    "History",
    "NonFinite",
    "explosion_of",
    "find_exploding",
    "find_silent",
    "first_nonfinite",
    "first_of_trails",
    "histories_of",
]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LISTED = 16
"""Layers in the evidence."""


# -- no longer numbers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Where and when values stopped being numbers."""

    step: int
    """The first sampled step that shows it."""
    last_step: int
    good_step: int | None
    """The last sampled step before with nothing but numbers."""
    exact: bool
    """Whether it began in ``step`` itself; else in a step since ``good_step``."""
    layer: str | None
    """None: it is not known where it began, because the weights may have been NaN before the sampled step.  A block, or
    ``blocks.3.up to blocks.4.norm``, if few gradients were looked at (``narrowed``)."""
    narrowed: bool = False
    where: Literal["forward", "backward", "update"] | None
    """``update``: gradients were finite, and the weights after the optimizer's step were not."""
    ranks: tuple[int, ...]
    """Where it began; empty: on all alike, or not known."""
    word: str
    """``NaN`` or ``infinite``."""
    dropped: int
    """Steps in a row whose update was not applied, if that is all that is wrong; else 0: the weights are lost."""

    @property
    def origin(self) -> str:
        """``in layers.3.mlp on rank 1, in backward``; empty if it is not known."""
        if self.where == "update" or (self.layer is None and self.where is None):
            return ""
        layer = f"in {self.layer}" if self.layer is not None else ""
        on = f"on {named_ranks(self.ranks).lower()}" if self.ranks else ""
        place = " ".join(filter(None, (layer, on)))
        return ", ".join(filter(None, (place, f"in {self.where}" if self.where else "")))

    @property
    def when(self) -> str:
        if self.exact:
            return f"at step {self.step:,}"
        if self.good_step is None:
            return f"at step {self.step:,} or before"
        return f"between steps {self.good_step:,} and {self.step:,}"

    @property
    def evidence(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "layer_step": self.step,
            "layer_good_step": self.good_step,
            "layer_exact": self.exact,
            "began_in": self.where,
        }


def first_nonfinite(view: View) -> NonFinite | None:
    """The place where gradients and weights stopped being numbers; None: they are numbers, or were again later."""
    layers = view.window.layers
    found = []
    for model, by_step in _by_model(layers.samples).items():
        first = _Lost(layers.models[model], by_step, several=_several(layers)).find()
        if first is not None:
            found.append(first)
    # One that lost its weights explains the others; of two halves of a pipeline the one that knows the place does.
    return min(found, key=lambda first: (bool(first.dropped), first.step, first.layer is None), default=None)


def _by_model(samples: Sequence[LayerSample]) -> dict[str, dict[int, list[LayerSample]]]:
    """Model → step → samples, one of each rank, in order."""
    found: dict[str, dict[int, dict[int, LayerSample]]] = {}
    for sample in samples:
        found.setdefault(sample.model, {}).setdefault(sample.step, {})[sample.rank] = sample
    return {
        model: {step: [by_rank[rank] for rank in sorted(by_rank)] for step, by_rank in sorted(by_step.items())}
        for model, by_step in found.items()
    }


def _several(layers: LayerRecords) -> bool:
    """Whether several kinds of models were sampled, so that a layer's name alone is not enough."""
    return len({layers.models[model].modules[0].type for model in {sample.model for sample in layers.samples}}) > 1


def _label(model: ModelTree, at: int, *, several: bool) -> str:
    of = f" of {model.modules[0].type}" if several and model.modules[at].name else ""
    return f"{model.label(at)}{of}"


Span = tuple[int, int]
"""The first and the last module that it may be."""
LISTS = ("ModuleList", "ModuleDict", "Sequential")


def _span_label(model: ModelTree, span: Span, *, several: bool) -> str:
    """One module, the block that has all of them, or the first and the last."""
    first, last = span
    common = next(at for at in _and_above(model, first) if at in set(_and_above(model, last)))
    if common > 0 and model.modules[common].type not in LISTS:
        return _label(model, common, several=several)
    return f"{model.label(first)} to {_label(model, last, several=several)}"


def _and_above(model: ModelTree, at: int) -> Iterator[int]:
    """A module, the one that contains it, and so on."""
    while at >= 0:
        yield at
        at = model.modules[at].parent


class _Lost:
    """Searches the samples of one model."""

    def __init__(self, model: ModelTree, by_step: Mapping[int, Sequence[LayerSample]], *, several: bool) -> None:
        self.model = model
        self.by_step = by_step
        self.steps = list(by_step)
        self.several = several

    def find(self) -> NonFinite | None:
        begin, lost = len(self.steps), None
        while begin and (state := _state(self.by_step[self.steps[begin - 1]])) != "good":
            begin -= 1
            lost = begin if state == "lost" else lost
        if begin == len(self.steps):
            return None
        if lost is None:
            count, span = len(self.steps) - begin, self.steps[-1] - self.steps[begin]
            many = count >= thresholds.SKIPPED_SAMPLES and span >= thresholds.SKIPPED_STEPS
            return self._from(begin, dropped=count) if many else None
        # Weights may have been looked at before the update that spoiled them; a scaler's skipped steps are normal.
        while lost > begin and not any(sample.skipped for sample in self.by_step[self.steps[lost - 1]]):
            lost -= 1
        return self._from(lost, dropped=0)

    def _from(self, at: int, *, dropped: int) -> NonFinite:
        step = self.steps[at]
        samples = self.by_step[step]
        good = self.steps[at - 1] if at else None
        where: Literal["forward", "backward", "update"] | None
        place, where, ranks = self._local(samples) or self._of_gradients(samples) or (None, None, ())
        next_to = good is not None and good + 1 == step
        # Steps that are not applied leave the weights as they are, so every such step shows where it begins.
        sure = next_to or bool(dropped) or (place is not None and self._begins_here(at, place, where, ranks))
        exact = next_to or (sure and not dropped)
        if place is None and all(_has_numbers(sample.grad_norm) for sample in samples):
            where, sure, exact = "update", True, True
        norms = [norm for sample in samples for norm in (*sample.grad_norm, *sample.weight_norm) if norm is not None]
        return NonFinite(
            step=step,
            last_step=self.steps[-1],
            good_step=good,
            exact=exact,
            layer=_label(self.model, place, several=self.several) if sure and place is not None else None,
            where=where if sure else None,
            ranks=ranks if sure else (),
            word="NaN" if any(map(math.isnan, norms)) else "infinite",
            dropped=dropped,
        )

    def _local(
        self, samples: Sequence[LayerSample]
    ) -> tuple[int, Literal["forward", "backward"], tuple[int, ...]] | None:
        """What the ranks saw before they exchanged anything: the module, the pass and the ranks."""
        forward = {
            sample.rank: sample.nonfinite_forward
            for sample in samples
            if sample.nonfinite_forward is not None and sample.nonfinite_forward not in self._masks
        }
        backward = {
            sample.rank: sample.nonfinite_backward for sample in samples if sample.nonfinite_backward is not None
        }
        seen = forward or backward
        if not seen:
            return None
        ranks = tuple(sorted({*forward, *backward}))
        ranks = () if len(ranks) == len(samples) else ranks
        # The rank that is first in the model is nearest to the cause.
        return min(seen.values()) if forward else max(seen.values()), "forward" if forward else "backward", ranks

    @cached_property
    def _masks(self) -> set[int]:
        """Modules whose output is infinite in healthy steps, too."""
        return {
            sample.nonfinite_forward
            for samples in self.by_step.values()
            if _state(samples) == "good"
            for sample in samples
            if sample.nonfinite_forward is not None
        }

    @staticmethod
    def _of_gradients(
        samples: Sequence[LayerSample],
    ) -> tuple[int, Literal["forward", "backward"], tuple[int, ...]] | None:
        """By the gradients alone: what begins in a backward spreads to the layers before, not to those after it."""
        bad: dict[int, list[int]] = {}
        for sample in samples:
            known = [at for at, norm in enumerate(sample.grad_norm) if norm is not None]
            own = [at for at in known if not _is_number(sample.grad_norm[at])]
            if own and len(own) == len(known):
                return None
            if own:
                bad[sample.rank] = own
        if not bad:
            return None
        ranks = tuple(sorted(bad)) if len(bad) < len(samples) else ()
        return max(own[-1] for own in bad.values()), "backward", ranks

    def _begins_here(self, at: int, place: int, where: str | None, ranks: tuple[int, ...]) -> bool:
        """Whether the weights were still numbers when the step began.

        Otherwise the layer that is called first is the first to show it, on every rank; later steps show which one.
        """
        if ranks and self.model.replicated:
            return True
        first = {
            sample.nonfinite_forward
            for step in self.steps[at + 1 :][: thresholds.NONFINITE_LATER_STEPS]
            for sample in self.by_step[step]
            if sample.nonfinite_forward is not None
        }
        if where == "forward":
            return bool(first) and place not in first
        samples = self.by_step[self.steps[at]]
        outputs = any(any(sample.memory.get("activations", ())) for sample in samples)
        return bool(first) or (at + 1 == len(self.steps) and outputs and not self.model.compiled)


def _state(samples: Sequence[LayerSample]) -> Literal["good", "dropped", "lost"]:
    """``dropped``: gradients that are no numbers, and weights that are."""
    bad = [sample for sample in samples if _is_bad(sample)]
    if not bad:
        return "good"
    kept = all(sample.skipped or _has_numbers(sample.weight_norm) for sample in bad)
    return "dropped" if kept else "lost"


def _is_bad(sample: LayerSample) -> bool:
    if not all(map(_is_number, sample.grad_norm)) or not all(map(_is_number, sample.weight_norm)):
        return True
    # Its gradients may be gone when it is looked at.
    return sample.nonfinite_backward is not None and all(norm is None for norm in sample.grad_norm)


def _has_numbers(norms: Sequence[float | None]) -> bool:
    """Whether some are known, and all that are known are numbers."""
    return any(norm is not None for norm in norms) and all(map(_is_number, norms))


def _is_number(value: float | None) -> bool:
    return value is None or math.isfinite(value)


# -- no longer numbers, between two samples ----------------------------------------------------------------------------
# The norms that were kept of the last steps (``recorder/layers/gradient_trail.py``).  A rank writes the first step from
# which on they are not finite.  In that step the loss, the weights before the update, the gradients of each rank and
# those after the exchange are bad or good, and the earliest of them that is bad is where it began.


def first_of_trails(view: View, losses: Mapping[int, tuple[int, int | None]], *, since: int) -> NonFinite | None:
    """Where it began, in step ``since`` or later.

    ``losses``: by rank, the first step whose loss is no number, and the last one before it.
    """
    layers = view.window.layers
    trails = [trail for trail in layers.trails if trail.step >= since]
    first_loss = min((step for step, _ in losses.values()), default=None)
    if not trails:
        return None
    step = min(trail.step for trail in trails)
    if first_loss is not None and first_loss < step:
        return None  # what is known of the gradients came later
    own = [trail for trail in trails if trail.step == step]
    found = _Trail(
        model=layers.models[max(own, key=_badness).model],
        trails=own,
        later=[trail for trail in trails if trail.step > step],
        step=step,
        losses=losses,
        several=_several(layers),
    )
    places, where, ranks, began = found.origin(view.window.ranks)
    norms = [norm for trail in own for norm in _norms(trail)]
    good = max((trail.good_some_step for trail in own if trail.good_some_step is not None), default=None)
    return NonFinite(
        step=began,
        last_step=max(trail.step for trail in (*trails, *layers.samples)),
        good_step=good,
        exact=where is not None and (good == began - 1 or where == "update" or found.loss_is_good_at(began)),
        layer=None if places is None else _span_label(found.model, places, several=found.several),
        narrowed=places is not None and places[0] != places[1],
        where=where,
        ranks=ranks,
        word="NaN" if any(map(math.isnan, norms)) or not any(map(math.isinf, norms)) else "infinite",
        dropped=0,
    )


@dataclass(frozen=True, kw_only=True)
class _Trail:
    model: ModelTree
    trails: Sequence[LayerSample]
    """Of one step, the first that is bad."""
    later: Sequence[LayerSample]
    step: int
    losses: Mapping[int, tuple[int, int | None]]
    several: bool

    def loss_is_good_at(self, step: int) -> bool:
        """Whether every loss that is known is a number up to this step, so that the weights were, too."""
        return bool(self.losses) and all(good is not None and good >= step for _, good in self.losses.values())

    def origin(
        self, all_ranks: Sequence[int]
    ) -> tuple[Span | None, Literal["forward", "backward", "update"] | None, tuple[int, ...], int]:
        """The modules, the pass, the ranks (empty: all, or not known) and the step."""
        weights = _bad_places(trail.weight_norm for trail in self._own)
        if weights:
            return self._before_step(weights)
        by_loss = tuple(sorted(rank for rank, (first, _) in self.losses.items() if first == self.step))
        if by_loss:
            seen = [trail.nonfinite_forward for trail in self._own if trail.nonfinite_forward is not None]
            first = (min(seen), min(seen)) if seen else None
            return first, "forward", by_loss if len(by_loss) < len(all_ranks) else (), self.step
        ranks = tuple(sorted({trail.rank for trail in self.trails if _is_own(trail)}))
        ranks = ranks if len(ranks) < len(all_ranks) else ()
        own = self._last_bad([trail.local_norm for trail in self._own])
        exchanged = self._last_bad([trail.grad_norm for trail in self._own])
        spans = [span for span in (own, exchanged) if span is not None]
        # Clipping shows every layer, also where only a few gradients of each rank were looked at.
        narrowest = min(spans, key=lambda span: span[1] - span[0], default=None)
        return narrowest or self._weights_after(), "backward", ranks, self.step

    def _last_bad(self, rows: Sequence[Sequence[float | None]]) -> Span | None:
        """The last module that is bad, in the order of forward: it may be any up to the next one known to be good."""
        bad, known = _bad_places(rows), _known_places(rows)
        if not bad:
            return None
        last = max(bad)
        if self._is_every_layer(known):
            return last, last
        good = min((at for at in known if at > last), default=len(self.model.modules))
        return last, max(at for at, module in enumerate(self.model.modules[:good]) if module.elements or at == last)

    def _weights_after(self) -> Span | None:
        """The last layer whose weights the update spoiled; None: all of them are, as clipping does, or not known."""
        after = [trail for trail in self.later if trail.step == self.step + 1 and trail.model == self.model.id]
        known = _known_places(trail.weight_norm for trail in after)
        places = _bad_places(trail.weight_norm for trail in after)
        return (max(places), max(places)) if 0 < len(places) < len(known) and self._is_every_layer(known) else None

    def _is_every_layer(self, known: set[int]) -> bool:
        """Whether these are all modules with parameters: on a GPU only a few weights are looked at, and the layer may
        be between two of them.
        """
        return known >= {at for at, module in enumerate(self.model.modules) if module.elements}

    @property
    def _own(self) -> list[LayerSample]:
        return [trail for trail in self.trails if trail.model == self.model.id]

    def _before_step(
        self, weights: set[int]
    ) -> tuple[Span | None, Literal["backward", "update"] | None, tuple[int, ...], int]:
        """The step began with weights that were bad."""
        before = self.step - 1
        known = _known_places(trail.weight_norm for trail in self._own)
        whole = known == weights
        if any((trail.good_some_step if whole else trail.good_step) == before for trail in self.trails):
            return None, "update", (), before
        if not whole and self.loss_is_good_at(before):
            # The update brought it to the layers that had it in backward.
            last = (max(weights), max(weights)) if self._is_every_layer(known) else None
            return last, "backward", (), before
        return None, None, (), before


def _norms(trail: LayerSample) -> list[float]:
    norms = (*trail.local_norm, *trail.grad_norm, *trail.weight_norm, trail.own_norm)
    return [norm for norm in norms if norm is not None]


def _badness(trail: LayerSample) -> int:
    return sum(not math.isfinite(norm) for norm in _norms(trail))


def _bad_places(rows: Iterable[Sequence[float | None]]) -> set[int]:
    return {at for row in rows for at, norm in enumerate(row) if not _is_number(norm)}


def _known_places(rows: Iterable[Sequence[float | None]]) -> set[int]:
    return {at for row in rows for at, norm in enumerate(row) if norm is not None}


def _is_own(trail: LayerSample) -> bool:
    """Whether it was this rank's own before any exchange."""
    return not all(map(_is_number, trail.local_norm)) or not _is_number(trail.own_norm)


# -- history of a model -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class History:
    """The healthy samples of one model: [S] steps, at least one, and [S, M] values of all its ranks together."""

    model: ModelTree
    ranks: tuple[int, ...]
    steps: NDArray[np.int64]
    gradient: Floats
    """nan: no rank has one."""
    weight: Floats
    update: Floats
    """``update_ratio`` of the rank where it is largest; nan: not known."""
    checksums: tuple[tuple[str | None, ...], ...]
    """By step, of the lowest rank that has any."""

    @cached_property
    def trainable(self) -> NDArray[np.int64]:
        return np.array([module.trainable for module in self.model.modules], np.int64)

    @cached_property
    def total(self) -> Floats:
        """[S]; the norm of all gradients."""
        return np.asarray(np.sqrt(np.nansum(self.gradient**2, axis=1)), np.float64)

    def since_start(self) -> History | None:
        """Without the first steps, in which layers may have no gradient yet; None: nothing is left."""
        at = np.flatnonzero(self.steps - self.steps[0] >= thresholds.STARTING_STEPS)
        if not len(at):
            return None
        return History(
            model=self.model,
            ranks=self.ranks,
            steps=self.steps[at],
            gradient=self.gradient[at],
            weight=self.weight[at],
            update=self.update[at],
            checksums=tuple(self.checksums[row] for row in at),
        )

    @property
    def span(self) -> int:
        return int(self.steps[-1] - self.steps[0])


def histories_of(view: View) -> list[History]:
    """What the samples show of each model, over the steps that are looked at closely."""
    layers, found = view.window.layers, []
    for identity, by_step in _by_model(layers.samples).items():
        model = layers.models[identity]
        ranks = sorted({sample.rank for samples in by_step.values() for sample in samples})
        # Replicas have the same gradients, so a few of them show all.
        most = thresholds.HISTORY_RANKS if model.replicated else len(ranks)
        steps = _looked_at(list(by_step), min(most, len(ranks)))
        chosen = [by_step[step][:most] for step in steps if _is_healthy(by_step[step])]
        if not chosen:
            continue
        found.append(
            History(
                model=model,
                ranks=tuple(ranks),
                steps=np.array([samples[0].step for samples in chosen], np.int64),
                gradient=np.stack([_together(samples, lambda sample: sample.grad_norm) for samples in chosen]),
                weight=np.stack([_together(samples, lambda sample: sample.weight_norm) for samples in chosen]),
                update=np.stack([_largest([sample.update_ratio for sample in samples]) for samples in chosen]),
                checksums=tuple(
                    next((sample.checksum for sample in samples if any(sample.checksum)), samples[0].checksum)
                    for samples in chosen
                ),
            )
        )
    return found


def _looked_at(steps: list[int], ranks: int) -> list[int]:
    most = thresholds.HISTORY_STEPS * thresholds.HISTORY_RANKS // max(ranks, thresholds.HISTORY_RANKS)
    most = max(most, thresholds.HISTORY_STEPS_LEAST)
    return steps if len(steps) <= most else [steps[at] for at in np.linspace(0, len(steps) - 1, most).astype(int)]


def _is_healthy(samples: Sequence[LayerSample]) -> bool:
    return _state(samples) == "good" and not any(sample.skipped for sample in samples)


def _together(samples: Sequence[LayerSample], values: Callable[[LayerSample], Sequence[float | None]]) -> Floats:
    """[M]; root of the mean square over the ranks that know it.

    Ranks have the same gradients or parts of them: a mean of either does not depend on how many ranks were sampled.
    """
    rows = np.array([values(sample) for sample in samples], np.float64)  # None becomes nan
    known = ~np.isnan(rows)
    counts = known.sum(axis=0)
    sums = np.where(known, rows, 0.0) ** 2
    mean = sums.sum(axis=0) / np.maximum(counts, 1)
    return np.asarray(np.where(counts > 0, np.sqrt(mean), np.nan), np.float64)


def _largest(rows: Sequence[Sequence[float | None]]) -> Floats:
    return np.asarray(np.fmax.reduce(np.array(rows, np.float64), axis=0), np.float64)


# -- exploding_gradients ----------------------------------------------------------------------------------------------

EXPLODING_ADVICE = (
    "clip_grad_norm_ before optimizer.step() bounds it; a lower learning rate or a longer warm-up prevents it.",
    "Look at the batches from that step on, and at what changed there: data, sequence length, learning rate.",
    "If the run ends in NaN, resume from a checkpoint from before that step.",
)


@dataclass(frozen=True, kw_only=True)
class Explosion:
    at: int
    """The first value that is far above those before it."""
    usual: float
    now: float

    @property
    def title(self) -> str:
        """``100 times what it was: 12.3 instead of 0.12``"""
        return f"{_times(self.now / self.usual)} what it was: {self.now:.3g} instead of {self.usual:.3g}"

    @property
    def evidence(self) -> dict[str, Any]:
        return {"before": self.usual, "after": self.now, "times": round(self.now / self.usual, 1)}


def find_exploding(view: View, histories: Sequence[History]) -> list[Finding]:
    """At most one ``exploding_gradients``."""
    layers = view.window.layers
    found: list[tuple[int, Finding]] = []
    for history in histories:
        placed = _of_total(history) or _of_layer(history)
        if placed is None:
            continue
        explosion, place = placed
        step = int(history.steps[explosion.at])
        layer = None if place is None else _label(history.model, place, several=_several(layers))
        whose = "the gradients" if layer is None else f"the gradients of {layer}"
        ranks = _whose(history, view)
        on = f" on {named_ranks(ranks).lower()}" if ranks else ""
        finding = Finding(
            kind="exploding_gradients",
            severity="warning",
            title=(f"The norm of {whose}{on} is {explosion.title} from step {step:,} on."),
            ranks=ranks,
            steps=(step, int(history.steps[-1])),
            cost=cost_of(view, np.zeros(len(view.steps))),
            evidence={
                "layer": layer,
                "first_step": step,
                **explosion.evidence,
                "samples": len(history.steps),
                "samples_since": len(history.steps) - explosion.at,
            },
            advice=EXPLODING_ADVICE,
            confidence=0.85,
        )
        found.append((step, finding))
    return [min(found, key=lambda dated: dated[0])[1]] if found else []


def _whose(history: History, view: View) -> tuple[int, ...]:
    """The ranks that hold the model; empty: all of them do."""
    others = set(view.window.ranks) - set(history.ranks)
    return history.ranks if others and view.window.stages else ()


def _of_total(history: History) -> tuple[Explosion, int | None] | None:
    found = explosion_of(history.total, history.steps, thresholds.EXPLODING_TIMES)
    if found is None:
        return None
    late = np.median(np.nan_to_num(history.gradient[found.at :]) ** 2, axis=0)
    place = int(late.argmax())
    return found, place if late[place] * 2 >= late.sum() else None


def _of_layer(history: History) -> tuple[Explosion, int | None] | None:
    """One layer that had a small part of the total and now has nearly all of it."""
    if explosion_of(history.total, history.steps, thresholds.EXPLODING_TIMES_HIGHEST) is None:
        return None
    last = np.nan_to_num(history.gradient[-1])
    place = int(last.argmax())
    own = history.gradient[:, place]
    if np.isnan(own).any() or last[place] < thresholds.EXPLODING_LAYER_SHARE * history.total[-1]:
        return None
    found = explosion_of(own, history.steps, thresholds.EXPLODING_TIMES)
    return None if found is None else (found, place)


def explosion_of(
    norms: Floats,
    steps: NDArray[np.int64],
    times: float,
    *,
    least_before: int = thresholds.EXPLODING_BEFORE,
    least_after: int = thresholds.EXPLODING_SAMPLES,
) -> Explosion | None:
    """The first value from which on all are far above what was usual in the first half of those before it."""
    count = len(norms)
    if count < least_before + least_after:
        return None
    least = np.minimum.accumulate(norms[::-1])[::-1]  # the lowest from there on
    for at in range(least_before, count - least_after + 1):
        before = norms[: max(least_before, (at + 1) // 2)]
        if steps[at] - steps[0] < thresholds.EXPLODING_BEFORE_STEPS or not before.any():
            continue
        usual = float(np.median(before))
        far = max(times * usual, thresholds.EXPLODING_TIMES_HIGHEST * float(before.max()))
        if usual > 0 and least[at] >= far:
            return Explosion(at=at, usual=usual, now=float(np.median(norms[at:])))
    return None


def _times(times: float) -> str:
    return f"{times:,.0f} times" if times < 1e6 else f"{times:.0e} times".replace("e+0", "e").replace("e+", "e")


# -- layers without gradients -----------------------------------------------------------------------------------------

VANISHING_ADVICE = (
    "These layers learn nothing: add residual connections or normalization, or reinitialize the layers after them.",
    "Sigmoid and tanh shrink gradients layer by layer: use ReLU, GELU or SiLU. In fp16 use a GradScaler, or bf16.",
    "If these layers are meant to keep their weights, freeze them: requires_grad_(False) saves their gradients.",
)
DEAD_ADVICE = (
    "Look at what forward() does with its output: detach(), a multiplication by 0, a dead ReLU.",
    "In fp16 without a GradScaler small gradients become zero: use one, or bf16.",
    "If it is not meant to learn, freeze it: requires_grad_(False) saves its gradients and optimizer state.",
)
UNUSED_ADVICE = (
    "If they are meant to learn: their output does not reach the loss. Look for detach() or a branch never taken.",
    "If not, freeze them (requires_grad_(False)) or remove them; DDP then needs no find_unused_parameters.",
)


def find_silent(view: View, histories: Sequence[History]) -> list[Finding]:
    """``vanishing_gradients``, ``dead_layer`` and ``unused_parameters``, at most one of each."""
    layers = view.window.layers
    histories = [late for history in histories if (late := history.since_start()) is not None]
    several = _several(layers)
    vanishing = [(history, front) for history in histories if (front := _vanishing(history))]
    tiny = {history.model.modules[at].name for history, front in vanishing for at in front}
    dead = [layer for layer in _without_gradient(histories, _zeros) if layer[1].modules[layer[2]].name not in tiny]
    unused = _without_gradient(histories, _missing)
    found = []
    if vanishing:
        found.append(_vanishing_finding(*vanishing[0], view, several=several))
    if dead:
        found.append(_dead_finding(dead, view, several=several))
    if unused:
        found.append(_unused_finding(unused, view, several=several))
    return found


def _vanishing(history: History) -> list[int]:
    """The first layers, if their gradients are tiny compared with those of later ones; else nothing."""
    if len(history.steps) < thresholds.VANISHING_SAMPLES or history.span < thresholds.VANISHING_STEPS:
        return []
    modules = _comparable(history)
    if len(modules) < thresholds.VANISHING_MODEL:
        return []
    gradient = history.gradient[:, modules]
    ratio = gradient / history.weight[:, modules]
    large = np.quantile(ratio, 0.75, axis=1)[:, None]
    each = gradient / np.sqrt(history.trainable[modules])
    below = (ratio < thresholds.VANISHING_SHARE * large) & (each < thresholds.VANISHING_GRADIENT)
    tiny = np.asarray(below.all(axis=0), np.bool_)
    front = len(tiny) if tiny.all() else int(np.argmin(tiny))
    some = gradient[:, :front].any(axis=0)  # a layer may also have none at all
    if int(some.sum()) < thresholds.VANISHING_LAYERS:
        return []
    rise = np.median(gradient[-2:, :front][:, some]) / max(float(np.median(gradient[:2, :front][:, some])), 1e-300)
    return [] if rise >= thresholds.VANISHING_RISE else [int(at) for at in modules[:front]]


def _comparable(history: History) -> NDArray[np.intp]:
    """Modules with trainable parameters whose gradients and weights are known in all samples."""
    known = ~np.isnan(history.gradient).any(axis=0) & (np.nan_to_num(history.weight) > 0).all(axis=0)
    return np.flatnonzero(known & (history.trainable > 0))


def _vanishing_finding(history: History, front: Sequence[int], view: View, *, several: bool) -> Finding:
    first, last = (_label(history.model, at, several=several) for at in (front[0], front[-1]))
    rest = [at for at in _comparable(history) if at not in front]
    here, there = (
        float(np.median(history.gradient[:, places] / history.weight[:, places])) for places in (list(front), rest)
    )
    return Finding(
        kind="vanishing_gradients",
        severity="warning",
        title=(
            f"Gradients vanish before they reach the first {len(front)} layers ({first} to {last}): {here:.0e} of "
            f"the weights there, {there:.0e} in the layers after them."
        ),
        ranks=_whose(history, view),
        steps=(int(history.steps[0]), int(history.steps[-1])),
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "layer": first,
            "last_layer": last,
            "layers": len(front),
            "gradient_to_weight": here,
            "gradient_to_weight_after": there,
            "samples": len(history.steps),
        },
        advice=VANISHING_ADVICE,
        confidence=0.8,
    )


_Place = tuple[History, ModelTree, int]


def _without_gradient(histories: Sequence[History], silent: Callable[[History], Bools]) -> list[_Place]:
    """Trainable layers that are ``silent`` in all samples and do not learn in between; by history and module.

    A layer that is divided among ranks counts if it is silent on all of them.
    """
    found: list[_Place] = []
    heard: set[str] = set()
    for history in histories:
        trainable = history.trainable > 0
        if len(history.steps) < thresholds.DEAD_SAMPLES or history.span < thresholds.DEAD_STEPS:
            quiet = np.zeros(len(trainable), np.bool_)
        else:
            quiet = silent(history) & trainable & ~_chosen(history)
            learns = (np.nan_to_num(history.gradient) > 0).all(axis=0)
            if not learns.any():
                quiet[:] = False
        for at in np.flatnonzero(trainable):
            name = history.model.modules[at].name
            if quiet[at] and not is_expert(name) and _stands_still(history, int(at)):
                found.append((history, history.model, int(at)))
            elif not history.model.replicated:
                heard.add(name)
    return [layer for layer in found if layer[1].replicated or layer[1].modules[layer[2]].name not in heard]


def _zeros(history: History) -> Bools:
    return np.asarray((history.gradient == 0).all(axis=0), np.bool_)


def _missing(history: History) -> Bools:
    return np.asarray(np.isnan(history.gradient).all(axis=0), np.bool_)


def _chosen(history: History) -> Bools:
    """Modules that something chooses between in each step, as a router does: siblings with gradients now and then."""
    active = np.asarray(np.nan_to_num(history.gradient) > 0, np.bool_)
    at_times: Bools = np.asarray(active.any(axis=0) & ~active.all(axis=0), np.bool_)
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for at, module in enumerate(history.model.modules):
        if module.trainable:
            kinds[re.sub(r"\d+", "*", module.name)].append(at)
    found = np.zeros(active.shape[1], np.bool_)
    for members in kinds.values():
        if len(members) >= thresholds.ROUTED_SIBLINGS and at_times[members].any():
            found[members] = True
    return found


def _stands_still(history: History, at: int) -> bool:
    """Whether the weights stay as they are from sample to sample, apart from the decay of those that have a gradient.

    Otherwise they learn in steps that are not sampled, or follow others.
    """
    sums = [own[at] for own in history.checksums]
    weight, update = history.weight[:, at], history.update[:, at]
    if None not in sums and len(set(sums)) == 1:
        return True
    if None in sums and bool((update == 0).all()):
        return bool((weight == weight[0]).all())
    return not np.isnan(history.gradient[:, at]).any() and _only_decays(history, at)


def _only_decays(history: History, at: int) -> bool:
    """Whether the norm shrinks by just what the updates at the sampled steps are.

    If that is too little to be seen, the updates must be small compared with those of the layers that learn: an
    optimizer with momentum would still move weights that had a gradient a few steps ago.
    """
    weight, update = history.weight[:, at], history.update[:, at]
    if not ((weight > 0) & (update > 0)).all():  # also if one is not known
        return False
    shrunk = -np.diff(np.log(weight))
    apart = np.diff(history.steps)
    low, high = np.minimum(update[:-1], update[1:]) * apart, np.maximum(update[:-1], update[1:]) * apart
    slack, rounding = thresholds.DECAY_SLACK, thresholds.DECAY_ROUNDING
    shrunk, low, high = (np.append(values, values.sum()) for values in (shrunk, low, high))  # also from first to last
    if not ((shrunk >= low / slack - rounding) & (shrunk <= high * slack + rounding)).all():
        return False
    learning = history.update[:, (np.nan_to_num(history.gradient) > 0).all(axis=0)]
    learning = learning[~np.isnan(learning)]
    small = len(learning) > 0 and float(update.max()) <= thresholds.DECAY_SHARE * float(np.median(learning))
    return bool(low[-1] >= slack * slack * rounding or small)


def _dead_finding(dead: Sequence[_Place], view: View, *, several: bool) -> Finding:
    names, parameters = _named(dead, several=several)
    history = dead[0][0]
    which = f"Layer {names[0]} gets" if len(names) == 1 else f"{len(names)} layers ({_list(names)}) get"
    return Finding(
        kind="dead_layer",
        severity="warning",
        title=(
            f"{which} a gradient of exactly zero in all {len(history.steps)} sampled steps: "
            f"{count_text(parameters, 'parameter')} never learn."
        ),
        ranks=_whose(history, view),
        steps=(int(history.steps[0]), int(history.steps[-1])),
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence=_silent_evidence(names, parameters, history),
        advice=DEAD_ADVICE,
        confidence=0.9,
    )


def _unused_finding(unused: Sequence[_Place], view: View, *, several: bool) -> Finding:
    names, parameters = _named(unused, several=several)
    history = unused[0][0]
    return Finding(
        kind="unused_parameters",
        severity="info",
        title=(
            f"{count_text(parameters, 'trainable parameter')} never got a gradient in {len(history.steps)} sampled "
            f"steps: those of {_list(names)}."
        ),
        ranks=_whose(history, view),
        steps=(int(history.steps[0]), int(history.steps[-1])),
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence=_silent_evidence(names, parameters, history),
        advice=UNUSED_ADVICE,
        confidence=0.9,
    )


def _silent_evidence(names: Sequence[str], parameters: int, history: History) -> dict[str, Any]:
    return {
        "layer": names[0],
        "layers": list(names[:LISTED]),
        "layers_count": len(names),
        "parameters": parameters,
        "samples": len(history.steps),
    }


def _named(places: Sequence[_Place], *, several: bool) -> tuple[list[str], int]:
    """Their names, without repeats, and the number of their parameters; the outermost silent module is named."""
    names: dict[str, None] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    silent: defaultdict[str, set[int]] = defaultdict(set)
    for _, model, at in places:
        silent[model.id].add(at)
    for history, model, at in places:
        names[_label(model, _outermost(model, at, silent[model.id]), several=several)] = None
        # Each rank's shard counts; the same ranks again are a model that changed.
        sizes[_label(model, at, several=several), history.ranks] = model.modules[at].trainable
    return list(names), sum(sizes.values())


def _outermost(model: ModelTree, at: int, silent: set[int]) -> int:
    """The outermost module around it, short of the model itself, in which everything trainable is silent."""
    while (parent := model.modules[at].parent) > 0:
        inside = {parent}
        for place in range(parent + 1, len(model.modules)):
            if model.modules[place].parent in inside:
                inside.add(place)
        if not all(place in silent for place in inside if model.modules[place].trainable):
            break
        at = parent
    return at


def _list(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1]
    return f"{', '.join(names[:2])} and {len(names) - 2} more"
