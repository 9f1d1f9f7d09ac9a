"""A rank's own collectives: which slices they are, and what is known of each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from fakes.traces import MAIN_THREAD, MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.traces.collective_calls import OPS, Exchanges, bus_factor, exchanges_of, op_of, own_bytes, size_of
from stepscope.traces.model.window import window_of
from stepscope.traces.reading.files import read_trace

RING = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
SENDS = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)"
ANNOTATED = {"Input Dims": [[1000]], "Input type": ["float"]}
SAID: dict[str, Any] = {
    "Collective name": "_allgather_base",
    "Process Group Name": "3",
    "Process Group Description": "mesh_tp",
    "Process Group Ranks": "[0, 1, 4, 5]",
    "Group size": 4,
    "Seq": 17,
    "In msg nelems": 100,
    "Out msg nelems": 400,
    "dtype": "BFloat16",
}


def exchanges(made: MadeTrace, rank: int = 0) -> Exchanges:
    return exchanges_of(window_of(made.trace()), rank)


def names(found: Exchanges) -> list[str]:
    return [OPS[op] for op in found.op]


@pytest.mark.parametrize(
    ("text", "op"),
    [
        (RING, "all_reduce"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclWorkElem)", "broadcast"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
        ("void two_shot_all_reduce_kernel<float>(float*)", "all_reduce"),
        ("nccl:all_to_all", "all_to_all"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("gloo:all_reduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("all_to_allv", "all_to_all"),
        ("_broadcast_oop", "broadcast"),
        ("nccl:recv 0<-1", "recv"),
        ("nccl:coalesced", "unknown"),
        ("", "unknown"),
    ],
)
def test_operations_by_any_name(text: str, op: str) -> None:
    assert OPS[op_of(text)] == op


def test_sizes() -> None:
    assert [size_of(name) for name in ("Float", "float", "c10::BFloat16", "Half", "long int", "Float8_e4m3fn")] == [
        *(4, 4, 2, 2, 8, 1)
    ]
    assert size_of("Mystery") == -1
    assert own_bytes("[[2, 3], [4]]", '["float", "c10::Half"]') == 32
    assert own_bytes("[[]]", '["double"]') == 8
    for dims, types in [
        ("", ""),
        ("[[2]]", "[]"),
        ("[[[2]]]", '["TensorList"]'),
        ("3", "[]"),
        ('[["a"]]', '["float"]'),
    ]:
        assert own_bytes(dims, types) == -1


def test_what_wires_carry() -> None:
    factors = {op: bus_factor(OPS.index(op), 4) for op in ("all_reduce", "all_gather", "all_to_all", "broadcast")}
    assert factors == {"all_reduce": 1.5, "all_gather": 0.75, "all_to_all": 0.75, "broadcast": 1.0}
    assert bus_factor(OPS.index("all_reduce"), 1) == 0.0


def test_a_kernel_that_says_it_all() -> None:
    made = MadeTrace(rank=4, world_size=8)
    made.kernel("ncclDevKernel_AllGather_RING_LL()", 10.5, 20.25, stream=20, **SAID)
    made.kernel("gemm", 20, 5, stream=7)
    found = exchanges(made, 4)
    assert (names(found), found.sequence.tolist(), found.bytes.tolist()) == (["all_gather"], [17], [800])
    assert (found.start_ns.tolist(), found.end_ns.tolist()) == ([10_500], [30_750])
    assert (found.overlap_ns.tolist(), found.stream.tolist(), found.step.tolist()) == ([5000], [20], [0])
    (group,) = found.groups
    assert (group.name, group.description, group.members, group.size) == ("3", "mesh_tp", (0, 1, 4, 5), 4)
    assert found.host is None


def test_what_the_call_that_launched_it_says() -> None:
    made = MadeTrace(rank=0, world_size=2)
    made.op("record_param_comms", 0, 10, **SAID)
    made.annotation("nccl:_all_gather_base", 1, 8)
    made.launched("ncclDevKernel_AllGather_RING_LL()", at=2, start=30, dur=5, stream=20)
    made.op("record_param_comms", 40, 10)
    made.annotation("nccl:all_to_all", 41, 8).update(ANNOTATED)
    made.launched(SENDS, at=42, start=60, dur=5, stream=20)
    made.kernel(SENDS, 80, 5, stream=20)  # launched by nobody known: as its like
    made.launched(RING, at=100, start=110, dur=5, stream=20)
    found = exchanges(made)
    assert names(found) == ["all_gather", "all_to_all", "all_to_all", "all_reduce"]
    assert found.bytes.tolist() == [800, 4000, -1, -1]
    assert found.sequence.tolist() == [17, -1, -1, -1]
    assert found.group.tolist() == [0, 0, 0, 0]  # the only one that there is


def test_kernels_of_several_groups_are_known_by_their_stream() -> None:
    listed = [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]},
        {"pg_name": "3", "pg_desc": "mesh_tp", "pg_size": 4, "ranks": [0, 1, 4, 5]},
    ]
    made = MadeTrace(header={"distributedInfo": {"rank": 0, "world_size": 8, "pg_config": listed}})
    made.kernel(RING, 0, 1, stream=20, **SAID)
    made.kernel(RING, 2, 1, stream=20)
    made.kernel(RING, 4, 1, stream=21)
    assert exchanges(made).group.tolist() == [0, 0, -1]


def test_a_shortened_list_of_ranks_is_that_of_the_header() -> None:
    ranks = list(range(64))
    listed = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 64, "ranks": ranks}]
    about = {**SAID, "Process Group Name": "0", "Process Group Ranks": "[0, 1, ..., 63]", "Group size": 64}
    made = MadeTrace(header={"distributedInfo": {"rank": 0, "world_size": 64, "pg_config": listed}})
    made.kernel(RING, 0, 1, **about)
    assert exchanges(made).groups[0].members == tuple(ranks)
    bare = MadeTrace()
    bare.kernel(RING, 0, 1, **about)
    group = exchanges(bare).groups[0]
    assert (group.members, group.wording, group.size) == ((), "[0, 1, ..., 63]", 64)


def gloo(groups: list[list[int]], rank: int) -> MadeTrace:
    listed = [
        {"pg_name": str(at), "pg_desc": f"group {at}", "pg_size": len(ranks), "ranks": ranks}
        for at, ranks in enumerate(groups)
    ]
    info = {"backend": "gloo", "rank": rank, "world_size": 4, "pg_config": listed}
    return MadeTrace(header={"distributedInfo": info})


def test_gloo_is_told_by_its_own_threads() -> None:
    made = gloo([[0, 1, 2, 3], [0, 2], [0, 1]], 0)
    for place, tid in enumerate((11, 12, 21, 22, 31, 32)):
        made.op("c10d::allreduce_", 100 * place, 5)
        made.annotation("gloo:all_reduce", 100 * place + 2, 50, tid=tid)
    found = exchanges(made)
    assert [found.groups[group].name for group in found.group] == ["0", "0", "1", "1", "2", "2"]
    assert found.groups[1].members == (0, 2)
    assert (found.end_ns - found.start_ns).tolist() == [50_000] * 6
    assert found.stream.tolist() == [-1] * 6


def test_gloo_in_several_groups_of_which_some_are_silent_stays_unknown() -> None:
    made = gloo([[0, 1, 2, 3], [0, 2], [0, 1]], 0)
    made.annotation("gloo:all_reduce", 0, 50, tid=11)
    assert exchanges(made).group.tolist() == [-1]


def test_nothing_at_all() -> None:
    for made in (MadeTrace(), gloo([[0, 1, 2, 3]], 0)):
        assert len(exchanges(made)) == 0
    made = MadeTrace(rank=None)
    made.op("aten::mm", 0, 10)
    found = exchanges(made)
    assert len(found) == 0
    assert found.host is not None
    assert (found.host.span_ns, found.host.compute_ns, found.host.idle_ns) == (10_000, 10_000, 0)


def test_what_is_left_out_with_the_last_step() -> None:
    made = MadeTrace()
    for number in (4, 5, 6):
        made.step(number, 100 * number, 100)
        made.launched(RING, at=100 * number + 10, start=100 * number + 95, dur=10, stream=20)
    assert exchanges(made).step.tolist() == [0, 1]


spans = st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from([MAIN_THREAD, 5]))


@settings(max_examples=examples(60), deadline=None)
@given(ops=st.lists(spans, max_size=8), calls=st.lists(spans, max_size=4), comms=st.lists(spans, max_size=4))
def test_times_of_the_host_instant_by_instant(ops: Any, calls: Any, comms: Any) -> None:
    made = MadeTrace()
    made.step(0, 0, 100)
    for start, dur, tid in ops:
        made.op("aten::mm", start, dur, tid=tid)
    for start, dur, tid in calls:
        made.op("c10d::allreduce_", start, dur, tid=tid)
    for start, dur, _ in comms:
        made.annotation("gloo:all_reduce", start, dur, tid=9)

    def inside(spans: Any, at: int, tid: int | None = None) -> bool:
        return any(start <= at < start + dur and tid in (None, on) for start, dur, on in spans)

    tids = (MAIN_THREAD, 5)
    computes = [any(inside(ops, at, tid) and not inside(calls, at, tid) for tid in tids) for at in range(100)]
    communicates = [inside(comms, at) for at in range(100)]
    found = exchanges(made)
    host = found.host
    assert host is not None
    assert host.span_ns == 100_000
    assert host.compute_ns == 1000 * sum(computes)
    assert host.comm_ns == 1000 * sum(communicates)
    assert host.overlap_ns == 1000 * sum(map(min, computes, communicates))
    assert host.idle_ns == 100_000 - 1000 * sum(map(max, computes, communicates))
    assert found.overlap_ns.tolist() == [
        1000 * sum(computes[start : start + dur]) for start, dur, _ in sorted(comms, key=lambda c: (c[0], -c[1]))
    ]


LARGE = pytest.param("hta_df_index_resolver_1of2", marks=pytest.mark.soak)


@pytest.mark.parametrize("folder", ["param_dlrm_8rank", "hta_nccl_data_1of2", LARGE])
def test_real_files(shared_data: Path, folder: str) -> None:
    for path in sorted((shared_data / "traces" / folder).iterdir())[:2]:
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        nccl = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
        trace = read_trace(path)
        found = exchanges_of(window_of(trace, keep_last=True), 0)
        assert len(found) == len(nccl)
        assert sum((found.end_ns - found.start_ns).tolist()) == round(sum(event["dur"] for event in nccl) * 1000)
        assert 0 not in found.op
        if folder == "hta_nccl_data_1of2":
            calls = [event["args"] for event in sorted(nccl, key=lambda event: event["ts"])]
            sizes = [args["In msg nelems"] * {"Float": 4, "Long": 8}[args["dtype"]] for args in calls]
            assert found.bytes.tolist() == sizes
            assert [group.members for group in found.groups] == [(0, 1)]
        if folder == "param_dlrm_8rank":
            assert sorted(names(found)) == ["all_reduce"] * 3 + ["all_to_all"] * 5
            assert (found.bytes > 0).all()
