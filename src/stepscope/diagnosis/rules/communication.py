"""Communication findings: comm_straggler, slow_collective and group_imbalance; low_overlap is in ``overlap``.

They explain time in this order: groups, changes over time, overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.communication import DDP_OP, Communication, Flow, Group
from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.diagnosis.rules.overlap import find_low_overlap
from stepscope.judge import thresholds
from stepscope.judge.chain import Claim
from stepscope.judge.finding_cost import severity_by_cost
from stepscope.judge.statistics import levels, median_rank, medians, peer_deviation, persistence_z, z_needed
from stepscope.records.collectives import OPS
from stepscope.records.finding import Finding
from stepscope.records.text import bytes_text, ms_text, named_ranks, rate_text

__all__ = ["between_stages", "bubble_share", "exchanges_of", "find_communication"]


# -- sibling groups ---------------------------------------------------------------------------------------------------
# Groups that do the same for different ranks, compared with each other: a slow link or host, a slow group, more bytes.
#
# The columns of a mesh are siblings: each runs the same collectives among its ranks.  Only the exchange itself is
# compared (the time of the last rank to arrive), so late ranks are not blamed here.  A group that takes longer for the
# same bytes has a slow link in it.  Only other groups can show which one: the rank whose groups are all slow, in two
# directions of the mesh, or the host that contains all slow groups.  Otherwise the group alone is named.

Floats = NDArray[np.float64]
GROUPS_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """One operation in G sibling groups, over the K steps in which all of them were recorded in it."""

    places: Sequence[int]
    """[G]; indices into ``Communication.groups``."""
    op: str
    transfer_ns: Floats
    """[G, K]; per step."""
    bytes: Floats
    """[G]; per step, the median."""


@dataclass(frozen=True, kw_only=True)
class _SlowGroup:
    place: int
    among: _Compared
    excess_ns: float
    """Per step, over the siblings."""
    ratio: float
    bytes_ratio: float

    @property
    def transfer_ns(self) -> float:
        return float(np.median(self.among.transfer_ns[self._index]))

    @property
    def bytes(self) -> float:
        return float(self.among.bytes[self._index])

    @property
    def op(self) -> str:
        return self.among.op

    @property
    def _index(self) -> int:
        return self.among.places.index(self.place)


def find_uneven_groups(view: View, exchanges: Communication) -> list[Claim]:
    compared = list(_comparisons(view, exchanges))
    slow = [
        slow_group for among in compared for slow_group in _slow_in(view, among, sum(len(c.places) for c in compared))
    ]
    same = [slow_group for slow_group in slow if slow_group.bytes_ratio <= thresholds.BYTES_ALIKE]
    more = [slow_group for slow_group in slow if slow_group.bytes_ratio >= thresholds.BYTES_RATIO]
    claims = [_imbalance_claim(view, exchanges, more)] if more else []
    if same:
        culprits, host = _culprits(view, exchanges, compared, {slow_group.place for slow_group in same})
        claims.append(
            _straggler_claim(view, exchanges, same, culprits, host)
            if culprits
            else _slow_group_claim(view, exchanges, same)
        )
    return [claim for claim in claims if claim.finding.severity != "info"]


def group_text(group: Group) -> str:
    """``tensor group 3 (ranks 2, 3)``."""
    kind = "process" if group.kind == "other" else group.kind
    return f"{kind} group {group.name} ({named_ranks(group.ranks).lower()})"


def _comparisons(view: View, exchanges: Communication) -> Iterator[_Compared]:
    seen = exchanges.arrivals
    steady = np.isin(seen.place, view.columns)
    for places in exchanges.siblings:
        if view.clock == "device" and not exchanges.groups[places[0]].device:
            continue
        index = np.full(len(exchanges.groups), -1, np.intp)
        index[places] = np.arange(len(places))
        ours = steady & (index[seen.group] >= 0)
        for op in np.unique(seen.op[ours]).tolist():
            own = np.flatnonzero(ours & (seen.op == op))
            steps, column = np.unique(seen.place[own], return_inverse=True)
            at = index[seen.group[own]] * len(steps) + column
            took, size, counts = (
                _table(at, values, (len(places), len(steps)))
                for values in (seen.transfer_ns[own], seen.bytes[own], np.ones(len(own)))
            )
            everywhere = (counts > 0).all(axis=0)
            if everywhere.sum() >= thresholds.EXCHANGE_STEPS:
                sent = medians(size[:, everywhere])
                yield _Compared(places=places, op=OPS[op], transfer_ns=took[:, everywhere], bytes=sent)


def _table(at: NDArray[np.intp], values: Floats, shape: tuple[int, int]) -> Floats:
    return np.asarray(np.bincount(at, values, minlength=shape[0] * shape[1]), np.float64).reshape(shape)


def _slow_in(view: View, among: _Compared, comparisons: int) -> Iterator[_SlowGroup]:
    excess = peer_deviation(among.transfer_ns)
    least_ns = max(thresholds.WARNING_SHARE * view.median_step_ns, thresholds.EXCHANGE_FLOOR_NS)
    for index in np.flatnonzero(medians(excess) >= least_ns).tolist():
        own, usual = among.transfer_ns[index], among.transfer_ns[index] - excess[index]
        ratio = float(np.median(own)) / max(float(np.median(usual)), 1.0)
        mostly = float((own >= thresholds.EXCHANGE_RATIO * usual).mean()) >= thresholds.EXCHANGE_AGREES
        if ratio < thresholds.EXCHANGE_RATIO or not mostly or persistence_z(excess[index]) < z_needed(comparisons):
            continue
        others = float(np.median(np.delete(among.bytes, index)))
        yield _SlowGroup(
            place=among.places[index],
            among=among,
            excess_ns=float(np.median(excess[index])),
            ratio=ratio,
            bytes_ratio=float(among.bytes[index]) / others if others else 1.0,
        )


def _culprits(
    view: View, exchanges: Communication, compared: Sequence[_Compared], slow: set[int]
) -> tuple[tuple[int, ...], str]:
    """Ranks that all slow groups and no others have in common, and their host if it is the host; else nothing."""
    directions = {tuple(comparison.places) for comparison in compared}
    fast = {place for places in directions for place in places} - slow
    in_fast = {row for place in fast for row in exchanges.groups[place].rows}
    rows_of = [{row for place in {*places} & slow for row in exchanges.groups[place].rows} for places in directions]
    turns = [rows for rows in rows_of if rows]
    suspects = {row for rows in turns for row in rows if all(row in other for other in turns)} - in_fast
    hosts = {view.window.hosts[row] for row in suspects}
    covered = all(suspects & set(exchanges.groups[place].rows) for place in slow)
    if not suspects or not covered:
        return (), ""
    host = _whole_host(view, suspects, hosts)
    if not host and (len(turns) < 2 or len(suspects) > 1):
        return (), ""
    return tuple(sorted(view.window.ranks[row] for row in suspects)), host


def _whole_host(view: View, suspects: set[int], hosts: set[str]) -> str:
    """The host, if all of its ranks and no others are suspected, and there are other hosts."""
    if len(hosts) != 1 or len(set(view.window.hosts)) < 2 or len(suspects) < 2:
        return ""
    (host,) = hosts
    return host if sum(name == host for name in view.window.hosts) == len(suspects) else ""


def _straggler_claim(
    view: View, exchanges: Communication, slow: Sequence[_SlowGroup], ranks: tuple[int, ...], host: str
) -> Claim:
    who = f"host {host}" if host else f"rank {ranks[0]}"
    worst = max(slow, key=lambda slow_group: slow_group.ratio)
    kinds = ", ".join(sorted({exchanges.groups[slow_group.place].kind for slow_group in slow}))
    excess_ns = _total_excess_ns(slow)
    return _group_claim(
        view,
        exchanges,
        slow,
        kind="comm_straggler",
        title=(
            f"Every exchange with {who} is slow: its {kinds} groups take {ms_text(excess_ns / 1e6)} more of a step "
            f"than the others, up to {worst.ratio:.1f} times as long, for the same bytes."
        ),
        ranks=ranks,
        advice=(
            f"Look at the links of {who}: cable, switch port, errors (ip -s link, ethtool -S), negotiated speed.",
            "The ranks arrive at these collectives on time, so the transfer is slow, not their work.",
        ),
        excess_ns=excess_ns,
        confidence=0.85 if host else 0.9,
    )


def _slow_group_claim(view: View, exchanges: Communication, slow: Sequence[_SlowGroup]) -> Claim:
    worst = max(slow, key=lambda slow_group: slow_group.excess_ns)
    group = exchanges.groups[worst.place]
    others = f"other {group.kind} group" + ("s" if len(worst.among.places) > 2 else "")
    others_per_s = worst.bytes / max(worst.transfer_ns - worst.excess_ns, 1.0) * 1e9
    excess_ns = _total_excess_ns(slow)
    return _group_claim(
        view,
        exchanges,
        slow,
        kind="slow_collective",
        title=(
            f"{worst.op} in {group_text(group)} takes {ms_text(worst.transfer_ns / 1e6)} of a step, "
            f"{worst.ratio:.1f} times as long as in the {others}, for the same {bytes_text(worst.bytes)}."
        ),
        ranks=group.ranks,
        advice=(
            "The ranks arrive on time, so a link between them is slow: compare their hosts, switches and NUMA nodes.",
            f"It moves {rate_text(worst.bytes / worst.transfer_ns * 1e9)}, the others {rate_text(others_per_s)}.",
        ),
        excess_ns=excess_ns,
        confidence=0.85,
    )


def _imbalance_claim(view: View, exchanges: Communication, slow: Sequence[_SlowGroup]) -> Claim:
    worst = max(slow, key=lambda slow_group: slow_group.excess_ns)
    group = exchanges.groups[worst.place]
    spread_ns = worst.transfer_ns - float(medians(worst.among.transfer_ns).mean())
    return _group_claim(
        view,
        exchanges,
        slow,
        kind="group_imbalance",
        title=(
            f"{worst.op} in {group_text(group)} moves {bytes_text(worst.bytes)} a step, {worst.bytes_ratio:.1f} times "
            f"as much as in its sibling groups, and takes {ms_text(worst.excess_ns / 1e6)} longer; the others wait."
        ),
        ranks=group.ranks,
        advice=(
            "Give the groups equal work: balance experts (auxiliary loss, capacity factor), or split layers evenly.",
        ),
        excess_ns=max(spread_ns, 0.0),
        confidence=0.85,
    )


def _total_excess_ns(slow: Sequence[_SlowGroup]) -> float:
    """Per step: sibling groups run in parallel, different directions and operations one after the other."""
    worst: dict[tuple[tuple[int, ...], str], float] = {}
    for slow_group in slow:
        key = tuple(slow_group.among.places), slow_group.op
        worst[key] = max(worst.get(key, 0.0), slow_group.excess_ns)
    return sum(worst.values())


def _group_claim(
    view: View,
    exchanges: Communication,
    slow: Sequence[_SlowGroup],
    *,
    kind: str,
    title: str,
    ranks: tuple[int, ...],
    advice: tuple[str, ...],
    excess_ns: float,
    confidence: float,
) -> Claim:
    saved_ns = np.minimum(np.full(len(view.steps), excess_ns), view.step_ns)
    cost = cost_of(view, saved_ns)
    finding = Finding(
        kind=kind,
        severity=severity_by_cost(cost["share"], excess_ns),
        title=title,
        ranks=ranks,
        phase="comm",
        steps=view.span,
        cost=cost,
        evidence={
            "excess_ms": round(excess_ns / 1e6, 3),
            "groups": [
                _slow_group_row(exchanges, slow_group)
                for slow_group in sorted(slow, key=lambda slow_group: -slow_group.excess_ns)[:GROUPS_SHOWN]
            ],
            "groups_slow": len({slow_group.place for slow_group in slow}),
            "hosts": sorted(
                {view.window.hosts[row] for slow_group in slow for row in exchanges.groups[slow_group.place].rows}
            ),
            "steps_used": int(slow[0].among.transfer_ns.shape[1]),
        },
        advice=advice,
        confidence=confidence,
    )
    return Claim(finding=finding, explained_ns=saved_ns)


def _slow_group_row(exchanges: Communication, slow_group: _SlowGroup) -> dict[str, Any]:
    group = exchanges.groups[slow_group.place]
    return {
        "group": group.name,
        "kind": group.kind,
        "op": slow_group.op,
        "transfer_ms": round(slow_group.transfer_ns / 1e6, 3),
        "siblings_ms": round((slow_group.transfer_ns - slow_group.excess_ns) / 1e6, 3),
        "ratio": round(slow_group.ratio, 3),
        "bytes": round(slow_group.bytes),
        "bytes_ratio": round(slow_group.bytes_ratio, 3),
        "siblings": len(slow_group.among.places) - 1,
    }


# -- collectives that became slow -------------------------------------------------------------------------------------
# ``slow_collective`` over time: the same collective, with the same bytes, takes much longer than before.
#
# The minimum over the ranks is used, so it is the exchange and not a wait for a rank; if the ranks' own work became
# slower at the same time, the machine is to blame and other rules report it.  DDP's all-reduce is not covered here: how
# much of it shows depends on what hides it.


@dataclass(frozen=True, kw_only=True)
class _Drop:
    flow: Flow
    at: slice
    """Columns of the view."""
    before_ns: float
    level_ns: float
    bytes: float

    @property
    def lost_ns(self) -> float:
        return (self.level_ns - self.before_ns) * len(range(self.at.start, self.at.stop))


def find_slow_collective(view: View, exchanges: Communication, known: Collection[str]) -> list[Claim]:
    """``known``: names of groups with a finding already."""
    if len(view.steps) < thresholds.TREND_STEPS:
        return []
    drops = [
        drop
        for flow in exchanges.flows
        if flow.device or (flow.group.blocking and view.clock == "host")
        if flow.group.name not in known and len(flow.rows) > 1
        for drop in _drops(view, flow, _steps_known(view, exchanges, flow))
    ]
    if not drops:
        return []
    claim = _slow_collective_claim(view, drops)
    return [claim] if claim.finding.severity != "info" else []


def _steps_known(view: View, exchanges: Communication, flow: Flow) -> int:
    """How many of the view's steps could have recorded it: on the device not all may have been read."""
    if not flow.device or exchanges.measured is None:
        return len(view.steps)
    return int(exchanges.measured.places[view.columns].sum())


