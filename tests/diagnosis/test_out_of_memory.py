"""What a rank that ran out of memory held, and what the finding says to change."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.rules.out_of_memory import OutOfMemory, out_of_memory
from stepscope.records.layers import MemoryAccount, read_memory
from stepscope.records.series import RankError

GIB = 1 << 30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 14.80 GiB memory in use. Of the allocated memory 14.00 GiB "
    "is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def account(**more: Any) -> MemoryAccount:
    """Of a transformer of two blocks: activations 8 GiB, optimizer state 4, parameters and gradients 1 each."""
    blocks = [
        [f"layers.{at}.{part}", "Linear", [GIB // 4, GIB // 4, GIB, 0, 2 * GIB]]
        for at in (0, 1)
        for part in ("qkv", "up")
    ]
    raw = {
        "device": "cuda",
        "kinds": {"parameters": GIB, "gradients": GIB, "optimizer": 4 * GIB, "buffers": 0, "activations": 8 * GIB},
        "activations_step": 137,
        "modules": blocks,
        "tensors": [group("float32", "parameters", GIB)],
        "process": {"VmRSS": 3 * GIB},
        **more,
    }
    read = read_memory(raw)
    assert read is not None
    return read


def group(dtype: str, kind: str, size: int, *, count: int = 1, where: str = "") -> dict[str, Any]:
    return {"count": count, "dtype": dtype, "shape": [4, 8], "bytes": size, "kind": kind, "where": where}


def judged(message: str = MESSAGE, memory: MemoryAccount | None = None, **more: Any) -> OutOfMemory:
    about: dict[str, Any] = {"host": False, "world_size": 1, "facts": {}, **more}
    return out_of_memory(message, memory, **about)


def test_the_largest_kind_leads_and_each_kind_has_what_would_shrink_it() -> None:
    found = judged(memory=account())
    usage, activations, state = found.advice
    assert usage == (
        "14 GiB were in use: activations 57% (mostly layers.*), optimizer state 29%, parameters 7%, gradients 7%."
    )
    assert activations == (
        "Activations: checkpointing of layers.* (torch.utils.checkpoint) would free about 5.6 GiB for about one more "
        "forward; a smaller batch with gradient accumulation shrinks them in proportion."
    )
    assert state == (
        "Optimizer state: one with less of it (8-bit Adam, Adafactor) would free about 3.0 GiB."
    )  # bfloat16 would free less than a tenth
    assert found.evidence["requested_bytes"] == 2 * GIB
    assert found.evidence["kinds"] == {
        "activations": 8 * GIB, "optimizer": 4 * GIB, "parameters": GIB, "gradients": GIB,
    }  # fmt: skip
    assert found.evidence["places"]["activations"] == "layers.*"


def test_state_is_shared_out_where_there_are_ranks_that_do_not_do_so_yet() -> None:
    heavy = account(kinds={"parameters": 2 * GIB, "gradients": 2 * GIB, "optimizer": 9 * GIB, "activations": GIB})
    several = judged(memory=heavy, world_size=4).advice
    _, state, weights = several
    assert state == (
        "Optimizer state: ZeroRedundancyOptimizer or FSDP keeps a part of it on each of 4 ranks, 6.8 GiB less on this "
        "one."
    )
    assert weights == "Parameters and gradients: FSDP over 4 ranks keeps 3.0 GiB of them elsewhere."
    sharded = judged(memory=heavy, world_size=4, facts={"fsdp": {"version": 2}}).advice
    assert [text.partition(":")[0] for text in sharded[1:]] == [
        "Optimizer state",
        "Parameters and gradients are float32",
    ]


def test_what_was_not_sampled_is_said_to_be_the_rest() -> None:
    found = judged(memory=account(kinds={"parameters": GIB, "gradients": GIB, "optimizer": 4 * GIB}))
    assert found.advice[0].startswith("14 GiB were in use: activations and temporary tensors 57%, optimizer state 29%")
    assert found.advice[1].startswith("Activations: checkpointing (torch.utils.checkpoint) would free about 5.6 GiB")


def test_activations_that_are_gone_again_do_not_count() -> None:
    """In the optimizer's step: 7 GiB are in use, 6 of them are the model's and its optimizer's."""
    found = judged(MESSAGE.replace("memory 14.00 GiB", "memory 7.00 GiB"), account())
    assert found.evidence["kinds"]["activations"] == GIB
    assert found.advice[1].startswith("Optimizer state")


