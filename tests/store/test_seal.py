"""Sealing: the same run afterwards, small, and never half of one."""

from __future__ import annotations

import contextvars
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rings import write_device_step, write_step, write_steps

from stepscope.errors import NotARun, RunError, RunUnwritable
from stepscope.records.steps import STEP, STEP_SLOT
from stepscope.ring import RingBatch, RingState
from stepscope.ring.layout import MIN_CAPACITY
from stepscope.store import file_io
from stepscope.store.create import RunPaths
from stepscope.store.documents import end_run, read_meta, write_meta
from stepscope.store.file_io import append_jsonl
from stepscope.store.load import open_run
from stepscope.store.sealed import parquet, samples, seal

SAMPLES = [
    {
        "wall_ns": 1,
        "mono_ns": 2,
        "node": "a",
        "kind": "host",
        "cpu_percent": 12.5,
        "cpu_count": 2,
        "mem_total": 1 << 40,
    },
    {"wall_ns": 3, "node": "a", "kind": "process", "pid": 4, "rank": 0, "rss": 5, "threads": 6, "log_bytes": 7},
    {
        "wall_ns": 5,
        "kind": "gpu",
        "index": 0,
        "uuid": "GPU-1",
        "name": "H",
        "throttle_reasons": ["sw_power_cap", "hw_slowdown"],
    },
    {"wall_ns": 5, "kind": "gpu", "index": 1, "throttle_reasons": [], "util_percent": 100, "power_w": 1 << 60},
    {"wall_ns": 7, "kind": 3, "rss": 1.5, "index": 1 << 70, "new": {"a": [1]}, "extra": "x", "name": "a\x00b\ud800"},
]


FACTS = {"peers": [[0, 4, 2]], "loader": {"num_workers": 2, "prefetch_factor": None}, "autocast": None, "threads": 3}


@pytest.fixture
def run(paths: RunPaths, rings: Any, drain: Callable[..., Any]) -> Path:
    """A run with something of everything; sealed, it must read the same."""
    first = rings(0, device="cuda", device_timed=True)
    first.set_phase_name(9, "augment")
    first.set_phase_name(10, "Loss")
    first.ring.set_facts(FACTS)
    for step in range(20):
        write_step(first, step, flags=step % 4)
        if step % 3 == 0:
            write_device_step(first, step)
    first.note(3, b'{"lr":0.1}')
    second = rings(1, capacity=MIN_CAPACITY)
    second.set_phase_name(9, "loss")
    second.set_phase_name(11, "augment")
    write_steps(second, 400)
    user = [0] * 16
    user[9], user[11], user[12] = 5, 6, (1 << 64) - 1
    odd = STEP_SLOT.pack(STEP, 0, 1, 30, 1, 2, *user, 0, 0, 0, 1, 1, 8, 9, 1, 0, 7, 0)
    drain(rings(5), ended=8).append(RingBatch(slots=[odd], last_seq=9, lost=0, torn=0))
    write_steps(rings(0, attempt=1), 2)
    first.set_state(RingState.EXITED)
    drain(first, limit=7)
    drain(second)
    append_jsonl(paths.run_dir / "samples.jsonl", SAMPLES)
    append_jsonl(paths.run_dir / "events.jsonl", [{"schema": 1, "wall_ns": 1, "event": "rank_start", "rank": 0}])
    (paths.run_dir / "errors" / "1.json").write_text(json.dumps({"pid": 1, "rank": 1, "type": "E", "message": "m"}))
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    return paths.run_dir


def test_a_sealed_run_reads_exactly_the_same(run: Path, plain: Any) -> None:
    before = open_run(run)
    seal.seal(run)
    after = open_run(run)
    assert plain(after) == plain(before)
    assert after.meta["sealed"] is True
    assert len(before.ranks) == 4
    assert [series.facts for series in after.ranks] == [FACTS, {}, {}, {}]
    assert before.samples == tuple(SAMPLES)
    assert sorted(path.name for path in run.iterdir()) == [
        *[
            ".lock",
            "errors",
            "events.jsonl",
            "logs",
            "ranks.json",
            "rings",
            "run.json",
            "samples.parquet",
            "steps.parquet",
        ]
    ]
    assert list((run / "rings").iterdir()) == []


def test_time_between_steps_is_kept_and_older_runs_have_none(run: Path) -> None:
    """``between_ns`` came later than the first runs: their files lack the column."""
    seal.seal(run)
    assert [sum(rank.steps["between_ns"].tolist()) for rank in open_run(run).ranks] == [0, 0, 7, 0]
    sealed, older = run / "steps.parquet", run / "older.parquet"
    duckdb.sql(f"COPY (SELECT * EXCLUDE between_ns FROM read_parquet('{sealed}')) TO '{older}' (FORMAT parquet)")
    older.replace(sealed)
    assert [sum(rank.steps["between_ns"].tolist()) for rank in open_run(run).ranks] == [0, 0, 0, 0]


