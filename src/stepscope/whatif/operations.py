"""The operations of a trace as arrays ``[operation, step, lane]``.

A *worker* is one pipeline stage of one data-parallel rank; a *lane* is one data-parallel rank with all its stages.
Every step of every lane does the same operations, so one of each, the *template*, carries the dependencies and the
arrays carry the times.  A step that lacks an operation, or has one too many, is left out and said so; so are kinds of
operations that the model knows nothing of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import TraceError
from stepscope.whatif.kinds import BACKWARD, FORWARD, KINDS
from stepscope.whatif.meta import JobShape
from stepscope.whatif.table import read_table

__all__ = ["Floats", "Operation", "Trace", "read_trace"]

Floats = NDArray[np.float64]
Columns = Mapping[str, Any]

_SPARSEST = 16
"""Cells of the arrays per row of the table: beyond this the steps have nothing in common."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One of the template: where it stood in the first whole step of the first lane."""

    kind: str
    sequence: int
    stage: int
    chunk: int
    """Of the model, on this stage; 0 where it is not known or does not apply."""
    model_chunk: int
    """The same, counted through the whole model; −1 where it is not known."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    operations: tuple[Operation, ...]
    steps: tuple[int, ...]
    lanes: tuple[int, ...]
    """Data-parallel ranks, ascending."""
    stages: int
    ranks: Mapping[tuple[int, int], int]
    """Rank of the worker at (lane, stage)."""
    start_s: Floats
    duration_s: Floats
    """Both ``[operation, step, lane]``."""
    notes: tuple[str, ...]


def read_trace(path: Path, shape: JobShape) -> Trace:
    """TraceError, in one sentence, when there is no such table or it does not fit the job's shape."""
    table = read_table(path)
    columns = table.columns
    _check_shape(path, columns, shape)
    ranks = _ranks(path, columns)
    present, cell = _cells(path, columns)
    usual = present.mean(axis=(1, 2)) > 0.5
    whole = (present == usual[:, None, None]).all(axis=(0, 2))
    if not usual.any() or not whole.any():
        raise TraceError(f"{path}: no step has the same operations on all data-parallel ranks")

    def laid_out(values: Any) -> Any:
        flat = np.zeros(present.size, dtype=values.dtype)
        flat[cell] = values
        return flat.reshape(present.shape)[usual][:, whole]

    operations = tuple(_operation(columns, row) for row in laid_out(np.arange(len(cell)))[:, 0, 0])
    lanes = tuple(int(lane) for lane in np.unique(columns["dp_rank"]))
    notes = []
    if table.unknown:
        names = ", ".join(table.unknown_names)
        notes.append(f"{table.unknown:,} operations of kinds the model does not know are left out: {names}")
    if not whole.all():
        left_out = f"{int((~whole).sum())} of {len(whole)} steps are left out"
        notes.append(f"{left_out}: they lack operations or have some too many")
    if len(lanes) < shape.dp_size:
        notes.append(f"the trace holds {len(lanes)} of the {shape.dp_size} data-parallel ranks of the job")
    chunks = 1 + max((op.chunk for op in operations if op.kind in (FORWARD, BACKWARD)), default=0)
    if chunks != shape.vpp_size:
        notes.append(f"model chunks on a stage: {chunks} in the trace, {shape.vpp_size} in the meta file")
    return Trace(
        operations=operations,
        steps=tuple(int(step) for step in np.unique(columns["step"])[whole]),
        lanes=lanes,
        stages=shape.pp_size,
        ranks=ranks,
        start_s=laid_out(columns["start_ts"]),
        duration_s=laid_out(columns["duration"]),
        notes=tuple(notes),
    )


def _check_shape(path: Path, columns: Columns, shape: JobShape) -> None:
    stages, lanes = np.unique(columns["stage"]), np.unique(columns["dp_rank"])
    if len(stages) != shape.pp_size or stages[-1] != shape.pp_size - 1:
        raise TraceError(
            f"{path} does not fit the meta file: {len(stages)} pipeline stages, the last is number {stages[-1]}; "
            f"pp_size is {shape.pp_size}"
        )
    if lanes[-1] >= shape.dp_size * shape.dsp_size:
        raise TraceError(
            f"{path} does not fit the meta file: there is a data-parallel rank {lanes[-1]}; dp_size is {shape.dp_size}"
        )


def _ranks(path: Path, columns: Columns) -> dict[tuple[int, int], int]:
    stages = int(columns["stage"].max()) + 1
    lanes, lane_of = np.unique(columns["dp_rank"], return_inverse=True)
    names, name_of = np.unique(columns["rank"], return_inverse=True)
    workers, worker_of = np.unique(lane_of * stages + columns["stage"], return_inverse=True)
    pairs = np.unique(worker_of * len(names) + name_of)
    if len(pairs) != len(workers) or len(names) != len(workers):
        raise TraceError(f"{path}: data-parallel rank and stage together must stand for one rank each")
    if len(workers) != len(lanes) * stages:
        raise TraceError(f"{path}: some data-parallel ranks lack a pipeline stage")
    found = (divmod(int(pair), len(names)) for pair in pairs)
    return {
        (int(lanes[workers[worker] // stages]), int(workers[worker] % stages)): int(names[name])
        for worker, name in found
    }


def _cells(path: Path, columns: Columns) -> tuple[NDArray[np.bool_], Any]:
    """Which operation is there in which step of which lane, and each row's place in that."""
    lanes, lane_of = np.unique(columns["dp_rank"], return_inverse=True)
    steps, step_of = np.unique(columns["step"], return_inverse=True)
    sequences, sequence_of = np.unique(columns["seq_id"], return_inverse=True)
    stages = int(columns["stage"].max()) + 1
    key = (columns["kind"] * stages + columns["stage"]) * len(sequences) + sequence_of
    keys, operation_of = np.unique(key, return_inverse=True)
    size = len(keys) * len(steps) * len(lanes)
    if size > _SPARSEST * len(key):
        raise TraceError(f"{path}: its steps have too little in common to be compared")
    cell = (operation_of * len(steps) + step_of) * len(lanes) + lane_of
    count = np.bincount(cell, minlength=size)
    if count.max() > 1:
        row = int(np.flatnonzero(count[cell] > 1)[0])
        raise TraceError(
            f"{path}: step {columns['step'][row]}, rank {columns['rank'][row]}: {KINDS[columns['kind'][row]]} "
            f"number {columns['seq_id'][row]} is there {count[cell[row]]} times"
        )
    return count.reshape(len(keys), len(steps), len(lanes)) > 0, cell


def _operation(columns: Columns, row: int) -> Operation:
    return Operation(
        kind=KINDS[columns["kind"][row]],
        sequence=int(columns["seq_id"][row]),
        stage=int(columns["stage"][row]),
        chunk=max(int(columns["mc"][row]), 0),
        model_chunk=int(columns["gmc"][row]),
        start_s=float(columns["start_ts"][row]),
        end_s=float(columns["start_ts"][row] + columns["duration"][row]),
    )
