"""Two sets of traces on one scale: per step of a rank, with sums that come out even.

Every figure is a total over some ranks and steps; dividing each by their number would lose the odd nanoseconds, so the
remainders are carried from one row to the next: parts still add up to their whole, each within a nanosecond of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from stepscope.traces.model.table import Table
    from stepscope.traces.rank import RankAnalysis

__all__ = ["OTHERS", "Listed", "Part", "Side", "per_step"]

OTHERS = "(others)"
"""The rows beyond a table's limit, together."""


class Part(NamedTuple):
    """Per step of a rank."""

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
    """Label → values, in the order in which they were asked for."""
    whole: bool
    """Whether a label that is not here did not occur."""


@dataclass(frozen=True, kw_only=True)
class Side:
    analyses: tuple[RankAnalysis, ...]

    @cached_property
    def rank_steps(self) -> int:
        """What totals are divided by."""
        return sum(len(one.steps) for one in self.analyses)

    @cached_property
    def step_ns(self) -> int:
        """Of all steps together, see ``pace``."""
        return sum(one.pace.total_ns for one in self.analyses)

    @cached_property
    def step_lengths_ns(self) -> tuple[int, ...]:
        """One by one: the host's or, where it is longer, the time that the device was busy with it."""
        out: list[int] = []
        for one in self.analyses:
            table = one.tables.get("temporal_steps")
            busy = [row["span_ns"] - row["idle_ns"] for row in table.to_rows()] if table else []
            out += map(max, zip_longest(lengths_of(one), busy, fillvalue=0))
        return tuple(out)

    @cached_property
    def stepped(self) -> bool:
        return all(step.name for one in self.analyses for step in one.steps)

    def each_step(self, total: int) -> int:
        return total // self.rank_steps if self.rank_steps else 0

    def count_each_step(self, count: int) -> float:
        return round(count / self.rank_steps, 3) if self.rank_steps else 0.0

    def listed(self, table: str, labels: Sequence[str], values: Sequence[str]) -> Listed:
        sums: dict[tuple[str, ...], list[int]] = {}
        whole = True
        for one in self.analyses:
            own = one.tables.get(table)
            if own is None:
                continue
            whole &= not own.left_out
            for label, row in _labelled(own, labels, values):
                into = sums.setdefault(label, [0] * len(values))
                for place, value in enumerate(row):
                    into[place] += value
        return Listed(sums={label: tuple(row) for label, row in sums.items()}, whole=whole)


def lengths_of(one: RankAnalysis) -> list[int]:
    return [step.end_ns - step.start_ns for step in one.steps]


def _labelled(
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
    """Each divided; they add up to the whole divided."""
    out, before, running = [], 0, 0
    for total in totals:
        running += total
        now = running // rank_steps if rank_steps else 0
        out.append(now - before)
        before = now
    return out
