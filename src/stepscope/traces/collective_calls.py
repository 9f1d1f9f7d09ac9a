"""The collectives of one rank, in order of time: operation, process group, bytes, times, and the overlap with compute.

On a device, a collective is its kernel. Its description comes from the kernel itself, else from the host slice
(``record_param_comms``, ``nccl:all_reduce``) around the call that launched it, else from the kernel's name.

Gloo and MPI run on host threads. torch's ``gloo:all_reduce`` annotation is on gloo's own thread (``pt_gloo_runloop``).
It lasts from when that thread picks up the collective until it is done, including the wait for the others.
``c10d::allreduce_`` on the calling thread only hands the collective over and says nothing about its duration. The
annotation does not name the process group. Every group has two dedicated threads, created with the group: sorted, they
follow the order of ``pg_config``. If the numbers do not match, the group stays unknown and the collective cannot be
compared.

Bytes are the same on all ranks of a collective: the tensor of a reduction or broadcast, all ranks' parts together of a
gather or scatter. Only those of an all-to-all are this rank's own input.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.flight.dump import operation_name, parse_ranks
from stepscope.records.collectives import OPS
from stepscope.traces.device.work import device_spans
from stepscope.traces.model import intervals
from stepscope.traces.model.columns import HOST_KINDS, Ints, Kind, Numbering, Rows, Trace
from stepscope.traces.model.intervals import EMPTY, Spans
from stepscope.traces.model.kernel_names import is_communication
from stepscope.traces.model.tables import distinct, distinct_rows
from stepscope.traces.model.window import Window, holders

__all__ = [
    "BY_HOST",
    "CALLS",
    "OPS",
    "POINT_TO_POINT",
    "SYNCHRONIZING",
    "Exchanges",
    "GroupKind",
    "ProcessGroup",
    "bus_factor",
    "exchanges_of",
    "op_of",
    "own_bytes",
    "size_of",
]


# -- process groups ---------------------------------------------------------------------------------------------------

GroupKind = Literal["data", "tensor", "pipeline", "expert", "context", "unknown"]
WORDS: Final[dict[str, GroupKind]] = {
    **dict.fromkeys(("dp", "data", "ddp", "fsdp", "hsdp", "shard", "replicate", "zero"), "data"),
    **dict.fromkeys(("tp", "tensor"), "tensor"),
    **dict.fromkeys(("pp", "pipe", "pipeline"), "pipeline"),
    **dict.fromkeys(("ep", "expert"), "expert"),
    **dict.fromkeys(("cp", "context", "sp", "sequence", "ulysses"), "context"),
}
"""Words in the descriptions that torch's meshes (``mesh_tp``), Megatron (``TENSOR_MODEL_PARALLEL_GROUP``) and vLLM
(``tp:0``) give their groups.
"""

THREADS_OF_GROUP = 2
"""Created by gloo."""


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """A process group. Equal values mean the same group; a name alone may be shared by groups with different ranks."""

    name: str = ""
    """torch's name; empty if the file has no groups."""
    description: str = ""
    members: tuple[int, ...] = ()
    """Their ranks; empty if unknown or incomplete."""
    wording: str = ""
    """The text of the rank list, possibly shortened."""
    size: int = -1

    @property
    def identity(self) -> tuple[str, tuple[int, ...], str]:
        return self.name, self.members, "" if self.members else self.wording

    @property
    def kind(self) -> GroupKind:
        """What its ranks share, as far as its description or name says so."""
        words = re.split(r"[^a-z]+", f"{self.description} {self.name}".lower())
        kinds = {WORDS[word] for word in words if word in WORDS}
        if "data" in kinds and kinds <= {"data", "context", "expert"}:
            # Gradients and shards are also exchanged between the ranks of a sequence or of an expert's copies.
            return "data"
        return kinds.pop() if len(kinds) == 1 else "unknown"


