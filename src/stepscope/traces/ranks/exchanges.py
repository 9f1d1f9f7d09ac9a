"""The collectives of one rank, by time: all that comparing ranks needs of its trace.

On a device a collective is its kernel.  What it is stands on the kernel itself, else on the host's slice
(``record_param_comms``, ``nccl:all_reduce``) that holds the call which launched it, else in the kernel's name.

Gloo and MPI run on threads of the host.  torch's ``gloo:all_reduce`` annotation stands on gloo's own thread
(``pt_gloo_runloop``), from when that thread takes the collective up until it is done: waiting for the others is in it.
``c10d::allreduce_`` on the thread that calls is the handing over and says nothing of the duration.  What is not told is
the process group.  Every group has threads of its own, two, made with the group: sorted, they are in the order of
``pg_config``.  If that does not come out even, the group stays unknown, and the collective cannot be compared.

Bytes are the same on all ranks of a collective: of what is reduced or broadcast the tensor, of a gather or scatter all
ranks' parts together; only those of an all-to-all are this rank's own input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.device.temporal import device_spans
from stepscope.traces.model import intervals
from stepscope.traces.model.calls import holders
from stepscope.traces.model.categories import HOST_KINDS, Kind
from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.model.kernel_names import is_communication
from stepscope.traces.model.window import Window
from stepscope.traces.ranks.exchange_groups import Group, groups_of
from stepscope.traces.ranks.exchange_names import OPS, op_of, own_bytes, size_of
from stepscope.traces.ranks.host_times import HostTimes, host_compute, host_times

__all__ = ["Exchanges", "exchanges_of"]

BY_HOST = ("gloo:", "mpi:")
"""Annotations that last as long as the collective does."""
LAUNCHED = ("nccl:", "rccl:", "xccl:", "hccl:", "mccl:", "cncl:", "ucc:")
"""Annotations that last as long as the call."""
PARTS = tuple(OPS.index(op) for op in ("all_gather", "gather"))
"""The input is this rank's part of the whole."""


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """All arrays are as long as there are collectives, sorted by start."""

    groups: tuple[Group, ...]
    row: Rows
    """Of the slice in the trace."""
    op: NDArray[np.int8]
    """Index of ``exchange_names.OPS``."""
    group: NDArray[np.int32]
    """Index of ``groups``; −1: the trace does not say which."""
    sequence: Ints
    """Of the group's collectives; −1: not said, as of ``bytes``."""
    bytes: Ints
    start_ns: Ints
    """Absolute: ``TraceMeta.origin_ns`` is in it."""
    end_ns: Ints
    step: NDArray[np.int32]
    """Index of the rank's steps; −1: in none."""
    overlap_ns: Ints
    """The part of it during which this rank computed."""
    stream: NDArray[np.int32]
    """−1: on a thread of the host."""
    host: HostTimes | None = None
    """Of a rank that has no device work."""

    def __len__(self) -> int:
        return len(self.row)


def exchanges_of(window: Window, rank: int) -> Exchanges:
    """``rank``: tells which of the file's groups this process is in, where it lists others."""
    slices, origin_ns = window.trace.slices, window.trace.meta.origin_ns
    named = window.trace.names_where(lambda name: name.startswith(BY_HOST))[slices.name]
    on_host = np.flatnonzero(named & window.counts & np.isin(slices.kind, HOST_KINDS))
    on_device = window.rows_of((Kind.KERNEL,))
    on_device = on_device[window.trace.names_where(is_communication)[slices.name[on_device]]]
    rows = np.sort(np.concatenate([on_host, on_device])).astype(np.int32)
    said, annotation = _sources(window, rows)
    op = _ops(window, rows, said, annotation)
    groups, group = groups_of(window, rows, said, rank)
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
        sequence=_column(window.trace.collectives.sequence, said),
        bytes=_bytes(window, said, annotation, op, np.array([-1, *(each.size for each in groups)])[group + 1]),
        start_ns=start_ns + origin_ns,
        end_ns=end_ns + origin_ns,
        step=window.step_of[rows],
        overlap_ns=overlap_ns,
        stream=slices.stream[rows],
        host=host,
    )


