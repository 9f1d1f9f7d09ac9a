"""What native code prints: in the log and in the evidence of a crash, and the job notices nothing of it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until

PATIENCE_S = 60.0
TERMINATE = "terminate called after throwing an instance of 'std::runtime_error'"

PRINTS = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
stderr = ctypes.c_void_p.in_dll(libc, "stderr")
print("1 print", file=sys.stderr)
os.write(2, b"2 os.write\\n")
libc.fputs(b"3 fputs\\n", stderr)
print("4 print on stdout", flush=True)
child = os.fork()
if not child:
    print("5 forked child", file=sys.stderr, flush=True)
    os.write(2, b"6 forked child, native\\n")
    os._exit(0)
os.waitpid(child, 0)
subprocess.run(["sh", "-c", "echo 7 subprocess >&2"])
libc.fprintf(stderr, b"8 fprintf\\n")
print("9 print", os.isatty(1), os.isatty(2), file=sys.stderr)
"""
ABORTS = f"""
import stepscope
for step in range(3):
    with stepscope.step():
        pass
libc.fputs(b"{TERMINATE}\\n  what():  told to token=hunter2\\n", stderr)
os.abort()
"""


def run_into(commands: Any, words: list[str], stdout: Any, stderr: Any) -> subprocess.CompletedProcess[bytes]:
    how: dict[str, Any] = {"cwd": commands.folder, "env": commands.environment(), "stdin": subprocess.DEVNULL}
    return subprocess.run([sys.executable, *words], stdout=stdout, stderr=stderr, timeout=PATIENCE_S, **how)


RECORDED = ["-m", "stepscope", "run", "--quiet", "--no-hub", "--name", "ours"]


def test_a_file_has_the_same_bytes_and_so_has_the_log(commands: Any, script: Callable[..., Path]) -> None:
    script(PRINTS + ABORTS)
    seen = {}
    for name, words in (("bare", []), ("ours", RECORDED)):
        with (commands.folder / name).open("ab") as file:
            done = run_into(commands, [*words, "script.py"], file, file)
        seen[name] = (commands.folder / name).read_bytes()
        assert done.returncode in (-signal.SIGABRT, 128 + signal.SIGABRT)
    assert seen["ours"] == seen["bare"]
    assert [int(line[:1]) for line in seen["bare"].splitlines()[:9]] == list(range(1, 10))
    run = commands.folder / "runs" / "ours"
    assert (run / "logs" / "main.log").read_bytes() == seen["bare"]
    assert not (run / "outputs").exists()
    crash = json.loads((run / "summary.json").read_text())["findings"][0]
    assert (crash["kind"], crash["evidence"]["signal"], crash["evidence"]["native_rank"]) == (
        "rank_crashed",
        "SIGABRT",
        0,
    )
    assert crash["evidence"]["native"] == [TERMINATE, "what():  told to token=…"]
    assert "output    terminate called" in (run / "summary.txt").read_text()
    assert "hunter2" not in (run / "summary.json").read_text() + (run / "summary.txt").read_text()


@pytest.mark.soak  # near: the test above
def test_two_files_and_one_that_was_there_before(commands: Any, script: Callable[..., Path]) -> None:
    script(PRINTS)
    (commands.folder / "err").write_text("of another job\n")
    with (commands.folder / "out").open("wb") as out, (commands.folder / "err").open("ab") as err:
        assert run_into(commands, [*RECORDED, "script.py"], out, err).returncode == 0
    assert (commands.folder / "out").read_bytes() == b"4 print on stdout\n"
    written = (commands.folder / "err").read_text().removeprefix("of another job\n")
    log = (commands.folder / "runs" / "ours" / "logs" / "main.log").read_text()
    assert sorted(log.splitlines()) == sorted([*written.splitlines(), "4 print on stdout"])


@pytest.mark.parametrize(
    "together", [pytest.param(True, id="one pipe"), pytest.param(False, id="two pipes", marks=pytest.mark.soak)]
)
def test_a_pipe_with_native_output(commands: Any, script: Callable[..., Path], together: bool) -> None:
    script(PRINTS + ABORTS)
    stderr = subprocess.STDOUT if together else subprocess.PIPE
    bare = run_into(commands, ["script.py"], subprocess.PIPE, stderr)
    ours = run_into(commands, [*RECORDED, "--native-output", "script.py"], subprocess.PIPE, stderr)
    assert (ours.stdout, ours.stderr) == (bare.stdout, bare.stderr)
    assert ours.returncode == 128 + signal.SIGABRT
    run = commands.folder / "runs" / "ours"
    log = (run / "logs" / "main.log").read_bytes()
    if together:
        assert log == bare.stdout
    else:
        assert sorted(log.splitlines()) == sorted((bare.stdout + bare.stderr).splitlines())
    crash = json.loads((run / "summary.json").read_text())["findings"][0]
    assert crash["evidence"]["native"][0] == TERMINATE
    assert not (run / "outputs").exists()


