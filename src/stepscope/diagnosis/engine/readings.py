"""Readings: the agents' samples as arrays, by host, process, GPU and rank, taken in steady steps.

A host is identified by its name, a process by host and pid, a GPU by its uuid: torch numbers the devices that
CUDA_VISIBLE_DEVICES leaves, NVML those of the machine.  A GPU that is not known to be the job's own is left out, unless
the ranks of its host must be using all of them.

For hosts and GPUs only samples of steady steps are used; for processes all of the window's, because growth of memory is
measured by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine import thresholds
from stepscope.diagnosis.engine.probes import ProbeSamples
from stepscope.diagnosis.engine.samples import LARGEST, number
from stepscope.diagnosis.engine.view import View
from stepscope.diagnosis.engine.window import Window
from stepscope.records.identity import RankIdentity

__all__ = [
    "Gpu",
    "Readings",
    "at_steps",
    "gpu_readings",
    "gpus_in_use",
    "host_readings",
    "in_steady_steps",
    "last_of_rows",
    "network_readings",
    "probe_samples",
    "process_readings",
    "row_medians",
    "spaced",
]


# -- steady samples ---------------------------------------------------------------------------------------------------
# Which samples were taken in steady steps, not while the script imported, started up, compiled or warmed up.
#
# Times of steps and of samples both come from the wall clock of their machine; the store has moved both onto the hub's
# clock by the same offset, so they can be compared whatever the clocks of other nodes show.
#
# A sample covers the time before it: NVML's utilization and power are means over up to a second, and a host's rates
# count from the previous sample.  So a sample counts only if the second before it was steady too.

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def in_steady_steps(window: Window, rows: Iterable[int], wall_ns: Floats) -> Bools:
    """By sample: whether it covers a steady step of one of these ranks (rows of the window), and no warm-up or compile
    step of any of them.

    Ranks that have ended, or have not begun yet, are ignored.
    """
    at = np.fromiter(rows, np.intp)[:, None]
    since_ns = wall_ns - thresholds.SAMPLE_LOOKS_BACK_S * 1e9
    inside = (since_ns >= window.begin_wall_ns[at]) & (wall_ns <= window.last_wall_ns[at])
    apart = np.zeros_like(inside)
    for begins_ns, ends_ns in window.apart_wall_ns:
        apart |= (wall_ns >= begins_ns[at]) & (since_ns <= ends_ns[at])
    return np.asarray((inside & ~apart).any(axis=0) & ~apart.any(axis=0), np.bool_)


def spaced(wall_ns: Floats, spans_s: Floats | None = None) -> Bools:
    """By sample of one source: select samples about a second apart.

    The agent takes more in the first seconds of a run; without this they would outweigh the rest.  In a long run those
    of earlier hours are thinned (``spans_s``: the seconds that each represents): then all are spaced as widely as
    these.
    """
    out = np.zeros(len(wall_ns), np.bool_)
    if len(wall_ns):
        spans_s = np.zeros(0) if spans_s is None else spans_s
        apart_s = np.fmax.reduce(spans_s, initial=thresholds.SAMPLES_APART_S)
        numbers = np.floor((wall_ns - np.fmin.reduce(wall_ns)) / (apart_s * 1e9))
        out[np.unique(numbers, return_index=True)[1]] = True
    return out


# -- samples by owner -------------------------------------------------------------------------------------------------

Columns = Mapping[str, Sequence[Any]]
Key = tuple[object, ...]
NoneType = type(None)
SAMPLE_KEYS = {
    "host": (
        "wall_ns", "span_s", "node", "cpu_percent", "own_cpu_percent", "cpu_count", "procs_running", "load1",
        "cpu_pressure", "mem_total", "mem_available", "swap_used", "memory_pressure",
    ),
    "process": ("wall_ns", "node", "pid", "cpu_percent", "rss", "rss_file", "rss_answers"),
    "gpu": (
        "wall_ns", "span_s", "node", "uuid", "index", "name", "util_percent", "mem_used", "mem_total", "sm_clock_mhz",
        "throttle_reasons",
    ),
    "probe": ("wall_ns", "node", "peer", "sent", "lost", "rtt_us_p50"),
}  # fmt: skip
"""The keys that the rules need from the samples, by kind."""
NETWORK_KEYS = (
    "wall_ns", "node", "net_errors_ps", "net_drops_ps", "net_speed_bps", "tcp_out_ps", "tcp_retrans_ps", "ib_speed_bps",
)  # fmt: skip
"""The same for a host's network."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    node: str
    index: int | None
    """NVML's."""
    name: str
    rows: tuple[int, ...]
    """Rows of the view: the ranks on it; empty if it is only known that some rank of its host uses it."""
    total_bytes: float
    """Its memory; nan if unknown."""


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Samples of N things, each in order of time: every key is an array [N, T], nan where there is no value."""

    count: int
    owner: NDArray[np.intp]
    """By line: its owner, 0 … N-1."""
    order: NDArray[np.intp]
    """By line: its index in the columns."""
    columns: Columns

    @cached_property
    def _places(self) -> NDArray[np.intp]:
        """By line: its position among the lines of its owner."""
        taken = np.bincount(self.owner, minlength=self.count) if len(self.owner) else np.zeros(self.count, np.intp)
        by_owner = np.argsort(self.owner, kind="stable")
        out = np.empty(len(self.owner), np.intp)
        out[by_owner] = np.arange(len(self.owner)) - np.repeat(np.cumsum(taken) - taken, taken)
        return out

    def of(self, key: str) -> Floats:
        out = np.full((self.count, int(self._places.max(initial=-1)) + 1), np.nan)
        out[self.owner, self._places] = _numbers(self.columns[key])[self.order]
        return out

    def lines(self, key: str) -> list[Any]:
        """Raw values by line, in the order of ``owner``."""
        column = self.columns[key]
        return [column[at] for at in self.order]


def host_readings(view: View) -> tuple[list[str], Readings]:
    """The hosts of the ranks, in the order of ranks."""
    hosts = list(dict.fromkeys(view.hosts))
    columns = _columns(view.window.lines.get("host", ()), SAMPLE_KEYS["host"])
    keys, which = _distinct(columns, "node")
    readings = _readings(columns, which, keys, {(host,): index for index, host in enumerate(hosts)})
    on_host = [[row for row, name in enumerate(view.hosts) if name == host] for host in hosts]
    return hosts, _in_steady_steps_only(view, readings, on_host)


def network_readings(view: View) -> Readings:
    """Like ``host_readings``, with the network figures."""
    hosts = dict.fromkeys(view.hosts)
    columns = _columns(view.window.lines.get("host", ()), NETWORK_KEYS)
    keys, which = _distinct(columns, "node")
    return _readings(columns, which, keys, {(host,): index for index, host in enumerate(hosts)})


def probe_samples(view: View) -> ProbeSamples:
    """What the agents of the ranks' hosts reported about each other, hosts numbered in the order of ranks."""
    columns = _columns(view.window.probes, SAMPLE_KEYS["probe"])
    numbers: dict[object, int] = {host: number for number, host in enumerate(dict.fromkeys(view.hosts))}
    ends = [np.array([numbers.get(_name(host), -1) for host in columns[key]], np.intp) for key in ("node", "peer")]
    wall_ns, sent, lost, rtt_us = (_numbers(columns[key]) for key in ("wall_ns", "sent", "lost", "rtt_us_p50"))
    makes_sense = (sent > 0) & (lost >= 0) & (lost <= sent) & (wall_ns > 0) & ~(rtt_us < 0)
    keep = makes_sense & (ends[0] >= 0) & (ends[1] >= 0)
    return ProbeSamples(
        wall_ns=wall_ns[keep],
        node=ends[0][keep],
        peer=ends[1][keep],
        sent=sent[keep],
        lost=lost[keep],
        rtt_us=np.where(lost < sent, rtt_us, np.nan)[keep],
    )


