"""From slots as they came to columns of new steps: in order, each once, with waiting booked as ``comm``.

Rows wait until a few thousand have come together (``LiveRun.settle``); then everything here is a handful of array
operations, however many frames they came in.  A step that a ring already has is passed over: an agent that resumed may
read twice, and the first counts, as it does when a run is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stepscope.records.phases import BACKWARD, COMM
from stepscope.records.slot import COLLECTIVE, COMM_RECORD, DEVICE, SLOT_BYTES, STEP
from stepscope.store.assemble import DEVICE_DTYPE, STEP_DTYPE

__all__ = ["Again", "Batch", "Taken", "gather"]

Floats = NDArray[np.float32]
LARGEST_STEP = 1 << 40
"""More steps than anybody makes: a number from here on is of another hand."""
_DDP = ("ddp_compute_ns", "ddp_comm_ns", "ddp_exposed_ns")


class Taken(Protocol):
    """Rows that the inbox took, or that a segment had."""

    @property
    def slots(self) -> NDArray[np.uint8]:
        """[n, 256]; ring by ring in the table's order."""

    @property
    def table(self) -> NDArray[Any]:
        """``wire.blocks.TABLE_FIELDS``; ``rows`` says how many of the slots are each ring's."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """Steps of an earlier batch whose waiting is known only now (DDP tells it in the step after)."""

    ring: NDArray[np.intp]
    step: NDArray[np.int64]
    ddp: dict[str, Floats]
    """By field of the slot."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """New steps, ordered by ring and step; one entry of each array a step."""

    ring: NDArray[np.intp]
    """Number in the registry."""
    step: NDArray[np.int64]
    rows: NDArray[Any]
    """dtype ``STEP_FIELDS``; ``phase_ns`` as recorded."""
    waited: Floats
    """Of the phase backward, what belongs to comm."""
    ddp: dict[str, Floats]
    """DDP's figures of each step itself, not of the one before; {} where there are none."""
    again: Again | None
    device_ring: NDArray[np.intp]
    device: NDArray[Any]
    """dtype ``DEVICE_FIELDS``."""
    exchange_ring: NDArray[np.intp]
    exchanges: NDArray[np.uint8]
    """[n, 256]; the slots that tell of collectives."""
    repeated: int
    """Rows that were there already, or that nobody can have made."""

    def part(self, chosen: NDArray[np.intp]) -> Batch:
        """Of the steps, those; everything else is left as it is."""
        if len(chosen) == len(self.step):
            return self
        return replace(
            self,
            ring=self.ring[chosen],
            step=self.step[chosen],
            rows=self.rows[chosen],
            waited=self.waited[chosen],
            ddp={name: column[chosen] for name, column in self.ddp.items()},
        )


def gather(taken: Sequence[tuple[NDArray[np.intp], Taken]], last_step: NDArray[np.int64]) -> Batch:
    """``taken``: rows with the registry's number of each ring of their table; ``last_step``: by that number.

    Quickest when the rings come in ascending order.
    """
    counts = [one.table["rows"].astype(np.intp) for _, one in taken]
    ring = np.concatenate([np.repeat(rings, own) for (rings, _), own in zip(taken, counts, strict=True)])
    slots = taken[0][1].slots if len(taken) == 1 else np.concatenate([one.slots for _, one in taken])
    everything: NDArray[Any] = np.ascontiguousarray(slots).view(STEP_DTYPE).reshape(-1)
    kinds = everything["kind"].copy()
    chosen = np.flatnonzero(kinds == STEP)
    if (np.diff(ring) < 0).any():
        chosen = chosen[np.argsort(ring[chosen], kind="stable")]
    order: Any = slice(None) if len(chosen) == len(ring) and (np.diff(chosen) == 1).all() else chosen
    fresh = _fresh(ring[order], everything["step"][order], last_step)
    kept: Any = order if fresh.all() else chosen[fresh]
    rows, own = everything[kept], ring[kept]
    step = rows["step"].astype(np.int64)
    ddp, waited, again = _booked(own, step, rows, last_step)
    is_device = kinds == DEVICE
    is_exchange = (kinds == COMM_RECORD) | (kinds == COLLECTIVE)
    return Batch(
        ring=own,
        step=step,
        rows=rows,
        waited=waited,
        ddp=ddp,
        again=again,
        device_ring=ring[is_device],
        device=slots[is_device].view(DEVICE_DTYPE).reshape(-1),
        exchange_ring=ring[is_exchange],
        exchanges=slots[is_exchange].reshape(-1, SLOT_BYTES),
        repeated=len(chosen) - len(rows),
    )


def _fresh(ring: NDArray[np.intp], step: NDArray[np.uint64], last_step: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which steps come after all that their ring had before them; ordered by ring."""
    if not len(ring):
        return np.zeros(0, np.bool_)
    known = step < LARGEST_STEP
    number = np.where(known, step, 0).astype(np.int64)
    # One ascending key over all rings, so that a single running maximum says what each ring has had so far.
    place = np.cumsum(np.concatenate(([0], np.diff(ring) != 0))).astype(np.int64) * (LARGEST_STEP + 1)
    key = np.where(known, place + number, place - 1)
    before = np.concatenate(([-1], np.maximum.accumulate(key)[:-1]))
    return known & (key > before) & (number > last_step[ring])


def _booked(
    ring: NDArray[np.intp], step: NDArray[np.int64], rows: NDArray[Any], last_step: NDArray[np.int64]
) -> tuple[dict[str, Floats], Floats, Again | None]:
    """What ``store.assemble.book_waiting`` does, as far as it can be done before the next step has come."""
    waited = np.zeros(len(rows), np.float32)
    told = rows["ddp_compute_ns"] > 0
    if not told.any():
        return {}, waited, None
    ddp = {name: rows[name].astype(np.float32) for name in _DDP}
    first = np.concatenate(([True], np.diff(ring) != 0))
    again = None
    if rows["ddp_exposed_ns"].any():  # on a GPU DDP samples itself, and what is read may be of any earlier step
        earlier = np.flatnonzero(first & told & (step > 0) & (last_step[ring] == step - 1))
        values = {name: column[earlier] for name, column in ddp.items()}
        again = Again(ring=ring[earlier], step=step[earlier] - 1, ddp=values)
        known = np.flatnonzero(~first[1:] & (np.diff(step) == 1) & told[1:])
        for column in ddp.values():
            column[known] = column[known + 1]
        waited = np.minimum(ddp["ddp_exposed_ns"], rows["phase_ns"][:, BACKWARD].astype(np.float32))
    return ddp, waited, again


def booked_phases(phase_ns: Floats, waited: Floats) -> None:
    """Move it, in place: ``phase_ns`` is [n, slots]."""
    phase_ns[:, BACKWARD] -= waited
    phase_ns[:, COMM] += waited
