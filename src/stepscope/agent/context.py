"""Which code is running: git's commit, branch and changes, asked for without waiting.

The commands are started at once and looked at on later ticks; their output goes to files, since nobody empties a pipe
in between.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["GitContext"]

COMMANDS = {
    "commit": ("rev-parse", "HEAD"),
    "branch": ("rev-parse", "--abbrev-ref", "HEAD"),
    "status": ("status", "--porcelain", "--untracked-files=no"),
    "diff_stat": ("diff", "--no-ext-diff", "--stat", "HEAD"),
}
TIMEOUT_S = 10.0
MAX_BYTES = 4096
"""Of each output; a diff stat longer than this says nothing more to anyone."""


class GitContext:
    def __init__(self, folder: Path) -> None:
        self._deadline_s = time.monotonic() + TIMEOUT_S
        self._asked: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        for name, words in COMMANDS.items():
            try:
                self._asked[name] = _start(words, folder)
            except OSError:
                continue  # no git, no such folder, no room for a temporary file
        self._answers: dict[str, str] = {}

    def poll(self) -> dict[str, Any] | None:
        """The answer, once, as soon as every command is over; None before, after, and outside a repository."""
        if not self._asked:
            return None
        late = time.monotonic() > self._deadline_s
        for name, (process, output) in list(self._asked.items()):
            if process.poll() is None and late:
                process.kill()
                process.wait()
            if process.returncode is None:
                continue
            if process.returncode == 0:
                output.seek(0)
                self._answers[name] = output.read(MAX_BYTES).decode(errors="replace").strip()
            output.close()
            del self._asked[name]
        if self._asked or "commit" not in self._answers:
            return None
        return {
            "commit": self._answers["commit"],
            "branch": self._answers.get("branch"),
            "dirty": bool(self._answers["status"]) if "status" in self._answers else None,
            "diff_stat": self._answers.get("diff_stat"),
        }

    def close(self) -> None:
        """End what still runs."""
        self._deadline_s = 0.0
        self.poll()


def _start(words: Sequence[str], folder: Path) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
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
