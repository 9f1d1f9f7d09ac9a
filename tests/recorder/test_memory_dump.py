"""What a process that runs out of memory leaves behind: sizes by layer, the largest tensors, the allocator's state."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch
from torch import nn

from stepscope.recorder import failure, guard
from stepscope.recorder import recorder as recorder_module
from stepscope.recorder.layers import memory_dump
from stepscope.recorder.layers.memory_dump import MemoryDump, save_snapshot
from stepscope.recorder.recorder import Recorder
from stepscope.records.identity import RankIdentity
from stepscope.records.layers import MEMORY_KINDS, read_memory

FLOAT = 4
SNAPSHOT = {"segments": [{"address": 1, "blocks": []}], "device_traces": [[]]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.register_buffer("mask", torch.zeros(32))


def fail(keep: int) -> tuple[TracebackType | None, tuple[Any, ...]]:
    """Run out of memory in a function that keeps tensors; its traceback, and the objects that there are."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = [torch.ones(64, 4) for _ in range(keep)]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    batch = torch.ones(100)
    state = [value for own in optimizer.state.values() for value in own.values()]
    grads = [parameter.grad for parameter in model.parameters()]
    modules = list(model.modules())
    objects = (*modules, optimizer, *model.parameters(), *grads, *state, *model.buffers(), *kept, batch, batch[:10])
    try:
        raise MemoryError
    except MemoryError as error:
        return error.__traceback__, objects


def test_bytes_by_kind_and_layer_and_the_largest_tensors() -> None:
    trace, objects = fail(keep=20)
    dump = MemoryDump(torch, "cpu", trace, objects=lambda: objects)
    activations = [0, 0, 0, 5000, 0, 6000]
    account = dump.account([(37, activations)])
    weight = 8 * 16 * FLOAT
    assert account["kinds"] == {
        "parameters": 2 * weight,
        "gradients": 2 * weight,
        "optimizer": 2 * (2 * weight + FLOAT),
        "buffers": 32 * FLOAT,
        "activations": 11000,
    }
    assert account["activations_step"] == 37
    assert account["modules"] == [
        ["layers.1.up", "Linear", [weight, weight, 2 * weight + FLOAT, 0, 6000]],
        ["layers.0.up", "Linear", [weight, weight, 2 * weight + FLOAT, 0, 5000]],
        ["Net", "Net", [0, 0, 0, 32 * FLOAT, 0]],
    ]
    kept, *_ = account["tensors"]
    assert (kept["count"], kept["dtype"], kept["shape"], kept["bytes"]) == (20, "float32", [64, 4], 20 * 64 * 4 * FLOAT)
    assert kept["where"].startswith("kept, a list made at test_memory_dump.py:")
    by_kind = {(group["kind"], tuple(group["shape"])): group for group in account["tensors"]}
    assert by_kind["optimizer", (16, 8)] | {"where": ""} == {
        "count": 4, "dtype": "float32", "shape": [16, 8], "device": "cpu", "bytes": 4 * weight, "kind": "optimizer",
        "where": "",
    }  # fmt: skip
    assert by_kind["other", (100,)]["where"].startswith("batch in fail (test_memory_dump.py:")
    assert account["tensor_bytes"] == sum(account["kinds"].values()) - 11000 + 20 * 64 * 4 * FLOAT + 100 * FLOAT
    assert account["allocator"] is None
    assert account["process"]["VmRSS"] > 0
    read = read_memory(json.loads(json.dumps(account)))
    assert read is not None
    assert read.kinds == account["kinds"]
    assert read.modules[0] == ("layers.1.up", "Linear", (weight, weight, 2 * weight + FLOAT, 0, 6000))
    assert [group.bytes for group in read.tensors] == [group["bytes"] for group in account["tensors"]]


def test_activations_are_unknown_where_no_step_was_sampled_or_the_model_has_changed() -> None:
    trace, objects = fail(keep=1)
    for known in (None, (37, [1, 2])):
        account = MemoryDump(torch, "cpu", trace, objects=lambda: objects).account([known])
        assert list(account["kinds"]) == list(MEMORY_KINDS[:-1])
        assert account["activations_step"] is None


