"""Whether ranks mean the same collective, and where they first did not.  Pure.

Two things are compared at each sequence number of a group: what is asked for (operation, amount, type) and from where
(the call site).  A different call site alone is no fault: rank 0 may broadcast from another line than the others
receive from.  Such a pair of lines comes again and again, always the same two; a rank that left the common path meets
the others' lines with lines that belong to other ones of theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepscope.flight.align import Group, Progress
from stepscope.flight.entries import Operation
from stepscope.records.hang import Frame

__all__ = ["Departure", "departure", "difference", "meaning", "odd_ones", "usually_follows"]

ONE_SIDED = ("gather", "scatter")
"""Operations of which only the root shows both inputs and outputs."""
UNEVEN = ("all_to_all", "barrier")
"""Operations whose sizes differ by design, or have none."""
MOSTLY = 0.5
"""From a departure on, at least this share of the collectives differ."""
_Row = tuple[tuple[int, tuple[int, int]], ...]

CONTEXT = 3
"""So many collectives back are looked at to tell what usually comes next."""


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Where some ranks left the path of the others."""

    sequence: int
    ranks: tuple[int, ...]
    """Those that left; empty when it cannot be told which side did."""
    sides: tuple[tuple[int, ...], ...]
    """All ranks that show this number, those alike together, the largest side first."""
    differs: str
    """``operation``, ``dtype``, ``size`` or ``call site``."""


def meaning(operation: Operation) -> Hashable:
    """What ranks must agree on; the same for all that take part in the same collective."""
    if operation.name in UNEVEN:
        return (operation.name, None, None)
    first, second = operation.input_sizes, operation.output_sizes
    if operation.name in ("all_gather", "scatter"):
        first, second = second, first
    sizes = first or ((),) if operation.name in ONE_SIDED else first or second
    return (operation.name, operation.dtypes[:1], sum(math.prod(size) for size in sizes))


def difference(one: Operation, other: Operation) -> str:
    """What they differ in; empty when they are the same collective."""
    mine, theirs = meaning(one), meaning(other)
    if mine == theirs:
        return ""
    if one.name != other.name:
        return "operation"
    return "dtype" if one.dtypes[:1] != other.dtypes[:1] else "size"


def odd_ones(ranks: Iterable[int], key: Callable[[int], Hashable]) -> tuple[tuple[int, ...], ...]:
    """Ranks that are alike, together; the largest side first."""
    sides: dict[Hashable, list[int]] = {}
    for rank in ranks:
        sides.setdefault(key(rank), []).append(rank)
    return tuple(tuple(side) for side in sorted(sides.values(), key=lambda side: (-len(side), side)))


def departure(group: Group, until: int, *, stuck: bool = False) -> Departure | None:
    """The first place from which on, up to ``until``, some ranks are on another path than the rest; None: nowhere.

    ``stuck``: devices stand still in what all have called.  Then a call that differed and ended all the same counts:
    NCCL does not compare calls, and what was left over of that one may stop it a hundred calls later.
    """
    lines = _Lines(group, until)
    last = lines.last_strong()
    if last is None:
        return None
    sides = lines.sides(last)
    tie = len(sides) > 1 and len(sides[0]) == len(sides[1])
    left = frozenset(rank for side in sides[1:] for rank in side)
    first = lines.first(left, last)
    sides = lines.sides(first)
    if tie:
        left = lines.unexpected(sides, first)
    differs = lines.difference(sides, first)
    # On NCCL the host is ahead of its device: what was called after a call that has not ended tells nothing yet.
    ended = all(oldest > last for oldest in group.waiting.values())
    if differs != "call site" and ended and not stuck and lines.agreed_since(last):
        return None  # unlike a call too many, that does not throw them out of step
    return Departure(sequence=first, ranks=tuple(sorted(left)), sides=sides, differs=differs)


def usually_follows(group: Group, rank: int, other: int, number: int) -> bool | None:
    """Whether what ``rank`` called there came next whenever it had called what ``other`` did; None: it never had."""
    own = group.progress[rank]
    missed, instead = _call_at(group.progress[other], number), _call_at(own, number)
    if missed is None or instead is None:
        return None
    before = [one for one in own.trace.sequences if one < number]
    next_ones = {_call_at(own, one + 1) for one in before[:-1] if _call_at(own, one) == missed}
    return instead in next_ones if next_ones else None


def _call_at(progress: Progress, number: int) -> tuple[Hashable, tuple[Frame, ...]] | None:
    operation = progress.operation(number)
    return None if operation is None else (meaning(operation), progress.site(number))


