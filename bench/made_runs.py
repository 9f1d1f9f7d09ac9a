"""Runs made of a synthetic cluster, in the files that an agent writes: such as are over, and such as go on.

    record(folder, "night", with_samples(Cluster(ranks=8, steps=600)))
    run = Feed(folder, "live", Cluster(ranks=4, steps=400))
    run.make(20)                        # its ranks make twenty steps

Benchmarks and tests of the hub and the page look at them; no process trains.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fakes.cluster import Cluster
from fakes.records import records_of

from stepscope.records.run_clock import process_start_ticks
from stepscope.records.series import RankSeries, RankState, RunData
from stepscope.ring import RingBatch
from stepscope.store.create import create_run
from stepscope.store.documents import RunStatus, end_run, read_meta, write_meta
from stepscope.store.file_io import append_jsonl
from stepscope.store.live.ring_files import FRAME_SLOTS, RingSidecar, SegmentWriter, write_sidecar
from stepscope.store.paths import EVENTS, SAMPLES, STACKS, segment_path
from stepscope.store.sealed.seal import seal

__all__ = ["WALL_NS", "Feed", "append_steps", "record", "sidecar_of"]

WALL_NS = 1_700_000_000_000_000_000
"""When they are said to have begun."""


def sidecar_of(series: RankSeries, *, heard_wall_ns: int = 1) -> RingSidecar:
    return RingSidecar(
        identity=series.identity,
        pid=series.identity.pid,
        start_ticks=1,
        anchor_mono_ns=series.anchor_mono_ns,
        anchor_wall_ns=series.anchor_wall_ns,
        phase_names=series.phase_names,
        state=series.state,
        live_phase=series.live_phase,
        live_since_ns=series.live_since_ns,
        live_step=len(series.steps),
        hook_failures=0,
        heard_wall_ns=heard_wall_ns,
        ended_wall_ns=series.ended_wall_ns,
    )


def append_steps(run_dir: Path, series: RankSeries, first: int, last: int, frame: int = FRAME_SLOTS // 2) -> None:
    """Steps ``first`` to before ``last`` with their device times, as the agent appends them, ``frame`` at a time."""
    writer = SegmentWriter(segment_path(run_dir, sidecar_of(series).key))
    steps, timed_steps = records_of(series)
    rows = steps[first:last]
    for at in range(0, len(rows), frame):
        part = rows[at : at + frame]
        timed = timed_steps["step"]
        device = timed_steps[np.searchsorted(timed, part["step"][0]) : np.searchsorted(timed, part["step"][-1]) + 1]
        device = device[np.isin(device["step"], part["step"])]
        numbers = np.concatenate([part["step"], device["step"]])
        both = [row.tobytes() for rows in (part, device) for row in rows]
        slots = [both[place] for place in np.argsort(numbers, kind="stable").tolist()]
        writer.append(RingBatch(slots=slots, last_seq=int(part["seq"][-1]), lost=0, torn=0))


def record(
    root: Path,
    name: str,
    run: RunData,
    *,
    sealed: bool = True,
    events: Sequence[dict[str, Any]] = (),
    stacks: Sequence[dict[str, Any]] = (),
) -> Path:
    """A run that is over, in ``root``."""
    run_dir = create_run(root, name, ["python", "train.py"], environ={}, sessions=root.parent / "sessions").run_dir
    write_meta(run_dir, {**read_meta(run_dir), "launcher": None})  # this very process would count as alive
    for series in run.ranks:
        append_steps(run_dir, series, 0, len(series.steps))
        write_sidecar(run_dir, sidecar_of(series))
    append_jsonl(run_dir / SAMPLES, run.samples)
    append_jsonl(run_dir / EVENTS, events)
    append_jsonl(run_dir / STACKS, stacks)
    (run_dir / "logs" / "rank-0.log").write_text("".join(f"line {i}\n" for i in range(100)))
    end_run(run_dir, exit_code=0, status="finished", wall_ns=WALL_NS + 100_000_000_000)
    if sealed:
        seal(run_dir)
    return run_dir


class Feed:
    """A run that goes on in ``root``; its ranks make steps when they are told to."""

    def __init__(self, root: Path, name: str, cluster: Cluster) -> None:
        made = create_run(root, name, ["python", "train.py"], environ={}, sessions=root.parent / "sessions")
        self.run_dir = made.run_dir
        parent = os.getppid()  # a process that is there while the test is: the hub's own would not count
        launcher = {"pid": parent, "start_ticks": process_start_ticks(parent)}
        write_meta(self.run_dir, {**read_meta(self.run_dir), "launcher": launcher})
        self.series = cluster.series()
        self.made = 0
        self._tell("running")

    def make(self, steps: int, *, frame: int = FRAME_SLOTS // 2) -> None:
        for series in self.series:
            append_steps(self.run_dir, series, self.made, self.made + steps, frame)
        self.made += steps
        self._tell("running")

    def say(self, event: str, **more: Any) -> None:
        line = {"schema": 1, "wall_ns": WALL_NS + self.made, "event": event, "host": "node0", **more}
        append_jsonl(self.run_dir / EVENTS, [line])

    def sample(self, lines: Sequence[dict[str, Any]]) -> None:
        append_jsonl(self.run_dir / SAMPLES, lines)

    def end(self, *, exit_code: int = 0, status: RunStatus = "finished") -> None:
        """What the launcher does last: every rank has ended, ``run.json`` says how, the run is sealed."""
        self._tell("exited")
        write_meta(self.run_dir, {**read_meta(self.run_dir), "launcher": None})
        end_run(self.run_dir, exit_code=exit_code, status=status, wall_ns=WALL_NS + 100_000_000_000)
        seal(self.run_dir)

    def _tell(self, state: RankState) -> None:
        for series in self.series:
            ended = series.ended_wall_ns if state == "exited" else None
            sidecar = sidecar_of(replace(series, state=state, ended_wall_ns=ended))
            write_sidecar(self.run_dir, replace(sidecar, live_step=self.made))
