"""Where the device waits for a collective behind Python's back: DDP's reducer, FSDP's events, autograd's threads."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepscope.records.steps import BACKWARD, COMM, COMM_HOOK_PHASE, FORWARD, OTHER


class Timer:
    """In place of the device's timer: what it was told, in order."""

    def __init__(self) -> None:
        self.reported: list[str] = []

    def mark(self, ended: int, begun: int) -> None:
        self.reported.append(f"mark {ended} {begun}")

    def stall_begins(self, phase: int) -> bool:
        self.reported.append(f"stall in {phase}")
        return True

    def stall_ends(self) -> None:
        self.reported.append("stall ends")


def train(recording: Any, model: Any, steps: int = 4) -> None:
    """Until the recorder knows the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("buckets", [1, 3])
def test_the_end_of_the_gradients_is_told_before_the_reducer_waits(recording: Any, alone: None, buckets: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-6 if buckets > 1 else 25)
    timer = Timer()

    def exchange(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants annotations of its own, or none
        torch.autograd.Variable._execution_engine.queue_callback(lambda: timer.reported.append("the reducer waits"))
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, exchange)
    train(recording, ddp)
    recording.recorder.ledger.device = timer
    timer.reported.clear()
    ddp(torch.ones(2, 3)).sum().backward()
    hook = recording.recorder.slot_of(COMM_HOOK_PHASE)
    around_hook = (f"mark {BACKWARD} {hook}", f"mark {hook} {BACKWARD}")
    words = [word for word in timer.reported if word not in around_hook]
    assert words[:3] == [f"mark {OTHER} {FORWARD}", f"mark {FORWARD} {OTHER}", f"mark {OTHER} {BACKWARD}"]
    assert words[3] == f"stall in {BACKWARD}"
    assert set(words[4:-1]) == {"the reducer waits"}
    assert words[-1] == f"mark {BACKWARD} {OTHER}"


def test_buffers_that_ddp_broadcasts_before_forward_are_communication(recording: Any, alone: None) -> None:
    """On a CPU the broadcast blocks until the last rank has come: that is no work of this one."""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
    train(recording, ddp)
    recording.recorder.ledger.device = timer = Timer()
    ddp(torch.ones(2, 3))
    entered = [f"mark {OTHER} {FORWARD}", f"mark {FORWARD} {COMM}", f"mark {COMM} {FORWARD}", f"mark {FORWARD} {OTHER}"]
    assert timer.reported == entered


def test_an_output_of_any_form_will_do_and_gradients_are_the_same(recording: Any, alone: None) -> None:
    class Answers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"step": 1, "more": [x, (self.layer(x),)]}

    torch.manual_seed(1)
    ddp = torch.nn.parallel.DistributedDataParallel(Answers())
    ddp(torch.ones(2, 3))["more"][1][0].sum().backward()
    bare = ddp.module.layer.weight.grad.clone()
    ddp.zero_grad()
    timer = Timer()
    recording.recorder.ledger.device = timer
    recording.recorder.ledger.phase = BACKWARD  # as it is inside of one
    ddp(torch.ones(2, 3))["more"][1][0].sum().backward()
    recording.recorder.ledger.phase = OTHER
    assert f"stall in {BACKWARD}" in timer.reported
    assert torch.equal(ddp.module.layer.weight.grad, bare)


def test_without_a_timed_step_nothing_is_hooked_to_the_output(recording: Any, alone: None) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    train(recording, ddp, steps=1)
    output = ddp(torch.ones(2, 3))
    assert not output._backward_hooks
    output.sum().backward()


class Stream:
    """As much of a CUDA stream as is asked."""

    device_index, cuda_stream = 0, 7


class Event:
    def __init__(self, timer: Timer) -> None:
        self._timer = timer

    def wait(self, stream: Stream) -> None:
        self._timer.reported.append("the stream waits")


def call_from(module: str, wait: Any, stream: Any, event: Any) -> None:
    """As if ``module`` did it."""
    scope: dict[str, Any] = {"__name__": module, "wait": wait, "stream": stream, "event": event}
    exec("def call():\n    wait(stream, event)\ncall()", scope)


@pytest.mark.parametrize(
    ("module", "raw", "messages"),
    [
        ("torch.distributed.fsdp._fully_shard._fsdp_collectives", 7, ["stall in 0", "the stream waits", "stall ends"]),
        ("torch.distributed.fsdp._runtime_utils", 8, ["the stream waits"]),  # not the stream that computes
        ("train", 7, ["the stream waits"]),  # the script's own copies
    ],
)
def test_only_what_fsdp_waits_for_is_a_stall(
    recording: Any, monkeypatch: pytest.MonkeyPatch, module: str, raw: int, messages: list[str]
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: raw, raising=False)
    timer = Timer()
    recording.recorder.ledger.device, recording.recorder.ledger.thread = timer, threading.get_ident()
    call_from(module, torch.cuda.Stream.wait_event, Stream(), Event(timer))
    assert timer.reported == messages


def test_in_other_steps_the_stream_just_waits(recording: Any) -> None:
    timer = Timer()
    call_from("torch.distributed.fsdp", torch.cuda.Stream.wait_event, Stream(), Event(timer))
    assert timer.reported == ["the stream waits"]


def test_a_stream_that_waits_on_another_thread_is_none_of_ours(recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its marks would stand among those of the thread that trains."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    timer = Timer()
    recording.recorder.ledger.device = timer
    waiting = (torch.cuda.Stream.wait_event, Stream(), Event(timer))
    thread = threading.Thread(target=call_from, args=("torch.distributed.fsdp", *waiting))
    thread.start()
    thread.join()
    assert timer.reported == ["the stream waits"]


def test_a_timer_that_is_taken_away_meanwhile_hurts_nobody(recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    ledger, timer = recording.recorder.ledger, Timer()

    class Ends(Event):
        def wait(self, stream: Stream) -> None:
            ledger.device = None

    ledger.device, ledger.thread = timer, threading.get_ident()
    call_from("torch.distributed.fsdp", torch.cuda.Stream.wait_event, Stream(), Ends(timer))
    assert timer.reported == ["stall in 0", "stall ends"]


def test_c_may_call_it_with_nobody_above(recording: Any) -> None:
    timer, done = Timer(), threading.Event()
    recording.recorder.ledger.device = timer

    class Waited(Event):
        def wait(self, stream: Stream) -> None:
            super().wait(stream)
            done.set()

    _thread.start_new_thread(torch.cuda.Stream.wait_event, (Stream(), Waited(timer)))
    assert done.wait(60)
    assert timer.reported == ["the stream waits"]


def test_a_model_that_returns_a_million_numbers_is_not_searched(recording: Any, alone: None) -> None:
    class Numbers(list[int]):
        looked_at = 0

        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                Numbers.looked_at += 1
                yield number

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"ids": Numbers(range(1000)), "y": super().forward(x)}

    ddp = torch.nn.parallel.DistributedDataParallel(Net(3, 3))
    timer = Timer()
    recording.recorder.ledger.device = timer
    Numbers.looked_at = 0
    output = ddp(torch.ones(2, 3))
    searched = Numbers.looked_at
    recording.recorder.ledger.phase = BACKWARD
    output["y"].sum().backward()
    recording.recorder.ledger.phase = OTHER
    assert searched <= 16 + 1000  # DDP itself walks over it once
    assert f"stall in {BACKWARD}" in timer.reported


def test_the_reducer_in_python_is_left_alone(recording: Any, alone: None) -> None:
    """Compiled autograd would trace the mark."""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    ddp._use_python_reducer = True
    timer = Timer()
    recording.recorder.ledger.device = timer
    output = ddp._post_forward(ddp.module(torch.ones(2, 3)))
    recording.recorder.ledger.phase = BACKWARD
    output.sum().backward()
    recording.recorder.ledger.phase = OTHER
    assert [word for word in timer.reported if word.startswith("stall")] == []
