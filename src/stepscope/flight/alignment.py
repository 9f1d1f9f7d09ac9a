"""The dumps of all ranks side by side: per group, how far each rank came and where ranks first diverged.

The dumps of all ranks laid beside each other: per group, by sequence number.  Pure.

Neither record ids nor the order of entries or files mean anything across ranks; the sequence number of a group does.  A
ring that went round has forgotten what is old, and how far back it reaches differs from rank to rank: what a rank does
not show is *not called* only where it is newer than the last it called.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.flight.dump import DONE, Dump, GroupKey, Operation, Trace
from stepscope.records.collectives import NO_DESCRIPTION, group_name
from stepscope.records.finding import Frame

__all__ = [
    "Divergence",
    "Group",
    "difference",
    "find_divergence",
    "groups_of",
    "meaning",
    "usually_follows",
    "world_of",
]


# -- align ------------------------------------------------------------------------------------------------------------

NOBODY: tuple[int, ...] = ()
DEFAULT = "default_pg"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far one rank came in one group."""

    dump: Dump
    trace: Trace
    enqueued: int | None
    """The last sequence number it called; 0: none; None: cannot be told."""
    pending: tuple[int, ...]
    """Sequence numbers of what it called and has not seen the end of."""
    failed: bool = False
    """Whether the last of them only counts as pending because the rank failed: gloo retires what it gave up."""

    @property
    def oldest(self) -> int | None:
        return self.pending[0] if self.pending else None

    @property
    def completed(self) -> int | None:
        """The last one of which it saw the end, and of all before."""
        if self.oldest is not None:
            return self.oldest - 1
        return self.enqueued

    @property
    def started(self) -> int | None:
        """The last one that it is known to have begun."""
        latest = zip(reversed(self.trace.sequences), reversed(self.trace.states), strict=True)
        return next((number for number, state in latest if state), self.completed)

    def place(self, sequence: int) -> int | None:
        """Where in the columns that sequence number stands."""
        at = bisect_left(self.trace.sequences, sequence)
        found = at < len(self.trace.sequences) and self.trace.sequences[at] == sequence
        return at if found else None

    def operation(self, sequence: int) -> Operation | None:
        at = self.place(sequence)
        return None if at is None else self.dump.operations[self.trace.operations[at]]

    def site(self, sequence: int) -> tuple[Frame, ...]:
        at = self.place(sequence)
        number = -1 if at is None else self.trace.sites[at]
        return self.dump.sites[number] if number >= 0 else ()

    def state(self, sequence: int) -> int | None:
        at = self.place(sequence)
        return None if at is None else self.trace.states[at]

    def has_not_called(self, sequence: int) -> bool:
        """Whether that is sure; where only what had not ended was dumped, for what has not ended on a peer."""
        if self.enqueued is None:
            return self.dump.active_only and sequence not in self.pending
        return self.enqueued < sequence

    def has_ended(self, sequence: int) -> bool:
        """Whether it called that one and saw its end."""
        state = self.state(sequence)
        if state is not None:
            return state == DONE
        return self.enqueued is not None and sequence <= self.enqueued and sequence not in self.pending


