"""Helper processes of the launcher (agent, hub, output forwarder): start, restart and end them; how the job ended.

A helper runs in a separate session, out of reach of the terminal's signals, and is restarted if it dies. Its standard
input is a pipe on which it learns how the job ended, or, by end of file, that the launcher is gone. Its standard output
is a pipe on which it sends JSON objects, one per line. It inherits nothing else except the descriptors passed to it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.agent.hangs.on_hang import HangPolicy
from stepscope.records.paths import helper_command, helper_environment
from stepscope.records.text import say
from stepscope.store.documents import RunStatus

__all__ = [
    "ENDING",
    "AgentChild",
    "Helper",
    "HubLink",
    "JobEnd",
    "Mask",
    "OutputForwarder",
    "aborted_end",
    "forget_signals",
    "host_of",
    "job_end",
    "output_targets",
    "spawn",
    "watched_signals",
    "worst_end",
]


# -- helper process ---------------------------------------------------------------------------------------------------

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_FD = 3
"""Number, in the helper, of the descriptor that is passed on …"""
CALLER_FD = 4
"""… and of a second one, for one start only."""
_CHUNK = 1 << 16
_LONGEST = 1 << 20

Mask = set[int | signal.Signals]


class Helper:
    def __init__(
        self,
        what: str,
        command: Sequence[str],
        *,
        starts: int,
        without: str,
        forgiven_s: float = float("inf"),
        passed: int = -1,
    ) -> None:
        """``without`` describes the consequence if the helper is missing; ``passed`` is passed on as ``PASSED_FD``.

        ``starts`` is the maximum number of starts in total; a helper that lives for ``forgiven_s`` resets the count.
        """
        self._what = what
        self._command = helper_command(*command)
        self._starts = starts
        self._without = without
        self._forgiven_s = forgiven_s
        self._passed = passed
        self._started_s = 0.0
        self._mask: Mask = set()
        self._pid = 0
        self._told = self._heard = -1
        self._partial = b""
        self._said: list[dict[str, Any]] = []
        self.started = 0
        """Number of starts so far."""
        self.exit_code: int | None = None
        """Exit code of the last process that ended."""

    @property
    def running(self) -> bool:
        return self._pid != 0

    def start(self, mask: Mask, *, caller: int = -1) -> None:
        """Start the process. ``mask``: the mask before ``signals_held``; ``caller``: passed on as ``CALLER_FD``."""
        self._mask = mask
        self.started += 1
        self._started_s = time.monotonic()
        reading, self._told = os.pipe()
        self._heard, writing = os.pipe()
        os.set_blocking(self._heard, False)
        try:
            streams: tuple[int, ...] = (reading, writing)
            if self._passed >= 0:
                streams = (*streams, self._passed)
            words = [*self._command, *(("--caller-fd", str(CALLER_FD)) if caller >= 0 else ())]
            streams = (*streams, caller) if caller >= 0 else streams
            self._pid = spawn(words, helper_environment(os.environ), mask, streams)
        except OSError as error:
            self._close()
            say(f"the {self._what} cannot be started ({error.strerror}); {self._without}")
        finally:
            os.close(reading)
            os.close(writing)

    def over(self) -> bool:
        """Whether the helper has ended; its process is reaped, and its messages are kept."""
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self._pid = 0
                self._hear()
                self._close()
        return not self._pid

    def restart(self) -> bool:
        """Restart a helper that died, unless it keeps dying; return whether it runs now."""
        if time.monotonic() - self._started_s >= self._forgiven_s:
            self.started = 0
        if self.started >= self._starts:
            say(f"the {self._what} keeps dying; {self._without}")
            return False
        self.start(self._mask)
        return self.running

    def said(self) -> list[dict[str, Any]]:
        """Messages since the last call."""
        if self._pid:
            self._hear()
        said, self._said = self._said, []
        return said

    def tell(self, word: Mapping[str, Any]) -> None:
        """Send the last message and close the pipe."""
        try:
            os.write(self._told, json.dumps(word).encode() + b"\n")
        except BrokenPipeError:
            pass  # it has just died
        os.close(self._told)
        self._told = -1

    def wait(self, until_s: float, *, patient: bool = True) -> bool:
        """Whether the helper ended before that time (``time.monotonic``), and no Ctrl-C ended the wait."""
        watched = [signal.SIGCHLD] if patient else watched_signals()
        while not self.over():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            caught = signal.sigtimedwait(watched, min(left_s, 0.5))
            if caught is not None and caught.si_signo != signal.SIGCHLD:
                return False
        return True

    def end(self, grace_s: float = 0.0) -> None:
        """End the helper, with SIGTERM first if ``grace_s`` is given."""
        for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 60.0)):
            if seconds and not self.over():
                os.kill(self._pid, number)
                self.wait(time.monotonic() + seconds)

    def _hear(self) -> None:
        try:
            while data := os.read(self._heard, _CHUNK):
                *lines, self._partial = (self._partial + data).split(b"\n")
                self._partial = self._partial[-_LONGEST:]
                self._said += [word for line in lines if (word := _word(line))]
        except BlockingIOError:
            pass  # no more data

    def _close(self) -> None:
        for fd in (self._told, self._heard):
            if fd >= 0:
                os.close(fd)
        self._told = self._heard = -1
        self._partial = b""


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: Mask,
    streams: Sequence[int] | None = None,
    *,
    terminal: int = -1,
) -> int:
    """Start a process with our previous signal mask; with ``streams``, out of reach of our terminal.

    The third and fourth of ``streams`` are descriptors to pass on, not standard error. ``terminal``, if given, becomes
    all three standard streams of the process.
    """
    targets = (0, 1, PASSED_FD, CALLER_FD)
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in zip(streams or (), targets, strict=False)]
    actions += [(os.POSIX_SPAWN_DUP2, terminal, target) for target in (0, 1, 2) if terminal >= 0]
    return os.posix_spawn(
        command[0],
        list(command),
        dict(environment),
        file_actions=actions,
        setsigmask=[int(number) for number in mask],
        setsid=streams is not None,
    )


def watched_signals() -> list[int]:
    """SIGCHLD, and the signals that end us unless our parent set them to be ignored."""
    return [*(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN), signal.SIGCHLD]


def forget_signals() -> None:
    """Drop pending signals: they were meant for what is over."""
    while signal.sigtimedwait(watched_signals(), 0) is not None:
        pass


def _word(line: bytes) -> dict[str, Any]:
    try:
        word = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return word if isinstance(word, dict) else {}


# -- end of a job -----------------------------------------------------------------------------------------------------
# What the exit code and the received signals mean.

_BY_SEVERITY: tuple[RunStatus, ...] = ("finished", "interrupted", "failed", "crashed")


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    exit_code: int
    """Exit code of ``stepscope run``: the job's own, or 128 + signal for a job killed by a signal."""
    status: RunStatus

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def job_end(code: int, interrupted: int | None) -> JobEnd:
    """Interpret the exit code of the job, given the signal that was sent to end it."""
    if code == 0:
        return JobEnd(exit_code=0, status="finished")
    if interrupted is None and -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        interrupted = -code
    if interrupted is not None:
        # The exit code that a bare run would have, whatever the job makes of an interrupt (torchrun exits with 1).
        return JobEnd(exit_code=code if code > 0 else 128 + interrupted, status="interrupted")
    if code < 0:
        return JobEnd(exit_code=128 - code, status="crashed")
    return JobEnd(exit_code=code, status="failed")