@pytest.mark.soak  # near: every run of the tests goes into a pipe
def test_a_pipe_without_it_is_left_alone(commands: Any, script: Callable[..., Path]) -> None:
    script(PRINTS + ABORTS)
    bare = run_into(commands, ["script.py"], subprocess.PIPE, subprocess.STDOUT)
    ours = run_into(commands, [*RECORDED, "script.py"], subprocess.PIPE, subprocess.STDOUT)
    assert ours.stdout == bare.stdout
    log = (commands.folder / "runs" / "ours" / "logs" / "main.log").read_text()
    assert [line[:1] for line in log.splitlines()] == ["1", "4", "5", "9"]
    crash = json.loads((commands.folder / "runs" / "ours" / "summary.json").read_text())["findings"][0]
    assert crash["evidence"]["native"] == []
    assert "--native-output" in crash["advice"][0]


# ── a terminal ──────────────────────────────────────────────────────────────────────────────────────────────────────

BAR = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
stderr = ctypes.c_void_p.in_dll(libc, "stderr")
width = os.get_terminal_size(2).columns - 20
for step in range(40):
    done = width * (step + 1) // 40
    print(f"\\r{step + 1:3}/40 |{'█' * done}{' ' * (width - done)}|", end="", file=sys.stderr, flush=True)
    if step % 10 == 3:
        libc.fputs(b"\\nhost:1:1 [0] NCCL WARN in between\\n", stderr)
print(file=sys.stderr)
print(sys.stderr.isatty(), os.isatty(2), os.ttyname(2) == os.ttyname(0), os.tcgetpgrp(2) == os.getpgrp())
"""


@pytest.mark.parametrize(
    "options",
    [pytest.param([], id="plain", marks=pytest.mark.soak), pytest.param(["--native-output"], id="asked for")],
)
def test_a_progress_bar_on_a_terminal(commands: Any, script: Callable[..., Path], options: list[str]) -> None:
    """A terminal gets the same bytes, and stays what it is, whatever is asked for."""
    script(BAR)
    bare = on_a_terminal(commands, [sys.executable, "script.py"])
    ours = on_a_terminal(commands, [sys.executable, *RECORDED, *options, "script.py"])
    if options:
        said, _, ours = ours.partition(b"\r\n")
        assert said.startswith(b"stepscope: --native-output has no effect when")
    assert ours == bare
    assert bare.count(b"\r") > 40
    assert b"True True True True" in bare


def on_a_terminal(commands: Any, command: list[str]) -> bytes:
    """What a terminal of 60 columns shows when a command is run in it."""
    pid, terminal = pty.fork()
    if not pid:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", 20, 60, 0, 0))
        os.chdir(commands.folder)
        os.execve(command[0], command, commands.environment())
    shown = b""
    try:
        while data := os.read(terminal, 4096):
            shown += data
    except OSError:
        pass  # nobody holds the other side any more
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return shown


# ── several ranks ───────────────────────────────────────────────────────────────────────────────────────────────────

RANK = """
import ctypes, os, sys, time
import stepscope
libc = ctypes.CDLL(None)
stderr = ctypes.c_void_p.in_dll(libc, "stderr")
rank, pid = os.environ["RANK"], os.getpid()
for step in range(3):
    with stepscope.step():
        pass
print("python of rank", rank, flush=True)
libc.fprintf(stderr, b"host:%d:%d [0] NCCL WARN Call to ibv_poll_cq failed on %s\\n", pid, pid, rank.encode())
libc.fprintf(stderr, b"[rank%s]:[E1116 12:00:00.000000000 ProcessGroupNCCL.cpp:1] of torch\\n", rank.encode())
if rank == "0":
    open("told", "w").close()
if rank == "1":
    while not os.path.exists("told"):  # torchrun ends rank 0 as soon as this one is gone
        time.sleep(0.01)
    libc.fputs(b"malloc(): corrupted top size\\n", stderr)
    os.abort()
while not os.path.exists("over"):
    time.sleep(0.01)
