"""``slow_network``: a host, link or network that is slow or loses packets, what it costs, and what to do.

The agents' probes (``engine/readings.py``) show the fault, or a link that runs at a lower speed than those of the other
hosts.  The steps alone show what it costs:

*Against before.*  The exchange (what the rank that is blocked least spends in ``comm``; where waiting is not measured,
what the step takes besides input and pauses) in the steps of the bad stretch is compared with the steps outside it.
Loss hits some steps hard and others not at all, so the steps above nearly all of those outside are counted.

*Against others.*  ``comm_straggler`` and ``slow_collective`` compare groups, and before with after; where they concern
the same host or all hosts, the cause is the same, and this finding leads and takes over their cost.

*By what it explains.*  A network that was bad from the first step to the last has nothing to compare with.  Then its
cost is the part of the time all ranks wait for it (``comm_bound``) that a network like the others' would save.

A bad network that does not slow the steps is information, and not reported at all if it is the whole network.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.claims import unexplained_steps
from stepscope.diagnosis.engine.readings import (
    NetworkFault,
    network_faults,
    network_readings,
    probe_samples,
    round_trips_of,
    row_medians,
)
from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.diagnosis.rules.bounds import waited_for_network
from stepscope.judge import thresholds
from stepscope.judge.chain import Claim
from stepscope.judge.finding_cost import severity_by_cost
from stepscope.judge.statistics import lower_median, median_rank, shortest
from stepscope.records.finding import Finding
from stepscope.records.text import count_text, ms_text, number_text, share_text

__all__ = ["find_network", "has_same_cause"]


# -- wording ----------------------------------------------------------------------------------------------------------
# How a bad network is reported: the sentence, what the kernel's counters add to it, and what to do.

Floats = NDArray[np.float64]
GBIT_BYTES = 125_000_000.0
SELDOM = 0.5
"""Share of the steps in that time: fewer are reported by their number."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """By host [H]; nan if unknown."""

    speed_bps: Floats
    """Link speed, in bytes."""
    retransmits: Floats
    """Share of the TCP segments sent."""
    errors_ps: Floats
    drops_ps: Floats

    @property
    def slow_links(self) -> NDArray[np.bool_]:
        """[H]; hosts whose link is slower than those of most."""
        known = self.speed_bps[~np.isnan(self.speed_bps)]
        if len(known) < 2:
            return np.zeros(len(self.speed_bps), np.bool_)
        # Of two hosts the faster one shows what both should be.
        usual = float(known.max()) if len(known) == 2 else lower_median(known)
        return np.asarray(self.speed_bps <= thresholds.SPEED_RATIO * usual, np.bool_)

    def others(self, values: Floats, host: int) -> float:
        """The median of the others; nan without any."""
        rest = np.delete(values, host)
        rest = rest[~np.isnan(rest)]
        return float(np.median(rest)) if len(rest) else float("nan")

    def evidence(self, bad_hosts: Sequence[int]) -> dict[str, Any]:
        """Figures of the first host that is reported."""
        if not bad_hosts:
            return {}
        host = bad_hosts[0]
        figures = {
            "speed_bps": self.speed_bps[host],
            "others_speed_bps": self.others(self.speed_bps, host),
            "retransmit_share": self.retransmits[host],
            "others_retransmit_share": self.others(self.retransmits, host),
            "net_errors_ps": self.errors_ps[host],
            "net_drops_ps": self.drops_ps[host],
        }
        return {name: None if np.isnan(value) else round(float(value), 5) for name, value in figures.items()}


def network_title(
    view: View,
    bad: NetworkFault,
    names: Sequence[str],
    *,
    cost: Mapping[str, Any],
    per_step_ns: float,
    hits: int,
    since: tuple[int, int] | None,
) -> str:
    """``hits``: steps that it made longer; ``since``: its first and last step, if it was not there all the time."""
    alone = len(set(view.hosts)) == 2
    first, last = since or view.span
    some = "" if hits >= SELDOM * (last - first + 1) else f"in {count_text(hits, 'step')} "
    who, what, when = _who_text(bad, names), _what_text(bad, alone=alone), _when_text(view, since)
    return f"{who} {what}{when}; {_price_text(cost, per_step_ns, some)}."


def _who_text(bad: NetworkFault, names: Sequence[str]) -> str:
    if bad.where == "network":
        return "The network between all hosts"
    if bad.where == "link":
        return f"The link between {names[0]} and {names[1]}"
    more = len(names) - 1
    others = "" if not more else f" (and of {more} more host{'s' if more > 1 else ''})"
    return f"The network of host {names[0]}{others}"


def _what_text(bad: NetworkFault, *, alone: bool) -> str:
    if bad.what == "speed":
        return f"is slow: its link runs at {_gbit(bad.value)}, that of the others at {_gbit(bad.usual)}"
    words, text = "is slow: a round trip takes {}", ms_text(bad.value / 1e3)
    usual = "" if np.isnan(bad.usual) else ms_text(bad.usual / 1e3)
    if bad.what == "loss":
        words, text = "loses packets: {} of the probes are lost", _percent(bad.value)
        usual = "" if np.isnan(bad.usual) else _percent(bad.usual)
    than = "before" if bad.where == "network" or alone else "elsewhere"
    return words.format(text) + (f", {than} {usual}" if usual else "")


def _percent(share: float) -> str:
    return "none" if share == 0 else f"{share:.1%}"


def _gbit(speed_bps: float) -> str:
    gbit = speed_bps / GBIT_BYTES
    return f"{gbit:.0f} Gbit/s" if gbit == round(gbit) else f"{number_text(gbit)} Gbit/s"


def _when_text(view: View, since: tuple[int, int] | None) -> str:
    if since is None:
        return ""
    over = since[1] < int(view.steps[-1])
    return f" (steps {since[0]} to {since[1]})" if over else f" (from step {since[0]} on)"


def _price_text(cost: Mapping[str, Any], per_step_ns: float, some: str) -> str:
    if not cost["share"]:
        return "the steps are not affected"
    return f"{some}exchanges take {ms_text(per_step_ns / 1e6)} longer, {share_text(cost['share'])} of the training time"


def network_advice(
    bad: NetworkFault, names: Sequence[str], counters: Counters, bad_hosts: Sequence[int], *, alone: bool
) -> tuple[str, ...]:
    """``alone``: there are no hosts besides the two of the link."""
    if bad.where == "network":
        return ("No host stands out: other traffic on the switches, a route between sites, the network's provider.",)
    if bad.where == "link" and alone:
        return (f"ip -s link and ethtool -S on {names[0]} and {names[1]}: which end has the errors, drops, low speed?",)
    if bad.where == "link":
        return (f"{names[0]} and {names[1]} are fine with other hosts: look at the switches and routes between them.",)
    host = names[0]
    first = {
        "speed": f"ethtool on {host}: a cable or port that negotiated a lower speed, or the wrong interface in use.",
        "loss": f"ip -s link and ethtool -S on {host}: errors and drops; then cable, transceiver, switch port, MTU.",
        "latency": f"Check what else uses {host}'s link; then cable, switch port, route, and the machine under the VM.",
    }[bad.what]
    seen = _counters_text(counters, bad_hosts[0]) if bad_hosts else ""
    return (
        *([seen] if seen else []),
        first,
        "Until then, exclude the host: in a synchronous job all ranks run at the pace of its network.",
    )


def _counters_text(counters: Counters, host: int) -> str:
    """What the host itself counted, if that is informative."""
    parts = []
    if counters.errors_ps[host] > 0:
        parts.append(f"{number_text(float(counters.errors_ps[host]))} errors a second on its interfaces")
    again = counters.retransmits[host]
    if again >= thresholds.RETRANSMITS:
        parts.append(f"{share_text(float(again))} of its TCP segments retransmitted")
    return f"Its kernel counters agree: {', '.join(parts)}." if parts else ""


# -- rule -------------------------------------------------------------------------------------------------------------

Bools = NDArray[np.bool_]
EXCHANGES = ("forward", "backward", "comm", "optimizer", "other")
"""Phases in which a wait for the network may hide."""
SAME_CAUSE_KINDS = ("comm_straggler", "slow_collective")


@dataclass(frozen=True, kw_only=True)
class _Price:
    saved_ns: Floats
    """[S]"""
    per_step_ns: float
    """In the steps that it hits."""
    explains: tuple[Claim, ...] = ()
    compared: str = ""
    """What it was compared with: before, groups, comm_bound; empty: nothing."""


def find_network(view: View, exchanges: Sequence[Claim], known: Sequence[Claim]) -> list[Claim]:
    """At most one.  ``exchanges``: claims about collectives, which it may explain; ``known``: claims about ranks."""
    hosts = list(dict.fromkeys(view.hosts))
    counters = _counters(view)
    bad = _faults(view, len(hosts), counters)
    hit = _steps_of(view, bad) if bad else np.zeros(len(view.steps), np.bool_)
    if not hit.any():
        return []  # nothing is wrong, or it is over
    price = _price(view, bad, hit, exchanges, known, hosts)
    claim = _claim(view, bad, hit, price, hosts, counters)
    return [] if bad[0].where == "network" and claim.finding.severity == "info" else [claim]


# -- fault ------------------------------------------------------------------------------------------------------------


def _faults(view: View, hosts: int, counters: Counters) -> list[NetworkFault]:
    trips = round_trips_of(probe_samples(view), hosts)
    found = network_faults(trips) if trips is not None else []
    slow = np.flatnonzero(counters.slow_links).tolist()
    if found and found[0].where == "link" and hosts == 2 and len(slow) == 1:
        return [replace(bad, where="host", hosts=(slow[0],)) for bad in found]
    if found or not slow:
        return found
    ends = view.window.end_wall_ns
    period = float(np.nanmin(ends - view.window.wall_ns)), float(np.nanmax(ends))
    return [
        NetworkFault(
            where="host",
            what="speed",
            hosts=(host,),
            period_ns=period,
            value=float(counters.speed_bps[host]),
            usual=counters.others(counters.speed_bps, host),
            probes=0,
            slice_ns=0.0,
        )
        for host in sorted(slow, key=lambda host: float(counters.speed_bps[host]))
    ]


def _counters(view: View) -> Counters:
    readings = network_readings(view)
    infiniband = row_medians(readings.of("ib_speed_bps"))
    ethernet = row_medians(readings.of("net_speed_bps"))
    out = readings.of("tcp_out_ps")
    with np.errstate(invalid="ignore", divide="ignore"):
        again = np.nansum(readings.of("tcp_retrans_ps"), axis=1) / np.nansum(out, axis=1)
    busy = row_medians(out) >= thresholds.RETRANSMITS_SEGMENTS
    samples = (~np.isnan(out)).sum(axis=1)
    return Counters(
        speed_bps=np.where(samples >= thresholds.MACHINE_SAMPLES, _either(infiniband, ethernet), np.nan),
        retransmits=np.where(busy, again, np.nan),
        errors_ps=np.nan_to_num(np.nanmean(_with_one(readings.of("net_errors_ps")), axis=1)),
        drops_ps=np.nan_to_num(np.nanmean(_with_one(readings.of("net_drops_ps")), axis=1)),
    )


def _either(infiniband: Floats, ethernet: Floats) -> Floats:
    """InfiniBand where all hosts have it: then the job uses it."""
    return ethernet if np.isnan(infiniband).any() else infiniband


def _with_one(values: Floats) -> Floats:
    """Give a row without any value a single zero, so that its mean exists."""
    padded = np.concatenate([values, np.full((len(values), 1), np.nan)], axis=1)
    padded[np.isnan(padded).all(axis=1), -1] = 0.0
    return padded


def _steps_of(view: View, bad: Sequence[NetworkFault]) -> Bools:
    """[S]; the steps that lie, at least in part, in a bad period."""
    begins, ends = _times(view)
    inside = [(ends >= first) & (begins <= last) for first, last in (fault.period_ns for fault in bad)]
    return np.asarray(np.logical_or.reduce(inside), np.bool_)


def _times(view: View) -> tuple[Floats, Floats]:
    """[S] each; begin and end on the wall clock, of the median rank: clocks of single hosts may be wrong."""
    ends = median_rank(view.window.end_wall_ns[view.rows][:, view.columns])
    return ends - view.step_ns, ends


# -- cost -------------------------------------------------------------------------------------------------------------


def _price(
    view: View,
    bad: Sequence[NetworkFault],
    hit: Bools,
    exchanges: Sequence[Claim],
    known: Sequence[Claim],
    hosts: list[str],
) -> _Price:
    before = _against_before(view, bad, hit, known)
    names = {hosts[host] for each in bad for host in each.hosts}
    same = tuple(claim for claim in exchanges if has_same_cause(claim.finding, bad[0].where, names))
    if same:
        saved_ns = np.maximum.reduce([before.saved_ns, *(claim.explained_ns for claim in same)])
        per_step_ns = max(before.per_step_ns, *(_mean_where(claim.explained_ns) for claim in same))
        return _Price(saved_ns=saved_ns, per_step_ns=per_step_ns, explains=same, compared="groups")
    if before.saved_ns.any() or hit.mean() < thresholds.NETWORK_ALWAYS_SHARE:
        return before
    return _by_share(view, bad, hit, exchanges)


def _against_before(view: View, bad: Sequence[NetworkFault], hit: Bools, known: Sequence[Claim]) -> _Price:
    """By the steps that take longer than nearly all steps outside, if there are enough of them."""
    nothing = _Price(saved_ns=np.zeros(len(view.steps)), per_step_ns=0.0)
    apart = ~_steps_of(view, [_widened(fault) for fault in bad])
    took_ns = _exchange(view, known)
    if apart.sum() < thresholds.MIN_STEPS:
        return nothing
    usual_ns = float(np.median(took_ns[apart]))
    least_ns = max(thresholds.EXCESS_SHARE * view.median_step_ns, thresholds.WARNING_FLOOR_NS)
    line_ns = max(float(np.quantile(took_ns[apart], 1 - thresholds.HIT_CHANCE)), usual_ns + least_ns)
    chance = thresholds.HIT_CHANCE + 1 / int(apart.sum())
    count, of = int((hit & (took_ns > line_ns)).sum()), int(hit.sum())
    z = (count - chance * of) / math.sqrt(of * chance * (1 - chance))
    if z < thresholds.HIT_Z:
        return nothing
    # The exact begin and end are unknown; similar steps just before and after it belong to it.
    saved_ns = np.where(~apart & (took_ns > line_ns), took_ns - usual_ns, 0.0)
    return _Price(saved_ns=saved_ns, per_step_ns=_mean_where(saved_ns), compared="before")


def _widened(bad: NetworkFault) -> NetworkFault:
    """Widen the period by the time just before and after it, in which the state is unknown."""
    first, last = bad.period_ns
    more_ns = bad.slice_ns + thresholds.PROBES_LAG_S * 1e9
    return replace(bad, period_ns=(first - more_ns, last + more_ns))


def _exchange(view: View, known: Sequence[Claim]) -> Floats:
    """[S]; the part of the steps that may be due to the network."""
    if view.comm_measured:
        return np.nan_to_num(shortest(view.phase("comm")))
    hidden = [median_rank(view.phase(name)) for name in EXCHANGES if name in view.phases]
    between = np.nan_to_num(median_rank(view.between_ns)) if view.clock == "host" else 0.0
    took_ns = np.nan_to_num(np.sum(hidden, axis=0)) - between
    late_ns = view.step_ns - unexplained_steps(view, known)
    return np.asarray(np.maximum(took_ns - late_ns, 0.0), np.float64)


def has_same_cause(finding: Finding, where: str, hosts: Collection[str]) -> bool:
    """Whether it is a slow group that contains the bad hosts, or a collective that became slow for all."""
    if finding.kind not in SAME_CAUSE_KINDS:
        return False
    named = finding.evidence.get("hosts")
    return named is None or where == "network" or bool(set(hosts) & set(named))


def _by_share(view: View, bad: Sequence[NetworkFault], hit: Bools, exchanges: Sequence[Claim]) -> _Price:
    """The part of what all ranks wait for that a network like the others' would save."""
    waited_ns = waited_for_network(view, exchanges)
    if waited_ns is None:
        return _Price(saved_ns=np.zeros(len(view.steps)), per_step_ns=0.0)
    parts = [np.minimum(waited_ns * _slowed(fault), _most_ns(view, fault)) for fault in bad]
    saved_ns = np.where(hit, np.maximum.reduce(parts), 0.0)
    return _Price(saved_ns=saved_ns, per_step_ns=_mean_where(saved_ns), compared="comm_bound")