def _column(values: NDArray[np.int64] | NDArray[np.int32], index: NDArray[np.int64]) -> Ints:
    """Of a side table; −1 where there is nothing."""
    return np.append(values, -1).astype(np.int64)[index]


def _sources(window: Window, rows: Rows) -> tuple[NDArray[np.int64], Rows]:
    """[rows]; where ``Trace.collectives`` tells of it, and the annotation that does; −1: nowhere."""
    trace = window.trace
    index = np.full(len(trace) + 1, -1, np.int64)
    index[trace.collectives.row] = np.arange(len(trace.collectives.row))
    said = index[rows]
    launched = trace.slices.device[rows] >= 0
    annotation = np.where(launched, -1, rows)
    call = np.where(launched & (said < 0), window.launch[rows], -1)
    if (call >= 0).any():
        on_host = np.isin(trace.slices.kind, HOST_KINDS) & window.counts
        is_said = on_host & (index[:-1] >= 0)
        said = np.where(said >= 0, said, index[holders(window.calls, is_said, call)])
        annotates = on_host & trace.names_where(lambda name: name.startswith(LAUNCHED))[trace.slices.name]
        annotation = np.where(launched, holders(window.calls, annotates, call), annotation)
    return said, annotation.astype(np.int32)


def _ops(window: Window, rows: Rows, said: NDArray[np.int64], annotation: Rows) -> NDArray[np.int8]:
    trace = window.trace
    names = np.append(trace.slices.name, -1)
    table = _column(trace.collectives.op, said)
    out = np.zeros(len(rows), np.int8)
    for codes in (table, names[annotation], names[rows]):
        known, inverse = np.unique(codes, return_inverse=True)
        found = np.array([op_of(trace.text(int(code))) for code in known], np.int8)
        out = np.where(out == 0, found[inverse], out)
    # A kernel that sends and receives may be an all-to-all or none: as its like are where the trace says so.
    for kernel in np.unique(names[rows[out == 0]]):
        same = names[rows] == kernel
        like = np.unique(out[same & (out > 0)])
        if len(like) == 1:
            out[same] = like[0]
    return out


def _bytes(
    window: Window, said: NDArray[np.int64], annotation: Rows, op: NDArray[np.int8], members: NDArray[np.int64]
) -> Ints:
    """``members``: [n]; how many ranks take part; −1: not known."""
    trace = window.trace
    table = trace.collectives
    known, inverse = np.unique(_column(table.dtype, said), return_inverse=True)
    each = np.array([size_of(trace.text(int(code))) for code in known], np.int64)[inverse]
    taken, given = _column(table.in_elements, said), _column(table.out_elements, said)
    whole = np.where(np.isin(op, [OPS.index("all_to_all")]), taken, np.maximum(taken, given))
    out = np.where((whole >= 0) & (each > 0), whole * each, -1)
    index = np.full(len(trace) + 1, -1, np.int64)
    index[trace.ops.row] = np.arange(len(trace.ops.row))
    at = np.where(annotation >= 0, index[annotation], -1)
    shapes = np.stack([_column(trace.ops.dims, at), _column(trace.ops.types, at)], axis=1)
    known, inverse = np.unique(shapes, axis=0, return_inverse=True)
    parts = np.array([own_bytes(trace.text(int(dims)), trace.text(int(types))) for dims, types in known], np.int64)
    mine = parts[inverse.reshape(-1)] if len(parts) else np.empty(0, np.int64)
    scaled = np.where(np.isin(op, PARTS), np.where(members > 0, mine * members, -1), mine)
    return np.where(out >= 0, out, np.where(mine >= 0, scaled, -1))