class _Lines:
    """The collectives of a group as numbers that can be compared over ranks; ranks that are alike throughout, once."""

    def __init__(self, group: Group, until: int) -> None:
        self._group = group
        meanings: dict[Hashable, int] = {}
        sites: dict[tuple[Frame, ...], int] = {}
        alike: dict[_Row, list[int]] = {}
        for rank, progress in group.progress.items():
            if progress.trace.sequences:
                alike.setdefault(_row(progress, until, meanings, sites), []).append(rank)
        self._ranks = {ranks[0]: tuple(ranks) for ranks in alike.values()}
        self._rows = {ranks[0]: dict(row) for row, ranks in alike.items()}
        """By the first of the ranks that have it: what, and from where (-1: not told), by sequence number."""
        self._numbers = sorted({number for row in self._rows.values() for number in row})
        self._strong: set[int] = set()
        self._weak: set[int] = set()
        self._find_divergent()

    def last_strong(self) -> int | None:
        return max(self._strong, default=None)

    def sides(self, number: int) -> tuple[tuple[int, ...], ...]:
        have = [rank for rank, row in self._rows.items() if number in row]
        alike = odd_ones(have, lambda rank: self._rows[rank][number])
        whole = [tuple(sorted(rank for one in side for rank in self._ranks[one])) for side in alike]
        return tuple(sorted(whole, key=lambda side: (-len(side), side)))

    def agreed_since(self, last: int) -> bool:
        return any(n > last for n in self._common())

    def first(self, left: frozenset[int], last: int) -> int:
        """The first number from which on those ranks mostly differ from all others."""
        marked = self._strong | self._weak
        apart = [n for n in self._numbers if n <= last and n in marked and self._apart(left, n)]
        common = [n for n in self._common() if n <= last]
        for place, number in enumerate(apart):
            if len(apart) - place >= MOSTLY * (len(common) - bisect_left(common, number)):
                return number
        return last

    def unexpected(self, sides: Sequence[tuple[int, ...]], number: int) -> frozenset[int]:
        """Of sides equally large, those that did not do what came next before; nobody if that tells nothing."""
        before = [n for n in self._numbers if n < number]
        rows = [next(self._rows[rank] for rank in side if rank in self._rows) for side in sides]
        as_usual = [side for side, row in zip(sides, rows, strict=True) if row[number] == _expected(row, before)]
        if len(as_usual) != 1:
            return frozenset()
        return frozenset(rank for side in sides if side is not as_usual[0] for rank in side)

    def difference(self, sides: Sequence[tuple[int, ...]], number: int) -> str:
        operations = [self._group.progress[side[0]].operation(number) for side in sides]
        told = [operation for operation in operations if operation is not None]
        return next((word for other in told[1:] if (word := difference(told[0], other))), "call site")

    def _find_divergent(self) -> None:
        """Numbers at which ranks surely differ, and those at which only the lines do that have not met before."""
        theirs: dict[int, dict[int, int]] = {rank: {} for rank in self._rows}
        """By rank: its own line for each line of the others, and …"""
        usuals: dict[int, dict[int, int]] = {rank: {} for rank in self._rows}
        """… the others' line for each of its own, as first seen together."""
        if len(self._rows) < 2:
            return
        for number in self._numbers:
            have = [(rank, row[number]) for rank, row in self._rows.items() if number in row]
            wheres: Counter[int] = Counter()
            for rank, (_, where) in have:
                wheres[where] += len(self._ranks[rank])
            del wheres[-1]
            if len({what for _, (what, _) in have}) > 1:
                self._strong.add(number)
                continue
            usual = wheres.most_common(1)[0][0] if wheres else -1
            odd = [(rank, where) for rank, (_, where) in have if where not in (usual, -1)]
            if odd:
                # Whether either line has stood against another one of that rank before.
                conflict = any(
                    theirs[rank].get(usual, where) != where or usuals[rank].get(where, usual) != usual
                    for rank, where in odd
                )
                (self._strong if conflict else self._weak).add(number)
            for rank, (_, where) in have:
                if where >= 0:
                    theirs[rank].setdefault(usual, where)
                    usuals[rank].setdefault(where, usual)

    def _common(self) -> list[int]:
        return [n for n in self._numbers if all(n in row for row in self._rows.values())]

    def _apart(self, left: frozenset[int], number: int) -> bool:
        """Whether none of those that left agrees with anybody of the rest there."""
        ours = {row[number] for rank, row in self._rows.items() if rank in left and number in row}
        rest = {row[number] for rank, row in self._rows.items() if rank not in left and number in row}
        return bool(ours and rest) and not ours & rest


def _row(progress: Progress, until: int, meanings: dict[Hashable, int], sites: dict[tuple[Frame, ...], int]) -> _Row:
    dump, trace = progress.dump, progress.trace
    what = [meanings.setdefault(meaning(operation), len(meanings)) for operation in dump.operations]
    where = [sites.setdefault(site, len(sites)) for site in dump.sites]
    where.append(-1)
    return tuple(
        (number, (what[operation], where[site]))
        for number, operation, site in zip(trace.sequences, trace.operations, trace.sites, strict=True)
        if number <= until
    )


def _expected(row: Mapping[int, tuple[int, int]], before: Sequence[int]) -> tuple[int, int] | None:
    """What followed the last time the same came before, on that rank."""
    past = [row[number] for number in before if number in row]
    for length in range(min(CONTEXT, len(past) - 1), 0, -1):
        for place in range(len(past) - 1, length - 1, -1):
            if past[place - length : place] == past[-length:]:
                return past[place]
    return None