def _most_ns(view: View, bad: NetworkFault) -> float:
    """The most that longer round trips can cost a step: a ring sends each collective through all ranks twice."""
    if bad.what != "latency":
        return math.inf
    seen = view.window.communication
    calls = 1.0
    if seen is not None:
        calls = max(sum(flow.count for flow in seen.flows if flow.group.timed), calls)
        calls += sum(reducer.backwards * max(reducer.buckets, 1) for reducer in seen.reducers)
    return calls * (2 * (len(view.ranks) - 1) + thresholds.START_TRIPS) * (bad.value - bad.usual) * 1e3


def _slowed(bad: NetworkFault) -> float:
    """The fault's share of an exchange's time: time is proportional to the round trip, the inverse of the speed, and
    the root of the loss (TCP)."""
    if bad.what == "speed":
        return 1 - bad.value / bad.usual
    if bad.what == "latency":
        return 1 - bad.usual / bad.value if bad.usual > 0 else 0.0
    return 1 - math.sqrt(min(float(np.fmax(bad.usual, thresholds.HEALTHY_LOSS_SHARE)) / bad.value, 1.0))


def _mean_where(saved_ns: Floats) -> float:
    there = saved_ns[saved_ns > 0]
    return float(there.mean()) if len(there) else 0.0


# -- finding ----------------------------------------------------------------------------------------------------------


