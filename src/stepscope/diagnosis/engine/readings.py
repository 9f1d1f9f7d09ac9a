"""Readings: the agents' samples as arrays, by host, process, GPU and rank, taken in steady steps.

A host is identified by its name, a process by host and pid, a GPU by its uuid: torch numbers the devices that
CUDA_VISIBLE_DEVICES leaves, NVML those of the machine.  A GPU that is not known to be the job's own is left out, unless
the ranks of its host must be using all of them.

For hosts and GPUs only samples of steady steps are used; for processes all of the window's, because growth of memory is
measured by step.

Network probes between hosts: a table of round trips and losses, and the host or link at fault.

Each host's agent probes others and reports, every few seconds, how many probes were answered and how long that took.
Both directions between two hosts are one path (``way`` in the code).  Time is cut into slices of the interval between
lines, so that one bad second shows in one or two of them.

A host that reports nothing itself is gone, not slow, and a direction without a single answer is blocked by a firewall:
neither is in the table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.samples import LARGEST, number
from stepscope.diagnosis.engine.view import View, computed_once
from stepscope.diagnosis.engine.window import Window
from stepscope.judge import thresholds
from stepscope.records.identity import RankIdentity

__all__ = [
    "Gpu",
    "NetworkFault",
    "ProbeSamples",
    "Readings",
    "at_steps",
    "gpu_readings",
    "gpus_in_use",
    "host_readings",
    "in_steady_steps",
    "last_of_rows",
    "network_faults",
    "network_readings",
    "probe_samples",
    "process_readings",
    "round_trips_of",
    "row_medians",
    "spaced",
]

# -- round trips ------------------------------------------------------------------------------------------------------

MOST_SLICES = 1000
"""Per run: more are merged."""
SHORTEST_SLICE_NS = 1e6


@dataclass(frozen=True, kw_only=True)
class ProbeSamples:
    """The lines of all agents, as columns; hosts by number."""

    wall_ns: Floats
    node: NDArray[np.intp]
    peer: NDArray[np.intp]
    sent: Floats
    lost: Floats
    rtt_us: Floats
    """The median; nan if no probe was answered."""


@dataclass(frozen=True, kw_only=True)
class RoundTrips:
    """P paths between H hosts, in T slices of time."""

    hosts: int
    ends: NDArray[np.intp]
    """[P, 2]"""
    start_ns: float
    slice_ns: float
    sent: Floats
    """[P, T]"""
    lost: Floats
    rtt_us: Floats
    """[P, T]; nan if no probe was answered."""

    def per_host(self, values: Floats) -> Floats:
        """[H, T]; sums over the paths of each host."""
        ends, slices = self.ends.T.ravel(), values.shape[1]
        at = (ends[:, None] * slices + np.arange(slices)).ravel()
        sums = np.bincount(at, np.concatenate([values, values]).ravel(), minlength=self.hosts * slices)
        return np.asarray(sums, np.float64).reshape(self.hosts, slices)

    def period(self, at: slice) -> tuple[float, float]:
        """Begin and end on the wall clock.  A line describes the time before it."""
        return self.start_ns + (at.start - 1) * self.slice_ns, self.start_ns + at.stop * self.slice_ns


def round_trips_of(heard: ProbeSamples, hosts: int) -> RoundTrips | None:
    """None: there is too little to judge."""
    key = heard.node * hosts + heard.peer
    answered = np.bincount(key, heard.sent - heard.lost, minlength=hosts * hosts) > 0
    keep = answered[key] & (heard.node != heard.peer)
    if not keep.any():
        return None
    wall_ns, key = heard.wall_ns[keep], key[keep]
    node, peer, sent, lost, rtt_us = (
        column[keep] for column in (heard.node, heard.peer, heard.sent, heard.lost, heard.rtt_us)
    )
    start_ns = float(wall_ns.min())
    width_ns = _slice_ns(wall_ns, key)
    place = ((wall_ns - start_ns) // width_ns).astype(np.intp)
    count = int(place.max()) + 1
    alive = np.zeros((hosts, count + 2), np.bool_)
    for shift in (0, 1, 2):
        alive[node, place + shift] = True
    there = alive[peer, place + 1]
    if not there.any():
        return None
    node, peer, place, sent, lost, rtt_us = (column[there] for column in (node, peer, place, sent, lost, rtt_us))
    ways, way = np.unique(np.minimum(node, peer) * hosts + np.maximum(node, peer), return_inverse=True)
    at = way * count + place

    def summed(values: Floats) -> Floats:
        sums = np.bincount(at, values, minlength=len(ways) * count)
        return np.asarray(sums, np.float64).reshape(len(ways), count)

    known = ~np.isnan(rtt_us)
    weights = summed(np.where(known, sent - lost, 0.0))
    total = summed(np.where(known, np.nan_to_num(rtt_us) * (sent - lost), 0.0))
    return RoundTrips(
        hosts=hosts,
        ends=np.stack([ways // hosts, ways % hosts], axis=1),
        start_ns=start_ns,
        slice_ns=width_ns,
        sent=summed(sent),
        lost=summed(lost),
        rtt_us=np.where(weights > 0, total / np.maximum(weights, 1.0), np.nan),
    )


def _slice_ns(wall_ns: Floats, key: NDArray[np.intp]) -> float:
    order = np.lexsort((wall_ns, key))
    gaps = np.diff(wall_ns[order])[np.diff(key[order]) == 0]
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    return max(usual, float(np.ptp(wall_ns)) / MOST_SLICES, SHORTEST_SLICE_NS)


# -- faults -----------------------------------------------------------------------------------------------------------
# What is at fault according to the round trips: a host, a link, or the network between all hosts.
#
# *A host* is bad if (nearly) all its paths are worse than the paths without it.  *A link* is one path that is worse
# than all others, with both of its hosts otherwise fine.  *The network* is bad if no host and no link stands out.  A
# round trip is compared with the best quarter of all paths, so that several bad hosts do not hide each other.  Loss is
# counted, tested against the loss on all other paths, and must be spread over the host's paths and over time.

SUSPECTS_AT_MOST = 64
"""Hosts or paths examined more closely, each against all others; if more are bad, these are the worst."""
EXACT_LOSSES = 1000
"""Losses that are counted exactly; with more, the normal distribution gives the same result."""


@dataclass(frozen=True, kw_only=True)
class NetworkFault:
    where: Literal["host", "link", "network"]
    what: Literal["latency", "loss", "speed"]
    hosts: tuple[int, ...]
    period_ns: tuple[float, float]
    value: float
    """Round trip in microseconds, share of packets lost, or bytes per second; so is the next."""
    usual: float
    """The same among the others, or before; nan: unknown."""
    probes: int
    slice_ns: float
    """The precision of the period."""


def network_faults(trips: RoundTrips) -> list[NetworkFault]:
    """Hosts, or else one link, or else the network; the worst first."""
    found = [*_slow_hosts(trips), *_lossy_hosts(trips)]
    if found:
        return sorted(found, key=lambda bad: -_times(bad))
    links = [*_slow_links(trips), *_lossy_links(trips)]
    if links:
        return [max(links, key=_times)]
    return [*_slow_network(trips), *_lossy_network(trips)]


def _times(bad: NetworkFault) -> float:
    """How much worse than the others, as a factor; loss comes before latency of the same size."""
    least = thresholds.PROBE_LOSS / 10 if bad.what == "loss" else 1.0
    return bad.value / max(bad.usual, least)


# -- latency ----------------------------------------------------------------------------------------------------------


def _slow_hosts(trips: RoundTrips) -> Iterator[NetworkFault]:
    slow = _slow(trips.rtt_us, _lower(trips.rtt_us, 4))
    known = trips.per_host((~np.isnan(trips.rtt_us)).astype(np.float64))
    bad = (known >= 2) & (trips.per_host(slow.astype(np.float64)) >= thresholds.PROBE_WAYS_SHARE * known)
    for host in _suspects(bad.sum(axis=1)):
        own = (trips.ends == host).any(axis=1)
        if (at := _stretch(bad[host])) is not None:
            yield _latency_fault(trips, own, "host", (host,), at)


def _slow_links(trips: RoundTrips) -> Iterator[NetworkFault]:
    if trips.hosts < 3:
        return
    slow = _slow(trips.rtt_us, _lower(trips.rtt_us, 4))
    for way in _suspects(slow.sum(axis=1)):
        if (at := _stretch(slow[way])) is not None:
            own = np.arange(len(trips.ends)) == way
            bad = _latency_fault(trips, own, "link", tuple(trips.ends[way].tolist()), at)
            # One path has few probes in a slice, and the best quarter of the others is a low bar.
            if _slow(np.array([bad.value]), np.array([bad.usual])).all():
                yield bad


def _slow_network(trips: RoundTrips) -> Iterator[NetworkFault]:
    """Against the best quarter of the time."""
    typical = _lower(trips.rtt_us, 2)
    before = _lower(typical[:, None], 4)
    at = _stretch(_slow(typical, before))
    if at is not None:
        everywhere = np.ones(len(trips.ends), np.bool_)
        where: Literal["link", "network"] = "network" if trips.hosts > 2 else "link"
        yield NetworkFault(
            where=where,
            what="latency",
            hosts=tuple(range(trips.hosts)) if where == "link" else (),
            period_ns=trips.period(at),
            value=float(np.nanmedian(typical[at])),
            usual=float(before[0]),
            probes=_probes(trips, everywhere, at),
            slice_ns=trips.slice_ns,
        )


def _suspects(counts: NDArray[Any]) -> list[int]:
    """Those with the most bad slices, or losses, if there are enough for a closer look."""
    worst = np.argsort(-counts, kind="stable")[:SUSPECTS_AT_MOST]
    return [int(one) for one in worst if counts[one] >= thresholds.PROBE_SLICES]


def _slow(rtt_us: Floats, usual_us: Floats) -> Bools:
    least = np.maximum(thresholds.PROBE_RTT_RATIO * usual_us, usual_us + thresholds.PROBE_RTT_FLOOR_US)
    return np.asarray(np.nan_to_num(rtt_us) >= np.nan_to_num(least, nan=np.inf), np.bool_)


def _lower(values: Floats, part: int) -> Floats:
    """[T]; the value of each column that one ``part``-th lies below (two: the lower median); nan for an empty one."""
    ordered = np.sort(values, axis=0)  # nan last
    counts = (~np.isnan(values)).sum(axis=0)
    at = np.maximum(counts - 1, 0) // part
    return np.asarray(ordered[at, np.arange(values.shape[1])], np.float64)


def _stretch(bad: Bools) -> slice | None:
    """The longest stretch that is bad nearly all the time."""
    at = _highest(np.where(bad, 1.0, -1.0))
    count = int(bad[at].sum())
    enough = count >= thresholds.PROBE_SLICES and count >= thresholds.PROBE_WAYS_SHARE * (at.stop - at.start)
    return at if enough else None


def _highest(scores: Floats) -> slice:
    """The stretch with the highest sum."""
    sums = np.concatenate(([0.0], np.cumsum(scores)))
    lowest = np.minimum.accumulate(sums)
    stop = int(np.argmax(sums - lowest))
    return slice(int(np.argmin(sums[: stop + 1])), stop)


def _latency_fault(
    trips: RoundTrips, own: Bools, where: Literal["host", "link"], hosts: tuple[int, ...], at: slice
) -> NetworkFault:
    others = trips.rtt_us[~own, at]
    return NetworkFault(
        where=where,
        what="latency",
        hosts=hosts,
        period_ns=trips.period(at),
        value=float(np.nanmedian(trips.rtt_us[own, at])),
        usual=float(np.nanmedian(others)) if not np.isnan(others).all() else float("nan"),
        probes=_probes(trips, own, at),
        slice_ns=trips.slice_ns,
    )


def _probes(trips: RoundTrips, own: Bools, at: slice) -> int:
    return int(trips.sent[own, at].sum())


# -- loss -------------------------------------------------------------------------------------------------------------


def _lossy_hosts(trips: RoundTrips) -> Iterator[NetworkFault]:
    """The worst first; then its paths are left out, and the search continues."""
    if trips.hosts < 3:
        return
    left = np.ones(len(trips.ends), np.bool_)
    for _ in range(min(thresholds.LOSSY_HOSTS_AT_MOST, trips.hosts // 2)):
        lost, sent = trips.lost * left[:, None], trips.sent * left[:, None]
        all_lost, all_sent = lost.sum(axis=0), sent.sum(axis=0)
        host_lost, host_sent = trips.per_host(lost), trips.per_host(sent)
        found = []
        for host in _suspects(host_lost.sum(axis=1)):
            own = (trips.ends == host).any(axis=1) & left
            bad = _loss(host_lost[host], host_sent[host], all_lost, all_sent, comparisons=host_lost.size)
            if bad is not None and _all_ways(trips, own, bad[0], bad[1]):
                found.append((bad[1], host, own, bad))
        if not found:
            return
        _, host, own, (at, value, usual) = max(found, key=lambda one: one[0])
        yield _loss_fault(trips, own, "host", (host,), at, value, usual)
        left &= ~own


def _lossy_links(trips: RoundTrips) -> Iterator[NetworkFault]:
    if trips.hosts < 3:
        return
    all_lost, all_sent = trips.lost.sum(axis=0), trips.sent.sum(axis=0)
    for way in _suspects(trips.lost.sum(axis=1)):
        own = np.arange(len(trips.ends)) == way
        bad = _loss(trips.lost[way], trips.sent[way], all_lost, all_sent, comparisons=trips.lost.size)
        if bad is not None and _alone(trips, way, bad[0], bad[1]):
            yield _loss_fault(trips, own, "link", tuple(trips.ends[way].tolist()), *bad)


def _lossy_network(trips: RoundTrips) -> Iterator[NetworkFault]:
    everywhere = np.ones(len(trips.ends), np.bool_)
    lost, sent = trips.lost.sum(axis=0), trips.sent.sum(axis=0)
    bad = _loss(lost, sent, lost, sent, comparisons=1)
    if bad is None:
        return
    at, share, _ = bad
    if trips.hosts == 2:
        yield _loss_fault(trips, everywhere, "link", (0, 1), *bad)
    elif _spread_out(trips.lost[:, at].sum(axis=1), trips.sent[:, at].sum(axis=1), share):
        yield _loss_fault(trips, everywhere, "network", (), *bad)


def _loss(
    lost: Floats, sent: Floats, all_lost: Floats, all_sent: Floats, *, comparisons: int
) -> tuple[slice, float, float] | None:
    """When, the share lost, and the share lost on the other paths then (nan: no others); None: nothing notable."""
    at = _highest(lost - thresholds.PROBE_LOSS / 2 * sent)
    # Again with the share just found: a stray loss long before or after does not belong to it.
    at = _highest(lost - max(float(lost[at].sum()) / max(float(sent[at].sum()), 1.0), thresholds.PROBE_LOSS) / 2 * sent)
    count, of = float(lost[at].sum()), float(sent[at].sum())
    share = count / of if of else 0.0
    if share < thresholds.PROBE_LOSS or (lost[at] > 0).sum() < thresholds.PROBE_SLICES:
        return None
    if not _is_lasting(lost[at], sent[at]) or not _spread_out(lost[at], sent[at], share):
        return None
    other_count, other_of = float(all_lost[at].sum()) - count, float(all_sent[at].sum()) - of
    if not other_of:
        return at, share, float("nan")
    usual = other_count / other_of
    by_chance = _chance(int(count), int(count + other_count), of / (of + other_of))
    stands_out = share >= thresholds.PROBE_LOSS_RATIO * usual and by_chance < thresholds.PROBE_CHANCE / comparisons
    return (at, share, usual) if stands_out else None


def _is_lasting(lost: Floats, sent: Floats) -> bool:
    """Whether there is loss besides the worst moment, which may span one slice less than required."""
    width = thresholds.PROBE_SLICES - 1
    in_a_row = np.convolve(lost, np.ones(width), "valid")
    at = int(np.argmax(in_a_row))
    left = float(sent.sum() - sent[at : at + width].sum())
    return left > 0 and float(lost.sum() - in_a_row[at]) / left >= thresholds.PROBE_LOSS


def _chance(count: int, of: int, share: float) -> float:
    """Chance that at least ``count`` of ``of`` losses fall on a part that has this share of the probes."""
    if not 0.0 < share < 1.0:
        return 1.0
    if of > EXACT_LOSSES:
        spread = math.sqrt(of * share * (1 - share))
        return 0.5 * math.erfc((count - 0.5 - of * share) / spread / math.sqrt(2))
    return sum(
        math.comb(of, one) * math.exp(one * math.log(share) + (of - one) * math.log1p(-share))
        for one in range(count, of + 1)
    )


def _alone(trips: RoundTrips, way: int, at: slice, share: float) -> bool:
    """Whether both ends of a lossy path are otherwise fine."""
    for end in trips.ends[way].tolist():
        rest = (trips.ends == end).any(axis=1)
        rest[way] = False
        sent = float(trips.sent[rest, at].sum())
        if sent and float(trips.lost[rest, at].sum()) / sent >= thresholds.PROBE_ALIKE * share:
            return False
    return True


def _all_ways(trips: RoundTrips, own: Bools, at: slice, share: float) -> bool:
    """Whether a host's loss is spread over its paths: not on one link, and not on a few."""
    lost, sent = trips.lost[own, at].sum(axis=1), trips.sent[own, at].sum(axis=1)
    worst = int(np.argmax(lost / np.maximum(sent, 1.0)))
    rest_lost, rest_sent = float(np.delete(lost, worst).sum()), float(np.delete(sent, worst).sum())
    alike = rest_sent > 0 and rest_lost / rest_sent >= thresholds.PROBE_ALIKE * share
    return alike and _spread_out(lost, sent, share)


