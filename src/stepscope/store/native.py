"""What native code printed last in ranks that did not end well, from the ends of their logs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from stepscope.records.native_lines import last_native_lines
from stepscope.records.places import log_of_rank, log_path
from stepscope.records.series import RankError, RankSeries
from stepscope.store.reading import open_file

__all__ = ["read_native"]

TAIL_BYTES = 64 << 10
MOST_RANKS = 64
"""Logs that are looked into: a fault that hits more hits them alike."""


def read_native(
    path: Path, ranks: Sequence[RankSeries], errors: Iterable[RankError]
) -> dict[int | None, tuple[str, ...]]:
    """By rank, of the last attempt; None: in the job's own log, of nobody knows which rank."""
    attempt = max((series.identity.attempt for series in ranks), default=0)
    ended = {series.rank for series in ranks if series.identity.attempt == attempt and series.state != "exited"}
    ended |= {error.rank for error in errors if error.rank is not None}
    found: dict[int | None, tuple[str, ...]] = {}
    for rank in sorted(ended)[:MOST_RANKS]:
        if lines := _last(log_of_rank(path, rank=rank, attempt=attempt)):
            found[rank] = lines
    if ended and (lines := _last(log_path(path, rank=None, attempt=0))):
        found[None] = lines
    return found


def _last(log: Path) -> tuple[str, ...]:
    try:
        with open_file(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return ()
    return last_native_lines(data.decode(errors="replace").split("\n"))