def aborted_end(code: int) -> JobEnd:
    """End of a job that we aborted: it failed, whatever its exit code says."""
    return JobEnd(exit_code=code if 0 < code <= 128 else 1, status="failed")


def worst_end(ends: Iterable[JobEnd]) -> JobEnd:
    """The worst of several processes of one job; the first among equals."""
    return max(ends, key=lambda end: _BY_SEVERITY.index(end.status))


# -- agent ------------------------------------------------------------------------------------------------------------
# On the first or only node the agent is done when the rings are drained. On another node it then sends what the hub
# does not have yet. We wait for that, but not forever: the user may stop us, and what was not sent stays on disk.

AGENT_STARTS = 5
AGENT_END_S = 30.0
"""Time that the agent gets for its last drain …"""
SEND_S = 60.0
"""… and, on other nodes than the first, to send the rest."""
SAY_AFTER_S = 1.0
"""If it takes longer, print a line that explains the wait."""
AGENT_GRACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class HubLink:
    """The hub of a multi-node job and this node's number in it; stored in ``run.json``."""

    url: str
    run: str
    """The requested name."""
    node: int
    nnodes: int

    @property
    def sends(self) -> bool:
        """Whether this node sends its part to another."""
        return self.node > 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class AgentChild:
    def __init__(self, run_dir: Path, session: Path, on_hang: HangPolicy, link: HubLink | None = None) -> None:
        words = ["stepscope.agent", "--run-dir", str(run_dir), "--session", str(session)]
        words += ["--hang-after", str(on_hang.after_s), f"--on-hang={on_hang.action}"]
        if link is not None:
            words += ["--hub", link.url, "--node", str(link.node), "--nnodes", str(link.nnodes)]
            words += [f"--run-name={link.run}"]
        self._link = link
        self._helper = Helper("agent", words, starts=AGENT_STARTS, without="steps stay in their rings until the end")
        self._gone = False
        self._wants_end = False
        self.delivered = False
        """Whether the hub has all data of this node."""
        self.why_not = ""
        self.run_name = "" if link is None else link.run
        """Name of the run at the hub."""

    def start(self, mask: Mask) -> None:
        self._helper.start(mask)
        self._gone = not self._helper.running

    def keep_alive(self) -> None:
        if not self._gone and self._helper.over():
            self._gone = not self._helper.restart()
        self._hear()

    def wants_end(self) -> bool:
        """Whether the agent asked us to end the job."""
        return self._wants_end

    def finish(self, end: JobEnd, *, quiet: bool = False) -> None:
        """Tell the agent that the job is over; wait for its last drain and, if it sends to a hub, until all is sent."""
        self.keep_alive()  # if it has just died, restart it once more to free the remaining rings
        if not self._helper.running:
            return
        self._helper.tell({"end": end.to_dict()})
        began_s = time.monotonic()
        if self._link is not None and self._link.sends:
            self._let_send(self._link, began_s, quiet=quiet)
        elif not self._helper.wait(began_s + AGENT_END_S):
            say("the agent did not exit; the summary may lack the last steps")
            self._helper.end()
        self._hear()
        self._gone = True

    def _let_send(self, link: HubLink, began_s: float, *, quiet: bool) -> None:
        if not self._helper.wait(began_s + SAY_AFTER_S):
            if not quiet:
                say(f"sending the rest to {host_of(link.url)} … (Ctrl-C: stop waiting)")
            forget_signals()
            if not self._helper.wait(began_s + AGENT_END_S + SEND_S, patient=False):
                self._helper.end(AGENT_GRACE_S)

    def _hear(self) -> None:
        for word in self._helper.said():
            self._wants_end = self._wants_end or "abort" in word
            self.delivered = self.delivered or word.get("delivered") is True
            self.why_not = str(word.get("why", self.why_not))
            self.run_name = str(word.get("run") or self.run_name)


