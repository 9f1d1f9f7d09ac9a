"""Two jobs compared: what became slower or faster, by how much of the step, and why.

All figures are per step of a rank: totals over the steps that count, divided by their number. Ranks present on both
sides are compared with themselves; without a common rank, all ranks of one side are compared with all of the other. The
parts of a device's time (compute, exposed communication, exposed copies, idle, and the part of the step outside its
span) add up to the step, and their changes to the change of the step. The length of a step is the host's step or, where
a host that does not wait finishes long before the device, the device's span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.records.text import count_text, ms_text, named_ranks
from stepscope.traces.model.kernel_names import fitted, short_name
from stepscope.traces.model.tables import Table, table_of
from stepscope.traces.rules import thresholds

if TYPE_CHECKING:
    from stepscope.traces.job import JobAnalysis
    from stepscope.traces.rank_analysis import RankAnalysis

__all__ = ["OTHERS", "Side", "TraceDiff", "changes", "diff", "per_step"]


# -- sides ------------------------------------------------------------------------------------------------------------
# Two sets of traces on one scale: per step of a rank. Every figure is a total over ranks and steps. Plain division
# would lose the odd nanoseconds, so remainders are carried from one row to the next: parts still add up to their whole,
# each within a nanosecond of its exact value.

OTHERS = "(others)"
"""All rows beyond a table's limit, as one row."""


class StepPart(NamedTuple):
    """One part of the step, per step of a rank."""

    name: str
    before_ns: int
    after_ns: int

    @property
    def change_ns(self) -> int:
        return self.after_ns - self.before_ns


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A table's rows summed over ranks."""

    sums: dict[tuple[str, ...], tuple[int, ...]]
    """Label → values, in the requested order."""
    whole: bool
    """Whether a label that is missing here did not occur."""


@dataclass(frozen=True, kw_only=True)
class Side:
    analyses: tuple[RankAnalysis, ...]

    @cached_property
    def rank_steps(self) -> int:
        """The divisor for totals."""
        return sum(len(analysis.steps) for analysis in self.analyses)

    @cached_property
    def step_ns(self) -> int:
        """Total of all steps, see ``pace``."""
        return sum(analysis.pace.total_ns for analysis in self.analyses)

    @cached_property
    def step_lengths_ns(self) -> tuple[int, ...]:
        """Length of each step: the host's or, if longer, the time that the device was busy with it."""
        out: list[int] = []
        for analysis in self.analyses:
            table = analysis.tables.get("temporal_steps")
            busy = [row["span_ns"] - row["idle_ns"] for row in table.to_rows()] if table else []
            out += map(max, zip_longest(lengths_of(analysis), busy, fillvalue=0))
        return tuple(out)

    @cached_property
    def stepped(self) -> bool:
        return all(step.name for analysis in self.analyses for step in analysis.steps)

    def each_step(self, total: int) -> int:
        return total // self.rank_steps if self.rank_steps else 0

    def count_each_step(self, count: int) -> float:
        return round(count / self.rank_steps, 3) if self.rank_steps else 0.0

    def listed(self, table: str, labels: Sequence[str], values: Sequence[str]) -> Listed:
        sums: dict[tuple[str, ...], list[int]] = {}
        whole = True
        for analysis in self.analyses:
            own = analysis.tables.get(table)
            if own is None:
                continue
            whole &= not own.left_out
            for label, row in _labeled(own, labels, values):
                into = sums.setdefault(label, [0] * len(values))
                for place, value in enumerate(row):
                    into[place] += value
        return Listed(sums={label: tuple(row) for label, row in sums.items()}, whole=whole)


def lengths_of(analysis: RankAnalysis) -> list[int]:
    return [step.end_ns - step.start_ns for step in analysis.steps]


def _labeled(
    table: Table, labels: Sequence[str], values: Sequence[str]
) -> Iterable[tuple[tuple[str, ...], tuple[int, ...]]]:
    names = [table.columns.index(label) for label in labels]
    places = [table.columns.index(value) for value in values]
    for row in table.rows:
        yield tuple(str(row[at] or "") for at in names), tuple(_count(row[at]) for at in places)
    if table.left_out:
        yield (OTHERS, *("" for _ in labels[1:])), tuple(table.left_out_sums.get(value, 0) for value in values)


def _count(value: Any) -> int:
    return int(value) if value is not None else 0


