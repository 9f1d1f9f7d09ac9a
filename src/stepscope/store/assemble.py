"""From slots to the series of each rank: order, repeats and double claims.  Functions of their arguments, no I/O."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.records.phases import BACKWARD, COMM
from stepscope.records.series import RankSeries
from stepscope.records.slot import DEVICE, DEVICE_FIELDS, NOTE, NOTE_SLOT, STEP, STEP_FIELDS
from stepscope.store.attempts import Claim, settle_attempts
from stepscope.store.collect import RingRecords
from stepscope.store.exchanges import collective_rows, comm_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DEVICE_DTYPE", "STEP_DTYPE", "Assembled", "assemble_ranks", "book_waiting"]

STEP_DTYPE = np.dtype(STEP_FIELDS)
DEVICE_DTYPE = np.dtype(DEVICE_FIELDS)

_KIND_AT = np.dtype(STEP_FIELDS[:1]).itemsize
_RING_ONLY = ("head", "seq", "zero", "spare")
"""Bookkeeping of the ring; zero in a series, so that a run reads the same before and after it is sealed."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    series: list[RankSeries]
    """One per process, in order of attempt and rank."""
    notes: list[dict[str, Any]]
    """What users noted, as events."""
    notices: list[str]
    shown: list[tuple[int, int] | None]
    """Of each ring that was given, attempt and rank of its series; None: it is left out."""


def assemble_ranks(rings: Sequence[RingRecords], *, among: Sequence[RankSeries] = ()) -> Assembled:
    """``among``: what is settled already, to which these come."""
    notices: list[str] = []
    notes: list[dict[str, Any]] = []
    series: list[RankSeries] = []
    settled = _settle(rings, among)
    numbered = _number(settled, notices)
    for ring, rank in numbered:
        about = ring.about
        steps = book_waiting(_by_step(ring.slots, STEP, STEP_DTYPE))
        device_steps = _by_step(ring.slots, DEVICE, DEVICE_DTYPE)
        device_steps = device_steps[np.isin(device_steps["step"], steps["step"])]
        if ring.lost:
            notices.append(f"Rank {rank}: {ring.lost:,} records were overwritten before they could be read.")
        if ring.torn:
            notices.append(f"Rank {rank}: {ring.torn:,} records could not be read whole.")
        notes += _notes_of(ring, rank)
        series.append(
            RankSeries(
                identity=about.identity,
                rank=rank,
                state=about.state,
                phase_names=about.phase_names,
                steps=steps,
                device_steps=device_steps,
                anchor_mono_ns=about.anchor_mono_ns,
                anchor_wall_ns=about.anchor_wall_ns,
                live_phase=about.live_phase,
                live_since_ns=about.live_since_ns,
                lost=ring.lost,
                torn=ring.torn,
                hook_failures=about.hook_failures,
                ended_wall_ns=about.ended_wall_ns,
                facts=about.facts,
                groups=about.groups,
                comm=comm_rows(ring.slots, steps["step"], about.groups),
                collectives=collective_rows(ring.slots, steps["step"], about.groups),
            )
        )
    series.sort(key=lambda one: (one.identity.attempt, one.rank))
    pairs = {id(ring): (ring.about.identity.attempt, rank) for ring, rank in numbered}
    return Assembled(series=series, notes=notes, notices=notices, shown=[pairs.get(id(ring)) for ring in settled])


def book_waiting(steps: NDArray[Any]) -> NDArray[Any]:
    """What of a step's exchange of gradients came after their computing was waiting for peers: ``comm``.

    DDP works its figures out when the next iteration begins, so those read at the end of a step are of the step before.
    Of the last step there are none yet: it goes by those before it.
    """
    if not len(steps):
        return steps
    if not steps["ddp_exposed_ns"].any():
        return steps  # on a GPU DDP samples itself, and what is read may be of any earlier step
    known = np.flatnonzero((steps["step"][1:] == steps["step"][:-1] + 1) & (steps["ddp_compute_ns"][1:] > 0))
    for name in ("ddp_compute_ns", "ddp_comm_ns", "ddp_exposed_ns"):
        steps[name][known] = steps[name][known + 1]
    waited = np.minimum(steps["ddp_exposed_ns"], steps["phase_ns"][:, BACKWARD])
    steps["phase_ns"][:, BACKWARD] -= waited
    steps["phase_ns"][:, COMM] += waited
    steps["ddp_exposed_ns"] = 0
    return steps


def _notes_of(ring: RingRecords, rank: int) -> list[dict[str, Any]]:
    """The user's notes as events, each timed by the end of the last step recorded before it."""
    kinds = _words(ring.slots, _KIND_AT, "<u2")
    if not (kinds == NOTE).any():
        return []
    steps = _rows(ring.slots, STEP, STEP_DTYPE)
    about = ring.about
    events = []
    for slot in ring.slots[kinds == NOTE]:
        _, _, seq, step, length, said = NOTE_SLOT.unpack(slot.tobytes())
        text = said[:length].decode(errors="replace")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = {"text": text}
        before = int(np.searchsorted(steps["seq"], seq))
        at_ns = about.anchor_mono_ns
        if before:
            at_ns = int(steps["start_ns"][before - 1]) + int(steps["wall_ns"][before - 1])
        wall_ns = max(0, at_ns - about.anchor_mono_ns + about.anchor_wall_ns)
        who = {"rank": rank, "pid": about.pid, "key": about.key, "seq": seq}
        events.append({"schema": 1, "wall_ns": wall_ns, "event": "note", **who, "step": step, "values": values})
    return events


