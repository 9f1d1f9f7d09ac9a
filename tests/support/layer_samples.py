"""Samples of layers as a recorder would write them, of models that exist only as a list of names.

    tree = model("embed", "layers.0.mlp", "layers.1.mlp", "head")
    records = sampled(tree, ranks=4, faults=(set_values("layers.1.mlp", since=300, ranks=[2], checksum="flipped"),))

A healthy model has gradients that vary by half, weights that move a little from step to step and are equal on all
ranks, and a forward of 1 ms and a backward of 2 ms in each layer.  A fault is a function of rank, step and the values
of that sample by module, which it changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepscope.records.layers import MEMORY_KINDS, LayerRecords, LayerSample, ModelTree, ModuleInfo

__all__ = [
    "Fault",
    "Values",
    "frozen",
    "joined",
    "lost",
    "model",
    "sampled",
    "scaled",
    "set_values",
    "trail",
    "without_learning",
]

ELEMENTS = 1024


@dataclass(kw_only=True)
class Values:
    """One sample, by module."""

    forward_us: list[float | None]
    backward_us: list[float | None]
    grad_norm: list[float | None]
    weight_norm: list[float | None]
    update_ratio: list[float | None]
    zero_share: list[float | None]
    checksum: list[str | None]
    nonfinite_forward: int | None = None
    nonfinite_backward: int | None = None
    skipped: bool = False
    clock: str = "host"
    group: str = ""
    missing: bool = False
    """No such sample was taken."""
    known: dict[str, int] = field(default_factory=dict)
    """Module by name."""

    def at(self, name: str) -> int:
        return self.known[name]


Fault = Callable[[int, int, Values], None]
"""Of rank, step and values."""


def model(
    *names: str,
    kind: str = "Net",
    identity: str = "",
    replicated: bool = True,
    compiled: bool = False,
    frozen: Collection[str] = (),
    elements: Mapping[str, int] | None = None,
) -> ModelTree:
    """A tree with these leaves, which own all parameters, and the modules above them."""
    places = {"": 0}
    modules = [ModuleInfo(name="", type=kind, parent=-1, elements=0, trainable=0)]
    for name in names:
        parent = 0
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            part = ".".join(parts[:depth])
            if part not in places:
                owned = (elements or {}).get(part, ELEMENTS) if part == name else 0
                trainable = 0 if part in frozen else owned
                places[part] = len(modules)
                numbered = part != name and parts[depth].isdigit()
                of_type = "ModuleList" if numbered else "Linear"
                modules.append(ModuleInfo(name=part, type=of_type, parent=parent, elements=owned, trainable=trainable))
            parent = places[part]
    return ModelTree(
        id=identity or f"{kind}/{len(modules)}", modules=tuple(modules), compiled=compiled, replicated=replicated
    )


def sampled(
    tree: ModelTree,
    *,
    ranks: int | Sequence[int] = 2,
    steps: Iterable[int] = range(0, 1000, 100),
    faults: Sequence[Fault] = (),
    attempt: int = 0,
    seed: int = 0,
) -> LayerRecords:
    numbers = range(ranks) if isinstance(ranks, int) else ranks
    samples = []
    for step in steps:
        for rank in numbers:
            values = _healthy(tree, rank, step, seed)
            for fault in faults:
                fault(rank, step, values)
            if not values.missing:
                samples.append(_sample(tree, rank, step, attempt, values))
    return LayerRecords(models={tree.id: tree}, samples=tuple(samples))


def trail(
    tree: ModelTree,
    step: int,
    rank: int = 0,
    *,
    local: Sequence[str] | None = None,
    reduced: Sequence[str] | None = None,
    weights: Sequence[str] | None = None,
    own: float | None = None,
    good: int | None = None,
    good_some: int | None = None,
    forward: str | None = None,
) -> LayerSample:
    """Norms that were kept of one step: the names of modules where they are NaN; None: not known."""
    places = {module.name: at for at, module in enumerate(tree.modules)}

    def norms(bad: Sequence[str] | None) -> tuple[float | None, ...]:
        known = [bad is not None and module.elements > 0 for module in tree.modules]
        names = [module.name for module in tree.modules]
        return tuple(
            None if not yes else math.nan if name in (bad or ()) else 1.0
            for yes, name in zip(known, names, strict=True)
        )

    empty = (None,) * len(tree.modules)
    return LayerSample(
        rank=rank,
        attempt=0,
        step=step,
        wall_ns=step * 1_000_000,
        model=tree.id,
        clock="host",
        group="",
        memory={kind: (0,) * len(tree.modules) for kind in MEMORY_KINDS},
        forward_us=empty,
        backward_us=empty,
        grad_norm=norms(reduced),
        weight_norm=norms(weights),
        update_ratio=empty,
        zero_share=empty,
        checksum=empty,
        nonfinite_forward=None if forward is None else places[forward],
        nonfinite_backward=None,
        skipped=False,
        device_peak=None,
        device_bytes=None,
        trail=True,
        good_step=good,
        good_some_step=good if good_some is None else good_some,
        local_norm=norms(local),
        own_norm=own,
    )


def joined(*records: LayerRecords) -> LayerRecords:
    samples = [sample for record in records for sample in record.samples]
    samples.sort(key=lambda sample: (sample.attempt, sample.step, sample.rank))
    return LayerRecords(
        models={key: tree for record in records for key, tree in record.models.items()}, samples=tuple(samples)
    )


def _healthy(tree: ModelTree, rank: int, step: int, seed: int) -> Values:
    """What all ranks have in common depends on the step alone, as after an exchange of gradients."""
    draw = random.Random(f"{tree.id} {step} {seed}")
    own = [module.elements > 0 for module in tree.modules]
    learns = [module.trainable > 0 for module in tree.modules]
    gradient = [draw.uniform(0.5, 1.5) * 0.1 for _ in own]
    weight = [10.0 * (1 + 0.0002 * step / 100 + 0.00001 * draw.random()) for _ in own]
    children = [sum(1.0 for leaf in _leaves(tree, at)) for at in range(len(own))]
    return Values(
        forward_us=[1000.0 * count for count in children],
        backward_us=[2000.0 if yes else None for yes in own],
        grad_norm=[value if yes else None for value, yes in zip(gradient, learns, strict=True)],
        weight_norm=[value if yes else None for value, yes in zip(weight, own, strict=True)],
        update_ratio=[0.001 if yes else None for yes in learns],
        zero_share=[0.0 if yes else None for yes in learns],
        checksum=[(f"{at}.{step if learns[at] else 0}" if yes else None) for at, yes in enumerate(own)],
        known={module.name: at for at, module in enumerate(tree.modules)},
    )


def _leaves(tree: ModelTree, at: int) -> list[int]:
    below = {at}
    for place in range(at + 1, len(tree.modules)):
        if tree.modules[place].parent in below:
            below.add(place)
    return [place for place in below if tree.modules[place].elements]


def _sample(tree: ModelTree, rank: int, step: int, attempt: int, values: Values) -> LayerSample:
    return LayerSample(
        rank=rank,
        attempt=attempt,
        step=step,
        wall_ns=step * 1_000_000,
        model=tree.id,
        clock=values.clock,
        group=values.group,
        memory={kind: tuple(4 * module.elements for module in tree.modules) for kind in MEMORY_KINDS},
        forward_us=tuple(values.forward_us),
        backward_us=tuple(values.backward_us),
        grad_norm=tuple(_rounded(values.grad_norm)),
        weight_norm=tuple(_rounded(values.weight_norm)),
        update_ratio=tuple(_rounded(values.update_ratio)),
        zero_share=tuple(values.zero_share),
        checksum=tuple(values.checksum),
        nonfinite_forward=values.nonfinite_forward,
        nonfinite_backward=values.nonfinite_backward,
        skipped=values.skipped,
        device_peak=None,
        device_bytes=None,
    )


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """As in the file."""
    return [value if value is None else float(f"{value:.4g}") for value in values]


# -- faults -----------------------------------------------------------------------------------------------------------


def set_values(name: str, *layers: str, since: int = 0, ranks: Collection[int] | None = None, **changed: Any) -> Fault:
    """Set or compute values of layers: ``set_values("net.0", grad_norm=0.0)``; a function gets the old value."""
    names = (name, *layers)

    def fault(rank: int, step: int, values: Values) -> None:
        if step < since or (ranks is not None and rank not in ranks):
            return
        for each in names:
            for key, value in changed.items():
                own = getattr(values, key)
                at = values.at(each)
                own[at] = value(own[at]) if callable(value) else value

    return fault


def frozen(name: str) -> Fault:
    """Trainable, but without gradients."""
    return set_values(name, grad_norm=None, zero_share=None, update_ratio=0.0, checksum="same", weight_norm=10.0)


def without_learning(name: str, *, decay: float = 0.0) -> Fault:
    """A gradient of exactly zero; ``decay``: what weight decay takes of the weights in a step."""

    def fault(rank: int, step: int, values: Values) -> None:
        at = values.at(name)
        values.grad_norm[at], values.zero_share[at], values.update_ratio[at] = 0.0, 1.0, decay
        values.weight_norm[at] = 10.0 * (1 - decay) ** step
        values.checksum[at] = f"decayed {step}" if decay else "same"

    return fault


def scaled(by: Callable[[int], float], *names: str) -> Fault:
    """Multiply the gradients of these layers, or of all, by a function of the step."""

    def fault(rank: int, step: int, values: Values) -> None:
        places = [values.at(name) for name in names] or range(len(values.grad_norm))
        for at in places:
            own = values.grad_norm[at]
            values.grad_norm[at] = None if own is None else own * by(step)

    return fault


def lost(
    name: str,
    *,
    since: int,
    ranks: Collection[int] | None = None,
    forward: bool = False,
    value: float = math.nan,
    called_first: str | None = None,
) -> Fault:
    """NaN begins at a step in a layer on some ranks; the exchange and the update bring it everywhere.

    Afterwards every layer has it, and forward first shows it in the one that is called first (else: the first of all).
    """

    def fault(rank: int, step: int, values: Values) -> None:
        if step < since:
            return
        own = [at for at, norm in enumerate(values.grad_norm) if norm is not None]
        last = len(values.grad_norm) if forward or step > since else values.at(name) + 1
        for at in own:
            if at < last:
                values.grad_norm[at] = values.weight_norm[at] = value
                values.checksum[at] = f"nan {rank}"
        if step > since:
            values.nonfinite_forward = own[0] if called_first is None else values.at(called_first)
        elif ranks is None or rank in ranks:
            if forward:
                values.nonfinite_forward = values.at(name)
            values.nonfinite_backward = own[-1] if forward else values.at(name)

    return fault
