"""The wait-for graph of a job's dumps, the verdict, and everything that a report shows with it. Pure.

The graph says which ranks wait for which, which diverged, and whose device lags.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stepscope.flight.alignment import (
    ONE_SIDED,
    Divergence,
    Group,
    difference,
    find_divergence,
    groups_of,
    meaning,
    world_of,
)
from stepscope.flight.dump import DONE, HOST_BACKENDS, STARTED, Dump, Operation, with_same_groups
from stepscope.flight.stacks import FailureText, RankLog, failure_in, main_thread, user_frame
from stepscope.flight.wording import frame_text, parting_frame
from stepscope.records.hang import Frame, HangKind, StackGroup, ThreadStack, WaitingIn

__all__ = [
    "Accused",
    "Case",
    "Edge",
    "Place",
    "Side",
    "Verdict",
    "build_case",
    "cycle_in",
    "ends_of",
    "grid_of",
    "group_rows",
    "missing_rows",
    "place_of",
    "reaching",
    "split_at",
    "split_of",
    "waits_for",
    "waits_of",
]

# -- graph ------------------------------------------------------------------------------------------------------------
# The graph over all groups, its ends and its cycles.
#
# In each group, a rank waits in its oldest pending collective, for every member that has not called it. A rank that
# others wait for and that waits for none blocks the job. If there is no such rank, they wait for each other.


@dataclass(frozen=True, kw_only=True)
class Edge:
    waiter: int
    waited: int
    group: Group
    sequence: int
    operation: Operation | None
    certain: bool = True
    """False: the other rank has no dump, so there is no proof that it did not come."""


def collective_edges(group: Group, dumped: Iterable[int]) -> list[Edge]:
    """Edges of one group from its collectives."""
    have = set(dumped)
    edges = []
    for rank, sequence in group.waiting.items():
        operation = group.progress[rank].operation(sequence)
        late = set(group.missing(sequence))
        edges += [
            Edge(
                waiter=rank,
                waited=other,
                group=group,
                sequence=sequence,
                operation=operation,
                certain=other in have,
            )
            for other in group.members
            if other in late or other not in have
        ]
    return edges


def p2p_edges(group: Group, dumped: Iterable[int]) -> list[Edge]:
    """Edges of one group from sends and recvs: an unmatched call waits for the rank that owes its counterpart.

    Their numbers mean nothing on the other side, and ended calls are not in the dump. But sends to a rank and its recvs
    pair up in order, so the surplus on one side has no partner yet.
    """
    if not group.ordered:
        return []
    have = set(dumped)
    pending: dict[tuple[int, int, bool], list[tuple[int, Operation]]] = {}
    for rank, progress in group.progress.items():
        for one in progress.trace.p2p:
            if max(one.source, one.target) < len(group.members):
                source, target = group.members[one.source], group.members[one.target]
                if rank == (source if one.sending else target):
                    pending.setdefault((source, target, one.sending), []).append((one.sequence, one.operation))
    edges = []
    for (source, target, sending), calls in pending.items():
        waiter, waited = (source, target) if sending else (target, source)
        matched = len(pending.get((source, target, not sending), ()))
        if len(calls) > matched:
            sequence, operation = calls[matched]
            edges.append(
                Edge(
                    waiter=waiter,
                    waited=waited,
                    group=group,
                    sequence=sequence,
                    operation=operation,
                    certain=waited in have,
                )
            )
    return edges


def ends_of(edges: Sequence[Edge]) -> tuple[int, ...]:
    """Ranks that others wait for and that wait for none."""
    waiters = {edge.waiter for edge in edges}
    return tuple(sorted({edge.waited for edge in edges} - waiters))


def waits_for(edges: Iterable[Edge], targets: Iterable[int]) -> dict[int, list[Edge]]:
    """The waits for each of these ranks."""
    found: dict[int, list[Edge]] = {rank: [] for rank in targets}
    for edge in edges:
        if edge.waited in found:
            found[edge.waited].append(edge)
    return found


def reaching(edges: Sequence[Edge], targets: Iterable[int]) -> set[int]:
    """All ranks that wait for one of these, directly or indirectly."""
    waiting_for: dict[int, set[int]] = {}
    for edge in edges:
        waiting_for.setdefault(edge.waited, set()).add(edge.waiter)
    found: set[int] = set()
    todo = list(targets)
    while todo:
        for waiter in waiting_for.get(todo.pop(), ()):
            if waiter not in found:
                found.add(waiter)
                todo.append(waiter)
    return found


def cycle_in(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """A shortest cycle through the lowest rank that is on any; empty without cycles."""
    onward: dict[int, list[Edge]] = {}
    for edge in edges:
        onward.setdefault(edge.waiter, []).append(edge)
    for start in sorted(onward):
        way = _way_back(onward, start)
        if way:
            return way
    return ()


def _way_back(onward: Mapping[int, Sequence[Edge]], start: int) -> tuple[Edge, ...]:
    came: dict[int, Edge] = {}
    level = [start]
    while level:
        following = []
        for rank in level:
            for edge in onward.get(rank, ()):
                if edge.waited == start:
                    return _unwound(came, edge, start)
                if edge.waited not in came:
                    came[edge.waited] = edge
                    following.append(edge.waited)
        level = following
    return ()


def _unwound(came: Mapping[int, Edge], last: Edge, start: int) -> tuple[Edge, ...]:
    way = [last]
    while way[-1].waiter != start:
        way.append(came[way[-1].waiter])
    return tuple(reversed(way))


# -- case -------------------------------------------------------------------------------------------------------------

NOT_SYMMETRIC = ("broadcast", "reduce", *ONE_SIDED)
"""Operations that may end on one rank before another has called them."""
INPUT = ("torch/utils/data/", "torchdata/", "webdataset/", "/datasets/", "nvidia/dali")
DISTRIBUTED = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
P2P_CALLS = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a rank's main thread is doing, from its stack."""

    doing: str
    """``p2p``, ``collective``, ``input`` or ``other``."""
    call: str = ""
    """For the first two: the function of torch.distributed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    dumps: Mapping[int, Dump]
    world: tuple[int, ...]
    groups: tuple[Group, ...]
    stacks: Mapping[int, tuple[ThreadStack, ...]]
    failures: Mapping[int, FailureText]
    unreadable: frozenset[int]
    departures: tuple[tuple[Group, Divergence], ...]
    lagging: Mapping[int, tuple[Group, int]]
    """Ranks whose device has not ended what a peer's has, with an example."""
    edges: tuple[Edge, ...]

    @property
    def dumpless(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.world if rank not in self.dumps)

    @property
    def waiting(self) -> set[int]:
        """Ranks with a pending call."""
        own = {rank for group in self.groups for rank, one in group.progress.items() if one.pending and not one.failed}
        return own | {r for group in self.groups for r, one in group.progress.items() if one.trace.p2p}


