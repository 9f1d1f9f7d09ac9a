"""Rules about waiting for ranks: stragglers and why they are late, jitter, pipeline bubbles.

``collective_straggler`` names ranks that arrive last at collectives, what that costs, and the cause.

Collectives are grouped by the set of ranks that share them (``arrivals.py``). Which of them are late is decided in
``judge/late_ranks.py``, by the order of their arrivals.

The time *lost* to late ranks is what each of the others waits for them on average, as far as the wait is exposed. The
time *gained* by fixing them is less, because the others then wait for the last of the remaining ranks. The price is the
gain according to a replay of all ranks (``like_peers``), but never more than how much later they were than the last of
the others. If a device is behind its host, a replay of host steps is not meaningful and the latter is the price.

The lost time decides on a warning, the gained time on critical. While ranks wait for each other, making a waiting rank
faster gains nothing, so this finding is also ranked by the lost time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.judge import thresholds as shared
from stepscope.judge.chain import Claim
from stepscope.judge.late_ranks import last_ranks, late_by_order
from stepscope.judge.statistics import lower_median_rank
from stepscope.records.finding import lowest
from stepscope.records.text import ms_text, named_ranks, ns_text, share_text
from stepscope.traces.across_ranks.arrivals import Arrivals
from stepscope.traces.across_ranks.replay import like_peers
from stepscope.traces.path.whatif import parse_change
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import JobView, claim_of, cost_of, halved, holes_of, in_ms, severity_of

if TYPE_CHECKING:
    from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["find_bubble", "find_jitter", "find_stragglers"]


# -- causes of lateness -----------------------------------------------------------------------------------------------
# The cause is what a late rank spends longer on than the median of the ranks that are not late. Every candidate is a
# time that the traces contain for all ranks. One is named only if its excess explains half of the lateness. Longer
# computation is split further: the same kernels that run longer, or more kernels; with shapes in the trace also larger
# inputs.

Ints = NDArray[np.int64]
NAME_LENGTH = 48


@dataclass(frozen=True, kw_only=True)
class LatenessCause:
    """Why a rank is late.

    ``kind``: ``input``, ``garbage``, ``compiling``, ``slower_kernels``, ``more_work``, ``copies``, ``host``, ``gaps``,
    ``python``, ``before_the_trace``; empty if no single cause in the traces explains it.
    """

    kind: str = ""
    words: str = ""
    """A clause about one rank: ``it spends 3.20 ms a step more than its peers in the DataLoader``."""
    more_ns: int = 0
    """Total over all steps."""
    evidence: dict[str, Any] = field(default_factory=dict)


def waits_of_host(view: JobView) -> Ints:
    """Return how long each rank waits for others in host collectives while its device idles, [R]."""
    waited_ns = view.each(lambda analysis: int(view.job.collectives.wait_ns.get(analysis.rank, 0)))
    return np.where(view.host_comm, waited_ns, 0)


def cause_of(view: JobView, row: int, peers: Sequence[int], late_ns: float) -> LatenessCause:
    """Find the cause of ``late_ns`` (total over all steps); ``row`` and ``peers`` are rows of the view."""
    if not peers:
        return LatenessCause()
    kind, more_ns = max(_excesses(view, row, peers), key=lambda each: each[1])
    if more_ns <= 0 or more_ns < thresholds.EXPLAINS_SHARE * late_ns:
        return LatenessCause()
    each = f"{ms_text(more_ns / int(view.steps[row]) / 1e6)}{' a step' if view.stepped else ''}"
    if kind == "computing":
        return _computing(view, row, peers, more_ns, each)
    words, evidence = _words(view, row, peers, kind, more_ns, each)
    return LatenessCause(kind=kind, words=words, more_ns=more_ns, evidence=evidence)


def _excesses(view: JobView, row: int, peers: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the candidates, the most specific first: the first one wins a tie."""
    shifts = view.job.clocks.shifts
    starts = view.each(
        lambda analysis: analysis.meta.origin_ns + analysis.steps[0].start_ns - shifts.get(analysis.rank, 0)
    )
    everything: tuple[tuple[str, Ints], ...] = (
        ("input", view.each(lambda analysis: analysis.host.loading_ns)),
        ("garbage", view.each(lambda analysis: sum(pause.dur_ns for pause in analysis.host.pauses))),
        ("compiling", view.each(lambda analysis: analysis.host.compile_ns)),
        ("computing", view.times.compute_ns),
        ("copies", view.each(lambda analysis: analysis.pace.work.exposed_memory_ns)),
        ("host", np.where(view.on_device, view.idle.host_ns - waits_of_host(view), 0)),
        ("gaps", view.idle.kernel_ns + view.idle.other_ns),
        ("python", view.each(lambda analysis: analysis.exchanges.host.idle_ns if analysis.exchanges.host else 0)),
        ("before_the_trace", starts if view.stepped else np.zeros_like(starts)),
    )
    for kind, values in everything:
        yield kind, int(values[row]) - median_low(values[list(peers)].tolist())


