"""The processes beside the job (agent, output forwarder): start, restart and end them; how the job ended.

A process of ours beside the job (the agent, the hub), as the launcher holds it.

It is started in a session of its own, out of reach of the terminal, and started again when it dies.  Its standard
input is a pipe on which it is told how the job ended, or that we are gone; its standard output another, on which it
says JSON objects, one a line.  Nothing else of ours is inherited, but for one descriptor that may be handed over.
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


# -- helper -----------------------------------------------------------------------------------------------------------

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_FD = 3
"""What a descriptor that is handed over is called there …"""
CALLER_FD = 4
"""… and a second one, for one start only."""
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
        """``without`` says what it means that there is none; ``passed`` is handed over as ``PASSED_FD``.

        It is started so many times in all, or without having lived for ``forgiven_s`` once.
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
        """How often it was."""
        self.exit_code: int | None = None
        """Of the one that ended last."""

    @property
    def running(self) -> bool:
        return self._pid != 0

    def start(self, mask: Mask, *, caller: int = -1) -> None:
        """``mask`` is the signal mask from before ``signals_held``; ``caller``: handed over as ``CALLER_FD``."""
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
        """Whether it has ended; it is then forgotten, but not what it said."""
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self._pid = 0
                self._hear()
                self._close()
        return not self._pid

    def restart(self) -> bool:
        """Start one that died again, unless it keeps dying; whether there is one now."""
        if time.monotonic() - self._started_s >= self._forgiven_s:
            self.started = 0
        if self.started >= self._starts:
            say(f"the {self._what} keeps dying; {self._without}")
            return False
        self.start(self._mask)
        return self.running

    def said(self) -> list[dict[str, Any]]:
        """What is new."""
        if self._pid:
            self._hear()
        said, self._said = self._said, []
        return said

    def tell(self, word: Mapping[str, Any]) -> None:
        """The last word: after it there is nothing more to be said."""
        try:
            os.write(self._told, json.dumps(word).encode() + b"\n")
        except BrokenPipeError:
            pass  # it died this moment
        os.close(self._told)
        self._told = -1

    def wait(self, until_s: float, *, patient: bool = True) -> bool:
        """Whether it ended before that time (of ``time.monotonic``), and nobody lost patience with a Ctrl-C."""
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
        """Make it end: asked first, if it is given time for that."""
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
            pass  # that was all

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
    """Start a process with our own earlier signal mask; with its streams given, out of reach of our terminal.

    Of ``streams`` the third and the fourth are not its standard error but descriptors that are handed over.
    ``terminal`` is what all three streams of the process are, if it is given.
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
    """A child's end, and those that end us, unless our parent told us to ignore them."""
    return [*(number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN), signal.SIGCHLD]


def forget_signals() -> None:
    """Those that came so far were for what is over."""
    while signal.sigtimedwait(watched_signals(), 0) is not None:
        pass


def _word(line: bytes) -> dict[str, Any]:
    try:
        word = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return word if isinstance(word, dict) else {}


# -- ends -------------------------------------------------------------------------------------------------------------
# How a job ended, and what its exit code and the signals that came mean.

_BY_SEVERITY: tuple[RunStatus, ...] = ("finished", "interrupted", "failed", "crashed")


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    exit_code: int
    """What ``stepscope run`` exits with: the job's own, 128 + signal for a job killed by one."""
    status: RunStatus

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def job_end(code: int, interrupted: int | None) -> JobEnd:
    """What the exit code of the job means, given the signal that somebody sent to end it."""
    if code == 0:
        return JobEnd(exit_code=0, status="finished")
    if interrupted is None and -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        interrupted = -code
    if interrupted is not None:
        # Whatever the job itself makes of an interrupt (torchrun ends with 1) is what a bare run would end with.
        return JobEnd(exit_code=code if code > 0 else 128 + interrupted, status="interrupted")
    if code < 0:
        return JobEnd(exit_code=128 - code, status="crashed")
    return JobEnd(exit_code=code, status="failed")