def groups_of(
    window: Window, rows: Rows, source: NDArray[np.int64], rank: int
) -> tuple[tuple[ProcessGroup, ...], NDArray[np.int32]]:
    """Return the groups, and for each row its group or −1; ``source`` [rows]: index into ``Trace.collectives``."""
    trace = window.trace
    listed = {group.name: group for group in _listed(trace) if not group.members or rank in group.members}
    groups: Numbering[ProcessGroup] = Numbering()
    out = np.full(len(rows), -1, np.int32)
    table = trace.collectives
    described = source >= 0
    keys = np.stack([table.group, table.description, table.ranks, table.size], axis=1)[source[described]]
    known, inverse = np.unique(keys, axis=0, return_inverse=True)
    codes = np.array([_code(groups, _group(trace, key, listed)) for key in known.tolist()], np.int32)
    if len(codes):
        out[described] = codes[inverse.reshape(-1)]
    _infer(window, rows, out, listed, groups)
    return tuple(groups), out


def _code(groups: Numbering[ProcessGroup], group: ProcessGroup | None) -> int:
    return -1 if group is None else groups[group]


def _infer(
    window: Window, rows: Rows, out: NDArray[np.int32], listed: dict[str, ProcessGroup], groups: Numbering[ProcessGroup]
) -> None:
    """Infer the groups of collectives without a description, in place."""
    slices = window.trace.slices
    if not (out < 0).any():
        return
    if len(listed) <= 1:
        # The only group, or a file without groups.
        found = list(groups)
        only = found[0] if len(found) == 1 else ProcessGroup(size=window.trace.meta.world_size or -1)
        out[out < 0] = groups[next(iter(listed.values()), only)]
        return
    for stream in np.unique(slices.stream[rows[(out < 0) & (slices.device[rows] >= 0)]]):
        same = (slices.stream[rows] == stream) & (slices.device[rows] >= 0)
        others = np.unique(out[same & (out >= 0)])
        if len(others) == 1:
            out[same] = others[0]
    rest = (out < 0) & (slices.device[rows] < 0)
    threads = np.unique(slices.thread[rows[rest]]).tolist()
    by_tid = sorted((tid, thread) for thread in threads if isinstance(tid := window.trace.threads[thread].tid, int))
    if len(by_tid) == THREADS_OF_GROUP * len(listed):
        for place, (_, thread) in enumerate(by_tid):
            group = list(listed.values())[place // THREADS_OF_GROUP]
            out[rest & (slices.thread[rows] == thread)] = groups[group]


def _listed(trace: Trace) -> list[ProcessGroup]:
    """Read ``pg_config``."""
    out = []
    for each in trace.meta.groups:
        name, size = each.get("pg_name"), each.get("pg_size")
        members = parse_ranks(each.get("ranks"))
        size = size if isinstance(size, int) else len(members) or -1
        description = str(each.get("pg_desc") or "")
        if size != 1:
            whole = members if len(members) == size else ()
            out.append(ProcessGroup(name=str(name), description=description, members=whole, size=size))
    return out


def _group(trace: Trace, key: list[int], listed: dict[str, ProcessGroup]) -> ProcessGroup | None:
    """Build the group that a slice describes; None if it describes none."""
    name, description, wording, size = trace.text(key[0]), trace.text(key[1]), trace.text(key[2]).strip('"'), key[3]
    if not name and not wording:
        return None
    members = parse_ranks(wording)
    if not members or (size > 0 and len(members) != size):
        # Torch shortens long lists of ranks; those in the file's header are complete.
        members = listed[name].members if name in listed else ()
    if size < 0:
        size = len(members) or (listed[name].size if name in listed else -1)
    return ProcessGroup(
        name=name, description=description, members=members, wording="" if members else wording, size=size
    )


# -- names of operations and data types -------------------------------------------------------------------------------
# Files and kernel names spell them differently; these map them to one spelling.

POINT_TO_POINT: Final = tuple(OPS.index(op) for op in ("unknown", "send", "recv"))
"""Not compared over ranks: traces do not name the other rank."""
SYNCHRONIZING: Final = tuple(
    OPS.index(op) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
)
"""No rank finishes before all have arrived, so all end together."""

KERNEL: Final = re.compile(r"(?:nccl|rccl|mscclpp|msccl|ccl)\w*?Kernel\w*?_([A-Za-z]+)", re.IGNORECASE)
"""``ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)``, ``ncclKernel_AllGather_RING_LL_Sum_int8_t``."""
CUSTOM: Final = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast)", re.IGNORECASE)
SAME: Final = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallpivot": "all_to_all",
}

