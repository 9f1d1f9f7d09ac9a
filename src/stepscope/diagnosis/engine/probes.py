"""Network probes between hosts: a table of round trips and losses, and the host or link at fault.

Each host's agent probes others and reports, every few seconds, how many probes were answered and how long that took.
Both directions between two hosts are one path (``way`` in the code).  Time is cut into slices of the interval between
lines, so that one bad second shows in one or two of them.

A host that reports nothing itself is gone, not slow, and a direction without a single answer is blocked by a firewall:
neither is in the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine import thresholds

__all__ = ["NetworkFault", "ProbeSamples", "network_faults", "round_trips_of"]


# -- round trips ------------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]
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

Bools = NDArray[np.bool_]
SUSPECTS_AT_MOST = 64
"""Hosts or paths examined more closely, each against all others; if more are bad, these are the worst."""
EXACT_LOSSES = 1000
"""Losses that are counted exactly; with more, the normal distribution gives the same result."""
LOSSY_HOSTS_AT_MOST = 8
"""Lossy hosts to search for, one after the other; if there are more, it is the network."""


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
    for _ in range(min(LOSSY_HOSTS_AT_MOST, trips.hosts // 2)):
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
