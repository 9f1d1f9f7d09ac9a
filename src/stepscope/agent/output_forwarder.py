"""``python -m stepscope.agent.output_forwarder RUN_DIR``: forward output from files to its original streams.

With ``stepscope run --native-output`` the ranks print into files of the run (``recorder/output.py``). This process
holds the launcher's original streams and copies new output to them, in order for each rank. It ends when the launcher
says that the job is over or, if the launcher dies, with the last process that prints into one of the files.

    outputs/PID.1     goes to descriptor 3, the launcher's standard output
    outputs/PID.2     goes to descriptor 2
    outputs/PID.12    both streams were the same: goes to descriptor 2
    outputs/.PID.1    how much was copied, for a successor if we die
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from stepscope.records.files import file_mode
from stepscope.records.paths import outputs_folder

__all__ = ["Forwarder", "main"]

CHUNK = 1 << 16
POLL_S = 0.02
TARGETS = {".1": 3, ".2": 2, ".12": 2}


class Forwarder:
    def __init__(self, folder: Path, targets: dict[str, int] | None = None) -> None:
        self._folder = folder
        self._targets = dict(targets or TARGETS)
        self._open: dict[str, tuple[int, int]] = {}
        """By name: the file, and the file that stores its position."""
        self._at: dict[str, int] = {}

    def forward(self) -> bool:
        """Copy a piece of each file that has new output; return whether any had."""
        try:
            names = sorted(entry.name for entry in os.scandir(self._folder) if not entry.name.startswith("."))
        except OSError:
            names = list(self._open)
        for name in names:
            if name not in self._open and Path(name).suffix in self._targets:
                self._begin(name)
        new = [self._copy(name) for name in self._open]
        return any(new)

    def alive(self) -> bool:
        """Return whether a process that prints into one of the files is alive."""
        return any(Path("/proc", name.partition(".")[0]).exists() for name in self._open)

    def _begin(self, name: str) -> None:
        try:
            file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            at = os.open(self._folder / f".{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, file_mode(self._folder))
        except FileNotFoundError:
            return  # the run is over and its output was already taken
        self._open[name] = file, at
        self._at[name] = int.from_bytes(os.pread(at, 8, 0), "little")

    def _copy(self, name: str) -> bool:
        file, at = self._open[name]
        data = os.pread(file, CHUNK, self._at[name])
        if not data:
            return False
        self._write(Path(name).suffix, data)
        self._at[name] += len(data)
        os.pwrite(at, self._at[name].to_bytes(8, "little"), 0)
        return True

    def _write(self, kind: str, data: bytes) -> None:
        fd = self._targets[kind]
        view = memoryview(data)
        while view and fd >= 0:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                select.select([], [fd], [])
            except OSError:
                self._targets[kind] = fd = -1  # the stream is closed; the files have the output


def main(run_dir: Path) -> int:
    # Ctrl-C is meant for the job, whose last output is still to come; SIGTERM is meant for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    forwarder = Forwarder(outputs_folder(run_dir))
    heard, closed = b"", False
    while True:
        if not closed and select.select([0], [], [], POLL_S)[0]:
            word = os.read(0, CHUNK)
            heard, closed = heard + word, not word
        elif closed:
            select.select([], [], [], POLL_S)
        over = closed and (b"end" in heard or not forwarder.alive())
        while forwarder.forward():
            pass
        if over:
            return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