def _words(
    view: JobView, row: int, peers: Sequence[int], kind: str, more_ns: int, each: str
) -> tuple[str, dict[str, Any]]:
    if kind == "before_the_trace":
        return f"it starts the first traced step {ms_text(more_ns / 1e6)} after its peers, delayed before the trace", {}
    if kind in ("host", "python"):
        holes = holes_of(view.analyses[row])
        place = holes[0][0] if holes and holes[0][1] >= thresholds.EXPLAINS_SHARE * more_ns else None
        if place:
            return f"its host spends {each} more than its peers' in {place}", {"place": place}
        if kind == "python":
            return f"it spends {each} more than its peers between operators", {}
        words = f"its device waits {each} longer than its peers' for the host to launch kernels"
        return words, _launching(view, row, peers)
    if kind == "gaps":
        return f"its device idles {each} longer than its peers' before kernels that are already queued", {}
    doing = {
        "input": "in the DataLoader",
        "garbage": "collecting garbage",
        "compiling": "compiling",
        "copies": "copying to or from the device",
    }
    return f"it spends {each} more than its peers {doing[kind]}", {}


def _launching(view: JobView, row: int, peers: Sequence[int]) -> dict[str, Any]:
    """Compare how far the host runs ahead of its device with the same figure of the peers."""

    def middle(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median_low(known) if known else None

    own = view.analyses[row].pace.device
    others = [view.analyses[peer].pace.device for peer in peers]
    return {
        "launch_delay_ns": own.launch_delay_ns_median,
        "peers_launch_delay_ns": middle([each.launch_delay_ns_median for each in others]),
        "mean_queue": _rounded(own.mean_queue),
        "peers_mean_queue": _rounded(middle([each.mean_queue for each in others])),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _computing(view: JobView, row: int, peers: Sequence[int], more_ns: int, each: str) -> LatenessCause:
    """Distinguish the same kernels running longer from more kernels and from larger inputs."""
    analysis, others = view.analyses[row], [view.analyses[peer] for peer in peers]
    own, usual = _kernels(analysis), _usual(others)
    longer = {name: count * (total / count - usual[name][1]) for name, (count, total) in own.items() if name in usual}
    added = {
        name: (count - usual[name][0]) * usual[name][1] if name in usual else total
        for name, (count, total) in own.items()
    }
    larger = _larger(analysis, others)
    if larger:
        words = f"it has {each} more to compute than its peers: {larger}"
        return LatenessCause(kind="more_work", words=words, more_ns=more_ns, evidence={"larger_input": larger})
    if not longer and not added:
        return LatenessCause(kind="more_work", words=f"it computes {each} longer than its peers", more_ns=more_ns)
    if sum(added.values()) > sum(longer.values()):
        count, peers_count = (sum(figures[0] for figures in kernels.values()) for kernels in (own, usual))
        words = (
            f"it has {each} more to compute than its peers: {count:,.0f} kernels{' a step' if view.stepped else ''}, "
            f"not {peers_count:,.0f}"
        )
        counts = {"kernels_per_step": round(count, 1), "peers_kernels_per_step": round(peers_count, 1)}
        return LatenessCause(kind="more_work", words=words, more_ns=more_ns, evidence=counts)
    name = max(longer, key=lambda name: longer[name])
    mean_ns, usual_ns = own[name][1] / own[name][0], usual[name][1]
    words = (
        f"its kernels take {each} longer than its peers' ({_short(name)} {ns_text(mean_ns)} instead of "
        f"{ns_text(usual_ns)}, {share_text(mean_ns / usual_ns - 1)} longer)"
    )
    same = None if _shapes(analysis) is None or None in map(_shapes, others) else True
    evidence = {
        "kernel": name,
        "kernel_ns": round(mean_ns),
        "peers_kernel_ns": round(usual_ns),
        "same_shapes": same,
    }
    return LatenessCause(kind="slower_kernels", words=words, more_ns=more_ns, evidence=evidence)


def _short(name: str) -> str:
    name = name.removeprefix("void ").partition("(")[0]
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def _kernels(analysis: RankAnalysis) -> dict[str, tuple[float, float]]:
    """Map kernel names to count and time per step, without communication kernels."""
    table = analysis.tables.get("kernels")
    steps = max(len(analysis.steps), 1)
    return {
        row["name"]: (row["count"] / steps, row["total_ns"] / steps)
        for row in (table.to_rows() if table else ())
        if row["class"] != "communication"
    }


def _usual(others: Sequence[RankAnalysis]) -> dict[str, tuple[float, float]]:
    """Map kernel names to the median count per step and the median mean duration, for kernels that most ranks have."""
    tables = [_kernels(analysis) for analysis in others]
    out = {}
    for name in {name for table in tables for name in table}:
        found = [table[name] for table in tables if name in table]
        if len(found) * 2 > len(tables):
            out[name] = (median_low(count for count, _ in found), median_low(total / count for count, total in found))
    return out


def _shapes(analysis: RankAnalysis) -> dict[tuple[str, str], int] | None:
    """Map operators and their inputs to device time; None if shapes were not recorded."""
    table = analysis.tables.get("operators_by_shape")
    rows = [row for row in table.to_rows() if row["input_dims"]] if table else []
    times = {(row["operator"], str(row["input_dims"])): row["device_self_ns"] for row in rows if row["device_self_ns"]}
    return times or None


def _larger(analysis: RankAnalysis, others: Sequence[RankAnalysis]) -> str:
    """Name the heaviest operator with inputs no peer has, if such operators dominate the device time; else empty."""
    own, known = _shapes(analysis), [_shapes(other) for other in others]
    if own is None or None in known:
        return ""
    theirs = {key for shapes in known for key in shapes or ()}
    differing = {key: time_ns for key, time_ns in own.items() if key not in theirs}
    if sum(differing.values()) * 2 < sum(own.values()):
        return ""
    operator, dims = max(differing, key=lambda key: differing[key])
    like = [key for key in theirs if key[0] == operator]
    return f"{operator} of {dims}, not {max(like)[1]}" if like else f"{operator} of {dims}"


# -- stragglers -------------------------------------------------------------------------------------------------------

Bools = NDArray[np.bool_]
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
    """Indices of the late members."""
    judged: Bools
    """[W]; the collectives they are judged by: all of them, or those with nearly all of the waiting."""
    lost_ns: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.arrivals.members[at] for at in self.members)

    @property
    def last_count(self) -> int:
        return int(np.isin(self.arrivals.intervals.last[self.judged], self.members).sum())


def find_stragglers(view: JobView) -> list[Claim]:
    """Report the costliest group with late ranks only: once it is fixed, the next trace shows the others."""
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


def _late_of(view: JobView, arrivals: Arrivals, rows: list[int]) -> _Late | None:
    """Find late ranks in one group that cost enough; ``rows`` are the rows of its members."""
    for late in late_by_order(arrivals.intervals):
        others = [row for at, row in enumerate(rows) if at not in late.ranks]
        shown_ns = int(np.sort(view.times.exposed_ns[others])[(len(others) - 1) // 2])
        lost_ns = min(arrivals.intervals.lost_ns(late.ranks), shown_ns)
        worst = rows[late.ranks[0]]
        each_ns = lost_ns / int(view.steps[worst])
        if each_ns >= max(thresholds.STRAGGLER_SHARE * view.step_time_ns, thresholds.FLOOR_NS):
            return _Late(arrivals=arrivals, members=late.ranks, judged=late.judged, lost_ns=lost_ns)
    return None


def _claim(view: JobView, late: _Late, rows: list[int]) -> Claim:
    arrivals, collectives = late.arrivals, view.job.collectives
    where = np.isin(np.arange(len(view.ranks)), rows)
    first, steps = rows[0], int(view.steps[rows[0]])
    gain_ns = _gain(view, late, first)
    each_ns = late.lost_ns / steps
    share = each_ns / view.step_time_ns
    causes = _causes(view, late, rows)
    little = gain_ns < thresholds.NEARLY_ALL * late.lost_ns
    them = "it" if len(rows) == 1 else "them"
    alone = f"; fixing {them} alone gains {ms_text(gain_ns / steps / 1e6)}{_next(late)}" if little else ""
    others = "the other waits" if len(arrivals.members) == 2 else "the others wait"
    seldom = bool(_few_steps(late))
    in_all = f"{ms_text(late.lost_ns / 1e6)} in all ({share_text(share)} of all steps)"
    how_long = in_all if seldom else view.each_step(each_ns)
    claim = claim_of(
        view,
        "collective_straggler",
        f"{_who(view, late)}; {others} {how_long} for {them}{_times(arrivals)}{_why(late.ranks, causes)}{alone}.",
        where=where,
        saved_ns=np.where(where, gain_ns, 0),
        phase="input" if {cause.kind for cause in causes} == {"input"} else None,
        evidence={
            "group": arrivals.group.name or None,
            "group_kind": arrivals.group.kind,
            "group_ranks": list(arrivals.members),
            "last_count": late.last_count,
            "collectives": int(late.judged.sum()),
            "last_counts": counts_by_rank(arrivals),
            "mostly_waiting": arrivals.mostly_waiting,
            "waited_ms_per_step": in_ms(each_ns),
            "waited_share": round(share, 4),
            "gain_ms_per_step": in_ms(gain_ns / steps),
            "longest_waits_ms": in_ms(sum(collectives.cost_by_rank_ns[rank] for rank in late.ranks)),
            "alone_ms": in_ms(arrivals.alone_ns(late.members)),
            "transfer_ms": in_ms(collectives.transfer_ns),
            "causes": {
                str(rank): {
                    "cause": cause.kind or None,
                    "excess_ms": in_ms(cause.more_ns) if cause.kind else None,
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
        # A rank whose trace is missing may arrive even later.
        finding = replace(finding, cost={**finding.cost, "up_to": True})
    lost = severity_of(view, cost_of(view, np.where(where, late.lost_ns, 0), where))
    if finding.severity == "info":
        finding = replace(finding, severity=lowest(lost, "warning"))
    # With host collectives the others wait with an idle device. These ranks cause that idle time, as well as the idle
    # time from whatever made them late.
    own_ns = np.zeros(len(view.ranks), np.int64)
    for row, cause in zip(rows, causes, strict=True):
        own_ns[row] = 0 if cause.kind == "before_the_trace" else min(cause.more_ns, int(view.idle.host_ns[row]))
    return replace(claim, finding=finding, explained_ns=waits_of_host(view) + own_ns)


def _gain(view: JobView, late: _Late, row: int) -> int:
    """Return what fixing these ranks gains over all steps."""
    job, ranks = view.job, late.ranks
    alone_ns = min(late.arrivals.alone_ns(late.members), late.lost_ns)
    if not job.path.steps or view.analyses[row].pace.by_device:
        return alone_ns
    replayed = like_peers(job.ranks, job.collectives, parse_change(f"rank:{ranks[0]}=peers"), ranks[1:])
    return min(alone_ns, max(replayed.gain_ns, 0))


def _causes(view: JobView, late: _Late, rows: list[int]) -> list[LatenessCause]:
    arrivals = late.arrivals
    peers = [view.ranks.index(rank) for rank in arrivals.members if rank not in late.ranks]
    which = arrivals.intervals.waits_for(late.members)
    late_ns = arrivals.intervals.late_ns(late.members)[:, which].sum(axis=1)
    return [cause_of(view, row, peers, float(own_ns)) for row, own_ns in zip(rows, late_ns, strict=True)]


def counts_by_rank(arrivals: Arrivals) -> dict[str, int]:
    counts = np.bincount(arrivals.intervals.last, minlength=len(arrivals.members)).tolist()
    return {str(rank): count for rank, count in zip(arrivals.members, counts, strict=True)}


def _who(view: JobView, late: _Late) -> str:
    arrivals, ranks, of = late.arrivals, tuple(sorted(late.ranks)), int(late.judged.sum())
    come = "comes" if len(ranks) == 1 else "come"
    heavy = _few_steps(late) or ", those with nearly all of the waiting" * (of < int(arrivals.intervals.counts.sum()))
    what = f"{late.last_count:,} of {of:,} collectives{of_group(view, arrivals)}"
    return f"{named_ranks(ranks)} {come} last to {what}{heavy}{_turns(late)}"


def _few_steps(late: _Late) -> str:
    """Name the steps, if fewer than half of them have nearly all of the waiting; else empty."""
    arrivals = late.arrivals
    steps = np.unique(arrivals.step[arrivals.step >= 0])
    own = np.unique(arrivals.step[late.judged & np.isin(arrivals.intervals.last, late.members)]).tolist()
    if len(steps) < thresholds.SURE_STEPS or 2 * len(own) >= len(steps) or own[0] < 0:
        return ""
    numbers = ", ".join(map(str, own[:6])) + (" …" if len(own) > 6 else "")
    return f" in {'step' if len(own) == 1 else 'steps'} {numbers}, where nearly all of the waiting is"


def of_group(view: JobView, arrivals: Arrivals) -> str:
    """Describe the group, `` of the tensor-parallel group``; empty if it is simply all ranks."""
    whole = len(arrivals.members) == len(view.ranks)
    known = GROUPS.get(arrivals.group.kind)
    if known:
        return f" of {known}{'' if whole else f' of {named_ranks(arrivals.members).lower()}'}"
    return "" if whole else f" of {named_ranks(arrivals.members).lower()}"


def _turns(late: _Late) -> str:
    """Say when, if one rank is late first and another from some step on; else empty."""
    if len(late.members) < 2:
        return ""
    spans = []
    for at, rank in zip(late.members, late.ranks, strict=True):
        when = np.flatnonzero((late.arrivals.intervals.last == at) & late.judged)
        if len(when) < 2:
            return ""
        first, last = np.percentile(when, [10, 90], method="nearest").astype(int)
        spans.append((int(first), int(last), rank))
    spans.sort()
    if any(span[1] >= following[0] for span, following in itertools.pairwise(spans)):
        return ""
    turns = [f"rank {spans[0][2]} at first"]
    for start, _, rank in spans[1:]:
        step = int(late.arrivals.step[start])
        turns.append(f"rank {rank} {f'from about step {step} on' if step >= 0 else 'later'}")
    return f" ({', '.join(turns)})"


def _times(arrivals: Arrivals) -> str:
    """Compare waiting with transfer, if it is many times as long; else empty."""
    if not arrivals.transfer_ns or arrivals.wait_ns < thresholds.MANY_TIMES * arrivals.transfer_ns:
        return ""
    return f" ({arrivals.wait_ns / arrivals.transfer_ns:,.0f} times as much waiting as transfer)"


def _why(ranks: Sequence[int], causes: Sequence[LatenessCause]) -> str:
    if not any(cause.kind for cause in causes):
        return "; no single cause in the traces explains it"
    if len(ranks) == 1:
        return f"; {causes[0].words}"
    reasons = sorted(zip(ranks, causes, strict=True), key=lambda each: each[0])
    if {cause.kind for cause in causes} == {causes[0].kind}:
        others = named_ranks([rank for rank, _ in reasons[1:]]).lower()
        return f"; rank {reasons[0][0]}: {reasons[0][1].words}; {others} likewise"
    return "".join(f"; rank {rank}: {cause.words or 'no single cause in its trace'}" for rank, cause in reasons)


def _next(late: _Late) -> str:
    """Name the rank that the others would then wait for most."""
    arrivals = late.arrivals
    if len(arrivals.members) - len(late.members) < 2:
        return ""
    early_ns = arrivals.intervals.early_ns[:, arrivals.intervals.waits_for(late.members)]
    early_ns[list(late.members)] = np.nan
    usual_ns, latest = lower_median_rank(early_ns), last_ranks(-early_ns)
    # One nanosecond each breaks ties: if no rank is later than the others, pick the one that is latest most often.
    cost_ns = np.bincount(latest, usual_ns - early_ns[latest, np.arange(len(latest))] + 1)
    return f", then they wait for rank {arrivals.members[int(cost_ns.argmax())]}"


def _advice(ranks: Sequence[int], causes: Sequence[LatenessCause]) -> tuple[str, ...]:
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
        return (f"Look for other processes on the device of {who}, and for streams that wait for each other.",)
    if kind == "before_the_trace":
        return ("Trace three steps or more: the cause lies before the first one.",)
    if kind == "":
        return (f"Compare the timeline of {who} with a peer's in the merged one (--perfetto), before the long waits.",)
    return (
        f"Look for host work that only {who} does: logging, metrics, saving, printing, garbage collection.",
        "Check its cores: other processes, NUMA placement, CPU frequency. Compare it with a peer (--perfetto).",
    )


# -- jitter -----------------------------------------------------------------------------------------------------------
# Waiting that no particular rank causes: ``collective_jitter`` and ``pipeline_bubble``. If ranks wait although none is
# late, it is jitter, and no rank is named. Ranks of different pipeline stages wait for each other by schedule; no rank
# is blamed for that.


def find_jitter(view: JobView) -> list[Claim]:
    """Find ranks that wait for each other although none is late."""
    rows = {rank: row for row, rank in enumerate(view.ranks)}
    best: tuple[float, Arrivals, Bools, Ints] | None = None
    for arrivals in view.arrivals:
        if arrivals.across_stages or not arrivals.mostly_waiting or not rows.keys() >= set(arrivals.members):
            continue
        own = [rows[rank] for rank in arrivals.members]
        waited_ns = np.zeros(len(rows), np.int64)
        waited_ns[own] = np.nansum(arrivals.intervals.wait_ns, axis=1).astype(np.int64)
        waited_ns = np.minimum(waited_ns, view.times.exposed_ns)
        where = np.isin(np.arange(len(rows)), own)
        # Use the median member, as all of them wait: the first to arrive waits longest, and removing its wait alone
        # gains nothing.
        middle = int(own[int(np.argsort(waited_ns[own], kind="stable")[(len(own) - 1) // 2])])
        least = thresholds.EXPOSED_HOST_SHARE if view.host_comm[middle] else thresholds.EXPOSED_SHARE
        floor_ns = thresholds.EXPOSED_HOST_FLOOR_NS if view.host_comm[middle] else thresholds.FLOOR_NS
        share = float(view.share(waited_ns)[middle])
        if share <= least or view.per_step(waited_ns)[middle] < floor_ns or (best and share <= best[0]):
            continue
        best = (share, arrivals, where, np.where(where, waited_ns[middle], 0))
    return [] if best is None else [_jitter(view, *best)]


def _jitter(view: JobView, share: float, arrivals: Arrivals, where: Bools, waited_ns: Ints) -> Claim:
    """Build the claim; ``waited_ns`` [R] is what the median member waits."""
    each_ns = view.each_ns(waited_ns, where)
    counts = np.bincount(arrivals.intervals.last, minlength=len(arrivals.members))
    most, of = int(counts.argmax()), len(arrivals)
    often = f"rank {arrivals.members[most]} most often, {int(counts[most]):,} of {of:,} times"
    even = of >= shared.ARRIVALS_FEW and counts[most] <= shared.LAST_TIMES_CHANCE * of / len(counts)
    who = f"every rank comes last about equally often ({often}): this is jitter, and no rank is to blame"
    if not even:
        who = f"no rank comes last often enough to be blamed ({often})"
    return claim_of(
        view,
        "collective_jitter",
        f"The ranks wait for each other {view.each_step(each_ns)} in collectives{of_group(view, arrivals)}; {who}.",
        where=where,
        saved_ns=halved(waited_ns),
        most_ns=waited_ns,
        phase="comm",
        evidence={
            "group": arrivals.group.name or None,
            "group_kind": arrivals.group.kind,
            "group_ranks": list(arrivals.members),
            "collectives": of,
            "last_counts": counts_by_rank(arrivals),
            "waited_ms_per_step": in_ms(each_ns),
            "waited_share": round(share, 4),
        },
        advice=(
            "Look for work that varies from rank to rank and step to step: sequence lengths, experts, Python.",
            "Ranks that launch each kernel just in time drift apart: CUDA graphs, torch.compile, pinned CPU cores.",
            "With fewer collectives per step, ranks wait for each other less often.",
        ),
        at_most="warning",
        confidence=0.8,
    )


def find_bubble(view: JobView) -> list[Claim]:
    """Report the pipeline bubble: exposed sends, receives and collectives across pipeline stages."""
    stages_ns = view.exposed.stages_ns
    everywhere = np.ones(len(view.ranks), np.bool_)
    share = view.typical(view.share(stages_ns), everywhere)
    each_ns = view.each_ns(stages_ns, everywhere)
    if share <= thresholds.EXPOSED_SHARE or each_ns < thresholds.FLOOR_NS:
        return []
    return [
        claim_of(
            view,
            "pipeline_bubble",
            f"Pipeline stages wait for each other {view.each_step(each_ns)}: that is the bubble of the schedule, not a "
            "late rank.",
            where=everywhere,
            # A trace does not show how much another schedule would save.
            saved_ns=np.zeros(len(view.ranks), np.int64),
            phase="comm",
            evidence={
                "bubble_ms_per_step": in_ms(each_ns),
                "bubble_share": round(share, 4),
            },
            advice=(
                "More microbatches per step make the bubble smaller, as do interleaved and zero-bubble schedules.",
                "Compare the compute time of the stages in the table of ranks: the longest sets the pace.",
            ),
            confidence=0.7,
        )
    ]