def _by_step(slots: NDArray[Any], kind: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    rows = _rows(slots, kind, dtype)
    _, first = np.unique(rows["step"], return_index=True)
    rows = rows[first]
    for name in _RING_ONLY:
        if name in (dtype.names or ()):
            rows[name] = np.zeros((), dtype[name])
    return rows


def _rows(slots: NDArray[Any], kind: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    chosen = slots[_words(slots, _KIND_AT, "<u2") == kind]  # a copy, and contiguous
    rows: NDArray[Any] = chosen.view(dtype).reshape(-1)
    return rows


def _words(slots: NDArray[Any], at: int, dtype: str) -> NDArray[Any]:
    width = np.dtype(dtype).itemsize
    return np.ascontiguousarray(slots[:, at : at + width]).view(dtype).reshape(-1)


def _settle(rings: Sequence[RingRecords], among: Sequence[RankSeries]) -> list[RingRecords]:
    """Each with the attempt that it belongs to instead of what its launcher counted."""
    attempts = settle_attempts([*(_claim(ring) for ring in rings), *map(_settled_claim, among)])
    return [
        replace(ring, about=replace(ring.about, identity=replace(ring.about.identity, attempt=attempt)))
        for ring, attempt in zip(rings, attempts, strict=False)
    ]


def _settled_claim(series: RankSeries) -> Claim:
    identity, steps = series.identity, series.steps
    last_ns = int(steps["start_ns"][-1]) + int(steps["wall_ns"][-1]) if len(steps) else series.anchor_mono_ns
    return Claim(
        rank=identity.rank,
        world_size=identity.world_size,
        host=identity.host,
        restarts=identity.attempt,
        began_ns=series.anchor_wall_ns,
        until_ns=series.ended_wall_ns or last_ns - series.anchor_mono_ns + series.anchor_wall_ns,
        active_ns=last_ns - series.anchor_mono_ns + series.anchor_wall_ns,
        made_steps=bool(len(steps)),
        in_order=series.state == "exited",
    )


def _claim(ring: RingRecords) -> Claim:
    about = ring.about
    return Claim(
        rank=about.identity.rank,
        world_size=about.identity.world_size,
        host=about.identity.host,
        restarts=about.identity.attempt,
        began_ns=about.anchor_wall_ns,
        until_ns=_until_ns(ring),
        active_ns=_active_ns(ring),
        made_steps=_has_steps(ring),
        in_order=about.state == "exited",
    )


def _until_ns(ring: RingRecords) -> int | None:
    """When its process ended; else when it was last known to live, if it is not known to live now."""
    about = ring.about
    if about.ended_wall_ns is not None:
        return about.ended_wall_ns
    if about.state in ("starting", "running"):
        return about.heard_wall_ns or None  # without, the ring itself was read: its process is here
    return max(about.heard_wall_ns, _active_ns(ring))


def _active_ns(ring: RingRecords) -> int:
    """When it ended its last step or entered its last phase."""
    about, steps = ring.about, _rows(ring.slots, STEP, STEP_DTYPE)
    last_ns = int(steps["start_ns"][-1]) + int(steps["wall_ns"][-1]) if len(steps) else 0
    return max(last_ns, about.live_since_ns) - about.anchor_mono_ns + about.anchor_wall_ns


def _number(rings: Sequence[RingRecords], notices: list[str]) -> list[tuple[RingRecords, int]]:
    """Give every process its rank; of two that claim the same one in the same attempt the second gets a free number.

    A process without a step that claims a taken rank is a helper of that rank (it inherited its environment) and is
    left out.
    """
    claims = sorted(rings, key=lambda ring: (not _has_steps(ring), ring.about.anchor_wall_ns, ring.about.pid))
    taken: set[tuple[int, int]] = set()
    claimed = {(ring.about.identity.attempt, ring.about.identity.rank) for ring in rings}
    numbered = []
    for ring in claims:
        attempt, rank = ring.about.identity.attempt, ring.about.identity.rank
        if (attempt, rank) in taken:
            if not _has_steps(ring):
                continue
            wanted, rank = rank, rank + 1
            while (attempt, rank) in taken or (attempt, rank) in claimed:
                rank += 1
            notices.append(f"Process {ring.about.pid} also said it was rank {wanted}; it is shown as rank {rank}.")
        taken.add((attempt, rank))
        numbered.append((ring, rank))
    return numbered


def _has_steps(ring: RingRecords) -> bool:
    return bool((_words(ring.slots, _KIND_AT, "<u2") == STEP).any())
