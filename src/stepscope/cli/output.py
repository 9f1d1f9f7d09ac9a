"""What commands print and write besides their results: tables, progress bars, output files."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from stepscope.errors import UsageError
from stepscope.records.files import replaced
from stepscope.records.text import Progress, duration_text, printable

__all__ = ["format_table", "progress_bar", "protect_inputs", "write_page"]


# -- tables -----------------------------------------------------------------------------------------------------------

COLUMN_GAP = "  "


def format_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Collection[int] = (),
    width: int | None = None,
    left_out: Sequence[int] = (),
    least: int = 0,
) -> str:
    """Format heads, a rule and rows; ``numeric`` columns are right-aligned. Unprintable characters are escaped.

    With a ``width`` the columns in ``left_out`` are left out one by one until the last column has ``least`` columns of
    the terminal. Then the last column is cut, and if that is not enough the first one, but not below their heads.
    """
    columns = {
        place: [printable(cell) for cell in column] for place, column in enumerate(zip(heads, *rows, strict=True))
    }
    widths = {place: max(map(_width, column)) for place, column in columns.items()}
    first, last = 0, len(heads) - 1

    def excess(width: int, widths: Mapping[int, int]) -> int:
        return sum(widths.values()) + len(COLUMN_GAP) * (len(widths) - 1) - width

    if width is not None:
        for place in left_out:
            if excess(width, {**widths, last: min(widths[last], least)}) > 0:
                del columns[place], widths[place]
        for place in (last, first):
            room = widths[place] - excess(width, widths)
            widths[place] = min(widths[place], max(room, _width(heads[place])))
            columns[place] = [_cut_to_width(cell, widths[place]) for cell in columns[place]]
    padded = [
        [_padded(cell, widths[place], right=place in numeric) for cell in (head, "─" * widths[place], *cells)]
        for place, (head, *cells) in columns.items()
    ]
    return "\n".join(COLUMN_GAP.join(line).rstrip() for line in zip(*padded, strict=True))


def _width(text: str) -> int:
    """Columns on a terminal: East Asian wide characters take two, combining characters none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(bool(unicodedata.combining(c)) for c in text)


def _cut_to_width(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    while _width(text) > width - 1:
        text = text[:-1]
    return f"{text}…"


def _padded(text: str, width: int, *, right: bool) -> str:
    padding = " " * (width - _width(text))
    return padding + text if right else text + padding


# -- progress bars ----------------------------------------------------------------------------------------------------
# One line on standard error during a long operation, overwritten and removed at the end, also after an error. A short
# operation shows no bar, and neither does one without a terminal.
#
#     with progress_bar("reading dumps") as told:
#         read_paths(paths, progress=told)        # calls told(done, total)

BAR_CELLS = 24
PATIENCE_S = 0.5
"""A shorter operation shows no bar."""
REDRAW_S = 0.1
WORTH_TELLING_S = 5.0
"""The remaining time is shown if it is longer than this."""
_CLEAR = "\r\x1b[K"


@contextmanager
def progress_bar(
    doing: str,
    amount: Callable[[int], str] | None = str,
    *,
    quiet: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Show a bar. ``amount`` formats a number; None: show a percentage, because the numbers mean nothing to a user."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bar = _ProgressBar(doing, amount, clock)
    try:
        yield bar.tell
    finally:
        bar.clear()


class _ProgressBar:
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
        filled = done * BAR_CELLS // max(total, 1)
        line = f"{self._doing} {'█' * filled}{'░' * (BAR_CELLS - filled)} {self._figures(done, total)}"
        left_s = (now_s - self._began_s) * (total - done) / done if done else 0.0
        if left_s > WORTH_TELLING_S:
            line += f", {duration_text(left_s, whole=True)} left"
        print(f"{_CLEAR}{line}", end="", file=sys.stderr, flush=True)

    def _figures(self, done: int, total: int) -> str:
        if self._amount is None:
            return f"{done * 100 // max(total, 1)}%"
        return f"{self._amount(done)}/{self._amount(total)}"

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            print(_CLEAR, end="", file=sys.stderr, flush=True)


# -- output files -----------------------------------------------------------------------------------------------------
# A command never overwrites its inputs, and writes a file completely or not at all.


def protect_inputs(outputs: Iterable[Path | None], inputs: Iterable[Path]) -> None:
    """Raise UsageError if an output is one of the inputs, under any name or link."""
    wanted = [path for path in outputs if path is not None]
    if not wanted:
        return
    taken = {_file_identity(path): path for path in inputs}
    for path in wanted:
        if _file_identity(path) in taken:
            raise UsageError(f"{path} is an input file and would be overwritten; write to another file")


def write_page(path: Path, text: str) -> None:
    try:
        with replaced(path) as spare:
            spare.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _file_identity(path: Path) -> object:
    """The same value for every name of a file, including hard links."""
    try:
        status = path.stat()
    except OSError:
        return path.absolute()
    return (status.st_dev, status.st_ino)
