"""Exports of Nsight Systems: made up after its documented schema, in two generations."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from nsight import NEW, OLD, MadeReport, packed

from stepscope.errors import TraceError
from stepscope.traces.findings import analyze_job
from stepscope.traces.model.columns import Kind, Trace
from stepscope.traces.model.window import launches_of, window_of
from stepscope.traces.rank_analysis import analyze_rank
from stepscope.traces.reading.files import is_sqlite
from stepscope.traces.reading.nsight import read_nsight

GENERATIONS = pytest.mark.parametrize("generation", [OLD, NEW])


def read_one(made: MadeReport, tmp_path: Path) -> Trace:
    (trace,) = read_nsight(made.write(tmp_path / "report.sqlite"))
    return trace


def rows(trace: Trace) -> list[tuple[str, Kind, int, int]]:
    slices = trace.slices
    return [
        (trace.name(row), Kind(int(slices.kind[row])), int(slices.start_ns[row]), int(slices.dur_ns[row]))
        for row in range(len(trace))
    ]


@GENERATIONS
def test_kernels_calls_copies_and_ranges(tmp_path: Path, generation: str) -> None:
    made = MadeReport(generation, origin_ns=1_700_000_000_000_000_000)
    made.gpu(sm_count=100)
    made.nvtx("forward", 1000, 9000)
    made.nvtx("loss", 2000, 2500, registered=True)
    made.launched("void gemm<float>(int)", at=3000, start=6000, end=8000, gridX=200, blockX=64)
    made.memcpy(8000, 8500, size=4096)
    made.memset(8600, 8700, size=16, streamId=0)
    made.graph(5, 8700, 8800)
    trace = read_one(made, tmp_path)
    assert rows(trace) == [
        ("forward", Kind.ANNOTATION, 0, 8000),
        ("loss", Kind.ANNOTATION, 1000, 500),
        ("cudaLaunchKernel", Kind.RUNTIME, 2000, 1000),
        ("void gemm<float>(int)", Kind.KERNEL, 5000, 2000),
        ("Memcpy HtoD (Pageable -> Device)", Kind.MEMCPY, 7000, 500),
        ("Memset (Device)", Kind.MEMSET, 7600, 100),
        ("CUDA graph 5", Kind.KERNEL, 7700, 100),
    ]
    meta = trace.meta
    assert (meta.format, meta.pid, meta.origin_ns) == ("nsight", 4000, 1_700_000_000_000_001_000)
    assert (meta.read_events, meta.problems) == (7, ())
    assert meta.devices[0]["name"] == "NVIDIA H100"
    assert meta.devices[0]["numSms"] == 100
    assert trace.slices.device.tolist() == [-1, -1, -1, 0, 0, 0, 0]
    assert trace.slices.stream.tolist() == [-1, -1, -1, 7, 7, 0, 7]
    assert launches_of(trace).tolist() == [-1, -1, -1, 2, -1, -1, -1]
    assert trace.copies.bytes.tolist() == [4096, 16]
    assert trace.kernels.graph.tolist() == [-1, 5]
    assert trace.kernels.blocks_per_sm.tolist()[0] == 2.0
    assert trace.kernels.warps_per_sm.tolist()[0] == 4.0
    assert np.isnan(trace.kernels.occupancy).all()
    assert [(thread.pid, thread.tid) for thread in trace.threads] == [(4000, 4000), (0, 7), (0, 0)]


@GENERATIONS
def test_it_goes_through_the_analyses(tmp_path: Path, generation: str) -> None:
    made = MadeReport(generation)
    for step in range(3):
        at = step * 100_000
        made.nvtx(f"step {step}", at, at + 90_000)
        made.launched("gemm", at=at + 1000, start=at + 10_000, end=at + 30_000)
        made.launched("ncclDevKernel_AllReduce_Sum_f32", at=at + 3000, start=at + 20_000, end=at + 50_000, streamId=20)
    found = analyze_rank(read_one(made, tmp_path), 0)
    assert [step.number for step in found.steps] == [0, 1]
    assert found.left_out is not None
    assert found.left_out.name == "ProfilerStep#2"
    assert found.temporal.compute_ns == 40_000
    assert found.temporal.comm_ns == 60_000
    assert found.temporal.overlap_ns == 20_000
    assert found.temporal.idle_ns == 60_000


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["iteration 4", "iteration 5"], ["ProfilerStep#4", "ProfilerStep#5"]),
        (["Step_1", "Step_2", "iter 1"], ["ProfilerStep#1", "ProfilerStep#2"]),
        (["step 0", "step 1", "step 0"], ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]),
        (["step 1", "stepped 2"], []),
        (["step 1", "ProfilerStep#7", "step 2"], ["ProfilerStep#7"]),
        (["epoch 1", "epoch 2"], []),
    ],
)
def test_which_ranges_are_steps(tmp_path: Path, names: list[str], steps: list[str]) -> None:
    made = MadeReport()
    made.launched("gemm", at=0, start=10, end=20)
    for place, name in enumerate(names):
        made.nvtx(name, place * 100, place * 100 + 90)
    trace = read_one(made, tmp_path)
    found = window_of(trace, keep_last=True).steps
    assert [step.name for step in found if step.name] == steps
    present = [name for name in names if name in trace.strings]
    assert len(present) + len(steps) == len(names) + sum(name.startswith("Profiler") for name in names)


def test_ranges_that_overlap_are_no_steps(tmp_path: Path) -> None:
    made = MadeReport()
    made.launched("gemm", at=0, start=10, end=20)
    made.nvtx("step 1", 0, 100)
    made.nvtx("step 2", 50, 150)
    assert window_of(read_one(made, tmp_path)).steps[0].name == ""


def test_operators_of_emit_nvtx(tmp_path: Path) -> None:
    made = MadeReport()
    made.launched("gemm", at=10, start=2000, end=3000)
    made.nvtx("aten::mm, seq = 12, op_id = 4, sizes = [[2, 3], [3, 4]]", 0, 1000)
    made.nvtx("aten::empty, op_id = 5", 1000, 1100)
    made.nvtx("loss, seq. 3", 1200, 1300)
    trace = read_one(made, tmp_path)
    kinds = {name: kind for name, kind, _, _ in rows(trace)}
    assert kinds["aten::mm"] == kinds["aten::empty"] == Kind.OP
    assert kinds["loss, seq. 3"] == Kind.ANNOTATION
    assert trace.ops.sequence.tolist() == [12, -1]
    assert [trace.text(code) for code in trace.ops.dims.tolist()] == ["[[2, 3], [3, 4]]", ""]


@GENERATIONS
def test_collectives_say_group_and_size(tmp_path: Path, generation: str) -> None:
    made = MadeReport(generation)
    big = (1 << 63) + 5
    made.nccl_init(communicator=big, rank=1, ranks=4)
    made.nccl_init(communicator=9, rank=0, ranks=2)
    # Alone: the call launches its kernel itself.  In a group: the end of the group does, for both calls.
    made.nccl("ncclAllReduce", 1000, 5000, communicator=big, size=4096)
    made.launched("ncclDevKernel_AllReduce", at=2000, start=6000, end=7000)
    made.nccl("ncclAllGather", 10_000, 10_100, communicator=9, size=100)
    made.nccl("ncclReduceScatter", 10_200, 10_300, communicator=9, size=200)
    made.launched("ncclDevKernel_AllGather", at=10_500, start=20_000, end=21_000)
    made.launched("gemm", at=12_000, start=22_000, end=23_000)
    trace = read_one(made, tmp_path)
    assert (trace.meta.rank, trace.meta.world_size, trace.meta.backend) == (1, 4, "nccl")
    collectives = trace.collectives
    found = [
        (
            trace.name(row),
            trace.text(collectives.op[at]),
            trace.text(collectives.group[at]),
            *(int(column[at]) for column in (collectives.size, collectives.in_elements, collectives.out_elements)),
        )
        for at, row in enumerate(collectives.row.tolist())
    ]
    assert found == [
        ("ncclAllReduce", "allreduce", str(big), 4, 4096, 4096),
        ("ncclDevKernel_AllReduce", "allreduce", str(big), 4, 4096, 4096),
        ("ncclAllGather", "allgather", "9", 2, 100, 200),
        ("ncclReduceScatter", "reducescatter", "9", 2, 400, 200),
        ("ncclDevKernel_AllGather", "coalesced", "9", 2, 300, 300),
    ]


def test_waits_find_the_record_they_wait_for(tmp_path: Path) -> None:
    made = MadeReport(NEW)
    made.kernel("k", 0, 10)
    made.event(3, correlation=5, stream=7, eventSyncId=50)
    made.event(3, correlation=9, stream=8, eventSyncId=51)
    made.event(4, correlation=6, stream=9, eventSyncId=52)
    made.wait(2, 100, 100, correlation=7, event=3, streamId=20, eventSyncId=50)
    made.wait(2, 101, 101, correlation=10, event=3, streamId=20)
    made.wait(1, 102, 110, correlation=8, event=3, streamId=0)
    made.wait(3, 120, 130, correlation=11, streamId=7)
    made.wait(4, 140, 150, correlation=12, streamId=(1 << 32) - 1)
    made.wait(2, 160, 160, correlation=4, event=3, streamId=20)
    trace = read_one(made, tmp_path)
    assert [name for name, kind, _, _ in rows(trace) if kind == Kind.SYNC] == [
        "Stream Wait Event", "Stream Wait Event", "Event Sync", "Stream Sync", "Context Sync", "Stream Wait Event",
    ]  # fmt: skip
    assert trace.syncs.record_correlation.tolist() == [5, 9, 5, -1, -1, -1]
    assert trace.syncs.on_stream.tolist() == [7, 8, 7, 7, -1, -1]
    assert trace.slices.stream[trace.syncs.row].tolist() == [20, 20, 0, 7, -1, 20]


def test_old_waits_know_no_record(tmp_path: Path) -> None:
    made = MadeReport(OLD)
    made.kernel("k", 0, 10)
    made.wait(2, 100, 100, correlation=7, event=3, streamId=20)
    assert read_one(made, tmp_path).syncs.record_correlation.tolist() == [-1]


def test_what_is_sent_is_a_part_or_the_whole(tmp_path: Path) -> None:
    made = MadeReport()
    made.nccl_init(communicator=9, rank=0, ranks=4)
    for place, call in enumerate(("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "Gather", "Broadcast")):
        made.nccl(f"nccl{call}", 100 + place * 10, 101 + place * 10, communicator=9, size=10)
    made.nccl("ncclAllGather", 200, 201, communicator=8, size=10)
    made.kernel("k", 0, 1)
    collectives = read_one(made, tmp_path).collectives
    assert list(zip(collectives.in_elements.tolist(), collectives.out_elements.tolist(), strict=True)) == [
        (10, 10), (10, 40), (40, 10), (40, 40), (10, 40), (10, 10), (10, -1),
    ]  # fmt: skip


@GENERATIONS
def test_ranks_of_one_report_are_compared(tmp_path: Path, generation: str) -> None:
    """Both reach every collective's end together; rank 1 comes 50 µs later each time."""
    made = MadeReport(generation)
    for rank, pid in enumerate((10, 20)):
        made.pid = pid
        made.nccl_init(communicator=77, rank=rank, ranks=2)
        for step in range(4):
            at, late = step * 1_000_000, rank * 50_000
            made.nvtx(f"step {step}", at, at + 900_000, tid=pid)
            made.launched("gemm", at=at + 1000, start=at + 10_000, end=at + 300_000 + late, tid=pid)
            made.nccl("ncclAllReduce", at + 3000, at + 3500, communicator=77, size=1 << 20, tid=pid)
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            made.launched(name, at=at + 4000, start=at + 300_000 + late, end=at + 400_000, streamId=20, tid=pid)
    analyses = [analyze_rank(trace, rank) for rank, trace in enumerate(read_nsight(made.write(tmp_path / "a.sqlite")))]
    assert [each.meta.rank for each in analyses] == [0, 1]
    job = analyze_job(analyses)
    rows = {row["rank"]: row for row in job.distributed.to_rows()}
    assert [rows[rank]["wait_ns"] for rank in (0, 1)] == [150_000, 0]
    assert [rows[rank]["transfer_ns"] for rank in (0, 1)] == [150_000, 150_000]
    assert [rows[rank]["last_count"] for rank in (0, 1)] == [0, 3]
    assert analyses[0].exchanges.bytes.tolist() == [1 << 20] * 3


