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

from stepscope.agent.on_hang import HangPolicy
from stepscope.cli.orphans import end_orphans, ranks_of
from stepscope.errors import UsageError
from stepscope.records.places import helper_environment

__all__ = ["JobEnd", "signals_held", "supervise"]

FROM_TERMINAL = 0x80
"""``si_code`` of a signal that the kernel sent, as for Ctrl-C."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGENT_STARTS = 5
AGENT_END_S = 30.0
"""How long the agent may take for its last drain."""
ABORT_S = 10.0
"""How long a job that hangs may take to end when it is asked to."""
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
    command: Sequence[str],
    environment: Mapping[str, str],
    run_dir: Path,
    session: Path,
    *,
    mask: Mask,
    on_hang: HangPolicy | None = None,
) -> JobEnd:
    """Run the job to its end with an agent beside it; to be called with ``signals_held``, whose mask the job gets.

    UsageError when the job cannot be started.
    """
    try:
        job = _spawn(command, environment, mask)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error
    agent = _Agent(run_dir, session, mask, on_hang or HangPolicy())
    end, aborted = _wait(job, agent, session)
    if end.status == "interrupted" or aborted:
        end_orphans(session)
    agent.finish(end)
    return end


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], mask: Mask, streams: tuple[int, int] | None = None
) -> int:
    """Start a process with our own earlier signal mask; with its two streams given, out of reach of our terminal."""
    actions = [] if streams is None else [(os.POSIX_SPAWN_DUP2, fd, stream) for stream, fd in enumerate(streams)]
    return os.posix_spawn(
        command[0],
        list(command),
        dict(environment),
        file_actions=actions,
        setsigmask=[int(number) for number in mask],
        setsid=streams is not None,
    )


def _wait(job: int, agent: _Agent, session: Path) -> tuple[JobEnd, bool]:
    """How the job ended, and whether it was us who ended it, because it hung."""
    watched = [*(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN), signal.SIGCHLD]
    interrupted: int | None = None
    times = 0
    abort: _Abort | None = None
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
        if abort is None and agent.wants_end():
            abort = _Abort(job, session)
        if abort is not None:
            abort.insist()
        pid, status = os.waitpid(job, os.WNOHANG)
        if pid == job:
            code = os.waitstatus_to_exitcode(status)
            end = _job_end(code, interrupted) if abort is None or interrupted is not None else _aborted_end(code)
            return end, abort is not None


class _Abort:
    """The end of a job that hangs: it is asked to end and, if it has not by then, made to, with all its ranks."""

    def __init__(self, job: int, session: Path) -> None:
        self._job = job
        self._session = session
        self._deadline_s = time.monotonic() + ABORT_S
        _say("the job hangs and is ended (--on-hang abort)")
        os.kill(job, signal.SIGTERM)

    def insist(self) -> None:
        if time.monotonic() < self._deadline_s:
            return
        # The ranks first, as long as the session tells who they are: a stopped one hears nothing but SIGKILL.
        for pid in {*ranks_of(self._session), self._job}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _aborted_end(code: int) -> JobEnd:
    """Of a job that we ended: it failed, whatever it makes of it itself."""
    return JobEnd(exit_code=code if 0 < code <= 128 else 1, status="failed")


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
    """The agent process; its standard input is a pipe that says how the job ended, or that we are gone.

    Its standard output is another, on which it asks us to end a job that hangs.
    """

    def __init__(self, run_dir: Path, session: Path, mask: Mask, on_hang: HangPolicy) -> None:
        places = ["--run-dir", str(run_dir), "--session", str(session)]
        hangs = ["--hang-after", str(on_hang.after_s), f"--on-hang={on_hang.action}"]
        self._command = [sys.executable, "-m", "stepscope.agent", *places, *hangs]
        self._mask = mask
        self._starts = 0
        self._pid = 0
        self._pipe = self._heard = -1
        self._start()

    def wants_end(self) -> bool:
        """Whether it asks us to end the job; all that it ever says."""
        try:
            return bool(self._pid and os.read(self._heard, 1 << 12))
        except BlockingIOError:
            return False

    def keep_alive(self) -> None:
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
            self._close()
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
        self._close()
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

    def _close(self) -> None:
        os.close(self._pipe)
        os.close(self._heard)

    def _start(self) -> None:
        self._starts += 1
        reading, self._pipe = os.pipe()
        self._heard, writing = os.pipe()
        os.set_blocking(self._heard, False)
        try:
            self._pid = _spawn(self._command, helper_environment(os.environ), self._mask, (reading, writing))
        except OSError as error:
            self._close()
            _say(f"the agent cannot be started ({error.strerror}); steps stay in their rings until the end")
        finally:
            os.close(reading)
            os.close(writing)


def _say(message: str) -> None:
    print(f"stepscope: {message}", file=sys.stderr, flush=True)
