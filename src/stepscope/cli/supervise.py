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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepscope.cli.orphans import end_orphans
from stepscope.errors import UsageError
from stepscope.records.places import helper_environment

__all__ = ["JobEnd", "signals_held", "supervise"]

FROM_TERMINAL = 0x80
"""``si_code`` of a signal that the kernel sent, as for Ctrl-C."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGENT_STARTS = 5
AGENT_END_S = 30.0
"""How long the agent may take for its last drain."""
IMPATIENT = 3
"""This many Ctrl-C end a job that does not react."""

Mask = set[int | signal.Signals]


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    exit_code: int
    """What ``stepscope run`` exits with: the job's own, 128 + signal for a job killed by one."""
    status: Literal["finished", "failed", "crashed", "interrupted"]


@contextmanager
def signals_held() -> Iterator[Mask]:
    """Within, signals wait to be asked for, so that a second Ctrl-C cannot cost the summary; yields the earlier mask.

    One that our parent told us to ignore stays ignored (``nohup``; a shell script's background job).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    held = {number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN}
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {*held, signal.SIGCHLD})
    try:
        yield earlier
    finally:
        while signal.sigtimedwait(held, 0) is not None:
            pass  # it came too late to end anything but the summary
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def supervise(
    command: Sequence[str], environment: Mapping[str, str], run_dir: Path, session: Path, *, mask: Mask
) -> JobEnd:
    """Run the job to its end with an agent beside it; to be called with ``signals_held``, whose mask the job gets.

    UsageError when the job cannot be started.
    """
    try:
        job = _spawn(command, environment, mask)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error
    agent = _Agent(run_dir, session, mask)
    end = _wait(job, agent)
    if end.status == "interrupted":
        end_orphans(session)
    agent.finish(end)
    return end


def _spawn(command: Sequence[str], environment: Mapping[str, str], mask: Mask, stdin: int | None = None) -> int:
    """Start a process with our own earlier signal mask; with ``stdin`` given, out of reach of our terminal."""
    actions = [] if stdin is None else [(os.POSIX_SPAWN_DUP2, stdin, 0)]
    return os.posix_spawn(
        command[0],
        list(command),
        dict(environment),
        file_actions=actions,
        setsigmask=[int(number) for number in mask],
        setsid=stdin is not None,
    )


def _wait(job: int, agent: _Agent) -> JobEnd:
    watched = [*(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN), signal.SIGCHLD]
    interrupted: int | None = None
    times = 0
    while True:
        caught = signal.sigtimedwait(watched, 1.0)
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
    """What the exit code of the job means, given the signal that somebody sent to end it."""
    if code == 0:
        return JobEnd(exit_code=0, status="finished")
    if interrupted is None and -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        interrupted = -code
    if interrupted is not None:
        # 1 is how torchrun ends however it was ended; another code is one that the script chose for this case.
        own = 1 < code <= 128
        return JobEnd(exit_code=code if own else 128 + interrupted, status="interrupted")
    if code < 0:
        return JobEnd(exit_code=128 - code, status="crashed")
    return JobEnd(exit_code=code, status="failed")


class _Agent:
    """The agent process; its standard input is a pipe that says how the job ended, or that we are gone."""

    def __init__(self, run_dir: Path, session: Path, mask: Mask) -> None:
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
            else:
                _say("the agent keeps dying; steps stay in their rings until the end")

    def finish(self, end: JobEnd) -> None:
        """Tell it that the job is over and wait for its last drain."""
        self.keep_alive()  # one that died this moment is started once more: it frees the rings that are left
        if not self._pid:
            return
        word = json.dumps({"end": {"exit_code": end.exit_code, "status": end.status}}) + "\n"
        try:
            os.write(self._pipe, word.encode())
        except BrokenPipeError:
            pass  # whoever opens the run drains the rings
        os.close(self._pipe)
        deadline = time.monotonic() + AGENT_END_S
        while not os.waitpid(self._pid, os.WNOHANG)[0]:
            left = deadline - time.monotonic()
            if left <= 0:
                _say("the agent does not end; the summary may miss the last steps")
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            signal.sigtimedwait([signal.SIGCHLD], min(left, 0.5))
        self._pid = 0

    def _start(self) -> None:
        self._starts += 1
        reading, self._pipe = os.pipe()
        try:
            self._pid = _spawn(self._command, helper_environment(os.environ), self._mask, stdin=reading)
        except OSError as error:
            os.close(self._pipe)
            _say(f"the agent cannot be started ({error.strerror}); steps stay in their rings until the end")
        finally:
            os.close(reading)


def _say(message: str) -> None:
    print(f"stepscope: {message}", file=sys.stderr, flush=True)