"""
LAUNCHER = """
import os, subprocess, sys
ranks = []
for rank in range(2):
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    ranks.append(subprocess.Popen([sys.executable, "script.py"], env=environment))
code = ranks[1].wait()
open("over", "w").close()
ranks[0].wait()
sys.exit(128 - code)
"""


def test_ranks_that_share_a_file(commands: Any, script: Callable[..., Path]) -> None:
    """Lines that say whose they are go there, and the rest is in the job's own log."""
    script(RANK)
    script(LAUNCHER, "launch.py")
    with (commands.folder / "log").open("ab") as file:
        assert run_into(commands, [*RECORDED, "launch.py"], file, file).returncode == 128 + signal.SIGABRT
    run = commands.folder / "runs" / "ours"
    for rank in (0, 1):
        lines = (run / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert len(lines) == 3
        assert f"python of rank {rank}" in lines
        assert any(line.endswith(f"failed on {rank}") for line in lines)
        assert any(line.startswith(f"[rank{rank}]:[E1116") for line in lines)
    assert sorted((run / "logs" / "main.log").read_text().splitlines()) == sorted(
        (commands.folder / "log").read_text().splitlines()
    )


@pytest.mark.soak  # near: ranks that share a file, above
@pytest.mark.ranks
@pytest.mark.parametrize("how", ["native output", "redirects"])
def test_under_torchrun_every_rank_has_all_of_its_own(commands: Any, script: Callable[..., Path], how: str) -> None:
    script(RANK)
    options = ["--native-output"] if how == "native output" else []
    own = ["--redirects", "3", "--log-dir", "logs"] if how == "redirects" else []
    (commands.folder / "over").touch()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *own]
    done = run_into(commands, [*RECORDED, *options, *torchrun, "script.py"], subprocess.PIPE, subprocess.STDOUT)
    assert done.returncode == 1
    run = commands.folder / "runs" / "ours"
    logs = [(run / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    for rank, log in enumerate(logs):
        pid_line = next(line for line in log.splitlines() if "ibv_poll_cq" in line)
        assert log.startswith(f"python of rank {rank}\n{pid_line}\n[rank{rank}]:[E1116")
    assert "malloc(): corrupted top size" in logs[1]
    assert "malloc" not in logs[0]
    crash = json.loads((run / "summary.json").read_text())["findings"][0]
    assert (crash["ranks"], crash["evidence"]["signal"]) == ([1], "SIGABRT")
    assert crash["evidence"]["native"][-1] == "malloc(): corrupted top size"
    if how == "native output":
        for log in logs:
            # What the other rank says may come in between.
            said = iter(done.stdout.decode().splitlines())
            assert all(line in said for line in log.splitlines())


# ── deaths of ours ──────────────────────────────────────────────────────────────────────────────────────────────────

GOES_ON = """
import os, sys, time, stepscope
print("pid", os.getpid(), flush=True)
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.005)
with stepscope.step():
    wait_for("killed")
for line in range(2000):
    os.write(2, b"native %d\\n" % line)
    print("python", line, file=sys.stderr)
wait_for("over")
open("done", "w").write("whole")
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    "who", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("launcher", "forwarder")), "both"]
)
def test_the_job_goes_on_whoever_dies(commands: Any, script: Callable[..., Path], who: str) -> None:
    script(GOES_ON)
    process = commands.start("run", "--native-output", "--no-hub", "--name", "ours", "script.py")
    job = int(process.stdout.readline().split()[1])
    victims = {"launcher": [process.pid], "forwarder": [], "both": [process.pid]}[who]
    if who != "launcher":
        victims.append(until(lambda: forwarder_of(commands)))
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    (commands.folder / "killed").touch()
    log = commands.folder / "runs" / "ours" / "logs" / "main.log"
    until(lambda: log.exists() and b"python 1999\n" in log.read_bytes())
    (commands.folder / "over").touch()
    until(lambda: not psutil.pid_exists(job) or psutil.Process(job).status() == psutil.STATUS_ZOMBIE)
    assert (commands.folder / "done").read_text() == "whole"
    expected = [line for number in range(2000) for line in (f"native {number}", f"python {number}")]
    assert log.read_text().splitlines()[1:] == expected
    stderr = process.communicate(timeout=PATIENCE_S)[1]
    lines = [line for line in stderr.splitlines() if line.startswith(("native", "python"))]
    if who == "both":
        assert lines == []  # nobody forwards it any more; the run has it
    else:
        assert lines == expected
    assert process.returncode == (0 if who == "forwarder" else -signal.SIGKILL)
    until(lambda: not commands.survivors())


@pytest.mark.soak  # near: the test above
@pytest.mark.faults
def test_an_agent_that_died_is_followed_by_one_that_goes_on_where_it_was(
    commands: Any, script: Callable[..., Path]
) -> None:
    script(GOES_ON)
    with (commands.folder / "log").open("ab") as file:
        words = [sys.executable, *RECORDED, "script.py"]
        process = subprocess.Popen(
            words, cwd=commands.folder, env=commands.environment(), stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
    run = commands.folder / "runs" / "ours"
    log = run / "logs" / "main.log"
    # The log is written first: an agent that is killed before it has noted how far it came copies that once more.
    until((run / "outputs" / "positions").exists)
    agents = [process.pid for process in commands.running("stepscope.agent")]
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    (commands.folder / "killed").touch()
    (commands.folder / "over").touch()
    assert process.wait(timeout=PATIENCE_S) == 0
    assert len(agents) == 1
    assert log.read_bytes() == (commands.folder / "log").read_bytes()


def forwarder_of(commands: Any) -> int | None:
    found = [process.pid for process in commands.running("stepscope.agent.output_forwarder")]
    return found[0] if found else None