def _claim(
    view: View, bad: Sequence[NetworkFault], hit: Bools, price: _Price, hosts: list[str], counters: Counters
) -> Claim:
    worst = bad[0]
    bad_hosts = (
        list(dict.fromkeys(host for fault in bad for host in fault.hosts)) if worst.where == "host" else [*worst.hosts]
    )
    names = [hosts[host] for host in bad_hosts]
    saved_ns = np.clip(price.saved_ns, 0.0, view.step_ns)
    cost = cost_of(view, saved_ns)
    severity = severity_by_cost(cost["share"], price.per_step_ns)
    # Without strays: just before and after it some steps are long for other reasons.
    steps = view.steps[saved_ns > 0] if saved_ns.any() else view.steps[hit]
    first, last = np.quantile(steps, thresholds.STRAY_QUANTILES, method="nearest")
    span = int(first), int(last)
    mostly = hit.mean() >= thresholds.NETWORK_ALWAYS_SHARE
    finding = Finding(
        kind="slow_network",
        severity=severity,
        title=network_title(
            view,
            worst,
            names,
            cost=cost,
            per_step_ns=price.per_step_ns,
            hits=int((saved_ns > 0).sum()),
            since=None if mostly else span,
        ),
        ranks=tuple(rank for rank, host in zip(view.ranks, view.hosts, strict=True) if host in set(names)),
        phase="comm",
        steps=view.span if mostly else span,
        cost=cost,
        evidence={
            "where": worst.where,
            "what": worst.what,
            "hosts": names,
            **_figures(bad),
            **counters.evidence(bad_hosts),
            "compared": price.compared or None,
            "explains": [claim.finding.kind for claim in price.explains],
            "excess_ms": round(price.per_step_ns / 1e6, 3),
            "steps_hit": int((saved_ns > 0).sum()),
            "steps_used": len(view.steps),
        },
        advice=network_advice(worst, names, counters, bad_hosts, alone=len(hosts) == 2),
        confidence={"before": 0.9, "groups": 0.9, "comm_bound": 0.7}.get(price.compared, 0.8),
    )
    return Claim(finding=finding, explained_ns=saved_ns)


def _figures(bad: Sequence[NetworkFault]) -> dict[str, Any]:
    """Figures of the worst of each kind."""
    out: dict[str, Any] = {"probes": max(fault.probes for fault in bad)}
    first, last = bad[0].period_ns
    out["seconds"] = round((last - first) / 1e9, 1)
    for fault in reversed(bad):
        if fault.what == "latency":
            usual = None if math.isnan(fault.usual) else round(fault.usual, 1)
            out |= {"rtt_us": round(fault.value, 1), "others_rtt_us": usual}
        elif fault.what == "loss":
            usual = None if math.isnan(fault.usual) else round(fault.usual, 4)
            out |= {"loss_share": round(fault.value, 4), "others_loss_share": usual}
    return out