def _drops(view: View, flow: Flow, steps_known: int) -> list[_Drop]:
    least_ns = flow.least_ns[view.columns].astype(np.float64)
    seen = np.flatnonzero(~np.isnan(least_ns))
    if len(seen) < max(thresholds.CALLED_SHARE * steps_known, thresholds.TREND_STEPS):
        return []
    values, sent = least_ns[seen], flow.bytes_by_step[view.columns][seen]
    low, high = np.quantile(values, thresholds.SIEVE_QUANTILES)
    floor_ns = max(thresholds.WARNING_SHARE * view.median_step_ns, thresholds.EXCHANGE_FLOOR_NS)
    if high - low < floor_ns or high < thresholds.EXCHANGE_RATIO * low:
        return []
    starts, _ = levels(values, least_change=floor_ns)
    ends = [*starts[1:], len(values)]
    level = [float(np.median(values[start:end])) for start, end in zip(starts, ends, strict=True)]
    found = []
    for index in range(1, len(starts)):
        before = int(np.argmin(level[:index]))
        earlier, at = slice(starts[before], ends[before]), slice(starts[index], ends[index])
        sizes = float(np.median(sent[earlier])), float(np.median(sent[at]))
        alike = max(sizes) <= thresholds.BYTES_ALIKE * min(sizes)
        slower = level[index] >= max(thresholds.EXCHANGE_RATIO * level[before], level[before] + floor_ns)
        if alike and slower and at.stop - at.start >= thresholds.MIN_STEPS:
            columns = slice(int(seen[at.start]), int(seen[at.stop - 1]) + 1)
            drop = _Drop(flow=flow, at=columns, before_ns=level[before], level_ns=level[index], bytes=sizes[1])
            if _work_as_before(view, drop, slice(int(seen[earlier.start]), int(seen[earlier.stop - 1]) + 1)):
                found.append(drop)
    return found