def per_step(totals: Iterable[int], rank_steps: int) -> list[int]:
    """Divide each total; the quotients add up to the quotient of the sum."""
    out, before, running = [], 0, 0
    for total in totals:
        running += total
        now = running // rank_steps if rank_steps else 0
        out.append(now - before)
        before = now
    return out


# -- tables of changes ------------------------------------------------------------------------------------------------
# Changes row by row: kernels, operators, shapes. A change splits exactly into the effect of the count (at the old
# duration each) and the effect of the duration. Shares are of the change of the step and may exceed it: work on several
# streams and threads runs concurrently.


WORK_COLUMNS = (
    *("status", "before_count", "after_count", "before_ns", "after_ns", "change_ns"),
    *("by_count_ns", "by_length_ns", "step_share"),
)
OPERATOR_COLUMNS = (
    *("status", "before_calls", "after_calls"),
    *("before_host_ns", "after_host_ns", "host_change_ns", "host_step_share"),
    *("before_device_ns", "after_device_ns", "device_change_ns", "device_step_share"),
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One label on both sides, per step of a rank."""

    label: tuple[str, ...]
    before_count: float
    after_count: float
    before_ns: tuple[int, ...]
    """One value per requested time."""
    after_ns: tuple[int, ...]
    by_count_ns: tuple[int, ...]
    known: bool
    """False if one side lacks the label and its table has a limit."""

    @property
    def change_ns(self) -> tuple[int, ...]:
        return tuple(after - before for before, after in zip(self.before_ns, self.after_ns, strict=True))

    @property
    def status(self) -> str:
        if self.label[0] == OTHERS:
            return "others"
        if not self.known:
            return "unlisted"
        if not self.before_count:
            return "added"
        if not self.after_count:
            return "gone"
        largest, former = max(zip(self.change_ns, self.before_ns, strict=True), key=lambda each: abs(each[0]))
        if abs(largest) <= max(thresholds.SAME_NS, thresholds.SAME_SHARE * former):
            return "same"
        return "slower" if largest > 0 else "faster"


def changes(
    before: Side, after: Side, table: str, labels: Sequence[str], count: str, times: Sequence[str]
) -> list[Change]:
    """List all changes, the largest first."""
    old, new = (side.listed(table, labels, (count, *times)) for side in (before, after))
    found = sorted(old.sums.keys() | new.sums.keys())
    former, latter = (_divided(side, listed, found, len(times)) for side, listed in ((before, old), (after, new)))
    out = []
    for place, label in enumerate(found):
        old_count, new_count = old.sums.get(label, (0,))[0], new.sums.get(label, (0,))[0]
        old_each, new_each = before.count_each_step(old_count), after.count_each_step(new_count)
        old_ns, new_ns = former[place], latter[place]
        out.append(
            Change(
                label=label,
                before_count=old_each,
                after_count=new_each,
                before_ns=old_ns,
                after_ns=new_ns,
                by_count_ns=tuple(
                    _by_count(value, changed, old_each, new_each) for value, changed in zip(old_ns, new_ns, strict=True)
                ),
                known=(old.whole or label in old.sums) and (new.whole or label in new.sums),
            )
        )
    return sorted(out, key=lambda change: -max(abs(each) for each in change.change_ns))


def _divided(side: Side, listed: Listed, found: Sequence[tuple[str, ...]], times: int) -> list[tuple[int, ...]]:
    columns = (
        per_step((listed.sums[label][1 + at] if label in listed.sums else 0 for label in found), side.rank_steps)
        for at in range(times)
    )
    return list(zip(*columns, strict=True))


def _by_count(old_ns: int, new_ns: int, old_count: float, new_count: float) -> int:
    """Return the change caused by the count: all of it if the count is zero before or after."""
    if not old_count or not new_count:
        return new_ns - old_ns
    return round(old_ns * (new_count - old_count) / old_count)


def _share(change_ns: int, step_change_ns: int) -> float | None:
    return round(change_ns / step_change_ns, 4) if step_change_ns else None


def kernels_diff(before: Side, after: Side, step_change_ns: int) -> tuple[Table, list[Change]]:
    found = changes(before, after, "kernels", ("name", "class"), "count", ("total_ns",))
    return _of_work("diff_kernels", "Kernels that changed, per step", ("name", "class"), found, step_change_ns), found


def copies_diff(before: Side, after: Side, step_change_ns: int) -> Table:
    labels = ("direction", "memory")
    found = changes(before, after, "copies", labels, "count", ("total_ns",))
    return _of_work("diff_copies", "Copies and memsets that changed, per step", labels, found, step_change_ns)


def _of_work(name: str, title: str, labels: tuple[str, ...], found: list[Change], step_change_ns: int) -> Table:
    return table_of(
        name,
        title,
        (*labels, *WORK_COLUMNS),
        (
            (*each.label, each.status, each.before_count, each.after_count, *_split(each, step_change_ns))
            for each in found
        ),
        note="step_share: of the change in step time; by_count: due to their number; by_length: the rest.",
    )


def _split(change: Change, step_change_ns: int) -> Iterator[int | float | None]:
    changed, by_count = change.change_ns[0], change.by_count_ns[0]
    yield from (change.before_ns[0], change.after_ns[0], changed, by_count, changed - by_count)
    yield _share(changed, step_change_ns)


def operators_diff(before: Side, after: Side, step_change_ns: int) -> tuple[Table, list[Change]]:
    found = changes(before, after, "operators", ("operator",), "calls", ("host_self_ns", "device_self_ns"))
    return _of_operators(
        "diff_operators", "Operators that changed, per step", ("operator",), found, step_change_ns
    ), found


def shapes_diff(before: Side, after: Side, step_change_ns: int) -> Table:
    """Compare shapes; empty if either side has none, as all would be new."""
    labels = ("operator", "input_dims", "input_types")
    found: list[Change] = []
    if all("operators_by_shape" in analysis.tables for side in (before, after) for analysis in side.analyses):
        found = changes(before, after, "operators_by_shape", labels, "calls", ("host_self_ns", "device_self_ns"))
    return _of_operators("diff_shapes", "Operators and shapes that changed, per step", labels, found, step_change_ns)


def _of_operators(name: str, title: str, labels: tuple[str, ...], found: list[Change], step_change_ns: int) -> Table:
    return table_of(
        name,
        title,
        (*labels, *OPERATOR_COLUMNS),
        (
            (*each.label, each.status, each.before_count, each.after_count, *_side_by_side(each, step_change_ns))
            for each in found
        ),
        note="Self times, which add up: host over all threads, device over all streams.",
    )


def _side_by_side(change: Change, step_change_ns: int) -> Iterator[int | float | None]:
    for before, after, changed in zip(change.before_ns, change.after_ns, change.change_ns, strict=True):
        yield from (before, after, changed, _share(changed, step_change_ns))


# -- verdict ----------------------------------------------------------------------------------------------------------
# One sentence on what changed between two traces: by how much, where, and what explains most of it. A part may change
# by more than the step if others compensate; it is then not called a part of the change. A process without a device
# cannot wait for one: what grows between its operators is loading, Python or a wait.

LEADS = 2
"""Maximum number of operators named."""
HOST, DEVICE = 0, 1
NAME_CHARS = 60


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The changes per step of a rank."""

    step: StepPart
    parts: list[StepPart]
    kernels: list[Change]
    operators: list[Change]
    loading: StepPart
    stops: list[StepPart]
    """Python that ran for long, by place."""
    on_device: bool

    @property
    def sign(self) -> int:
        return 1 if self.step.change_ns > 0 else -1


def verdict_of_diff(changes: Changes, *, clear: bool, stepped: bool) -> str:
    step = changes.step
    what = "Steps take" if stepped else "The trace takes"
    if not clear:
        after, before = ms_text(step.after_ns / 1e6), ms_text(step.before_ns / 1e6)
        return f"{what} as long as before: {after} against {before}, within their spread."
    longer = f"{ms_text(abs(step.change_ns) / 1e6)} {_more(changes.sign)}"
    percent = f" ({step.change_ns / step.before_ns:+.0%})" if step.before_ns else ""
    return f"{what} {longer}{percent}; {_because(changes)}."


def _because(changes: Changes) -> str:
    sign = changes.sign
    changed = {part.name: part.change_ns * sign for part in changes.parts}
    # The part of a step outside the device's span also belongs to the host.
    waiting = changed.pop("idle") + changed.pop("outside")
    part = max(changed, key=lambda name: changed[name])
    if waiting > changed[part]:
        return _of_host(changes, waiting)
    if part == "exposed communication":
        at, of, of_whom = HOST, "", [each for each in changes.kernels if each.label[1] == "communication"]
    elif any(change.after_ns[DEVICE] or change.before_ns[DEVICE] for change in changes.operators):
        at, of, of_whom = DEVICE, "the device work of ", changes.operators
    else:
        at, of, of_whom = HOST, "", changes.kernels if changes.on_device else changes.operators
    leads = _leads(of_whom, at, sign, abs(changes.step.change_ns))
    if not leads:
        return (
            f"{_amount(changes, changed[part])}in {part}, and no single operator explains it{_made_up(changes, part)}"
        )
    return _told(changes, leads, at, of)


def _of_host(changes: Changes, waiting_ns: int) -> str:
    """Explain a change of ``waiting_ns`` in the time during which no operator or no device worked."""
    sign = changes.sign
    stops = sorted(changes.stops, key=lambda each: -each.change_ns * sign)
    for place in (changes.loading, *stops[:1]):
        if place.change_ns * sign >= thresholds.EXPLAINS_SHARE * waiting_ns:
            amount = _amount(changes, min(place.change_ns * sign, waiting_ns))
            return f"{amount}in {place.name}{_made_up(changes, 'idle')}"
    # Without a device, operator time is compute time and does not explain waiting.
    leads = _leads(changes.operators, HOST, sign, abs(changes.step.change_ns)) if changes.on_device else []
    if leads:
        return _told(changes, leads, HOST, "the host in ")
    where = "while the device waits for the host" if changes.on_device else "while no operator runs"
    return f"{_amount(changes, waiting_ns)}{where}, and no single operator explains it{_made_up(changes, 'idle')}"


def _told(changes: Changes, leads: list[Change], at: int, of: str) -> str:
    first, *others = (f"is {of}{_named(lead)}{_how(lead, at)}" for lead in leads)
    text = f"{_amount(changes, abs(leads[0].change_ns[at]))}{first}"
    return text + "".join(
        f", and {ms_text(abs(lead.change_ns[at]) / 1e6)} {other}" for lead, other in zip(leads[1:], others, strict=True)
    )


def _amount(changes: Changes, amount_ns: int) -> str:
    """Return ``12 ms of it``, or ``12 ms longer`` if the amount exceeds the change of the step."""
    within = amount_ns <= abs(changes.step.change_ns)
    return f"{ms_text(amount_ns / 1e6)} {'of it' if within else _more(changes.sign)} "


def _made_up(changes: Changes, part: str) -> str:
    """Name what changed in the opposite direction, if the part changed by more than the step."""
    sign = changes.sign
    own = next(each.change_ns * sign for each in changes.parts if each.name == part)
    least = min(changes.parts, key=lambda each: each.change_ns * sign)
    if own <= abs(changes.step.change_ns) or least.change_ns * sign >= 0:
        return ""
    return f", partly offset by {ms_text(abs(least.change_ns) / 1e6)} {_more(-sign)} in {least.name}"


def _more(sign: int) -> str:
    return "longer" if sign > 0 else "less"


def _leads(changes: list[Change], at: int, sign: int, change_ns: int) -> list[Change]:
    """Return the few changes that explain most of the total, each a substantial part of it."""
    named = [each for each in changes if each.label[0] != OTHERS]
    most = sorted(named, key=lambda each: -each.change_ns[at] * sign)[:LEADS]
    return [each for each in most if each.change_ns[at] * sign >= thresholds.LEADS_SHARE * change_ns]


def _named(lead: Change) -> str:
    return fitted(short_name(lead.label[0]), NAME_CHARS)


def _how(lead: Change, at: int) -> str:
    if lead.status == "added":
        return f", which is new ({_times(lead.after_count)} a step)"
    if lead.status == "gone":
        return f", which is gone ({_times(lead.before_count)} a step before)"
    if abs(lead.after_count - lead.before_count) > thresholds.OTHER_CALLS_SHARE * lead.before_count:
        return f", called {_times(lead.after_count)} a step instead of {lead.before_count:,.0f}"
    if not lead.before_count or not lead.after_count:
        return ""
    each = (lead.after_ns[at] / lead.after_count, lead.before_ns[at] / lead.before_count)
    return f", {ms_text(each[0] / 1e6)} a call instead of {ms_text(each[1] / 1e6)}"


def _times(count: float) -> str:
    return f"{count:,.0f} times" if count >= 1.5 else "once" if count >= 0.95 else f"{count:.2f} times"


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceDiff:
    verdict: str
    step_before_ns: int
    step_after_ns: int
    clear: bool
    """Whether the two sides differ by more than the variation within each."""
    ranks: tuple[int, ...]
    """The ranks compared with themselves; empty if the sides are compared by their means over all ranks."""
    tables: dict[str, Table] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @property
    def step_change_ns(self) -> int:
        return self.step_after_ns - self.step_before_ns


def diff(before: JobAnalysis, after: JobAnalysis) -> TraceDiff:
    old, new, ranks = _sides(before.ranks, after.ranks)
    parts = _parts(old, new)
    step = StepPart("step", sum(part.before_ns for part in parts), sum(part.after_ns for part in parts))
    change_ns = step.change_ns
    kernels, kernel_changes = kernels_diff(old, new, change_ns)
    operators, operator_changes = operators_diff(old, new, change_ns)
    clear = _is_clear(old.step_lengths_ns, new.step_lengths_ns)
    made = (
        _summary(old, new, step, parts),
        _counts(old, new, kernel_changes, operator_changes),
        _memory(old, new),
        kernels,
        copies_diff(old, new, change_ns),
        operators,
        shapes_diff(old, new, change_ns),
    )
    return TraceDiff(
        verdict=verdict_of_diff(
            Changes(
                step=step,
                parts=parts,
                kernels=kernel_changes,
                operators=operator_changes,
                loading=_figure(old, new, "the DataLoader", _loading),
                stops=_stops(old, new),
                on_device=any(each.pace.work.span_ns for each in (*old.analyses, *new.analyses)),
            ),
            clear=clear,
            stepped=old.stepped and new.stepped,
        ),
        step_before_ns=step.before_ns,
        step_after_ns=step.after_ns,
        clear=clear,
        ranks=ranks,
        tables={table.name: table for table in made if table.rows},
        notices=tuple(_notices(old, new, ranks, before.ranks, after.ranks)),
    )


def _sides(before: Sequence[RankAnalysis], after: Sequence[RankAnalysis]) -> tuple[Side, Side, tuple[int, ...]]:
    both = {analysis.rank for analysis in before} & {analysis.rank for analysis in after}
    if not both:
        return Side(analyses=tuple(before)), Side(analyses=tuple(after)), ()
    sides = (Side(analyses=tuple(analysis for analysis in ranks if analysis.rank in both)) for ranks in (before, after))
    return next(sides), next(sides), tuple(sorted(both))


# -- summary tables -------------------------------------------------------------------------------------------------


def _parts(old: Side, new: Side) -> list[StepPart]:
    """Split the step into parts: of the device or, without one, of the host threads."""
    names = ("compute", "exposed communication", "exposed copies", "idle", "outside")
    columns = []
    for side in (old, new):
        times = [_inside(each) for each in side.analyses]
        inside = [sum(column) for column in zip(*times, strict=True)] or [0] * (len(names) - 1)
        columns.append(per_step([*inside, max(side.step_ns - sum(inside), 0)], side.rank_steps))
    return [StepPart(*values) for values in zip(names, *columns, strict=True)]


def _inside(analysis: RankAnalysis) -> tuple[int, int, int, int]:
    """Return the parts of the device's span; every instant belongs to exactly one."""
    temporal, host = analysis.pace.work, analysis.exchanges.host
    if not temporal.span_ns and host is not None:
        return host.compute_ns, host.comm_ns - host.overlap_ns, 0, host.idle_ns
    return temporal.compute_ns, temporal.exposed_comm_ns, temporal.exposed_memory_ns, temporal.idle_ns


def _summary(old: Side, new: Side, step: StepPart, parts: list[StepPart]) -> Table:
    def figure(name: str, get: Callable[[RankAnalysis], int]) -> StepPart:
        return _figure(old, new, name, get)

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
        "Parts of a step, before and after",
        ("figure", "before_ns", "after_ns", "change_ns", "change_share", "step_share"),
        (
            (*part, part.change_ns, _ratio(part.change_ns, part.before_ns), _ratio(part.change_ns, step.change_ns))
            for part in rows
        ),
        note="Compute, exposed communication, exposed copies, idle and outside (of the device's span) add up to the "
        "step: the host's or, if longer, the device's span of its work.",
    )


