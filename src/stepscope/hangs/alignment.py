"""The dumps of all ranks side by side: per group, how far each rank came and where ranks first diverged. Pure.

Record IDs and the order of entries or files mean nothing across ranks; a group's sequence numbers do. A ring that
wrapped has lost its old entries, and how far back it reaches differs between ranks. A collective that a rank does not
show counts as *not called* only if it is newer than the last one that the rank called.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.flight.dump import DONE, Dump, GroupKey, Operation, Trace
from stepscope.hangs.thresholds import CONTEXT_CALLS, DIVERGED_SHARE
from stepscope.records.collectives import NO_DESCRIPTION, group_name
from stepscope.records.hang import Frame

__all__ = [
    "ONE_SIDED",
    "Divergence",
    "Group",
    "difference",
    "find_divergence",
    "groups_of",
    "meaning",
    "usually_follows",
    "world_of",
]


# -- progress by group ------------------------------------------------------------------------------------------------

NOBODY: tuple[int, ...] = ()
DEFAULT = "default_pg"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far one rank came in one group."""

    dump: Dump
    trace: Trace
    enqueued: int | None
    """The last sequence number that it called; 0: none; None: unknown."""
    pending: tuple[int, ...]
    """Sequence numbers of calls that have not ended on this rank."""
    failed: bool = False
    """Whether the last one counts as pending only because the rank failed: gloo retires calls that it gave up."""

    @property
    def oldest(self) -> int | None:
        return self.pending[0] if self.pending else None

    @property
    def completed(self) -> int | None:
        """The last call that ended together with all calls before it."""
        if self.oldest is not None:
            return self.oldest - 1
        return self.enqueued

    @property
    def started(self) -> int | None:
        """The last call that is known to have started."""
        latest = zip(reversed(self.trace.sequences), reversed(self.trace.states), strict=True)
        return next((number for number, state in latest if state), self.completed)

    def place(self, sequence: int) -> int | None:
        """Index of that sequence number in the columns."""
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
        """Whether the rank surely has not called it; in a dump of active entries, only for calls pending on a peer."""
        if self.enqueued is None:
            return self.dump.active_only and sequence not in self.pending
        return self.enqueued < sequence

    def has_ended(self, sequence: int) -> bool:
        """Whether the rank called it and saw its end."""
        state = self.state(sequence)
        if state is not None:
            return state == DONE
        return self.enqueued is not None and sequence <= self.enqueued and sequence not in self.pending


@dataclass(frozen=True, kw_only=True)
class Group:
    key: GroupKey
    members: tuple[int, ...]
    """Global ranks, in the group's order if that is known."""
    ordered: bool
    """Whether the order is known: sends and recvs identify ranks by their position in the group."""
    progress: Mapping[int, Progress] = field(default_factory=dict)
    """Progress of the members that have a dump."""

    @property
    def name(self) -> str:
        return group_name(*self.key) or "the group"

    @property
    def waiting(self) -> dict[int, int]:
        """Ranks with a pending call, and the oldest one of each."""
        return {rank: found.oldest for rank, found in self.progress.items() if found.oldest is not None}

    def first_called_ns(self, sequence: int) -> int:
        """When any rank first called it; 0: not known."""
        times = [
            progress.trace.created_ns[at]
            for progress in self.progress.values()
            if (at := progress.place(sequence)) is not None and progress.trace.created_ns[at] > 0
        ]
        return min(times, default=0)

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Members that are known not to have called it."""
        return tuple(
            rank for rank in self.members if rank in self.progress and self.progress[rank].has_not_called(sequence)
        )


def world_of(dumps: Sequence[Dump], world: int | None, others: Iterable[int] = ()) -> tuple[int, ...]:
    """All ranks that exist as far as known: ranks have no gaps, so all up to the highest one mentioned."""
    ranks = {dump.rank for dump in dumps} | set(others) | set(range(world or 0))
    for dump in dumps:
        ranks.update(dump.world_hint)
        for members in dump.members.values():
            ranks.update(members)
    return tuple(range(max(ranks, default=-1) + 1))


def groups_of(
    dumps: Sequence[Dump], world: tuple[int, ...], failed: Collection[int] = frozenset()
) -> tuple[Group, ...]:
    """Every group of any rank, with the progress of its members; ``failed`` ranks gave up their last call."""
    seen: dict[tuple[GroupKey, tuple[int, ...]], list[Dump]] = {}
    for dump in dumps:
        for key in dump.groups:
            listed = dump.members.get(key, NOBODY)
            seen.setdefault((key, listed if dump.rank in listed else NOBODY), []).append(dump)
    inferred = _members({key: ds for (key, listed), ds in seen.items() if not listed}, world)
    groups = []
    for (key, listed), theirs in seen.items():
        mixed = any(dump.groups[key].mixed for dump in theirs)
        groups.append(
            Group(
                key=key,
                members=listed or inferred[key],
                ordered=bool(listed) or inferred[key] == world,
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
    """Whether this group has the rank's last call, made by gloo."""
    latest = max((other.created_ns[-1] for other in dump.groups.values() if other.created_ns), default=0)
    return trace.created_ns[-1] == latest and dump.operations[trace.operations[-1]].backend in ("gloo", "")