def _work_as_before(view: View, drop: _Drop, earlier: slice) -> bool:
    work_ns = median_rank(view.work_ns)
    rise = np.nanmedian(work_ns[drop.at]) - np.nanmedian(work_ns[earlier])
    return bool(rise < thresholds.EXPLAINS_SHARE * (drop.level_ns - drop.before_ns))


def _slow_collective_claim(view: View, drops: list[_Drop]) -> Claim:
    worst = max(drops, key=lambda drop: drop.lost_ns)
    flow, at = worst.flow, worst.at
    saved_ns = np.zeros(len(view.steps))
    for drop in drops:
        if drop.flow.op == flow.op and drop.flow.group.kind == flow.group.kind:  # in parallel with the worst
            extra = drop.level_ns - drop.before_ns
            saved_ns[drop.at] = np.maximum(saved_ns[drop.at], extra)
    cost = cost_of(view, saved_ns)
    extra_ns = worst.level_ns - worst.before_ns
    over = at.stop < len(view.steps) - thresholds.STRETCH_STEPS
    when = (
        f"in steps {view.steps[at.start]} to {view.steps[at.stop - 1]}"
        if over
        else f"from step {view.steps[at.start]} on"
    )
    rates = [rate_text(worst.bytes / ns * 1e9) for ns in (worst.before_ns, worst.level_ns) if ns > 0]
    finding = Finding(
        kind="slow_collective",
        severity=severity_by_cost(cost["share"], extra_ns),
        title=(
            f"{flow.op} in {group_text(flow.group)} takes {ms_text(worst.level_ns / 1e6)} of a step {when}, up "
            f"from {ms_text(worst.before_ns / 1e6)}, on all ranks."
        ),
        phase="comm",
        steps=(int(view.steps[at.start]), int(view.steps[at.stop - 1])),
        cost=cost,
        evidence={
            "group": flow.group.name,
            "group_kind": flow.group.kind,
            "op": flow.op,
            "before_ms": round(worst.before_ns / 1e6, 3),
            "after_ms": round(worst.level_ns / 1e6, 3),
            "ratio": round(worst.level_ns / max(worst.before_ns, 1.0), 3),
            "bytes_per_step": round(worst.bytes),
            "groups_slow": len({drop.flow.group.name for drop in drops}),
            "steps_used": len(view.steps),
        },
        advice=(
            f"The same bytes went at {', now at '.join(rates)}: other traffic, or a link at a lower speed than before?",
            "All ranks wait equally, so no rank is to blame.",
        ),
        confidence=0.85,
    )
    return Claim(finding=finding, explained_ns=saved_ns)


