"""A process of ours beside the job (the agent, the hub), as the launcher holds it.

It is started in a session of its own, out of reach of the terminal, and started again when it dies.  Its standard
input is a pipe on which it is told how the job ended, or that we are gone; its standard output another, on which it
says JSON objects, one a line.  Nothing else of ours is inherited, but for one descriptor that may be handed over.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.records.messages import say
from stepscope.records.places import helper_command, helper_environment

__all__ = ["ENDING", "Helper", "Mask", "forget_signals", "spawn", "watched_signals"]

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
