"""The newest sample of each host, process and GPU of a run, and what they show of the whole job.

    lines = live.received.newest(SAMPLES, MOST_LINES)      # in the event loop: no line is parsed there
    latest = latest_samples(lines)                          # in any thread
    spreads_of(latest.values())

Thousands of GPUs become a few numbers: the lowest, the median and the highest.  A line may come from anybody: one with
a value of another type is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from stepscope.hub.live.lines import Line

__all__ = [
    "MOST_LINES",
    "SPREADS",
    "Gpu",
    "Host",
    "NodeGpus",
    "NodeSamples",
    "Process",
    "Spread",
    "Stretch",
    "latest_samples",
    "spreads_of",
]

MOST_LINES = 64
"""The lines of one node that are read, from the newest on: a second of 8 ranks, and of 8 GPUs sampled five times."""
OLD_NS = 60 * 10**9
"""A sample that is older than the newest of the job by more than this belongs to a node or process that is gone."""
Number = float | None


class Host(msgspec.Struct, tag_field="kind", tag="host", gc=False):
    wall_ns: int = 0
    cpu_percent: Number = None
    mem_total: Number = None
    mem_available: Number = None
    swap_used: Number = None
    net_rx_bps: Number = None
    net_tx_bps: Number = None
    net_errors_ps: Number = None
    net_drops_ps: Number = None
    tcp_retrans_ps: Number = None
    ib_rx_bps: Number = None
    ib_tx_bps: Number = None
    ib_errors_ps: Number = None
    disk_read_bps: Number = None
    disk_write_bps: Number = None
    cpu_pressure: Number = None
    io_pressure: Number = None
    memory_pressure: Number = None


class Process(msgspec.Struct, tag_field="kind", tag="process", gc=False):
    wall_ns: int = 0
    pid: int = 0
    rss: Number = None
    rss_file: Number = None
    cpu_wait: Number = None


class Gpu(msgspec.Struct, tag_field="kind", tag="gpu", gc=False):
    wall_ns: int = 0
    index: int = 0
    util_percent: Number = None
    mem_used: Number = None
    mem_total: Number = None
    temperature_c: Number = None
    power_w: Number = None
    sm_clock_mhz: Number = None
    throttle_reasons: list[str] | None = None


Sample = Host | Process | Gpu
_DECODER = msgspec.json.Decoder(Sample)


@dataclass(kw_only=True)
class NodeSamples:
    host: Host | None = None
    processes: dict[int, Process] = field(default_factory=dict)
    """By process ID."""
    gpus: dict[int, Gpu] = field(default_factory=dict)
    """By index."""
    oldest_ns: int = (1 << 63) - 1
    """Of all of them."""

    def drop_before(self, wall_ns: int) -> None:
        if self.host is not None and self.host.wall_ns < wall_ns:
            self.host = None
        self.processes = {key: own for key, own in self.processes.items() if own.wall_ns >= wall_ns}
        self.gpus = {key: own for key, own in self.gpus.items() if own.wall_ns >= wall_ns}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of one quantity over all hosts, processes or GPUs that have it."""

    name: str
    min: float
    p50: float
    max: float
    count: int


def latest_samples(lines: Iterable[tuple[str, Sequence[tuple[Line, int]]]]) -> dict[str, NodeSamples]:
    """By node.  ``lines``: of each node the newest first, with how far its clock is ahead."""
    found: dict[str, NodeSamples] = {}
    newest_ns = 0
    for node, own in lines:
        samples = found[node] = NodeSamples()
        for line, offset_ns in own:
            sample = _parsed(line)
            if sample is None:
                continue
            wall_ns = sample.wall_ns = sample.wall_ns - offset_ns
            kind = type(sample)
            if kind is Gpu:
                new = samples.gpus.setdefault(sample.index, sample) is sample  # type: ignore[union-attr,arg-type]
            elif kind is Process:
                new = samples.processes.setdefault(sample.pid, sample) is sample  # type: ignore[union-attr,arg-type]
            elif new := samples.host is None:
                samples.host = sample  # type: ignore[assignment]
            if not new and samples.host is not None:
                break  # an agent writes a host with its processes and GPUs: the newest of each has been seen
            if new and wall_ns < samples.oldest_ns:
                samples.oldest_ns = wall_ns
            newest_ns = max(newest_ns, wall_ns)
    for samples in found.values():
        if samples.oldest_ns < newest_ns - OLD_NS:
            samples.drop_before(newest_ns - OLD_NS)
    return found


def _parsed(line: Line) -> Sample | None:
    try:
        if isinstance(line, dict):
            converted: Sample = msgspec.convert(line, Sample)
            return converted
        decoded: Sample = _DECODER.decode(line)
        return decoded
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


# -- nodes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The lowest, median and highest value of a node's sources, by node; NaN where it has none."""

    min: NDArray[np.float64]
    p50: NDArray[np.float64]
    max: NDArray[np.float64]
    sum: NDArray[np.float64]


