"""Keep a run within the disk space that it may take.  Steps are always written, and nothing here stops the job.

always               of each log the beginning and the end stay (``store/log_limits.py``), samples thin out with age
from 80 % on         a warning, once; logs share an eighth of the limit; all samples but the last minutes become one
                     in ten minutes, and one an hour after that
at the limit         no more samples are recorded, until there is room again; steps, events, errors and stacks are
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from stepscope.agent.journal import Journal
from stepscope.agent.sample_keeper import SampleKeeper
from stepscope.records.messages import say
from stepscope.records.units import bytes_text
from stepscope.store.disk_use import NEARLY, run_bytes
from stepscope.store.log_limits import ALL_BYTES, bound_logs

__all__ = ["DiskKeeper"]

LOOK_S = 20.0
_ROOM_AGAIN = 0.95
"""Of the limit: below it samples are recorded again."""
_LOG_SHARE = 8


class DiskKeeper:
    """Used by the agent's loop alone."""

    def __init__(
        self,
        run_dir: Path,
        limit: int,
        *,
        journal: Journal,
        samples: SampleKeeper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limit``: in bytes; 0: there is none."""
        self._run_dir = run_dir
        self._limit = limit
        self._journal = journal
        self._samples = samples
        self._clock = clock
        self._looked_s = clock()
        self._logs_whole = False
        self._nearly = False
        self._told_full = False

    def look(self) -> None:
        """Now and then.  OSError when the disk refuses: it is tried again later."""
        self._samples.look()
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        self._bound_logs()
        if self._limit:
            self._compare(run_bytes(self._run_dir))

    def _bound_logs(self) -> None:
        if self._logs_whole:
            return
        most = max(self._limit // _LOG_SHARE, 1) if self._nearly else ALL_BYTES
        if not bound_logs(self._run_dir, all_bytes=min(most, ALL_BYTES)):
            self._logs_whole = True
            message = "this file system cannot drop the middle of a long log: logs are kept whole"
            self._journal.event("warning", message=message)

    def _compare(self, used: int) -> None:
        if used >= NEARLY * self._limit and not self._nearly:
            self._nearly = True
            self._samples.save_space()
            self._warn(
                f"the run takes {bytes_text(used)} of the {bytes_text(self._limit)} that --max-disk allows: from now "
                "on logs are kept shorter, and samples of the past one in ten minutes; steps are all kept"
            )
        if used >= self._limit:
            self._journal.samples_wanted = False
            if not self._told_full:
                self._told_full = True
                self._warn(
                    f"the run takes the {bytes_text(self._limit)} that --max-disk allows: no more samples are "
                    "recorded; steps still are, and the job goes on"
                )
        elif used < _ROOM_AGAIN * self._limit:
            self._journal.samples_wanted = True

    def _warn(self, message: str) -> None:
        self._journal.event("warning", message=message)
        say(message)
