"""Traces laid out for TensorBoard's profiler plugin (torch-tb-profiler): one folder per job, one file per rank.

The plugin takes a folder as a run and files named ``WORKER.TIME.pt.trace.json.gz`` as its workers. If a worker is
called ``HOST_PID`` it groups processes by host. It reads gzip or plain JSON of torch.profiler, so other compression is
changed, and exports of Nsight Systems are left out. The contents stay as they are.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from zlib_ng import gzip_ng

from stepscope.errors import TraceError, UsageError
from stepscope.records.files import replaced
from stepscope.traces.model.columns import TraceMeta
from stepscope.traces.reading.files import GZIP, blocks_of

__all__ = ["worker_file", "write_tensorboard"]

PACKED: Final = 6
UNUSABLE: Final = re.compile(r"[^A-Za-z0-9.-]+")
MILLISECOND: Final = 10**6


def worker_file(rank: int, meta: TraceMeta) -> str:
    """Return the name of a rank's file."""
    host = UNUSABLE.sub("-", meta.host or "").strip("-.")[:80] or "rank"
    number = meta.pid if meta.pid is not None and meta.host else rank
    return f"{host}_{number}.{max(meta.origin_ns, 0) // MILLISECOND}.pt.trace.json.gz"


def write_tensorboard(ranks: Iterable[tuple[int, TraceMeta]], folder: Path) -> tuple[list[Path], list[str]]:
    """Write each rank's trace into the folder; return the files, and sentences about traces that were left out."""
    ranks = list(ranks)
    if any(Path(meta.path).resolve().parent == folder.resolve() for _, meta in ranks):
        raise UsageError(f"{folder} has the traces themselves; name another folder for TensorBoard")
    written: list[Path] = []
    notices: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, meta in ranks:
            if meta.format != "kineto":
                notices.append(f"{meta.path} is not of torch.profiler: TensorBoard's plugin cannot read it")
                continue
            name = worker_file(rank, meta)
            if any(path.name == name for path in written):
                name = f"rank{rank}-{name}"
            with replaced(folder / name) as spare:
                _copy(Path(meta.path), spare)
            written.append(folder / name)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    return written, notices


def _copy(source: Path, target: Path) -> None:
    try:
        with source.open("rb") as file:
            packed = file.read(len(GZIP)) == GZIP
    except OSError as error:
        raise TraceError(f"{source}: {error.strerror or error}") from None
    if packed:
        shutil.copyfile(source, target)
        return
    with gzip_ng.open(target, "wb", PACKED) as out:
        for block in blocks_of(source):
            out.write(block)
