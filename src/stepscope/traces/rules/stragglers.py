"""``collective_straggler``: ranks that come last to collectives, what that costs, and why they do.

Collectives are looked at by the set of ranks that share them (``ranks/arrivals.py``).  Ranks are *late* if each of them
comes last more often than chance explains, and together to most collectives; where that holds of no rank, the same is
asked of the few collectives that have nearly all of the waiting: a rank that is late once a step is on time for the
rest of it.  With them are ranks that come just before them.

What is *lost* by late ranks is what each of the others waits for them on average, as far as the waiting shows.  What is
*gained* by fixing them is less: the others then wait for the last of those that are left.  The price is the gain, as a
replay of all ranks has it (``peers``), never more than how much later than the last of the others they were; where a
device is behind its host the replay of steps on the host says nothing, and the latter is the price.

It is a warning by what is lost and critical by what is gained.  While ranks wait for each other, whatever makes a rank
faster that waits gains nothing, so it goes before other findings by what is lost, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.finding import SEVERITIES
from stepscope.records.units import ms_text, named_ranks
from stepscope.traces.path.peers import like_peers
from stepscope.traces.path.whatif import parse_change
from stepscope.traces.ranks.arrivals import Arrivals, lower_median
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.lateness import Cause, cause_of, waits_of_host
from stepscope.traces.rules.view import Claim, View, claim_of, cost_of, severity_of

__all__ = ["counts_by_rank", "find_stragglers", "of_group"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
EXACT_TRIALS = 200
GROUPS = {
    "data": "the data-parallel group",
    "tensor": "the tensor-parallel group",
    "pipeline": "the pipeline-parallel group",
    "expert": "the expert-parallel group",
    "context": "the context-parallel group",
}


@dataclass(frozen=True, kw_only=True)
class _Late:
    arrivals: Arrivals
    members: tuple[int, ...]
    """Indices of its members."""
    judged: Bools
    """[W]; the collectives they are judged by: all that do, or those with nearly all of the waiting."""
    lost_ns: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.arrivals.members[at] for at in self.members)

    @property
    def last_count(self) -> int:
        return int(np.isin(self.arrivals.last[self.judged], self.members).sum())


def find_stragglers(view: View) -> list[Claim]:
    """Of several groups with late ranks the costliest: once they are on time, the next trace tells of the others."""
    if len(view.ranks) < 2:
        return []
    rows = {rank: row for row, rank in enumerate(view.ranks)}
    found = []
    for arrivals in view.arrivals:
        if arrivals.across_stages or not rows.keys() >= set(arrivals.members):
            continue
        late = _late_of(view, arrivals, [rows[rank] for rank in arrivals.members])
        if late is not None:
            found.append(late)
    if not found:
        return []
    late = max(found, key=lambda each: each.lost_ns)
    return [_claim(view, late, [rows[rank] for rank in late.ranks])]


def _late_of(view: View, arrivals: Arrivals, rows: list[int]) -> _Late | None:
    """``rows``: of the members."""
    everything = ~arrivals.inherited
    for judged in (everything, everything & _heavy(arrivals)):
        members = _often_last(arrivals, judged)
        if not members:
            continue
        members = _with_near(arrivals, members)
        which = np.isin(arrivals.last, members) & ~arrivals.inherited
        by_ns = arrivals.late_ns(members)[which].max(axis=1, initial=0).sum()
        if by_ns < thresholds.EXPLAINS_SHARE * arrivals.lost_ns(members):
            # Most of the others are as late: a few come early, and wait for all of them.
            continue
        others = [row for at, row in enumerate(rows) if at not in members]
        shown_ns = int(np.sort(view.times.exposed_ns[others])[(len(others) - 1) // 2])
        lost_ns = min(arrivals.lost_ns(members), shown_ns)
        worst = rows[members[0]]
        share, each_ns = lost_ns / int(view.step_ns[worst]), lost_ns / int(view.steps[worst])
        if share >= thresholds.STRAGGLER_SHARE and each_ns >= thresholds.FLOOR_NS:
            return _Late(arrivals=arrivals, members=members, judged=judged, lost_ns=lost_ns)
    return None


def _heavy(arrivals: Arrivals) -> Bools:
    """[W]; those that have nearly all of the waiting, the longest first."""
    waits = np.nansum(arrivals.exposed_wait_ns, axis=1)
    order = np.argsort(-waits, kind="stable")
    before = np.cumsum(waits[order]) - waits[order]
    out = np.zeros(len(arrivals), np.bool_)
    out[order] = (before < thresholds.HEAVY_SHARE * waits.sum()) & (waits[order] > 0)
    return out


def _often_last(arrivals: Arrivals, judged: Bools) -> tuple[int, ...]:
    """Members that come last too often for chance, and together to most; empty: nobody does."""
    ranks, of = len(arrivals.members), int(judged.sum())
    counts = np.bincount(arrivals.last[judged], minlength=ranks)
    chance = min(thresholds.LAST_TIMES_CHANCE / ranks, thresholds.LAST_AT_MOST)
    if of < thresholds.COLLECTIVES_AT_LEAST:
        return ()
    if of < thresholds.COLLECTIVES_FEW:
        waits = arrivals.late_by_ns[judged]
        even = waits.max() > 0 and waits.min() >= thresholds.EVENLY * waits.max()
        return (int(counts.argmax()),) if counts.max() == of and even else ()
    often = [
        at
        for at in np.argsort(-counts, kind="stable").tolist()
        if counts[at] >= chance * of and ranks * _at_least(int(counts[at]), of, 1 / ranks) < thresholds.BY_CHANCE
    ][: max(ranks // 2, 1)]
    needed = max(thresholds.LAST_SHARE, min(len(often) * chance, thresholds.LAST_AT_MOST))
    return tuple(often) if often and counts[often].sum() >= needed * of else ()


def _at_least(count: int, of: int, chance: float) -> float:
    """The probability of so many or more; of many trials what it is at most (Chernoff)."""
    if of > EXACT_TRIALS:
        share = count / of
        if share <= chance:
            return 1.0
        rest = (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
        return math.exp(-of * (share * math.log(share / chance) + rest))
    return sum(math.comb(of, each) * chance**each * (1 - chance) ** (of - each) for each in range(count, of + 1))


def _with_near(arrivals: Arrivals, members: tuple[int, ...]) -> tuple[int, ...]:
    """With those that come nearly as late, in most of the same collectives; not if that were most of the group."""
    which = np.isin(arrivals.last, members) & ~arrivals.inherited
    early_ns = arrivals.early_ns[which]
    late_ns = lower_median(np.delete(early_ns, members, axis=1))
    near = [
        at
        for at in range(len(arrivals.members))
        if at not in members
        and (early_ns[:, at] < late_ns / 2).mean() > thresholds.LAST_SHARE
        and np.nansum(early_ns[:, at]) < np.nansum(late_ns) / 2
    ]
    return (*members, *near) if len(members) + len(near) <= len(arrivals.members) // 2 else members


def _claim(view: View, late: _Late, rows: list[int]) -> Claim:
    arrivals, collectives = late.arrivals, view.job.collectives
    where = np.isin(np.arange(len(view.ranks)), rows)
    first, steps = rows[0], int(view.steps[rows[0]])
    each_ns, share = late.lost_ns / steps, late.lost_ns / int(view.step_ns[first])
    gain_ns, of_ns = _gain(view, late, first)
    causes = _causes(view, late, rows)
    little = gain_ns < thresholds.NEARLY_ALL * late.lost_ns
    them = "it" if len(rows) == 1 else "them"
    alone = f"; fixing {them} alone gains {ms_text(gain_ns / steps / 1e6)}{_next(late)}" if little else ""
    others = "the other waits" if len(arrivals.members) == 2 else "the others wait"
    seldom = bool(_few_steps(late))
    how_long = f"{ms_text(late.lost_ns / 1e6)} in all" if seldom else view.each_step(each_ns)
    claim = claim_of(
        view,
        "collective_straggler",
        f"{_who(view, late)}; {others} {how_long} for {them}{_times(arrivals)}{_why(late.ranks, causes)}{alone}.",
        where=where,
        saved_ns=np.where(where, gain_ns, 0),
        of_ns=np.where(where, of_ns, view.step_ns),
        phase="input" if {cause.kind for cause in causes} == {"input"} else None,
        evidence={
            "group": arrivals.group.name or None,
            "group_kind": arrivals.group.kind,
            "group_ranks": list(arrivals.members),
            "last_count": late.last_count,
            "collectives": int(late.judged.sum()),
            "last_counts": counts_by_rank(arrivals),
            "mostly_waiting": arrivals.mostly_waiting,
            "waited_ms_per_step": round(each_ns / 1e6, 3),
            "waited_share": round(share, 4),
            "gain_ms_per_step": round(gain_ns / steps / 1e6, 3),
            "longest_waits_ms": round(sum(collectives.cost_by_rank_ns[rank] for rank in late.ranks) / 1e6, 3),
            "alone_ms": round(arrivals.alone_ns(late.members) / 1e6, 3),
            "transfer_ms": round(collectives.transfer_ns / 1e6, 3),
            "causes": {
                str(rank): {
                    "cause": cause.kind or None,
                    "excess_ms": round(cause.more_ns / 1e6, 3) if cause.kind else None,
                    **cause.evidence,
                }
                for rank, cause in zip(late.ranks, causes, strict=True)
            },
        },
        advice=_advice(late.ranks, causes),
        confidence=0.6 if arrivals.lacking or seldom else 0.9,
    )
    finding = claim.finding
    if arrivals.lacking:
        # Somebody whose trace is not here may come later still.
        finding = replace(finding, cost={**finding.cost, "up_to": True})
    lost = severity_of(view, cost_of(view, np.where(where, late.lost_ns, 0), where))
    if finding.severity == "info":
        finding = replace(finding, severity=min(lost, "warning", key=SEVERITIES.index))
    # By threads of the host the others wait with an idle device: it is these ranks' doing, as is what made them late.
    own_ns = np.zeros(len(view.ranks), np.int64)
    for row, cause in zip(rows, causes, strict=True):
        own_ns[row] = 0 if cause.kind == "before_the_trace" else min(cause.more_ns, int(view.idle.host_ns[row]))
    return replace(claim, finding=finding, idle_ns=waits_of_host(view) + own_ns)


def _gain(view: View, late: _Late, row: int) -> tuple[int, int]:
    """What fixing these ranks gains over all steps, and how long these are."""
    job, ranks = view.job, late.ranks
    alone_ns = min(late.arrivals.alone_ns(late.members), late.lost_ns)
    if not job.path.steps or view.analyses[row].pace.by_device:
        return alone_ns, int(view.step_ns[row])
    again = like_peers(job.ranks, job.collectives, parse_change(f"rank:{ranks[0]}=peers"), ranks[1:])
    return min(alone_ns, max(again.gain_ns, 0)), max(sum(again.before_ns), 1)


def _causes(view: View, late: _Late, rows: list[int]) -> list[Cause]:
    arrivals = late.arrivals
    peers = [view.ranks.index(rank) for rank in arrivals.members if rank not in late.ranks]
    which = np.isin(arrivals.last, late.members) & ~arrivals.inherited
    late_ns = arrivals.late_ns(late.members)[which].sum(axis=0)
    return [cause_of(view, row, peers, float(own_ns)) for row, own_ns in zip(rows, late_ns, strict=True)]


def counts_by_rank(arrivals: Arrivals) -> dict[str, int]:
    counts = np.bincount(arrivals.last, minlength=len(arrivals.members)).tolist()
    return {str(rank): count for rank, count in zip(arrivals.members, counts, strict=True)}


def _who(view: View, late: _Late) -> str:
    arrivals, ranks, of = late.arrivals, tuple(sorted(late.ranks)), int(late.judged.sum())
    come = "comes" if len(ranks) == 1 else "come"
    heavy = _few_steps(late) or ", those with nearly all of the waiting" * (of < int((~arrivals.inherited).sum()))
    what = f"{late.last_count:,} of {of:,} collectives{of_group(view, arrivals)}"
    return f"{named_ranks(ranks)} {come} last to {what}{heavy}{_turns(late)}"


def _few_steps(late: _Late) -> str:
    """Where nearly all of the waiting is in less than half of the steps: in which; else nothing."""
    arrivals = late.arrivals
    steps = np.unique(arrivals.step[arrivals.step >= 0])
    own = np.unique(arrivals.step[late.judged & np.isin(arrivals.last, late.members)]).tolist()
    if len(steps) < thresholds.SURE_STEPS or 2 * len(own) >= len(steps) or own[0] < 0:
        return ""
    numbers = ", ".join(map(str, own[:6])) + (" …" if len(own) > 6 else "")
    return f" in {'step' if len(own) == 1 else 'steps'} {numbers}, where nearly all of the waiting is"


def of_group(view: View, arrivals: Arrivals) -> str:
    """Which group, where that is more than all ranks there are; `` of the tensor-parallel group``."""
    whole = len(arrivals.members) == len(view.ranks)
    known = GROUPS.get(arrivals.group.kind)
    if known:
        return f" of {known}{'' if whole else f' of {named_ranks(arrivals.members).lower()}'}"
    return "" if whole else f" of {named_ranks(arrivals.members).lower()}"


def _turns(late: _Late) -> str:
    """Where one rank is late first and another from some step on: when; else nothing."""
    if len(late.members) < 2:
        return ""
    spans = []
    for at, rank in zip(late.members, late.ranks, strict=True):
        when = np.flatnonzero((late.arrivals.last == at) & late.judged)
        if len(when) < 2:
            return ""
        first, last = np.percentile(when, [10, 90], method="nearest").astype(int)
        spans.append((int(first), int(last), rank))
    spans.sort()
    if any(one[1] >= other[0] for one, other in itertools.pairwise(spans)):
        return ""
    turns = [f"rank {spans[0][2]} at first"]
    for start, _, rank in spans[1:]:
        step = int(late.arrivals.step[start])
        turns.append(f"rank {rank} {f'from about step {step} on' if step >= 0 else 'later'}")
    return f" ({', '.join(turns)})"


def _times(arrivals: Arrivals) -> str:
    """How waiting compares with the transfer, where it is many times that."""
    if not arrivals.transfer_ns or arrivals.wait_ns < thresholds.MANY_TIMES * arrivals.transfer_ns:
        return ""
    return f" ({arrivals.wait_ns / arrivals.transfer_ns:,.0f} times as much waiting as transfer)"


def _why(ranks: Sequence[int], causes: Sequence[Cause]) -> str:
    if not any(cause.kind for cause in causes):
        return "; no single cause in the traces explains it"
    if len(ranks) == 1:
        return f"; {causes[0].words}"
    told = sorted(zip(ranks, causes, strict=True), key=lambda each: each[0])
    if {cause.kind for cause in causes} == {causes[0].kind}:
        others = named_ranks([rank for rank, _ in told[1:]]).lower()
        return f"; rank {told[0][0]}: {told[0][1].words}; {others} likewise"
    return "".join(f"; rank {rank}: {cause.words or 'no single cause in its trace'}" for rank, cause in told)


def _next(late: _Late) -> str:
    """For whom the others then wait most."""
    arrivals = late.arrivals
    if len(arrivals.members) - len(late.members) < 2:
        return ""
    early_ns = arrivals.early_ns[np.isin(arrivals.last, late.members) & ~arrivals.inherited].copy()
    early_ns[:, list(late.members)] = np.nan
    usual_ns = lower_median(early_ns)
    latest = np.where(np.isnan(early_ns), np.inf, early_ns).argmin(axis=1)
    # A nanosecond each: where none is later than the others by itself, the one that most often is.
    cost_ns = np.bincount(latest, usual_ns - early_ns[np.arange(len(latest)), latest] + 1)
    return f", then they wait for rank {arrivals.members[int(cost_ns.argmax())]}"


def _advice(ranks: Sequence[int], causes: Sequence[Cause]) -> tuple[str, ...]:
    out: list[str] = []
    for kind in dict.fromkeys(cause.kind for cause in causes):
        own = [rank for rank, cause in zip(ranks, causes, strict=True) if cause.kind == kind]
        evidence = next(cause.evidence for cause in causes if cause.kind == kind)
        out += _advice_on(kind, named_ranks(sorted(own)).lower(), evidence)
    return tuple(out)


def _advice_on(kind: str, who: str, evidence: dict[str, Any]) -> tuple[str, ...]:
    if kind == "input":
        return (
            f"Look at what {who} reads: larger or remote files, fewer DataLoader workers, a busy disk.",
            "Give every rank the same number of samples (DistributedSampler) and shuffle large items across ranks.",
        )
    if kind == "slower_kernels":
        device = f"Check the device of {who}: clocks, power limit, temperature (nvidia-smi -q -d PERFORMANCE), sharing."
        if evidence.get("same_shapes"):
            return (device,)
        return (device, "Trace with record_shapes=True to rule out larger inputs: sequence length, batch, experts.")
    if kind == "more_work":
        return (f"Balance what {who} gets: sequence length, batch, experts, layers; look for branches only it takes.",)
    if kind == "copies":
        return (f"Look at what {who} copies, from which memory, and whether its PCIe link is shared or slower.",)
    if kind == "gaps":
        return (f"Look for other processes on the device of {who}, and for waits of its streams for each other.",)
    if kind == "before_the_trace":
        return ("Trace three steps or more: what held it up lies before the first one.",)
    if kind == "":
        return (f"Compare the timeline of {who} with a peer's in the merged one (--perfetto), before the long waits.",)
    return (
        f"Look for work of the host that only {who} does: logging, metrics, saving, printing, garbage collection.",
        "Check its cores: other processes, NUMA placement, CPU frequency. Compare it with a peer (--perfetto).",
    )
