"""Write ``report.html``: open a run as the hub does and put the answers to all requests into the page.

    size = write_copy(run_dir, run_dir / "report.html")

The event loop ends with the call.  The file is written completely or not at all.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun, RunUnwritable, StepscopeError
from stepscope.hub.app import answers_of
from stepscope.hub.report_copy import MOST_BYTES, Asker, copy_of
from stepscope.hub.runs import Runs
from stepscope.records.series import RunData
from stepscope.records.text import Progress, no_progress
from stepscope.store import file_io
from stepscope.store.paths import REPORT_FILE

__all__ = ["KnownRun", "add_copy", "make_copy", "write_copy"]

M_ARENA_MAX = -8
"""As in ``malloc.h``."""


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A finished run that was already read."""

    data: RunData
    summary: Mapping[str, Any]


@asynccontextmanager
async def open_asker(run_dir: Path, known: KnownRun | None = None) -> AsyncIterator[Asker]:
    """Open a run for requests.  NotARun if it cannot be opened."""
    run_dir = run_dir.resolve()
    runs = Runs.of_folder(run_dir) if known is None else Runs.of_past(run_dir, known.data, known.summary)
    try:
        run = await runs.open(run_dir.name)
        if run is None:
            raise NotARun(f"{run_dir} is not a run, or cannot be read")
        yield Asker(answers_of(runs), run)
    finally:
        await runs.close()


def write_copy(
    run_dir: Path, path: Path, *, known: KnownRun | None = None, redact: bool = False, progress: Progress = no_progress
) -> int:
    """Write a copy; return its size in bytes.

    ``known``: the run, if it was already read; ``redact``: see ``records/redaction.py``.  RunError if it cannot be
    written: not a run, page not built, disk full.
    """
    made = asyncio.run(_make(run_dir, MOST_BYTES, time.time_ns(), known, progress, redact=redact))
    try:
        file_io.write_bytes(path, made)
    except OSError as error:
        raise RunUnwritable(f"cannot write {path}: {error.strerror}") from error
    return len(made)


def add_copy(run_dir: Path, known: KnownRun, progress: Progress = no_progress) -> str:
    """Add ``report.html`` to a finished run; return why it could not be written, or an empty string.

    The other results of the run do not depend on it: any failure is only reported.
    """
    _give_back()
    made = asyncio.run(_outcome(_make(run_dir, MOST_BYTES, time.time_ns(), known, progress)))
    if not isinstance(made, bytes):
        return str(made) if isinstance(made, StepscopeError) else f"internal error: {made!r}"
    try:
        file_io.write_bytes(run_dir / REPORT_FILE, made)
    except OSError as error:
        return str(error.strerror)
    return ""


def make_copy(
    run_dir: Path, *, most_bytes: int = MOST_BYTES, wall_ns: int | None = None, progress: Progress = no_progress
) -> bytes:
    """Return the file as bytes; ``wall_ns``: the creation time that it states."""
    return asyncio.run(_make(run_dir, most_bytes, time.time_ns() if wall_ns is None else wall_ns, None, progress))


def _give_back() -> None:
    """Return memory freed after reading the run to the system: next to a job every megabyte counts, even at its end.

    Also prevent a separate heap for the thread that answers.
    """
    gc.collect()
    with suppress(AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_ARENA_MAX, 1)
        library.malloc_trim(0)


async def _outcome(making: Coroutine[Any, Any, bytes]) -> bytes | BaseException:
    return (await asyncio.gather(making, return_exceptions=True))[0]


async def _make(
    run_dir: Path, most_bytes: int, wall_ns: int, known: KnownRun | None, progress: Progress, *, redact: bool = False
) -> bytes:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # there is one request at a time
    told = progress if known is not None else _after_half(progress)
    async with open_asker(run_dir, known) as ask:
        return await copy_of(ask, most_bytes=most_bytes, wall_ns=wall_ns, redact=redact, progress=told)


def _after_half(progress: Progress) -> Progress:
    """Report the second half of the progress: opening a large run takes as much time as all the rest."""
    return lambda done, total: progress(total + done, 2 * total)
