"""The process that forwards output kept in files (``run --native-output``), as the launcher holds it.

It outlives a launcher that is killed, and one that is killed itself is started again where it was.  Should both be
gone the job goes on to write to its files, and notices nothing.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from stepscope.cli.helper import Helper, Mask
from stepscope.records.messages import say

__all__ = ["OutputForwarder", "output_targets"]

STARTS = 5
END_S = 30.0
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
            ["stepscope.agent.forward", str(run_dir)],
            starts=STARTS,
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
            if not self._helper.wait(time.monotonic() + END_S):
                say("whoever reads the job's output is slow: the rest of it comes later")
        if self._output >= 0:
            os.close(self._output)