def process_readings(view: View) -> Readings:
    """One row for each rank of the view."""
    columns = _columns(view.window.lines.get("process", ()), SAMPLE_KEYS["process"])
    keys, which = _distinct(columns, "node", "pid")
    ranks = [(identity.host, identity.pid) for identity in _identities(view)]
    same = Counter(ranks)  # in containers with equal host names, two ranks may have the same process id
    rows = {rank: row for row, rank in enumerate(ranks) if same[rank] == 1}
    return _readings(columns, which, keys, rows, count=len(ranks))


def gpu_readings(view: View) -> tuple[list[Gpu], Readings]:
    """The GPUs that the job's ranks use, with samples about a second apart."""
    columns = _columns(view.window.lines.get("gpu", ()), SAMPLE_KEYS["gpu"])
    keys, which = _distinct(columns, "node", "uuid", "index", "name")
    identities = _identities(view)
    used = gpus_in_use(identities, keys)
    readings = _readings(columns, which, keys, {key: index for index, key in enumerate(used)})
    totals = np.fmax.reduce(readings.of("mem_total"), axis=1, initial=np.nan)
    gpus = [
        Gpu(
            node=str(node),
            index=index if isinstance(index, int) else None,
            name=name if isinstance(name, str) else "",
            rows=tuple(rows),
            total_bytes=float(total) if total > 0 else np.nan,
        )
        for ((node, _, index, name), rows), total in zip(used.items(), totals, strict=True)
    ]
    of_host = {host: [row for row, one in enumerate(identities) if one.host == host] for host in set(view.hosts)}
    on_gpu = [gpu.rows or of_host[gpu.node] for gpu in gpus]
    return gpus, _in_steady_steps_only(view, readings, on_gpu, far_apart=True)


