"""Events, samples and stacks on their way to disk.  What it refuses waits here, within bounds, and is tried again."""

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
"""Beyond these the oldest go: minutes of a full disk."""


class Journal:
    """Also the one place that knows whether the run directory takes our writes, and that says so, once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._stacks: deque[dict[str, Any]] = deque(maxlen=MAX_STACKS)
        self.samples_wanted = True
        """False: there is no room for more (``agent/disk_space.py``)."""
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
        """Write everything that waits; False when the disk refuses."""
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
        """A write failed; the records stay where they are."""
        if self._refused:
            return
        self._refused = True
        message = f"cannot write to {self._run_dir}: {error.strerror}"
        self.event("warning", message=message)
        say(f"{message}; steps stay in their rings until it can be written")

    def accepted(self) -> None:
        """Steps were written."""
        if self._refused and not self._recovered:
            self._recovered = True
            self.event("warning", message=f"{self._run_dir} can be written again")
