"""The script does not notice: same output, same losses, same threads and sockets, same modules and paths."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

OUTPUT = """
import logging, os, subprocess, sys, warnings
print("out", end=" ")
logging.basicConfig(stream=sys.stdout, format="%(message)s")
logging.warning("logged between")
sys.stdout.write("ünïcödé \\u2713 \\udcff"[:9] + "\\n")
sys.stdout.buffer.write(b"\\x00\\xff bytes\\r\\n")
print("err", file=sys.stderr, end="")
warnings.warn("careful", UserWarning)
sys.__stdout__.write("dunder\\n")
print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering)
print(sys.stdout.name, sys.stdout.mode, sys.stdout.fileno(), sys.stdout is sys.__stdout__)
print(sys.stdout.write_through, type(sys.stdout.buffer).__name__ == 'BufferedWriter', sys.stderr.mode)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "print('from a child')"])
os.write(1, b"past Python\\n")
print("x" * 100_000)
sys.stdout.reconfigure(line_buffering=True)
print("end", end="")
raise SystemExit("bye")
"""


@pytest.mark.parametrize(
    "options",
    [[], *(pytest.param(options, marks=pytest.mark.soak) for options in (["-u"], ["-X", "utf8"]))],
    ids=" ".join,
)
def test_output_is_the_same_to_the_byte(commands: Any, script: Callable[..., Path], options: list[str]) -> None:
    script(OUTPUT)
    python = [sys.executable, *options, "script.py"]
    env = {name: value for name, value in commands.environment().items() if name != "PYTHONUNBUFFERED"}
    how: dict[str, Any] = {"cwd": commands.folder, "env": env, "capture_output": True}
    bare = subprocess.run(python, **how)
    ours = subprocess.run([sys.executable, "-m", "stepscope", "run", "--quiet", *python], **how)
    assert (ours.returncode, ours.stdout, ours.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert bare.returncode == 1
    assert b"err" in bare.stderr
    log = (commands.newest_run() / "logs" / "main.log").read_bytes()
    kept = bare.stdout.replace(b"past Python\n", b"").replace(b"from a child\n", b"")
    for line in kept.splitlines():
        assert line in log
    assert len(log) == len(kept) + len(bare.stderr)


def test_a_terminal_stays_a_terminal(commands: Any, script: Callable[..., Path]) -> None:
    script(
        """
        import os, sys
        print(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), os.isatty(1), os.get_terminal_size()[:1])
        print("name:", end=" ")
        print("hello", input())
        """
    )
    bare = at_a_terminal(commands, [sys.executable, "script.py"], b"Ada\n")
    ours = at_a_terminal(commands, [sys.executable, "-m", "stepscope", "run", "--quiet", "script.py"], b"Ada\n")
    assert ours == bare
    assert b"True True True True (77,)" in bare
    assert b"hello Ada" in bare


def at_a_terminal(commands: Any, command: list[str], typed: bytes) -> bytes:
    """What a terminal of 77 columns shows when a command is run in it."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(commands.folder)
        os.execve(command[0], command, commands.environment())
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 33, 77, 0, 0))
    os.write(terminal, typed)
    shown = b""
    while select.select([terminal], [], [], 60)[0]:
        try:
            data = os.read(terminal, 4096)
        except OSError:
            break  # nobody holds the other side any more
        if not data:
            break
        shown += data
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return shown


def test_your_own_sitecustomize_and_an_unchanged_path(
    commands: Any, script: Callable[..., Path], tmp_path: Path
) -> None:
    script("import sys; sys.mine = 'site'\n", "mine/sitecustomize.py")
    script("import sys; sys.yours = 'user'\n", "home/usercustomize.py")
    script(
        """
        import builtins, json, os, sys
        import sitecustomize
        json.dump({
            "mine": getattr(sys, "mine", None),
            "yours": getattr(sys, "yours", None),
            "file": sitecustomize.__file__,
            "path": sys.path,
            "argv": sys.argv,
            "orig_argv": sys.orig_argv[1:],
            "flags": str(sys.flags),
            "excepthooks": sys.displayhook is sys.__displayhook__,
            "cwd": os.getcwd(),
        }, sys.stdout)
        """
    )
    path = os.pathsep.join([str(tmp_path / "mine"), str(tmp_path / "home"), commands.environment()["PYTHONPATH"]])
    env = {"PYTHONPATH": path}
    # The interpreter below the virtual environment: in one, Python runs no usercustomize.
    python = sys._base_executable  # type: ignore[attr-defined]
    bare = commands.finish(commands.start_python("-c", EXEC, python, "script.py", "a", env=env))
    ours = commands.finish(commands.start("run", "--quiet", python, "script.py", "a", env=env))
    assert json.loads(ours.stdout) == json.loads(bare.stdout)
    document = json.loads(bare.stdout)
    assert (document["mine"], document["yours"]) == ("site", "user")
    assert document["file"] == str(tmp_path / "mine" / "sitecustomize.py")