def aborted_end(code: int) -> JobEnd:
    """Of a job that we ended: it failed, whatever it makes of it itself."""
    return JobEnd(exit_code=code if 0 < code <= 128 else 1, status="failed")


def worst_end(ends: Iterable[JobEnd]) -> JobEnd:
    """Of several processes that are one job; of those that ended alike, the first."""
    return max(ends, key=lambda end: _BY_SEVERITY.index(end.status))


# -- agent child ------------------------------------------------------------------------------------------------------
# The agent, as its launcher holds it: started again when it dies, heard when it wants the job ended or has sent all.
#
# On the first node, or on the only one, it is over when the rings are drained.  On another it then sends what the hub
# does not have yet, and we wait for that, not for ever: the user may stop us, and what was not sent stays.

AGENT_STARTS = 5
AGENT_END_S = 30.0
"""How long the agent may take for its last drain …"""
SEND_S = 60.0
"""… and, on another node than the first, to send the rest."""
SAY_AFTER_S = 1.0
"""If it takes longer than this, a line says what is going on."""
AGENT_GRACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class HubLink:
    """Where the hub of a job of several nodes is, and which of them this is; it stands in ``run.json``."""

    url: str
    run: str
    """The name that was asked for."""
    node: int
    nnodes: int

    @property
    def sends(self) -> bool:
        """Whether this node's part goes to another."""
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
        """Whether the hub has all of this node."""
        self.why_not = ""
        self.run_name = "" if link is None else link.run
        """What the run is called at the hub."""

    def start(self, mask: Mask) -> None:
        self._helper.start(mask)
        self._gone = not self._helper.running

    def keep_alive(self) -> None:
        if not self._gone and self._helper.over():
            self._gone = not self._helper.restart()
        self._hear()

    def wants_end(self) -> bool:
        """Whether it asked us to end the job."""
        return self._wants_end

    def finish(self, end: JobEnd, *, quiet: bool = False) -> None:
        """Tell it that the job is over and wait for its last drain, and for all to be sent where that is its task."""
        self.keep_alive()  # one that died this moment is started once more: it frees the rings that are left
        if not self._helper.running:
            return
        self._helper.tell({"end": end.to_dict()})
        began_s = time.monotonic()
        if self._link is not None and self._link.sends:
            self._let_send(self._link, began_s, quiet=quiet)
        elif not self._helper.wait(began_s + AGENT_END_S):
            say("the agent does not end; the summary may miss the last steps")
            self._helper.end()
        self._hear()
        self._gone = True

    def _let_send(self, link: HubLink, began_s: float, *, quiet: bool) -> None:
        if not self._helper.wait(began_s + SAY_AFTER_S):
            if not quiet:
                say(f"sending the rest to {host_of(link.url)} … (Ctrl-C: do not wait for it)")
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


# -- forward child ----------------------------------------------------------------------------------------------------
# The process that forwards output kept in files (``run --native-output``), as the launcher holds it.
#
# It outlives a launcher that is killed, and one that is killed itself is started again where it was.  Should both be
# gone the job goes on to write to its files, and notices nothing.

FORWARDER_STARTS = 5
FORWARDER_END_S = 30.0
"""How long the last output may take to where it goes; whoever reads it may be slow."""
_HIGH_FD = 10


def output_targets() -> str | None:
    """What descriptors 1 and 2 are, as ``ENV_NATIVE`` has it; None: nothing that a file could stand in for."""
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
            without=f"what the job prints is in {run_dir / 'logs'} only",
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
        """The job is over: all that it printed goes where it was to go."""
        self.keep_alive()
        if self._helper.running:
            self._helper.tell({"end": True})
            if not self._helper.wait(time.monotonic() + FORWARDER_END_S):
                say("whoever reads the job's output is slow: the rest of it comes later")
        if self._output >= 0:
            os.close(self._output)