def build_case(
    dumps: Sequence[Dump],
    *,
    stacks: Mapping[int, tuple[ThreadStack, ...]],
    errors: Mapping[int, str],
    world: int | None,
    unreadable: Collection[int],
) -> Case:
    failures = {rank: failure for rank, text in errors.items() if (failure := failure_in(text)) is not None}
    dumps = with_same_groups(dumps)
    ranks = world_of(dumps, world, (*unreadable, *failures))
    groups = groups_of(dumps, ranks, failed=failures.keys())
    have = [dump.rank for dump in dumps]
    edges = [edge for group in groups for edge in (*collective_edges(group, have), *p2p_edges(group, have))]
    departures = tuple(
        (group, left) for group in groups if (left := _left(group)) is not None and _explains(group, left, edges)
    )
    for group, left in departures:
        edges = _past(edges, group, left)
    # A device that waits for data of a call that its peer made differently has not stopped.
    unlike = [group.key for group, left in departures if left.differs != "call site"]
    lagging = _lagging([group for group in groups if group.key not in unlike])
    return Case(
        dumps={dump.rank: dump for dump in dumps},
        world=ranks,
        groups=groups,
        stacks=stacks,
        failures=failures,
        unreadable=frozenset(unreadable),
        departures=departures,
        lagging=lagging,
        edges=tuple(edge for edge in edges if edge.waiter not in lagging),
    )


