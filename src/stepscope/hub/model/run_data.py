"""The last steps of some ranks as a ``RunData``: what the rules of a finished run read, made from the live model.

Two halves.  ``snapshot`` copies what is needed and is quick: it runs where rows are taken in.  ``run_data_of`` builds
records from the copy, parses lines and reads the few files there are: it runs in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.hub.model.lines import parse_raw
from stepscope.hub.model.live_run import LiveRun
from stepscope.records.collectives import ProcessGroup
from stepscope.records.hang import HangRecord
from stepscope.records.identity import RankIdentity
from stepscope.records.phases import OTHER, PHASE_SLOTS
from stepscope.records.series import RankError, RankSeries, RankState, RunData
from stepscope.records.slot import DEVICE, SLOT_BYTES, STEP
from stepscope.store.assemble import DEVICE_DTYPE, STEP_DTYPE
from stepscope.store.exchanges import collective_rows, comm_rows
from stepscope.store.failures import Numbers, read_errors
from stepscope.store.nodes import clock_offsets, read_nodes
from stepscope.store.stacks import checked_stacks
from stepscope.store.standstills import read_standstills

__all__ = ["Snapshot", "run_data_of", "snapshot"]

_COPIED = (
    *("start_ns", "wall_ns", "between_ns", "flags", "allocated", "reserved", "peak_allocated"),
    *("ddp_compute_ns", "ddp_comm_ns", "micro_batches", "forwards", "batches"),
)
SAMPLED_NODES = 64
"""So many nodes' samples are parsed for one look."""
Line = tuple[str, bytes, int]


@dataclass(frozen=True, kw_only=True)
class RankCopy:
    ring: int
    identity: RankIdentity
    rank: int
    state: RankState
    phase_names: tuple[str, ...]
    anchor_mono_ns: int
    anchor_wall_ns: int
    live_phase: int
    live_since_ns: int
    lost: int
    torn: int
    hook_failures: int
    ended_wall_ns: int | None
    facts: dict[str, Any]
    groups: tuple[ProcessGroup, ...]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    name: str
    run_dir: Path | None
    meta: dict[str, Any]
    step: int
    """The last one that all live ranks have made."""
    of_ranks: int
    steps: NDArray[np.int64]
    ranks: tuple[RankCopy, ...]
    have: NDArray[np.bool_]
    """[step, rank], as everything below."""
    held: dict[str, NDArray[Any]]
    exchanges: tuple[tuple[NDArray[np.intp], NDArray[np.uint8]], ...]
    events: tuple[dict[str, Any], ...]
    samples: tuple[Line, ...]
    stacks: tuple[Line, ...]