class NodeGpus:
    """The GPUs of each node, side by side."""

    def __init__(self, nodes: Sequence[NodeSamples]) -> None:
        counts = np.array([len(own.gpus) for own in nodes], np.intp)
        self._gpus = [gpu for own in nodes for gpu in own.gpus.values()]
        self._shape = len(nodes), int(counts.max(initial=1))
        self._row = np.repeat(np.arange(len(nodes)), counts)
        self._column = np.arange(len(self._gpus)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.throttled = [sum(bool(gpu.throttle_reasons) for gpu in own.gpus.values()) for own in nodes]
        self.counts: list[int] = counts.tolist()

    def stretch(self, name: str) -> Stretch:
        """``name``: of ``GPU_SPREADS``."""
        table = np.full(self._shape, np.nan)
        table[self._row, self._column] = _values(GPU_SPREADS[name], self._gpus)
        table.sort(axis=1)  # NaN comes last
        known = np.count_nonzero(~np.isnan(table), axis=1)
        rows = np.arange(len(table))
        last = np.maximum(known - 1, 0)
        return Stretch(
            min=table[:, 0],
            p50=(table[rows, last // 2] + table[rows, (last + 1) // 2]) / 2,
            max=table[rows, last],
            sum=np.where(known > 0, np.nansum(table, axis=1), np.nan),
        )


# -- the whole job ----------------------------------------------------------------------------------------------------

Column = NDArray[np.float64]
Columns = Callable[[str], Column]
"""[source]: a field of all sources of a kind; NaN where one does not have it."""


def _faults(host: Columns) -> Column:
    parts = np.stack([host(name) for name in ("net_errors_ps", "net_drops_ps", "ib_errors_ps")])
    return np.where(np.isnan(parts).all(axis=0), np.nan, np.nansum(parts, axis=0))


GPU_SPREADS: dict[str, Callable[[Columns], Column]] = {
    "gpu_utilization_ratio": lambda gpu: gpu("util_percent") / 100,
    "gpu_memory_used_bytes": lambda gpu: gpu("mem_used"),
    "gpu_memory_used_ratio": lambda gpu: gpu("mem_used") / gpu("mem_total"),
    "gpu_temperature_celsius": lambda gpu: gpu("temperature_c"),
    "gpu_power_watts": lambda gpu: gpu("power_w"),
    "gpu_clock_hertz": lambda gpu: gpu("sm_clock_mhz") * 1e6,
}
HOST_SPREADS: dict[str, Callable[[Columns], Column]] = {
    "host_cpu_ratio": lambda host: host("cpu_percent") / 100,
    "host_memory_available_bytes": lambda host: host("mem_available"),
    "host_memory_available_ratio": lambda host: host("mem_available") / host("mem_total"),
    "host_swap_used_bytes": lambda host: host("swap_used"),
    "host_network_receive_bytes_per_second": lambda host: host("net_rx_bps"),
    "host_network_transmit_bytes_per_second": lambda host: host("net_tx_bps"),
    "host_infiniband_receive_bytes_per_second": lambda host: host("ib_rx_bps"),
    "host_infiniband_transmit_bytes_per_second": lambda host: host("ib_tx_bps"),
    "host_network_faults_per_second": _faults,
    "host_tcp_retransmits_per_second": lambda host: host("tcp_retrans_ps"),
    "host_disk_read_bytes_per_second": lambda host: host("disk_read_bps"),
    "host_disk_written_bytes_per_second": lambda host: host("disk_write_bps"),
    "host_cpu_pressure_ratio": lambda host: host("cpu_pressure"),
    "host_io_pressure_ratio": lambda host: host("io_pressure"),
    "host_memory_pressure_ratio": lambda host: host("memory_pressure"),
}
PROCESS_SPREADS: dict[str, Callable[[Columns], Column]] = {
    "rank_memory_bytes": lambda process: process("rss") - np.nan_to_num(process("rss_file")),
    "rank_cpu_wait_ratio": lambda process: process("cpu_wait"),
}
SPREADS = (*GPU_SPREADS, *HOST_SPREADS, *PROCESS_SPREADS)
"""The names of all quantities."""


def spreads_of(nodes: Iterable[NodeSamples]) -> tuple[Spread, ...]:
    """Return the quantities that at least one source has."""
    nodes = list(nodes)
    gpus = [gpu for own in nodes for gpu in own.gpus.values()]
    hosts = [own.host for own in nodes if own.host is not None]
    processes = [process for own in nodes for process in own.processes.values()]
    return (*_spreads(GPU_SPREADS, gpus), *_spreads(HOST_SPREADS, hosts), *_spreads(PROCESS_SPREADS, processes))


def _spreads(quantities: Mapping[str, Callable[[Columns], Column]], sources: Sequence[Sample]) -> Iterator[Spread]:
    for name, of in quantities.items():
        values = _values(of, sources)
        known = values[np.isfinite(values)]
        if len(known):
            p50 = float(np.median(known))
            yield Spread(name=name, min=float(known.min()), p50=p50, max=float(known.max()), count=len(known))


def _values(of: Callable[[Columns], Column], sources: Sequence[Sample]) -> Column:
    with np.errstate(divide="ignore", invalid="ignore"):
        return of(lambda name: np.array(list(map(attrgetter(name), sources)), np.float64))
