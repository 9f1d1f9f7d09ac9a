"""The host's side of one rank in a few figures: what rules ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from stepscope.traces.host.facts import HostFacts, host_facts
from stepscope.traces.host.memory_curve import MemoryCurve
from stepscope.traces.host.pauses import Pause, pauses_of
from stepscope.traces.host.stops import PythonStop, stops_of
from stepscope.traces.host.syncs import SyncPlace
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Rows
from stepscope.traces.model.naming import named
from stepscope.traces.model.runtime_names import is_synchronising
from stepscope.traces.model.window import Window

__all__ = ["HostFigures", "Pause", "PythonStop", "SyncPlace", "host_figures"]

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
    """Nanoseconds, one for each step that counts."""
    loading_workers: bool | None
    """Whether worker processes load; None: the trace does not say."""
    syncs: tuple[SyncPlace, ...]
    """Where the host waits for the device, the most costly first."""
    pauses: tuple[Pause, ...]
    """Garbage collections, by time."""
    longest_call: tuple[str, int] | None
    """Of the runtime, not to wait for the device: its name and nanoseconds."""
    stops: tuple[PythonStop, ...]
    """Where the main thread ran Python, or slept, for a millisecond and more; the longest first."""
    compile_ns: int
    recompiles: int
    graph_breaks: int
    """Compiled regions entered from inside another in one step, in the step with the most."""
    compiled_regions: int
    """Different ones that ran."""
    peak_allocated_bytes: int | None
    """Of the device's memory, as all below; None: not in the trace."""
    reserved_at_peak_bytes: int | None
    peak_reserved_bytes: int | None
    device_memory_bytes: int | None
    """What the device has."""
    flops: int | None
    """Of all steps that count; None where shapes are missing."""
    mfu: float | None
    """Share of the device's peak, 0 to 1."""
    uses_data_parallel: bool
    """``nn.DataParallel``: one process, many devices."""
    ddp_backend: str | None
    """Of ``DistributedDataParallel``, where it is used and known."""


def host_figures(window: Window, facts: HostFacts | None = None, exchanged: Rows = NO_ROWS) -> HostFigures:
    """``facts``: where they are known already; ``exchanged``: slices of collectives."""
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
        uses_data_parallel=any(DATA_PARALLEL.match(name) for name in names),
        ddp_backend=_backend(window) if distributed else None,
    )


def _longest(window: Window) -> tuple[str, int] | None:
    slices = window.trace.slices
    rows = window.rows_of((Kind.RUNTIME,))
    rows = rows[~named(window.trace, rows, is_synchronising)]
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