SIZES: Final = {
    1: ("bool", "byte", "char", "unsigned char", "signed char", "int8", "uint8", "float8", "qint8", "quint8"),
    2: ("half", "bfloat16", "short", "float16", "int16", "uint16", "short int"),
    4: ("float", "int", "float32", "int32", "uint32", "unsigned int", "complexhalf"),
    8: ("double", "long", "long int", "float64", "int64", "uint64", "complexfloat", "complex<float>"),
    16: ("complexdouble", "complex<double>"),
}
SIZE_OF: Final = {name: size for size, names in SIZES.items() for name in names}


def op_of(text: str) -> int:
    """Find the index in ``OPS`` for the name of a collective, an annotation or a kernel; 0 if it contains none."""
    kernel = KERNEL.search(text) or CUSTOM.search(text) if "(" in text or "Kernel" in text else None
    word = operation_name(kernel.group(1) if kernel else text)[1]
    word = SAME.get(word, word)
    return OPS.index(word) if word in OPS else 0


def size_of(dtype: str) -> int:
    """Return the bytes of an element; −1 if unknown."""
    name = dtype.rpartition("::")[2].lower()
    return 1 if name.startswith("float8") else SIZE_OF.get(name, -1)


def own_bytes(dims: str, types: str) -> int:
    """Sum the bytes of all tensors in an annotation's ``Input Dims`` and ``Input type``; −1 if unknown."""
    try:
        shapes, names = msgspec.json.decode(dims), msgspec.json.decode(types)
    except msgspec.DecodeError:
        return -1
    if not isinstance(shapes, list) or not isinstance(names, list) or len(shapes) != len(names):
        return -1
    sizes = [_tensor_bytes(shape, name) for shape, name in zip(shapes, names, strict=True)]
    return sum(sizes) if sizes and min(sizes) >= 0 else -1


def _tensor_bytes(shape: Any, name: Any) -> int:
    each = size_of(name) if isinstance(name, str) else -1
    fits = isinstance(shape, list) and all(isinstance(length, int) for length in shape)
    return math.prod(shape) * each if fits and each > 0 else -1


def bus_factor(op: int, members: int) -> float:
    """Return the factor from bytes per second to bus bandwidth, which is comparable for any number of ranks."""
    if members < 2:
        return 0.0
    name = OPS[op]
    if name == "all_reduce":
        return 2 * (members - 1) / members
    return (
        (members - 1) / members if name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter") else 1.0
    )


# -- host times -------------------------------------------------------------------------------------------------------
# How a process that trains without a device spends its time, on its own threads.
#
# There are no kernels, so operators show what runs. *span*: from the start of the first step that counts to the end of
# the last. *compute*: at least one thread was inside an operator that does not call a collective; between operators a
# thread runs Python or waits, and the trace does not say which. *comm*: at least one collective was active. *overlap*:
# both at once. *idle*: neither, which includes Python between operators.

CALLS = ("c10d::", "record_param_comms", "_c10d_functional::", "c10d_functional::")
"""Operators that hand over a collective or wait for it."""


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    span_ns: int
    idle_ns: int
    compute_ns: int
    comm_ns: int
    overlap_ns: int


