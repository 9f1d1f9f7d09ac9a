"""The analysis of one rank: a trace in, one RankAnalysis of bounded size out.

This is what a worker process or a Ray task returns. It therefore contains no columns of the trace, only figures, tables
with a row limit, and what the comparison of ranks needs about each collective.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from stepscope.traces.collective_calls import Exchanges, exchanges_of
from stepscope.traces.device.figures import (
    DeviceFigures,
    Pace,
    device_figures,
    launches_in,
    launches_table,
    pace_of,
    queue_curve,
    queue_table,
    queues_of,
    short_kernels_table,
)
from stepscope.traces.device.kernels import (
    bandwidth_table,
    bytes_of,
    copies_table,
    kernel_classes,
    kernel_types,
    kernels_table,
    sequences_table,
)
from stepscope.traces.device.work import (
    StreamIdle,
    Temporal,
    Work,
    gaps_of,
    idle_by_operator,
    idle_of,
    idle_table,
    temporal_of,
    temporal_steps,
    work_of,
)
from stepscope.traces.host.flops import Flops, flops_found, flops_table
from stepscope.traces.host.interpreter import Contention, contention_of
from stepscope.traces.host.operators import (
    MemoryCurve,
    memory_of,
    memory_peak_table,
    memory_table,
    modules_of,
    modules_table,
    operator_times,
    operators_by_shape,
    operators_by_source,
    operators_table,
    user_annotations,
)
from stepscope.traces.host.optimizers import OptimizerUse, optimizer_use
from stepscope.traces.host.stalls import (
    Compiling,
    Loading,
    Pause,
    PythonStop,
    SyncPlace,
    compiling_of,
    compiling_table,
    holes_table,
    loading_of,
    loading_table,
    pauses_of,
    stops_of,
    syncs_of,
    syncs_table,
)
from stepscope.traces.model.collector import collector_paused
from stepscope.traces.model.columns import Kind, Rows, Trace, TraceMeta, named
from stepscope.traces.model.kernel_names import is_synchronizing
from stepscope.traces.model.tables import Table
from stepscope.traces.model.window import Step, Window, window_of
from stepscope.traces.path.rank_path import RankPath, rank_path
from stepscope.traces.phases import Phases, phases_of, phases_table

__all__ = ["HostFigures", "RankAnalysis", "analyze_rank", "device_tables", "host_facts", "host_figures", "host_tables"]


# -- facts about the host ---------------------------------------------------------------------------------------------
# Shared by the tables and the figures of the host, so that they are computed once.


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    syncs: tuple[SyncPlace, ...]
    """The most costly first."""
    loading: Loading
    compiling: Compiling
    flops: Flops
    curve: MemoryCurve | None
    """None if the trace has no memory events."""


def host_facts(window: Window) -> HostFacts:
    return HostFacts(
        syncs=syncs_of(window),
        loading=loading_of(window),
        compiling=compiling_of(window),
        flops=flops_found(window),
        curve=memory_of(window),
    )


# -- figures of the host ----------------------------------------------------------------------------------------------

DATA_PARALLEL = re.compile(r"^(nn\.Module: )?DataParallel(_\d+$|\.forward$)")
DISTRIBUTED = re.compile(r"^(nn\.Module: )?DistributedDataParallel(_\d+$|\.forward$)|^DistributedDataParallel\.")
BACKEND = re.compile(r"^(nccl|gloo|mpi|ucc|xccl|rccl):")
MAX_SYNCS = 100
NO_ROWS: Rows = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    loading_ns: int
    """Main thread inside a loader's ``__next__``, within steps."""
    loading_by_step: tuple[int, ...]
    """Nanoseconds, one value per step that counts."""
    loading_workers: bool | None
    """Whether worker processes load data; None if the trace does not say."""
    syncs: tuple[SyncPlace, ...]
    """Where the host waits for the device, the most costly first."""
    pauses: tuple[Pause, ...]
    """Garbage collections, in order of time."""
    longest_call: tuple[str, int] | None
    """Name and nanoseconds of the longest runtime call that does not wait for the device."""
    stops: tuple[PythonStop, ...]
    """Where the main thread ran Python, or slept, for a millisecond or more; the longest first."""
    compile_ns: int
    recompiles: int
    graph_breaks: int
    """Compiled regions entered from inside another in one step; the maximum over steps."""
    compiled_regions: int
    """Number of distinct regions that ran."""
    peak_allocated_bytes: int | None
    """Device memory, as all below; None if not in the trace."""
    reserved_at_peak_bytes: int | None
    peak_reserved_bytes: int | None
    device_memory_bytes: int | None
    """Total memory of the device."""
    flops: int | None
    """Of all steps that count; None if shapes are missing."""
    mfu: float | None
    """Share of the device's peak, 0 to 1."""
    optimizer: OptimizerUse
    contention: Contention
    """Python threads other than the one that trains."""
    uses_data_parallel: bool
    """``nn.DataParallel``: one process, many devices."""
    ddp_backend: str | None
    """Backend of ``DistributedDataParallel``, if used and known."""


