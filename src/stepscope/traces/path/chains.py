"""Works of a stream, one after the other, each held up by the one before: what a walk goes down at one go.

A chain's head is a work that something else held up, or that comes after a collective, where walks stop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.columns import Ints

__all__ = ["Chains", "chains_of", "expanded"]


@dataclass(frozen=True, kw_only=True)
class Chains:
    order: Ints
    """Works by stream, then by start; a work's *place* is its index in this."""
    place: Ints
    """[work]"""
    head: list[int]
    """[work]; the first work of its chain."""
    low: Ints
    """[work]; the head's place."""
    start_ns: Ints
    """[places]"""
    line: Ints
    """[places]; which stream, ascending."""


def chains_of(stream: Ints, start_ns: Ints, follows: NDArray[np.bool_]) -> Chains:
    """``follows``: [work]; it was held up by the work before it on its stream, which is no collective."""
    order = np.argsort(stream, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    head = np.maximum.accumulate(np.where(follows[order], 0, np.arange(len(order)))) if len(order) else order
    return Chains(
        order=order,
        place=place,
        head=order[head][place].tolist(),
        low=head[place],
        start_ns=start_ns[order],
        line=np.cumsum(np.diff(stream[order], prepend=stream[order][:1]) != 0),
    )


def expanded(
    chains: Chains, end_ns: Ints, start_ns: Ints, until_ns: Ints, work: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Stretches of chains that end in ``work``, one row per work and one per delay before a work.

    Which stretch; the start and end; the work; whether it is the delay before it (1) or the work itself (0).
    """
    starts = chains.start_ns
    span = int(max(starts.max(initial=0), until_ns.max(initial=0))) + 2
    key = chains.line * span + starts
    top, low = chains.place[work], chains.low[work]
    first = np.clip(np.searchsorted(key, chains.line[top] * span + start_ns, side="right") - 1, low, top)
    last = np.clip(np.searchsorted(key, chains.line[top] * span + until_ns, side="left") - 1, low, top)
    count = last - first + 1
    of = np.repeat(np.arange(len(work)), count)
    at = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count) + first[of]
    own = chains.order[at]
    next_ns = np.where(at < last[of], starts[np.minimum(at + 1, len(starts) - 1)], until_ns[of])
    done_ns = np.where(at < last[of], np.minimum(end_ns[own], next_ns), next_ns)
    follower = chains.order[np.minimum(at + 1, len(starts) - 1)]
    which = np.concatenate([of, of])
    begins = np.maximum(np.concatenate([starts[at], done_ns]), start_ns[which])
    ends = np.concatenate([done_ns, next_ns])
    delay = np.repeat([0, 1], len(of))
    there = ends > begins
    return which[there], begins[there], ends[there], np.concatenate([own, follower])[there], delay[there]
