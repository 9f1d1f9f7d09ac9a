"""What commands print and write besides their results: tables, progress bars, output files."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepscope import __version__
from stepscope.errors import UsageError
from stepscope.page.assets import explain_unbuilt, is_built, pack, report_file
from stepscope.records.files import replaced
from stepscope.records.text import Progress, duration_text, printable

__all__ = [
    "format_table",
    "page_name",
    "progress_bar",
    "protect_inputs",
    "require_page",
    "write_page",
    "write_text",
]


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
    from rich.cells import cell_len

    columns = {
        place: [printable(cell) for cell in column] for place, column in enumerate(zip(heads, *rows, strict=True))
    }
    widths = {place: max(map(cell_len, column)) for place, column in columns.items()}
    first, last = 0, len(heads) - 1

    def excess(width: int, widths: Mapping[int, int]) -> int:
        return sum(widths.values()) + len(COLUMN_GAP) * (len(widths) - 1) - width

    if width is not None:
        for place in left_out:
            if excess(width, {**widths, last: min(widths[last], least)}) > 0:
                del columns[place], widths[place]
        for place in (last, first):
            room = widths[place] - excess(width, widths)
            widths[place] = min(widths[place], max(room, cell_len(heads[place])))
    padded = [
        [_fit(cell, widths[place], right=place in numeric) for cell in (head, "─" * widths[place], *cells)]
        for place, (head, *cells) in columns.items()
    ]
    return "\n".join(COLUMN_GAP.join(line).rstrip() for line in zip(*padded, strict=True))


def _fit(text: str, width: int, *, right: bool) -> str:
    """Cut or pad to that many columns of a terminal: wide characters take two, combining characters none."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) > width:
        text = set_cell_size(text, width - 1).rstrip() + "…"
    padding = " " * (width - cell_len(text))
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
SHOWN_FROM_S = 5.0
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
        if left_s > SHOWN_FROM_S:
            line += f", {duration_text(left_s, whole=True)} left"
        # One line only: _CLEAR would leave the rest of a wrapped one.
        line = line[: shutil.get_terminal_size().columns - 1]
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


def require_page(path: Path | None) -> None:
    """Raise UsageError if a page is to be written and was not built; before the work whose result it would show."""
    if path is not None and not is_built():
        raise UsageError(f"cannot write {path}: {explain_unbuilt()}")


def write_page(path: Path, document: Mapping[str, Any]) -> None:
    """Write the page with a document of ``reports/page/documents.py`` inside."""
    text = json.dumps(
        {"stepscope": __version__, "made_wall_ns": time.time_ns(), "report": document},
        separators=(",", ":"),
        allow_nan=False,
    )
    made = report_file(title=document["name"], data=pack(text.encode()))
    if made is None:
        raise UsageError(f"cannot write {path}: {explain_unbuilt()}")
    _write(path, made)


def write_text(path: Path, text: str) -> None:
    _write(path, text.encode())


def _write(path: Path, content: bytes) -> None:
    try:
        with replaced(path) as spare:
            spare.write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def page_name(paths: Sequence[Path]) -> str:
    """The name of a page about some files: that of the first path."""
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (paths[0].name or paths[0].resolve().name) + more


def _file_identity(path: Path) -> object:
    """The same value for every name of a file, including hard links."""
    try:
        status = path.stat()
    except OSError:
        return path.absolute()
    return (status.st_dev, status.st_ino)
