"""One file → the traces in it, whatever wrote it, from the cache where it was read before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from stepscope.errors import TraceError
from stepscope.traces.cache import Cache
from stepscope.traces.columns import Trace
from stepscope.traces.nsight import is_nsight, read_nsight
from stepscope.traces.read import read_trace

__all__ = ["has_traces", "open_traces", "read_traces", "trace_files"]

ENDINGS: Final = (".json", ".json.gz", ".json.zst", ".sqlite")
"""Of files that a folder is searched for; one that is named may be called anything."""

REPORTS: Final = (".nsys-rep", ".qdrep")


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """Files as they are, folders as the traces below them, by name; each once."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            found[path] = None
            continue
        below = sorted(_below(path))
        if not below:
            raise TraceError(f"{path} has no traces in it (files ending in {', '.join(ENDINGS)})")
        found.update(dict.fromkeys(below))
    return list(found)


def has_traces(folder: Path) -> bool:
    return next(_below(folder), None) is not None


def _below(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.name.endswith(ENDINGS) and file.is_file())


def open_traces(path: Path, cache: Cache | None) -> list[Trace]:
    """One trace, or of an export of Nsight Systems one per process that used a GPU."""
    entry = cache.entry(path) if cache is not None else None
    return read_traces(path) if entry is None else entry.traces(read_traces)


def read_traces(path: Path) -> list[Trace]:
    """Afresh."""
    if path.name.endswith(REPORTS):
        raise TraceError(f"{path} is a report of Nsight Systems: export it first, with `nsys export --type sqlite`")
    return read_nsight(path) if is_nsight(path) else [read_trace(path)]
