"""What DDP's reducer exchanges inside backward, as its own logging and the setting of its buckets tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.robust import shortest
from stepscope.diagnosis.samples import LARGEST, number
from stepscope.records.series import RankSeries

__all__ = ["DDP_OP", "MIB", "Reducer", "find_reducers", "gradients_of", "has_reducer"]

Floats = NDArray[np.float64]

DDP_OP = "all_reduce (DDP)"
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Reducer:
    """DDP's all-reduce inside backward, in one group of data-parallel peers."""

    rows: NDArray[np.intp]
    group: str
    """What people call it, as the facts have it; empty: not known."""
    backwards: float
    """In a step."""
    buckets: int
    """As DDP laid them out; 0: not known."""
    buckets_bytes: tuple[int, ...]
    """Of the first ones."""
    bytes: int
    """Of all gradients; 0: not known."""
    exposed_ns: Floats
    """[S]; the least over the ranks; nan where it cannot be told, here and below."""
    span_ns: Floats
    """[S]; from the first bucket's start to the last one's end, the least over the ranks."""
    compute_ns: Floats
    """[S]; of the gradients, the mean over the ranks: what may hide an exchange."""
    exposed_by_row: Floats
    """As ``rows``: per steady step in which it could be told; nan where it never could."""
    span_by_row: Floats


def has_reducer(trained: Sequence[RankSeries]) -> bool:
    """Whether DDP told its figures step by step, and not just now and then (on a GPU)."""
    said = (np.count_nonzero(series.steps["ddp_comm_ns"]) / max(len(series.steps), 1) for series in trained)
    return any(share >= thresholds.COMM_STEPS_SHARE for share in said)


def find_reducers(
    trained: Sequence[RankSeries],
    steps: NDArray[np.int64],
    steady: NDArray[np.bool_],
    blocked_ns: Floats,
    peers: NDArray[np.intp],
) -> tuple[Reducer, ...]:
    found = []
    for group in np.unique(peers).tolist():
        said = {row: _said(trained[row], steps) for row in np.flatnonzero(peers == group).tolist()}
        rows = [row for row, (spans, _) in said.items() if (spans > 0).any()]
        if len(rows) < 2:
            continue
        spans, computes = (np.stack([said[row][which] for row in rows]) for which in (0, 1))
        spans[spans == 0] = np.nan
        exposed = np.where(np.isnan(spans), np.nan, blocked_ns[rows])
        found.append(
            Reducer(
                rows=np.array(rows, np.intp),
                backwards=float(np.median(trained[rows[0]].steps["micro_batches"])),
                **gradients_of(trained[rows[0]].facts.get("ddp")),
                group=_group_word(trained[rows[0]].facts.get("ddp")),
                exposed_ns=shortest(exposed),
                span_ns=shortest(spans),
                compute_ns=computes.mean(axis=0),
                exposed_by_row=_means(exposed[:, steady]),
                span_by_row=_means(spans[:, steady]),
            )
        )
    return tuple(found)


def _means(values: Floats) -> Floats:
    """[R]; over the steps in which there is one."""
    counts = (~np.isnan(values)).sum(axis=1)
    return np.where(counts > 0, np.nansum(values, axis=1) / np.maximum(counts, 1), np.nan)


def _said(series: RankSeries, steps: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """[S] each; how long DDP says that the exchange and the gradients took; 0 where it said nothing."""
    rows = series.steps
    place = np.searchsorted(rows["step"], steps)
    there = rows["step"][np.minimum(place, len(rows) - 1)] == steps
    at = np.where(there, place, 0)
    return np.where(there, rows["ddp_comm_ns"][at], 0.0), np.where(there, rows["ddp_compute_ns"][at], 0.0)


def _group_word(ddp: object) -> str:
    word = ddp.get("group") if isinstance(ddp, Mapping) else None
    return word if isinstance(word, str) else ""


def gradients_of(ddp: object) -> dict[str, Any]:
    """``buckets``, ``buckets_bytes`` and ``bytes``, as far as DDP's facts have them."""
    facts: Mapping[str, Any] = ddp if isinstance(ddp, Mapping) else {}
    said = facts.get("bucket_sizes_mb")
    sizes = (
        said if isinstance(said, list) and all(type(one) in (int, float) and 0 < one < LARGEST for one in said) else []
    )
    told = tuple(round(size * MIB) for size in sizes)
    buckets = max(int(number(facts, "buckets") or 0), len(told)) if told else 0
    gradient_mb = number(facts, "gradient_mb") or 0.0
    return {"buckets": buckets, "buckets_bytes": told, "bytes": max(round(gradient_mb * MIB), sum(told))}