def gpus_in_use(identities: Sequence[RankIdentity], keys: Sequence[Key]) -> dict[Key, list[int]]:
    """The GPUs (node, uuid, index, name) that ranks use, with the rows of those ranks if known."""
    users: dict[str, list[int]] = {}
    by_uuid: dict[tuple[object, str], list[int]] = {}
    for row, identity in enumerate(identities):
        if identity.device == "cuda":
            users.setdefault(identity.host, []).append(row)
            if identity.device_uuid:
                by_uuid.setdefault((identity.host, _bare(identity.device_uuid)), []).append(row)
    used: dict[Key, list[int]] = {}
    for key in keys:
        if rows := by_uuid.get((key[0], _bare(key[1]))):
            used[key] = rows
    told = {key[0] for key in used}
    seen = Counter(key[0] for key in keys)
    for key in keys:
        node = key[0]
        if node in users and node not in told and seen[node] <= len(users[str(node)]):
            used[key] = users[str(node)] if seen[node] == 1 else []
    return used


def at_steps(view: View, wall_ns: Floats) -> Floats:
    """[R, T]; times of each rank's own machine as step numbers, with fractions."""
    out = np.full_like(wall_ns, np.nan)
    steps = view.window.steps.astype(np.float64)
    for row, index in enumerate(view.rows):
        ends = view.window.end_wall_ns[index]
        there = ~np.isnan(ends)
        if there.any():
            # nan stays nan; times before the first and after the last step are clamped to them.
            out[row] = np.interp(wall_ns[row], ends[there], steps[there])
    return out


def row_medians(values: Floats) -> Floats:
    """[N]; medians of the rows, ignoring nan; nan for an empty row."""
    if not values.shape[1]:
        return np.full(len(values), np.nan)
    ordered = np.sort(values, axis=1)  # nan last
    counts = (~np.isnan(values)).sum(axis=1)
    rows = np.arange(len(values))
    low, high = np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, values.shape[1] - 1)
    return np.asarray((ordered[rows, low] + ordered[rows, high]) / 2, np.float64)


