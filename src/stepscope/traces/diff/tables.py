"""What changed, row by row: kernels, operators, shapes.

A change splits exactly into what comes of the number (at the old length each) and what comes of the length.  Shares are
of the change of the step, which they may exceed: work on several streams and threads runs side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepscope.traces.diff.sides import OTHERS, Listed, Side, per_step
from stepscope.traces.model.table import Table, table_of

__all__ = ["Change", "changes", "copies_diff", "kernels_diff", "operators_diff", "shapes_diff"]

SAME_SHARE = 0.02
"""Of its former time: durations of kernels differ by as much from run to run."""
SAME_NS = 1_000
"""Per step: the resolution of the clocks of most traces."""

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
    """As many as times were asked for."""
    after_ns: tuple[int, ...]
    by_count_ns: tuple[int, ...]
    known: bool
    """False: missing on one side, whose table has a limit."""

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
        if abs(largest) <= max(SAME_NS, SAME_SHARE * former):
            return "same"
        return "slower" if largest > 0 else "faster"


def changes(
    before: Side, after: Side, table: str, labels: Sequence[str], count: str, times: Sequence[str]
) -> list[Change]:
    """The largest change first."""
    one, other = (side.listed(table, labels, (count, *times)) for side in (before, after))
    found = sorted(one.sums.keys() | other.sums.keys())
    former, latter = (_divided(side, listed, found, len(times)) for side, listed in ((before, one), (after, other)))
    out = []
    for place, label in enumerate(found):
        old_count, new_count = one.sums.get(label, (0,))[0], other.sums.get(label, (0,))[0]
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
                known=(one.whole or label in one.sums) and (other.whole or label in other.sums),
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
    """What comes of the number: all of it where there was none before or is none now."""
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
        note="step_share: of the change of the step time; by_count: what comes of their number, by_length: the rest.",
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
    """Empty where one of the two has no shapes: all would be new."""
    labels = ("operator", "input_dims", "input_types")
    found: list[Change] = []
    if all("operators_by_shape" in one.tables for side in (before, after) for one in side.analyses):
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
        note="Self times, which add up: of the host over all threads, of the device over all streams.",
    )


def _side_by_side(change: Change, step_change_ns: int) -> Iterator[int | float | None]:
    for before, after, changed in zip(change.before_ns, change.after_ns, change.change_ns, strict=True):
        yield from (before, after, changed, _share(changed, step_change_ns))
