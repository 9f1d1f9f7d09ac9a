"""Opening a run: alive, ended, killed half way, damaged."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from fakes.records import records_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rings import (
    START_NS,
    STEP_NS,
    device_phases,
    step_phases,
    write_device_step,
    write_step,
    write_steps,
)

from stepscope.errors import NotARun
from stepscope.records.run_clock import process_start_ticks
from stepscope.ring import RingBatch, RingState
from stepscope.ring.layout import BLOCK_HEAD, FACTS_OFFSET, HOOK_FAILURES_WORD, MIN_CAPACITY, VERSION
from stepscope.store.create import RunPaths
from stepscope.store.documents import end_run, read_meta, write_meta
from stepscope.store.file_io import append_jsonl
from stepscope.store.liveness import process_alive, processes_alive
from stepscope.store.load import open_run
from stepscope.store.sealed.sql import query

AGENT = {"schema": 1, "wall_ns": 1, "event": "agent_start", "pid": 1 << 30, "start_ticks": 1, "host": platform.node()}


def finish(paths: RunPaths) -> None:
    """A launcher and an agent that ended in order."""
    end_run(paths.run_dir, exit_code=0, status="finished", wall_ns=9)
    append_jsonl(paths.run_dir / "events.jsonl", [AGENT, {**AGENT, "wall_ns": 2, "event": "agent_end"}])


def leave_to_itself(paths: RunPaths) -> None:
    """A launcher that is gone and said nothing."""
    write_meta(paths.run_dir, {**read_meta(paths.run_dir), "launcher": {"pid": 1 << 30, "start_ticks": 1}})


def steps_of(series: Any) -> list[int]:
    return series.steps["step"].tolist()  # type: ignore[no-any-return]


def test_every_number_comes_back(paths: RunPaths, rings: Any, drain: Any) -> None:
    ring = rings(2, world_size=4, device="cuda", device_timed=True)
    ring.set_phase_name(9, "augment")
    ring.ring.header[HOOK_FAILURES_WORD] = 6
    write_steps(ring, 5, device=True)
    drain(ring)
    write_step(ring, 5, flags=33)
    ring.set_state(RingState.EXITED)
    finish(paths)
    data = open_run(paths.run_dir)
    assert (data.name, data.path, data.notices) == ("test", str(paths.run_dir), ())
    (series,) = data.ranks
    assert (series.rank, series.state, series.hook_failures) == (2, "exited", 6)
    assert series.identity.device == "cuda"
    assert series.phase_names[9] == "augment"
    assert steps_of(series) == [0, 1, 2, 3, 4, 5]
    steps, device = records_of(series)
    assert steps["phase_ns"].tolist() == [list(step_phases(step)) for step in range(6)]
    assert series.steps["wall_ns"].tolist() == [sum(step_phases(step)) for step in range(6)]
    assert series.steps["start_ns"].tolist() == [START_NS + step * STEP_NS for step in range(6)]
    assert series.steps["flags"].tolist() == [0, 0, 0, 0, 0, 33]
    assert series.steps["peak_allocated"].tolist() == [3, 4, 5, 6, 7, 8]
    assert series.steps.timed.tolist() == [True] * 5 + [False]
    assert device["phase_ns"].tolist() == [list(device_phases(step)) for step in range(5)]


def test_segment_and_ring_overlap_without_repeats(paths: RunPaths, rings: Any, drain: Any) -> None:
    ring = rings()
    write_steps(ring, 10)
    drain(ring, limit=4)
    write_steps(ring, 30, first=10)
    finish(paths)
    (series,) = open_run(paths.run_dir).ranks
    assert steps_of(series) == list(range(40))


def test_a_drained_ring_may_be_gone(paths: RunPaths, rings: Any, drain: Any) -> None:
    ring = rings()
    write_steps(ring, 10)
    ring.set_state(RingState.EXITED)
    drain(ring, ended=77)
    finish(paths)
    data = open_run(paths.run_dir)
    assert data.notices == ()
    assert (data.ranks[0].state, data.ranks[0].ended_wall_ns) == ("exited", 77)
    assert steps_of(data.ranks[0]) == list(range(10))


def test_a_rank_that_said_nothing_vanished(paths: RunPaths, rings: Any) -> None:
    write_steps(rings(), 3)
    finish(paths)
    assert open_run(paths.run_dir).ranks[0].state == "vanished"


def test_a_rank_that_runs_runs(paths: RunPaths, rings: Any, bystander: int) -> None:
    write_steps(rings(pid=bystander), 3)
    data = open_run(paths.run_dir)
    assert (data.ranks[0].state, data.notices) == ("running", ())
    assert processes_alive(paths.run_dir)


def test_a_pid_used_again_is_another_process(bystander: int) -> None:
    ticks = process_start_ticks(bystander)
    assert process_alive(bystander, ticks)
    assert process_alive(bystander, 0)
    assert not process_alive(bystander, ticks + 1)
    assert not process_alive(1 << 30, 0)
    assert not process_alive(0, 0)


def test_agent_and_launcher_that_died_are_missed(paths: RunPaths, rings: Any, drain: Any) -> None:
    ring = rings()
    write_steps(ring, 10)
    drain(ring, limit=4)
    append_jsonl(paths.run_dir / "events.jsonl", [AGENT])
    leave_to_itself(paths)
    data = open_run(paths.run_dir)
    assert steps_of(data.ranks[0]) == list(range(10))
    assert data.notices == (
        "The agent died before the run ended; there are no host and GPU samples after that.",
        "The launcher died before it could record how the run ended.",
    )


def test_rings_lost_with_their_machine_are_missed(paths: RunPaths, rings: Any, drain: Any) -> None:
    ring = rings(3)
    write_steps(ring, 10)
    drain(ring, limit=4)
    ring.path.unlink()
    finish(paths)
    data = open_run(paths.run_dir)
    assert steps_of(data.ranks[0]) == [0, 1, 2, 3]
    assert data.ranks[0].state == "vanished"
    assert data.notices == ("The rings of rank 3 are gone and were not read completely; steps may be missing.",)


def test_a_run_without_anything(paths: RunPaths) -> None:
    leave_to_itself(paths)
    data = open_run(paths.run_dir)
    assert data.ranks == ()
    assert data.notices == (
        "No agent wrote to this run; there are no host and GPU samples.",
        "The launcher died before it could record how the run ended.",
    )


def test_a_run_that_just_began_misses_nothing(paths: RunPaths) -> None:
    assert open_run(paths.run_dir).notices == ()


def test_lost_torn_foreign_and_cut(paths: RunPaths, rings: Any, drain: Any) -> None:
    ring = rings(1, capacity=MIN_CAPACITY)
    write_steps(ring, 400)
    segment = drain(ring)
    segment.append(RingBatch(slots=[], last_seq=segment.last_seq, lost=0, torn=1))
    write_steps(ring, 3, first=400)
    other = bytearray(ring.path.read_bytes())
    other[8] = 99
    (paths.session / "9.ring").write_bytes(other)
    (paths.session / "8.ring").write_bytes(b"hello")
    with segment.path.open("ab") as file:
        file.write(b"FRAM...")
    finish(paths)
    data = open_run(paths.run_dir)
    (series,) = data.ranks
    assert 0 < series.lost < 400
    assert series.torn == 1
    assert steps_of(series) == list(range(series.lost, 403))
    assert data.notices == (
        f"A ring could not be read: {paths.session}/8.ring is not a ring, or not complete yet.",
        f"A ring could not be read: {paths.session}/9.ring has ring layout 99; this Stepscope reads layout {VERSION}.",
        f"steps/{segment.path.name} was cut off or damaged: 7 of its bytes could not be used.",
        f"Rank 1: {series.lost} records were overwritten before they could be read.",
        "Rank 1: 1 records could not be read completely.",
    )


def test_a_sidecar_that_cannot_be_read_costs_the_name_not_the_steps(paths: RunPaths, rings: Any, drain: Any) -> None:
    ring = rings(1)
    write_steps(ring, 4)
    drain(ring, ended=5)
    (sidecar,) = (paths.run_dir / "steps").glob("*.json")
    sidecar.write_text("{")
    finish(paths)
    data = open_run(paths.run_dir)
    assert steps_of(data.ranks[0]) == [0, 1, 2, 3]
    assert data.ranks[0].identity.pid == 1 << 30
    assert data.notices[0] == f"steps/{sidecar.name} could not be read; the rank of its steps is a guess."


def test_facts_outlive_the_ring_and_a_torn_header(paths: RunPaths, rings: Any, drain: Any) -> None:
    first, second = rings(0), rings(1)
    for ring in (first, second):
        ring.ring.set_facts({"threads": 2, "ddp": {"bucket_mb": 25.0}})
        write_steps(ring, 2)
    drain(first, ended=5)
    drain(second)
    assert not first.path.exists()
    with second.path.open("r+b") as file:
        file.seek(FACTS_OFFSET + BLOCK_HEAD.size)
        file.write(b"torn")
    finish(paths)
    data = open_run(paths.run_dir)
    assert [series.facts for series in data.ranks] == [{"threads": 2, "ddp": {"bucket_mb": 25.0}}] * 2
    assert query(paths.run_dir, "select facts from ranks").rows[0] == ('{"ddp": {"bucket_mb": 25.0}, "threads": 2}',)


def test_two_that_claim_one_rank(paths: RunPaths, rings: Any, drain: Any) -> None:
    first, second, third = rings(0), rings(0), rings(1)
    rings(0)  # a helper that inherited its rank's environment and takes no step
    for ring, count in ((first, 3), (second, 4), (third, 5)):
        write_steps(ring, count)
        drain(ring, ended=time.time_ns() + 10 * 10**9)
    finish(paths)
    errors = paths.run_dir / "errors" / "x.json"
    errors.write_text(json.dumps({"schema": 1, "rank": 0, "pid": (1 << 30) + 1, "type": "E", "message": "m"}))
    data = open_run(paths.run_dir)
    assert [(series.rank, len(series.steps)) for series in data.ranks] == [(0, 3), (1, 5), (2, 4)]
    assert [series.identity.rank for series in data.ranks] == [0, 1, 0]
    assert data.notices == (f"Process {(1 << 30) + 1} also claimed to be rank 0; it is shown as rank 2.",)
    assert data.errors[0].rank == 2


def test_a_helper_that_came_first_is_not_the_rank(paths: RunPaths, rings: Any) -> None:
    rings(0)
    write_steps(rings(0), 2)
    finish(paths)
    data = open_run(paths.run_dir)
    assert [(series.rank, len(series.steps)) for series in data.ranks] == [(0, 2)]


def test_a_restart_is_a_series_of_its_own(paths: RunPaths, rings: Any) -> None:
    write_steps(rings(0, attempt=0, pid=(1 << 30) + 9), 3)
    write_steps(rings(0, attempt=1, pid=1 << 30), 2)
    finish(paths)
    data = open_run(paths.run_dir)
    assert [(s.identity.attempt, s.rank, len(s.steps)) for s in data.ranks] == [(0, 0, 3), (1, 0, 2)]
    assert data.notices == ()


def test_repeated_steps_and_device_times_without_a_step(paths: RunPaths, rings: Any) -> None:
    ring = rings()
    write_steps(ring, 3)
    write_steps(ring, 3, first=1)
    write_device_step(ring, 1)
    write_device_step(ring, 99)
    finish(paths)
    (series,) = open_run(paths.run_dir).ranks
    assert steps_of(series) == [0, 1, 2, 3]
    assert series.steps.timed.tolist() == [False, True, False, False]


def test_notes_become_events(paths: RunPaths, rings: Any, drain: Any) -> None:
    ring = rings(1)
    ring.note(0, b'{"lr":0.1}')
    write_steps(ring, 2)
    ring.note(2, b'{"loss":1.5}')
    drain(ring)
    ring.note(2, b"{cut")
    finish(paths)
    data = open_run(paths.run_dir)
    notes = sorted((event for event in data.events if event["event"] == "note"), key=lambda note: note["seq"])
    assert [(n["rank"], n["step"], n["values"]) for n in notes] == [
        (1, 0, {"lr": 0.1}),
        (1, 2, {"loss": 1.5}),
        (1, 2, {"text": "{cut"}),
    ]
    anchor = data.ranks[0].anchor_wall_ns - data.ranks[0].anchor_mono_ns
    end_ns = START_NS + STEP_NS + sum(step_phases(1))
    assert notes[0]["wall_ns"] == data.ranks[0].anchor_wall_ns
    assert notes[1]["wall_ns"] == max(0, end_ns + anchor)


def test_errors_are_in_order_of_death(paths: RunPaths, rings: Any) -> None:
    write_steps(rings(0), 1)
    folder = paths.run_dir / "errors"
    late = {"schema": 1, "rank": None, "pid": 5, "type": "ChildFailedError", "message": "m", "wall_ns": 20}
    early = {"schema": 1, "rank": 1, "pid": 6, "type": "ValueError", "message": "x", "traceback": "T", "wall_ns": 10}
    (folder / "5.json").write_text(json.dumps({**late, "exit_codes": {"1": 1, "2": -9}, "step": None}))
    (folder / "6.json").write_text(json.dumps({**early, "step": 7}))
    (folder / "7.json").write_text('{"pid": ')
    (folder / "8.json").write_text("[]")
    finish(paths)
    data = open_run(paths.run_dir)
    first, second = data.errors
    assert (first.rank, first.pid, first.type, first.traceback, first.step) == (1, 6, "ValueError", "T", 7)
    assert (second.rank, second.exit_codes) == (None, {1: 1, 2: -9})
    assert data.notices == ("errors/7.json could not be read.", "errors/8.json could not be read.")


def test_git_comes_from_the_agents_event(paths: RunPaths, rings: Any) -> None:
    write_steps(rings(), 1)
    finish(paths)
    git = {"commit": "abc", "branch": "main", "dirty": False, "diff_stat": ""}
    append_jsonl(paths.run_dir / "events.jsonl", [{"schema": 1, "wall_ns": 3, "event": "context", "git": git}])
    assert open_run(paths.run_dir).meta["git"] == git


def test_the_rings_that_found_no_room_are_read_too(paths: RunPaths, rings: Any) -> None:
    ring = rings(1)
    write_steps(ring, 2)
    ring.path.rename(paths.run_dir / "rings" / ring.path.name)
    finish(paths)
    assert steps_of(open_run(paths.run_dir).ranks[0]) == [0, 1]


def test_a_session_path_of_another_hand_harms_nobody(paths: RunPaths) -> None:
    for session in ("/", "/nonexistent", "", "\0", 7, None):
        write_meta(paths.run_dir, {**read_meta(paths.run_dir), "session": session})
        assert open_run(paths.run_dir).ranks == ()


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        open_run(tmp_path)


FUZZ = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)


@FUZZ
@given(
    keys=st.dictionaries(
        st.sampled_from(["name", "schema", "session", "launcher", "end", "git", "host", "sealed"]), JSON
    )
)
def test_fuzz_run_json(paths: RunPaths, keys: dict[str, Any]) -> None:
    meta = {"schema": 1, "name": "x", "session": str(paths.session), **keys}
    (paths.run_dir / "run.json").write_text(json.dumps(meta))
    try:
        open_run(paths.run_dir)
    except NotARun as error:
        assert "\n" not in str(error)


@FUZZ
@given(
    which=st.sampled_from(["sidecar", "events", "samples", "error"]),
    text=st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()),
)
def test_fuzz_the_small_files(paths: RunPaths, which: str, text: bytes) -> None:
    places = {
        "sidecar": "steps/h-1-a.json",
        "events": "events.jsonl",
        "samples": "samples.jsonl",
        "error": "errors/1.json",
    }
    path = paths.run_dir / places[which]
    path.write_bytes(text)
    open_run(paths.run_dir)
    path.unlink()


@FUZZ
@given(
    keys=st.dictionaries(
        st.sampled_from(["pid", "state", "phase_names", "identity", "live_phase", "ended_wall_ns", "facts"]), JSON
    )
)
@example(keys={"pid": 0})
def test_fuzz_sidecar_values(paths: RunPaths, rings: Any, drain: Callable[..., Any], keys: dict[str, Any]) -> None:
    if not rings.writers:
        ring = rings(0)
        write_steps(ring, 2)
        drain(ring, ended=3)
    (sidecar,) = (paths.run_dir / "steps").glob("*.json")
    good = sidecar.read_text()
    sidecar.write_text(json.dumps({**json.loads(good), **keys}))
    assert len(open_run(paths.run_dir).ranks[0].steps) == 2
    sidecar.write_text(good)


def test_own_process_does_not_count(paths: RunPaths, rings: Any) -> None:
    rings(0, pid=os.getpid())
    assert not processes_alive(paths.run_dir)
