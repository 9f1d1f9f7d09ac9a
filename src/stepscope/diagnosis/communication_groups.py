"""Groups that do the same for different ranks, compared with each other: a slow link or host, a slow group, more bytes.

The columns of a mesh are siblings: each runs the same collectives among ranks of its own.  Only the exchange itself is
compared (what the last rank to come takes), so ranks that come late accuse nobody here.  A group that takes longer for
the same bytes has a slow link in it.  Which one, only other groups can tell: the rank whose groups are all slow, in two
directions of the mesh, or the host in which all slow groups lie.  Where nothing tells, the group alone is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.claims import Claim, severity_of
from stepscope.diagnosis.communication import Communication
from stepscope.diagnosis.communication_flows import Group
from stepscope.diagnosis.robust import medians, peer_deviation, persistence_z, z_needed
from stepscope.diagnosis.view import View, cost_of
from stepscope.records.collectives import OPS
from stepscope.records.finding import Finding
from stepscope.records.units import bytes_text, ms_text, named_ranks, rate_text

__all__ = ["find_uneven_groups", "group_text"]

Floats = NDArray[np.float64]
GROUPS_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """One operation in G sibling groups, over the K steps in which all of them were seen in it."""

    places: Sequence[int]
    """[G]; in ``Communication.groups``."""
    op: str
    transfer_ns: Floats
    """[G, K]; in a step."""
    bytes: Floats
    """[G]; in a step, the median."""


@dataclass(frozen=True, kw_only=True)
class _Slow:
    place: int
    among: _Compared
    excess_ns: float
    """In a step, over the siblings."""
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
    slow = [one for among in compared for one in _slow_in(view, among, sum(len(c.places) for c in compared))]
    same = [one for one in slow if one.bytes_ratio <= thresholds.BYTES_ALIKE]
    more = [one for one in slow if one.bytes_ratio >= thresholds.BYTES_RATIO]
    claims = [_imbalance(view, exchanges, more)] if more else []
    if same:
        culprits, host = _culprits(view, exchanges, compared, {one.place for one in same})
        claims.append(_straggler(view, exchanges, same, culprits, host) if culprits else _group(view, exchanges, same))
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


def _slow_in(view: View, among: _Compared, comparisons: int) -> Iterator[_Slow]:
    excess = peer_deviation(among.transfer_ns)
    least_ns = max(thresholds.WARNING_SHARE * view.median_step_ns, thresholds.EXCHANGE_FLOOR_NS)
    for index in np.flatnonzero(medians(excess) >= least_ns).tolist():
        own, usual = among.transfer_ns[index], among.transfer_ns[index] - excess[index]
        ratio = float(np.median(own)) / max(float(np.median(usual)), 1.0)
        mostly = float((own >= thresholds.EXCHANGE_RATIO * usual).mean()) >= thresholds.EXCHANGE_AGREES
        if ratio < thresholds.EXCHANGE_RATIO or not mostly or persistence_z(excess[index]) < z_needed(comparisons):
            continue
        others = float(np.median(np.delete(among.bytes, index)))
        yield _Slow(
            place=among.places[index],
            among=among,
            excess_ns=float(np.median(excess[index])),
            ratio=ratio,
            bytes_ratio=float(among.bytes[index]) / others if others else 1.0,
        )


def _culprits(
    view: View, exchanges: Communication, compared: Sequence[_Compared], slow: set[int]
) -> tuple[tuple[int, ...], str]:
    """Ranks that all slow groups have in common and no other has, and their host where it is the host; else nothing."""
    directions = {tuple(one.places) for one in compared}
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
    return host if sum(one == host for one in view.window.hosts) == len(suspects) else ""


def _straggler(view: View, exchanges: Communication, slow: Sequence[_Slow], ranks: tuple[int, ...], host: str) -> Claim:
    who = f"host {host}" if host else f"rank {ranks[0]}"
    worst = max(slow, key=lambda one: one.ratio)
    kinds = ", ".join(sorted({exchanges.groups[one.place].kind for one in slow}))
    excess_ns = _total(slow)
    return _claim(
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
            f"Look at the links of {who}: cable, switch port, errors (ip -s link, ethtool -S), speed negotiated.",
            "The ranks come to these collectives in time, so it is the transfer and not their work.",
        ),
        excess_ns=excess_ns,
        confidence=0.85 if host else 0.9,
    )


def _group(view: View, exchanges: Communication, slow: Sequence[_Slow]) -> Claim:
    worst = max(slow, key=lambda one: one.excess_ns)
    group = exchanges.groups[worst.place]
    others = f"other {group.kind} group" + ("s" if len(worst.among.places) > 2 else "")
    others_per_s = worst.bytes / max(worst.transfer_ns - worst.excess_ns, 1.0) * 1e9
    excess_ns = _total(slow)
    return _claim(
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
            "The ranks come in time, so it is a link between them: compare their hosts, switches and NUMA nodes.",
            f"It moves {rate_text(worst.bytes / worst.transfer_ns * 1e9)}, the others {rate_text(others_per_s)}.",
        ),
        excess_ns=excess_ns,
        confidence=0.85,
    )


def _imbalance(view: View, exchanges: Communication, slow: Sequence[_Slow]) -> Claim:
    worst = max(slow, key=lambda one: one.excess_ns)
    group = exchanges.groups[worst.place]
    spread_ns = worst.transfer_ns - float(medians(worst.among.transfer_ns).mean())
    return _claim(
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
            "Give the groups the like: balance the experts (auxiliary loss, capacity factor), split layers evenly.",
        ),
        excess_ns=max(spread_ns, 0.0),
        confidence=0.85,
    )


def _total(slow: Sequence[_Slow]) -> float:
    """In a step: sibling groups run side by side, different directions and operations one after the other."""
    worst: dict[tuple[tuple[int, ...], str], float] = {}
    for one in slow:
        key = tuple(one.among.places), one.op
        worst[key] = max(worst.get(key, 0.0), one.excess_ns)
    return sum(worst.values())


def _claim(
    view: View,
    exchanges: Communication,
    slow: Sequence[_Slow],
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
        severity=severity_of(cost["share"], excess_ns),
        title=title,
        ranks=ranks,
        phase="comm",
        steps=view.span,
        cost=cost,
        evidence={
            "excess_ms": round(excess_ns / 1e6, 3),
            "groups": [_row(exchanges, one) for one in sorted(slow, key=lambda one: -one.excess_ns)[:GROUPS_SHOWN]],
            "groups_slow": len({one.place for one in slow}),
            "hosts": sorted({view.window.hosts[row] for one in slow for row in exchanges.groups[one.place].rows}),
            "steps_used": int(slow[0].among.transfer_ns.shape[1]),
        },
        advice=advice,
        confidence=confidence,
    )
    return Claim(finding=finding, saved_ns=saved_ns)


def _row(exchanges: Communication, one: _Slow) -> dict[str, Any]:
    group = exchanges.groups[one.place]
    return {
        "group": group.name,
        "kind": group.kind,
        "op": one.op,
        "transfer_ms": round(one.transfer_ns / 1e6, 3),
        "siblings_ms": round((one.transfer_ns - one.excess_ns) / 1e6, 3),
        "ratio": round(one.ratio, 3),
        "bytes": round(one.bytes),
        "bytes_ratio": round(one.bytes_ratio, 3),
        "siblings": len(one.among.places) - 1,
    }
