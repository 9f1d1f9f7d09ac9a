"""The history of critical findings of a live run: when each became critical and when it no longer was.

The run's own hub writes it into the events of the run, where the final summary finds it
(``diagnosis/withdrawn_findings.py``). A hub that only reads runs of others writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from stepscope.diagnosis.hysteresis import AT_ONCE
from stepscope.records.finding import Finding

__all__ = ["FindingHistory"]

MOST_EVENTS = 500
"""A finding that comes and goes in every window must not fill the disk."""

Key = tuple[str, tuple[int, ...], str | None]


class Journal(Protocol):
    """The part of the hub's journal that takes events."""

    def event(self, event: str, **fields: Any) -> None: ...
    def flush(self) -> None: ...


class FindingHistory:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._critical: dict[Key, Finding] = {}
        self._written = 0

    def note(self, shown: Sequence[Finding], *, step: int, attempt: int) -> None:
        """Compare what is shown now with what was critical before.  Hangs and crashes have records of their own."""
        now = {(each.kind, each.ranks, each.phase): each for each in shown if each.kind not in AT_ONCE}
        critical = {key: each for key, each in now.items() if each.severity == "critical"}
        opened = [each for key, each in critical.items() if key not in self._critical]
        changed = [now[key] for key in self._critical if key in now and key not in critical]
        resolved = [each for key, each in self._critical.items() if key not in now]
        self._critical = critical
        self._written += len(opened) + len(changed) + len(resolved)
        if self._written > MOST_EVENTS:
            return
        for finding in opened:
            self._journal.event("finding_opened", **_fields(finding, step, attempt))
        for finding in changed:
            self._journal.event("finding_changed", **_fields(finding, step, attempt))
        for finding in resolved:
            self._journal.event("finding_resolved", **_fields(finding, step, attempt))
        self._journal.flush()


def _fields(finding: Finding, step: int, attempt: int) -> dict[str, Any]:
    return {
        "step": step,
        "attempt": attempt,
        "kind": finding.kind,
        "severity": finding.severity,
        "ranks": list(finding.ranks),
        "phase": finding.phase,
        "title": finding.title,
    }
