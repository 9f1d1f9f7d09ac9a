"""Start the job and what stands beside it, pass signals on, wait, and say how it ended.

The launcher is the parent of them all.  It blocks the signals it cares for and takes them one by one, so that it can
tell a Ctrl-C from the terminal (which the job has received itself) from a ``kill`` meant for the launcher alone (which
it must pass on).  If the agent or the hub dies it is started again and goes on where it was; if the launcher dies, the
job and the agent go on without it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stepscope.cli.agent_child import AgentChild
from stepscope.cli.ends import JobEnd, aborted_end, job_end, worst_end
from stepscope.cli.forward_child import OutputForwarder
from stepscope.cli.helper import ENDING, Mask, spawn, watched_signals
from stepscope.cli.hub_child import HubChild
from stepscope.cli.live_child import LiveView
from stepscope.cli.orphans import end_orphans, ranks_of
from stepscope.errors import UsageError
from stepscope.records.messages import say

__all__ = ["Beside", "Others", "signals_held", "supervise", "supervise_alone"]

FROM_TERMINAL = 0x80
"""``si_code`` of a signal that the kernel sent, as for Ctrl-C."""
TEND_S = 1.0
"""How often what stands beside the job is looked after."""
ABORT_S = 10.0
"""How long a job that hangs may take to end when it is asked to."""
IMPATIENT = 3
"""This many Ctrl-C end a job that does not react."""


class Others(Protocol):
    """Processes of the same job on this node that others launched."""

    def over(self) -> bool: ...

    def ends(self) -> list[JobEnd]: ...


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What stands beside a job."""

    session: Path
    agent: AgentChild
    hub: HubChild | None = None
    others: Others | None = None
    view: LiveView | None = None
    forwarder: OutputForwarder | None = None

    def start(self, mask: Mask) -> None:
        self.agent.start(mask)
        if self.forwarder is not None:
            self.forwarder.start(mask)
        if self.hub is not None:
            self.hub.start(mask)
        if self.view is not None:
            self.view.start(mask)

    def keep_alive(self) -> float:
        """In how many seconds to come again at the latest."""
        self.agent.keep_alive()
        if self.forwarder is not None:
            self.forwarder.keep_alive()
        if self.hub is not None:
            self.hub.keep_alive()
        return TEND_S if self.view is None else self.view.keep_alive()

    def typed(self, caught: signal.struct_siginfo) -> bool:
        """Whether a signal came from the keyboard, so that the job has it already."""
        return caught.si_code == FROM_TERMINAL or (self.view is not None and self.view.sent(caught))


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
    command: Sequence[str], environment: Mapping[str, str], beside: Beside, *, mask: Mask, quiet: bool = False
) -> tuple[JobEnd, JobEnd]:
    """Run the job to its end with an agent beside it; to be called with ``signals_held``, whose mask the job gets.

    How our own job ended, and how this node's part did, with the ranks that others launched.  UsageError when the job
    cannot be started.
    """
    job = _start(command, environment, mask)
    beside.start(mask)
    own, aborted = _wait(job, beside, lambda: _Abort(job, beside.session))
    if beside.forwarder is not None:
        beside.forwarder.finish()
    if beside.view is not None:
        beside.view.finish(quiet=quiet)
    whole = own
    if beside.others is not None:
        _await_others(beside, beside.others)
        whole = worst_end([own, *beside.others.ends()])
    elif own.status == "interrupted" or aborted:
        end_orphans(beside.session)
    beside.agent.finish(whole, quiet=quiet)
    if beside.hub is not None:
        beside.hub.finish(whole, quiet=quiet)
    if beside.view is not None:
        beside.view.close()
    return own, whole


def supervise_alone(command: Sequence[str], environment: Mapping[str, str], *, mask: Mask) -> JobEnd:
    """The same for a rank whose agent is another's."""
    return _wait(_start(command, environment, mask), None)[0]


def _start(command: Sequence[str], environment: Mapping[str, str], mask: Mask) -> int:
    try:
        return spawn(command, environment, mask)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error


def _wait(job: int, beside: Beside | None, abort: Callable[[], _Abort] | None = None) -> tuple[JobEnd, bool]:
    """How the job ended, and whether it was us who ended it, because it hung."""
    watched = watched_signals()
    interrupted: int | None = None
    times = 0
    pause_s = TEND_S
    aborting: _Abort | None = None
    while True:
        caught = signal.sigtimedwait(watched, pause_s)
        if caught is not None and caught.si_signo != signal.SIGCHLD:
            interrupted = caught.si_signo
            times += 1
            typed = beside.typed(caught) if beside is not None else caught.si_code == FROM_TERMINAL
            if times >= IMPATIENT:
                os.kill(job, signal.SIGKILL)
            elif not typed:
                os.kill(job, caught.si_signo)
        if beside is not None:
            pause_s = beside.keep_alive()
            if aborting is None and abort is not None and beside.agent.wants_end():
                aborting = abort()
        if aborting is not None:
            aborting.insist()
        pid, status = os.waitpid(job, os.WNOHANG)
        if pid == job:
            code = os.waitstatus_to_exitcode(status)
            ours = aborting is not None and interrupted is None
            return (aborted_end(code) if ours else job_end(code, interrupted)), aborting is not None


def _await_others(beside: Beside, others: Others) -> None:
    """Until they are over too; whoever ends the job ends them as well, and a third Ctrl-C is for us."""
    times = 0
    while not others.over() and times < IMPATIENT:
        caught = signal.sigtimedwait(watched_signals(), 0.2)
        times += caught is not None and caught.si_signo != signal.SIGCHLD
        beside.keep_alive()


class _Abort:
    """The end of a job that hangs: it is asked to end and, if it has not by then, made to, with all its ranks."""

    def __init__(self, job: int, session: Path) -> None:
        self._job = job
        self._session = session
        self._deadline_s = time.monotonic() + ABORT_S
        say("the job hangs and is ended (--on-hang abort)")
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
