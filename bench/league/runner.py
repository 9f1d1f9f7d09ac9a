"""One case under one tool: start it, wait for it, read what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import SOURCE, traceml_command
from job_process import end_job
from machine_load import burning, machine_load

from league.peer import read_summary
from league.replay import detected_after, verdict
from league.truth import Case, Claim
from stepscope.store.load import open_run

__all__ = ["Outcome", "can_run", "judge_again", "run_stepscope", "run_traceml"]

SCRIPTS = Path(__file__).resolve().with_name("jobs")
TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    claims: tuple[Claim, ...] = ()
    seconds: float = 0.0
    detected_after: int | None = None
    foreign_cpu: float = 0.0
    """Share of all cores that went to others meanwhile, those of ``burn`` and of the load not counted."""
    problem: str = ""
    """Why there is nothing to judge."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "claims": [claim.to_dict() for claim in self.claims],
            "seconds": round(self.seconds, 1),
            "detected_after": self.detected_after,
            "foreign_cpu": round(self.foreign_cpu, 2),
            "problem": self.problem,
        }


def can_run(case: Case, device: str) -> str:
    """Empty, or why not here."""
    if case.device != device:
        return f"runs on {case.device}"
    if case.two_hosts and (os.geteuid() != 0 or shutil.which("unshare") is None):
        return "giving ranks another host name needs root and unshare"
    return ""


def run_stepscope(case: Case, keep: Path, load: str = "none") -> Outcome:
    """Record it into ``keep``/ID beside this load and diagnose it, whole and step by step."""
    name = case.id.replace("/", "-")
    shutil.rmtree(keep / name, ignore_errors=True)
    command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--dir", str(keep), "--name", name]
    script = [str(SCRIPTS / "league_job.py"), *_arguments(case)]
    if case.two_hosts:
        command += [str(SCRIPTS / "two_hosts.py"), str(case.ranks)]
    elif case.ranks > 1:
        command += ["--nproc-per-node", str(case.ranks)]
    ended = _run(case, [*command, *script], keep / f"{name}.log", load)
    return ended if ended.problem else judge_again(case, keep, ended)


def judge_again(case: Case, keep: Path, ended: Outcome) -> Outcome:
    """Diagnose what was recorded before."""
    folder = keep / case.id.replace("/", "-")
    if not (folder / "run.json").exists():
        return replace(ended, problem="no run was kept")
    run = open_run(folder)
    after = detected_after(run, case.truth, case.ranks)
    return replace(ended, claims=tuple(verdict(run)), detected_after=after, problem="")


def run_traceml(case: Case, keep: Path, python: str, load: str = "none") -> Outcome:
    if case.two_hosts:
        return Outcome(problem="it starts its ranks itself, on one host")
    name = case.id.replace("/", "-")
    work = keep / f"{name}.traceml"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    script = [str(SCRIPTS / "league_job.py"), *_arguments(case), "--traceml"]
    command = traceml_command(python, script, work, ranks=case.ranks)
    return replace(_run(case, command, work / "log", load), claims=tuple(read_summary(work)))


def _arguments(case: Case) -> list[str]:
    return [*case.args, "--device", case.device]


def _run(case: Case, command: Sequence[str], log: Path, load: str) -> Outcome:
    """How it went, without claims."""
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    began, busy, own = time.monotonic(), _busy_s(), _own_s()
    problem = ""
    with burning(case.burn), machine_load(load), log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(TIMEOUT_S)
            problem = f"exit code {code}, see {log}" if code else ""
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            end_job(process)
            if sys.exc_info()[0] is KeyboardInterrupt:
                raise
            problem = f"no end after {TIMEOUT_S:g} s"
    seconds = time.monotonic() - began
    foreign_s = _busy_s() - busy - (_own_s() - own)
    return Outcome(seconds=seconds, foreign_cpu=max(0.0, foreign_s / seconds / (os.cpu_count() or 1)), problem=problem)


def _busy_s() -> float:
    """CPU time of everything on this machine since it started."""
    fields = Path("/proc/stat").read_text().split("\n", maxsplit=1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, soft = map(int, fields[:7])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU time of this process and of all that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