def place_of(threads: Sequence[ThreadStack]) -> Place | None:
    """From the main thread, innermost frame first: what torch does for it, or that it is in its own code."""
    main = next((thread for thread in threads if thread.main), None)
    if main is None or not main.frames:
        return None
    call = _distributed_call(main.frames)
    if call:
        return Place(doing="p2p" if call in P2P_CALLS else "collective", call=call)
    reading = any(part in frame.file for frame in main.frames for part in INPUT)
    return Place(doing="input" if reading else "other")


def _distributed_call(frames: Sequence[Frame]) -> str:
    """The function of torch.distributed that the rank is in, from the innermost frames, skipping wrappers."""
    for frame in frames[:4]:
        if frame.file.endswith(DISTRIBUTED):
            return frame.function
        if "torch/" not in frame.file and "<" not in frame.file:
            return ""
    return ""


def _left(group: Group) -> Divergence | None:
    """Where a rank diverged, for a group with pending calls."""
    waiting = group.waiting
    return find_divergence(group, max(waiting.values()), stuck=_stuck_inside(group)) if waiting else None


def _explains(group: Group, left: Divergence, edges: Sequence[Edge]) -> bool:
    """Whether the divergence explains why the group hangs.

    Ranks that request different things at the same number cannot continue, or not for long (NCCL). Ranks that request
    the same from different lines did continue, out of step, until one side ran out of calls: then the ranks that
    diverged wait for all others, or all others for them.
    """
    waiting = group.waiting
    if any(_disagree(group, left.sides, number) for number in set(waiting.values())):
        return True
    if left.differs != "call site" and _stuck_inside(group):
        return True
    if not left.ranks:
        return False
    waiters = {edge.waiter for edge in edges if edge.group is group}
    waited = {edge.waited for edge in edges if edge.group is group}
    return set(left.ranks) in (waiters, waited)


def _stuck_inside(group: Group) -> bool:
    """Whether all ranks called the oldest pending collective and devices have started it: they wait inside NCCL."""
    waiting = group.waiting
    if not waiting or any(rank not in group.progress for rank in group.members):
        return False
    first = min(waiting.values())
    waiters = [rank for rank, number in waiting.items() if number == first]
    operation = group.progress[waiters[0]].operation(first)
    if operation is None or operation.backend in HOST_BACKENDS or group.missing(first):
        return False
    return all(group.progress[rank].state(first) == STARTED for rank in waiters) or bool(_late(group, first))


def _disagree(group: Group, sides: Sequence[Sequence[int]], number: int) -> bool:
    operations = [group.progress[side[0]].operation(number) for side in sides]
    told = [operation for operation in operations if operation is not None]
    return any(difference(told[0], other) for other in told[1:])


def _past(edges: Sequence[Edge], group: Group, left: Divergence) -> list[Edge]:
    """Edges without the waits of the ranks that diverged, and with the other ranks waiting for those."""
    kept = [edge for edge in edges if edge.waiter not in left.ranks]
    waiting = group.waiting
    others = [rank for rank in waiting if rank not in left.ranks]
    return kept + [
        Edge(
            waiter=rank,
            waited=other,
            group=group,
            sequence=waiting[rank],
            operation=group.progress[rank].operation(waiting[rank]),
        )
        for rank in others
        for other in left.ranks
    ]


