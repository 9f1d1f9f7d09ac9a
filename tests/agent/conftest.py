"""Real agents beside real writers of rings: processes that do what a test tells them, line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from clock import FakeClockInSeconds
from waiting import until
from worker_server_stand_in import Behave, WorkerServer

from stepscope.records.series import RunData
from stepscope.store.create import RunPaths, create_run
from stepscope.store.file_io import read_jsonl
from stepscope.store.load import open_run

PATIENCE_S = 30.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

RANK = textwrap.dedent(
    """
    import os, platform, sys
    from pathlib import Path
    from stepscope.records.identity import RankIdentity
    from stepscope.ring import RingState
    from rings import RingStream, write_steps
    folder, rank, capacity = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    who = RankIdentity(host=platform.node(), pid=os.getpid(), rank=rank)
    stream = RingStream(folder / f"{os.getpid()}.ring", who, capacity=capacity)
    ring = stream.ring
    ring.set_state(RingState.RUNNING)
    step = 0
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "steps":
            write_steps(stream, int(number), first=step)
            step += int(number)
        elif word == "state":
            ring.set_state(RingState[number])
        print("ok", flush=True)
    """
)


class Rank:
    """A process with a ring, at our command."""

    def __init__(self, folder: Path, rank: int, capacity: int) -> None:
        command = [sys.executable, "-c", RANK, str(folder), str(rank), str(capacity)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: subprocess.Popen[str] = subprocess.Popen(command, env=ENVIRONMENT, **pipes)
        self._hear("ready")
        self.pid = self.process.pid
        self.path = folder / f"{self.pid}.ring"

    def steps(self, count: int) -> None:
        self._say(f"steps {count}")

    def end(self, state: str = "EXITED") -> None:
        self._say(f"state {state}")
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self._hear("ok")

    def _hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word


class RunningAgent:
    """An agent as the launcher starts it, with a pipe for its input."""

    def __init__(self, paths: RunPaths, *options: str, prelude: str = "") -> None:
        # Ranks that wait for our next word are no hang.
        places = ["--run-dir", str(paths.run_dir), "--session", str(paths.session), "--hang-after", "0", *options]
        command = [sys.executable, "-m", "stepscope.agent", *places]
        if prelude:
            code = f"{prelude}\nimport runpy, sys\nsys.argv = {['stepscope.agent', *places]!r}\n"
            code += "runpy.run_module('stepscope.agent', run_name='__main__')"
            command = [sys.executable, "-c", code]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process: subprocess.Popen[str] = subprocess.Popen(command, env=ENVIRONMENT, **pipes)

    def end(self, exit_code: int = 0, status: str = "finished") -> str:
        """Say that the job is over; what it complained about."""
        word = json.dumps({"end": {"exit_code": exit_code, "status": status}}) + "\n"
        _, complaints = self.process.communicate(word, timeout=PATIENCE_S)
        assert self.process.returncode == 0, complaints
        return complaints

    def leave(self) -> None:
        """Die as a launcher does: nobody holds the other end of the pipe any more."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None

    def wait(self) -> int:
        """For an agent that ends by itself."""
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Stage:
    """A run, its ranks and its agents; everything is gone when the test is over."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.run_dir = paths.run_dir
        self._started: list[Rank | RunningAgent] = []

    def rank(self, rank: int = 0, *, capacity: int = 1 << 18, folder: Path | None = None) -> Rank:
        started = Rank(folder or self.paths.session, rank, capacity)
        self._started.append(started)
        return started

    def agent(self, *options: str, prelude: str = "") -> RunningAgent:
        started = RunningAgent(self.paths, *options, prelude=prelude)
        self._started.append(started)
        return started

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_jsonl(self.run_dir / "events.jsonl")[0] if event["event"] in kinds]

    def until(self, done: Callable[[], Any]) -> None:
        until(done, timeout_s=PATIENCE_S)

    def until_event(self, kind: str, count: int = 1) -> None:
        self.until(lambda: len(self.events(kind)) >= count)

    def data(self) -> RunData:
        return open_run(self.run_dir)

    def steps(self) -> dict[int, list[int]]:
        return {series.rank: series.steps["step"].tolist() for series in self.data().ranks}

    def close(self) -> None:
        for one in self._started:
            if one.process.poll() is None:
                one.kill()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    command = ["python", "train.py"]
    stage = Stage(create_run(tmp_path / "runs", "test", command, environ={}, sessions=tmp_path / "sessions"))
    yield stage
    stage.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., WorkerServer]]:
    servers: list[WorkerServer] = []

    def start(behave: Behave, path: Path | None = None) -> WorkerServer:
        servers.append(WorkerServer(path or tmp_path / f"{len(servers)}.sock", behave))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def read_processes_in() -> Iterator[Callable[[Path], None]]:
    """Make psutil read a folder as if it was ``/proc``."""
    before = psutil.PROCFS_PATH

    def read_in(folder: Path) -> None:
        psutil.PROCFS_PATH = str(folder)

    yield read_in
    psutil.PROCFS_PATH = before


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for fd in (reading, writing):
        try:
            os.close(fd)
        except OSError:
            pass


@pytest.fixture
def clock() -> FakeClockInSeconds:
    return FakeClockInSeconds(5_000_000_000)
