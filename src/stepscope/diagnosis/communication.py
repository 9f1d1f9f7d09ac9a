"""What the ranks exchange: by process group and operation, how much, how long the host was blocked, and who came last.

Two tables.  *Flows* (``communication_flows.py``) sum up every step by group and operation.  *Arrivals*
(``communication_arrivals.py``) compare the ranks in the collectives that were kept one by one.  DDP's reducer calls no
function that could be watched; what it did is known from its own logging and from the setting of its buckets, and
stands beside the flows as a *reducer* (``communication_ddp.py``).

Of what a rank is blocked, only what every rank of the group has is the exchange itself; the rest is waiting for a rank.
The least over the ranks is therefore taken step by step.

On NCCL the host sees nothing of this.  There the times are the device's own, of the kernels on NCCL's stream
(``FLAG_DEVICE``): how long a collective took is known, and how much of it was waiting for a rank; what of it held up
the computation is in the device's phase ``comm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.communication_arrivals import Arrivals, align
from stepscope.diagnosis.communication_ddp import Reducer, find_reducers, has_reducer
from stepscope.diagnosis.communication_flows import Flow, FlowSums, Group, GroupNumbers, Measured
from stepscope.records.phases import COMM
from stepscope.records.series import RankSeries

__all__ = ["Communication", "build_communication"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Communication:
    groups: tuple[Group, ...]
    flows: tuple[Flow, ...]
    reducers: tuple[Reducer, ...]
    arrivals: Arrivals
    measured: Measured | None
    """Of times on the device; None: there are none."""

    @cached_property
    def siblings(self) -> list[list[int]]:
        """Groups for the same purpose that share no rank, as places in ``groups``: the columns of a mesh, say."""
        alike: dict[tuple[str, str, int, bool], list[int]] = {}
        for place, group in enumerate(self.groups):
            if group.whole and group.timed:
                alike.setdefault((group.kind, group.description, group.size, group.device), []).append(place)
        return [places for places in alike.values() if len(places) > 1 and self._disjoint(places)]

    def _disjoint(self, places: Sequence[int]) -> bool:
        rows = [row for place in places for row in self.groups[place].rows]
        return len(set(rows)) == len(rows)


def build_communication(
    trained: Sequence[RankSeries],
    steps: NDArray[np.int64],
    steady: NDArray[np.bool_],
    phase_ns: Floats,
    peers: NDArray[np.intp],
) -> Communication | None:
    """None: one rank, or nothing was seen.  ``phase_ns`` [P, R, S], ours first; ``peers`` [R]: as ``Window.groups``."""
    if len(trained) < 2 or not steady.any():
        return None
    numbering = GroupNumbers(trained)
    flows = FlowSums(numbering, steps, steady)
    blocked_ns = np.zeros(phase_ns.shape[1:]) if has_reducer(trained) else None
    for row, series in enumerate(trained):
        seen = flows.add(row, series)
        if blocked_ns is not None:
            blocked_ns[row] = np.maximum(phase_ns[COMM, row] - seen, 0.0)
    reducers = () if blocked_ns is None else find_reducers(trained, steps, steady, blocked_ns, peers)
    if not flows.seen and not reducers:
        return None
    groups = numbering.groups(flows.on_device)
    aligned = np.array([group.whole and group.timed for group in groups], np.bool_)
    on_device = np.array([group.device for group in groups], np.bool_)
    arrivals = align(trained, steps, steady, numbering.by_slot, aligned, on_device)
    return Communication(
        groups=groups,
        flows=flows.done(groups),
        reducers=reducers,
        arrivals=arrivals,
        measured=flows.measured(groups),
    )
