"""Operation-level traces: the job's shape, the Parquet table of operations, and the same as arrays.

A *worker* is one pipeline stage of one data-parallel rank; a *lane* is one data-parallel rank with all its stages.
Every step of every lane has the same operations, so one of each, the *template*, carries the dependencies, and arrays
``[operation, step, lane]`` carry the times.  A step that lacks an operation, or has one too many, is left out with a
note; so are operations of unknown kinds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import TraceError
from stepscope.records.files import sql_input_path

__all__ = [
    "BACKWARD",
    "CLIP",
    "COMPUTING",
    "EMBEDDING",
    "FORWARD",
    "GATHER",
    "GC",
    "LAYERNORM",
    "OPTIMIZER",
    "PIPELINE",
    "REDUCE",
    "SEPARATE",
    "Floats",
    "JobShape",
    "Operation",
    "Trace",
    "read_meta",
    "read_trace",
]


# -- kinds ------------------------------------------------------------------------------------------------------------
# The kinds of operations that the model knows, by their names in traces.

FORWARD, BACKWARD, GC, OPTIMIZER = "forward-compute", "backward-compute", "gc", "optimizer"
GATHER, REDUCE = "params-all-gather", "grads-reduce-scatter"
SEPARATE = "separate-grads-all-reduce"
"""Only present when the other reductions overlap with backward."""
LAYERNORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP = "optimizer-clip-main-grad"
PIPELINE = ("forward-send", "forward-recv", "backward-send", "backward-recv")
COMPUTING = (FORWARD, BACKWARD, GC, OPTIMIZER)
"""All other kinds communicate."""
KINDS = (*COMPUTING, GATHER, REDUCE, SEPARATE, LAYERNORM, EMBEDDING, CLIP, *PIPELINE)


# -- meta file --------------------------------------------------------------------------------------------------------
# The shape of a job: a flat list of ``name: value``, in YAML or JSON.  Only this subset of YAML is read: a line with
# structure is rejected instead of guessed at.

SIZES = ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size")
"""Counts; all default to 1."""
_LARGEST = 1 << 24
_LARGEST_FILE = 1 << 16
_LINE = re.compile(r"(?P<name>[A-Za-z_][\w-]*)\s*:(?:\s+(?P<value>.*))?")
_STRUCTURED = tuple("[{&*!|>%@`")


@dataclass(frozen=True, kw_only=True)
class JobShape:
    trial_name: str
    dp_size: int
    """Data-parallel ranks."""
    pp_size: int
    """Pipeline stages."""
    tp_size: int
    dsp_size: int
    vpp_size: int
    """Model chunks on each stage (interleaved schedules); 1: not interleaved."""


def read_meta(path: Path) -> JobShape:
    """Read the meta file; TraceError, in one sentence, if it is missing, not a flat list, or contradictory."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
        if len(raw) > _LARGEST_FILE:
            raise TraceError(f"{path} is too large for a meta file")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not text") from error
    values = _json(path, text) if text.lstrip().startswith("{") else _flat_yaml(path, text)
    sizes = {name: _count(path, name, values.get(name, 1)) for name in SIZES}
    if not {"dp_size", "pp_size"} <= values.keys():
        raise TraceError(f"{path} does not give the numbers of ranks and stages: it needs dp_size and pp_size")
    world = sizes["dp_size"] * sizes["pp_size"] * sizes["tp_size"] * sizes["dsp_size"]
    if "world_size" in values and _count(path, "world_size", values["world_size"]) != world:
        raise TraceError(
            f"{path}: world_size is {values['world_size']}, but dp_size × pp_size × tp_size × dsp_size is {world}"
        )
    return JobShape(trial_name=str(values.get("trial_name", path.stem)), **sizes)


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not valid JSON") from error
    if not isinstance(values, dict):
        raise TraceError(f"{path} is not a JSON object")
    return values


