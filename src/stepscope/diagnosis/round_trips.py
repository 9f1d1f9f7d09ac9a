"""What the agents' probes say, as a table: ways between the hosts of a job, and slices of time.

Each host's agent asks others and tells, every few seconds, how many of its questions were answered and how long that
took.  Both directions of a pair are one way.  Time is cut into slices as long as from one line to the next, so that one
bad second shows in one or two of them.

A host that says nothing itself is gone and not slow, and a direction in which nothing ever came back is a firewall's
doing: neither is in the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Heard", "Trips", "trips_of"]

Floats = NDArray[np.float64]
MOST_SLICES = 1000
"""Of a run: more are joined."""
SHORTEST_SLICE_NS = 1e6


@dataclass(frozen=True, kw_only=True)
class Heard:
    """The lines of all agents, as columns; hosts by number."""

    wall_ns: Floats
    node: NDArray[np.intp]
    peer: NDArray[np.intp]
    sent: Floats
    lost: Floats
    rtt_us: Floats
    """The median; nan where nothing came back."""


@dataclass(frozen=True, kw_only=True)
class Trips:
    """P ways between H hosts, in T slices of time."""

    hosts: int
    ends: NDArray[np.intp]
    """[P, 2]"""
    start_ns: float
    slice_ns: float
    sent: Floats
    """[P, T]"""
    lost: Floats
    rtt_us: Floats
    """[P, T]; nan where nothing came back."""

    def per_host(self, values: Floats) -> Floats:
        """[H, T]; sums over the ways of each host."""
        ends, slices = self.ends.T.ravel(), values.shape[1]
        at = (ends[:, None] * slices + np.arange(slices)).ravel()
        sums = np.bincount(at, np.concatenate([values, values]).ravel(), minlength=self.hosts * slices)
        return np.asarray(sums, np.float64).reshape(self.hosts, slices)

    def period(self, at: slice) -> tuple[float, float]:
        """On the wall clock.  A line tells of the time before it."""
        return self.start_ns + (at.start - 1) * self.slice_ns, self.start_ns + at.stop * self.slice_ns


def trips_of(heard: Heard, hosts: int) -> Trips | None:
    """None: there is too little to judge by."""
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
    return Trips(
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