def _with_absent(group: Group, dumps: Mapping[int, Dump]) -> Group:
    """Add members whose dump does not mention the group: they called nothing in it, if the dump is complete."""
    absent = {
        rank: _progress(dumps[rank], Trace(), mixed=False, failed=False)
        for rank in group.members
        if rank not in group.progress and rank in dumps
    }
    if not absent:
        return group
    return Group(key=group.key, members=group.members, ordered=group.ordered, progress={**group.progress, **absent})


def _members(groups: Mapping[GroupKey, list[Dump]], world: tuple[int, ...]) -> dict[GroupKey, tuple[int, ...]]:
    """Members of groups for which no dump lists them (gloo): the ranks that show the group, and those inferred.

    The default group has all ranks. Groups with the same description belong to one dimension of a mesh: they are
    disjoint, equally large and together cover all ranks. If one group lacks exactly the ranks that are in no group,
    they belong to it.
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


# -- divergence -------------------------------------------------------------------------------------------------------
# Whether ranks mean the same collective, and where they first did not.
#
# Two things are compared at each sequence number of a group: the request (operation, amount, type) and the call site. A
# different call site alone is not a fault: rank 0 may broadcast from another line than the one where the others
# receive. Such a pair of lines recurs, always the same two. A rank that diverged pairs the others' lines with lines
# that belong to other calls.

ONE_SIDED = ("gather", "scatter")
"""Operations of which only the root shows both inputs and outputs."""
UNEVEN = ("all_to_all", "barrier")
"""Operations whose sizes differ by design, or have none."""
_Row = tuple[tuple[int, tuple[int, int]], ...]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where some ranks diverged from the others."""

    sequence: int
    ranks: tuple[int, ...]
    """The ranks that diverged; empty if it is unclear which side did."""
    sides: tuple[tuple[int, ...], ...]
    """All ranks that show this number, grouped by what they did, the largest side first."""
    differs: str
    """``operation``, ``dtype``, ``size`` or ``call site``."""


def meaning(operation: Operation) -> Hashable:
    """What ranks must agree on: equal for all participants of a collective."""
    if operation.name in UNEVEN:
        return (operation.name, None, None)
    first, second = operation.input_sizes, operation.output_sizes
    if operation.name in ("all_gather", "scatter"):
        first, second = second, first
    sizes = first or ((),) if operation.name in ONE_SIDED else first or second
    return (operation.name, operation.dtypes[:1], sum(math.prod(size) for size in sizes))


def difference(first: Operation, second: Operation) -> str:
    """What differs between two operations; empty if they are the same collective."""
    if meaning(first) == meaning(second):
        return ""
    if first.name != second.name:
        return "operation"
    return "dtype" if first.dtypes[:1] != second.dtypes[:1] else "size"


def group_alike(ranks: Iterable[int], key: Callable[[int], Hashable]) -> tuple[tuple[int, ...], ...]:
    """Group equal ranks; the largest side first."""
    sides: dict[Hashable, list[int]] = {}
    for rank in ranks:
        sides.setdefault(key(rank), []).append(rank)
    return tuple(tuple(side) for side in sorted(sides.values(), key=lambda side: (-len(side), side)))


