"""Notice requests: the word of the ring that other processes count up (``ring/requests.py``)."""

from __future__ import annotations

import time
from collections.abc import Callable

from stepscope.ring.layout import REQUESTS_WORD

__all__ = ["RequestWord"]

SOONEST_S, LATEST_S = 0.5, 2.0
"""Between two readings of the word."""


class RequestWord:
    """Read after some steps only: how many, follows from how long steps take."""

    def __init__(self, header: memoryview, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self.due_at = 0
        """Read it again after this step."""
        self._header = header
        self._now_s = now_s
        self._every = 1
        self._read_s = now_s()
        self._count = 0

    def hurry(self) -> bool:
        """Steps take longer than those from which it follows when to read it again: do so now, if it is time."""
        late = self._now_s() - self._read_s > LATEST_S
        if late:
            self.due_at, self._every = 0, 1
        return late

    def changed(self, step: int) -> bool:
        """Whether something was requested since the last call; this step has just ended."""
        now_s = self._now_s()
        since_s, self._read_s = now_s - self._read_s, now_s
        if since_s < SOONEST_S:
            self._every *= 2
        elif since_s > LATEST_S and self._every > 1:
            self._every = max(1, int(self._every * SOONEST_S / since_s))
        self.due_at = step + self._every
        before, self._count = self._count, self._header[REQUESTS_WORD]
        return self._count != before
