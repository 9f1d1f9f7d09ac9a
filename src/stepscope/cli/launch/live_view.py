"""The live view of a job (``stepscope run --live``), and the terminal that the view and the job would both write to.

The view owns the terminal. Output of the job, the agent, the hub and the launcher goes to ``logs/terminal.log``, a
plain file that never blocks its writers, and the view shows its end. When the view ends (``q``, a crash or
``kill -9``), the terminal is restored and receives the output from then on; the job is not affected. When the job ends,
so does the view.

    job ──┐
    agent ┼──► logs/terminal.log ──► hub ──► view ──► terminal
    us ───┘            └──────── without a view: us ──► terminal

The view is in our process group, like the job. A Ctrl-C in the view is sent to the group, as the terminal would do.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepscope.cli.launch.helpers import Mask, spawn, typed_path
from stepscope.records.files import file_mode
from stepscope.records.paths import helper_command, helper_environment, terminal_log
from stepscope.records.text import say

__all__ = ["LiveView", "why_no_screen", "why_no_terminal"]

END_S = 3.0
LAST_LINES = 20
LAST_BYTES = 64 << 10
CHUNK = 64 << 10
MOST_AT_ONCE = 1 << 20
FOLLOW_S = 0.1
"""How often output is copied to the terminal when there is no view."""
TEND_S = 1.0
_HIGH_FD = 10
RESET = b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1004l\x1b[?2004l\x1b[<u\x1b[?1049l\x1b[?25h\x1b[0m\r\n"
"""Restores mouse, focus, paste, keyboard, screen and cursor modes after a view that could not do it."""


def why_no_screen() -> str:
    """Why no view can be drawn here, regardless of the streams; empty if it can."""
    if os.environ.get("TERM", "") in ("", "dumb"):
        return "this terminal cannot show a full-screen view (TERM is unset or dumb)"
    if importlib.util.find_spec("textual") is None:
        return "Textual is not installed"
    return ""


def why_no_terminal() -> str:
    """Why there is no terminal for a view of a job; empty if there is one."""
    if not sys.stdout.isatty():
        return "standard output is not a terminal"
    try:
        tty = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return "there is no terminal"
    try:
        return "" if os.tcgetpgrp(tty) == os.getpgrp() else "the job runs in the background"
    except OSError:
        return "there is no terminal"
    finally:
        os.close(tty)


class LiveView:
    """From construction to ``close``, our standard streams and those of our children are not the terminal."""

    def __init__(self, run_dir: Path) -> None:
        """Raises OSError if the terminal or the file cannot be opened."""
        self._run_dir = run_dir
        self.log = terminal_log(run_dir)
        self._tty = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        self._modes: list[Any] = termios.tcgetattr(self._tty)
        self._pid = 0
        self._started = 0
        """Process ID of the view, kept after it ends."""
        self._shown = -1
        """Bytes of output that the terminal has received; -1: the view owns the terminal."""
        self._saved_fds: dict[int, int] = {}
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self.log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, file_mode(self.log.parent))
        except OSError:
            os.close(self._tty)
            raise
        self._log = fcntl.fcntl(log, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
        os.close(log)
        self._take_streams()

    def start(self, mask: Mask) -> None:
        """Start the view. ``mask``: the signal mask from before ``signals_held``."""
        command = helper_command("stepscope.terminal", "--run-dir", str(self._run_dir))
        # A Ctrl-C before the view reads the keyboard is for the job alone.
        blocked = {*mask, signal.SIGINT}
        try:
            self._pid = self._started = spawn(command, helper_environment(os.environ), blocked, terminal=self._tty)
        except OSError as error:
            say(f"live view not available: {error.strerror}")
            self._shown = 0

    def keep_alive(self) -> float:
        """Check the view; return the number of seconds until the next call at the latest."""
        if self._pid:
            code = self._over()
            if code is None:
                return TEND_S
            self._left(code)
        return FOLLOW_S / 2 if self._copy(MOST_AT_ONCE) else FOLLOW_S

    def sent(self, caught: signal.struct_siginfo) -> bool:
        """Whether a signal is a Ctrl-C typed in the view, which has already reached the job."""
        return self._started != 0 and caught.si_pid == self._started and caught.si_signo == signal.SIGINT

    def finish(self, *, quiet: bool = False) -> None:
        """The job is over: end the view, restore the terminal and write the last output to it."""
        if self._pid:
            code = self._end()
            self._restore(clean=code == 0)
            self._shown = self._last_lines(tell=not quiet)
        self._copy()
        self._give_streams_back()

    def close(self) -> None:
        """Write the remaining output of agent and hub, and restore everything."""
        if self._pid:
            self._restore(clean=self._end() == 0)
        self._give_streams_back()
        if self._tty >= 0:
            if self._shown >= 0:
                self._copy()
            os.close(self._tty)
            os.close(self._log)
            self._tty = self._log = -1

    # ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_streams(self) -> None:
        """Replace the streams that are the terminal; what the user redirects is left alone."""
        sys.stdout.flush()
        sys.stderr.flush()
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for fd, instead in ((0, nothing), (1, self._log), (2, self._log)):
            if _is_terminal(fd):
                self._saved_fds[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
                os.dup2(instead, fd)
        os.close(nothing)

    def _give_streams_back(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, original in self._saved_fds.items():
            os.dup2(original, fd)
            os.close(original)
        self._saved_fds = {}

    # ── the view ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _over(self) -> int | None:
        """Exit code of the view, or None while it runs."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            return None
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _left(self, code: int) -> None:
        """The user left the view, or it died: from now on the terminal gets the output."""
        self._restore(clean=code == 0)
        how = "" if code == 0 else f"the view crashed ({f'signal {-code}' if code < 0 else f'exit code {code}'}); "
        self._tell(f"{how}the job continues, and its output follows (`stepscope watch` shows the run again)")
        self._shown = self._last_lines(tell=False)

    def _end(self) -> int:
        for number, seconds in ((signal.SIGTERM, END_S), (signal.SIGKILL, 60.0)):
            os.kill(self._pid, number)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                code = self._over()
                if code is not None:
                    return code
                time.sleep(0.02)
        return -signal.SIGKILL

    def _restore(self, *, clean: bool) -> None:
        """Restore the terminal to its state before the view."""
        with _allowed_to_write():
            try:
                if not clean:
                    self._write(RESET)
                termios.tcsetattr(self._tty, termios.TCSANOW, self._modes)
            except (OSError, termios.error):
                pass  # the terminal is gone

    # ── the output ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _last_lines(self, *, tell: bool) -> int:
        """Write the last lines to the terminal; return the offset of their end."""
        size = os.fstat(self._log).st_size
        begin = max(0, size - LAST_BYTES)
        data = os.pread(self._log, size - begin, begin)
        lines = data.splitlines(keepends=True)
        shown = b"".join(lines[-LAST_LINES:])
        if tell and len(shown) < size:
            self._tell(f"the end of the output; all of it is in {typed_path(self.log)}")
        self._write(shown)
        return size

    def _copy(self, most: int = 1 << 62) -> bool:
        """Copy new output; return whether there is more."""
        copied = 0
        while copied < most:
            data = os.pread(self._log, CHUNK, self._shown)
            if not data:
                return False
            self._write(data)
            self._shown += len(data)
            copied += len(data)
        return True

    def _tell(self, message: str) -> None:
        self._write(f"stepscope: {message}\n".encode())

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._tty, view) :]
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENXIO):
                raise
            # The terminal was closed; the job may continue without one, and the file has its output.


@contextmanager
def _allowed_to_write() -> Iterator[None]:
    """Block SIGTTOU, which stops background processes that change the terminal; we only restore its state."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
