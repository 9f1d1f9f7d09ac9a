"""Torch's worker server in a training process: it answers, and nobody else notices it."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stepscope.recorder import worker_server
from stepscope.recorder.worker_server import ServerOffer, cgroup_rooms, has_room_for
from stepscope.records.identity import RankIdentity
from stepscope.ring import RingReader, RingWriter
from stepscope.ring.layout import MIN_CAPACITY, SERVER_WORD

BEGIN = textwrap.dedent(
    """
    import os, signal, socket, subprocess, sys, time
    from pathlib import Path
    import torch
    from stepscope.recorder import guard
    from stepscope.recorder.worker_server import ServerOffer
    from stepscope.records.identity import RankIdentity
    from stepscope.ring import RingWriter
    from stepscope.ring.layout import MIN_CAPACITY, SERVER_WORD
    folder = Path(sys.argv[1])
    ring = RingWriter(folder / "1.ring", RankIdentity(host="node", pid=os.getpid()), capacity=MIN_CAPACITY)
    path = folder / "1.sock"
    offer = ServerOffer()
    os.register_at_fork(after_in_child=offer.forget)

    def ask(what="ping"):
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(30)
            one.connect(str(path))
            head = (f"POST /handler/{what} HTTP/1.1", "Host: here", "Content-Length: 0", "Connection: close", "", "")
            one.sendall("\\r\\n".join(head).encode())
            answer = b""
            while more := one.recv(1 << 16):
                answer += more
            return answer.decode()

    def sockets():
        found = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum(os.path.lexists(one) and os.readlink(one).startswith("socket:") for one in found)

    offer.open(ring, ranks_here=1)
    assert guard.failures() == 0
    """
)


ANSWERS = """
assert ring.header[SERVER_WORD] == 1
assert "200 OK" in ask()
assert "pg_status" in ask("fr_trace_json") or "entries" in ask("fr_trace_json")
assert path.stat().st_mode & 0o777 == 0o600
offer.open(ring, ranks_here=1)  # once is enough
"""
FORKS = """
assert sockets() == 1
pid = os.fork()
if not pid:
    sys.exit(sockets())  # through the end of the interpreter, where a destructor would wait for ever
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert ring.header[SERVER_WORD] == 1
assert "200 OK" in ask()
code = "import os; print(sum(os.readlink(f'/proc/self/fd/{n}').startswith('socket:') for n in (3, 4, 5, 6, 7) "
code += "if os.path.lexists(f'/proc/self/fd/{n}')))"
assert subprocess.run([sys.executable, "-c", code], capture_output=True, close_fds=False).stdout == b"0\\n"
"""
LOGS = """
from torch._C._distributed_c10d import _WorkerServer
other = _WorkerServer(str(folder / "own.sock"))
time.sleep(0.2)  # until it listens: torch waits for ever for one that is shut down earlier
other.shutdown()
"""
ENDS = {
    "": 0,
    "sys.exit(3)": 3,
    "raise ValueError('bad')": 1,
    "os._exit(7)": 7,
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)": -signal.SIGTERM,
    "import atexit; atexit.register(ask)": 0,
    "os.execv(sys.executable, [sys.executable, '-c', ''])": 0,
}
FORKED = """
import json, os, sys
from pathlib import Path
import torch
import stepscope.recorder.worker_server, stepscope.ring  # once for all
top, codes = Path(sys.argv[1]), []
for number, program in enumerate(json.load(sys.stdin)):
    (folder := top / str(number)).mkdir()
    if not (pid := os.fork()):
        os.dup2(os.open(f"{folder}.stderr", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv[1] = str(folder)
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    print(json.dumps(codes))
    sys.exit()
exec(program)
"""


class Ended(NamedTuple):
    """How a program went."""

    code: int
    stderr: str
    folder: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """By program.  All are forked from one process that has loaded torch."""
    top = tmp_path_factory.mktemp("ended")
    programs = [ANSWERS, FORKS, LOGS, *ENDS]
    # A process that aborts prints its stack: one that ran exec aborted once in a full run, and nobody knows where.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONFAULTHANDLER": "1"}
    whole = json.dumps([BEGIN + program for program in programs])
    command = [sys.executable, "-c", FORKED, str(top)]
    done = subprocess.run(command, env=environment, input=whole, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = {}
    for number, (program, code) in enumerate(zip(programs, json.loads(done.stdout), strict=True)):
        stderr = top / f"{number}.stderr"
        found[program] = Ended(code, stderr.read_text(), top / str(number))
    return found


def test_it_answers_and_goes_with_the_process(ended: dict[str, Ended]) -> None:
    code, stderr, folder = ended[ANSWERS]
    assert (code, stderr) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == ["1.ring"]
    reader = RingReader(folder / "1.ring")
    assert not reader.server_offer()
    reader.close()


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_as_it_would_without_it_even_at_once(ended: dict[str, Ended], end: str) -> None:
    code, stderr, _ = ended[end]
    assert code == ENDS[end], stderr
    assert "Server" not in stderr
    assert stderr == "" or "ValueError: bad" in stderr


def test_a_fork_has_neither_the_socket_nor_anything_to_wait_for(ended: dict[str, Ended]) -> None:
    assert ended[FORKS][:2] == (0, "")


def test_the_log_level_is_the_users_again(ended: dict[str, Ended]) -> None:
    code, stderr, _ = ended[LOGS]
    assert code == 0
    assert stderr.count("Server listening") == 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of servers; they are not, in this process."""
    import torch

    paths: list[str] = []

    def bind(path: str) -> None:
        paths.append(path)
        Path(path).touch(mode=0o666)

    monkeypatch.setattr(torch._C._distributed_c10d, "_WorkerServer", bind)
    monkeypatch.setattr(ctypes.pythonapi, "Py_IncRef", lambda _: None)
    monkeypatch.setattr(worker_server.atexit, "register", lambda _: None)
    return paths


def make_offer(*, room: bool = True) -> ServerOffer:
    """Of a process that has room for more threads, or not."""
    return ServerOffer(has_room=lambda _: room)


def test_a_stale_socket_is_in_nobodys_way(ring: RingWriter, started: list[str], tmp_path: Path) -> None:
    (tmp_path / "1.sock").write_text("stale")
    offer = make_offer()
    offer.open(ring, ranks_here=1)
    assert ((tmp_path / "1.sock").read_text(), ring.header[SERVER_WORD]) == ("", 1)
    offer.withdraw()
    assert ring.header[SERVER_WORD] == 0
    assert (len(started), sorted(path.name for path in tmp_path.iterdir())) == (1, ["1.ring"])


def test_nobody_else_can_connect_wherever_the_ring_is(
    ring: RingWriter, started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run directory that is open to the group, with a umask that is as well."""
    modes: list[int] = []
    real = Path.chmod

    def chmod(path: Path, mode: int) -> None:
        modes.append(path.parent.stat().st_mode & 0o777)
        real(path, mode)

    monkeypatch.setattr(Path, "chmod", chmod)
    real(tmp_path, 0o777)
    before = os.umask(0o002)
    try:
        make_offer().open(ring, ranks_here=1)
    finally:
        os.umask(before)
    assert modes == [0o700], "where it was made, before it was closed itself"
    assert (len(started), (tmp_path / "1.sock").stat().st_mode & 0o777) == (1, 0o600)


def test_a_child_closes_nothing_that_is_not_the_socket(ring: RingWriter, started: list[str]) -> None:
    offer = make_offer()
    offer.open(ring, ranks_here=1)
    offer._fd = other = os.open(os.devnull, os.O_RDONLY)
    offer.forget()
    os.close(other)
    assert ring.header[SERVER_WORD] == 1


@pytest.mark.parametrize(
    ("name", "value"), [("STEPSCOPE_SERVER", "0"), ("TORCH_WORKER_SERVER_SOCKET", "/tmp/theirs.sock")]
)
def test_switched_off_or_left_to_the_script(
    ring: RingWriter, started: list[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    make_offer().open(ring, ranks_here=1)
    assert (started, ring.header[SERVER_WORD]) == ([], 0)


def test_none_beside_torchs_own_debug_server(
    ring: RingWriter, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    debug: Any = type(sys)("torch.distributed.debug")
    debug._WORKER_SERVER = object()
    monkeypatch.setitem(sys.modules, "torch.distributed.debug", debug)
    make_offer().open(ring, ranks_here=1)
    assert started == []


@pytest.mark.parametrize("missing", ["room", "level", "server"])
def test_none_without_what_it_needs(
    ring: RingWriter, started: list[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "level":
        monkeypatch.setattr(worker_server, "LOG_LEVEL", "FLAGS_of_another_build")
    elif missing == "server":
        import torch

        monkeypatch.delattr(torch._C._distributed_c10d, "_WorkerServer")
    make_offer(room=missing != "room").open(ring, ranks_here=1)
    assert (started, ring.header[SERVER_WORD]) == ([], 0)


def test_none_where_the_path_is_too_long_for_a_socket(started: list[str], tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    ring = RingWriter(folder / "1.ring", RankIdentity(host="node", pid=os.getpid()), capacity=MIN_CAPACITY)
    make_offer().open(ring, ranks_here=1)
    ring.close()
    assert started == []


def test_room_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], limits[which]))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert has_room_for(50, [100])
    assert not has_room_for(51, [100])
    limits[resource.RLIMIT_NPROC] = 20
    assert not has_room_for(10, [100])
    limits[resource.RLIMIT_NPROC] = resource.RLIM_INFINITY
    limits[resource.RLIMIT_AS] = 1 << 40
    assert not has_room_for(1, [100])


def test_every_control_group_on_the_way_up_counts(tmp_path: Path) -> None:
    mounted, proc = tmp_path / "cgroup", tmp_path / "proc"
    job = mounted / "pids" / "slurm" / "job"
    job.mkdir(parents=True)
    unified = mounted / "user"
    unified.mkdir()
    for folder, most, now in ((job, "max", 5), (job.parent, "500", 100), (unified, "60", 50)):
        (folder / "pids.max").write_text(f"{most}\n")
        (folder / "pids.current").write_text(f"{now}\n")
    proc.write_text("7:pids:/slurm/job\n3:cpu,cpuacct:/other\n0::/user/gone\n")
    assert cgroup_rooms(proc, mounted) == [400, 10]
    proc.unlink()
    assert cgroup_rooms(proc, mounted) == []
