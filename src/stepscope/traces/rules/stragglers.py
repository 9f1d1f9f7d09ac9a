"""``collective_straggler``: a rank that comes last to most collectives, and what it does before.

What is *lost* by a late rank is what each of the others waits for it on average, as far as the waiting shows:
communication that runs beside the computation may wait for nothing.  What is *gained* by fixing it alone is less: the
others then wait for the last but one.  The price is the gain, as a replay of all ranks has it (``peers``), never more
than how much later than the last but one it was; where a device is behind its host the replay of steps on the host says
nothing, and the latter is the price.

It is a warning by what is lost and critical by what is gained.  While ranks wait for each other, whatever makes a rank
faster that waits gains nothing, so it goes before other findings by what is lost, too.

What the rank does before is told by what it does longer than the median of its peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.finding import SEVERITIES
from stepscope.records.units import ms_text, named_ranks
from stepscope.traces.path.peers import like_peers
from stepscope.traces.path.whatif import parse_change
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import Claim, View, claim_of, cost_of, holes_of, severity_of

__all__ = ["find_stragglers"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
IDLE = "with an idle device"
BETWEEN = "between operators"


def find_stragglers(view: View) -> list[Claim]:
    """Of several late ranks the costliest: once it is on time, the next trace tells of the others."""
    collectives = view.job.collectives
    if len(view.ranks) < 2 or collectives.count < thresholds.COLLECTIVES_AT_LEAST:
        return []
    took_part, by_chance, late_ns, evenness = _attendance(view)
    last = view.each(lambda one: int(collectives.last_counts.get(one.rank, 0)))
    often = last / np.maximum(took_part, 1)
    chance = np.minimum(thresholds.LAST_TIMES_CHANCE * by_chance, thresholds.LAST_AT_MOST)
    where = (took_part >= thresholds.COLLECTIVES_AT_LEAST) & (often >= np.maximum(thresholds.LAST_SHARE, chance))
    where &= (took_part >= thresholds.COLLECTIVES_FEW) | ((last == took_part) & (evenness >= thresholds.EVENLY))
    lost_ns = np.minimum(late_ns, _shown_by_others(view))
    where &= (view.share(lost_ns) >= thresholds.STRAGGLER_SHARE) & (view.per_step(lost_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, lost_ns, -1).argmax())
    where = np.arange(len(where)) == row
    rank, each_ns = view.ranks[row], float(view.per_step(lost_ns)[row])
    gain_ns, of_ns = _gain(view, row, int(lost_ns[row]))
    phase, doing, more_ns = _before(view, row, int(lost_ns[row]))
    more = (
        f"; before that it spends {ms_text(more_ns / int(view.steps[row]) / 1e6)} more than its peers {doing}"
        if doing
        else ""
    )
    little = gain_ns < thresholds.NEARLY_ALL * lost_ns[row]
    alone = f"; fixing it alone gains {ms_text(gain_ns / int(view.steps[row]) / 1e6)}" if little else ""
    others = "the others wait" if len(view.ranks) > 2 else "the other waits"
    claim = claim_of(
        view,
        "collective_straggler",
        f"Rank {rank} comes last to {int(last[row]):,} of {int(took_part[row]):,} collectives; {others} "
        f"{view.each_step(each_ns)} for it{more}{alone}{_next(view, row) if little else ''}.",
        where=where,
        saved_ns=np.where(where, gain_ns, 0),
        of_ns=np.where(where, of_ns, view.step_ns),
        phase=phase,
        evidence={
            "last_count": int(last[row]),
            "collectives": int(took_part[row]),
            "last_counts": {str(rank): count for rank, count in sorted(collectives.last_counts.items())},
            "waited_ms_per_step": round(each_ns / 1e6, 3),
            "waited_share": round(float(view.share(lost_ns)[row]), 4),
            "gain_ms_per_step": round(gain_ns / int(view.steps[row]) / 1e6, 3),
            "longest_waits_ms": round(collectives.cost_by_rank_ns[rank] / 1e6, 3),
            "alone_ms": round(collectives.alone_by_rank_ns[rank] / 1e6, 3),
            "transfer_ms": round(collectives.transfer_ns / 1e6, 3),
            "before": doing or None,
            "before_ms": round(more_ns / 1e6, 3) if doing else None,
        },
        advice=_advice(rank, phase, doing),
        confidence=0.9,
    )
    if claim.finding.severity == "info":
        lost = severity_of(view, cost_of(view, lost_ns, where))
        claim = replace(claim, finding=replace(claim.finding, severity=min(lost, "warning", key=SEVERITIES.index)))
    # By threads of the host the others wait with an idle device: it is this rank's doing, too, as is what made it late.
    own_ns = np.where(where, min(more_ns, int(view.idle.host_ns[row])), 0)
    return [replace(claim, idle_ns=_waits_of_host(view) + own_ns)]


def _gain(view: View, row: int, lost_ns: int) -> tuple[int, int]:
    """What fixing the rank alone gains over all steps, and how long these are."""
    job, rank = view.job, view.ranks[row]
    alone_ns = min(int(job.collectives.alone_by_rank_ns[rank]), lost_ns)
    if not job.path.steps or view.analyses[row].pace.by_device:
        return alone_ns, int(view.step_ns[row])
    again = like_peers(job.ranks, job.collectives, parse_change(f"rank:{rank}=peers"))
    return min(alone_ns, max(again.gain_ns, 0)), max(sum(again.before_ns), 1)


def _next(view: View, row: int) -> str:
    """Who comes last but one most often when the rank comes last."""
    pairs, split, clocks = view.job.collectives.pairs, view.job.collectives.split, view.job.collectives.clocks
    shift_ns = np.array([clock.shift_ns for clock in clocks.clocks], np.int64)
    own = pairs.ranks.index(view.ranks[row])
    which = (split.last == own) & split.counts
    others = np.flatnonzero(which[pairs.whole] & (pairs.rank != own))
    start_ns = (pairs.start_ns - shift_ns[pairs.rank])[others]
    order = np.lexsort((start_ns, pairs.whole[others]))
    latest = others[order][np.diff(pairs.whole[others][order], append=-1) != 0]
    most = int(np.bincount(pairs.rank[latest]).argmax())
    return f", then they wait for rank {pairs.ranks[most]}" if len(pairs.ranks) > 2 else ""


def _attendance(view: View) -> tuple[Ints, Floats, Ints, Floats]:
    """[R] each: collectives it took part in; how often it would be last by chance; what others waited for it; how even
    that was: the shortest such wait by the longest.
    """
    pairs, split = view.job.collectives.pairs, view.job.collectives.split
    ranks = len(pairs.ranks)
    good = split.counts[pairs.whole]
    took_part = np.bincount(pairs.rank[good], minlength=ranks)
    chances = np.bincount(pairs.rank[good], 1 / pairs.counts[pairs.whole[good]], minlength=ranks)
    waits = np.bincount(pairs.whole, split.wait_ns, minlength=len(pairs.first))
    each = waits / np.maximum(pairs.counts - 1, 1)
    late_ns = np.bincount(split.last[split.counts], each[split.counts], minlength=ranks)
    least, most = np.full(ranks, np.inf), np.zeros(ranks)
    np.minimum.at(least, split.last[split.counts], each[split.counts])
    np.maximum.at(most, split.last[split.counts], each[split.counts])
    evenness = np.where(most > 0, least, 0.0) / np.maximum(most, 1.0)
    place = {rank: at for at, rank in enumerate(pairs.ranks)}
    rows = [place[rank] for rank in view.ranks]
    return took_part[rows], (chances / np.maximum(took_part, 1))[rows], late_ns[rows].astype(np.int64), evenness[rows]


def _shown_by_others(view: View) -> Ints:
    """[R]; exposed communication of the median of the other ranks."""
    return _peers(view.times.exposed_ns).astype(np.int64)


def _peers(values: Ints) -> Floats:
    """[R]; the lower median of all others: dropping one from a sorted list moves its middle by one place at most."""
    order = np.argsort(values, kind="stable")
    place = np.empty(len(values), np.intp)
    place[order] = np.arange(len(values))
    middle = (len(values) - 2) // 2
    return np.asarray(values[order][middle + (place <= middle)], np.float64)


def _before(view: View, row: int, late_ns: int) -> tuple[str | None, str, int]:
    """Phase, words and the excess of what the rank does longer than its peers; empty words: nothing explains it."""
    phase, doing, more_ns = max(_measures(view, row), key=lambda each: each[2])
    if more_ns < thresholds.EXPLAINS_SHARE * late_ns:
        return None, "", 0
    holes = holes_of(view.analyses[row])
    if doing in (IDLE, BETWEEN) and holes and holes[0][1] >= thresholds.EXPLAINS_SHARE * more_ns:
        doing = f"in {holes[0][0]}"
    return phase, doing, more_ns


def _measures(view: View, row: int) -> Iterator[tuple[str | None, str, int]]:
    """What tells most first: where two are as long, the first is taken."""
    everything: tuple[tuple[str | None, str, Any], ...] = (
        ("input", "in the DataLoader", view.each(lambda one: one.host.loading_ns)),
        (None, "collecting garbage", view.each(lambda one: sum(pause.dur_ns for pause in one.host.pauses))),
        (None, "compiling", view.each(lambda one: one.host.compile_ns)),
        (None, "computing", view.times.compute_ns),
        (None, "copying", view.each(lambda one: one.pace.work.exposed_memory_ns)),
        (None, IDLE, np.where(view.on_device, view.idle.host_ns - _waits_of_host(view), 0)),
        (None, BETWEEN, view.each(lambda one: one.exchanges.host.idle_ns if one.exchanges.host else 0)),
    )
    for phase, doing, values in everything:
        yield phase, doing, int(values[row] - _peers(values)[row])


def _waits_of_host(view: View) -> Ints:
    """[R]; for others in collectives of the host, while the device idles."""
    waited_ns = view.each(lambda one: int(view.job.collectives.wait_ns.get(one.rank, 0)))
    return np.where(view.host_comm, waited_ns, 0)


def _advice(rank: int, phase: str | None, doing: str) -> tuple[str, ...]:
    who = named_ranks((rank,)).lower()
    if phase == "input":
        return (
            f"Look at what {who} reads: larger or remote files, fewer DataLoader workers, a busy disk.",
            "Give every rank the same number of samples (DistributedSampler) and shuffle large items across ranks.",
        )
    if doing in ("computing", "copying"):
        return (
            f"Check that {who} computes the same as the others: batch shape, sequence length, experts, branches.",
            "If the work is equal, the machine is not: other processes on its cores or device, clocks, throttling.",
        )
    return (
        f"Look for work of the host that only {who} does: logging, metrics, saving, printing, garbage collection.",
        "Compare its timeline with a peer's in the merged one (--perfetto).",
    )
