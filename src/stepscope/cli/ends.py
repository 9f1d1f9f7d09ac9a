"""How a job ended, and what its exit code and the signals that came mean."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from stepscope.store.meta import RunStatus

__all__ = ["JobEnd", "aborted_end", "job_end", "worst_end"]

_GRAVITY: tuple[RunStatus, ...] = ("finished", "interrupted", "failed", "crashed")


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    exit_code: int
    """What ``stepscope run`` exits with: the job's own, 128 + signal for a job killed by one."""
    status: RunStatus

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def job_end(code: int, interrupted: int | None) -> JobEnd:
    """What the exit code of the job means, given the signal that somebody sent to end it."""
    if code == 0:
        return JobEnd(exit_code=0, status="finished")
    if interrupted is None and -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        interrupted = -code
    if interrupted is not None:
        # Whatever the job itself makes of an interrupt (torchrun ends with 1) is what a bare run would end with.
        return JobEnd(exit_code=code if code > 0 else 128 + interrupted, status="interrupted")
    if code < 0:
        return JobEnd(exit_code=128 - code, status="crashed")
    return JobEnd(exit_code=code, status="failed")


def aborted_end(code: int) -> JobEnd:
    """Of a job that we ended: it failed, whatever it makes of it itself."""
    return JobEnd(exit_code=code if 0 < code <= 128 else 1, status="failed")


def worst_end(ends: Iterable[JobEnd]) -> JobEnd:
    """Of several processes that are one job; of those that ended alike, the first."""
    return max(ends, key=lambda end: _GRAVITY.index(end.status))
