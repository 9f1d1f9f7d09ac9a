"""From a run directory to ``report.html``.

    size = write_copy(run_dir, run_dir / "report.html")

The run is opened as the hub opens it, and the hub's own answers are put inside (``contents.py``).  Its event loop ends
with it; nothing is left behind but the file, which is there as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepscope import __version__
from stepscope.errors import RunError, RunUnwritable, StepscopeError
from stepscope.hub.copy.asking import Asker, Known, opened
from stepscope.hub.copy.contents import gather
from stepscope.hub.copy.packing import Blobs, wrap
from stepscope.hub.copy.plan import MOST_BYTES, plans
from stepscope.page.assets import is_built
from stepscope.page.report_file import report_file
from stepscope.records.progress import Progress, unheard
from stepscope.records.redactor import Redactor
from stepscope.store import atomic
from stepscope.store.catalog import run_entry
from stepscope.store.meta import read_meta
from stepscope.store.paths import REPORT_FILE

__all__ = ["UNBUILT", "add_copy", "make_copy", "write_copy"]

UNBUILT = "the page was not built (`make page` does it)"
SCHEMA = 1
M_ARENA_MAX = -8
"""As in ``malloc.h``."""


def write_copy(
    run_dir: Path, path: Path, *, known: Known | None = None, redact: bool = False, progress: Progress = unheard
) -> int:
    """How many bytes it has; ``known``: who has read the run gives it; ``redact``: as ``records/redactor.py`` says.

    RunError when it cannot be: no run, no built page, no room.
    """
    made = asyncio.run(_make(run_dir, MOST_BYTES, time.time_ns(), known, progress, redact=redact))
    try:
        atomic.write_bytes(path, made)
    except OSError as error:
        raise RunUnwritable(f"cannot write {path}: {error.strerror}") from error
    return len(made)


def add_copy(run_dir: Path, known: Known, progress: Progress = unheard) -> str:
    """``report.html`` in a run that is over; why there is none, or nothing.

    What else was concluded from the run does not depend on it: whatever goes wrong is a line to tell, no more.
    """
    _give_back()
    made = asyncio.run(_outcome(_make(run_dir, MOST_BYTES, time.time_ns(), known, progress)))
    if not isinstance(made, bytes):
        return str(made) if isinstance(made, StepscopeError) else f"a fault of ours, {made!r}"
    try:
        atomic.write_bytes(run_dir / REPORT_FILE, made)
    except OSError as error:
        return str(error.strerror)
    return ""


def make_copy(
    run_dir: Path, *, most_bytes: int = MOST_BYTES, wall_ns: int | None = None, progress: Progress = unheard
) -> bytes:
    """The file as bytes; ``wall_ns``: when it says that it was made."""
    return asyncio.run(_make(run_dir, most_bytes, time.time_ns() if wall_ns is None else wall_ns, None, progress))


def _give_back() -> None:
    """What reading the run has freed, but not returned: beside a job every megabyte counts, also at its end.

    And no heap of its own for the thread that answers.
    """
    gc.collect()
    with suppress(AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(M_ARENA_MAX, 1)
        library.malloc_trim(0)


async def _outcome(making: Coroutine[Any, Any, bytes]) -> bytes | BaseException:
    return (await asyncio.gather(making, return_exceptions=True))[0]


async def _make(
    run_dir: Path, most_bytes: int, wall_ns: int, known: Known | None, progress: Progress, *, redact: bool = False
) -> bytes:
    if not is_built():
        raise RunError(UNBUILT)
    made = b""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # there is one question at a time
    told = progress if known is not None else _after_half(progress)
    async with opened(run_dir, known) as ask:
        for plan in plans():
            blobs = Blobs()
            contents = await gather(ask, plan, blobs, told, files=not redact)
            told = unheard  # a second plan asks for less of the same, and a bar never goes back
            name = str(contents["answers"][""].get("name") or ask.run.name)
            document = _head(ask, name, wall_ns) | contents
            if redact:
                document = Redactor(read_meta(ask.run.path), document).document(document)
            made = report_file(title=document["name"], data=wrap(document, blobs)) or b""
            if len(made) <= most_bytes:
                break
    return made


def _after_half(progress: Progress) -> Progress:
    """To open a large run takes as long as everything that comes then."""
    return lambda done, total: progress(total + done, 2 * total)


def _head(ask: Asker, name: str, wall_ns: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run": ask.run.name,
        "name": name,
        "made_wall_ns": wall_ns,
        "stepscope": __version__,
        "over": ask.run.over,
        "row": _row(ask),
    }


def _row(ask: Asker) -> dict[str, Any]:
    """The run as the list of runs has it."""
    shown = run_entry(ask.run.path).to_dict()
    return {"id": ask.run.name, **{name: value for name, value in shown.items() if name != "path"}}