def test_sealing_frees_the_session(run: Path, paths: RunPaths) -> None:
    (paths.session / "agent.lock").write_text("")
    seal.seal(run)
    assert not paths.session.exists()
    assert paths.session.parent.exists()


def test_sealing_again_changes_nothing(run: Path) -> None:
    seal.seal(run)
    before = {path: (path.read_bytes(), path.stat().st_ino) for path in run.iterdir() if path.is_file()}
    seal.seal(run)
    assert {path: (path.read_bytes(), path.stat().st_ino) for path in run.iterdir() if path.is_file()} == before


def test_an_empty_run_can_be_sealed(paths: RunPaths, plain: Any) -> None:
    end_run(paths.run_dir, exit_code=1, status="failed", wall_ns=9)
    before = open_run(paths.run_dir)
    seal.seal(paths.run_dir)
    assert plain(open_run(paths.run_dir)) == plain(before)
    assert before.ranks == ()


def test_a_ring_we_cannot_read_stays(run: Path, paths: RunPaths) -> None:
    (paths.session / "9.ring").write_bytes(b"STEPRING" + b"\x63" + bytes(4000))
    seal.seal(run)
    assert sorted(path.name for path in paths.session.iterdir()) == ["9.ring", "run"]
    assert any("ring layout 99" in notice for notice in open_run(run).notices)


def test_a_run_whose_processes_run_is_left_alone(paths: RunPaths, rings: Any, bystander: int) -> None:
    write_steps(rings(0, pid=bystander), 2)
    with pytest.raises(RunError, match="its processes are still running"):
        seal.seal(paths.run_dir)
    assert not (paths.run_dir / "steps.parquet").exists()


