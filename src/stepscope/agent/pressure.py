"""What the kernel says about tasks that wait: ``/proc/pressure`` and the number that want a processor right now.

Reading them takes some microseconds each.  What a kernel does not tell (no pressure accounting, no such files) is left
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["Pressure"]

RESOURCES = ("cpu", "io", "memory")


class Pressure:
    """Keeps the totals of the sample before."""

    def __init__(self, proc: Path = Path("/proc"), now: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._now = now
        self._totals: dict[str, tuple[float, int]] = {}
        self.sample()

    def sample(self) -> dict[str, float | int]:
        """Shares 0 to 1 of the time since the sample before, and how many tasks run or could."""
        values: dict[str, float | int] = {}
        for resource in RESOURCES:
            total_us, now = self._waited_us(resource), self._now()
            if total_us is None:
                self._totals.pop(resource, None)
                continue
            earlier_s, earlier_us = self._totals.get(resource, (now, total_us))
            self._totals[resource] = (now, total_us)
            if now > earlier_s:
                share = (total_us - earlier_us) / 1e6 / (now - earlier_s)
                values[f"{resource}_pressure"] = round(min(max(share, 0.0), 1.0), 4)
        running = self._running()
        return values if running is None else {**values, "procs_running": running}

    def _waited_us(self, resource: str) -> int | None:
        """Microseconds since boot in which some task waited."""
        try:
            text = (self._proc / "pressure" / resource).read_text()
        except OSError:
            return None
        line = next((line for line in text.splitlines() if line.startswith("some ")), "")
        _, _, total = line.partition(" total=")
        return int(total) if total.isdecimal() else None

    def _running(self) -> int | None:
        try:
            text = (self._proc / "stat").read_text()
        except OSError:
            return None
        _, _, rest = text.partition("\nprocs_running ")
        count = rest.partition("\n")[0]
        return int(count) if count.isdecimal() else None
