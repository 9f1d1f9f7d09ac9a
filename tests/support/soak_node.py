"""A node whose clocks a test moves: a real agent and real writers of rings, a real hub, and a cable between them.

All processes read their clocks through a file of two numbers, by which they are ahead: the steady clock, so that hours
pass in seconds, and the time of day, which somebody may set.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from stepscope.records.run_clock import environment_of
from stepscope.store.create import RunPaths, create_run
from stepscope.store.documents import HubFile, read_meta, write_hub_file
from stepscope.store.file_io import read_jsonl

PATIENCE_S = 60.0
KEY_TEXT = "the key of a soak, long enough"
SMALL_JOURNALS = "from stepscope.store.inbox import journal; journal.JOURNAL_BYTES = 1 << 14"
"""A day of a soak fills many: they become parts, and their samples thin out."""
BYE = {"exit_code": 0, "status": "finished"}

CLOCKS = textwrap.dedent(
    """
    import mmap, struct, time
    with open({path!r}, "rb") as _file:
        _ahead = mmap.mmap(_file.fileno(), 16, prot=mmap.PROT_READ)
    def _moved(real, which, scale):
        return lambda: real() + struct.unpack_from("<q", _ahead, which)[0] // scale
    def _moved_s(real, which):
        return lambda: real() + struct.unpack_from("<q", _ahead, which)[0] / 1e9
    time.monotonic, time.monotonic_ns = _moved_s(time.monotonic, 0), _moved(time.monotonic_ns, 0, 1)
    time.perf_counter_ns = _moved(time.perf_counter_ns, 0, 1)
    time.time, time.time_ns = _moved_s(time.time, 8), _moved(time.time_ns, 8, 1)
    """
)
RANK = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from stepscope.records import run_clock
    from stepscope.records.identity import RankIdentity
    from stepscope.ring import RingState
    from rings import RingStream, write_steps
    run_clock.follow_environment()
    folder, rank, attempt = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    who = RankIdentity(host="b", pid=os.getpid(), rank=rank, world_size=2, attempt=attempt)
    stream = RingStream(folder / f"{os.getpid()}.ring", who)
    stream.ring.set_state(RingState.RUNNING)
    step = 0
    print("ready", flush=True)
    for line in sys.stdin:
        write_steps(stream, int(line), first=step)
        step += int(line)
        print("ok", flush=True)
    stream.ring.set_state(RingState.EXITED)
    """
)


class Clocks:
    """Those of a simulated machine; ``prelude`` makes a Python process read them."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._ahead = mmap.mmap(file.fileno(), 16)
        self.prelude = CLOCKS.format(path=str(path))
        self._passed_ns = self._set_ns = 0

    @property
    def passed_s(self) -> float:
        return self._passed_ns / 1e9

    def advance(self, seconds: float) -> None:
        """Time passes, on both."""
        self._passed_ns += round(seconds * 1e9)
        self._write()

    def set_time(self, seconds: float) -> None:
        """Somebody sets the time of day by so much; the steady clock does not care."""
        self._set_ns += round(seconds * 1e9)
        self._write()

    def _write(self) -> None:
        struct.pack_into("<qq", self._ahead, 0, self._passed_ns, self._passed_ns + self._set_ns)


class Cable:
    """Carries connections to a port, until it is cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._whole = True
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._ended = False
        self._thread = threading.Thread(target=self._carry, name="cable")
        self._thread.start()

    def cut(self) -> None:
        self._whole = False

    def mend(self) -> None:
        self._whole = True

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self._listening.close()

    def _carry(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        while not self._ended:
            if not self._whole:
                self._drop(other, *other)
            for connection in select.select([self._listening, *other], [], [], 0.02)[0]:
                if connection is self._listening:
                    self._accept(other)
                elif connection in other:
                    self._pass_on(other, connection)
        self._drop(other, *other)

    def _accept(self, other: dict[socket.socket, socket.socket]) -> None:
        near = self._listening.accept()[0]
        try:
            if not self._whole:
                raise OSError
            far = socket.create_connection(("127.0.0.1", self._to), 5)
        except OSError:
            near.close()
            return
        other[near], other[far] = far, near

    def _pass_on(self, other: dict[socket.socket, socket.socket], one: socket.socket) -> None:
        try:
            data = one.recv(1 << 16)
            other[one].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(other, one)

    @staticmethod
    def _drop(other: dict[socket.socket, socket.socket], *ends: socket.socket) -> None:
        for connection in ends:
            if connection in other:
                for end in (connection, other[connection]):
                    other.pop(end)
                    end.close()


class Process:
    """A Python process on the simulated clocks."""

    def __init__(self, clocks: Clocks, module: str, words: list[str], *, before: str = "", **more: Any) -> None:
        """``before``: code that it runs before the module."""
        code = f"{clocks.prelude}\n{before}\nimport runpy, sys\nsys.argv = {[module, *words]!r}\n"
        code += f"runpy.run_module({module!r}, run_name='__main__')"
        self.process = start(code, [], **more)
        self._memory = psutil.Process(self.process.pid)

    def memory_bytes(self) -> int:
        try:
            return int(self._memory.memory_info().rss)
        except psutil.Error:
            return 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def start(code: str, words: list[str], env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "STEPSCOPE_KEY": KEY_TEXT}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, env={**environment, **(env or {})}, text=True, **pipes, **more)


