"""The job around the ranks: messages from its launcher, processes that may start more ranks, and the running code."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from stepscope.records.run_clock import process_start_ticks
from stepscope.store.liveness import process_alive

__all__ = ["Control", "GitContext", "Parents"]


# -- Launcher messages ------------------------------------------------------------------------------------------------
# The launcher writes to the agent's standard input, one JSON object per line. The end of the input means that it died.

_CHUNK = 1 << 12
_LONGEST_LINE = 1 << 16


class Control:
    """The reading end of the pipe. Call ``feed`` when it is readable, then check ``end`` and ``closed``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.end: dict[str, Any] | None = None
        """How the job ended, once the launcher has reported it."""
        self.closed = False
        """The other end is closed."""
        self._partial = b""

    def feed(self) -> None:
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # there is no standard input, and so no launcher
        self.closed = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-_LONGEST_LINE:]
        for line in lines:
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            word = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(word, dict) and isinstance(word.get("end"), dict):
            self.end = word["end"]


# -- Parent processes -------------------------------------------------------------------------------------------------
# Whether the process that started the ranks may start more of them.
#
# Without a launcher that announces the end of the job, the end of all ranks could be the pause between two attempts of
# an elastic job. A live parent that was started as part of the run (torchrun, a shell script) means just that; an older
# one is the user's shell and means nothing. Under ``stepscope.init()`` the ranks themselves name the process.


class Parents:
    def __init__(self, meta: dict[str, Any], owner: int | None = None) -> None:
        launcher = meta.get("launcher")
        ticks = launcher.get("start_ticks") if isinstance(launcher, dict) else None
        self._since = ticks if isinstance(ticks, int) and ticks > 0 else None
        self._launcher = launcher.get("pid") if isinstance(launcher, dict) else None
        self._watched: dict[int, int] = {}
        """Start time by pid."""
        if owner is not None:
            self._watched[owner] = process_start_ticks(owner)

    def watch(self, pid: int) -> None:
        """Remember the parent of a rank."""
        parent = _parent_pid(pid)
        ticks = process_start_ticks(parent) if parent else 0
        if self._since is not None and ticks >= self._since and parent != self._launcher:
            self._watched[parent] = ticks

    def alive(self) -> bool:
        self._watched = {pid: ticks for pid, ticks in self._watched.items() if process_alive(pid, ticks)}
        return bool(self._watched)


def _parent_pid(pid: int) -> int:
    """Return the parent's pid; 0 if the process is gone or the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[1])


# -- Git context ------------------------------------------------------------------------------------------------------
# Git's commit, branch and changes, collected without waiting.
#
# The commands all start immediately and are checked on later ticks. Their output goes to files, because a pipe would
# not be emptied in between.

GIT_COMMANDS = {
    "commit": ("rev-parse", "HEAD"),
    "branch": ("rev-parse", "--abbrev-ref", "HEAD"),
    "status": ("status", "--porcelain", "--untracked-files=no"),
    "diff_stat": ("diff", "--no-ext-diff", "--stat", "HEAD"),
}
GIT_TIMEOUT_S = 10.0
GIT_OUTPUT_BYTES = 4096
"""Limit per output. A longer diff stat would not help a reader."""


class GitContext:
    def __init__(self, folder: Path) -> None:
        self._deadline_s = time.monotonic() + GIT_TIMEOUT_S
        self._running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        for name, words in GIT_COMMANDS.items():
            try:
                self._running[name] = _start_git(words, folder)
            except OSError:
                continue  # no git, no such folder, or no room for a temporary file
        self._answers: dict[str, str] = {}

    def poll(self) -> dict[str, Any] | None:
        """Return the answer once, when every command is over; None before, afterwards, and outside a repository."""
        if not self._running:
            return None
        late = time.monotonic() > self._deadline_s
        for name, (process, output) in list(self._running.items()):
            if process.poll() is None and late:
                process.kill()
                process.wait()
            if process.returncode is None:
                continue
            if process.returncode == 0:
                output.seek(0)
                self._answers[name] = output.read(GIT_OUTPUT_BYTES).decode(errors="replace").strip()
            output.close()
            del self._running[name]
        if self._running or "commit" not in self._answers:
            return None
        return {
            "commit": self._answers["commit"],
            "branch": self._answers.get("branch"),
            "dirty": bool(self._answers["status"]) if "status" in self._answers else None,
            "diff_stat": self._answers.get("diff_stat"),
        }

    def close(self) -> None:
        """Kill commands that still run."""
        self._deadline_s = 0.0
        self.poll()


def _start_git(words: Sequence[str], folder: Path) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    output = tempfile.TemporaryFile()  # noqa: SIM115  # closed when its command is over
    try:
        process = subprocess.Popen(
            ["git", *words],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        output.close()
        raise
    return process, output
