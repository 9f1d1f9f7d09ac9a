"""Two traces, or two sets of them: what became slower or faster, by how much of the step, and why.

All figures are per step of a rank: totals over the steps that count, divided by their number.  Ranks that are on both
sides are compared with themselves; where there is none, all ranks of a side stand for it.  The parts of a device's time
(compute, communication and copies that show, idle, and what of the step lies outside of its span) add up to the step,
and their changes to the change of the step.  A step is as long as the host's or, where a host that does not wait is
through long before it, as the device's span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import TYPE_CHECKING

from stepscope.records.units import count_text, named_ranks
from stepscope.traces.diff.sides import Part, Side, per_step
from stepscope.traces.diff.tables import Change, copies_diff, kernels_diff, operators_diff, shapes_diff
from stepscope.traces.diff.words import Changes, verdict_of_diff
from stepscope.traces.model.table import Table, table_of

if TYPE_CHECKING:
    from stepscope.traces.job import JobAnalysis
    from stepscope.traces.rank import RankAnalysis

__all__ = ["TraceDiff", "diff"]

ENOUGH_STEPS = 3
"""Fewer steps of a side say nothing of how much steps differ by themselves."""
CLEAR_ERRORS = 3.0
"""Times the standard error that a difference of means must be …"""
LEAST_SHARE = 0.01
"""… and so much of the step: nobody looks for less."""


@dataclass(frozen=True, kw_only=True)
class TraceDiff:
    verdict: str
    step_before_ns: int
    step_after_ns: int
    clear: bool
    """Whether the steps differ by more than they differ among themselves."""
    ranks: tuple[int, ...]
    """Those compared with themselves; empty: means over all ranks of each side."""
    tables: dict[str, Table] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @property
    def step_change_ns(self) -> int:
        return self.step_after_ns - self.step_before_ns


def diff(before: JobAnalysis, after: JobAnalysis) -> TraceDiff:
    one, other, ranks = _sides(before.ranks, after.ranks)
    parts = _parts(one, other)
    step = Part("step", sum(part.before_ns for part in parts), sum(part.after_ns for part in parts))
    change_ns = step.change_ns
    kernels, kernel_changes = kernels_diff(one, other, change_ns)
    operators, operator_changes = operators_diff(one, other, change_ns)
    clear = _is_clear(one.step_lengths_ns, other.step_lengths_ns)
    made = (
        _summary(one, other, step, parts),
        _counts(one, other, kernel_changes, operator_changes),
        _memory(one, other),
        kernels,
        copies_diff(one, other, change_ns),
        operators,
        shapes_diff(one, other, change_ns),
    )
    return TraceDiff(
        verdict=verdict_of_diff(
            Changes(
                step=step,
                parts=parts,
                kernels=kernel_changes,
                operators=operator_changes,
                loading=_figure(one, other, "the DataLoader", _loading),
                stops=_stops(one, other),
                on_device=any(each.pace.work.span_ns for each in (*one.analyses, *other.analyses)),
            ),
            clear=clear,
            stepped=one.stepped and other.stepped,
        ),
        step_before_ns=step.before_ns,
        step_after_ns=step.after_ns,
        clear=clear,
        ranks=ranks,
        tables={table.name: table for table in made if table.rows},
        notices=tuple(_notices(one, other, ranks, before.ranks, after.ranks)),
    )


def _sides(before: Sequence[RankAnalysis], after: Sequence[RankAnalysis]) -> tuple[Side, Side, tuple[int, ...]]:
    both = {one.rank for one in before} & {one.rank for one in after}
    if not both:
        return Side(analyses=tuple(before)), Side(analyses=tuple(after)), ()
    sides = (Side(analyses=tuple(one for one in ranks if one.rank in both)) for ranks in (before, after))
    return next(sides), next(sides), tuple(sorted(both))


# -- the tables -----------------------------------------------------------------------------------------------------


def _parts(one: Side, other: Side) -> list[Part]:
    """What the step is made of: on the device, or where there is none on the threads of the host."""
    names = ("compute", "exposed communication", "exposed copies", "idle", "outside")
    columns = []
    for side in (one, other):
        times = [_inside(each) for each in side.analyses]
        inside = [sum(column) for column in zip(*times, strict=True)] or [0] * (len(names) - 1)
        columns.append(per_step([*inside, max(side.step_ns - sum(inside), 0)], side.rank_steps))
    return [Part(*values) for values in zip(names, *columns, strict=True)]


def _inside(one: RankAnalysis) -> tuple[int, int, int, int]:
    """Parts of the device's span, each instant in one of them."""
    temporal, host = one.pace.work, one.exchanges.host
    if not temporal.span_ns and host is not None:
        return host.compute_ns, host.comm_ns - host.overlap_ns, 0, host.idle_ns
    return temporal.compute_ns, temporal.exposed_comm_ns, temporal.exposed_memory_ns, temporal.idle_ns


