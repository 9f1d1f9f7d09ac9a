"""What happens when the job hangs, besides the report: nothing, an abort of the job, or a user's command.

Only the launcher ends the job: a line on our standard output asks it to. A command is started in a new session, one at
a time. It is not part of the run, and nothing waits for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.hangs.thresholds import AFTER_S
from stepscope.records.paths import ENV_HANG_AFTER, ENV_RUN_DIR

if TYPE_CHECKING:
    import subprocess

    from stepscope.agent.journal import Journal
    from stepscope.records.hang import HangRecord

__all__ = ["REPORT", "HangPolicy", "OnHang", "seconds_from"]

REPORT = "report"
ABORT = "abort"
LOG = "on-hang.log"
PREFIX = "STEPSCOPE_HANG_"


@dataclass(frozen=True, kw_only=True)
class HangPolicy:
    after_s: float = AFTER_S
    """Seconds without progress before an inquiry (or five steps, if that is longer); 0 disables it."""
    action: str = REPORT
    """``report``, ``abort`` or a shell command."""


def seconds_from(environ: Mapping[str, str]) -> float:
    """Return the ``after_s`` that the environment asks for; invalid values are ignored."""
    try:
        seconds = float(environ[ENV_HANG_AFTER])
    except (KeyError, ValueError):
        return HangPolicy.after_s
    return seconds if 0 <= seconds < float("inf") else HangPolicy.after_s


class OnHang:
    def __init__(self, action: str, run_dir: Path, journal: Journal, launcher: int = 1) -> None:
        """``launcher`` is the descriptor that the launcher reads."""
        self._action = action
        self._run_dir = run_dir
        self._journal = journal
        self._launcher = launcher
        self._running: subprocess.Popen[bytes] | None = None
        self.aborted = False
        """Whether the launcher was asked to end the job."""

    def act(self, record: HangRecord, file: Path) -> str:
        """Act and say what was done; empty if there was nothing to do. ``file`` is the record's file."""
        if self._action == REPORT:
            return ""
        return self._ask_for_end(record) if self._action == ABORT else self._start(record, file)

    def poll(self) -> None:
        """Check whether the command is over."""
        if self._running is not None and (code := self._running.poll()) is not None:
            self._running = None
            self._journal.event("on_hang_end", exit_code=code)

    def _ask_for_end(self, record: HangRecord) -> str:
        word = json.dumps({"abort": {"number": record.number, "kind": record.kind}}) + "\n"
        try:
            os.write(self._launcher, word.encode())
        except OSError:
            return "could not end the job: its launcher is gone"
        self.aborted = True
        return "asked the launcher to end the job"

    def _start(self, record: HangRecord, file: Path) -> str:
        import subprocess  # the launcher loads this module for the policy alone

        self.poll()
        if self._running is not None:
            return "did not start the command: it is still running from an earlier hang"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # set by us
        environment |= {
            ENV_RUN_DIR: str(self._run_dir),
            f"{PREFIX}FILE": str(file),
            f"{PREFIX}KIND": record.kind,
            f"{PREFIX}RANKS": ",".join(str(culprit.rank) for culprit in record.culprits),
        }
        try:
            with (self._run_dir / "logs" / LOG).open("ab") as log:
                self._running = subprocess.Popen(
                    ["/bin/sh", "-c", self._action],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            return f"could not start the command: {error.strerror}"
        return f"started the command (process {self._running.pid})"
