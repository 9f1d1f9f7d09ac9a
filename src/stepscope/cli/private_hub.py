"""A hub for one who looks: a run that has none is served to this process alone, for as long as it lives.

It is ``stepscope serve`` on loopback with a token that nobody else knows.  It ends when its standard input does, so
also when we are killed.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from stepscope.errors import HubError
from stepscope.records.places import helper_command, helper_environment
from stepscope.terminal.place import Place

__all__ = ["PrivateHub"]

START_S = 60.0
END_S = 5.0


class PrivateHub:
    """``place`` starts it, if it is not there.  ``close`` may come from another thread, and ends a start."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = tempfile.TemporaryDirectory(prefix="stepscope-watch-")
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._closed = False
        self._lock = threading.Lock()

    def place(self) -> Place:
        """HubError when it cannot be started."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            token = (Path(self._folder.name) / "token").read_text().strip()
        except OSError as error:
            raise HubError(f"cannot serve {self._run_dir}: {error.strerror}") from None
        return Place(url=self._url, token=token, run=self._run_dir.resolve().name)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._process is not None:
                _end(self._process)
        self._folder.cleanup()

    def _start(self) -> None:
        place = Path(self._folder.name)
        words = ["serve", str(self._run_dir), "--port", "0", "--token-file", str(place / "token"), "--until-eof"]
        words += ["--audit-log", str(place / "audit.jsonl")]  # nobody but this process reads there
        with self._lock:
            if self._closed:
                raise HubError("nobody looks any more")
            with (place / "stderr").open("wb") as errors:
                self._process = process = subprocess.Popen(
                    helper_command("stepscope", *words),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=helper_environment(os.environ),
                    start_new_session=True,  # Ctrl-C is for us
                )
        self._url = self._first_line(process)
        if not self._url.startswith("http://"):
            with self._lock:
                _end(process)
            raise HubError(f"cannot serve {self._run_dir}: {_last_line(place / 'stderr')}")

    def _first_line(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        until_s = time.monotonic() + START_S
        line = b""
        with process.stdout as stream:
            while not line.endswith(b"\n") and time.monotonic() < until_s and not self._closed:
                if select.select([stream], [], [], 0.1)[0]:
                    piece = os.read(stream.fileno(), 4096)
                    if not piece:
                        break
                    line += piece
        return line.decode("ascii", "replace").strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(path: Path) -> str:
    try:
        said = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        said = []
    return said[-1].removeprefix("stepscope: ") if said else "it says nothing"
