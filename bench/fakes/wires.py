"""The network between the hosts of a synthetic cluster, as its agents' probes see it.

    run = with_probes(Cluster(ranks=4, hosts=4, …).run(), Wires(troubles=(Trouble(hosts=(2,), rtt_us=20_000.0),)))

A trouble with one host is on all its ways, one with two hosts on the way between them, one with none everywhere.  Every
probe is drawn by itself, and a line about each peer comes every few seconds, not at the same time on all hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fakes.cluster import ANCHOR_WALL_NS
from stepscope.records.series import RunData

__all__ = ["Trouble", "Wires", "with_probes"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    hosts: tuple[int, ...] = ()
    rtt_us: float = 0.0
    """More."""
    loss: float = 0.0
    """Of the packets, there and back."""
    seconds: tuple[float, float] = (0.0, float("inf"))
    """Since the run's first step."""

    def on(self, node: int, peer: int) -> bool:
        return set(self.hosts) <= {node, peer}


@dataclass(frozen=True, kw_only=True)
class Wires:
    rtt_us: float = 150.0
    jitter: float = 0.2
    """Spread of a round trip, relative (log-normal)."""
    loss: float = 0.0
    troubles: tuple[Trouble, ...] = ()
    per_s: float = 5.0
    """Probes that a host sends, to all its peers together."""
    every_s: float = 5.0
    """Between two lines about a peer."""
    silent: dict[int, float] | None = None
    """By host: second from which on its agent is gone."""
    seed: int = 0


def with_probes(run: RunData, wires: Wires) -> RunData:
    """The run, its samples with what its hosts' agents said of each other."""
    hosts = list(dict.fromkeys(series.identity.host for series in run.ranks))
    steps = [series.steps for series in run.ranks if len(series.steps)]
    ends = [float(own["start_ns"][-1] + own["wall_ns"][-1] - own["start_ns"][0]) / 1e9 for own in steps]
    end_s = max(ends, default=0.0)
    random = np.random.default_rng((wires.seed, 7))
    lines: list[dict[str, Any]] = []
    for node in range(len(hosts)):
        gone_s = (wires.silent or {}).get(node, end_s)
        told_s = np.arange(random.uniform(0.2, 1.0) * wires.every_s, min(end_s, gone_s), wires.every_s)
        for peer in range(len(hosts)):
            if peer != node:
                about = _told(wires, random, node, peer, len(hosts) - 1, told_s)
                lines += [{"node": hosts[node], "peer": hosts[peer], "peer_node": peer, **line} for line in about]
    lines.sort(key=lambda line: int(line["wall_ns"]))
    return replace(run, samples=(*run.samples, *lines))


def _told(
    wires: Wires, random: np.random.Generator, node: int, peer: int, peers: int, told_s: Floats
) -> list[dict[str, Any]]:
    if not len(told_s):
        return []
    sent_s = np.arange(random.uniform(0, 1), told_s[-1], peers / wires.per_s)
    rtt_us = wires.rtt_us * np.exp(random.normal(0.0, wires.jitter, len(sent_s)))
    kept = random.random(len(sent_s)) >= wires.loss
    for trouble in wires.troubles:
        hit = (sent_s >= trouble.seconds[0]) & (sent_s < trouble.seconds[1]) & trouble.on(node, peer)
        rtt_us += hit * trouble.rtt_us
        kept &= ~hit | (random.random(len(sent_s)) >= trouble.loss)
    kept &= sent_s < (wires.silent or {}).get(peer, np.inf)
    known_s = sent_s + np.where(kept, rtt_us / 1e6, 3.0)
    line = np.searchsorted(told_s, known_s)
    out = []
    for index, at_s in enumerate(told_s.tolist()):
        own = line == index
        if not own.any():
            continue
        trips = rtt_us[own & kept]
        figures: dict[str, Any] = {"sent": int(own.sum()), "lost": int((own & ~kept).sum())}
        if len(trips):
            names = ("rtt_us_min", "rtt_us_p50", "rtt_us_max")
            values = (trips.min(), np.median(trips), trips.max())
            figures |= {name: round(float(value), 1) for name, value in zip(names, values, strict=True)}
        out.append({"wall_ns": ANCHOR_WALL_NS + int(at_s * 1e9), "kind": "probe", **figures})
    return out
