"""The tail reads what an agent writes: the same steps as the run has when it is opened, each once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.tail import Tail
from stepscope.records.series import RankSeries
from stepscope.ring import RingBatch
from stepscope.store.paths import EVENTS, SAMPLES, STEPS, segment_path
from stepscope.store.segments import SegmentWriter
from stepscope.store.sidecar import RingSidecar, write_sidecar
from stepscope.testing.cluster import Cluster
from stepscope.testing.feed import key_of, sidecar_of


def append(run_dir: Path, one: RankSeries, steps: range) -> None:
    writer = SegmentWriter(segment_path(run_dir, key_of(one)))
    own = one.steps[np.isin(one.steps["step"], steps)]
    writer.append(RingBatch(slots=[row.tobytes() for row in own], last_seq=steps.stop, lost=0, torn=0))


def test_everything_is_read_once_however_it_was_written(tmp_path: Path) -> None:
    (tmp_path / STEPS).mkdir()
    series = Cluster(ranks=3, steps=700).series()
    live = LiveRun()
    tail = Tail(tmp_path, live)
    assert tail.poll() == 0
    for one in series[:2]:
        write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(one, state="running")))
    for first in (0, 100, 400):
        for one in series:
            append(tmp_path, one, range(first, {0: 100, 100: 400, 400: 700}[first]))
        if first:
            while tail.poll():
                pass
        write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(series[2], state="running")))
    info = live.info()
    assert (info["rows"], info["rows_repeated"], info["rows_unknown"], info["step"]) == (2100, 0, 0, 699)
    said = live.steps(bins=1000)
    assert said["first"] == list(range(700))
    assert set(said["ranks"]) == {3}
    walls = np.array([one.steps["wall_ns"] for one in series]).astype(np.float32)
    assert [q[-1] for q in said["ns"]["wall"]] == np.round(walls.max(axis=0)).astype(int).tolist()
    assert live.ranks()["rank"] == [0, 1, 2]


def test_half_a_frame_and_half_a_line_wait(tmp_path: Path) -> None:
    (tmp_path / STEPS).mkdir()
    series = Cluster(ranks=1, steps=20).series()
    write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(series[0], state="running")))
    append(tmp_path, series[0], range(10))
    path = segment_path(tmp_path, key_of(series[0]))
    size = path.stat().st_size
    append(tmp_path, series[0], range(10, 20))
    whole = path.read_bytes()
    path.write_bytes(whole[: size + 40])
    event = json.dumps({"event": "note", "wall_ns": 1}).encode()
    (tmp_path / EVENTS).write_bytes(event + b"\n" + event[:5])
    live = LiveRun()
    tail = Tail(tmp_path, live)
    tail.poll()
    assert (live.planes.newest, len(live.events())) == (9, 1)
    path.write_bytes(whole)
    (tmp_path / EVENTS).write_bytes(event + b"\n" + event + b"\n")
    (tmp_path / SAMPLES).write_bytes(json.dumps({"kind": "host", "wall_ns": 5}).encode() + b"\n")
    tail.poll()
    assert (live.planes.newest, len(live.events())) == (19, 2)
    assert live.samples(kinds=["host"]) == [{"kind": "host", "wall_ns": 5}]


def test_a_rank_that_ended_is_seen(tmp_path: Path) -> None:
    (tmp_path / STEPS).mkdir()
    series = Cluster(ranks=2, steps=20).series()
    live = LiveRun()
    tail = Tail(tmp_path, live)
    for one in series:
        write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(one, state="running")))
        append(tmp_path, one, range(10))
    tail.poll()
    write_sidecar(tmp_path, RingSidecar.from_dict(sidecar_of(series[0], state="vanished")))
    append(tmp_path, series[1], range(10, 20))
    tail.poll()
    assert live.frontier == 19
    assert live.ranks()["state"] == ["vanished", "running"]
