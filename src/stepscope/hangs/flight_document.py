"""The document of ``stepscope flight --json``: a verdict with what the Flight Recorders show about it. Pure.

It is the only source of the text and the page about dumps, and part of the record of a live hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stepscope.flight.dump import DONE, STARTED
from stepscope.flight.stacks import RankLog, group_stacks, main_thread, user_frame
from stepscope.flight.wording import frame_text, parting_frame, ranks_text
from stepscope.hangs.alignment import Divergence, Group, meaning
from stepscope.hangs.case import Case, Verdict
from stepscope.hangs.excuses import NotAHang
from stepscope.hangs.wait_graph import Wait, is_p2p
from stepscope.records.hang import Frame

__all__ = ["flight_document"]

SCHEMA = 1
COLUMNS = 20
AHEAD = 5
"""Columns of the grid after the number in question."""
SITE_SHOWN = 12
ALL_GROUPS_SHOWN = 4096
SIZES_SHOWN = 4

NO_LOGS: Mapping[int, RankLog] = {}


def flight_document(
    case: Case, answer: Verdict | NotAHang, *, logs: Mapping[int, RankLog] = NO_LOGS, problems: Sequence[str] = ()
) -> dict[str, Any]:
    recorded = case.recorded
    dumpless = [rank for rank in recorded.world if rank not in recorded.dumps] if recorded.dumps else []
    lost = [f"There is no dump of {ranks_text(dumpless)}."] if dumpless else []
    about = _healthy(answer) if isinstance(answer, NotAHang) else _about(case, answer, logs)
    return {
        "schema": SCHEMA,
        **about,
        "groups": _groups(recorded.groups),
        "problems": [*problems, *lost],
        "ranks": sorted(recorded.dumps),
        "world": len(recorded.world),
    }


def _healthy(excuse: NotAHang) -> dict[str, Any]:
    nothing = ("culprits", "victims", "suspects", "reasons", "wait_for", "cycle", "missing", "stacks")
    return {
        "healthy": True,
        "kind": None,
        "title": excuse.reason,
        "undecidable": False,
        **dict.fromkeys(("group", "sequence", "waiting_in", "first_divergence", "grid")),
        "description": "",
        **{key: [] for key in nothing},
        "evidence": list(excuse.evidence),
    }


def _about(case: Case, verdict: Verdict, logs: Mapping[int, RankLog]) -> dict[str, Any]:
    ranks = [culprit.rank for culprit in verdict.culprits]
    suspects = sorted(verdict.suspects or ranks) if verdict.undecidable else []
    culprits = [] if verdict.undecidable else list(verdict.culprits)
    wait = case.recorded.graph.most_telling(ranks or suspects)
    group, sequence, split = _place(verdict, wait)
    waiting = _plain(asdict(verdict.collective)) if verdict.collective is not None else None
    numbers = [number for number in (sequence, waiting["sequence"] if waiting else None) if number is not None]
    return {
        "healthy": False,
        "kind": verdict.kind,
        "title": verdict.title,
        "culprits": [culprit.rank for culprit in culprits],
        "victims": [rank for rank in verdict.victims if rank not in suspects],
        "undecidable": verdict.undecidable,
        "suspects": suspects,
        "group": group.key[0] if group is not None else None,
        "description": group.key[1] if group is not None else "",
        "sequence": sequence,
        "waiting_in": waiting,
        "first_divergence": _plain(split),
        "reasons": [_plain(asdict(culprit)) for culprit in culprits],
        "wait_for": [_wait_row(wait) for wait in case.recorded.graph.waits],
        "cycle": list(verdict.cycle),
        "missing": [
            _missing(case, rank, logs.get(rank)) for rank in sorted({*case.recorded.graph.missing, *ranks, *suspects})
        ],
        "grid": _plain(_grid(group, sequence or 0, max(numbers, default=0))) if group is not None else None,
        "stacks": [_plain(asdict(stacks)) for stacks in group_stacks(_stacks(case))],
        "evidence": list(verdict.evidence),
    }


def _plain(value: Any) -> Any:
    """Tuples as lists, as in JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _stacks(case: Case) -> dict[int, Any]:
    return {number: rank.threads for number, rank in case.ranks.items() if rank.threads}


def _wait_row(wait: Wait) -> dict[str, Any]:
    return {
        "waiters": list(wait.waiters),
        "waited": list(wait.missing),
        "group": wait.call.group,
        "description": wait.call.description,
        "sequence": wait.call.sequence,
        "op": wait.call.op,
    }


def _groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [
        {
            "name": group.key[0],
            "description": group.key[1],
            "members": list(group.members),
            "ranks": {
                str(rank): {
                    "enqueued": progress.enqueued,
                    "started": progress.started,
                    "completed": progress.completed,
                }
                for rank, progress in sorted(group.progress.items())
            },
        }
        for group in groups[:ALL_GROUPS_SHOWN]
    ]


# -- first divergence -------------------------------------------------------------------------------------------------


def _place(verdict: Verdict, wait: Wait | None) -> tuple[Group | None, int | None, dict[str, Any] | None]:
    """Where it went wrong: the group, the number of the call, and how the ranks differ there."""
    if verdict.divergence is not None:
        group, left = verdict.divergence
        return group, left.sequence, _diverged(group, left)
    if verdict.place is not None:
        return *verdict.place, None
    if wait is None or wait.group is None:
        return None, None, None
    split = None if is_p2p(wait.call) else _not_called(wait.group, wait.call.sequence or 0)
    return wait.group, wait.call.sequence, split


