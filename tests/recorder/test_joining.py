"""From ``init_process_group`` on a rank is seen; its steps begin at the first activity all the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from clock import FakeClock

from stepscope.recorder.guard import Patches
from stepscope.recorder.hooks import collectives
from stepscope.recorder.recorder import Recorder
from stepscope.records.identity import RankIdentity
from stepscope.records.steps import FLAG_FIRST, FORWARD, INPUT, OPTIMIZER, OTHER, STEP, STEP_SLOT
from stepscope.ring import RingReader, RingState
from stepscope.ring.reader import RingHeader

WHO = RankIdentity(host="node", pid=1, rank=3, world_size=4)


def header_of(recorder: Recorder) -> RingHeader:
    assert recorder.ring is not None
    reader = RingReader(recorder.ring.path)
    header = reader.header()
    reader.close()
    return header


def test_the_first_step_begins_at_the_first_activity_not_when_the_rank_joined(
    make_recorder: Callable[..., Recorder],
) -> None:
    clock = FakeClock()
    recorder = make_recorder(now=clock)
    recorder.appear(WHO, serve=False)
    clock.advance(10**10)  # a model is loaded, in which nothing counts as training
    assert recorder.ledger.enter(FORWARD) == -1
    assert header_of(recorder).state == RingState.STARTING
    assert (header_of(recorder).head, header_of(recorder).live_phase) == (0, OTHER)
    assert header_of(recorder).identity == WHO
    clock.advance(10**10)
    begin_ns = clock()
    outer = recorder.ledger.enter(INPUT)
    clock.advance(300)
    recorder.ledger.leave(outer)
    clock.advance(50)
    outer = recorder.ledger.enter(OPTIMIZER)
    clock.advance(7)
    recorder.end_step(outer=outer)
    assert header_of(recorder).state == RingState.RUNNING
    assert recorder.ring is not None
    reader = RingReader(recorder.ring.path)
    batch = reader.read(0)
    reader.close()
    (step,) = [STEP_SLOT.unpack(slot) for slot in batch.slots if slot[4] == STEP]
    assert (batch.lost, batch.torn) == (0, 0)
    _, flags, _, number, start_ns, wall_ns = step[:6]
    assert (flags, number, start_ns, wall_ns) == (FLAG_FIRST, 0, begin_ns, 357)


def test_the_thread_that_trains_owns_the_ledger_whoever_joined(make_recorder: Callable[..., Recorder]) -> None:
    recorder = make_recorder()
    thread = threading.Thread(target=recorder.appear, args=(WHO,), kwargs={"serve": False})
    thread.start()
    thread.join()
    recorder.end_step()  # of a script that steps before anything was seen: there is nothing to end
    assert recorder.step == 0
    outer = recorder.ledger.enter(INPUT)
    recorder.ledger.leave(outer)
    assert recorder.ledger.thread == threading.get_ident()
    seen = []

    def train() -> None:
        recorder.end_step()
        seen.append((recorder.step, recorder.ledger.thread == threading.get_ident()))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [(1, True)]  # taken over, as ever before the first step


def test_explicit_steps_begin_where_they_are_said_to(make_recorder: Callable[..., Recorder]) -> None:
    clock = FakeClock()
    recorder = make_recorder(now=clock)
    recorder.appear(WHO, serve=False)
    clock.advance(1000)
    recorder.begin()
    clock.advance(5)
    recorder.end_step()
    assert header_of(recorder).live_step == 1
    recorder.begin()
    assert recorder.step == 1


def test_who_waits_for_others_is_seen_and_who_is_alone_is_not(
    recording: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch hangs itself in there
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    dist.destroy_process_group()
    assert recording.recorder.ring is None
    with pytest.raises(RuntimeError, match="Wait timeout"):
        dist.init_process_group(
            "gloo", f"file://{tmp_path}/never", timedelta(seconds=1), 3, 2
        )  # nobody else comes; world size and rank by position
    header = header_of(recording.recorder)
    assert (header.identity.rank, header.identity.world_size, header.identity.backend) == (2, 3, "")
    assert header.state == RingState.STARTING
    reader = RingReader(recording.recorder.ring.path)
    assert not reader.server_offer()
    assert reader.thread_offer() is not None
    reader.close()


def test_the_launchers_word_counts_where_the_call_says_nothing(recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="environment variable MASTER_ADDR"):
        dist.init_process_group("gloo")
    header = header_of(recording.recorder)
    assert (header.identity.rank, header.identity.world_size) == (1, 4)


def test_all_names_of_the_function_are_one_and_are_put_back(make_recorder: Callable[..., Recorder]) -> None:
    import torch
    import torch.distributed.device_mesh

    original = torch.distributed.init_process_group
    patches = Patches()
    collectives.install_init_process_group(make_recorder(), torch, patches)
    places = [getattr(sys.modules[name], collectives.INIT_FUNCTION) for name in collectives.INIT_MODULES]
    patches.undo()
    assert len(places) == 3
    assert {id(place) for place in places} == {id(places[0])}
    assert places[0].__wrapped__ is original
    assert [getattr(sys.modules[name], collectives.INIT_FUNCTION) for name in collectives.INIT_MODULES] == [
        original
    ] * 3


def test_a_group_that_was_there_before_us(
    make_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    distributed = torch.distributed
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2), ("get_backend", "gloo")):
        monkeypatch.setattr(distributed, name, lambda value=value: value)
    recorder, patches = make_recorder(), Patches()
    collectives.install_init_process_group(recorder, torch, patches)
    patches.undo()
    identity = header_of(recorder).identity
    assert (identity.rank, identity.world_size, identity.backend) == (1, 2, "gloo")