def test_what_is_no_run_is_not_sealed(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        seal.seal(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.few(3)
@pytest.mark.parametrize("facts", [None, 7, [], "x", {"loader": 3, "threads": "2"}, {"unheard": {}}], ids=str)
def test_sealed_facts_of_another_hand_are_none(run: Path, facts: Any) -> None:
    seal.seal(run)
    about = json.loads((run / "ranks.json").read_text())
    for rank in about["ranks"]:
        rank["facts"] = facts
    (run / "ranks.json").write_text(json.dumps(about))
    assert [series.facts for series in open_run(run).ranks] == [{}] * 4


def test_a_run_sealed_before_there_were_facts_still_opens(run: Path) -> None:
    seal.seal(run)
    about = json.loads((run / "ranks.json").read_text())
    for rank in about["ranks"]:
        del rank["facts"]
    (run / "ranks.json").write_text(json.dumps(about))
    assert [series.facts for series in open_run(run).ranks] == [{}] * 4


class Killed(BaseException):
    """What a SIGKILL is to the code: no except clause of ours sees it."""


KILL_AT = [
    (samples, "write_samples", 1),
    *[(file_io, "fsync_file", times) for times in range(1, 8)],
    (file_io, "write_bytes", 1),
    (file_io, "write_bytes", 2),
    *[(Path, "replace", times) for times in range(1, 9)],
    (Path, "rename", 1),
    *[(file_io, "fsync_folder", times) for times in range(1, 6)],
    (seal, "write_meta", 1),
    (seal.shutil, "rmtree", 2),
    (seal.shutil, "rmtree", 3),
    *[(Path, "unlink", times) for times in range(1, 5)],
    (Path, "rmdir", 1),
    (Path, "rmdir", 2),
]
"""Who, what and at which call: everything that a seal does to the disk."""


@pytest.mark.few(5)
@pytest.mark.faults
@pytest.mark.parametrize(
    "before", [pytest.param(True, id="before"), pytest.param(False, id="after", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(
    ("owner", "name", "times"),
    [
        pytest.param(*kill, id=f"{kill[1]}-{kill[2]}", marks=[pytest.mark.soak] if place % 3 else [])
        for place, kill in enumerate(KILL_AT)
    ],
)
def test_killed_at_any_point_nothing_is_lost(
    run: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, times: int, before: bool, plain: Any
) -> None:
    """Stop before or after the n-th call of each thing that touches the disk; the run opens the same, and seals."""
    expected = plain(open_run(run))
    real = getattr(owner, name)
    calls = []

    def dies(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if before and len(calls) == times:
            raise Killed
        result = real(*args, **kwargs)
        if len(calls) == times:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        with pytest.raises(Killed):
            seal.seal(run)
    assert plain(open_run(run)) == expected
    seal.seal(run)
    assert plain(open_run(run)) == expected
    assert not (run / "steps").exists()
    assert not (run / "samples.jsonl").exists()


@pytest.mark.faults
def test_what_does_not_read_back_the_same_is_not_sealed(run: Path, monkeypatch: pytest.MonkeyPatch, plain: Any) -> None:
    expected = plain(open_run(run))
    real = parquet.to_columns

    def flips(*args: Any) -> Any:
        columns = real(*args)
        columns["wall_ns"][3] ^= 1
        return columns

    with monkeypatch.context() as patch, pytest.raises(RunUnwritable, match="do not read back the same"):
        patch.setattr(parquet, "to_columns", flips)
        seal.seal(run)
    assert plain(open_run(run)) == expected


@pytest.mark.faults
def test_a_folder_that_cannot_be_written_is_one_clear_line(run: Path) -> None:
    (run / ".sealing").write_text("in the way")
    with pytest.raises(RunUnwritable, match=r"cannot seal .*: File exists"):
        seal.seal(run)


def noisy_steps(count: int, rng: random.Random) -> RingBatch:
    start_ns = 10**14
    slots = []
    for step in range(count):
        phases = [0] * 16
        for slot, mean in ((0, 60e3), (1, 200e3), (2, 30e3), (3, 400e3), (4, 700e3), (5, 90e3), (6, 150e3)):
            phases[slot] = int(mean * rng.lognormvariate(0, 0.15) * (8 if rng.random() < 0.01 else 1))
        wall_ns = sum(phases)
        # As in a ring: a record ends a dozen words after the one before it, and not always the same number.
        seq = 17 * (step + 1) + rng.randrange(3)
        between_ns = int(phases[0] * rng.uniform(0.3, 0.7))
        rest = (0, 0, 0, 1, 1, 0, 0, 1, 0, between_ns, 0)
        slots.append(STEP_SLOT.pack(STEP, 0, seq, step, start_ns, wall_ns, *phases, *rest))
        start_ns += wall_ns
    return RingBatch(slots=slots, last_seq=17 * count + 3, lost=0, torn=0)


def test_a_noisy_run_takes_little_room(paths: RunPaths, rings: Any, drain: Callable[..., Any]) -> None:
    """Heavy-tailed noise in every phase of a CPU run, four ranks: at most 40 bytes a rank and step."""
    rng = random.Random(7)
    for rank in range(4):
        drain(rings(rank), ended=8).append(noisy_steps(1500, rng))
    running = sum(path.stat().st_size for path in (paths.run_dir / "steps").iterdir()) / 6000
    end_run(paths.run_dir, exit_code=0, status="finished")
    seal.seal(paths.run_dir)
    sealed = sum((paths.run_dir / name).stat().st_size for name in ("steps.parquet", "ranks.json")) / 6000
    assert running < 40
    assert sealed < 30


@pytest.fixture
def sealed(run: Path) -> Path:
    seal.seal(run)
    return run


@pytest.mark.parametrize("name", ["steps.parquet", "samples.parquet", "ranks.json"])
def test_a_sealed_run_that_lost_a_file_says_so(sealed: Path, name: str) -> None:
    (sealed / name).unlink()
    with pytest.raises(NotARun, match="is damaged: part of it is missing"):
        open_run(sealed)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["steps.parquet", "samples.parquet", "ranks.json"])
@pytest.mark.parametrize("size", [0, 10, 200])
def test_a_sealed_run_that_was_cut_says_so(sealed: Path, name: str, size: int) -> None:
    (sealed / name).write_bytes((sealed / name).read_bytes()[:size])
    with pytest.raises(NotARun, match="damaged") as caught:
        open_run(sealed)
    assert "\n" not in str(caught.value)


FUZZ = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(at=st.integers(0, 1 << 16), change=st.binary(min_size=1, max_size=6))
def test_fuzz_ranks_json(sealed: Path, at: int, change: bytes) -> None:
    path = sealed / "ranks.json"
    good = path.read_bytes()
    at %= len(good)
    path.write_bytes(good[:at] + change + good[at + len(change) :])
    try:
        open_run(sealed)
    except NotARun:
        pass
    path.write_bytes(good)


def test_another_machines_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied elsewhere, a run is what its files say: no process of this machine is one of its."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="elsewhere"))
    data = open_run(run)
    assert [series.state for series in data.ranks[:2]] == ["exited", "running"]


def test_sealed_is_not_believed_without_a_reason(run: Path) -> None:
    write_meta(run, {**read_meta(run), "sealed": "yes"})
    assert len(open_run(run).ranks) == 4


def test_a_spool_is_never_sealed(paths: RunPaths) -> None:
    """It is on its way to the run that it belongs to."""
    assert seal.needs_seal(paths.run_dir)
    write_meta(paths.run_dir, {**read_meta(paths.run_dir), "hub": {"url": "http://a:1", "run": "r", "node": 1}})
    assert not seal.needs_seal(paths.run_dir)


def test_small_files_share_a_database_and_an_error_costs_only_that(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = duckdb.connect, []
    monkeypatch.setattr(duckdb, "connect", lambda **how: made.append(how) or real(**how))

    def alone() -> None:
        seal.seal(run)
        assert len(made) == 1
        open_run(run)
        assert len(made) == 2
        with parquet.one_database(), parquet.one_database():
            with parquet.connect(0) as con:
                con.execute("CREATE TEMP TABLE mine (a INTEGER)")
            with pytest.raises(duckdb.Error), parquet.connect(0) as con:
                con.execute("SELECT * FROM mine")
            with parquet.connect(0) as con:
                assert con.execute("SELECT 1").fetchone() == (1,)
        assert len(made) == 4

    contextvars.Context().run(alone)  # without the database that all tests share
