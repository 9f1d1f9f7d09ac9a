"""The newest sample of each host, process and GPU of a run, and what they show of the whole job.

    lines = live.received.newest(SAMPLES, MOST_LINES)      # in the event loop: no line is parsed there
    latest = latest_samples(lines)                          # in any thread
    columns = SampleColumns(latest)
    columns.spreads()                                       # of the job
    columns.of_nodes("gpu_power_watts")                     # of each node

Thousands of GPUs become a few numbers: the lowest, the median and the highest.  A line may come from anybody: one with
a value of another type is skipped.  Each field is read from the samples once, as a column: 512 nodes have 9,000 of
them, and reading them twice takes longer than all that is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
    "NodeSamples",
    "Process",
    "SampleColumns",
    "Spread",
    "Stretch",
    "latest_samples",
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
    hosts: dict[int, Host]
    """By 0; empty if there is no sample of the host."""
    processes: dict[int, Process]
    """By process ID."""
    gpus: dict[int, Gpu]
    """By index."""

    @property
    def host(self) -> Host | None:
        return self.hosts.get(0)

    def drop_before(self, wall_ns: int) -> None:
        self.hosts = {key: own for key, own in self.hosts.items() if own.wall_ns >= wall_ns}
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
    walls_ns: list[int] = []
    for node, own in lines:
        hosts: dict[int, Host] = {}
        processes: dict[int, Process] = {}
        gpus: dict[int, Gpu] = {}
        for line, offset_ns in own:
            sample = _parsed(line)
            if type(sample) is Gpu:
                newest: Sample = gpus.setdefault(sample.index, sample)
            elif type(sample) is Process:
                newest = processes.setdefault(sample.pid, sample)
            elif type(sample) is Host:
                newest = hosts.setdefault(0, sample)
            else:
                continue
            if newest is sample:
                sample.wall_ns -= offset_ns
                walls_ns.append(sample.wall_ns)
            elif hosts:
                break  # an agent writes a host with its processes and GPUs: the newest of each has been seen
        found[node] = NodeSamples(hosts=hosts, processes=processes, gpus=gpus)
    oldest_ns = max(walls_ns, default=0) - OLD_NS
    if min(walls_ns, default=0) < oldest_ns:
        for samples in found.values():
            samples.drop_before(oldest_ns)
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


# -- quantities -------------------------------------------------------------------------------------------------------

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


# -- columns ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The lowest, median and highest value of a node's sources, by node; NaN where it has none."""

    min: NDArray[np.float64]
    p50: NDArray[np.float64]
    max: NDArray[np.float64]
    sum: NDArray[np.float64]


class SampleColumns:
    """The newest samples of all nodes, in the order of ``nodes``, as columns."""

    def __init__(self, nodes: Mapping[str, NodeSamples]) -> None:
        own = list(nodes.values())
        self.row_of = {name: row for row, name in enumerate(nodes)}
        """By name, the row of a node."""
        self.hosts = _Kind([list(node.hosts.values()) for node in own])
        self.processes = _Kind([list(node.processes.values()) for node in own])
        self.gpus = _Kind([list(node.gpus.values()) for node in own])

    @property
    def throttled(self) -> NDArray[np.bool_]:
        """[GPU]: whether it reports a reason for a lower clock."""
        reasons = map(attrgetter("throttle_reasons"), self.gpus.sources)
        return np.fromiter(map(bool, reasons), np.bool_, len(self.gpus.sources))

    def spreads(self) -> tuple[Spread, ...]:
        """Return the quantities that at least one source has."""
        return tuple(
            spread
            for kind, quantities in (
                (self.gpus, GPU_SPREADS),
                (self.hosts, HOST_SPREADS),
                (self.processes, PROCESS_SPREADS),
            )
            for spread in _spreads(quantities, kind)
        )

    def of_hosts(self, field: str) -> Column:
        """[node]: a field of its host; NaN if it has no host, or not this field."""
        found = np.full(len(self.row_of), np.nan)
        found[self.hosts.row] = self.hosts.column(field)
        return found

    def of_gpus(self, name: str) -> Stretch:
        """``name``: of ``GPU_SPREADS``."""
        return self.gpus.stretch(self.gpus.values(GPU_SPREADS[name]))

    def memory_of_ranks(self) -> Column:
        """[node]: the memory of all its ranks; NaN if it is not known."""
        return self.processes.stretch(self.processes.values(PROCESS_SPREADS["rank_memory_bytes"])).sum


class _Kind:
    """The sources of one kind."""

    def __init__(self, by_node: Sequence[Sequence[Sample]]) -> None:
        self.sources = [source for own in by_node for source in own]
        self.counts = np.fromiter(map(len, by_node), np.intp, len(by_node))
        self.row = np.repeat(np.arange(len(by_node)), self.counts)
        """[source]: the row of its node."""
        self._place = np.arange(len(self.sources)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        self.column = cache(self._column)
        """By name of a field, [source]; NaN where a source does not have it."""

    def _column(self, name: str) -> Column:
        return np.array(list(map(attrgetter(name), self.sources)), np.float64)

    def values(self, of: Callable[[Columns], Column]) -> Column:
        with np.errstate(divide="ignore", invalid="ignore"):
            return of(self.column)

    def stretch(self, values: Column) -> Stretch:
        table = np.full((len(self.counts), int(self.counts.max(initial=1))), np.nan)
        table[self.row, self._place] = values
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


def _spreads(quantities: Mapping[str, Callable[[Columns], Column]], kind: _Kind) -> Iterator[Spread]:
    for name, of in quantities.items():
        values = kind.values(of)
        known = np.sort(values[np.isfinite(values)])
        if count := len(known):
            p50 = float((known[(count - 1) // 2] + known[count // 2]) / 2)
            yield Spread(name=name, min=float(known[0]), p50=p50, max=float(known[-1]), count=count)
