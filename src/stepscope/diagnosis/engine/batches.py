"""Batch sizes of the ranks, where they differ: by the settings of the loaders, else by what the models were given."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.diagnosis.engine.settings import batch_size_of, is_data_parallel
from stepscope.diagnosis.engine.view import View, computed_once
from stepscope.judge import thresholds
from stepscope.records.text import named_ranks

__all__ = ["UnevenBatches", "uneven_batches_of"]


@dataclass(frozen=True, kw_only=True)
class UnevenBatches:
    sizes: dict[int, int]
    """By rank."""
    usual: int
    """That most ranks have."""
    measured: bool
    """Whether they are from sampled steps."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those with another size."""
        return tuple(rank for rank, size in self.sizes.items() if size != self.usual)

    @property
    def text(self) -> str:
        """``Rank 2 has batches of 16 samples, the other ranks of 64``."""
        odd = sorted({self.sizes[rank] for rank in self.ranks})
        odd_text = f"{odd[0]}" if len(odd) == 1 else f"{odd[0]} to {odd[-1]}"
        has = "has" if len(self.ranks) == 1 else "have"
        others = "the other rank" if len(self.sizes) == len(self.ranks) + 1 else "the other ranks"
        return f"{named_ranks(self.ranks)} {has} batches of {odd_text} samples, {others} of {self.usual}"

    def are_larger(self, ranks: tuple[int, ...]) -> bool:
        """Whether all these ranks have larger batches than usual."""
        return all(self.sizes[rank] > self.usual for rank in ranks)


def uneven_batches_of(view: View) -> UnevenBatches | None:
    """None if all ranks have the same size, or that of some is not known."""
    return computed_once(view, "uneven_batches", _uneven_batches)


def _uneven_batches(view: View) -> UnevenBatches | None:
    window = view.window
    sizes = {rank: batch_size_of(facts) for rank, facts in zip(window.ranks, window.facts, strict=True)}
    measured = not all(sizes.values())
    if measured and all(is_data_parallel(facts) for facts in window.facts):
        sizes = _measured_batches(view)
    known = {rank: size for rank, size in sizes.items() if size}
    if len(known) < max(2, len(window.ranks)) or len(set(known.values())) == 1:
        return None
    usual = max(sorted(set(known.values())), key=list(known.values()).count)
    return UnevenBatches(sizes=known, usual=usual, measured=measured)


def _measured_batches(view: View) -> dict[int, int | None]:
    """By rank: the samples that its model was given in a step, if they were the same in all steps that are compared."""
    seen: dict[int, dict[int, int]] = {rank: {} for rank in view.window.ranks}
    for sample in view.window.layers.samples:
        if sample.group or sample.rank not in seen:
            continue  # ranks that hold parts of one model
        samples = sample.work.samples if sample.work is not None else None
        if samples and seen[sample.rank].setdefault(sample.step, samples) == samples:
            continue
        seen[sample.rank][sample.step] = 0  # not known, or two models that get different numbers of samples
    shared = set.intersection(*map(set, seen.values())) if seen else set()
    if len(shared) < thresholds.UNEVEN_BATCHES_STEPS:
        return {}
    found: dict[int, int | None] = {}
    for rank, sizes in seen.items():
        own = {sizes[step] for step in shared}
        found[rank] = own.pop() if len(own) == 1 else None
    return found