def _flat_yaml(path: Path, text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line.rstrip() == "---":
            continue
        match = _LINE.fullmatch(line.rstrip())
        value = "" if match is None or match["value"] is None else _without_comment(match["value"])
        if match is None or not value or value.startswith(_STRUCTURED):
            raise TraceError(f"{path}, line {number}: not of the form `name: value`")
        if match["name"] in values:
            raise TraceError(f"{path}, line {number}: {match['name']} appears twice")
        values[match["name"]] = _scalar(value)
    return values


def _without_comment(value: str) -> str:
    return re.sub(r"(^|\s)#.*", "", value).strip()


def _scalar(value: str) -> str | int:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return int(value) if re.fullmatch(r"[+-]?[0-9]{1,18}", value) else value


def _count(path: Path, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise TraceError(f"{path}: {name} must be a whole number of at least 1")
    return value


# -- table ------------------------------------------------------------------------------------------------------------
# The Parquet table of an operation-level trace, one row per operation, read by DuckDB into checked columns.
#
# Required: ``dp_rank``, ``stage``, ``rank``, ``step``, ``seq_id`` (integers), ``optype`` (a name), ``start_ts`` and
# ``duration`` (seconds).  Optional: ``mc`` and ``gmc`` (model chunk of the stage, and of the model).

WHOLE = ("dp_rank", "stage", "rank", "step", "seq_id")
CHUNKS = ("mc", "gmc")
"""−1 or NULL where they do not apply."""
TIMES = ("start_ts", "duration")
_INTEGER_TYPES = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
_NUMBER_TYPES = (*_INTEGER_TYPES, "UBIGINT", "HUGEINT", "FLOAT", "DOUBLE")
_NAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Table:
    """Operations of known kinds; no value is missing, and all times are finite."""

    columns: Mapping[str, Any]
    """int64 and float64 arrays by the names above, and ``kind``: the index in ``KINDS``."""
    unknown: int
    unknown_names: tuple[str, ...]


def read_table(path: Path) -> Table:
    """Read the table; TraceError, in one sentence, if it is missing or invalid."""
    import duckdb

    if not path.is_file():
        raise TraceError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    source = f"read_parquet({sql_input_path(path)})"
    kinds = "[" + ", ".join(f"'{kind}'" for kind in KINDS) + "]"
    try:
        with duckdb.connect(config={"threads": 2}) as con:
            con.execute("SET autoinstall_known_extensions = false")
            con.execute("SET autoload_known_extensions = false")
            types = {name: kind for name, kind, *_ in con.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
            _check_types(path, types)
            chunks = [
                f"coalesce(try_cast({name} AS BIGINT), -1) AS {name}" if name in types else f"-1::BIGINT AS {name}"
                for name in CHUNKS
            ]
            selected = [f"{name}::BIGINT AS {name}" for name in WHOLE] + chunks
            selected += [f"{name}::DOUBLE AS {name}" for name in TIMES]
            selected += [f"CASE WHEN optype IS NOT NULL THEN coalesce(list_position({kinds}, optype), 0) END AS optype"]
            fetched: dict[str, Any] = con.execute(f"SELECT {', '.join(selected)} FROM {source}").fetchnumpy()
            others = f"SELECT DISTINCT optype FROM {source} WHERE list_position({kinds}, optype) IS NULL"
            names = [str(name) for (name,) in con.execute(f"{others} ORDER BY 1 LIMIT {_NAMES_SHOWN}").fetchall()]
    except duckdb.Error as error:
        raise TraceError(f"{path} cannot be read as Parquet: {str(error).strip().splitlines()[0]}") from error
    return _checked(path, fetched, names)


def _check_types(path: Path, types: Mapping[str, str]) -> None:
    missing = [name for name in (*WHOLE, "optype", *TIMES) if name not in types]
    if missing:
        raise TraceError(f"{path} is not an operation trace: it has no column {', '.join(missing)}")
    wanted = dict.fromkeys(WHOLE, _INTEGER_TYPES) | dict.fromkeys((*TIMES, *CHUNKS), _NUMBER_TYPES)
    for name, allowed in (wanted | {"optype": ("VARCHAR",)}).items():
        if name in types and types[name] not in allowed:
            raise TraceError(f"{path}: column {name} has the wrong type ({types[name]})")


def _checked(path: Path, fetched: Mapping[str, Any], names: list[str]) -> Table:
    if not len(fetched["step"]):
        raise TraceError(f"{path} is empty: no operation in it")
    for name, values in fetched.items():
        _refuse(path, np.ma.getmaskarray(values), f"{name} is missing")
    columns = {name: np.ma.getdata(values) for name, values in fetched.items()}
    columns["kind"] = columns.pop("optype").astype(np.int64) - 1
    known = columns["kind"] >= 0
    if not known.any():
        raise TraceError(f"{path} contains no operation of a known kind (forward-compute, optimizer …)")
    columns = {name: values[known] for name, values in columns.items()}
    for name in TIMES:
        _refuse(path, ~np.isfinite(columns[name]), f"{name} is not a number")
    for name in ("duration", "dp_rank", "stage", "rank", "seq_id"):
        _refuse(path, columns[name] < 0, f"{name} is negative")
    return Table(columns=columns, unknown=int((~known).sum()), unknown_names=tuple(names))


def _refuse(path: Path, bad: Any, what: str) -> None:
    count = int(bad.sum())
    if count:
        raise TraceError(f"{path}: {what} in {count:,} of {len(bad):,} rows")


# -- trace ------------------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Columns = Mapping[str, Any]

_SPARSEST = 16
"""Maximum array cells per table row: beyond this the steps have nothing in common."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of the template, with its times in the first complete step of the first lane."""

    kind: str
    sequence: int
    stage: int
    chunk: int
    """Model chunk on this stage; 0 if unknown or not applicable."""
    model_chunk: int
    """Model chunk, counted through the whole model; −1 if unknown."""
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
    """Read a trace; TraceError, in one sentence, if the table is missing or does not fit the job's shape."""
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
        notes.append(f"{table.unknown:,} operations of unknown kinds are left out: {names}")
    if not whole.all():
        left_out = f"{int((~whole).sum())} of {len(whole)} steps are left out"
        notes.append(f"{left_out}: they have missing or extra operations")
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
        raise TraceError(f"{path}: each (dp_rank, stage) pair must map to exactly one rank")
    if len(workers) != len(lanes) * stages:
        raise TraceError(f"{path}: some data-parallel ranks lack a pipeline stage")
    found = (divmod(int(pair), len(names)) for pair in pairs)
    return {
        (int(lanes[workers[worker] // stages]), int(workers[worker] % stages)): int(names[name])
        for worker, name in found
    }


def _cells(path: Path, columns: Columns) -> tuple[NDArray[np.bool_], Any]:
    """Return which operation exists in which step of which lane, and each row's index in that array."""
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
            f"number {columns['seq_id'][row]} appears {count[cell[row]]} times"
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