@GENERATIONS
def test_a_trace_for_each_process_with_work(tmp_path: Path, generation: str) -> None:
    made = MadeReport(generation)
    for pid in (300, 100, 200):
        made.pid = pid
        made.nvtx("forward", 0, 100, tid=pid)
        if pid != 200:
            made.launched(f"gemm of {pid}", at=10, start=50, end=60, tid=pid)
    made.add("MPI_RANKS", globalTid=packed(300, 300), rank=6)
    first, second = read_nsight(made.write(tmp_path / "report.sqlite"))
    assert [trace.meta.pid for trace in (first, second)] == [100, 300]
    assert [name for name, _, _, _ in rows(first)] == ["forward", "cudaLaunchKernel", "gemm of 100"]
    assert [name for name, _, _, _ in rows(second)] == ["forward", "cudaLaunchKernel", "gemm of 300"]
    assert first.meta.problems == ("processes without GPU work are left out: 200",)
    assert second.meta.problems == ()
    assert (first.meta.rank, second.meta.rank) == (None, 6 if generation == NEW else None)


def test_devices_are_numbered_as_their_process_does(tmp_path: Path) -> None:
    made = MadeReport(NEW)
    made.gpu(0, "A", 10)
    made.gpu(1, "B", 20)
    made.add("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=4000)
    made.kernel("k", 0, 10, gridX=40, blockX=32)
    trace = read_one(made, tmp_path)
    assert [(each["id"], each["name"]) for each in trace.meta.devices] == [(0, "B")]
    assert trace.kernels.blocks_per_sm.tolist() == [2.0]


def test_what_cannot_be_is_mended_and_said(tmp_path: Path) -> None:
    made = MadeReport()
    made.kernel("k", 100, 50, correlation=-7)
    made.nvtx("open", 10, None)
    trace = read_one(made, tmp_path)
    assert rows(trace) == [("k", Kind.KERNEL, 0, 0)]
    assert trace.slices.correlation.tolist() == [-1]
    assert trace.meta.problems == (
        "left out 1 NVTX range that never ended",
        "1 events end before they start, counted as taking no time",
    )


def test_texts_in_columns_of_numbers(tmp_path: Path) -> None:
    made = MadeReport()
    made.kernel("k", 100, 200)
    made.kernel("k", "120 ns", None, streamId="many")  # type: ignore[arg-type]
    made.rows["CUPTI_ACTIVITY_KIND_KERNEL"][1]["demangledName"] = b"\xff\xfe"
    made.nvtx(b"\xff text", 0, 10)  # type: ignore[arg-type]
    made.nvtx("payload", 0, 10, binaryData=b"short", jsonText="[1")
    trace = read_one(made, tmp_path)
    assert [name for name, kind, _, _ in rows(trace) if kind == Kind.KERNEL] == ["k", "(0)"]


def test_bare_tables(tmp_path: Path) -> None:
    """The least that people make by hand: no process, no names, no strings."""
    path = tmp_path / "bare.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 9)")
    database.close()
    (trace,) = read_nsight(path)
    assert rows(trace) == [("(-1)", Kind.KERNEL, 0, 4)]
    assert trace.meta.pid is None