# -- all communication rules ------------------------------------------------------------------------------------------

EXCHANGES_SHOWN = 8
POINT_TO_POINT = ("send", "recv")


def find_communication(view: View) -> list[Claim]:
    """On the device's clock only the device's own times count: the host's blocked time is meaningless there."""
    exchanges = view.window.communication
    if exchanges is None or (view.clock != "host" and exchanges.measured is None):
        return []
    uneven = find_uneven_groups(view, exchanges)
    known = {row["group"] for claim in uneven for row in claim.finding.evidence["groups"]}
    return [*uneven, *find_slow_collective(view, exchanges, known), *find_low_overlap(view, exchanges)]


def exchanges_of(view: View) -> list[dict[str, Any]]:
    """By group and operation, what blocks the rank that is blocked least, most first: for ``comm_bound``.

    On the device its duration, part of which may be hidden.
    """
    exchanges = view.window.communication
    if exchanges is None:
        return []
    if view.clock != "host":
        rows = [
            _exchange_row(flow.group.name, flow.group.kind, flow.op, flow.transfer_ns, flow.bytes)
            for flow in exchanges.flows
            if flow.device
        ]
        return sorted((row for row in rows if row["ms_per_step"] > 0), key=lambda row: -row["ms_per_step"])[
            :EXCHANGES_SHOWN
        ]
    rows = [*_of_flows(view, exchanges), *_of_reducers(view, exchanges)]
    return sorted((row for row in rows if row["ms_per_step"] > 0), key=lambda row: -row["ms_per_step"])[
        :EXCHANGES_SHOWN
    ]


