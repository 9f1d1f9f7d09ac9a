"""What torchtitan and Megatron-LM say of the training, from the ends of the logs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stepscope.records.places import log_of_rank, log_path
from stepscope.records.series import RankSeries
from stepscope.records.training_lines import summed_up, timer_line, training_line

__all__ = ["read_training_log"]

TAIL_BYTES = 1 << 20
MOST_RANKS = 64
"""Logs that are looked into; torchtitan prints on the first rank, or on all, Megatron on the last."""


def read_training_log(path: Path, ranks: Sequence[RankSeries]) -> dict[str, Any]:
    """Of the last attempt, from the first log that has any; with the last ``step`` of ours; {}: there is nothing."""
    attempt = max((series.identity.attempt for series in ranks), default=0)
    current = sorted((one for one in ranks if one.identity.attempt == attempt), key=lambda one: one.rank)
    chosen = dict.fromkeys([one.rank for one in (*current[:1], *current[-1:], *current[1:MOST_RANKS])])
    logs: list[tuple[int | None, Path]] = [(rank, log_of_rank(path, rank=rank, attempt=attempt)) for rank in chosen]
    for rank, log in (*logs, (None, log_path(path, rank=None, attempt=attempt))):
        lines = list(_lines(log))
        said = summed_up(
            (line for line in map(training_line, lines) if line is not None),
            (timer for timer in map(timer_line, lines) if timer is not None),
        )
        if said:
            own = next((one for one in current if one.rank == rank), current[0] if current else None)
            step = int(own.steps["step"][-1]) if own is not None and len(own.steps) else None
            return {**said, "rank": rank, "step": step}
    return {}


def _lines(log: Path) -> Iterator[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return
    yield from data.decode(errors="replace").splitlines()