def find_divergence(group: Group, until: int, *, stuck: bool = False) -> Divergence | None:
    """The first number from which, up to ``until``, some ranks are on another path than the rest; None: no divergence.

    ``stuck``: devices hang in a call that all ranks made. Then a call that differed but ended counts as well: NCCL does
    not compare calls, and leftover data of that call may block a device a hundred calls later.
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
    # On NCCL the host is ahead of its device: calls made after a pending one are no evidence yet.
    ended = all(oldest > last for oldest in group.waiting.values())
    if differs != "call site" and ended and not stuck and lines.agreed_since(last):
        return None  # unlike an extra call, this does not put them out of step
    return Divergence(sequence=first, ranks=tuple(sorted(left)), sides=sides, differs=differs)


def usually_follows(group: Group, rank: int, other: int, number: int) -> bool | None:
    """Whether ``rank``'s call there always followed the call that ``other`` made; None: it never did."""
    own = group.progress[rank]
    missed, instead = _call_at(group.progress[other], number), _call_at(own, number)
    if missed is None or instead is None:
        return None
    before = [earlier for earlier in own.trace.sequences if earlier < number]
    followed = {_call_at(own, earlier + 1) for earlier in before[:-1] if _call_at(own, earlier) == missed}
    return instead in followed if followed else None


def _call_at(progress: Progress, number: int) -> tuple[Hashable, tuple[Frame, ...]] | None:
    operation = progress.operation(number)
    return None if operation is None else (meaning(operation), progress.site(number))


class _Lines:
    """The collectives of a group as comparable numbers; ranks with equal rows are stored once."""

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
        """By the first rank that has the row: operation and call site (-1: unknown), by sequence number."""
        self._numbers = sorted({number for row in self._rows.values() for number in row})
        self._strong: set[int] = set()
        self._weak: set[int] = set()
        self._find_divergent()

    def last_strong(self) -> int | None:
        return max(self._strong, default=None)

    def sides(self, number: int) -> tuple[tuple[int, ...], ...]:
        have = [rank for rank, row in self._rows.items() if number in row]
        alike = group_alike(have, lambda rank: self._rows[rank][number])
        whole = [tuple(sorted(rank for first in side for rank in self._ranks[first])) for side in alike]
        return tuple(sorted(whole, key=lambda side: (-len(side), side)))

    def agreed_since(self, last: int) -> bool:
        return any(n > last for n in self._common())

    def first(self, left: frozenset[int], last: int) -> int:
        """The first number from which those ranks mostly differ from all others."""
        marked = self._strong | self._weak
        apart = [n for n in self._numbers if n <= last and n in marked and self._apart(left, n)]
        common = [n for n in self._common() if n <= last]
        for place, number in enumerate(apart):
            if len(apart) - place >= DIVERGED_SHARE * (len(common) - bisect_left(common, number)):
                return number
        return last

    def unexpected(self, sides: Sequence[tuple[int, ...]], number: int) -> frozenset[int]:
        """Of equally large sides, those that did not make the expected call; empty if that decides nothing."""
        before = [n for n in self._numbers if n < number]
        rows = [next(self._rows[rank] for rank in side if rank in self._rows) for side in sides]
        as_usual = [side for side, row in zip(sides, rows, strict=True) if row[number] == _expected(row, before)]
        if len(as_usual) != 1:
            return frozenset()
        return frozenset(rank for side in sides if side is not as_usual[0] for rank in side)

    def difference(self, sides: Sequence[tuple[int, ...]], number: int) -> str:
        operations = [self._group.progress[side[0]].operation(number) for side in sides]
        known = [operation for operation in operations if operation is not None]
        return next((word for other in known[1:] if (word := difference(known[0], other))), "call site")

    def _find_divergent(self) -> None:
        """Find numbers at which ranks surely differ, and those at which only new pairs of lines differ."""
        theirs: dict[int, dict[int, int]] = {rank: {} for rank in self._rows}
        """By rank: its line for each line of the others, and …"""
        usuals: dict[int, dict[int, int]] = {rank: {} for rank in self._rows}
        """… the others' line for each of its lines, as first seen together."""
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
                # Whether either line was paired with another line of that rank before.
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
        """Whether none of the ranks that diverged agrees with any other rank there."""
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
    """What followed the last time the same calls preceded, on that rank."""
    past = [row[number] for number in before if number in row]
    for length in range(min(CONTEXT_CALLS, len(past) - 1), 0, -1):
        for place in range(len(past) - 1, length - 1, -1):
            if past[place - length : place] == past[-length:]:
                return past[place]
    return None
