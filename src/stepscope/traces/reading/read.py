"""Paths in, traces out: which files are traces, and what one holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from stepscope.errors import TraceError
from stepscope.traces.model.columns import Trace
from stepscope.traces.reading.inflate import blocks_of
from stepscope.traces.reading.kineto import read_kineto

__all__ = ["ENDINGS", "TIMELINE", "find_traces", "read_trace"]

ENDINGS: Final = (".json", ".json.gz", ".json.zst", ".sqlite", ".nsys-rep", ".qdrep")
"""Of files that a folder is searched for; one that is named may be called anything."""
REPORTS: Final = (".nsys-rep", ".qdrep")
LOOKED_AT: Final = 1 << 20
"""Bytes of a file in a folder, in which a trace would begin its events or at least look like one."""

TIMELINE: Final = b'{"stepscope":{"timeline":1}'
"""How our own merged timelines (``perfetto``) begin: they are no further rank."""


def find_traces(paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Files as they are, folders as the traces anywhere below them, by name, each once; and what was passed over.

    A file that was named must be a trace, which shows when it is read; in a folder there are others, too.
    """
    found: dict[Path, None] = {}
    notices: list[str] = []
    for path in paths:
        if not path.is_dir():
            found[path] = None
            continue
        below = sorted(file for file in _below(path) if file.is_file())
        traces = {file: None for file in below if _looks_like_one(file)}
        if not traces:
            endings = ", ".join(ENDINGS[:-2])
            raise TraceError(f"{path}: there is no trace in this folder (files ending in {endings})")
        foreign = [file for file in below if file not in traces]
        if foreign:
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            notices.append(f"no traces (or timelines of --perfetto), passed over: {foreign[0]}{more}")
        found.update(traces)
    return list(found), notices


def _below(folder: Path) -> list[Path]:
    try:
        return [file for file in folder.rglob("*") if file.name.endswith(ENDINGS)]
    except OSError as error:
        raise TraceError(f"{folder}: {error.strerror or error}") from None


def _looks_like_one(path: Path) -> bool:
    """By its first bytes; one that cannot be read at all may be one, and shall say why when it is read."""
    if not path.name.endswith(ENDINGS[:3]):
        return True
    start = bytearray()
    try:
        for block in blocks_of(path):
            start += block
            if len(start) >= LOOKED_AT:
                break
    except TraceError:
        return True
    if start.startswith(TIMELINE):
        return False
    text = bytes(start).removeprefix(b"\xef\xbb\xbf").lstrip()
    return not text or b'"traceEvents"' in text or (text.startswith(b"[") and b'"ph"' in text)


def _foreign(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same, unless we wrote them."""
    for number, block in enumerate(blocks):
        if not number and block.startswith(TIMELINE):
            raise TraceError("is a timeline that --perfetto wrote; the traces it was made of can be read")
        yield block


def read_trace(path: Path) -> Trace:
    """A trace of torch.profiler, or another that Chrome would open."""
    if path.name.endswith(REPORTS):
        raise TraceError(f"{path}: is a report of Nsight Systems; export it first: nsys export --type sqlite")
    cut: list[str] = []
    try:
        trace = read_kineto(_foreign(blocks_of(path, cut)), str(path))
    except TraceError as error:
        because = f" ({cut[0]})" if cut else ""
        raise TraceError(str(error) if str(error).startswith(f"{path}:") else f"{path}: {error}{because}") from None
    if not cut:
        return trace
    problems = (f"{cut[0]}; everything before is used", *trace.meta.problems)
    return replace(trace, meta=replace(trace.meta, problems=problems))
