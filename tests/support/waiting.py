"""Wait for what another thread or process does; the limit is for a test that would wait forever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(done: Callable[[], T], *, timeout_s: float = 90.0, why: Callable[[], object] = lambda: "waited in vain") -> T:
    """Return the first result that is true; ``why`` says what to print if none is in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := done()):
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.02)
    return found