def snapshot(live: LiveRun, columns: NDArray[np.intp]) -> Snapshot:
    """Of these columns; call it where rows are taken in."""
    live.settle()
    planes = live.planes
    steps = planes.complete()
    block = np.ix_(planes.row_of(steps), columns)
    ranks = tuple(_copy(live, ring) for ring in live.ring_of[columns].tolist())
    of = live.registry.of
    nodes = [live.registry.nodes[node] for node in np.unique(of["node"][live.ring_of[columns]])]
    every = max(1, -(-len(nodes) // SAMPLED_NODES))
    return Snapshot(
        name=live.name,
        run_dir=live.run_dir,
        meta=dict(live.meta),
        step=live.frontier,
        of_ranks=planes.columns,
        steps=steps,
        ranks=ranks,
        have=planes.have[block],
        held={name: plane[block] for name, plane in planes.held.items()},
        exchanges=live.exchanges.kept(planes.oldest) if len(columns) == planes.columns else (),
        events=tuple(live.events(0, limit=EVENTS)),
        samples=tuple(live.said.raw("samples.jsonl", nodes[::every])),
        stacks=tuple(live.said.raw("stacks.jsonl", nodes[::every])),
    )


def _copy(live: LiveRun, ring: int) -> RankCopy:
    registry, of = live.registry, live.registry.of
    offset_ns = live.offsets_ns.get(registry.nodes[int(of["node"][ring])], 0)
    ended = int(of["ended_wall_ns"][ring])
    numbers: dict[str, Any] = {name: int(of[name][ring]) for name in _NUMBERS}
    return RankCopy(
        ring=ring,
        identity=registry.identity(ring),
        rank=int(of["shown"][ring]),
        state=registry.state(ring),
        phase_names=registry.phase_names(ring),
        anchor_wall_ns=int(of["anchor_wall_ns"][ring]) - offset_ns,
        ended_wall_ns=ended - offset_ns if ended else None,
        facts=registry.facts(ring),
        groups=registry.groups(ring),
        **numbers,
    )


_NUMBERS = ("anchor_mono_ns", "live_phase", "live_since_ns", "lost", "torn", "hook_failures")
EVENTS = 2000


def run_data_of(copy: Snapshot) -> RunData:
    """Records again, as a run's loader makes them."""
    steps = _step_rows(copy)
    device = _device_rows(copy)
    exchanges = _by_ring(copy.exchanges)
    series = []
    for place, rank in enumerate(copy.ranks):
        there = copy.have[:, place]
        own = steps[place] if there.all() else steps[place][there]
        slots = exchanges.get(rank.ring)
        known = {name: getattr(rank, name) for name in _AS_THEY_ARE}
        series.append(
            RankSeries(
                **known,
                steps=own,
                device_steps=device[place][copy.held["device"][:, place]] if device is not None else _NO_DEVICE,
                comm=None if slots is None else comm_rows(slots, own["step"], rank.groups),
                collectives=None if slots is None else collective_rows(slots, own["step"], rank.groups),
            )
        )
    numbers = Numbers(series, str(copy.meta.get("host")))
    errors: tuple[RankError, ...] = ()
    hangs: tuple[HangRecord, ...] = ()
    if copy.run_dir is not None:
        nodes = read_nodes(copy.run_dir)
        errors, _ = read_errors(copy.run_dir, numbers, clock_offsets(nodes))
        hangs, _ = read_standstills(copy.run_dir, series, errors, nodes)
    stacks, _ = checked_stacks(parse_raw(copy.stacks), numbers.of)
    return RunData(
        name=copy.name,
        path="" if copy.run_dir is None else str(copy.run_dir),
        meta=copy.meta,
        ranks=tuple(series),
        samples=tuple(_as_stored(line) for line in parse_raw(copy.samples)),
        events=copy.events,
        errors=errors,
        stacks=stacks,
        hangs=hangs,
    )


def _as_stored(line: Mapping[str, Any]) -> dict[str, Any]:
    """As its agent wrote it: rules look for the samples of a rank by the name of its host."""
    own = {"node": line["host"] or line["node"]}
    return {key: value for key, value in line.items() if value is not None and key != "host"} | own


_AS_THEY_ARE = (
    *("identity", "rank", "state", "phase_names", "anchor_mono_ns", "anchor_wall_ns", "live_phase", "live_since_ns"),
    *("lost", "torn", "hook_failures", "ended_wall_ns", "facts", "groups"),
)
_NO_DEVICE: NDArray[Any] = np.zeros(0, DEVICE_DTYPE)


def _step_rows(copy: Snapshot) -> NDArray[Any]:
    """[rank, step] of the steps' dtype."""
    rows = np.zeros((len(copy.ranks), len(copy.steps)), STEP_DTYPE)
    rows["kind"] = STEP
    rows["step"] = copy.steps
    for name in _COPIED:
        if name in copy.held:
            rows[name] = copy.held[name].T
    _put_phases(rows["phase_ns"], "phase", copy)
    return rows


def _device_rows(copy: Snapshot) -> NDArray[Any] | None:
    if "device" not in copy.held:
        return None
    rows = np.zeros((len(copy.ranks), len(copy.steps)), DEVICE_DTYPE)
    rows["kind"] = DEVICE
    rows["step"] = copy.steps
    rows["flags"] = copy.held["flags"].T if "flags" in copy.held else 0
    _put_phases(rows["phase_ns"], "device", copy)
    rows["wall_ns"] = rows["phase_ns"].sum(axis=2)
    return rows


def _put_phases(out: NDArray[Any], kind: str, copy: Snapshot) -> None:
    """Back into the slot that each rank has for a phase; out is [rank, step, slot]."""
    given: dict[tuple[str, ...], list[int]] = {}
    for place, rank in enumerate(copy.ranks):
        given.setdefault(rank.phase_names, []).append(place)
    for names, places in given.items():
        own: Any = places if len(given) > 1 else slice(None)
        for slot in range(PHASE_SLOTS):
            plane = copy.held.get(f"{kind}:{names[slot]}") if names[slot] or slot == OTHER else None
            if plane is not None:
                out[own, :, slot] = plane[:, own].T


def _by_ring(kept: Sequence[tuple[NDArray[np.intp], NDArray[np.uint8]]]) -> dict[int, NDArray[np.uint8]]:
    if not kept:
        return {}
    ring = np.concatenate([own for own, _ in kept])
    slots = np.concatenate([own for _, own in kept]).reshape(-1, SLOT_BYTES)
    order = np.argsort(ring, kind="stable")
    rings, first = np.unique(ring[order], return_index=True)
    return dict(zip(rings.tolist(), np.split(slots[order], first[1:]), strict=True))
