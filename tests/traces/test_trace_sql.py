"""SQL over traces, through the command as a user has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.traces import MadeTrace
from nsight import MadeReport

from stepscope.cli.main import run_command
from stepscope.errors import TraceError, UsageError
from stepscope.traces.model.window import window_of


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in (1, 0):
        made = MadeTrace(rank=rank, world_size=2, header={"deviceProperties": [{"id": 0, "name": "H100"}]})
        made.step(5, 0, 100)
        made.op("aten::mm", 1, 10, **{"Input Dims": [[2, 3]], "Sequence number": 7})
        made.launched("gemm", at=2, start=20, dur=30 + rank, **{"est. achieved occupancy %": 40})
        made.kernel("Memcpy HtoD (Pageable -> Device)", 60, 1, category="gpu_memcpy", bytes=64)
        made.step(6, 100, 100)
        made.launched("it's", at=101, start=110, dur=5, stream=9)
        made.memory(5, 1024, 2048, 4096)
        made.write(folder / f"w{rank}.json.gz")
    (folder / "notes.txt").write_text("no trace")
    return folder


def ask(path: Path, sql: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert run_command(["sql", "--json", str(path), sql]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_slices(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(traces, "select * from slices where rank = 1 order by row", capsys)
    assert list(found[0]) == [
        "rank", "row", "kind", "name", "start_ns", "dur_ns", "thread", "device", "stream", "step", "correlation",
        "external", "launch",
    ]  # fmt: skip
    assert [(row["kind"], row["name"], row["start_ns"], row["step"], row["launch"]) for row in found] == [
        ("annotation", "ProfilerStep#5", 0, 5, None),
        ("op", "aten::mm", 1000, 5, None),
        ("runtime", "cudaLaunchKernel", 2000, 5, None),
        ("kernel", "gemm", 20_000, 5, 2),
        ("memcpy", "Memcpy HtoD (Pageable -> Device)", 60_000, 5, None),
        ("annotation", "ProfilerStep#6", 100_000, 6, None),
        ("runtime", "cudaLaunchKernel", 101_000, 6, None),
        ("kernel", "it's", 110_000, 6, 6),
    ]
    assert found[0]["thread"] == "4000/4000"
    assert (found[0]["device"], found[3]["device"], found[7]["stream"]) == (None, 0, 9)


def test_the_other_tables(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = traces / "w1.json.gz"
    assert ask(path, "select rank, name, dims, sequence, step from ops", capsys) == [
        {"rank": 1, "name": "aten::mm", "dims": "[[2, 3]]", "sequence": 7, "step": 5}
    ]
    assert ask(path, "select name, dur_ns, occupancy, graph from kernels order by row", capsys) == [
        {"name": "gemm", "dur_ns": 31_000, "occupancy": 40.0, "graph": -1},
        {"name": "it's", "dur_ns": 5_000, "occupancy": pytest.approx(float("nan"), nan_ok=True), "graph": -1},
    ]
    assert ask(path, "select name, bytes from copies", capsys) == [
        {"name": "Memcpy HtoD (Pageable -> Device)", "bytes": 64}
    ]
    assert ask(path, "select time_ns, bytes, allocated, thread from memory", capsys) == [
        {"time_ns": 5000, "bytes": 1024, "allocated": 2048, "thread": "4000/4000"}
    ]
    for table in ("collectives", "syncs", "pythons"):
        assert ask(path, f"select * from {table}", capsys) == []
    found = ask(traces, "select rank, format, device, events from ranks order by rank", capsys)
    assert found == [{"rank": rank, "format": "kineto", "device": "H100", "events": 9} for rank in (0, 1)]


def test_collectives_have_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeReport()
    made.nccl("ncclAllReduce", 0, 10, communicator=9, size=64)
    made.launched("ncclDevKernel", at=5, start=20, end=30)
    path = made.write(tmp_path / "report.sqlite")
    assert ask(path, 'select kind, op, "group", in_elements, dtype from collectives order by row', capsys) == [
        {"kind": kind, "op": "allreduce", "group": "9", "in_elements": 64, "dtype": "Byte"}
        for kind in ("annotation", "kernel")
    ]


def test_it_agrees_with_the_columns(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.traces.reading.files import read_traces

    path = shared_data / "traces" / "kineto_resnet50_w0" / "worker0.1623143089861.pt.trace.json.gz"
    (trace,) = read_traces(path)
    step_of = window_of(trace, keep_last=True).step_of
    expected: dict[tuple[str, bool], list[int]] = {}
    for row in range(len(trace)):
        key = (trace.name(row), bool(step_of[row] >= 0))
        count, total = expected.get(key, (0, 0))
        expected[key] = [count + 1, total + int(trace.slices.dur_ns[row])]
    found = ask(path, "select name, step is not null as s, count(*) n, sum(dur_ns) ns from slices group by all", capsys)
    assert {(row["name"], row["s"]): [row["n"], int(row["ns"])] for row in found} == expected


def test_with_and_without_a_cache(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = "select rank, count(*) as n from kernels group by rank order by rank"
    expected = [{"rank": 0, "n": 2}, {"rank": 1, "n": 2}]
    assert ask(traces, sql, capsys) == expected
    with monkeypatch.context() as patch:
        patch.setenv("STEPSCOPE_CACHE_GB", "1")
        for folder in ("cache", "od'd [*]", "/dev/null"):
            patch.setenv("STEPSCOPE_CACHE", str(tmp_path / folder))
            for _ in range(2):
                assert ask(traces, sql, capsys) == expected
        stored = sorted((tmp_path / "cache" / "traces").glob("*/0-placed.parquet"))
        assert len(stored) == 2
        # A damaged file of the cache is one clear line; a missing one is made again.
        patch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
        stored[0].unlink()
        assert ask(traces, sql, capsys) == expected


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select nope from slices", "Referenced column"),
        ("select * from '/etc/passwd'", "Permission Error|does not exist"),
        ("select * from read_csv('/etc/passwd')", "Permission Error"),
        ("select * from glob('/etc/*')", "Permission Error"),
        ("copy slices to '/tmp/x.csv'", "COPY is not allowed"),
        ("copy (select 1) to '/tmp/x.parquet'", "COPY is not allowed"),
        ("export database '/tmp/x'", "EXPORT is not allowed"),
        ("attach '/tmp/x.db'", "ATTACH is not allowed"),
        ("install httpfs", "Permission Error|disabled"),
        ("set enable_external_access = true", "locked|Cannot"),
        ("set allowed_paths = ['/etc/passwd']", "locked|Cannot"),
        ("select 1; select 2", "only one statement"),
        ("", "empty"),
    ],
)
def test_the_database_is_shut_in(traces: Path, sql: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run_command(["sql", str(traces), sql])
    assert "\n" not in str(caught.value)


def test_each_rank_once(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several recordings of a rank the latest; a file that names none gets a free number."""
    late = MadeTrace(rank=1, world_size=2, header={"baseTimeNanoseconds": 10**12})
    late.kernel("late", 0, 5)
    late.write(traces / "late.json")
    unsaid = MadeTrace(rank=None)
    unsaid.kernel("unsaid", 0, 6)
    unsaid.write(traces / "a.json")
    assert run_command(["sql", "--csv", str(traces), "select rank, name from kernels order by all"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "rank,name\n0,gemm\n0,it's\n1,late\n2,unsaid\n"
    assert shown.err == (
        "stepscope: 1 file of an earlier recording of the same ranks left out: the latest is used\n"
        "stepscope: 1 file does not specify a rank; treated as rank 2\n"
    )


def test_bad_traces_are_said(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("nothing")
    with pytest.raises(TraceError, match=r"bad\.json"):
        run_command(["sql", str(bad), "select 1"])