def test_calls_tell_the_process_of_work_that_does_not(tmp_path: Path) -> None:
    made = MadeReport()
    made.launched("k", at=0, start=10, end=20, globalPid=None)
    assert read_one(made, tmp_path).meta.pid == 4000


@settings(max_examples=examples(60))
@given(data=st.data(), generation=st.sampled_from([OLD, NEW]))
def test_every_row_of_random_tables_is_there(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, generation: str
) -> None:
    """Against the rows themselves, one by one: zero-length, overlapping, reversed, unlinked, several processes."""
    times = st.tuples(st.integers(0, 500), st.integers(-3, 60))
    made = MadeReport(generation)
    expected: dict[int, list[tuple[str, Kind, int, int, int, int]]] = {}
    for pid in (10, 20):
        made.pid = pid
        own = expected.setdefault(pid, [])
        for start, dur in data.draw(st.lists(times, max_size=6)):
            stream = data.draw(st.sampled_from([0, 7, (1 << 32) - 1]))
            correlation = data.draw(st.integers(0, 3))
            made.kernel(f"k{dur}", start, start + dur, streamId=stream, correlation=correlation)
            own.append((f"k{dur}", Kind.KERNEL, start, max(dur, 0), stream if stream < 8 else -1, correlation))
        for start, dur in data.draw(st.lists(times, max_size=4)):
            made.memcpy(start, start + dur, size=dur, kind=8, source=2, to=2)
            own.append(("Memcpy DtoD (Device -> Device)", Kind.MEMCPY, start, max(dur, 0), 7, 0))
        has_work = bool(own)
        for start, dur in data.draw(st.lists(times, max_size=6)):
            correlation = data.draw(st.integers(0, 3))
            made.runtime("cuLaunchKernelEx_v11060_ptsz", start, start + dur, correlation=correlation)
            own.append(("cuLaunchKernelEx", Kind.RUNTIME, start, max(dur, 0), -1, correlation))
        for start, dur in data.draw(st.lists(times, max_size=4)):
            made.nvtx(f"range {dur}", start, start + abs(dur), registered=data.draw(st.booleans()))
            own.append((f"range {dur}", Kind.ANNOTATION, start, abs(dur), -1, -1))
        if not has_work:
            del expected[pid]
    path = tmp_path_factory.mktemp("random") / "a.sqlite"
    made.write(path)
    if not expected:
        with pytest.raises(TraceError):
            read_nsight(path)
        return
    traces = read_nsight(path)
    assert [trace.meta.pid for trace in traces] == list(expected)
    for trace in traces:
        assert trace.meta.pid is not None
        slices, origin_ns = trace.slices, trace.meta.origin_ns
        found = [
            (name, kind, start + origin_ns, dur, int(slices.stream[row]), int(slices.correlation[row]))
            for row, (name, kind, start, dur) in enumerate(rows(trace))
        ]
        assert sorted(found) == sorted(expected[trace.meta.pid])
        keys = [(start, -dur) for _, _, start, dur, _, _ in found]
        assert keys == sorted(keys)