def host_compute(window: Window) -> Spans:
    """Return when any thread computed; a collective called by an operator does not count."""
    slices = window.trace.slices
    rows = window.rows_of((Kind.OP,))
    if not len(rows):
        return EMPTY
    calling = window.trace.names_where(lambda name: name.startswith(CALLS))[slices.name[rows]]
    parts = []
    for thread in np.unique(slices.thread[rows]):
        own = slices.thread[rows] == thread
        working, calls = rows[own & ~calling], rows[own & calling]
        spans = intervals.merge(slices.start_ns[working], slices.end_ns[working])
        parts.append(intervals.difference(spans, intervals.merge(slices.start_ns[calls], slices.end_ns[calls])))
    return intervals.union(*parts)


def host_times(window: Window, compute: Spans, comm: Spans) -> HostTimes:
    start_ns = min((step.start_ns for step in window.steps), default=0)
    end_ns = max((step.end_ns for step in window.steps), default=0)
    compute, comm = intervals.cut(compute, start_ns, end_ns), intervals.cut(comm, start_ns, end_ns)
    return HostTimes(
        span_ns=end_ns - start_ns,
        idle_ns=end_ns - start_ns - intervals.total(intervals.union(compute, comm)),
        compute_ns=intervals.total(compute),
        comm_ns=intervals.total(comm),
        overlap_ns=intervals.total(intervals.intersection(compute, comm)),
    )


# -- exchanges --------------------------------------------------------------------------------------------------------

BY_HOST = ("gloo:", "mpi:")
"""Annotations that last for the whole collective."""
LAUNCHED = ("nccl:", "rccl:", "xccl:", "hccl:", "mccl:", "cncl:", "ucc:")
"""Annotations that last only for the call."""
PARTS = tuple(OPS.index(op) for op in ("all_gather", "gather"))
"""Operations whose input is this rank's part of the whole."""


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The collectives of a rank; all arrays have one entry per collective, sorted by start."""

    groups: tuple[ProcessGroup, ...]
    row: Rows
    """Row of the slice in the trace."""
    op: NDArray[np.int8]
    """Index into ``OPS``."""
    group: NDArray[np.int32]
    """Index into ``groups``; −1 if the trace does not say."""
    sequence: Ints
    """Number within the group's collectives; −1 if unknown, as for ``bytes``."""
    bytes: Ints
    start_ns: Ints
    """Absolute: includes ``TraceMeta.origin_ns``."""
    end_ns: Ints
    step: NDArray[np.int32]
    """Index into the rank's steps; −1 if outside of them."""
    overlap_ns: Ints
    """The part of it during which this rank computed."""
    stream: NDArray[np.int32]
    """−1: on a host thread."""
    host: HostTimes | None = None
    """Only for a rank without device work."""

    def __len__(self) -> int:
        return len(self.row)


def exchanges_of(window: Window, rank: int) -> Exchanges:
    """Collect the exchanges; ``rank`` selects this process's groups if the file also lists others."""
    slices, origin_ns = window.trace.slices, window.trace.meta.origin_ns
    named = window.trace.names_where(lambda name: name.startswith(BY_HOST))[slices.name]
    on_host = np.flatnonzero(named & window.counts & window.trace.is_of(HOST_KINDS))
    on_device = window.rows_of((Kind.KERNEL,))
    on_device = on_device[window.trace.names_where(is_communication)[slices.name[on_device]]]
    rows = np.sort(np.concatenate([on_host, on_device])).astype(np.int32)
    source, annotation = _sources(window, rows)
    op = _ops(window, rows, source, annotation)
    groups, group = groups_of(window, rows, source, rank)
    start_ns, end_ns = slices.start_ns[rows], slices.end_ns[rows]
    compute = host_compute(window) if len(on_host) or not len(window.device_rows) else intervals.EMPTY
    overlap_ns = intervals.covered(start_ns, end_ns, compute)
    if len(on_device):
        by_device = intervals.covered(start_ns, end_ns, device_spans(window).compute)
        overlap_ns = np.where(slices.device[rows] >= 0, by_device, overlap_ns)
    host = None
    if not len(window.device_rows):
        host = host_times(window, compute, intervals.merge(start_ns, end_ns))
    return Exchanges(
        groups=groups,
        row=rows,
        op=op,
        group=group,
        sequence=_column(window.trace.collectives.sequence, source),
        bytes=_bytes(window, source, annotation, op, np.array([-1, *(each.size for each in groups)])[group + 1]),
        start_ns=start_ns + origin_ns,
        end_ns=end_ns + origin_ns,
        step=window.step_of[rows],
        overlap_ns=overlap_ns,
        stream=slices.stream[rows],
        host=host,
    )


