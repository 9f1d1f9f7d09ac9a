"""Files of every kind: what is made of them, and that none of them does harm."""

from __future__ import annotations

import json
import pickle
import resource
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from fakes.dumps import Call, FlightJob, as_version, stack_text, steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import DumpError, UsageError
from stepscope.flight import read as reading_module
from stepscope.flight.dump import Dump
from stepscope.flight.read import Reading, ranks_by_name, read_dump, read_paths
from stepscope.hangs.judge import judge_dumps

HANDLER = b"Handler dump_nccl_trace_pickle not found: is this process part of a distributed job?..."
VERSIONS = ["1.0", *(f"2.{minor}" for minor in range(11))]


def asleep(world: int = 4, rank: int = 1, backend: str = "gloo") -> FlightJob:
    job = FlightJob(world, backend=backend)
    job.run({r: steps(4) for r in range(world)}, until={rank: 7})
    return job


def verdict(dumps: Sequence[Dump], **beside: Any) -> tuple[str | None, list[int], int | None]:
    found = judge_dumps(dumps, **beside)
    return found["kind"], found["culprits"], found["sequence"]


def verdict_of(reading: Reading) -> tuple[str | None, list[int], int | None]:
    return verdict(reading.dumps, stacks=reading.stacks, errors=reading.errors, unreadable=reading.unreadable)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_version(version: str, backend: str) -> None:
    job = asleep(backend=backend)
    dumps = [read_dump(pickle.dumps(as_version(job.document(r), version), protocol=2), rank=r) for r in range(4)]
    assert verdict(dumps) == ("hang_missing_collective", [1], 8)
    assert {dump.version for dump in dumps} == {version}


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize(
    "name", ["rank_{}", "_dump_{}", "nccl_trace_rank_{}", "2026-10-11.{}.pkl", "gpu{}.json", "8_h{}"]
)
def test_any_name_and_form(tmp_path: Path, form: str, name: str) -> None:
    asleep(12, 10).write(tmp_path, name=name, form=form)
    reading = read_paths([tmp_path])
    assert [dump.rank for dump in reading.dumps] == list(range(12))
    assert verdict_of(reading) == ("hang_missing_collective", [10], 8)
    assert reading.problems == ()


def test_names_that_say_nothing(tmp_path: Path) -> None:
    """The groups tell: one rank is in all of them."""
    job = FlightJob(4, backend="nccl")
    for rank in range(4):
        job.add_group(f"{rank + 1}", "expert", [rank])
    job.run({r: steps(3) for r in range(4)}, until={2: 4})
    for rank, name in enumerate("dbca"):
        (tmp_path / name).write_bytes(pickle.dumps(job.document(rank), protocol=2))
    assert verdict_of(read_paths([tmp_path])) == ("hang_missing_collective", [2], 5)


def test_nothing_tells_the_rank(tmp_path: Path) -> None:
    asleep(2).write(tmp_path, name="dump", ranks=[0])
    reading = read_paths([tmp_path])
    assert [dump.rank for dump in reading.dumps] == [0]
    assert reading.problems == ("dump: its rank is unknown; assuming rank 0.",)


@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=40, unique=True), st.sampled_from(["rank_{}", "7_{}_x", "{}.p"])
)
def test_numbers_in_names(ranks: list[int], name: str) -> None:
    names = [name.format(rank) for rank in ranks]
    assert ranks_by_name(names) == dict(zip(names, ranks, strict=True))


def test_damaged_files_cost_only_themselves(tmp_path: Path) -> None:
    job = asleep(8, 1)
    job.write(tmp_path)
    whole = (tmp_path / "rank_3").read_bytes()
    (tmp_path / "rank_3").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "rank_4").write_bytes(b"")
    (tmp_path / "rank_5").write_bytes(HANDLER)
    (tmp_path / "rank_6").write_bytes(b"\x00\xff" * 40)
    (tmp_path / "rank_7").write_text("{")
    (tmp_path / "fault.log").write_text("Fault ranks: [1]")
    reading = read_paths([tmp_path])
    assert [dump.rank for dump in reading.dumps] == [0, 1, 2]
    assert reading.unreadable == (3, 4, 5, 6, 7)
    assert reading.problems == (
        "rank_3: not a pickle of plain data: pickle data was truncated.",
        "rank_4: it is empty.",
        f"rank_5: not a dump; it says “{HANDLER.decode()}”.",
        "rank_6: not a dump: neither a pickle nor JSON.",
        "rank_7: JSON that is damaged or cut off.",
    )
    assert verdict_of(reading) == ("hang_missing_collective", [1], 8), (
        "the one that is proven, not those that cannot be read"
    )


