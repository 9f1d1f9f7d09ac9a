"""``stepscope snapshot``: the request reaches the rank, and its answer the user.  A stand-in replaces the GPU."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rings import RingStream

from stepscope.cli.analysis.snapshot import request_snapshot
from stepscope.cli.main import run_command
from stepscope.errors import RunError, StepscopeError
from stepscope.recorder.layers import memory_dump
from stepscope.recorder.layers.memory_dump import SnapshotRequests
from stepscope.records.identity import RankIdentity
from stepscope.records.paths import ANSWER_SUFFIX, ASK_SUFFIX, SNAPSHOT_SUFFIX, snapshot_path
from stepscope.ring.layout import HEADER_BYTES, REQUESTS_WORD
from stepscope.store.create import RunPaths, create_run

SNAPSHOT = {"segments": [], "device_traces": [[]]}


@dataclass
class Cuda:
    """As much of torch as a snapshot needs, with a GPU; counts what was asked of it."""

    history: bool = False
    calls: list[Any] = field(default_factory=list)

    def torch(self) -> Any:
        counts = {"active": {"all": {"current": 5}}}

        def record(**settings: Any) -> None:
            self.calls.append(settings)
            self.history = settings["enabled"] is not None

        memory = SimpleNamespace(_snapshot=lambda: {**SNAPSHOT, "history": self.history}, _record_memory_history=record)
        cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0, memory=memory)
        native = SimpleNamespace(_cuda_memoryStats=lambda index: counts, _cuda_isHistoryEnabled=lambda: self.history)
        return SimpleNamespace(cuda=cuda, _C=native)


@pytest.fixture
def run_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.chdir(tmp_path)
    return create_run(tmp_path / "runs", "job", ["python", "train.py"], sessions=tmp_path / "sessions")


def make_ring(paths: RunPaths, *, rank: int = 0, device: str = "cuda") -> RingStream:
    who = RankIdentity(host="node", pid=os.getpid(), rank=rank, world_size=4, device=device)
    return RingStream(paths.session / f"{os.getpid()}{rank}.ring", who)


@pytest.fixture
def training() -> Iterator[Callable[[RingStream, Cuda], None]]:
    """Ranks that end one step after the other, until the test is over."""
    over = threading.Event()
    threads: list[threading.Thread] = []
    streams: list[RingStream] = []

    def start(stream: RingStream, cuda: Cuda) -> None:
        requests = SnapshotRequests(cuda.torch(), stream.ring.path, stream.ring.header)

        def train() -> None:
            step = 0
            while not over.wait(0.001):
                requests.check(step, busy=False)
                step += 1

        streams.append(stream)
        threads.append(threading.Thread(target=train))
        threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join()
    for stream in streams:
        stream.close()


def test_a_rank_is_asked_and_its_snapshot_saved(
    run_paths: RunPaths, training: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make_ring(run_paths, rank=2), make_ring(run_paths, rank=3)
    cuda = Cuda()
    training(second, cuda)
    assert run_command(["snapshot", "job", "--rank", "3"]) == 0
    assert pickle.loads(Path("snapshot-rank-3.pickle").read_bytes()) == {**SNAPSHOT, "history": False}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("snapshot-rank-3.pickle: rank 3 after step ")
    assert lines[1:] == [
        "Drop it on https://pytorch.org/memory_viz (it stays on your machine), or",
        "python -m torch.cuda._memory_viz segment_plot snapshot-rank-3.pickle -o snapshot-rank-3.html",
    ]
    assert cuda.calls == []
    beside = {path.suffix for path in run_paths.session.iterdir()}
    assert not beside & {ASK_SUFFIX, ANSWER_SUFFIX, SNAPSHOT_SUFFIX, ".partial", ".asking"}
    first.close()


def test_history_is_recorded_for_a_while_and_turned_off(
    run_paths: RunPaths, training: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, cuda = make_ring(run_paths), Cuda()
    training(stream, cuda)
    assert run_command(["snapshot", "job", "--history", "0.01", "-o", "with.pickle"]) == 0
    assert pickle.loads(Path("with.pickle").read_bytes())["history"] is True
    assert cuda.calls == [
        {"enabled": "all", "context": "all", "stacks": "python", "max_entries": 100_000},
        {"enabled": None},
    ]
    output = capsys.readouterr().out
    assert "with 10.0 ms of history" in output
    assert "trace_plot with.pickle -o with.html" in output


def test_a_history_of_the_scripts_own_is_left_alone(
    run_paths: RunPaths, training: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, cuda = make_ring(run_paths), Cuda(history=True)
    training(stream, cuda)
    assert run_command(["snapshot", "job", "--history", "0.01"]) == 0
    assert (cuda.calls, cuda.history) == ([], True)
    assert "with the history that the script records" in capsys.readouterr().out


def failed(code: int, *words: str) -> str:
    with pytest.raises(StepscopeError) as raised:
        run_command(["snapshot", *words])
    assert raised.value.exit_code == code
    return str(raised.value)


def test_who_cannot_be_asked(run_paths: RunPaths) -> None:
    hint = "`stepscope memory runs/job` shows what its layers held"
    assert failed(3, "job") == f"no rank of runs/job runs on this host; {hint}"
    path = snapshot_path(run_paths.run_dir, 0)
    path.parent.mkdir()
    path.touch()
    assert failed(3, "job").endswith("; runs/job/memory/rank_0.pickle was written when it ran out of memory")
    streams = [make_ring(run_paths, rank=rank, device="cpu") for rank in (0, 1, 2)]
    assert failed(2, "job") == "which rank? Name it with --rank; running on this host: 0–2"
    assert failed(2, "job", "--rank", "7") == "rank 7 is not running on this host; running on this host: 0–2"
    assert failed(3, "job", "--rank", "1") == (
        "rank 1 trains on cpu, and only CUDA's allocator can be asked for a snapshot; "
        "`stepscope memory runs/job` shows what its layers hold"
    )
    assert failed(2, "job", "--history", "601") == "--history: at most 600 seconds, not 601"
    assert failed(3, "jib").startswith("no run named jib: looked for jib and runs/jib")
    meta = run_paths.run_dir / "run.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "place": None, "host": "elsewhere"}))
    assert failed(3, "job", "--rank", "1") == "runs/job is recorded on elsewhere; run this command there"
    for stream in streams:
        stream.close()


def ask(stream: RingStream, said: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Ask a rank that answers as soon as someone waits for it, or never."""
    path, seconds = stream.ring.path, iter(range(1000))

    def sleep(_: float) -> None:
        request = json.loads(path.with_suffix(ASK_SUFFIX).read_bytes())
        if said is not None:
            path.with_suffix(ANSWER_SUFFIX).write_text(json.dumps({"id": request["id"], **said}))

    settings: dict[str, Any] = {"rank": 3, "history_s": 0.0, "wait_s": 20.0, "alive": lambda: True, **more}
    return request_snapshot(path, now_s=lambda: float(next(seconds)), sleep=sleep, **settings)


