"""One case under one tool: start it, wait for it, read what it says."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import SOURCE, traceml_command

from league.peer import read_summary
from league.replay import detected_after, verdict
from league.truth import Case, Claim
from stepscope.store.load import open_run

__all__ = ["Outcome", "can_run", "judge_again", "run_stepscope", "run_traceml"]

SCRIPTS = SOURCE / "stepscope" / "testing" / "scripts"
TIMEOUT_S = 240.0
BURNER = "import os\np = os.getppid()\nwhile os.getppid() == p:\n    for _ in range(1_000_000): pass"
"""Ends by itself when the league does."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    claims: tuple[Claim, ...]
    seconds: float
    detected_after: int | None = None
    problem: str = ""
    """Why there is nothing to judge."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "claims": [claim.to_dict() for claim in self.claims],
            "seconds": round(self.seconds, 1),
            "detected_after": self.detected_after,
            "problem": self.problem,
        }


def can_run(case: Case, device: str) -> str:
    """Empty, or why not here."""
    if case.device != device:
        return f"runs on {case.device}"
    if case.two_hosts and (os.geteuid() != 0 or shutil.which("unshare") is None):
        return "giving ranks another host name needs root and unshare"
    return ""


def run_stepscope(case: Case, keep: Path) -> Outcome:
    """Record it into ``keep``/ID and diagnose it, whole and step by step."""
    name = case.id.replace("/", "-")
    shutil.rmtree(keep / name, ignore_errors=True)
    command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--dir", str(keep), "--name", name]
    script = [str(SCRIPTS / "league_job.py"), *_arguments(case)]
    if case.two_hosts:
        command += [str(SCRIPTS / "two_hosts.py"), str(case.ranks)]
    elif case.ranks > 1:
        command += ["--nproc-per-node", str(case.ranks)]
    seconds, problem = _run(case, [*command, *script], keep / f"{name}.log")
    return Outcome(claims=(), seconds=seconds, problem=problem) if problem else judge_again(case, keep, seconds)


def judge_again(case: Case, keep: Path, seconds: float) -> Outcome:
    """Diagnose what was recorded before, in so many seconds."""
    folder = keep / case.id.replace("/", "-")
    if not (folder / "run.json").exists():
        return Outcome(claims=(), seconds=seconds, problem="no run was kept")
    run = open_run(folder)
    after = detected_after(run, case.truth, case.ranks)
    return Outcome(claims=tuple(verdict(run)), seconds=seconds, detected_after=after)


def run_traceml(case: Case, keep: Path, python: str) -> Outcome:
    if case.two_hosts:
        return Outcome(claims=(), seconds=0.0, problem="it starts its ranks itself, on one host")
    name = case.id.replace("/", "-")
    work = keep / f"{name}.traceml"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    script = [str(SCRIPTS / "league_job.py"), *_arguments(case), "--traceml"]
    command = traceml_command(python, script, work, ranks=case.ranks)
    seconds, problem = _run(case, command, work / "log")
    return Outcome(claims=tuple(read_summary(work)), seconds=seconds, problem=problem)


def _arguments(case: Case) -> list[str]:
    return [*case.args, "--device", case.device]


def _run(case: Case, command: Sequence[str], log: Path) -> tuple[float, str]:
    """Seconds, and what went wrong."""
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with _burning(case.burn), log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # Its own first, so that it ends its ranks; then whatever is left of the group.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if sys.exc_info()[0] is KeyboardInterrupt:
                raise
            return time.monotonic() - began, f"no end after {TIMEOUT_S:g} s"
    return time.monotonic() - began, f"exit code {code}, see {log}" if code else ""


@contextlib.contextmanager
def _burning(count: int) -> Iterator[None]:
    """So many busy processes beside the job, which are none of its own."""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", BURNER]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