def test_stacks_errors_and_logs_beside_the_dumps(tmp_path: Path) -> None:
    job = asleep(4, 2)
    job.write(tmp_path / "comm_traces")
    for rank in range(4):
        (tmp_path / f"stacks_{rank}.txt").write_text("# note\n" + stack_text(("/job/data.py", 10 + rank, "load")))
    (tmp_path / "err_3.txt").write_text("Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n")
    logs = tmp_path / "structured_logs"
    logs.mkdir()
    rows: list[dict[str, Any]] = [
        {"rank": 2, "step": 5, "log_type_name": "step_start", "caller": "trainer.py:1:train", "time_us": 1},
        {"rank": 2, "step": 5, "log_type_name": "load_start", "caller": "trainer.py:7:batch", "time_us": 2},
        {"rank": 2, "step": 5, "log_type_name": "load_end", "caller": "trainer.py:7:batch", "time_us": 3},
        {"rank": 2, "step": 6, "log_type_name": "fwd_bwd_start", "caller": "trainer.py:9:train_step", "time_us": 4},
    ]
    text = 'cut off"}\n' + "".join(json.dumps(row) + "\n" for row in rows) + '{"rank": 2, "st'
    (logs / "training.global_rank_2.20261011-AB12.jsonl").write_text(text)
    reading = read_paths([tmp_path])
    assert reading.problems == ()
    assert sorted(reading.stacks) == [0, 1, 2, 3]
    assert sorted(reading.errors) == [3]
    assert (reading.logs[2].step, reading.logs[2].inside) == (6, ("step", "fwd_bwd"))
    found = judge_dumps(reading.dumps, stacks=reading.stacks, errors=reading.errors, logs=reading.logs)
    assert [(reason["rank"], reason["at"]["line"]) for reason in found["reasons"]] == [(2, 12)]
    assert [(row["rank"], row["step"], row["inside"], row["caller"]) for row in found["missing"]] == [
        (2, 6, ["step", "fwd_bwd"], "trainer.py:9:train_step")
    ]


def test_only_the_dumps_of_a_recorded_run_are_read(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "hang"
    asleep(2).write(run / "flight")
    (run / "run.json").write_text("{}")
    (run / "errors").mkdir()
    (run / "errors" / "22052.json").write_text('{"type": "SignalException"}')  # named after a process, not a rank
    for path in (run, tmp_path):
        reading = read_paths([path])
        assert ([dump.rank for dump in reading.dumps], reading.unreadable, reading.problems) == ([0, 1], (), ())
    (tmp_path / "healthy").mkdir()
    (tmp_path / "healthy" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="no dump found there"):
        read_paths([tmp_path / "healthy"])


def test_several_dumps_of_one_rank(tmp_path: Path) -> None:
    asleep(2).write(tmp_path / "old")
    late = FlightJob(2)
    late.run({rank: steps(9) for rank in range(2)})
    late.write(tmp_path / "new")
    reading = read_paths([tmp_path])
    assert verdict_of(reading) == (None, [], None), "the latest counts"
    assert reading.problems == (
        "rank_0: an older dump of rank 0 than rank_0.",
        "rank_1: an older dump of rank 1 than rank_1.",
    )


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        read_paths([tmp_path / "none"])
    with pytest.raises(UsageError, match="no dump found there"):
        read_paths([tmp_path])


def test_by_several_processes(tmp_path: Path) -> None:
    asleep(8, 5).write(tmp_path)
    seen: list[tuple[int, int]] = []
    reading = read_paths([tmp_path], progress=lambda done, total: seen.append((done, total)), jobs=2)
    assert verdict_of(reading) == ("hang_missing_collective", [5], 8)
    assert seen == [(number, 8) for number in range(1, 9)]


def fatal(path: Path) -> Any:
    """Stands in for a file that ends whoever reads it."""
    if path.name == "rank_3":
        import os

        os._exit(11)
    return READ_FILE(path)


READ_FILE = reading_module._read_file


def test_a_file_that_kills_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_module, "_read_file", fatal)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a fork has the stand-in, a fresh process has not
    asleep(8, 5).write(tmp_path)
    reading = read_paths([tmp_path], jobs=2)
    assert [dump.rank for dump in reading.dumps] == [0, 1, 2, 4, 5, 6, 7]
    assert reading.problems == ("rank_3: it crashes the process that reads it.",)


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("import pathlib; pathlib.Path('/tmp/stepscope-was-here').touch()",))