@dataclass(frozen=True, kw_only=True)
class Group:
    key: GroupKey
    members: tuple[int, ...]
    """Global ranks, in the order of the group where that is known."""
    ordered: bool
    """Whether it is: sends and recvs tell ranks by their place in it."""
    progress: Mapping[int, Progress] = field(default_factory=dict)
    """Of the members that have a dump."""

    @property
    def name(self) -> str:
        return group_name(*self.key) or "the group"

    @property
    def waiting(self) -> dict[int, int]:
        """Ranks with something called and not ended, and the oldest of it."""
        return {rank: one.oldest for rank, one in self.progress.items() if one.oldest is not None}

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Members that are known not to have called that one."""
        return tuple(
            rank for rank in self.members if rank in self.progress and self.progress[rank].has_not_called(sequence)
        )


def world_of(dumps: Sequence[Dump], world: int | None, others: Iterable[int] = ()) -> tuple[int, ...]:
    """All ranks that exist, as far as anything tells: up to the highest that is mentioned, for they have no gaps."""
    ranks = {dump.rank for dump in dumps} | set(others) | set(range(world or 0))
    for dump in dumps:
        ranks.update(dump.world_hint)
        for members in dump.members.values():
            ranks.update(members)
    return tuple(range(max(ranks, default=-1) + 1))


def groups_of(
    dumps: Sequence[Dump], world: tuple[int, ...], failed: Collection[int] = frozenset()
) -> tuple[Group, ...]:
    """Every group that any rank has, with what its members say of it; ``failed`` ranks gave up what they did last."""
    seen: dict[tuple[GroupKey, tuple[int, ...]], list[Dump]] = {}
    for dump in dumps:
        for key in dump.groups:
            told = dump.members.get(key, NOBODY)
            seen.setdefault((key, told if dump.rank in told else NOBODY), []).append(dump)
    inferred = _members({key: ds for (key, told), ds in seen.items() if not told}, world)
    groups = []
    for (key, told), theirs in seen.items():
        mixed = any(dump.groups[key].mixed for dump in theirs)
        groups.append(
            Group(
                key=key,
                members=told or inferred[key],
                ordered=bool(told) or inferred[key] == world,
                progress={d.rank: _progress(d, d.groups[key], mixed, d.rank in failed) for d in theirs},
            )
        )
    present = {dump.rank: dump for dump in dumps}
    return tuple(
        _with_absent(group, present) for group in sorted(groups, key=lambda g: (_numbered(g.key[0]), g.members))
    )


def _progress(dump: Dump, trace: Trace, mixed: bool, failed: bool) -> Progress:
    pending = tuple(number for number, state in zip(trace.sequences, trace.states, strict=True) if state != DONE)
    last = trace.sequences[-1] if trace.sequences else None
    counted = trace.status.enqueued if trace.status is not None and not mixed else None
    if last is not None and (counted is None or dump.complete):
        enqueued: int | None = last
    elif counted is not None and counted >= 0:
        enqueued = max(counted, last or 0)
    else:
        enqueued = 0 if dump.complete else None
    gave_up = failed and not pending and last is not None and _is_last(dump, trace)
    return Progress(
        dump=dump, trace=trace, enqueued=enqueued, pending=(last,) if gave_up and last else pending, failed=gave_up
    )


def _is_last(dump: Dump, trace: Trace) -> bool:
    """Whether this group has the last call of that rank, and gloo made it."""
    latest = max((one.created_ns[-1] for one in dump.groups.values() if one.created_ns), default=0)
    return trace.created_ns[-1] == latest and dump.operations[trace.operations[-1]].backend in ("gloo", "")


def _with_absent(group: Group, dumps: Mapping[int, Dump]) -> Group:
    """Members whose dump does not mention the group at all have called nothing in it, if the dump is whole."""
    absent = {
        rank: _progress(dumps[rank], Trace(), mixed=False, failed=False)
        for rank in group.members
        if rank not in group.progress and rank in dumps
    }
    if not absent:
        return group
    return Group(key=group.key, members=group.members, ordered=group.ordered, progress={**group.progress, **absent})


def _members(groups: Mapping[GroupKey, list[Dump]], world: tuple[int, ...]) -> dict[GroupKey, tuple[int, ...]]:
    """Members of groups of which no dump tells them (gloo): whoever shows the group, and who must be meant besides.

    The default group has everybody.  Groups with the same description are those of one dimension of a mesh: disjoint,
    equally large and together everybody, so if one of them is short of just the ranks that are in none, they are in it.
    """
    shown = {key: tuple(sorted(dump.rank for dump in dumps)) for key, dumps in groups.items()}
    families: dict[str, list[GroupKey]] = {}
    for key in shown:
        if key[1] == DEFAULT or (key[0] == "0" and key[1] in NO_DESCRIPTION):
            shown[key] = world
        else:
            families.setdefault(key[1], []).append(key)
    for keys in families.values():
        largest = max(len(shown[key]) for key in keys)
        homeless = set(world).difference(*(shown[key] for key in keys))
        short = [key for key in keys if len(shown[key]) < largest]
        if len(short) == 1 and len(shown[short[0]]) + len(homeless) == largest:
            shown[short[0]] = tuple(sorted({*shown[short[0]], *homeless}))
    return shown


def _numbered(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() and len(name) < 19 else (1 << 62, name)


# -- compare ----------------------------------------------------------------------------------------------------------
# Whether ranks mean the same collective, and where they first did not.  Pure.
#
# Two things are compared at each sequence number of a group: what is asked for (operation, amount, type) and from where
# (the call site).  A different call site alone is no fault: rank 0 may broadcast from another line than the others
# receive from.  Such a pair of lines comes again and again, always the same two; a rank that left the common path meets
# the others' lines with lines that belong to other ones of theirs.

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
class Divergence:
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


def group_alike(ranks: Iterable[int], key: Callable[[int], Hashable]) -> tuple[tuple[int, ...], ...]:
    """Ranks that are alike, together; the largest side first."""
    sides: dict[Hashable, list[int]] = {}
    for rank in ranks:
        sides.setdefault(key(rank), []).append(rank)
    return tuple(tuple(side) for side in sorted(sides.values(), key=lambda side: (-len(side), side)))


def find_divergence(group: Group, until: int, *, stuck: bool = False) -> Divergence | None:
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
    return Divergence(sequence=first, ranks=tuple(sorted(left)), sides=sides, differs=differs)


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
        alike = group_alike(have, lambda rank: self._rows[rank][number])
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
