"""The Python API: frames of a job's traces, without torch and without a data frame library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes.traces import MadeTrace
from trace_jobs import MadeJob

import stepscope.traces
from stepscope.errors import TraceError
from stepscope.traces import Frame, TraceSet


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    """Four ranks that exchange; rank 2 computes longer."""
    folder = tmp_path_factory.mktemp("traces")
    job = MadeJob(world=4, layers=4, slower=lambda rank, step, layer: 50.0 if rank == 2 else 0.0)
    for rank, made in enumerate(job.ranks()):
        made.annotation("forward", 1, 5)
        made.memory(10, 100, 100 + rank, 512)
        made.write(folder / f"rank{rank}.json.gz")
    return stepscope.traces.open(folder, cache=False)


def test_a_job(traces: TraceSet) -> None:
    assert traces.ranks == (0, 1, 2, 3)
    assert traces.verdict
    assert traces.notices == ()
    assert list(traces.files()["rank"]) == [0, 1, 2, 3]
    assert traces.findings()["title"][0] == traces.job.findings[0].title
    assert (2,) in list(traces.findings()["ranks"])


def test_steps_and_phases(traces: TraceSet) -> None:
    steps, phases = traces.steps(), traces.phases()
    assert list(zip(steps["rank"], steps["step"], strict=True)) == [
        (rank, step) for rank in range(4) for step in range(3)
    ]
    assert (steps["end_ns"] - steps["start_ns"] == steps["dur_ns"]).all()
    assert (phases["wall_ns"] == steps["dur_ns"]).all()
    parts = [phases[f"{name}_ns"] for name in ("input", "forward", "backward", "optimizer", "communication", "other")]
    assert (np.sum(parts, axis=0) == phases["wall_ns"]).all()


def test_tables_of_a_rank(traces: TraceSet) -> None:
    kernels = traces.kernels(2)
    assert min(kernels["name"]) == "gemm_bf16"
    at = list(kernels["name"]).index("gemm_bf16")
    assert (kernels["count"][at], kernels["mean_ns"][at]) == (2 * 4 * 3, 250_000)
    assert "kernels" in traces.table_names(2)
    assert len(traces.operators(2)) == 0
    assert len(traces.table("no_such_table", 0)) == 0
    with pytest.raises(KeyError, match="no trace of rank 9; ranks: 0, 1, 2, 3"):
        traces.kernels(9)


def test_collectives(traces: TraceSet) -> None:
    found = traces.collectives()
    assert len(found) == 4 * 4 * 3
    assert set(found["last_rank"]) == {2}
    waits = found["wait_ns"]
    assert (waits[found["rank"] == 2] == 0).all()
    assert (waits[found["rank"] == 0] == 100_000).all()
    assert set(found["op"]) == {"all_reduce"}


def test_ranks_are_compared_over_the_steps_that_all_have(tmp_path: Path) -> None:
    """In the steps that only rank 0 recorded, collectives have no counterpart: waiting counted as transfer."""

    def slower(rank: int, step: int, layer: int) -> float:
        return 500_000.0 if rank == 1 and step not in (1, 2) else 0.0

    whole, short = MadeJob(world=2, steps=5, layers=4, kernel=20_000, slower=slower).ranks()
    began = {event["name"]: event["ts"] for event in short.events if "Step#" in event["name"]}
    short.events = [e for e in short.events if began["ProfilerStep#1"] <= e["ts"] < began["ProfilerStep#4"]]
    for rank, made in enumerate((whole, short)):
        made.write(tmp_path / f"rank{rank}.json.gz")
    found = stepscope.traces.open(tmp_path, cache=False)
    assert {rank: [step.number for step in each.steps] for rank, each in enumerate(found.job.ranks)} == {
        0: [1, 2],
        1: [1, 2],
    }
    assert [each.left_out.number for each in found.job.ranks if each.left_out is not None] == [3, 3]
    assert (found.verdict, found.job.findings) == (
        "Nothing stands out: 2 steps of 160 ms on 2 ranks; the device computes 100% of the step.",
        (),
    )
    assert found.notices == ("only steps 1 to 2 count: rank 0 recorded more, which other ranks' traces do not have",)
    pace, collectives = (
        [each.pace.step_ns for each in found.job.ranks],
        [len(each.exchanges) for each in found.job.ranks],
    )
    assert (pace, collectives) == ([160_085_000, 160_085_000], [8, 8])
    waits = found.collectives()
    assert (len(waits), set(waits["wait_ns"])) == (16, {0})


def test_recordings_without_a_common_step_are_compared_as_they_are(tmp_path: Path) -> None:
    for rank, first in enumerate((1, 11)):
        made = MadeTrace(rank=rank, world_size=2)
        for number in range(first, first + 3 + rank):
            made.step(number, 100 * (number - first), 90)
        made.write(tmp_path / f"rank{rank}.json")
    found = stepscope.traces.open(tmp_path, cache=False)
    assert ([len(each.steps) for each in found.job.ranks], found.notices) == ([2, 3], ())


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ({1: {3}}, [[4, 5, 6, 7, 8, 9]] * 3),  # not both sides of a gap, which its peers would fill
        ({1: {1, 2, 3, 4, 5, 6, 7}}, [[*range(1, 10)], [8, 9], [*range(1, 10)]]),  # a short trace takes no evidence
    ],
)
def test_steps_that_ranks_have_in_common_follow_each_other(
    tmp_path: Path, left_out: dict[int, set[int]], expected: list[list[int]]
) -> None:
    for rank in range(3):
        made = MadeTrace(rank=rank, world_size=3)
        for number in sorted({*range(1, 11)} - left_out.get(rank, set())):
            made.step(number, 100 * number, 90)
        made.write(tmp_path / f"rank{rank}.json")
    found = stepscope.traces.open(tmp_path, cache=False)
    assert [[step.number for step in each.steps] for each in found.job.ranks] == expected


def test_memory_and_slices(traces: TraceSet) -> None:
    assert traces.memory(3).rows() == [
        {
            "time_ns": 10_000,
            "device_type": 1,
            "device": 0,
            "bytes": 100,
            "allocated": 103,
            "reserved": 512,
            "address": -1,
        }
    ]
    slices = traces.slices(1)
    work = slices["kind"] == "kernel"
    launches = slices["launch"][work]
    assert set(slices["name"][launches]) == {"cudaLaunchKernel"}


def test_frames() -> None:
    frame = Frame({"a": [1, None], "b": ["x", None], "c": [1, 2], "d": [True, False]}, note="n", left_out=3)
    assert (len(frame), frame.columns, frame.note, frame.left_out) == (2, ("a", "b", "c", "d"), "n", 3)
    assert frame.rows() == [{"a": 1.0, "b": "x", "c": 1, "d": True}, {"a": None, "b": None, "c": 2, "d": False}]
    assert frame["c"].dtype == np.int64
    assert dict(frame).keys() == {"a", "b", "c", "d"}
    assert list(frame) == ["a", "b", "c", "d"]
    assert repr(frame) == "Frame(2 rows: a, b, c, d)"
    assert (len(Frame({})), Frame({}).rows()) == (0, [])
    with pytest.raises(ValueError, match="different lengths"):
        Frame({"a": [1], "b": []})


def test_other_libraries_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "polars", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    for convert in (Frame({}).to_pandas, Frame({}).to_polars, Frame({}).to_arrow):
        with pytest.raises(ImportError, match="is not installed"):
            convert()


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file or folder"):
        stepscope.traces.open(tmp_path / "none")
    with pytest.raises(TraceError, match="no traces found"):
        stepscope.traces.open(str(tmp_path))
    (tmp_path / "bad.json").write_text('{"traceEvents": 5}')
    with pytest.raises(TraceError):
        stepscope.traces.open(tmp_path / "bad.json", cache=False)
    with pytest.raises(TypeError):
        stepscope.traces.open()


def test_neither_torch_nor_a_data_frame_library(tmp_path: Path) -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    made.annotation("forward", 10, 20)
    made.write(tmp_path / "a.json")
    code = (
        "import sys, stepscope.traces as t\n"
        "assert 'numpy' not in sys.modules\n"
        "print(len(t.open(sys.argv[1], cache=False).phases()))\n"
        "assert not {'torch', 'pandas', 'polars', 'pyarrow'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