def _spread_out(lost: Floats, sent: Floats, share: float) -> bool:
    """Whether about as many parts have a loss as would if it were uniform."""
    expected = float((1 - (1 - min(share, 1.0)) ** sent).sum())
    return float((lost > 0).sum()) >= thresholds.PROBE_SPREAD * expected


def _loss_fault(
    trips: RoundTrips,
    own: Bools,
    where: Literal["host", "link", "network"],
    hosts: Sequence[int],
    at: slice,
    value: float,
    usual: float,
) -> NetworkFault:
    return NetworkFault(
        where=where,
        what="loss",
        hosts=tuple(hosts),
        period_ns=trips.period(at),
        value=value,
        usual=usual,
        probes=_probes(trips, own, at),
        slice_ns=trips.slice_ns,
    )


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

    Ranks that have ended, or have not started yet, are ignored.
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


class Columns:
    """Keys of samples, each as a column over all of them.

    Lines are read a few at a time: there may be a hundred thousand, far apart in memory, and each key of a line is near
    its others.  No object per line is created, which would keep the garbage collector busy for longer than everything
    else.
    """

    def __init__(self, lines: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
        self._values: dict[str, list[Any]] = {key: [] for key in keys}
        self._numbers: dict[str, Floats] = {}
        for first in range(0, len(lines), LINES_AT_ONCE):
            part = lines[first : first + LINES_AT_ONCE]
            for key, column in self._values.items():
                column.extend(map(dict.get, part, repeat(key)))

    def __getitem__(self, key: str) -> Sequence[Any]:
        return self._values[key]

    def numbers(self, key: str) -> Floats:
        """With nan for anything that is not a number; computed once, since several rules need it."""
        if key not in self._numbers:
            self._numbers[key] = _numbers(self._values[key])
        return self._numbers[key]


LINES_AT_ONCE = 256
"""As many as stay in the processor's cache while their keys are read."""
Key = tuple[object, ...]
NoneType = type(None)
SAMPLE_KEYS = {
    "host": (
        "wall_ns", "span_s", "node", "cpu_percent", "own_cpu_percent", "cpu_count", "procs_running", "load1",
        "cpu_pressure", "cpu_steal", "io_pressure", "mem_total", "mem_available", "swap_used", "memory_pressure",
        "busy_processes",
    ),
    "process": (
        "wall_ns", "node", "pid", "cpu_percent", "cpu_wait", "cpu_quota", "throttled", "processors", "disk_wait",
        "major_faults_ps", "swapped", "children_disk_wait", "children_major_faults_ps", "rss", "rss_file",
        "rss_answers",
    ),
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
        out[self.owner, self._places] = self.columns.numbers(key)[self.order]
        return out

    def lines(self, key: str) -> list[Any]:
        """Raw values by line, in the order of ``owner``."""
        column = self.columns[key]
        return [column[at] for at in self.order]


def host_readings(view: View) -> tuple[list[str], Readings]:
    """The hosts of the ranks, in the order of ranks."""
    return computed_once(view, "host_readings", _host_readings)


def _host_readings(view: View) -> tuple[list[str], Readings]:
    hosts = list(dict.fromkeys(view.hosts))
    columns, keys, which = computed_once(view.window, "host_samples", _host_samples)
    readings = _readings(columns, which, keys, {(host,): index for index, host in enumerate(hosts)})
    rows_of: dict[object, list[int]] = {}
    for row, name in enumerate(view.hosts):
        rows_of.setdefault(name, []).append(row)
    on_host = [rows_of.get(host, []) for host in hosts]
    return hosts, _in_steady_steps_only(view, readings, on_host)


def network_readings(view: View) -> Readings:
    """Like ``host_readings``, with the network figures."""
    hosts = dict.fromkeys(view.hosts)
    columns = Columns(view.window.lines.get("host", ()), NETWORK_KEYS)
    keys, which = _distinct(columns, "node")
    return _readings(columns, which, keys, {(host,): index for index, host in enumerate(hosts)})


def probe_samples(view: View) -> ProbeSamples:
    """What the agents of the ranks' hosts reported about each other, hosts numbered in the order of ranks."""
    columns = Columns(view.window.probes, SAMPLE_KEYS["probe"])
    numbers: dict[object, int] = {host: number for number, host in enumerate(dict.fromkeys(view.hosts))}
    ends = [np.array([numbers.get(_name(host), -1) for host in columns[key]], np.intp) for key in ("node", "peer")]
    wall_ns, sent, lost, rtt_us = (columns.numbers(key) for key in ("wall_ns", "sent", "lost", "rtt_us_p50"))
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
    return computed_once(view, "process_readings", _process_readings)


def _process_readings(view: View) -> Readings:
    columns, keys, which = computed_once(view.window, "process_samples", _process_samples)
    ranks = [(identity.host, identity.pid) for identity in _identities(view)]
    same = Counter(ranks)  # in containers with equal host names, two ranks may have the same process id
    rows = {rank: row for row, rank in enumerate(ranks) if same[rank] == 1}
    return _readings(columns, which, keys, rows, count=len(ranks))


def gpu_readings(view: View) -> tuple[list[Gpu], Readings]:
    """The GPUs that the job's ranks use, with samples about a second apart."""
    return computed_once(view, "gpu_readings", _gpu_readings)


def _gpu_readings(view: View) -> tuple[list[Gpu], Readings]:
    columns = Columns(view.window.lines.get("gpu", ()), SAMPLE_KEYS["gpu"])
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
    of_host: dict[str, list[int]] = {}
    for row, identity in enumerate(identities):
        of_host.setdefault(identity.host, []).append(row)
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
    known_nodes = {key[0] for key in used}
    seen = Counter(key[0] for key in keys)
    for key in keys:
        node = key[0]
        if node in users and node not in known_nodes and seen[node] <= len(users[str(node)]):
            used[key] = users[str(node)] if seen[node] == 1 else []
    return used


def at_steps(view: View, wall_ns: Floats) -> Floats:
    """[R, T]; times of each rank's own machine as step numbers, with fractions."""
    out = np.full_like(wall_ns, np.nan)
    steps = view.window.steps.astype(np.float64)
    whole = len(steps) > 0 and not np.isnan(view.window.end_wall_ns).any()
    for row, index in enumerate(view.rows):
        ends = view.window.end_wall_ns[index]
        if whole:
            out[row] = np.interp(wall_ns[row], ends, steps)
            continue
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


Samples = tuple[Columns, list[Key], NDArray[np.intp]]
"""Columns, the distinct sources of their lines, and which of these each line has."""


def _host_samples(window: Window) -> Samples:
    columns = Columns(window.lines.get("host", ()), SAMPLE_KEYS["host"])
    return columns, *_distinct(columns, "node")


def _process_samples(window: Window) -> Samples:
    columns = Columns(window.lines.get("process", ()), SAMPLE_KEYS["process"])
    return columns, *_distinct(columns, "node", "pid")


def _identities(view: View) -> list[RankIdentity]:
    return [view.window.identities[index] for index in view.rows]


def _distinct(columns: Columns, *names: str) -> tuple[list[Key], NDArray[np.intp]]:
    """The distinct keys of the lines, and which one each line has; None for parts that are not a string or integer."""
    which: NDArray[np.intp] | None = None
    for name in names:
        column = columns[name]
        if not set(map(type, column)) <= {str, int}:
            column = [_name(part) for part in column]
        known = {part: number for number, part in enumerate(dict.fromkeys(column))}
        own = np.fromiter(map(known.__getitem__, column), np.intp, len(column))
        # Sorting takes longest: the numbers of the first name are dense without it.
        which = own if which is None else np.unique(which * max(len(known), 1) + own, return_inverse=True)[1]
    assert which is not None
    first = np.zeros(int(which.max(initial=-1)) + 1, np.intp)
    first[which[::-1]] = np.arange(len(which))[::-1]
    return [tuple(_name(columns[name][at]) for name in names) for at in first.tolist()], which


def _in_steady_steps_only(
    view: View, readings: Readings, rows: Sequence[Sequence[int]], *, far_apart: bool = False
) -> Readings:
    """Drop samples outside the steady steps of the ranks (``rows`` of the view, by owner)."""
    wall_ns = readings.columns.numbers("wall_ns")[readings.order]
    spans_s = readings.columns.numbers("span_s")[readings.order]
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
    order = np.argsort(columns.numbers("wall_ns"), kind="stable")
    order = order[owner[order] >= 0]
    return Readings(count=len(owners) if count is None else count, owner=owner[order], order=order, columns=columns)


def _numbers(values: Sequence[Any]) -> Floats:
    """Convert to an array, with nan for anything that is not a number."""
    kinds = set(map(type, values))
    if kinds <= {NoneType}:
        return np.full(len(values), np.nan)
    if kinds <= {float, int, NoneType}:
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