def _figure(old: Side, new: Side, name: str, get: Callable[[RankAnalysis], int]) -> StepPart:
    before, after = (sum(get(each) for each in side.analyses) for side in (old, new))
    return StepPart(name, old.each_step(before), new.each_step(after))


def _loading(analysis: RankAnalysis) -> int:
    return analysis.host.loading_ns


def _stops(old: Side, new: Side) -> list[StepPart]:
    """Sum the long Python stops by place, where the place is known."""
    sums: dict[str, list[int]] = {}
    for at, side in enumerate((old, new)):
        for stop in (stop for each in side.analyses for stop in each.host.stops):
            if stop.named:
                sums.setdefault(stop.named, [0, 0])[at] += stop.total_ns
    return [StepPart(place, old.each_step(before), new.each_step(after)) for place, (before, after) in sums.items()]


def _ratio(value: int, whole: int) -> float | None:
    return value / whole if whole else None


def _counts(old: Side, new: Side, kernels: list[Change], operators: list[Change]) -> Table:
    def count(name: str, changes: list[Change]) -> tuple[str, float, float]:
        return name, sum(each.before_count for each in changes), sum(each.after_count for each in changes)

    def launches(side: Side) -> float:
        return side.count_each_step(sum(each.pace.device.launch_count for each in side.analyses))

    rows = [
        count("kernels", kernels),
        count("operator calls", operators),
        ("launches", launches(old), launches(new)),
    ]
    return table_of(
        "diff_counts",
        "Counts per step, before and after",
        ("figure", "before", "after", "change"),
        ((name, round(old, 3), round(new, 3), round(new - old, 3)) for name, old, new in rows),
    )


