"""The hooks of collectives in one process: Python subclasses of torch's classes, other threads, and the group table."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stepscope.recorder.hooks.collectives import CollectiveCalls
from stepscope.recorder.process_groups import SHARED, GroupTable, KnownGroup
from stepscope.recorder.recorder import Recorder
from stepscope.records.collectives import MAX_GROUPS, group_kind
from stepscope.records.steps import BACKWARD, COMM_ENTRY, COMM_RECORD, ENTRIES_HEAD
from stepscope.ring import RingReader, RingWriter
from stepscope.ring.layout import GROUP_SHIFT

pytestmark = pytest.mark.ranks


class Handle(torch._C._distributed_c10d.Work):  # type: ignore[misc]
    """Work in Python, as some tools have it; what it inherits, C++ looks up in its class."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.waited = 0
        self.future = torch.futures.Future()
        self.future.set_result(tensors)

    def get_future(self) -> Any:
        return self.future

    def wait(self, timeout: Any = None) -> bool:
        self.waited += 1
        return True


class Group(dist.ProcessGroup):  # type: ignore[misc]
    """A group of one in Python: it overrides one method, and calls the inherited one from another."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.called: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Handle:
        self.called.append("allreduce")
        return Handle(tensors)

    def barrier(self, opts: Any = None) -> Any:
        self.called.append("barrier")
        return super().barrier(opts)


def counts(recording: Any, step: int = 0) -> dict[int, int]:
    """How many of each operation a step had."""
    found: dict[int, int] = {}
    for slot in recording.slots():
        kind, _, _, of, count = ENTRIES_HEAD.unpack_from(slot)
        if kind == COMM_RECORD and of == step:
            for n in range(count):
                op, _, _, number, *_ = COMM_ENTRY.unpack_from(slot, ENTRIES_HEAD.size + n * COMM_ENTRY.size)
                found[op] = found.get(op, 0) + number
    return found


def test_a_group_in_python_runs_as_without_us(recording: Any, alone: Any) -> None:
    """C++ asks such a class for a method by its name, and must not take ours for an override of it."""
    recording.recorder.begin()
    ours = Group()
    handle = ours.allreduce([torch.ones(2)])
    assert handle.wait() is True
    for name in ("barrier", "broadcast", "send"):
        arguments = {"barrier": (), "broadcast": ([torch.ones(1)],), "send": ([torch.ones(1)], 0, 0)}[name]
        with pytest.raises((RuntimeError, NotImplementedError, AttributeError, TypeError)):
            getattr(ours, name)(*arguments)
    assert ours.called == ["allreduce", "barrier"]
    assert handle.waited == 1
    recording.recorder.end_step()


def test_other_threads_are_left_alone(recording: Any, alone: Any) -> None:
    recorder: Recorder = recording.recorder
    recorder.begin()
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)))
    thread.start()
    thread.join()
    recorder.ledger.phase = BACKWARD  # nor is a thread of the script's one of autograd's
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(3)))
    thread.start()
    thread.join()
    recorder.ledger.phase = 0
    dist.all_reduce(torch.ones(3))
    recorder.end_step()
    assert counts(recording) == {1: 1}


def test_before_and_after_recording_calls_go_straight_through(recording: Any, alone: Any) -> None:
    dist.all_reduce(torch.ones(3))
    assert recording.recorder.ring is None
    recording.recorder.begin()
    recording.recorder.end_step()
    recording.recorder.ledger.close()
    dist.all_reduce(torch.ones(3))
    assert counts(recording) == {}


def test_a_long_step_of_nothing_but_calls_is_announced_on_its_way(recording: Any, alone: Any) -> None:
    recording.recorder.begin()
    for _ in range(600):
        dist.all_reduce(torch.ones(1), async_op=True)
    (path,) = recording._session.glob("*.ring")
    reader = RingReader(path)
    assert reader.head() > 1000
    reader.close()
    recording.recorder.end_step()
    assert counts(recording) == {1: 600}


def test_handles_nobody_waits_for_are_not_kept(recording: Any) -> None:
    recording.recorder.begin()
    calls = CollectiveCalls(recording.recorder, torch)
    calls.handles.update({number: number for number in range(512)})
    calls.turn()
    assert len(calls.handles) == 512
    calls.handles[-1] = 513
    calls.turn()
    assert calls.handles == {}


@pytest.mark.parametrize(
    ("description", "kind"),
    [
        ("default_pg", "other"),
        ("undefined", "other"),
        ("", "other"),
        ("mesh_dp", "data"),
        ("mesh_dp_shard_cp", "data"),
        ("mesh_fsdp", "data"),
        ("mesh_tp", "tensor"),
        ("mesh_pp", "pipeline"),
        ("mesh_cp", "context"),
        ("mesh_ep", "expert"),
        ("mesh_dim_0", "other"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("CONTEXT_PARALLEL_GROUP", "context"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("EMBEDDING_GROUP", "pipeline"),
        ("MODEL_PARALLEL_GROUP", "other"),
    ],
)
def test_kinds(description: str, kind: str) -> None:
    assert group_kind(description) == kind


class Named:
    def __init__(self, name: str) -> None:
        self.group_name = name
        self.group_desc = "mesh_dp"


class Distributed:
    """As much of ``torch.distributed`` as the table asks."""

    ProcessGroup = Named
    backend = "gloo"

    def get_process_group_ranks(self, group: Named) -> list[int]:
        return [0, 2]

    def get_backend(self, group: Named) -> str:
        return self.backend

    def get_world_size(self) -> int:
        return 4


def met(table: GroupTable, group: Any, ring: RingWriter | None = None, said: Any = None) -> KnownGroup:
    return table.meet(group, id(group), group, said or Distributed(), ring)


def test_too_many_groups_share_the_last_slot(ring: RingWriter) -> None:
    table = GroupTable()
    groups = [Named(str(n)) for n in range(MAX_GROUPS + 5)]
    slots = [met(table, group, ring).bits >> GROUP_SHIFT for group in groups]
    assert slots == [*range(SHARED), *[SHARED] * 6]
    reader = RingReader(ring.path)
    told = reader.header().groups
    reader.close()
    assert [group.slot for group in told] == list(range(len(told)))
    assert len(told) > 30


def test_a_group_that_is_gone_leaves_its_identity_to_others() -> None:
    table = GroupTable()
    group = Named("1")
    assert met(table, group).ranks == (0, 2)
    assert list(table.known) == [id(group)]
    del group
    gc.collect()
    assert table.known == {}


def test_a_group_made_anew_under_its_name_takes_the_old_slot() -> None:
    table = GroupTable()
    first, second = Named("1"), Named("2")
    assert [met(table, group).bits for group in (first, second, Named("1"))] == [0, 1 << GROUP_SHIFT, 0]


def test_a_group_of_unknown_form_is_booked_for_the_shared_slot() -> None:
    table = GroupTable()
    assert table.meet([0, 1], 7, [0, 1], Distributed(), None) == KnownGroup(SHARED << GROUP_SHIFT, 1, False, ())
    assert table.known == {}


def test_waits_are_blind_on_nccl() -> None:
    distributed = Distributed()
    assert met(GroupTable(), Named("1"), said=distributed).blind is False
    distributed.backend = "nccl"
    assert met(GroupTable(), Named("1"), said=distributed).blind is True