@pytest.mark.parametrize("protocol", range(6))
def test_hostile_pickles_run_nothing(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    evil = Evil()
    evil.__class__.__reduce__ = lambda self: (exec, (f"open({str(mark)!r}, 'w')",))  # type: ignore[method-assign]
    for data in (pickle.dumps(evil, protocol=protocol), pickle.dumps({"entries": [evil]}, protocol=protocol)):
        with pytest.raises(DumpError):
            read_dump(data)
    assert not mark.exists()


BOMBS = {
    "memo": b"\x80\x02}r\xff\xff\xff\xff.",
    "bytearray": b"\x80\x05\x96" + (1 << 42).to_bytes(8, "little") + b"x.",
    "bytes": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
    "frame": b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b"}.",
    "persistent": b"\x80\x02Ppid\n.",
    "extension": b"\x80\x02\x82\x01.",
    "global": b"\x80\x02cos\nsystem\n.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "deep list": b"\x80\x02" + b"(" * 100000 + b".",
    "deep tuple as a key": b"\x80\x02})" + b"\x85" * 300000 + b"K\x01s.",
    "own parent": b"\x80\x02]q\x00h\x00a.",
    "entries that hold themselves": b"\x80\x02}q\x00X\x07\x00\x00\x00entriesq\x01]q\x02h\x02as.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs(bomb: str) -> None:
    limit, used = resource.getrlimit(resource.RLIMIT_AS), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_dump(BOMBS[bomb])
    except DumpError:
        pass
    assert resource.getrlimit(resource.RLIMIT_AS) == limit, "the bound is taken back"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    assert grown < 1 << 19, "less than half a gigabyte, in units of a kilobyte"


def test_deep_and_hostile_json() -> None:
    with pytest.raises(DumpError, match="nested too deep"):
        read_dump(b'{"entries": ' + b"[" * 200000 + b"]" * 200000 + b"}")
    with pytest.raises(DumpError):
        read_dump(b'{"entries": ' + b"9" * 100000 + b"}")
    whole = read_dump(
        b'{"entries": [1, null, {"collective_seq_id": 1e400}, {"profiling_name": 7}, []], "pg_status": 3}'
    )
    assert isinstance(whole, Dump)


REAL = [pickle.dumps(asleep(2, backend=backend).document(0), protocol=2) for backend in ("gloo", "nccl")]
REAL.append(json.dumps(asleep(2).document(0)).encode())


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(REAL)))
    for _ in range(draw(st.integers(1, 12))):
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
        if kind == "flip":
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        else:
            data[at:at] = data[at : at + draw(st.integers(1, 200))]
        if not data:
            break
    return bytes(data)


@settings(max_examples=examples(250), suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_damaged_dumps_are_refused_or_judged(data: bytes) -> None:
    try:
        dump = read_dump(data, rank=0)
    except DumpError:
        return
    json.dumps(judge_dumps([dump, read_dump(REAL[0], rank=1)]), allow_nan=False)


@settings(max_examples=examples(200))
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    for damaged in (data, b"\x80\x02" + data, b"{" + data):
        try:
            read_dump(damaged)
        except DumpError:
            pass


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4) | st.tuples(inner)
    ),
    max_leaves=12,
)
KEYS = [
    "frames", "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "profiling_name",
    "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state", "retired", "is_p2p",
]  # fmt: skip


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), plain, max_size=8), max_size=4),
    st.dictionaries(st.sampled_from(["version", "pg_config", "pg_status", "rank"]), plain, max_size=4),
)
def test_any_data_in_the_right_places(rows: list[dict[str, Any]], around: dict[str, Any]) -> None:
    document = asleep(2).document(0)
    document["entries"] = [{**row, **more} for row, more in zip(document["entries"], rows, strict=False)]
    dump = read_dump(pickle.dumps({**document, **around}), rank=0)
    json.dumps(judge_dumps([dump, read_dump(REAL[0], rank=1)]), allow_nan=False)


@pytest.mark.parametrize(("claimed", "world"), [(1 << 17, 2), (1 << 62, 2), (40_000, 40_001)])
def test_claims_of_large_jobs(claimed: int, world: int) -> None:
    """Ranks have no gaps: one that no job has would have all below it looked for, pair by pair."""
    document = asleep(2).document(0)
    dump = read_dump(pickle.dumps({**document, "pg_config": {"a": [claimed]}}), rank=0)
    found = judge_dumps([dump, read_dump(REAL[0], rank=1)])
    assert found["world"] == world
    assert (found["kind"], len(found["suspects"])) == (
        "hang_unknown" if world == 2 else "rank_lost",
        world if world == 2 else world - 2,
    )
    assert read_dump(pickle.dumps({**document, "rank": claimed})).rank == (claimed if world > 2 else -1)


def test_dates_in_names_are_no_ranks(tmp_path: Path) -> None:
    names = ["dump-20261011", "dump-20261012"]
    assert ranks_by_name(names) == {}
    assert ranks_by_name([f"{name}.{place}.x" for place, name in enumerate(names)]) == {
        "dump-20261011.0.x": 0,
        "dump-20261012.1.x": 1,
    }


def test_coalesced_calls_are_one(tmp_path: Path) -> None:
    job = FlightJob(2, backend="nccl")
    job.run({rank: [Call(), Call(size=5)] for rank in range(2)})
    document = job.document(0)
    document["entries"][1]["collective_seq_id"] = 1
    dump = read_dump(pickle.dumps(document), rank=0)
    trace = dump.groups["0", "default_pg"]
    assert list(trace.sequences) == [1]
    assert dump.operations[trace.operations[0]].input_sizes == ((1024,), (5,))


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
def test_the_bound_of_the_caller_is_kept() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    read_dump(REAL[0], rank=0)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
