"""Uneven ranks of which none is permanently slow: ``rotating_straggler``, ``imbalance`` and ``uneven_batches``.

Both cost the wait for whichever rank is slowest in a step.  In a *rotation* each step has one rank that is far behind
the others (a job that wanders over the machine, work given to one rank in turn).  In an *imbalance* the ranks' work
differs by design: from step to step (sequence lengths), if forward and backward of the same rank and step are long
together; or permanently between groups that do different work (pipeline stages).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.batches import uneven_batches_of
from stepscope.diagnosis.engine.code_location import seen_at
from stepscope.diagnosis.engine.processor_wait import without_waiting
from stepscope.diagnosis.engine.view import View, cost_of
from stepscope.diagnosis.rules.straggler_advice import EXPERT_ADVICE, straggler_advice
from stepscope.judge import thresholds
from stepscope.judge.advice import advice_for, say
from stepscope.judge.chain import Claim
from stepscope.judge.finding_cost import severity_by_cost
from stepscope.judge.statistics import (
    longest,
    median_rank,
    medians,
    peer_deviation,
    persistence_z,
    spread,
    z_needed,
)
from stepscope.records.finding import Finding
from stepscope.records.text import ms_text, named_ranks, share_text
from stepscope.records.throughput import Work

__all__ = ["find_uneven", "find_uneven_batches"]

Floats = NDArray[np.float64]
GROUPS_ADVICE = (
    say(
        "Move layers from the slowest stage to the others: embedding and loss count as layers too.",
        "If its layers are no heavier than those of the other stages, find out what slows {who} down{where}: without "
        "that, steps would be {shorter} shorter.",
        stages=True,
    ),
    say(
        "Share the work evenly between the groups of ranks, or give more ranks to the group that has more of it.",
        "If they should have equal work, find out what slows {who} down{where}.",
    ),
)
STAGE_KINDS = {
    "input": ("input_straggler", "in input"),
    "h2d": ("h2d_straggler", "in h2d"),
    "eval": ("between_steps", "evaluating"),
    "checkpoint": ("between_steps", "in checkpoints"),
    "other": ("between_steps", "outside all phases"),
}
"""The finding kind for a stage that is slow in a phase without layers, and its wording."""


def find_uneven(view: View, late: Collection[int] = ()) -> list[Claim]:
    """``late``: ranks that were found to be permanently late."""
    by_design = _groups_differ(view, late)
    there = [index for index in range(len(view.ranks)) if not np.isnan(view.wall_ns[index]).any()]
    if (turn := _in_turn(view, np.array(there, np.intp))) is not None:
        return [*by_design, turn]
    rows = [index for index in there if view.ranks[index] not in late]
    if len(rows) < 2 or _share_devices(view) or not view.lockstep:
        return by_design  # ranks that do not wait for each other lose nothing by the slowest of a step
    return [*by_design, *_step_by_step(view, np.array(rows))]


UNEVEN_BATCHES_ADVICE = (
    "DDP and FSDP average the gradients of all ranks with the same weight: samples of a smaller batch count for more.",
    "Use one size on all ranks, or multiply each rank's loss by its batch size over the mean of all.",
)


def find_uneven_batches(view: View) -> list[Finding]:
    """At most one; it costs no time by itself."""
    found = uneven_batches_of(view)
    if found is None:
        return []
    return [
        Finding(
            kind="uneven_batches",
            severity="info",
            title=f"{found.text}.",
            ranks=found.ranks,
            steps=view.span if len(view.steps) else None,
            cost=cost_of(view, np.zeros(len(view.steps))),
            evidence={
                "batch_sizes": {str(rank): size for rank, size in found.sizes.items()},
                "usual": found.usual,
                "measured": found.measured,
            },
            advice=UNEVEN_BATCHES_ADVICE,
        )
    ]


def _share_devices(view: View) -> bool:
    """Whether ranks share a GPU: they slow each other down in turns, and their device times are not their own."""
    devices = [view.window.identities[row].device_uuid for row in view.rows]
    known = [uuid for uuid in devices if uuid]
    return view.clock == "device" and len(set(known)) < len(known)


def _step_by_step(view: View, rows: NDArray[np.intp]) -> list[Claim]:
    work_ns = _own_work(view)[rows]
    # A rank's own level is not what varies from step to step; in a rotation half of its steps may be above it.
    levels = np.quantile(work_ns, thresholds.LEVEL_QUANTILE, axis=1)
    even_ns = work_ns - levels[:, None] + np.median(levels)
    top = even_ns.argmax(axis=0)
    columns = np.arange(len(view.steps))
    excess_ns = even_ns[top, columns] - _second_or_median(even_ns)
    typical_ns = float(np.median(excess_ns))
    floor_ns = max(thresholds.UNEVEN_SHARE * view.median_step_ns, thresholds.UNEVEN_FLOOR_NS)
    if typical_ns < floor_ns:
        return []
    turns = np.bincount(top, minlength=len(rows)) / len(top)
    noise_ns = _noise_of_others(even_ns, top)
    saved_ns = np.maximum(excess_ns, 0.0)
    correlation = _together(view, rows)
    stands_out = typical_ns >= thresholds.ROTATING_SPREADS * noise_ns
    alike = typical_ns >= thresholds.ROTATING_EVEN * spread(excess_ns)
    if _is_routed(view, rows, top):
        return [_routed(view, rows, saved_ns, typical_ns)]
    if stands_out and alike and turns.max() <= thresholds.ROTATING_TURNS:
        return [_rotation(view, rows, top, saved_ns, typical_ns, turns)]
    if correlation < thresholds.IMBALANCE_CORRELATION:
        return []
    if without_waiting(view) is not None and not _sizes_differ(view, rows)[0]:
        return []  # a rank that has to share its processor is slow in forward and backward
    return [_varying(view, rows, saved_ns, correlation)]


def _in_turn(view: View, rows: NDArray[np.intp]) -> Claim | None:
    """A rotation next to other programs, whose unevenness hides it in single steps: each rank in every n-th step.

    In the steps of a rank's turn it must be among its longest more often than chance allows, over all ranks together.
    """
    enough = 2 <= len(rows) <= thresholds.RANKS_IN_TURN and len(view.steps) >= thresholds.TURNS_AT_LEAST * len(rows)
    if not enough or not view.comm_measured or not view.lockstep or without_waiting(view) is None:
        return None
    count = len(rows)
    names = [name for name in view.phases if name != "comm"]
    turns = [
        (np.arange(len(view.steps)) + first) % count == (way * np.arange(count) % count)[:, None]
        for way in ((1, -1) if count > 2 else (1,))
        for first in range(count)
    ]
    best: tuple[float, str, NDArray[np.bool_]] | None = None
    for name in names:
        took = view.phase(name)[rows]
        high = took > np.quantile(took, 1 - 1 / count, axis=1, keepdims=True)
        for turn in turns:
            tries, hits = int(turn.sum()), int((high & turn).sum())
            z = (hits - tries / count) / np.sqrt(tries / count * (1 - 1 / count))
            if z >= z_needed(len(names) * len(turns), thresholds.ANY_REMARK) and (best is None or z > best[0]):
                best = z, name, turn
    if best is None:
        return None
    _, phase, turn = best
    took, work_ns = view.phase(phase)[rows], view.work_ns[rows]
    more_ns = medians(np.where(turn, took, np.nan)) - medians(np.where(turn, np.nan, took))
    typical_ns = float(np.median(more_ns))
    if typical_ns < max(thresholds.UNEVEN_SHARE * view.median_step_ns, thresholds.UNEVEN_FLOOR_NS):
        return None
    saved_ns = longest(work_ns) - longest(work_ns - np.where(turn, np.maximum(more_ns, 0.0)[:, None], 0.0))
    return _rotation(view, rows, turn.argmax(axis=0), saved_ns, typical_ns, turn.mean(axis=1))


def _own_work(view: View) -> Floats:
    """[R, S]; work if waiting is known; else the phases before the first collective, in which no wait can hide."""
    if view.comm_measured:
        return view.work_ns
    return np.asarray(np.sum([view.phase(name) for name in ("input", "h2d", "forward")], axis=0), np.float64)


def _second_or_median(even_ns: Floats) -> Floats:
    """[S]; of two ranks the other one, else the median."""
    return np.asarray(even_ns.min(axis=0) if len(even_ns) == 2 else np.median(even_ns, axis=0), np.float64)


def _noise_of_others(even_ns: Floats, top: NDArray[np.intp]) -> float:
    """Scatter among the ranks that are not last in a step; with two ranks, over the steps."""
    others = even_ns[np.arange(len(even_ns))[:, None] != top].reshape(-1, even_ns.shape[1])
    return spread(others[0]) if len(others) == 1 else float(np.median(others.std(axis=0, ddof=1)))


def _together(view: View, rows: NDArray[np.intp]) -> float:
    """Rank correlation of forward and backward over all ranks and steps, each rank's and step's own level removed."""
    if not view.comm_measured:
        return 0.0
    pair = []
    for name in ("forward", "backward"):
        times = view.phase(name)[rows]
        apart = times - np.median(times, axis=1, keepdims=True)
        apart = apart - apart.mean(axis=0)
        pair.append(apart.ravel().argsort().argsort().astype(np.float64))
    if pair[0].std() == 0 or pair[1].std() == 0:
        return 0.0
    return float(np.corrcoef(pair[0], pair[1])[0, 1])


def _rotation(
    view: View, rows: NDArray[np.intp], top: NDArray[np.intp], saved_ns: Floats, typical_ns: float, turns: Floats
) -> Claim:
    columns = np.arange(len(view.steps))
    by_phase = {
        name: float(np.median(peer_deviation(view.phase(name)[rows])[top, columns]))
        for name in view.phases
        if name != "comm"
    }
    name, most = max(by_phase.items(), key=lambda item: item[1])
    phase = name if most >= thresholds.EXPLAINS_SHARE * typical_ns else None
    cost = cost_of(view, saved_ns)
    where = f" in {phase}" if phase else ""
    finding = Finding(
        kind="rotating_straggler",
        severity=severity_by_cost(cost["share"], typical_ns),
        title=(
            f"A different rank is late in each step, by {ms_text(typical_ns / 1e6)}{where}; "
            f"waiting for it costs {share_text(cost['share'])} of the training time."
        ),
        phase=phase,
        steps=view.span,
        cost=cost,
        evidence={
            "clock": view.clock,
            "excess_ms": round(typical_ns / 1e6, 3),
            "excess_ms_by_phase": {name: round(value / 1e6, 3) for name, value in by_phase.items()},
            "last_most_often": round(float(turns.max()), 3),
            "ranks_that_were_last": int((turns > 0).sum()),
            "wait_measured": view.comm_measured,
            "steps_used": len(view.steps),
        },
        advice=(
            "Look for work that one rank does in turn: logging, saving or evaluating by step number modulo world size.",
            (
                "If no such work exists, batch sizes probably differ: bucket samples by length, so all ranks get "
                "similar work."
            ),
        ),
        confidence=0.9 if view.comm_measured else 0.7,
    )
    return Claim(finding=finding, explained_ns=saved_ns)


def _is_routed(view: View, rows: NDArray[np.intp], top: NDArray[np.intp]) -> bool:
    """Whether the rank that works longest in a step is the one whose experts received most tokens in it."""
    routed = view.window.routed
    if routed is None:
        return False
    sent = routed.bytes[view.rows[rows]][:, view.columns]
    known = ~np.isnan(sent).any(axis=0)
    uneven = known & (
        np.nanmax(sent, axis=0, initial=0.0) >= thresholds.BYTES_ALIKE * np.nanmin(sent, axis=0, initial=np.inf)
    )
    if uneven.mean() < thresholds.COMM_STEPS_SHARE:
        return False
    return bool((sent[:, uneven].argmax(axis=0) == top[uneven]).mean() >= thresholds.ROUTED_SHARE)


def _routed(view: View, rows: NDArray[np.intp], saved_ns: Floats, typical_ns: float) -> Claim:
    routed = view.window.routed
    same = routed is not None and routed.same_batches
    what = "Experts get unequal numbers of tokens" if same else "Ranks send unequal amounts in all_to_all"
    cost = cost_of(view, saved_ns)
    finding = Finding(
        kind="imbalance",
        severity="warning" if cost["share"] >= thresholds.IMBALANCE_WARNING_SHARE else "info",
        title=(
            f"{what}, and the rank with the most changes from step to step; waiting for it costs "
            f"{share_text(cost['share'])} of the training time."
        ),
        steps=view.span,
        cost=cost,
        evidence={
            "clock": view.clock,
            "excess_ms": round(typical_ns / 1e6, 3),
            "by": "experts",
            "ranks_compared": len(rows),
            "steps_used": len(view.steps),
        },
        advice=advice_for(EXPERT_ADVICE, same_batches=same),
        confidence=0.85,
    )
    return Claim(finding=finding, explained_ns=saved_ns)


SIZES_ADVICE: tuple[str, ...] = (
    "Give all ranks batches of similar size: bucket samples by length, pack sequences, or batch by tokens.",
    "Shuffle before sharding, so that no rank keeps the long ones.",
)
VARIES_ADVICE: tuple[str, ...] = (
    "Look for work that depends on the data (branches, loops, early exits), and for other programs on these machines.",
)


def _varying(view: View, rows: NDArray[np.intp], saved_ns: Floats, correlation: float) -> Claim:
    """Forward and backward of a rank are long together.  That batches differ is said only where sizes were recorded."""
    cost = cost_of(view, saved_ns)
    differ, compared = _sizes_differ(view, rows)
    what, advice = "A different rank computes longest in each step", (*SIZES_ADVICE[:1], *VARIES_ADVICE)
    if differ:
        what, advice = "Batches differ in size between ranks, differently in each step", SIZES_ADVICE
    elif differ is not None:
        what, advice = f"{what}, with batches of equal size", VARIES_ADVICE
    costly = cost["share"] >= thresholds.IMBALANCE_WARNING_SHARE
    finding = Finding(
        kind="imbalance",
        severity="warning" if costly and differ else "info",
        title=(
            f"{what}; waiting for {'the largest' if differ else 'it'} costs {share_text(cost['share'])} "
            "of the training time."
        ),
        steps=view.span,
        cost=cost,
        evidence={
            "clock": view.clock,
            "forward_backward_correlation": round(correlation, 3),
            "excess_ms": round(float(np.median(saved_ns)) / 1e6, 3),
            "by": "steps",
            "sizes_differ": differ,
            "sizes_compared": compared,
            "ranks_compared": len(rows),
            "steps_used": len(view.steps),
        },
        advice=advice,
        confidence=0.85 if differ else 0.5,
    )
    return Claim(finding=finding, explained_ns=saved_ns)


def _sizes_differ(view: View, rows: NDArray[np.intp]) -> tuple[bool | None, int]:
    """Whether the ranks had different amounts to compute in most sampled steps, and how many steps were compared.

    None: unknown.  Operations and tokens show it; equal numbers of samples do not, because their lengths may differ.
    """
    ranks = [view.ranks[index] for index in rows]
    given: dict[int, dict[int, list[Work]]] = {}
    for sample in view.window.layers.samples:
        if sample.work is not None and sample.rank in ranks:
            given.setdefault(sample.step, {}).setdefault(sample.rank, []).append(sample.work)
    answers = [_differ([works[rank] for rank in ranks]) for works in given.values() if len(works) == len(ranks)]
    known = [answer for answer in answers if answer is not None]
    return (2 * sum(known) >= len(known) if known else None), len(known)


def _differ(of_ranks: Sequence[Sequence[Work]]) -> bool | None:
    """Whether the work of one step differs between ranks, each with the work of all its models; None: unknown."""
    for name in ("flops", "tokens", "samples"):
        amounts = [[getattr(work, name) for work in works] for works in of_ranks]
        if all(None not in own for own in amounts):
            totals = [sum(own) for own in amounts]
            differ = max(totals) >= thresholds.BATCHES_ALIKE * min(totals)
            return None if name == "samples" and not differ else differ
    return None


def _groups_differ(view: View, late: Collection[int]) -> list[Claim]:
    """Groups of ranks that do different work (pipeline stages): the slowest against the mean of all.

    A rank that is late among its own peers says nothing about the work of its group.
    """
    rows = _rows_by_group(view, late)
    if len(rows) < 2:
        return []
    by_group = np.stack([median_rank(view.work_ns[own]) for own in rows])
    known = np.asarray(~np.isnan(by_group).any(axis=0))
    by_group = by_group[:, known]
    if by_group.shape[1] < thresholds.MIN_STEPS:
        return []
    slowest = int(np.argmax(medians(by_group)))
    ahead = by_group[slowest] - np.delete(by_group, slowest, axis=0).mean(axis=0)
    typical_ns = float(np.median(ahead))
    enough = typical_ns >= thresholds.IMBALANCE_WARNING_SHARE * view.median_step_ns
    if not enough or persistence_z(ahead) < z_needed(len(rows)):
        return []
    levels = medians(by_group)
    saved_ns = np.maximum(longest(view.work_ns) - float(levels.mean()), 0.0)
    saved_ns = np.minimum(saved_ns, float(levels.max() - levels.mean()))
    cost = cost_of(view, saved_ns)
    number = view.groups[rows[slowest][0]]
    ranks = tuple(rank for rank, group in zip(view.ranks, view.groups, strict=True) if group == number)
    by_phase = _ahead_by_phase(view, rows, slowest, known)
    phase, most = max(by_phase.items(), key=lambda item: item[1], default=("", 0.0))
    mostly = phase if most >= thresholds.EXPLAINS_SHARE * typical_ns else None
    place = seen_at(view, ranks, phase=mostly) if view.clock == "host" or mostly == "input" else ""
    # As if the surplus were gone, and the next group the slowest; shared with the others, part of it stays.
    next_ns = float(np.delete(levels, slowest).max())
    if view.window.stages and mostly in STAGE_KINDS:
        return [_late_stage(view, ranks, mostly, typical_ns, next_ns, by_phase)]
    without = cost_of(view, np.full(len(view.steps), float(levels.max()) - next_ns))
    finding = Finding(
        kind="imbalance",
        severity="warning" if cost["share"] >= thresholds.IMBALANCE_WARNING_SHARE else "info",
        title=(
            f"{named_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {ms_text(typical_ns / 1e6)} more work in "
            f"each step than {_others(view, len(rows))}{_mostly(mostly, place)}; evenly shared, "
            f"steps would be {share_text(cost['share'])} shorter."
        ),
        ranks=ranks,
        phase=mostly,
        steps=view.span,
        cost=cost,
        evidence={
            "clock": view.clock,
            "by": "groups",
            "groups": len(rows),
            "stages": view.window.stages,
            "work_ms_by_group": [round(float(value) / 1e6, 3) for value in levels],
            "excess_ms": round(typical_ns / 1e6, 3),
            "excess_ms_by_phase": {name: round(value / 1e6, 3) for name, value in by_phase.items()},
            "share_without_excess": without["share"],
            "place": place or None,
            "steps_used": int(by_group.shape[1]),
        },
        advice=advice_for(
            GROUPS_ADVICE,
            stages=view.window.stages,
            who=named_ranks(ranks).lower(),
            where=f" in {mostly}" if mostly else "",
            shorter=share_text(without["share"]),
        ),
        confidence=0.8,
    )
    return [Claim(finding=finding, explained_ns=saved_ns)]


def _late_stage(
    view: View, ranks: tuple[int, ...], phase: str, typical_ns: float, next_ns: float, by_phase: dict[str, float]
) -> Claim:
    """A stage that is slow where it has no layers: none can be moved, and all of its surplus is lost."""
    saved_ns = np.clip(longest(view.work_ns) - next_ns, 0.0, typical_ns)
    cost = cost_of(view, saved_ns)
    kind, doing = STAGE_KINDS[phase]
    place = seen_at(view, ranks, phase=phase, between=True if phase == "other" else None)
    seen = f" ({place})" if place else ""
    hosts = tuple(host for rank, host in zip(view.ranks, view.hosts, strict=True) if rank in ranks)
    others = _others(view, len(np.unique(view.groups)))
    waits = "waits" if len(np.unique(view.groups)) == 2 else "wait"
    finding = Finding(
        kind=kind,
        severity=severity_by_cost(cost["share"], typical_ns),
        title=(
            f"{named_ranks(ranks)} {'takes' if len(ranks) == 1 else 'take'} {ms_text(typical_ns / 1e6)} more than "
            f"{others} {doing}{seen} every step; {others} {waits}."
        ),
        ranks=ranks,
        phase=phase,
        steps=view.span,
        cost=cost,
        evidence={
            "clock": view.clock,
            "by": "groups",
            "excess_ms": round(typical_ns / 1e6, 3),
            "excess_ms_by_phase": {name: round(value / 1e6, 3) for name, value in by_phase.items()},
            "place": place or None,
            "steps_used": len(view.steps),
        },
        advice=straggler_advice(ranks, hosts, phase, world_size=len(view.ranks), place=place, share_samples=True),
        confidence=0.85,
    )
    return Claim(finding=finding, explained_ns=saved_ns)


def _rows_by_group(view: View, late: Collection[int]) -> list[NDArray[np.intp]]:
    """The ranks of each group that are not late; all of them if no others are left."""
    is_late = np.isin(view.ranks, list(late))
    found = []
    for number in np.unique(view.groups):
        members = view.groups == number
        found.append(np.flatnonzero(members & ~is_late) if (members & ~is_late).any() else np.flatnonzero(members))
    return found


def _ahead_by_phase(
    view: View, rows: Sequence[NDArray[np.intp]], slowest: int, known: NDArray[np.bool_]
) -> dict[str, float]:
    """The slowest group's excess over the mean of the others, in the median step, by phase."""
    found = {}
    for name in view.phases:
        if name != "comm" or not view.comm_measured:
            times = np.stack([median_rank(view.phase(name)[own])[known] for own in rows])
            found[name] = float(np.median(times[slowest] - np.delete(times, slowest, axis=0).mean(axis=0)))
    return found


def _mostly(phase: str | None, place: str) -> str:
    return f", mostly in {phase}{f' ({place})' if place else ''}" if phase else ""


def _others(view: View, groups: int) -> str:
    what = "pipeline stage" if view.window.stages else "group of ranks"
    plural = "pipeline stages" if view.window.stages else "groups of ranks"
    return f"the other {what}" if groups == 2 else f"the other {plural}"