# ── bad files ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_a_database(tmp_path: Path) -> None:
    made = MadeReport()
    made.kernel("k", 0, 1)
    assert is_sqlite(made.write(tmp_path / "a.sqlite"))
    (tmp_path / "b.sqlite").write_text("{}")
    assert not is_sqlite(tmp_path / "b.sqlite")
    assert not is_sqlite(tmp_path / "none")
    assert not is_sqlite(tmp_path)


def test_only_ranges(tmp_path: Path) -> None:
    made = MadeReport()
    made.nvtx("forward", 0, 10)
    path = made.write(tmp_path / "a.sqlite")
    with pytest.raises(TraceError, match=r"a\.sqlite contains no GPU work: was it recorded"):
        read_nsight(path)


def test_empty_tables(tmp_path: Path) -> None:
    made = MadeReport()
    made.rows["CUPTI_ACTIVITY_KIND_KERNEL"] = []
    with pytest.raises(TraceError, match=r"a\.sqlite contains no GPU work"):
        read_nsight(made.write(tmp_path / "a.sqlite"))


def test_no_database(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(TraceError, match="is not a readable SQLite database") as caught:
        read_nsight(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(TraceError, match="unable to open"):
        read_nsight(tmp_path / "none.sqlite")


def test_odd_names_are_no_parameters(tmp_path: Path) -> None:
    made = MadeReport()
    made.kernel("k", 0, 1)
    assert len(read_nsight(made.write(tmp_path / "a?mode=rwc#%41.sqlite"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a?mode=rwc#%41.sqlite"]


def test_views_and_computed_columns_are_never_asked(tmp_path: Path) -> None:
    path = tmp_path / "hostile.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 9)")
        database.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_MEMCPY AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 "
            "FROM n) SELECT start, start AS end FROM n"
        )
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER AS (start + 99))")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (6)")
        database.execute("CREATE TRIGGER t AFTER INSERT ON CUPTI_ACTIVITY_KIND_KERNEL BEGIN DELETE FROM StringIds; END")
    database.close()
    before = path.read_bytes()
    (trace,) = read_nsight(path)
    assert [(kind, dur_ns) for _, kind, _, dur_ns in rows(trace)] == [(Kind.KERNEL, 4), (Kind.MEMSET, 0)]
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_flipped_bytes(tmp_path: Path) -> None:
    """A trace or one clear line, whatever is damaged."""
    made = MadeReport(NEW)
    made.gpu()
    made.nccl_init(communicator=9, rank=0, ranks=2)
    for step in range(40):
        made.nvtx(f"step {step}", step * 1000, step * 1000 + 900, registered=step % 2 == 0)
        made.nccl("ncclAllReduce", step * 1000, step * 1000 + 10, communicator=9, size=10)
        made.launched("ncclDevKernel", at=step * 1000 + 5, start=step * 1000 + 100, end=step * 1000 + 200)
        made.memcpy(step * 1000, step * 1000 + 5, size=10)
    whole = made.write(tmp_path / "whole.sqlite").read_bytes()
    chance = random.Random(7)
    path = tmp_path / "a.sqlite"
    outcomes = set()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 5, 50))):
            data[chance.randrange(16, len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(100, len(data)) :]
        path.write_bytes(data)
        try:
            traces = read_nsight(path)
        except TraceError as error:
            assert "\n" not in str(error)
            outcomes.add("error")
        else:
            outcomes.add("trace")
            for trace in traces:
                analyze_rank(trace, 0)
    assert outcomes == {"error", "trace"}
