"""Runs for the hub to answer for: made from a synthetic cluster, in the very files that an agent writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.records.series import RankSeries, RunData
from stepscope.ring import RingBatch
from stepscope.store.create import create_run
from stepscope.store.jsonl import append_jsonl
from stepscope.store.meta import end_run
from stepscope.store.paths import EVENTS, SAMPLES, STACKS, segment_path
from stepscope.store.seal import seal
from stepscope.store.segments import FRAME_SLOTS, SegmentWriter
from stepscope.store.sidecar import RingSidecar, write_sidecar
from stepscope.testing.cluster import Cluster
from stepscope.testing.samples import with_samples

Record = Callable[..., Path]


def _sidecar(series: RankSeries) -> RingSidecar:
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
        heard_wall_ns=1,
        ended_wall_ns=series.ended_wall_ns,
    )


def _write_rows(run_dir: Path, series: RankSeries, first: int, last: int) -> None:
    """Steps ``first`` to before ``last``, as the agent appends them; the sequence number is the step's own, plus one."""
    writer = SegmentWriter(segment_path(run_dir, _sidecar(series).key))
    rows = series.steps[first:last]
    for at in range(0, len(rows), FRAME_SLOTS):
        part = rows[at : at + FRAME_SLOTS]
        slots = [row.tobytes() for row in part]
        writer.append(RingBatch(slots=slots, last_seq=int(part["seq"][-1]), lost=0, torn=0))


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """``record(cluster, name, …)`` → its run directory, under ``tmp_path/runs``."""

    def record(
        cluster: Cluster | RunData,
        name: str = "demo",
        *,
        end: bool = True,
        sealed: bool = False,
        events: Sequence[dict[str, Any]] = (),
        stacks: Sequence[dict[str, Any]] = (),
        last: int | None = None,
        root: Path | None = None,
    ) -> Path:
        run = with_samples(cluster, every_s=0.5) if isinstance(cluster, Cluster) else cluster
        made = create_run(
            root or tmp_path / "runs", name, ["python", "train.py"], environ={}, sessions=tmp_path / "sessions"
        )
        for series in run.ranks:
            _write_rows(made.run_dir, series, 0, len(series.steps) if last is None else last)
            write_sidecar(made.run_dir, _sidecar(series))
        append_jsonl(made.run_dir / SAMPLES, run.samples)
        append_jsonl(made.run_dir / EVENTS, events)
        append_jsonl(made.run_dir / STACKS, stacks)
        (made.run_dir / "logs" / "rank-0.log").write_text("".join(f"line {i}\n" for i in range(100)))
        if end:
            end_run(made.run_dir, exit_code=0, status="finished", wall_ns=1_700_000_100_000_000_000)
        if sealed:
            seal(made.run_dir)
        meta = json.loads((made.run_dir / "run.json").read_bytes())
        meta["launcher"] = None  # this process would count as one that is alive
        (made.run_dir / "run.json").write_text(json.dumps(meta))
        return made.run_dir

    return record
