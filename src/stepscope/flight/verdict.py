"""The verdict on a job's dumps, and everything that a report shows with it, as one document. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stepscope.flight.alignment import Divergence, Group, meaning
from stepscope.flight.dump import DONE, STARTED, Operation
from stepscope.flight.stacks import RankLog, main_thread, user_frame
from stepscope.flight.wait_graph import Case, Edge, place_of
from stepscope.flight.wording import frame_text, parting_frame
from stepscope.records.finding import Frame, HangKind, StackGroup, WaitingIn

__all__ = ["Accused", "Side", "Verdict", "grid_of", "group_rows", "missing_rows", "split_at", "split_of", "waits_of"]


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