def _memory(old: Side, new: Side) -> Table:
    """Compare the peaks of the largest rank, for figures that both sides have."""
    rows = []
    for name, get in (("peak allocated", "peak_allocated_bytes"), ("peak reserved", "peak_reserved_bytes")):
        known = [
            [value for each in side.analyses if (value := getattr(each.host, get)) is not None] for side in (old, new)
        ]
        if all(known):
            before_bytes, after_bytes = (max(values) for values in known)
            rows.append((name, before_bytes, after_bytes, after_bytes - before_bytes))
    return table_of(
        "diff_memory",
        "Device memory, before and after",
        ("figure", "before_bytes", "after_bytes", "change_bytes"),
        rows,
    )


# -- significance and notices ---------------------------------------------------------------------------------------


def _is_clear(before: Sequence[int], after: Sequence[int]) -> bool:
    """Test whether the change is significant; with too few steps to know, any change that is not small counts."""
    if not before or not after:
        return False
    change = fmean(after) - fmean(before)
    if abs(change) < thresholds.CHANGE_SHARE * fmean(before):
        return False
    if min(len(before), len(after)) < thresholds.SURE_STEPS:
        return True
    if max(before) < min(after) or max(after) < min(before):
        return True
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return abs(change) > thresholds.CLEAR_ERRORS * error


def _notices(
    old: Side, new: Side, ranks: tuple[int, ...], before: Sequence[RankAnalysis], after: Sequence[RankAnalysis]
) -> list[str]:
    out = []
    for name, side in (("first", old), ("second", new)):
        fewest = min((len(each.steps) for each in side.analyses), default=0)
        if not side.stepped:
            out.append(f"The {name} has no profiler steps: its whole trace counts as one step.")
        elif fewest < thresholds.SURE_STEPS:
            out.append(
                f"The {name} has only {count_text(fewest, 'usable step')}: the variation between steps is unknown."
            )
    everyone = {each.rank for each in (*before, *after)}
    if not ranks:
        out.append("No rank is in both: the means over all ranks of each are compared.")
    elif len(ranks) < len(everyone):
        verb = "is" if len(ranks) == 1 else "are"
        out.append(f"{named_ranks(ranks)} {verb} compared; the others are in only one of the two.")
    devices = [
        sorted({each.pace.device.device_name for each in side.analyses if each.pace.device.device_name})
        for side in (old, new)
    ]
    if devices[0] and devices[1] and devices[0] != devices[1]:
        out.append(f"The devices differ: {', '.join(devices[0])} before, {', '.join(devices[1])} after.")
    return out
