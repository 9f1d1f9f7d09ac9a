"""Start the job and the agent, pass signals on, wait, and say how it ended.

The launcher is the parent of both.  It blocks the signals it cares for and takes them one by one, so that it can tell
a Ctrl-C from the terminal (which the job has received itself) from a ``kill`` meant for the launcher alone (which it
must pass on).  If the agent dies it is started again and goes on where the segment ends; if the launcher dies, the job
and the agent go on without it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepscope.records.places import RING_SUFFIX

__all__ = ["JobEnd", "supervise"]

FROM_TERMINAL = 0x80
"""``si_code`` of a signal that the kernel sent, as for Ctrl-C."""
WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
AGENT_STARTS = 5
AGENT_END_S = 30.0
"""How long the agent may take for its last drain."""
ORPHAN_GRACE_S = 5.0
IMPATIENT = 3
"""This many Ctrl-C end a job that does not react."""


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    exit_code: int
    """What ``stepscope run`` exits with: the job's own, 128 + signal for a job killed by one."""
    status: Literal["finished", "failed", "crashed", "interrupted"]


def supervise(command: Sequence[str], environment: Mapping[str, str], run_dir: Path, session: Path) -> JobEnd:
    """Run the job to its end with an agent beside it."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        agent = _Agent(run_dir, session, earlier)
        job = _spawn(command, environment, earlier)
        try:
            end = _wait(job, agent)
            if end.status == "interrupted":
                _end_orphans(session)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        agent.finish(end)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
    return end


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], mask: set[signal.Signals], stdin: int | None = None
) -> int:
    """Start a process with our own earlier signal mask; with ``stdin`` given, out of reach of our terminal."""
    actions = [] if stdin is None else [(os.POSIX_SPAWN_DUP2, stdin, 0)]
    return os.posix_spawn(
        command[0],
        list(command),
        dict(environment),
        file_actions=actions,
        setsigmask=list(mask),
        setsid=stdin is not None,
    )


def _wait(job: int, agent: _Agent) -> JobEnd:
    interrupted: int | None = None
    times = 0
    while True:
        caught = signal.sigtimedwait(WATCHED, 1.0)
        if caught is not None and caught.si_signo != signal.SIGCHLD:
            interrupted = caught.si_signo
            times += 1
            if times >= IMPATIENT:
                os.kill(job, signal.SIGKILL)
            elif caught.si_code != FROM_TERMINAL:
                os.kill(job, caught.si_signo)
        agent.keep_alive()
        pid, status = os.waitpid(job, os.WNOHANG)
        if pid == job:
            return _job_end(os.waitstatus_to_exitcode(status), interrupted)


def _job_end(code: int, interrupted: int | None) -> JobEnd:
    if code == 0:
        return JobEnd(exit_code=0, status="finished")
    if interrupted is not None:
        return JobEnd(exit_code=130 if interrupted == signal.SIGINT else 128 + interrupted, status="interrupted")
    if code == -signal.SIGINT:
        return JobEnd(exit_code=130, status="interrupted")
    if code < 0:
        return JobEnd(exit_code=128 - code, status="crashed")
    return JobEnd(exit_code=code, status="failed")


class _Agent:
    """The agent process; its standard input is a pipe that says how the job ended, or that we are gone."""

    def __init__(self, run_dir: Path, session: Path, mask: set[signal.Signals]) -> None:
        places = ["--run-dir", str(run_dir), "--session", str(session)]
        self._command = [sys.executable, "-m", "stepscope.agent", *places]
        self._mask = mask
        self._starts = 0
        self._pid = 0
        self._pipe = -1
        self._start()

    def keep_alive(self) -> None:
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
            os.close(self._pipe)
            if self._starts < AGENT_STARTS:
                self._start()
            elif self._starts == AGENT_STARTS:
                self._starts += 1
                print("stepscope: the agent keeps dying; steps stay in their rings until the end", file=sys.stderr)

    def finish(self, end: JobEnd) -> None:
        """Tell it that the job is over and wait for its last drain."""
        if not self._pid:
            return
        word = json.dumps({"end": {"exit_code": end.exit_code, "status": end.status}}) + "\n"
        try:
            os.write(self._pipe, word.encode())
        except BrokenPipeError:
            pass  # it died this moment; whoever opens the run drains the rings
        os.close(self._pipe)
        deadline = time.monotonic() + AGENT_END_S
        while not os.waitpid(self._pid, os.WNOHANG)[0]:
            left = deadline - time.monotonic()
            if left <= 0:
                print("stepscope: the agent does not end; the summary may miss the last steps", file=sys.stderr)
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            signal.sigtimedwait([signal.SIGCHLD], min(left, 0.5))
        self._pid = 0

    def _start(self) -> None:
        self._starts += 1
        reading, self._pipe = os.pipe()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("STEPSCOPE")}
        self._pid = _spawn(self._command, environment, self._mask, stdin=reading)
        os.close(reading)


def _end_orphans(session: Path) -> None:
    """After a Ctrl-C no rank may stay behind: ask those that outlived their launcher, then make them."""
    ranks = [int(ring.stem) for ring in session.glob(f"*{RING_SUFFIX}") if ring.stem.isdigit()]
    deadline = time.monotonic() + ORPHAN_GRACE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        while ranks and time.monotonic() < deadline:
            ranks = [pid for pid in ranks if _alive(pid)]
            time.sleep(0.05)
        for pid in ranks:
            os.kill(pid, number)
        deadline = time.monotonic() + ORPHAN_GRACE_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
