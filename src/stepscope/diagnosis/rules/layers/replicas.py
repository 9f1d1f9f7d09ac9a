"""``replica_desync``: ranks that should hold the same weights and do not.

After each step the replicas of data parallelism are equal to the last bit: they began with the same weights, and the
exchange gives every rank the same gradients.  So checksums of the weights, taken by each rank at the same step, must be
equal within a group of replicas.  Which layers differ, and since when, separates the causes.  A change of one layer on
one rank (a flipped bit) stays in that layer, because the gradients of all others are still the same everywhere.
Different gradients spread to every layer within a step.

Ranks that average their weights every few steps instead (Local SGD) differ in between by design.  They are recognized
by the collectives: a few steps exchange as many bytes as the model has, most steps nothing.

``no_gradient_exchange``: ranks of one process group that split the data and never exchange anything of that size.  No
wrapper says that their models should be equal, so checksums are not compared; each trains its own model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepscope.diagnosis.engine.claims import averages_weights, model_exchanges
from stepscope.diagnosis.engine.settings import facts_about, frameworks_of
from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.diagnosis.engine.window import model_bytes
from stepscope.judge import thresholds
from stepscope.records.finding import Finding
from stepscope.records.layers import LayerRecords, LayerSample, ModelTree
from stepscope.records.text import count_text, named_ranks

__all__ = ["find_desync", "find_no_exchange", "is_expert"]

STOP = "The ranks train different models: stop the job, and resume from a checkpoint from before they differed."
ADVICE = {
    "local": (
        STOP,
        "Gradients that differ would show in all layers: this is a flipped bit, or code that changes only one layer.",
        "Check the machine (on GPUs: nvidia-smi -q -d ECC, Xid in dmesg); leave it out if it happens again.",
    ),
    "start": (
        "The ranks train different models, and did from the start: stop the job and start again.",
        "Usual causes: different seeds without DDP around the model, or weights loaded on only some ranks.",
        "DDP copies rank 0's weights once, when it is constructed: load weights before that, or on every rank.",
    ),
    "sync": (
        STOP,
        "All layers differ: gradients were not exchanged, or weights were loaded or changed on some ranks only.",
        "Look for no_sync() left on, model.module called instead of the DDP model, a step() on some ranks only.",
    ),
    "part": (
        STOP,
        "Only a part differs: parameters that DDP does not exchange, or that some ranks alone change.",
        "Look for parameters that were added after DDP was constructed, or that are used through model.module.",
    ),
}
"""By cause; buffers (BatchNorm's statistics) are no part of the comparison."""


def find_desync(view: View) -> list[Finding]:
    """At most one: the difference that began first."""
    exchanges = model_exchanges(view)
    if exchanges is not None and averages_weights(exchanges):
        return []
    found = [difference for difference in _differences(view) if not _by_design(difference)]
    if exchanges is not None and not exchanges.any():
        alone = len(exchanges) < thresholds.DESYNC_ALONE_STEPS
        found = [difference for difference in found if difference.points >= thresholds.DESYNC_COMPARISONS or not alone]
    return (
        [
            _finding(
                min(found, key=lambda difference: (difference.first.step, difference.model.id, difference.group)), view
            )
        ]
        if found
        else []
    )


def is_expert(name: str) -> bool:
    """Whether a module belongs to a mixture of experts, by its name: experts may differ, and be idle."""
    return "expert" in name.lower() or any(part.lower() == "moe" for part in name.split("."))


# -- exchange of gradients --------------------------------------------------------------------------------------------

ALONE_ADVICE = (
    "Each rank trains its own model on its part of the data, and a checkpoint has only one of them: stop the job.",
    "Wrap the model in torch.nn.parallel.DistributedDataParallel (also on a CPU), and call that, not its module.",
)


def find_no_exchange(view: View) -> list[Finding]:
    """At most one: a process group and a DistributedSampler, but no step that exchanges gradients or weights."""
    window = view.window
    rows = view.rows
    if len(rows) < 2 or not view.enough or len(set(view.groups.tolist())) > 1 or window.share_samples:
        return []
    facts = [window.facts[row] for row in rows]
    grouped = all(window.identities[row].backend and window.identities[row].world_size > 1 for row in rows)
    split = all(facts_about(own, "loader").get("distributed_sampler") is True for own in facts)
    if not grouped or not split:
        return []
    exchanged_elsewhere = any(own.get(name) for own in facts for name in ("ddp", "fsdp", "mesh", "pipeline"))
    by_framework = any(OWN_EXCHANGE & set(frameworks_of(own)) for own in facts)
    exchanges = model_exchanges(view)
    if exchanged_elsewhere or by_framework or exchanges is None or exchanges.any():
        return []
    return [
        Finding(
            kind="no_gradient_exchange",
            severity="critical",
            title=(
                f"{count_text(len(rows), 'rank')} split the data (DistributedSampler) but never exchange gradients: "
                "each trains a different model."
            ),
            steps=view.span,
            cost=cost_of(view, np.zeros(len(view.steps))),
            evidence={
                "model_bytes": int(model_bytes(facts[0])),
                "most_exchanged_bytes": int(window.exchanged_bytes.max()),
                "steps_used": len(window.steps),
                "model": facts_about(facts[0], "model").get("class"),
            },
            advice=ALONE_ADVICE,
            confidence=0.9,
        )
    ]


OWN_EXCHANGE = frozenset({"deepspeed", "megatron"})
"""Frameworks that exchange gradients in ways that the hooks may not see."""


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Point:
    """What the replicas' checksums were after one step."""

    step: int
    samples: Mapping[int, LayerSample]
    """By rank."""
    compared: tuple[int, ...]
    """Modules whose checksum is known on every rank …"""
    differing: tuple[int, ...]
    """… and those of them where it is not the same."""

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that are equal to each other, the largest class first."""
        found: defaultdict[tuple[str | None, ...], list[int]] = defaultdict(list)
        for rank in sorted(self.samples):
            found[tuple(self.samples[rank].checksum[at] for at in self.differing)].append(rank)
        return tuple(sorted(map(tuple, found.values()), key=lambda ranks: (-len(ranks), ranks)))


@dataclass(frozen=True, kw_only=True)
class _Difference:
    model: ModelTree
    group: str
    first: _Point
    last: _Point
    equal: _Point | None
    """The last comparison before, with everything equal; None: they never were."""
    earlier: _Point | None
    """The one before that."""
    points: int
    several: bool
    """Whether the run has several models."""

    @property
    def outsiders(self) -> tuple[int, ...]:
        """The ranks that differ from most; empty if there is no such majority."""
        most, *others = self.last.classes
        if len(most) * 2 <= len(self.last.samples):
            return self._moved
        return tuple(sorted(rank for ranks in others for rank in ranks))

    @property
    def _moved(self) -> tuple[int, ...]:
        """Of two ranks the one whose weights went much further from where both were, and than training moves them.

        A rank that goes back to older weights hardly moves, while the other one trains on: that is no fault of it.
        """
        if self.equal is None or self.earlier is None or len(self.last.samples) != 2:
            return ()
        if not set(self.first.samples) <= set(self.equal.samples) & set(self.earlier.samples):
            return ()
        far = {
            rank: _moved_by(self.equal.samples[rank], sample, self.first.differing)
            for rank, sample in self.first.samples.items()
        }
        (_, least), (away, most) = sorted(far.items(), key=lambda item: item[1])
        usual = _moved_by(self.earlier.samples[away], self.equal.samples[away], self.first.differing)
        usual *= (self.first.step - self.equal.step) / (self.equal.step - self.earlier.step)
        if most <= thresholds.MOVED_TIMES * least or most <= thresholds.MOVED_OVER_TRAINING * usual:
            return ()
        return (away,) if most > thresholds.DECAY_ROUNDING else ()

    @cached_property
    def cause(self) -> str:
        trained = [at for at in self.first.compared if self.model.modules[at].trainable]
        differ = sum(1 for at in self.first.differing if self.model.modules[at].trainable)
        everywhere = differ and differ >= thresholds.DIFFER_EVERYWHERE * len(trained)
        if everywhere and (len(trained) > 1 or self.equal is None):
            return "start" if self.equal is None else "sync"
        few = len(self.first.differing) <= max(1.0, thresholds.DIFFER_LOCALLY * len(self.first.compared))
        return "local" if few and self.equal is not None else "part"


def _moved_by(before: LayerSample, after: LayerSample, modules: Sequence[int]) -> float:
    """The largest relative change of a norm."""
    changes = [0.0]
    for at in modules:
        was, now = before.weight_norm[at], after.weight_norm[at]
        if was and now is not None:
            changes.append(abs(now - was) / was)
    return max(changes)


def _differences(view: View) -> Iterator[_Difference]:
    layers = view.window.layers
    points: defaultdict[tuple[str, str], defaultdict[int, dict[int, LayerSample]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for sample in layers.samples:
        if not layers.models[sample.model].replicated or not any(sample.checksum):
            continue
        if view.window.share_samples and not sample.group:
            continue  # ranks hold parts of one model, and it is not known which ones are replicas of each other
        points[sample.model, sample.group][sample.step][sample.rank] = sample
    for (model, group), by_step in points.items():
        compared = [_point(step, samples) for step, samples in sorted(by_step.items()) if len(samples) > 1]
        found = _lasting(compared, layers, model, group)
        if found is not None and not _is_shifted(found, compared, by_step):
            yield found


def _point(step: int, samples: Mapping[int, LayerSample]) -> _Point:
    sums = [sample.checksum for sample in samples.values()]
    if all(own == sums[0] for own in sums[1:]):
        return _Point(step=step, samples=samples, compared=(), differing=())
    known = [at for at, column in enumerate(zip(*sums, strict=True)) if None not in column]
    compared = [at for at in known if all(_finite(sample.weight_norm[at]) for sample in samples.values())]
    differing = [at for at in compared if len({own[at] for own in sums}) > 1]
    return _Point(step=step, samples=samples, compared=tuple(compared), differing=tuple(differing))


def _finite(norm: float | None) -> bool:
    """Also if it is not known.  NaN has many bit patterns, so weights that are not numbers may differ."""
    return norm is None or math.isfinite(norm)


def _lasting(points: Sequence[_Point], layers: LayerRecords, model: str, group: str) -> _Difference | None:
    """A difference that no later comparison of the same ranks finds gone.

    Replicas that become equal again are averaged now and then, by design.
    """
    at = _last_difference(points)
    if at is None:
        return None
    last = points[at]
    first, equal, earlier = last, None, None
    for point in reversed(points[:at]):
        if not _compares(point, last):
            continue
        if equal is not None:
            earlier = point if not point.differing else None
            break
        if not point.differing:
            equal = point
        else:
            first = point
    return _Difference(
        model=layers.models[model],
        group=group,
        first=first,
        last=last,
        equal=equal,
        earlier=earlier,
        points=len(points),
        several=len({sample.model for sample in layers.samples}) > 1,
    )


def _last_difference(points: Sequence[_Point]) -> int | None:
    """The last comparison with a difference that no later one of ranks on both sides finds gone."""
    for at in range(len(points) - 1, -1, -1):
        if points[at].differing and not any(_compares(later, points[at]) for later in points[at + 1 :]):
            return at
    return None


def _compares(point: _Point, other: _Point) -> bool:
    """Whether it has ranks of at least two classes of the other point."""
    return sum(1 for ranks in other.classes if any(rank in point.samples for rank in ranks)) > 1


def _is_shifted(found: _Difference, points: Sequence[_Point], by_step: Mapping[int, Mapping[int, LayerSample]]) -> bool:
    """Whether the ranks only count their steps differently: one has the other's weights at another step."""
    if found.equal is not None:
        return False
    steps: defaultdict[tuple[int, tuple[str | None, ...]], set[int]] = defaultdict(set)
    for step, samples in by_step.items():
        for rank, sample in samples.items():
            steps[rank, sample.checksum].add(step)
    differing = [point for point in points if point.differing]
    shifted = 0
    for point in differing:
        usual, *others = (ranks[0] for ranks in point.classes)
        shifted += all(steps[usual, point.samples[rank].checksum] - {point.step} for rank in others)
    return shifted * 2 >= len(differing)


def _by_design(found: _Difference) -> bool:
    """Whether these are parameters that each rank has for itself: experts, or a part that is different on all ranks."""
    if found.equal is not None:
        return False
    names = [found.model.modules[at].name for at in found.last.differing]
    if all(map(is_expert, names)):
        return True
    own = len(found.last.samples) > 2 and len(found.last.classes) == len(found.last.samples)
    return own and found.cause == "part"


# -- words ------------------------------------------------------------------------------------------------------------


def _finding(found: _Difference, view: View) -> Finding:
    first, last, equal = found.first, found.last, found.equal
    layer = found.model.label(first.differing[0])
    ranks = found.outsiders or (tuple(sorted(last.samples)) if len(last.samples) == 2 else ())
    of = f" of {found.model.modules[0].type}" if found.several else ""
    return Finding(
        kind="replica_desync",
        severity="critical",
        title=f"{_who(found)} in {_layers(found)}{of} {_since(found)}.",
        ranks=ranks,
        steps=(first.step, last.step),
        cost=cost_of(view, np.zeros(len(view.steps))),
        evidence={
            "layer": layer,
            "layers": [found.model.label(at) for at in first.differing[:LISTED]],
            "layers_differing": len(first.differing),
            "layers_differing_last": len(last.differing),
            "layers_compared": len(first.compared),
            "first_step": first.step,
            "last_equal_step": None if equal is None else equal.step,
            "equal_ranks": [list(ranks) for ranks in last.classes[:LISTED]],
            "group": found.group,
            "steps_compared": found.points,
            "cause": found.cause,
        },
        advice=ADVICE[found.cause],
        confidence=1.0 if found.outsiders else 0.95,
    )


LISTED = 16


def _who(found: _Difference) -> str:
    difference, *others = found.last.classes
    if found.outsiders:
        whose = "its peers" if len(found.outsiders) == 1 else "the other ranks"
        have = "has" if len(found.outsiders) == 1 else "have"
        return f"{named_ranks(found.outsiders)} {have} different weights from {whose}"
    if len(found.last.samples) == 2:
        return f"{named_ranks(sorted(found.last.samples))} have different weights"
    if len(others) == 1:
        left, right = (named_ranks(ranks).lower() for ranks in sorted((difference, others[0])))
        return f"The weights of {left} differ from those of {right}"
    if len(others) + 1 == len(found.last.samples):
        return f"All {len(found.last.samples)} ranks have different weights"
    return f"The {len(found.last.samples)} ranks have {len(others) + 1} different sets of weights"


def _layers(found: _Difference) -> str:
    differing, compared = len(found.first.differing), len(found.first.compared)
    layer = found.model.label(found.first.differing[0])
    if differing == 1:
        return layer
    if differing == compared:
        return f"all {compared} layers"
    return f"{differing} of {count_text(compared, 'layer')}, the first of them {layer},"


def _since(found: _Difference) -> str:
    if found.equal is None:
        return f"already at step {found.first.step:,}, the first that was compared"
    if found.equal.step + 1 == found.first.step:
        return f"from step {found.first.step:,} on"
    return f"from a step between {found.equal.step:,} and {found.first.step:,} on"