def last_of_rows(values: Floats) -> Floats:
    """[N]; the last value of each row that is not nan."""
    out = np.full(len(values), np.nan)
    for column in values.T:
        out = np.where(np.isnan(column), out, column)
    return out


def _identities(view: View) -> list[RankIdentity]:
    return [view.window.identities[index] for index in view.rows]


def _columns(lines: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> Columns:
    """Collect the keys of all lines.

    Each line is read once: there may be a hundred thousand of them, far apart in memory.  No object per line is
    created, which would keep the garbage collector busy for longer than everything else.
    """
    columns: dict[str, list[Any]] = {key: [] for key in keys}
    adders = [(key, column.append) for key, column in columns.items()]
    for line in lines:
        get = line.get
        for key, add in adders:
            add(get(key))
    return columns


def _distinct(columns: Columns, *names: str) -> tuple[list[Key], NDArray[np.intp]]:
    """The distinct keys of the lines, and which one each line has; None for parts that are not a string or integer."""
    which = np.zeros(len(columns[names[0]]), np.intp)
    for name in names:
        known: dict[object, int] = {}
        column = columns[name]
        if not set(map(type, column)) <= {str, int}:
            column = [_name(part) for part in column]
        own = np.array([known.setdefault(part, len(known)) for part in column], np.intp)
        which = np.unique(which * max(len(known), 1) + own, return_inverse=True)[1]
    first = np.unique(which, return_index=True)[1]
    return [tuple(_name(columns[name][at]) for name in names) for at in first], which


def _in_steady_steps_only(
    view: View, readings: Readings, rows: Sequence[Sequence[int]], *, far_apart: bool = False
) -> Readings:
    """Drop samples outside the steady steps of the ranks (``rows`` of the view, by owner)."""
    wall_ns = _numbers(readings.columns["wall_ns"])[readings.order]
    spans_s = _numbers(readings.columns["span_s"])[readings.order]
    keep = np.zeros(len(wall_ns), np.bool_)
    by_owner = np.argsort(readings.owner, kind="stable")
    ends = np.cumsum(np.bincount(readings.owner, minlength=readings.count))
    for lines, own in zip(np.split(by_owner, ends[:-1]), rows, strict=False):
        taken = lines[in_steady_steps(view.window, view.rows[list(own)].tolist(), wall_ns[lines])]
        # Samples of earlier hours are thinned: without this the last hour would outweigh all of them.
        thinned = bool((spans_s[taken] > 0).any())
        keep[taken[spaced(wall_ns[taken], spans_s[taken])] if far_apart or thinned else taken] = True
    return Readings(
        count=readings.count, owner=readings.owner[keep], order=readings.order[keep], columns=readings.columns
    )


def _name(value: object) -> str | int | None:
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


def _readings(
    columns: Columns,
    which: NDArray[np.intp],
    keys: Sequence[Key],
    owners: Mapping[Any, int],
    *,
    count: int | None = None,
) -> Readings:
    """Sort by time, and drop lines without an owner.  ``count``: how many rows there are, if not one per owner."""
    owner = np.array([owners.get(key, -1) for key in keys], np.intp)[which]
    order = np.argsort(_numbers(columns["wall_ns"]), kind="stable")
    order = order[owner[order] >= 0]
    return Readings(count=len(owners) if count is None else count, owner=owner[order], order=order, columns=columns)


def _numbers(values: Sequence[Any]) -> Floats:
    """Convert to an array, with nan for anything that is not a number."""
    if set(map(type, values)) <= {float, int, NoneType}:
        try:
            column = np.array(values, np.float64)
        except OverflowError:
            pass
        else:
            column[~(np.abs(column) < LARGEST)] = np.nan
            return column
    known = (number({"": value}, "") for value in values)
    return np.array([np.nan if value is None else value for value in known], np.float64)


def _bare(uuid: object) -> str:
    """Strip the prefix of NVML's ``GPU-…``, which torch omits."""
    return uuid.removeprefix("GPU-") if isinstance(uuid, str) else ""
