"""Writes events, samples and stacks to disk. Rejected writes are kept here, within bounds, and retried."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepscope.records import run_clock
from stepscope.records.text import say
from stepscope.store.file_io import append_jsonl
from stepscope.store.paths import EVENTS, SAMPLES, STACKS

__all__ = ["Journal"]

MAX_EVENTS = 2000
MAX_SAMPLES = 2000
MAX_STACKS = 200
"""Beyond these the oldest are dropped. They cover minutes of a full disk."""


class Journal:
    """The only place that knows whether the run directory accepts writes. It reports a failure once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._stacks: deque[dict[str, Any]] = deque(maxlen=MAX_STACKS)
        self.samples_wanted = True
        """False if there is no room for more (``agent/disk_space.py``)."""
        self._refused = False
        self._recovered = False

    def event(self, event: str, **fields: Any) -> None:
        self._events.append({"schema": 1, "wall_ns": run_clock.wall_ns(), "event": event, **fields})

    def samples(self, records: Iterable[dict[str, Any]]) -> None:
        if self.samples_wanted:
            self._samples.extend(records)

    def stack(self, record: dict[str, Any]) -> None:
        self._stacks.append(record)

    def flush(self) -> bool:
        """Write all pending records; return False if a write fails."""
        for name, waiting in ((EVENTS, self._events), (SAMPLES, self._samples), (STACKS, self._stacks)):
            if not waiting:
                continue
            try:
                append_jsonl(self._run_dir / name, waiting)
            except OSError as error:
                self.refused(error)
                return False
            waiting.clear()
        return True

    def refused(self, error: OSError) -> None:
        """Note a failed write. The records stay pending."""
        if self._refused:
            return
        self._refused = True
        message = f"cannot write to {self._run_dir}: {error.strerror}"
        self.event("warning", message=message)
        say(f"{message}; steps stay in their rings until it is writable again")

    def accepted(self) -> None:
        """Note that steps were written."""
        if self._refused and not self._recovered:
            self._recovered = True
            self.event("warning", message=f"{self._run_dir} is writable again")
