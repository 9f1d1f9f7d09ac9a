"""How many tokens the router of a mixture of experts sends to each rank, as far as the all_to_alls tell.

Experts that lie on different ranks get their tokens by an all_to_all and send them back by another.  What is recorded
of each is the size of the rank's own input: of the first that are the tokens it has, of the second those that its
experts were given.  A rank whose experts get more therefore sends more bytes in a step than its peers, and works longer
for a reason that is neither its data loader nor its machine.

That its batches are no larger shows in the all_to_alls that have one size on all ranks: those that tokens leave by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.records.collectives import OPS
from stepscope.records.series import RankSeries

__all__ = ["Routed", "routed_bytes", "times_the_tokens"]

Rows = NDArray[np.intp]
ALL_TO_ALL = OPS.index("all_to_all")
SMALL_SHARE = 0.05
"""Of the largest all_to_all: smaller ones carry the numbers of tokens, and have one size in any case."""


@dataclass(frozen=True, kw_only=True)
class Routed:
    bytes: NDArray[np.float32]
    """[R, S]; what each rank put into its all_to_alls; nan where it is not known."""
    same_batches: bool
    """Whether the ranks have as many tokens each before the router deals them out."""


def routed_bytes(ranks: Sequence[RankSeries], steps: NDArray[np.int64]) -> Routed | None:
    """None: not all ranks call all_to_all in most of their steps."""
    if len(ranks) < 2 or not len(steps):
        return None
    found = np.full((len(ranks), len(steps)), np.nan, np.float32)
    for row, series in enumerate(ranks):
        if series.comm is None or not (series.comm["op"] == ALL_TO_ALL).any():
            return None
        own = series.comm[series.comm["op"] == ALL_TO_ALL]
        at = np.searchsorted(steps, own["step"].astype(np.int64))
        there = (at < len(steps)) & (steps[np.minimum(at, len(steps) - 1)] == own["step"])
        sums = np.bincount(at[there], own["bytes"][there].astype(np.float64), minlength=len(steps))
        found[row] = np.where(sums > 0, sums, np.nan)
    if (~np.isnan(found)).mean(axis=1).min() < thresholds.COMM_STEPS_SHARE:
        return None
    return Routed(bytes=found, same_batches=_same_batches(ranks))


def times_the_tokens(routed: Routed, culprits: Rows, others: Rows, at: slice) -> float:
    """How many times the bytes of the other rows the culprits' are, in the median step; 1: as many, or not known."""
    if not len(culprits) or not len(others):
        return 1.0
    own, peers = routed.bytes[culprits, at], routed.bytes[others, at]
    known = ~(np.isnan(own).any(axis=0) | np.isnan(peers).any(axis=0))
    if known.sum() < thresholds.MIN_STEPS:
        return 1.0
    return float(np.median(own[:, known].min(axis=0) / np.median(peers[:, known], axis=0)))


def _same_batches(ranks: Sequence[RankSeries]) -> bool:
    """Whether a good part of the large all_to_alls has one size on all ranks."""
    sizes = [_sizes(series) for series in ranks]
    common = set.intersection(*(set(own) for own in sizes))
    alike = large = 0
    for step in common:
        own = [of_rank[step] for of_rank in sizes]
        if len({len(one) for one in own}) > 1:
            continue
        calls = np.array(own, np.float64)
        most = calls.max(axis=0)
        counted = most >= SMALL_SHARE * most.max()
        large += int(counted.sum())
        alike += int((counted & (calls.min(axis=0) * thresholds.BYTES_ALIKE >= most)).sum())
    return large > 0 and alike >= thresholds.SAME_SIZE_SHARE * large


def _sizes(series: RankSeries) -> dict[int, list[int]]:
    """By step, of the all_to_alls that were kept one by one, in their order."""
    found: dict[int, list[int]] = {}
    if series.collectives is None:
        return found
    own = series.collectives[series.collectives["op"] == ALL_TO_ALL]
    for step, size in zip(own["step"].tolist(), own["bytes"].tolist(), strict=True):
        found.setdefault(step, []).append(size)
    return found