def host_figures(window: Window, facts: HostFacts | None = None, exchanged: Rows = NO_ROWS) -> HostFigures:
    """Compute the figures; ``facts`` if already known, ``exchanged``: slices of collectives."""
    facts = facts or host_facts(window)
    loading, compiling, flops, curve = facts.loading, facts.compiling, facts.flops, facts.curve
    peak, at_peak, reserved = _memory(curve)
    pauses = pauses_of(window)
    names = window.trace.strings
    distributed = any(DISTRIBUTED.match(name) for name in names)
    return HostFigures(
        loading_ns=loading.total_ns,
        loading_by_step=loading.by_step,
        loading_workers=loading.workers,
        syncs=facts.syncs[:MAX_SYNCS],
        pauses=pauses,
        longest_call=_longest(window),
        stops=stops_of(window, pauses, exchanged),
        compile_ns=compiling.compile_ns,
        recompiles=compiling.recompiles,
        graph_breaks=compiling.graph_breaks,
        compiled_regions=len(compiling.regions),
        peak_allocated_bytes=peak,
        reserved_at_peak_bytes=at_peak,
        peak_reserved_bytes=reserved,
        device_memory_bytes=_device_memory(window, curve),
        flops=flops.total,
        mfu=flops.mfu,
        optimizer=optimizer_use(window),
        contention=contention_of(window),
        uses_data_parallel=any(DATA_PARALLEL.match(name) for name in names),
        ddp_backend=_backend(window) if distributed else None,
    )


def _longest(window: Window) -> tuple[str, int] | None:
    slices = window.trace.slices
    rows = window.rows_of((Kind.RUNTIME,))
    rows = rows[~named(window.trace, rows, is_synchronizing)]
    if not len(rows):
        return None
    row = int(rows[slices.dur_ns[rows].argmax()])
    return window.trace.name(row), int(slices.dur_ns[row])


def _memory(curve: MemoryCurve | None) -> tuple[int | None, int | None, int | None]:
    if curve is None or not curve.absolute or curve.device_type == 0:
        return None, None, None
    return int(curve.allocated[curve.peak]), int(curve.reserved[curve.peak]), int(curve.reserved.max())


def _device_memory(window: Window, curve: MemoryCurve | None) -> int | None:
    devices = window.trace.meta.devices
    wanted = curve.device if curve is not None and curve.device_type > 0 else None
    sizes = [each.get("totalGlobalMem") for each in devices if wanted is None or each.get("id", wanted) == wanted]
    return sizes[0] if sizes and isinstance(sizes[0], int) else None


def _backend(window: Window) -> str | None:
    if window.trace.meta.backend:
        return window.trace.meta.backend
    found = {match.group(1) for name in window.trace.strings if (match := BACKEND.match(name))}
    return min(found) if len(found) == 1 else None