def test_a_list_that_keeps_tensors_comes_first() -> None:
    listed_tensors = group("bfloat16", "other", 6 * GIB, count=300, where="kept, a list made at train.py:88")
    found = judged(memory=account(kinds={"parameters": GIB}, tensors=[listed_tensors]))
    assert found.advice[1] == (
        "kept, a list made at train.py:88, keeps 300 bfloat16 tensors of shape [4, 8], 6.0 GiB: "
        "keep numbers (.item()) or fewer of them."
    )


def test_gaps_other_processes_and_impossible_requests_lead() -> None:
    gaps = judged(MESSAGE.replace("300.00 MiB", "3.00 GiB"), account()).advice
    assert gaps[1] == (
        "3.0 GiB are reserved but in pieces that are too small for the 2.0 GiB asked for: "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids that."
    )
    others = judged(MESSAGE.replace("Including", "Process 7 has 5.00 GiB memory in use. Including"), account()).advice
    assert others[1] == "Other processes hold 5.0 GiB of the same GPU: give the job its own GPU."
    huge = judged(MESSAGE.replace("allocate 2.00", "allocate 372.00"), account()).advice
    assert huge[1].startswith("One call asked for 372 GiB, more than the 16 GiB of the device: look at the shapes")


def test_a_host_with_a_limit() -> None:
    message = "DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes."
    process = {"VmRSS": 3 * GIB, "VmPeak": 5 * GIB, "limit": 6 * GIB, "MemTotal": 24 * GIB}
    found = judged(message, account(device="cpu", process=process, kinds={"parameters": GIB}, tensors=[]), host=True)
    assert found.advice == (
        "3.0 GiB were in use: Python, libraries and data 67%, parameters 33% (mostly layers.*).",
        "The process may use 6.0 GiB of address space (ulimit -v); it had up to 5.0 GiB.",
    )
    assert (found.evidence["requested_bytes"], found.evidence["total_bytes"]) == (8 * GIB, 24 * GIB)


def test_the_snapshot_is_named() -> None:
    found = judged(memory=account(snapshot="memory/rank_3.pickle"))
    assert found.advice[-1] == (
        "Every block of the allocator: drop memory/rank_3.pickle of the run on pytorch.org/memory_viz."
    )
    assert account(snapshot="../../etc/passwd").snapshot is None


@pytest.mark.parametrize("raw", [None, 3, {}, {"device": "tpu"}, {"device": []}])
def test_what_is_no_account(raw: Any) -> None:
    assert read_memory(raw) is None


def test_parts_that_are_invalid_are_left_out() -> None:
    read = read_memory(
        {
            "device": "cpu",
            "kinds": {"parameters": -1, "gradients": "x", "optimizer": 5},
            "modules": [[], ["a", "b", [1]], ["a", "b", [1, 2, 3, 4, 5]], ["a", "b", [1, 2, 3, 4, None]]],
            "tensors": [7, {"count": 1, "bytes": 2, "shape": [-1]}, {"count": 1, "bytes": 2, "shape": [], "kind": []}],
            "process": [],
            "allocator": {"allocated_bytes": {"current": 3, "peak": "y"}},
            "tensor_bytes": True,
        }
    )
    assert read is not None
    assert (read.kinds, read.modules) == ({"optimizer": 5}, (("a", "b", (1, 2, 3, 4, 5)),))
    assert [tensor.kind for tensor in read.tensors] == ["other"]
    assert (read.allocated, read.allocated_peak, read.tensor_bytes) == (3, None, 0)


def test_the_finding_has_both() -> None:
    error = RankError(
        rank=1, pid=1001, type="OutOfMemoryError", message=MESSAGE, wall_ns=ANCHOR_WALL_NS + 10**9, memory=account()
    )
    run = Cluster(ranks=2, steps=20, errors=(error,)).run()
    found = diagnose(run, build_window(run))[0]
    assert (found.kind, found.ranks, found.evidence["cause"]) == ("rank_crashed", (1,), "oom_cuda")
    assert found.advice[0].startswith("14 GiB were in use: activations 57% (mostly layers.*)")
    assert found.evidence["memory"]["in_use_bytes"] == 14 * GIB
