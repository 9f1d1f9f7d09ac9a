"""Run one case once, bare or recorded, in processes of its own, and keep what it printed."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gpu.cases import Case

__all__ = ["JOBS", "Outcome", "Recorded", "end_processes", "run_case"]

JOBS = Path(__file__).resolve().parent / "jobs"
SOURCE = Path(__file__).resolve().parents[2] / "src"
MARK = "MATRIX_RUN"
"""The environment variable by which the processes of a run are found, in whichever session they are."""
POLL_S = 0.05
GRACE_S = 3.0
"""How long processes of a run may outlive its command."""
READY = "ready\n"
ON_TERMINAL = (
    "import fcntl, os, signal, sys, termios; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes the terminal on standard input the session's own, so that Ctrl-C typed there reaches the foreground group, and
reacts to it even where the matrix runs in a shell's background, which ignores it."""
HOOKS = {"default": {}, "python": {"STEPSCOPE_C_HOOKS": "0"}, "c": {"STEPSCOPE_C_HOOKS": "1"}}
CLEARED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What Stepscope has to say about a run."""

    steps: dict[int, int] = field(default_factory=dict)
    """By rank."""
    verdict: str = ""
    title: str = ""
    status: str = ""
    hook_failures: int = 0
    lost: int = 0
    captures: int = 0
    """Traces in the run directory."""
    problem: str = ""
    """Why nothing is known."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    command: list[str]
    code: int | None
    """128 + the signal's number for one that a signal ended; None: it had to be killed."""
    seconds: float
    stdout: str
    stderr: str
    left: list[str]
    """Processes that outlived the command, or that were there when it was killed."""
    recorded: Recorded | None = None


def run_case(
    case: Case, *, device: str, folder: Path, recorded: bool, layers: str | None = None, hooks: str = "default"
) -> Outcome:
    """Run it to its end or its time limit; its output stays in ``folder``."""
    folder.mkdir(parents=True)
    work = folder / "work"
    work.mkdir()
    command = [sys.executable]
    if recorded:
        command += ["-m", "stepscope", "run", "--quiet", "--dir", str(folder / "runs"), "--name", "case"]
        command += ["--layers", layers] if layers else []
    if case.ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    command += [str(JOBS / case.script), "--device", device, *case.args]
    mark = f"{os.getpid()}.{uuid.uuid4().hex}"
    environment = {**_environment(case, work, mark), **HOOKS[hooks]}
    began_s = time.monotonic()
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        code, left = _finish(case, command, environment, folder, mark, out, err)
    return Outcome(
        command=command,
        code=code,
        seconds=time.monotonic() - began_s,
        stdout=(folder / "stdout").read_text(errors="replace"),
        stderr=(folder / "stderr").read_text(errors="replace"),
        left=left,
        recorded=_recorded(folder / "runs" / "case" / "summary.json") if recorded else None,
    )


def _environment(case: Case, work: Path, mark: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE") and name not in CLEARED
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    return {
        **kept,
        "PYTHONPATH": str(SOURCE),
        # One GPU, so that the results are the same on a machine that has more of them.
        "CUDA_VISIBLE_DEVICES": visible.split(",")[0],
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
        # Nothing that one run compiled helps the next: the recorded run compiles with our hooks in place.
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_COLOR": "1",
        **case.variables,
        MARK: mark,
    }


def _finish(
    case: Case, command: list[str], environment: Mapping[str, str], folder: Path, mark: str, out: Any, err: Any
) -> tuple[int | None, list[str]]:
    keyboard = -1
    words, stdin = command, subprocess.DEVNULL
    if case.interrupt:
        keyboard, stdin = pty.openpty()
        words = [sys.executable, "-c", ON_TERMINAL, *command]
    try:
        process = subprocess.Popen(
            words, env=environment, cwd=folder / "work", stdin=stdin, stdout=out, stderr=err, start_new_session=True
        )
        if keyboard >= 0:
            os.close(stdin)
        if not _wait(process, case.timeout_s, folder / "stdout", keyboard):
            left = [_described(each) for each in processes_of(mark)]
            end_processes(mark)
            process.wait()
            return None, left
    finally:
        if keyboard >= 0:
            os.close(keyboard)
    deadline_s = time.monotonic() + GRACE_S
    while (found := processes_of(mark)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    left = [_described(each) for each in found]
    end_processes(mark)
    code = process.returncode
    return (128 - code if code < 0 else code), left


def _wait(process: subprocess.Popen[bytes], limit_s: float, stdout: Path, keyboard: int) -> bool:
    """Whether it ended in time; types Ctrl-C once the job is ready for it."""
    deadline_s = time.monotonic() + limit_s
    typed = keyboard < 0
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            return True
        if not typed and READY in stdout.read_text(errors="replace"):
            os.write(keyboard, b"\x03")
            typed = True
        time.sleep(POLL_S)
    return False


def processes_of(mark: str) -> list[psutil.Process]:
    """Living processes that inherited the mark of a run, or one that begins so."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK, "").startswith(mark) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it ended, or is not ours to look at
    return found


def end_processes(mark: str = f"{os.getpid()}.") -> None:
    """Kill what belongs to a run, or to any run of this matrix."""
    for _ in range(3):  # what is killed first may have started another
        for process in processes_of(mark):
            try:
                process.kill()
            except psutil.Error:
                continue


def _described(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return f"{process.pid} gone"


def _recorded(summary: Path) -> Recorded:
    try:
        document = json.loads(summary.read_text())
    except (OSError, ValueError) as error:
        return Recorded(problem=f"no summary: {type(error).__name__}")
    ranks = document["ranks"]
    return Recorded(
        steps={row["rank"]: row["steps"] for row in ranks},
        verdict=document["verdict"]["kind"],
        title=document["verdict"]["title"],
        status=document["status"],
        hook_failures=sum(row["hook_failures"] or 0 for row in ranks),
        lost=sum(row["lost"] or 0 for row in ranks),
        captures=len(list(summary.parent.glob("captures/*/rank-*"))),
    )