# -- tables of the device ---------------------------------------------------------------------------------------------


def device_tables(window: Window, work: Work | None = None) -> list[Table]:
    """Build all device tables in reading order; without device work only the steps have rows.

    ``work``: if already known.
    """
    work = work_of(window) if work is None else work
    gaps = gaps_of(work)
    launches = launches_in(work)
    queues = queues_of(work, launches)
    sizes = bytes_of(work)
    return [
        temporal_steps(window),
        kernel_types(work),
        idle_table(work, gaps),
        idle_by_operator(work, gaps),
        kernel_classes(work),
        kernels_table(work),
        launches_table(work, launches),
        short_kernels_table(work),
        queue_table(work, queues),
        queue_curve(work, queues),
        copies_table(work, sizes),
        bandwidth_table(work, sizes),
        sequences_table(work),
    ]


# -- tables of the host -----------------------------------------------------------------------------------------------


def host_tables(window: Window, facts: HostFacts | None = None) -> list[Table]:
    """Build the non-empty host tables in reading order; ``facts`` if already known."""
    facts = facts or host_facts(window)
    times = operator_times(window)
    tree, curve = modules_of(window, times), facts.curve
    found = [
        user_annotations(window),
        operators_table(window, times) if len(times.rows) else None,
        operators_by_source(window, times),
        operators_by_shape(window, times),
        modules_table(window, times, tree) if tree is not None else None,
        syncs_table(window, facts.syncs),
        loading_table(window, facts.loading),
        holes_table(window),
        compiling_table(facts.compiling),
        flops_table(window, facts.flops),
        memory_peak_table(window, curve, tree) if curve is not None else None,
        memory_table(window, curve) if curve is not None else None,
    ]
    return [table for table in found if table is not None and table.rows]


# -- analysis of a rank -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankAnalysis:
    rank: int
    meta: TraceMeta
    steps: tuple[Step, ...]
    """The steps that count."""
    left_out: Step | None
    pace: Pace
    """How long a step takes, and what the device does in it."""
    temporal: Temporal
    """All device work that counts, including what earlier steps had queued."""
    idle: dict[str, StreamIdle]
    """By stream, or ``device:stream`` if there are several devices."""
    device: DeviceFigures
    host: HostFigures
    exchanges: Exchanges
    """The rank's collectives."""
    path: RankPath
    phases: Phases
    """How its steps divide into input, forward, backward …"""
    tables: dict[str, Table]
    """By name, in reading order."""

    @property
    def step_numbers(self) -> frozenset[int]:
        """The profiler's numbers of the steps that count; empty without profiler steps."""
        return frozenset(step.number for step in self.steps if step.name)


@collector_paused()
def analyze_rank(trace: Trace, rank: int, *, keep_last: bool = False, only: Collection[int] = ()) -> RankAnalysis:
    """Run all analyses; ``rank`` comes from the file or, if it has none, from the job's numbering.

    ``only``: the numbers of the steps that count, see ``window_of``.
    """
    window = window_of(trace, keep_last=keep_last, only=only)
    exchanges = exchanges_of(window, rank)
    path = rank_path(window, exchanges)
    work, facts = work_of(window), host_facts(window)
    device = device_figures(window, work)
    phases = phases_of(window)
    by_phase = phases_table(phases)
    tables = (
        *([] if by_phase is None else [by_phase]),
        *device_tables(window, work),
        *host_tables(window, facts),
        *path.tables.values(),
    )
    return RankAnalysis(
        rank=rank,
        meta=trace.meta,
        steps=window.steps,
        left_out=window.left_out,
        pace=pace_of(window, device),
        temporal=temporal_of(window),
        idle=idle_of(window, work),
        device=device,
        host=host_figures(window, facts, exchanges.row),
        exchanges=exchanges,
        path=path,
        phases=phases,
        tables={table.name: table for table in tables},
    )