def _lagging(groups: Sequence[Group]) -> dict[int, tuple[Group, int]]:
    """Ranks that wait for the end of a collective that has ended on a peer, though it needs all ranks."""
    found: dict[int, tuple[Group, int]] = {}
    for group in groups:
        ended = max((one.completed or 0 for one in group.progress.values()), default=0)
        for sequence in {number for number in group.waiting.values() if number <= ended}:
            if _alike(group, sequence):
                found |= {rank: (group, sequence) for rank in _late(group, sequence) if rank not in found}
    return found


def _late(group: Group, sequence: int) -> list[int]:
    """Ranks that wait for the end of that collective although it has ended on a peer.

    Host backends do not count: gloo gives up a failed call and reports that as its end.
    """
    found = []
    ended = [rank for rank, one in group.progress.items() if one.has_ended(sequence)]
    for rank, number in group.waiting.items():
        operation = group.progress[rank].operation(sequence) if number == sequence else None
        if operation is None or operation.backend in HOST_BACKENDS:
            continue
        if operation.name.split("+")[0] not in NOT_SYMMETRIC and any(other != rank for other in ended):
            found.append(rank)
    return found


def _alike(group: Group, sequence: int) -> bool:
    """Whether all requested the same: NCCL ends a call with enough bytes, while another rank waits for the rest."""
    told = [one for progress in group.progress.values() if (one := progress.operation(sequence)) is not None]
    return not any(difference(told[0], other) for other in told[1:])


# -- verdict ----------------------------------------------------------------------------------------------------------

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Accused:
    rank: int
    reason: str
    """A sentence without its full stop and without the rank: ``has not called all_reduce 7``."""
    at: Frame | None = None
    """The line of user code where it is, from its stack or its last call."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Ranks that did the same at one sequence number."""

    ranks: tuple[int, ...]
    op: str | None
    """None: they made no call."""
    sizes: str = ""
    dtypes: str = ""
    at: Frame | None = None
    frames: tuple[Frame, ...] = ()
    """The call site, innermost first, cut to a useful length."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The first divergence of the ranks."""

    group: str
    description: str
    sequence: int
    differs: str
    """``operation``, ``size``, ``dtype``, ``call site`` or ``missing``."""
    ranks: tuple[int, ...]
    """The ranks that diverged; empty if it is unclear which side did."""
    call_sites: tuple[Side, ...]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Some ranks wait for others: edges of the wait-for graph with the same collective and the same ends."""

    waiters: tuple[int, ...]
    waited: tuple[int, ...]
    group: str
    description: str
    sequence: int
    op: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Ranks by sequence numbers for the group in question; ranks with equal rows are combined."""

    group: str
    description: str
    sequences: tuple[int, ...]
    rows: tuple[tuple[tuple[int, ...], str], ...]
    """Ranks and one mark per number: ``c`` completed, ``s`` started, ``w`` waiting, ``x`` waiting in another collective
    than the rest, ``d`` completed but another, ``m`` not called, ``-`` no longer in the ring, ``?`` no dump.
    """