def _diverged(group: Group, left: Divergence) -> dict[str, Any]:
    sites = [group.progress[side[0]].site(left.sequence) for side in left.sides]
    return _split(
        group,
        left.sequence,
        left.differs,
        left.ranks,
        [_side(group, side, left.sequence, against=sites[0 if at else -1]) for at, side in enumerate(left.sides)],
    )


def _not_called(group: Group, sequence: int) -> dict[str, Any]:
    """The split at a collective that some ranks did not call."""
    absent = sorted({*(rank for rank in group.members if rank not in group.progress), *group.missing(sequence)})
    present = [rank for rank, progress in group.progress.items() if progress.place(sequence) is not None]
    nothing = {"ranks": absent, "op": None, "sizes": "", "dtypes": "", "at": None, "frames": []}
    sides = [_side(group, present, sequence)] if present else []
    return _split(group, sequence, "missing", absent, [*sides, nothing])


def _split(
    group: Group, sequence: int, differs: str, ranks: Sequence[int], sides: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """``differs``: ``operation``, ``size``, ``dtype``, ``call site`` or ``missing``; sides: ranks that did the same."""
    name, description = group.key
    return {
        "group": name,
        "description": description,
        "sequence": sequence,
        "differs": differs,
        "ranks": ranks,
        "call_sites": sides,
    }


def _side(group: Group, ranks: Sequence[int], sequence: int, *, against: Sequence[Frame] = ()) -> dict[str, Any]:
    progress = group.progress[ranks[0]]
    operation = progress.operation(sequence)
    site = progress.site(sequence)
    sizes = (operation.input_sizes or operation.output_sizes) if operation else ()
    at = parting_frame(site, against)
    return {
        "ranks": sorted(ranks),
        "op": operation.name if operation else None,
        "sizes": " ".join(str(list(size)) for size in sizes[:SIZES_SHOWN]),
        "dtypes": " ".join(operation.dtypes[:SIZES_SHOWN]) if operation else "",
        "at": asdict(at) if at is not None else None,
        "frames": [asdict(frame) for frame in site[:SITE_SHOWN]],
    }


# -- grid -------------------------------------------------------------------------------------------------------------


def _grid(group: Group, sequence: int, stuck: int) -> dict[str, Any]:
    """The last numbers up to the one in question, and a few after it; a row of marks for ranks that are alike.

    ``c`` ended, ``s`` started, ``w`` waiting, ``x`` waiting in another call, ``d`` another call that ended, ``m`` not
    called, ``-`` no longer in the ring, ``?`` no dump.
    """
    called = [progress.enqueued for progress in group.progress.values() if progress.enqueued]
    last = max(min(max(called, default=stuck), stuck + AHEAD), stuck)
    first = max(1, min(last - COLUMNS + 1, sequence or last))
    numbers = tuple(range(first, last + 1)[-COLUMNS:])
    usual = {number: _usual(group, number) for number in numbers}
    rows: dict[str, list[int]] = {}
    for rank in group.members:
        rows.setdefault("".join(_mark(group, rank, number, usual[number]) for number in numbers), []).append(rank)
    return {
        "group": group.key[0],
        "description": group.key[1],
        "sequences": numbers,
        "rows": tuple((tuple(ranks), marks) for marks, ranks in sorted(rows.items(), key=lambda row: row[1])),
    }


def _usual(group: Group, number: int) -> object:
    seen: dict[object, int] = {}
    for progress in group.progress.values():
        operation = progress.operation(number)
        if operation is not None:
            key = (meaning(operation), progress.site(number))
            seen[key] = seen.get(key, 0) + 1
    return max(seen, key=lambda key: seen[key]) if seen else None


def _mark(group: Group, rank: int, number: int, usual: object) -> str:
    progress = group.progress.get(rank)
    if progress is None:
        return "?"
    operation = progress.operation(number)
    if operation is None:
        if number > (progress.enqueued if progress.enqueued is not None else number):
            return "m"
        return "c" if progress.dump.active_only and progress.has_ended(number) else "-"
    other = (meaning(operation), progress.site(number)) != usual
    if progress.state(number) == DONE and number not in progress.pending:
        return "d" if other else "c"
    if other:
        return "x"
    return "s" if progress.state(number) == STARTED else "w"


# -- ranks that did not come ------------------------------------------------------------------------------------------


def _missing(case: Case, rank: int, log: RankLog | None) -> dict[str, Any]:
    """What a rank was doing, from its stack and its log."""
    threads = case.ranks[rank].threads if rank in case.ranks else ()
    doing = case.doings.get(rank)
    main = main_thread(threads)
    at = user_frame(threads)
    call = doing.waiting_in if doing is not None and main is not None else None
    failure = case.recorded.failures.get(rank)
    error = f"{failure.type}: {failure.message}" if failure is not None and failure.own else log.error if log else ""
    return {
        "rank": rank,
        "dump": rank in case.recorded.dumps,
        "doing": _doing(case, rank) if main is not None and main.frames else None,
        "call": call.op if call is not None else "",
        "at": asdict(at) if at is not None else None,
        "innermost": frame_text(main.frames[0]) if main is not None and main.frames else "",
        "step": log.step if log else None,
        "inside": list(log.inside) if log else [],
        "caller": log.caller if log else "",
        "error": error,
    }


def _doing(case: Case, rank: int) -> str:
    """``p2p``, ``collective``, ``input`` or ``other``."""
    doing = case.doings[rank]
    if is_p2p(doing.waiting_in):
        return "p2p"
    return doing.state if doing.state in ("collective", "input") else "other"