class Rank:
    def __init__(self, clocks: Clocks, folder: Path, rank: int, attempt: int, env: dict[str, str]) -> None:
        words = [str(folder), str(rank), str(attempt)]
        self.process = start(clocks.prelude + RANK, words, env)
        self._hear("ready")

    def steps(self, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        self._hear("ok")

    def end(self) -> None:
        self.process.communicate(timeout=PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _hear(self, word: str) -> None:
        assert self.process.stdout is not None
        text = self.process.stdout.readline().strip()
        assert text == word, self.process.communicate()[1]


class SoakNode:
    """The second node of a job of two, and the hub that the first one has."""

    def __init__(self, folder: Path, *, hub_disk: Path, node_disk: Path, hang_after_s: float = 0.0) -> None:
        self.clocks = Clocks(folder / "clocks")
        self.ranks: list[Rank] = []
        self.attempt = -1
        self.made: list[list[int]] = []
        """By attempt and rank: how many steps were completed."""
        self._world, self._hang_after_s = 2, hang_after_s
        sessions = folder / "sessions"
        self.hub_paths: RunPaths = create_run(hub_disk, "job", ["python", "train.py"], environ={}, sessions=sessions)
        self.paths: RunPaths = create_run(node_disk, "job.node1", ["python", "train.py"], environ={}, sessions=sessions)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.cable = Cable(self._listening.getsockname()[1])
        url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        write_hub_file(self.hub_paths.run_dir, HubFile(url=url, token=secrets.token_hex(16)))
        self._env = environment_of(read_meta(self.paths.run_dir))
        self.hub: Process | None = None
        self.agent: Process | None = None
        self.start_hub()
        self.start_agent()
        self.start_ranks()

    def start_hub(self) -> None:
        if self.hub is not None:
            self.hub.kill()
        fd = self._listening.fileno()
        words = ["--run-dir", str(self.hub_paths.run_dir), "--fd", str(fd), "--nnodes", "2", "--name=job"]
        self.hub = Process(self.clocks, "stepscope.hub", words, before=SMALL_JOURNALS, pass_fds=[fd])

    def start_agent(self) -> None:
        if self.agent is not None:
            self.agent.kill()
        places = ["--run-dir", str(self.paths.run_dir), "--session", str(self.paths.session)]
        places += ["--hang-after", str(self._hang_after_s)]
        where = ["--hub", f"http://127.0.0.1:{self.cable.port}", "--node", "1", "--nnodes", "2", "--run-name", "job"]
        self.agent = Process(self.clocks, "stepscope.agent", [*places, *where])

    def start_ranks(self) -> None:
        """All of them again, as a launcher does after a failure."""
        for rank in self.ranks:
            rank.kill()
        self.attempt += 1
        self.made.append([0] * self._world)
        numbers = range(self._world)
        self.ranks = [Rank(self.clocks, self.paths.session, n, self.attempt, self._env) for n in numbers]

    def steps(self, count: int) -> None:
        for number, rank in enumerate(self.ranks):
            rank.steps(count)
            self.made[-1][number] += count

    def finish(self) -> dict[str, Any]:
        """The job ends; what the agent says of its delivery."""
        for rank in self.ranks:
            rank.end()
        assert self.agent is not None and self.hub is not None
        said, complaints = self.agent.process.communicate(json.dumps({"end": BYE}) + "\n", timeout=3 * PATIENCE_S)
        assert self.agent.process.returncode == 0, complaints
        _, complaints = self.hub.process.communicate(json.dumps({"end": BYE}) + "\n", timeout=3 * PATIENCE_S)
        assert self.hub.process.returncode == 0, complaints
        return dict(json.loads(said.splitlines()[-1]))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_jsonl(self.paths.run_dir / "events.jsonl")[0] if event["event"] == kind]

    def until(self, done: Callable[[], Any]) -> None:
        """Simulated time goes on meanwhile: pauses that doubled must not be waited for."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)
            self.clocks.advance(0.1)

    def close(self) -> None:
        for one in (*self.ranks, self.agent, self.hub):
            if one is not None and one.process.poll() is None:
                one.kill()
        self.cable.close()
        self._listening.close()