EXEC = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


@pytest.mark.soak  # near: the test above
def test_a_sitecustomize_that_fails_fails_as_it_would(commands: Any, script: Callable[..., Path]) -> None:
    folder = script("raise RuntimeError('mine is broken')\n", "mine/sitecustomize.py").parent
    script("print('ran')\n")
    env = {"PYTHONPATH": os.pathsep.join([str(folder), commands.environment()["PYTHONPATH"]])}
    bare = commands.finish(commands.start_python("script.py", env=env))
    ours = commands.finish(commands.start("run", "--quiet", "script.py", env=env))
    assert (ours.code, ours.stdout) == (bare.code, bare.stdout)
    assert "mine is broken" in bare.stderr
    assert ours.stderr == bare.stderr * 3  # the launcher, the agent and the job itself


TRAIN = """
import os, sys, threading
if os.environ.get("RANK", "0") == os.environ.get("UNSERVED"):
    os.environ["STEPSCOPE_SERVER"] = "0"
import job
for options in sys.argv[1:]:
    sys.argv = ["job.py", "--steps", "12", *options.split()]
    job.main()
fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
sockets = sum(os.readlink(fd).startswith("socket:") for fd in fds if os.path.lexists(fd))
names = sorted(open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))
rank = os.environ.get("RANK", "0")
sys.stdout.write(f"rank {rank} threads {names} {[thread.name for thread in threading.enumerate()]}\\n")
sys.stdout.write(f"rank {rank} sockets {sockets}\\n")
"""


def test_losses_threads_and_sockets_of_one_process(commands: Any, job: Path, script: Callable[..., Path]) -> None:
    """Plain, then with gradient accumulation."""
    script(TRAIN)
    env = {"PYTHONPATH": os.pathsep.join([str(job.parent), commands.environment()["PYTHONPATH"]])}
    bare = commands.start_python("script.py", "", "--accumulate 2", env=env)
    ours = commands.start("run", "--quiet", "script.py", "", "--accumulate 2", env=env)
    bare, ours = commands.finish(bare), commands.finish(ours)
    assert (bare.code, ours.code, ours.stderr) == (0, 0, "")
    assert ours.stdout == bare.stdout
    assert bare.stdout.count("loss 0x") == 24
    assert "rank 0 sockets 0\n" in bare.stdout
    summary = json.loads((ours.run_dir / "summary.json").read_text())
    assert summary["steps"]["total"] == 24
    assert summary["notices"] == []


@pytest.mark.soak
@pytest.mark.ranks
def test_losses_threads_and_sockets_of_two_ranks(commands: Any, job: Path, script: Callable[..., Path]) -> None:
    script(TRAIN)
    env = {"PYTHONPATH": os.pathsep.join([str(job.parent), commands.environment()["PYTHONPATH"]])}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    bare = commands.finish(commands.start_python(*torchrun, "script.py", "", env=env))
    options = ("--quiet", "--nproc-per-node", "2")
    ours = commands.finish(commands.start("run", *options, "script.py", "", env={**env, "UNSERVED": "1"}))
    assert (bare.code, ours.code) == (0, 0), ours.stderr
    # Torch's worker server on rank 0: one socket, and native threads that sleep.  Without it there is no difference.
    served = re.sub(r"('pt_workerserver', )+", "", ours.stdout)
    assert served.count("pt_workerserver") == 0
    assert len(served) < len(ours.stdout)
    served = re.sub(r"rank 0 sockets (\d+)", lambda match: f"rank 0 sockets {int(match[1]) - 1}", served)
    assert sorted(served.splitlines()) == sorted(bare.stdout.splitlines())
    assert "rank 1 threads" not in "".join(line for line in ours.stdout.splitlines() if "pt_workerserver" in line)
    assert bare.stdout.count("loss 0x") == 24
    summary = json.loads((ours.run_dir / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"]["total"], summary["steps"]["left_out"]) == (2, 12, 0)
    assert [(row["rank"], row["steps"], row["state"]) for row in summary["ranks"]] == [
        (0, 12, "exited"),
        (1, 12, "exited"),
    ]
    assert summary["logs"] == ["logs/main.log", "logs/rank-0.log", "logs/rank-1.log"]
    for rank in (0, 1):
        lines = (ours.run_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert lines == [line for line in ours.stdout.splitlines() if line.startswith(f"rank {rank} ")]