def _of_flows(view: View, exchanges: Communication) -> list[dict[str, Any]]:
    return [
        _exchange_row(flow.group.name, flow.group.kind, flow.op, _mean(flow.least_ns[view.columns]), flow.bytes)
        for flow in exchanges.flows
        if flow.group.blocking and not flow.device
    ]


def _of_reducers(view: View, exchanges: Communication) -> list[dict[str, Any]]:
    return [
        _exchange_row("", "data", DDP_OP, _mean(reducer.exposed_ns[view.columns]), float(reducer.bytes))
        for reducer in exchanges.reducers
    ]


def _mean(values: Any) -> float:
    return float(np.nan_to_num(values).mean())


def _exchange_row(group: str, kind: str, op: str, exposed_ns: float, size: float) -> dict[str, Any]:
    return {
        "group": group,
        "kind": kind,
        "op": op,
        "ms_per_step": round(exposed_ns / 1e6, 3),
        "bytes_per_step": round(size),
        "bytes_per_second": round(size / exposed_ns * 1e9) if exposed_ns > 0 else None,
    }


def between_stages(view: View) -> bool:
    """Whether the ranks mostly wait for other stages of a pipeline."""
    exchanges = view.window.communication
    if exchanges is None or not view.window.stages:
        return False
    took = dict.fromkeys((True, False), 0.0)
    for flow in exchanges.flows:
        took[flow.op in POINT_TO_POINT] += float(flow.span_by_row.mean() if flow.device else flow.exposed_ns)
    return took[True] > took[False]


def bubble_share(view: View) -> float | None:
    """Share of a step that each stage is idle even if all are even: while the pipeline fills and drains.

    (stages - 1) / (microbatches + stages - 1).  All stages together receive each microbatch, and its gradient, once
    less than there are stages; with several stages per rank they do so more often, and the pipeline idles less.
    """
    exchanges, stages = view.window.communication, len(np.unique(view.groups))
    if exchanges is None or stages < 2:
        return None
    received = sum(flow.count * len(flow.rows) for flow in exchanges.flows if flow.op == "recv")
    replicas = len(view.ranks) / stages
    microbatches = received / replicas / (2 * (stages - 1))
    return (stages - 1) / (microbatches + stages - 1) if microbatches > 0 else None