def test_only_the_memory_that_ran_out_counts() -> None:
    trace, objects = fail(keep=1)
    account = MemoryDump(torch, "cuda", trace, objects=lambda: objects).account([None])
    assert (set(account["kinds"].values()), account["tensors"], account["modules"]) == ({0}, [], [])


def test_places_are_not_searched_for_longer_than_a_moment() -> None:
    trace, objects = fail(keep=3)
    seconds = iter(range(1000))
    dump = MemoryDump(torch, "cpu", trace, objects=lambda: objects, now_s=lambda: 10.0 * next(seconds))
    assert {group["where"] for group in dump.account([None])["tensors"] if group["kind"] == "other"} == {""}


def cuda(snapshot: Callable[[], Any], *, blocks: int = 10) -> Any:
    """As much of torch as a snapshot needs, with a GPU."""
    counts = {"active": {"all": {"current": blocks}}, "inactive_split": {"all": {"current": 1}}}
    memory = SimpleNamespace(_snapshot=snapshot)
    device = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0, memory=memory)
    return SimpleNamespace(cuda=device, _C=SimpleNamespace(_cuda_memoryStats=lambda index: counts))


def test_a_snapshot_is_what_torch_itself_would_write(tmp_path: Path) -> None:
    path = tmp_path / "run" / "memory" / "rank_3.pickle"
    (tmp_path / "run").mkdir()
    assert save_snapshot(cuda(lambda: SNAPSHOT), path) == ""
    assert pickle.loads(path.read_bytes()) == SNAPSHOT
    assert list(path.parent.iterdir()) == [path]


def test_a_snapshot_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "rank_3.pickle"
    assert save_snapshot(cuda(lambda: [1 << 40] * 200_000), path, most_bytes=1 << 20) == "it would be larger than 1 MiB"
    assert list(path.parent.iterdir()) == []
    told = save_snapshot(cuda(lambda: pytest.fail("not asked"), blocks=400_000), path)
    assert told == "the allocator has 400,001 blocks, more than 300,000"
    assert save_snapshot(torch, path) == "CUDA is not in use in this process"


def test_an_error_of_the_device_leaves_a_snapshot_beside_the_account(
    make_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA itself is not there: what it would answer is."""
    counted = {
        "allocated_bytes": {"all": {"current": 7, "peak": 9, "freed": 1}, "small_pool": {"current": 1}},
        "num_ooms": 1,
    }
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: SNAPSHOT)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda index: counted, raising=False)
    recorder = make_recorder()
    recorder.appear(RankIdentity(host="node", pid=1, rank=3, world_size=1), serve=False)
    recorder.identity = replace(recorder.identity, pid=os.getpid())
    failures = guard.failures()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    failure.record_failure(recorder, tmp_path / "run", error, "Traceback")
    assert guard.failures() == failures
    (told,) = (json.loads(path.read_bytes()) for path in (tmp_path / "run" / "errors").iterdir())
    memory = told["memory"]
    assert (memory["device"], memory["snapshot"], memory["snapshot_problem"]) == ("cuda", "memory/rank_3.pickle", "")
    assert memory["allocator"] == {"device": 0, "allocated_bytes": {"current": 7, "peak": 9}, "num_ooms": 1}
    assert pickle.loads((tmp_path / "run" / "memory" / "rank_3.pickle").read_bytes()) == SNAPSHOT


def test_another_error_leaves_nothing_of_it(
    make_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_dump, "MemoryDump", None)
    failure.record_failure(make_recorder(), tmp_path / "run", ValueError("bad"), "Traceback")
    (told,) = (json.loads(path.read_bytes()) for path in (tmp_path / "run" / "errors").iterdir())
    assert "memory" not in told


def test_only_a_process_that_uses_cuda_looks_for_requests(
    make_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = make_recorder()
    who = RankIdentity(host="node", pid=os.getpid())
    for device, looks in (("cpu", False), ("cuda", True)):
        monkeypatch.setattr(recorder_module.identity, "of_this_process", lambda: replace(who, device=device))  # noqa: B023
        recorder.appear(who, serve=False)
        recorder._check_identity()
        assert (recorder._snapshots is not None) == looks
    recorder.stop_snapshots()
    assert recorder._snapshots is None
