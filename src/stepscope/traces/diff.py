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
from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.short_names import fitted, short_name
from stepscope.records.units import count_text, ms_text, named_ranks
from stepscope.traces.diff_sides import OTHERS, Side, per_step
from stepscope.traces.diff_tables import Change, copies_diff, kernels_diff, operators_diff, shapes_diff
from stepscope.traces.table import Table, table_of

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
LEADS_SHARE = 0.2
"""Of the change of the step that one operator must explain to be named."""
LEADS = 2
"""So many are named."""
OTHER_CALLS = 0.05
"""By how much the number of calls must differ to be what is told."""
HOST, DEVICE = 0, 1
NAME_CHARS = 60


class Part(NamedTuple):
    """Per step of a rank."""

    name: str
    before_ns: int
    after_ns: int

    @property
    def change_ns(self) -> int:
        return self.after_ns - self.before_ns


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
        verdict=_verdict(step, parts, clear, kernel_changes, operator_changes, stepped=one.stepped and other.stepped),
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
        columns.append(per_step([*inside, side.step_ns - sum(inside)], side.rank_steps))
    return [Part(*values) for values in zip(names, *columns, strict=True)]


def _inside(one: RankAnalysis) -> tuple[int, int, int, int]:
    """Parts of the device's span, each instant in one of them."""
    temporal, host = one.pace.work, one.exchanges.host
    if not temporal.span_ns and host is not None:
        return host.compute_ns, host.comm_ns - host.overlap_ns, 0, host.idle_ns
    return temporal.compute_ns, temporal.exposed_comm_ns, temporal.exposed_memory_ns, temporal.idle_ns


def _summary(one: Side, other: Side, step: Part, parts: list[Part]) -> Table:
    def figure(name: str, get: Callable[[RankAnalysis], int]) -> Part:
        before, after = (sum(get(each) for each in side.analyses) for side in (one, other))
        return Part(name, one.each_step(before), other.each_step(after))

    rows = [
        step,
        *parts,
        figure("communication", lambda each: each.pace.work.comm_ns),
        figure("communication hidden by compute", lambda each: each.pace.work.overlap_ns),
        figure("copies", lambda each: each.pace.work.memory_ns),
        figure("idle for the host", lambda each: each.pace.device.idle.host_wait_ns),
        figure("DataLoader", lambda each: each.host.loading_ns),
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


def _verdict(
    step: Part, parts: list[Part], clear: bool, kernels: list[Change], operators: list[Change], *, stepped: bool
) -> str:
    what = "Steps take" if stepped else "The trace takes"
    if not clear:
        after, before = ms_text(step.after_ns / 1e6), ms_text(step.before_ns / 1e6)
        return f"{what} as long as before: {after} against {before}, within their spread."
    longer = f"{ms_text(abs(step.change_ns) / 1e6)} {'longer' if step.change_ns > 0 else 'less'}"
    percent = f" ({step.change_ns / step.before_ns:+.0%})" if step.before_ns else ""
    return f"{what} {longer}{percent}; {_because(parts, step.change_ns, kernels, operators)}."


def _because(parts: list[Part], change_ns: int, kernels: list[Change], operators: list[Change]) -> str:
    sign = 1 if change_ns > 0 else -1
    changed = {part.name: part.change_ns * sign for part in parts}
    # What a step has outside of the device's span is the host's, too.
    waiting = changed.pop("idle") + changed.pop("outside")
    part = max(changed, key=lambda name: changed[name])
    on_host = waiting > changed[part]
    if on_host:
        at, of, changes = HOST, "the host in ", operators
    elif part == "exposed communication":
        at, of, changes = HOST, "", [each for each in kernels if each.label[1] == "communication"]
    elif any(change.after_ns[DEVICE] or change.before_ns[DEVICE] for change in operators):
        at, of, changes = DEVICE, "the device work of ", operators
    else:
        at, of, changes = HOST, "", kernels
    leads = _leads(changes, at, sign, abs(change_ns))
    if not leads:
        where = "while the device waits for the host" if on_host else f"in {part}"
        return f"{ms_text(max(waiting, changed[part]) / 1e6)} of it {where}, and no single operator explains it"
    first, *others = (f"is {of}{_named(lead)}{_how(lead, at)}" for lead in leads)
    told = f"{ms_text(abs(leads[0].change_ns[at]) / 1e6)} of it {first}"
    return told + "".join(
        f", and {ms_text(abs(lead.change_ns[at]) / 1e6)} {other}" for lead, other in zip(leads[1:], others, strict=True)
    )


def _leads(changes: list[Change], at: int, sign: int, change_ns: int) -> list[Change]:
    """The few that explain most of the change, each a good part of it."""
    named = [each for each in changes if each.label[0] != OTHERS]
    most = sorted(named, key=lambda each: -each.change_ns[at] * sign)[:LEADS]
    return [each for each in most if each.change_ns[at] * sign >= LEADS_SHARE * change_ns]


def _named(lead: Change) -> str:
    return fitted(short_name(lead.label[0]), NAME_CHARS)


def _how(lead: Change, at: int) -> str:
    if lead.status == "added":
        return f", which is new ({_times(lead.after_count)} a step)"
    if lead.status == "gone":
        return f", which is gone ({_times(lead.before_count)} a step before)"
    if abs(lead.after_count - lead.before_count) > OTHER_CALLS * lead.before_count:
        return f", called {_times(lead.after_count)} a step instead of {lead.before_count:,.0f}"
    if not lead.before_count or not lead.after_count:
        return ""
    each = (lead.after_ns[at] / lead.after_count, lead.before_ns[at] / lead.before_count)
    return f", {ms_text(each[0] / 1e6)} a call instead of {ms_text(each[1] / 1e6)}"


def _times(count: float) -> str:
    return f"{count:,.0f} times" if count >= 1.5 else "once" if count >= 0.95 else f"{count:.2f} times"


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