def host_of(url: str) -> str:
    return url.partition("//")[2]


# -- output forwarder -------------------------------------------------------------------------------------------------
# The process that forwards output kept in files (``run --native-output``). It outlives a launcher that is killed; if it
# is killed itself, it is restarted and resumes. If both are gone, the job keeps writing to its files undisturbed.

FORWARDER_STARTS = 5
FORWARDER_END_S = 30.0
"""Time that the last output gets to arrive; its reader may be slow."""
_HIGH_FD = 10


def output_targets() -> str | None:
    """Identity of descriptors 1 and 2, as in ``ENV_NATIVE``; None if neither can be replaced by a file."""
    found = []
    for fd in (1, 2):
        try:
            info = os.fstat(fd)
        except OSError:
            found.append("-")
            continue
        replaced = stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode) or stat.S_ISREG(info.st_mode)
        found.append(f"{info.st_dev}:{info.st_ino}" if replaced else "-")
    return " ".join(found) if found != ["-", "-"] else None


class OutputForwarder:
    def __init__(self, run_dir: Path, targets: str) -> None:
        self.targets = targets
        self._output = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) if targets[0] != "-" else -1
        self._helper = Helper(
            "process that forwards output",
            ["stepscope.agent.output_forwarder", str(run_dir)],
            starts=FORWARDER_STARTS,
            without=f"the job's output is only in {run_dir / 'logs'}",
            passed=self._output,
        )
        self._gone = False

    def start(self, mask: Mask) -> None:
        self._helper.start(mask)
        self._gone = not self._helper.running

    def keep_alive(self) -> None:
        if not self._gone and self._helper.over():
            self._gone = not self._helper.restart()

    def finish(self) -> None:
        """Forward all remaining output of the finished job."""
        self.keep_alive()
        if self._helper.running:
            self._helper.tell({"end": True})
            if not self._helper.wait(time.monotonic() + FORWARDER_END_S):
                say("the reader of the job's output is slow; the rest will arrive later")
        if self._output >= 0:
            os.close(self._output)