def test_answers_that_are_none(tmp_path: Path) -> None:
    stream = RingStream(tmp_path / "7.ring", RankIdentity(host="node", pid=7))
    with pytest.raises(RunError, match="rank 3 took no snapshot: it would be larger than 5 MiB"):
        ask(stream, {"state": "failed", "problem": "it would be larger than 5 MiB"})
    with pytest.raises(
        RunError, match=r"rank 3 has not answered within 20\.0 s: a rank checks for requests after a step"
    ):
        ask(stream, None)
    with pytest.raises(RunError, match="recorded its history but has not ended a step since"):
        ask(stream, {"state": "recording"})
    with pytest.raises(RunError, match="rank 3 ended before it answered"):
        ask(stream, None, alive=lambda: False)
    with pytest.raises(RunError, match="has not answered"):
        ask(stream, {"id": "of another request", "state": "done"})
    assert [path.name for path in tmp_path.iterdir()] == ["7.ring"]
    stream.ring.path.unlink()
    with pytest.raises(RunError, match="rank 3 ended before it answered"):
        ask(stream, None)
    stream.close()


# -- the rank's side --------------------------------------------------------------------------------------------------


def words() -> memoryview:
    """The header of a ring, without its file."""
    return memoryview(bytearray(HEADER_BYTES)).cast("Q")


def test_the_word_is_read_twice_a_second(tmp_path: Path) -> None:
    now = 0.0
    requests = SnapshotRequests(Cuda().torch(), tmp_path / "7.ring", words(), now_s=lambda: now)
    looks = []
    for step in range(20_000):
        now += 0.001 if step < 10_000 else 1.0
        if step >= requests.due_at:
            requests.check(step, busy=False)
            looks.append((step, now))
    fast = [now for step, now in looks if 2_000 < step < 10_000]
    assert {round(two - first, 3) for first, two in pairwise(fast)} == {0.512}
    slow = [now for step, now in looks if step > 11_000]
    assert {round(two - first, 3) for first, two in pairwise(slow)} == {1.0}


def test_nothing_happens_while_a_graph_is_captured(tmp_path: Path) -> None:
    cuda, ring, header = Cuda(), tmp_path / "7.ring", words()
    requests = SnapshotRequests(cuda.torch(), ring, header)
    ring.with_suffix(ASK_SUFFIX).write_text(json.dumps({"id": "one", "history_s": 0}))
    header[REQUESTS_WORD] += 1
    requests.check(0, busy=True)
    assert [path.suffix for path in tmp_path.iterdir()] == [ASK_SUFFIX]
    requests.check(1, busy=False)
    assert {path.suffix for path in tmp_path.iterdir()} == {ANSWER_SUFFIX, SNAPSHOT_SUFFIX}


@pytest.mark.parametrize("text", ["", "[]", '{"id": 3}'])
def test_a_damaged_request_is_dropped(tmp_path: Path, text: str) -> None:
    ring, header = tmp_path / "7.ring", words()
    ring.with_suffix(ASK_SUFFIX).write_text(text)
    requests = SnapshotRequests(Cuda().torch(), ring, header)
    header[REQUESTS_WORD] += 1
    requests.check(0, busy=False)
    assert not ring.with_suffix(ANSWER_SUFFIX).exists()


def test_history_ends_with_the_hooks_and_where_torch_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, ring, header = Cuda(), tmp_path / "7.ring", words()
    torch = cuda.torch()
    requests = SnapshotRequests(torch, ring, header, now_s=lambda: 5.0)
    ring.with_suffix(ASK_SUFFIX).write_text(json.dumps({"id": "one", "history_s": 1e9}))
    header[REQUESTS_WORD] += 1
    requests.check(0, busy=False)
    assert json.loads(ring.with_suffix(ANSWER_SUFFIX).read_bytes()) == {"id": "one", "state": "recording"}
    assert requests._until_s == pytest.approx(5.0 + memory_dump.LONGEST_HISTORY_S)
    requests.stop()
    assert cuda.calls[-1] == {"enabled": None}

    def refuse(**_: Any) -> None:
        raise TypeError("unknown argument")

    torch.cuda.memory._record_memory_history = refuse
    ring.with_suffix(ASK_SUFFIX).write_text(json.dumps({"id": "two", "history_s": 1}))
    header[REQUESTS_WORD] += 1
    requests.check(1, busy=False)
    assert json.loads(ring.with_suffix(ANSWER_SUFFIX).read_bytes())["state"] == "failed"
