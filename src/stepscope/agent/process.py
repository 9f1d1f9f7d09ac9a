"""The agent as a process: tend a run to its end, then leave a summary if nobody else will."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stepscope.agent.loop import Agent
from stepscope.agent.on_hang import HangPolicy

__all__ = ["tend"]


def tend(
    run_dir: Path,
    session: Path,
    *,
    owner: int | None = None,
    interval_s: float = 0.2,
    on_hang: HangPolicy | None = None,
) -> int:
    """Until the run is over; the exit code.  NotARun when ``run_dir`` is none.

    ``owner`` is a process that may still start ranks, where no launcher of ours says when the job is over.
    """
    if Agent(run_dir, session, owner=owner, interval_s=interval_s, on_hang=on_hang).run() == "orphaned":
        # In place of this process: what a summary needs is loaded only now, and the agent's own memory is given back.
        os.execv(sys.executable, [sys.executable, "-m", "stepscope", "report", "--quiet", str(run_dir)])
    return 0