def _summary(one: Side, other: Side, step: Part, parts: list[Part]) -> Table:
    def figure(name: str, get: Callable[[RankAnalysis], int]) -> Part:
        return _figure(one, other, name, get)

    rows = [
        step,
        *parts,
        figure("communication", lambda each: each.pace.work.comm_ns),
        figure("communication hidden by compute", lambda each: each.pace.work.overlap_ns),
        figure("copies", lambda each: each.pace.work.memory_ns),
        figure("idle for the host", lambda each: each.pace.device.idle.host_wait_ns),
        figure("DataLoader", _loading),
        figure("Python between operators", lambda each: sum(stop.total_ns for stop in each.host.stops)),
    ]
    return table_of(
        "diff_summary",
        "What a step is made of, before and after",
        ("figure", "before_ns", "after_ns", "change_ns", "change_share", "step_share"),
        (
            (*part, part.change_ns, _ratio(part.change_ns, part.before_ns), _ratio(part.change_ns, step.change_ns))
            for part in rows
        ),
        note="Compute, exposed communication, exposed copies, idle and outside (of the device's span) add up to the "
        "step, which is as long as the host's or, where that is longer, the device's span of its work.",
    )


def _figure(one: Side, other: Side, name: str, get: Callable[[RankAnalysis], int]) -> Part:
    before, after = (sum(get(each) for each in side.analyses) for side in (one, other))
    return Part(name, one.each_step(before), other.each_step(after))


def _loading(one: RankAnalysis) -> int:
    return one.host.loading_ns


def _stops(one: Side, other: Side) -> list[Part]:
    """Where Python runs for long, by place; only where that is known."""
    sums: dict[str, list[int]] = {}
    for at, side in enumerate((one, other)):
        for stop in (stop for each in side.analyses for stop in each.host.stops):
            if stop.named:
                sums.setdefault(stop.named, [0, 0])[at] += stop.total_ns
    return [Part(place, one.each_step(before), other.each_step(after)) for place, (before, after) in sums.items()]


def _ratio(value: int, whole: int) -> float | None:
    return value / whole if whole else None


def _counts(one: Side, other: Side, kernels: list[Change], operators: list[Change]) -> Table:
    def count(name: str, changes: list[Change]) -> tuple[str, float, float]:
        return name, sum(each.before_count for each in changes), sum(each.after_count for each in changes)

    def launches(side: Side) -> float:
        return side.count_each_step(sum(each.pace.device.launch_count for each in side.analyses))

    rows = [
        count("kernels", kernels),
        count("operator calls", operators),
        ("launches", launches(one), launches(other)),
    ]
    return table_of(
        "diff_counts",
        "How many in a step, before and after",
        ("figure", "before", "after", "change"),
        ((name, round(old, 3), round(new, 3), round(new - old, 3)) for name, old, new in rows),
    )


def _memory(one: Side, other: Side) -> Table:
    """The largest of the ranks; only what both sides know."""
    rows = []
    for name, get in (("peak allocated", "peak_allocated_bytes"), ("peak reserved", "peak_reserved_bytes")):
        known = [
            [value for each in side.analyses if (value := getattr(each.host, get)) is not None] for side in (one, other)
        ]
        if all(known):
            old, new = (max(values) for values in known)
            rows.append((name, old, new, new - old))
    return table_of(
        "diff_memory",
        "Device memory, before and after",
        ("figure", "before_bytes", "after_bytes", "change_bytes"),
        rows,
    )


# -- in words -------------------------------------------------------------------------------------------------------


def _is_clear(before: Sequence[int], after: Sequence[int]) -> bool:
    """With too few steps to know better, whatever is not small is taken for clear."""
    if not before or not after:
        return False
    change = fmean(after) - fmean(before)
    if abs(change) < LEAST_SHARE * fmean(before):
        return False
    if min(len(before), len(after)) < ENOUGH_STEPS:
        return True
    if max(before) < min(after) or max(after) < min(before):
        return True
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return abs(change) > CLEAR_ERRORS * error


def _notices(
    one: Side, other: Side, ranks: tuple[int, ...], before: Sequence[RankAnalysis], after: Sequence[RankAnalysis]
) -> list[str]:
    out = []
    for name, side in (("first", one), ("second", other)):
        fewest = min((len(each.steps) for each in side.analyses), default=0)
        if not side.stepped:
            out.append(f"The {name} has no profiler steps: all of its trace is taken as one step.")
        elif fewest < ENOUGH_STEPS:
            out.append(
                f"The {name} has only {count_text(fewest, 'step')} that count: how much steps differ by themselves is "
                "not known."
            )
    everyone = {each.rank for each in (*before, *after)}
    if not ranks:
        out.append("No rank is in both: the means over all ranks of each are compared.")
    elif len(ranks) < len(everyone):
        verb = "is" if len(ranks) == 1 else "are"
        out.append(f"{named_ranks(ranks)} {verb} compared; the others are in one of the two only.")
    devices = [
        sorted({each.pace.device.device_name for each in side.analyses if each.pace.device.device_name})
        for side in (one, other)
    ]
    if devices[0] and devices[1] and devices[0] != devices[1]:
        out.append(f"The devices differ: {', '.join(devices[0])} before, {', '.join(devices[1])} after.")
    return out