@dataclass(frozen=True, kw_only=True)
class Verdict:
    healthy: bool
    kind: HangKind | None
    title: str
    """One sentence with its full stop."""
    culprits: tuple[Accused, ...] = ()
    victims: tuple[int, ...] = ()
    undecidable: bool = False
    suspects: tuple[int, ...] = ()
    """If undecidable: the candidates."""
    group: str | None = None
    description: str = ""
    sequence: int | None = None
    """Where it went wrong; ``waiting_in`` says where the victims wait."""
    waiting_in: WaitingIn | None = None
    first_divergence: Split | None = None
    wait_for: tuple[Wait, ...] = ()
    cycle: tuple[str, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    missing: tuple[dict[str, Any], ...] = ()
    """What each rank that did not come was doing."""
    grid: Grid | None = None
    stacks: tuple[StackGroup, ...] = ()
    evidence: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    """Ranks that have a dump."""
    world: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The document of ``--json``, the only source of every other form."""
        return {
            "schema": SCHEMA,
            "healthy": self.healthy,
            "kind": self.kind,
            "title": self.title,
            "culprits": [one.rank for one in self.culprits],
            "victims": list(self.victims),
            "undecidable": self.undecidable,
            "suspects": list(self.suspects),
            "group": self.group,
            "description": self.description,
            "sequence": self.sequence,
            "waiting_in": asdict(self.waiting_in) if self.waiting_in else None,
            "first_divergence": _plain(self.first_divergence) if self.first_divergence else None,
            "reasons": [_plain(one) for one in self.culprits],
            "wait_for": [_plain(one) for one in self.wait_for],
            "cycle": list(self.cycle),
            "groups": list(self.groups),
            "missing": list(self.missing),
            "grid": _plain(self.grid) if self.grid else None,
            "stacks": [_plain(one) for one in self.stacks],
            "evidence": list(self.evidence),
            "problems": list(self.problems),
            "ranks": list(self.ranks),
            "world": self.world,
        }


def _plain(record: Any) -> Any:
    return _listed(asdict(record))


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(one) for key, one in value.items()}
    return [_listed(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


# -- context of a verdict ---------------------------------------------------------------------------------------------
# The grid, the groups, the waits, the first divergence.

COLUMNS = 20
AHEAD = 5
"""Columns of the grid after the number in question."""
SITE_SHOWN = 12
ALL_GROUPS_SHOWN = 4096


def split_of(group: Group, left: Divergence) -> Split:
    sites = [group.progress[side[0]].site(left.sequence) for side in left.sides]
    return Split(
        group=group.key[0],
        description=group.key[1],
        sequence=left.sequence,
        differs=left.differs,
        ranks=left.ranks,
        call_sites=tuple(
            _side(group, side, left.sequence, against=sites[0 if place else -1])
            for place, side in enumerate(left.sides)
        ),
    )


def split_at(edge: Edge) -> Split:
    """The split at a collective that some ranks did not call."""
    group, sequence = edge.group, edge.sequence
    absent = tuple(r for r in group.members if r not in group.progress) + group.missing(sequence)
    present = tuple(rank for rank, one in group.progress.items() if one.place(sequence) is not None)
    sides = [_side(group, present, sequence)] if present else []
    return Split(
        group=group.key[0],
        description=group.key[1],
        sequence=sequence,
        differs="missing",
        ranks=tuple(sorted(absent)),
        call_sites=(*sides, Side(ranks=tuple(sorted(absent)), op=None)),
    )


def waits_of(edges: Sequence[Edge]) -> tuple[Wait, ...]:
    """Combine edges with the same collective: first by waiting rank, then by the ranks that they wait for."""
    waited: dict[tuple[int, int, int], tuple[Edge, list[int]]] = {}
    for edge in edges:
        waited.setdefault((edge.waiter, id(edge.group), edge.sequence), (edge, []))[1].append(edge.waited)
    together: dict[tuple[int, int, tuple[int, ...]], tuple[Edge, list[int]]] = {}
    for edge, others in waited.values():
        key = (id(edge.group), edge.sequence, tuple(sorted(others)))
        together.setdefault(key, (edge, []))[1].append(edge.waiter)
    return tuple(
        Wait(
            waiters=tuple(sorted(waiters)),
            waited=others,
            group=edge.group.key[0],
            description=edge.group.key[1],
            sequence=edge.sequence,
            op=edge.operation.name if edge.operation else "",
        )
        for (_, _, others), (edge, waiters) in together.items()
    )


def group_rows(groups: Sequence[Group]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "name": group.key[0],
            "description": group.key[1],
            "members": list(group.members),
            "ranks": {
                str(rank): {"enqueued": one.enqueued, "started": one.started, "completed": one.completed}
                for rank, one in sorted(group.progress.items())
            },
        }
        for group in groups[:ALL_GROUPS_SHOWN]
    )


def missing_rows(case: Case, found: Verdict, logs: Mapping[int, RankLog]) -> tuple[dict[str, Any], ...]:
    """What the missing ranks were doing, from their stacks and logs."""
    waited = {edge.waited for edge in case.edges} | {one.rank for one in found.culprits} | set(found.suspects)
    return tuple(_doing(case, rank, logs.get(rank)) for rank in sorted(waited))


def grid_of(group: Group, found: Verdict, case: Case) -> Grid:
    """The last numbers up to the one in question, and a few after it."""
    called = [one.enqueued for one in group.progress.values() if one.enqueued]
    stuck = max(found.sequence or 0, found.waiting_in.sequence or 0) if found.waiting_in else found.sequence or 0
    last = max(min(max(called, default=stuck), stuck + AHEAD), stuck)
    first = max(1, min(last - COLUMNS + 1, found.sequence or last))
    numbers = tuple(range(first, last + 1)[-COLUMNS:])
    usual = {number: _usual(group, number) for number in numbers}
    rows: dict[str, list[int]] = {}
    for rank in group.members:
        rows.setdefault("".join(_mark(group, rank, number, usual[number]) for number in numbers), []).append(rank)
    return Grid(
        group=group.key[0],
        description=group.key[1],
        sequences=numbers,
        rows=tuple((tuple(ranks), marks) for marks, ranks in sorted(rows.items(), key=lambda row: row[1])),
    )


def _usual(group: Group, number: int) -> object:
    seen: dict[object, int] = {}
    for one in group.progress.values():
        operation = one.operation(number)
        if operation is not None:
            key = (meaning(operation), one.site(number))
            seen[key] = seen.get(key, 0) + 1
    return max(seen, key=lambda key: seen[key]) if seen else None


def _mark(group: Group, rank: int, number: int, usual: object) -> str:
    one = group.progress.get(rank)
    if one is None:
        return "?"
    operation = one.operation(number)
    if operation is None:
        if number > (one.enqueued if one.enqueued is not None else number):
            return "m"
        return "c" if one.dump.active_only and one.has_ended(number) else "-"
    other = (meaning(operation), one.site(number)) != usual
    if one.state(number) == DONE and number not in one.pending:
        return "d" if other else "c"
    if other:
        return "x"
    return "s" if one.state(number) == STARTED else "w"


def _side(group: Group, ranks: Sequence[int], sequence: int, *, against: Sequence[Frame] = ()) -> Side:
    progress = group.progress[ranks[0]]
    operation: Operation | None = progress.operation(sequence)
    site = progress.site(sequence)
    sizes = (operation.input_sizes or operation.output_sizes) if operation else ()
    return Side(
        ranks=tuple(sorted(ranks)),
        op=operation.name if operation else None,
        sizes=" ".join(str(list(size)) for size in sizes[:4]),
        dtypes=" ".join(operation.dtypes[:4]) if operation else "",
        at=parting_frame(site, against),
        frames=site[:SITE_SHOWN],
    )


def _doing(case: Case, rank: int, log: RankLog | None) -> dict[str, Any]:
    threads = case.stacks.get(rank, ())
    place = place_of(threads)
    at: Frame | None = user_frame(threads)
    main = main_thread(threads)
    inner = frame_text(main.frames[0]) if main and main.frames else ""
    return {
        "rank": rank,
        "dump": rank in case.dumps,
        "doing": place.doing if place else None,
        "call": place.call if place else "",
        "at": {"file": at.file, "line": at.line, "function": at.function} if at else None,
        "innermost": inner,
        "step": log.step if log else None,
        "inside": list(log.inside) if log else [],
        "caller": log.caller if log else "",
        "error": _error(case, rank, log),
    }


def _error(case: Case, rank: int, log: RankLog | None) -> str:
    failure = case.failures.get(rank)
    if failure is not None and failure.own:
        return f"{failure.type}: {failure.message}"
    return log.error if log else ""