def _column(values: NDArray[np.int64] | NDArray[np.int32], index: NDArray[np.int64]) -> Ints:
    """Look up values of a side table; −1 where missing."""
    return np.append(values, -1).astype(np.int64)[index]


def _sources(window: Window, rows: Rows) -> tuple[NDArray[np.int64], Rows]:
    """Return for each row its index in ``Trace.collectives`` and its annotation's row; −1 where missing."""
    trace = window.trace
    index = np.full(len(trace) + 1, -1, np.int64)
    index[trace.collectives.row] = np.arange(len(trace.collectives.row))
    source = index[rows]
    launched = trace.slices.device[rows] >= 0
    annotation = np.where(launched, -1, rows)
    call = np.where(launched & (source < 0), window.launch[rows], -1)
    if (call >= 0).any():
        on_host = trace.is_of(HOST_KINDS) & window.counts
        is_described = on_host & (index[:-1] >= 0)
        source = np.where(source >= 0, source, index[holders(window.calls, is_described, call)])
        annotates = on_host & trace.names_where(lambda name: name.startswith(LAUNCHED))[trace.slices.name]
        annotation = np.where(launched, holders(window.calls, annotates, call), annotation)
    return source, annotation.astype(np.int32)


def _ops(window: Window, rows: Rows, source: NDArray[np.int64], annotation: Rows) -> NDArray[np.int8]:
    trace = window.trace
    names = np.append(trace.slices.name, -1)
    table = _column(trace.collectives.op, source)
    out = np.zeros(len(rows), np.int8)
    for codes in (table, names[annotation], names[rows]):
        known, inverse = distinct(codes)
        found = np.array([op_of(trace.text(int(code))) for code in known], np.int8)
        out = np.where(out == 0, found[inverse], out)
    # A kernel that sends and receives may or may not be an all-to-all: it is classified like kernels of the same name
    # whose operation is known.
    for kernel in np.unique(names[rows[out == 0]]):
        same = names[rows] == kernel
        like = np.unique(out[same & (out > 0)])
        if len(like) == 1:
            out[same] = like[0]
    return out


def _bytes(
    window: Window, source: NDArray[np.int64], annotation: Rows, op: NDArray[np.int8], members: NDArray[np.int64]
) -> Ints:
    """Compute the bytes; ``members`` [n]: how many ranks take part, −1 if unknown."""
    trace = window.trace
    table = trace.collectives
    known, inverse = distinct(_column(table.dtype, source))
    each = np.array([size_of(trace.text(int(code))) for code in known], np.int64)[inverse]
    taken, given = _column(table.in_elements, source), _column(table.out_elements, source)
    whole = np.where(np.isin(op, [OPS.index("all_to_all")]), taken, np.maximum(taken, given))
    out = np.where((whole >= 0) & (each > 0), whole * each, -1)
    index = np.full(len(trace) + 1, -1, np.int64)
    index[trace.ops.row] = np.arange(len(trace.ops.row))
    at = np.where(annotation >= 0, index[annotation], -1)
    shapes = (_column(trace.ops.dims, at), _column(trace.ops.types, at))
    first, number = distinct_rows(*shapes)
    known_shapes = zip(*(column[first].tolist() for column in shapes), strict=True)
    parts = np.array([own_bytes(trace.text(dims), trace.text(types)) for dims, types in known_shapes], np.int64)
    mine = parts[number]
    scaled = np.where(np.isin(op, PARTS), np.where(members > 0, mine * members, -1), mine)
    return np.where(out >= 0, out, np.where(mine >= 0, scaled, -1))
