"""A bar on the terminal while something long is under way: one way of telling it, for all commands.

    with progress_bar("reading dumps") as told:
        read_paths(paths, progress=told)        # which calls it with what is done, and all there is

It is one line on standard error, written over and gone at the end, however that comes.  What is soon done shows none,
and where nobody looks there never is one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepscope.records.progress import Progress
from stepscope.records.units import duration_text

__all__ = ["progress_bar"]

BAR = 24
PATIENCE_S = 0.5
"""What takes no longer needs no bar."""
REDRAW_S = 0.1
WORTH_TELLING_S = 5.0
"""How long it will still take, if it is more."""
_CLEAR = "\r\x1b[K"


@contextmanager
def progress_bar(
    doing: str,
    amount: Callable[[int], str] | None = str,
    *,
    quiet: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """``amount`` words a number; None: they say nothing to anybody, and a percentage is shown."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bar = _Bar(doing, amount, clock)
    try:
        yield bar.tell
    finally:
        bar.clear()


class _Bar:
    def __init__(self, doing: str, amount: Callable[[int], str] | None, clock: Callable[[], float]) -> None:
        self._doing = doing
        self._amount = amount
        self._clock = clock
        self._began_s = clock()
        self._drawn_s = self._began_s + PATIENCE_S - REDRAW_S
        self._shown = False

    def tell(self, done: int, total: int) -> None:
        now_s = self._clock()
        if now_s - self._drawn_s < REDRAW_S:
            return
        self._drawn_s, self._shown = now_s, True
        done = min(done, total)
        filled = done * BAR // max(total, 1)
        line = f"{self._doing} {'█' * filled}{'░' * (BAR - filled)} {self._figures(done, total)}"
        left_s = (now_s - self._began_s) * (total - done) / done if done else 0.0
        if left_s > WORTH_TELLING_S:
            line += f", {duration_text(round(left_s))} left"
        print(f"{_CLEAR}{line}", end="", file=sys.stderr, flush=True)

    def _figures(self, done: int, total: int) -> str:
        if self._amount is None:
            return f"{done * 100 // max(total, 1)}%"
        return f"{self._amount(done)}/{self._amount(total)}"

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            print(_CLEAR, end="", file=sys.stderr, flush=True)
