"""The dumps of all ranks laid beside each other: per group, by sequence number.  Pure.

Neither record ids nor the order of entries or files mean anything across ranks; the sequence number of a group does.  A
ring that went round has forgotten what is old, and how far back it reaches differs from rank to rank: what a rank does
not show is *not called* only where it is newer than the last it called.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.flight.entries import DONE, Dump, GroupKey, Operation, Trace
from stepscope.records.collectives import NO_DESCRIPTION, group_name
from stepscope.records.hang import Frame

__all__ = ["Group", "Progress", "groups_of", "world_of"]

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
