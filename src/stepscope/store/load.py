"""Open a run, whatever became of it: live, finished, sealed, or killed half way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun
from stepscope.records.series import RankError, RankSeries, RunData
from stepscope.store.flights import read_flights
from stepscope.store.hangs import read_hangs
from stepscope.store.jsonl import read_jsonl
from stepscope.store.meta import read_meta
from stepscope.store.paths import EVENTS, SAMPLES, STACKS
from stepscope.store.processes import agent_alive, launcher_alive, processes_alive
from stepscope.store.stacks import read_stacks

__all__ = ["open_run", "read_errors"]

_TRIES = 5


def open_run(path: Path) -> RunData:
    """Read a run; NotARun when it is none.  What is missing stands in ``notices``."""
    for _ in range(_TRIES):
        meta = read_meta(path)
        sealed = meta.get("sealed") is True
        try:
            data = _load_sealed(path, meta) if sealed else _load_open(path, meta)
        except FileNotFoundError:
            continue  # it was sealed under our eyes
        if (read_meta(path).get("sealed") is True) == sealed:
            return data
    raise NotARun(f"{path} is damaged: a part of it is missing")


def _load_sealed(path: Path, meta: dict[str, Any]) -> RunData:
    from stepscope.store.parquet import read_ranks, read_samples

    ranks, notices = read_ranks(path)
    events, _ = read_jsonl(path / EVENTS)
    numbers = _numbers(ranks)
    errors, _ = read_errors(path, numbers)
    flight, large = _read_flight(path, ranks, errors)
    return RunData(
        name=meta["name"],
        path=str(path),
        meta=meta,
        ranks=tuple(ranks),
        samples=tuple(read_samples(path)),
        events=tuple(events),
        errors=errors,
        stacks=read_stacks(path, numbers)[0],
        hangs=read_hangs(path)[0],
        flight=flight,
        notices=(*notices, *large),
    )


def _load_open(path: Path, meta: dict[str, Any]) -> RunData:
    from stepscope.store.assemble import assemble_ranks
    from stepscope.store.collect import collect_rings

    live = processes_alive(path) or (meta.get("end") is None and launcher_alive(meta))
    rings, notices = collect_rings(path, meta, live=live)
    assembled = assemble_ranks(rings)
    ranks = assembled.series
    notices += assembled.notices
    events, bad_events = read_jsonl(path / EVENTS)
    samples, bad_samples = read_jsonl(path / SAMPLES)
    numbers = _numbers(ranks)
    errors, bad_errors = read_errors(path, numbers)
    stacks, bad_stacks = read_stacks(path, numbers)
    hangs, bad_hangs = read_hangs(path)
    flight, large = ({}, []) if live else _read_flight(path, ranks, errors)
    notices += large
    if not live:
        notices += _deaths(meta, events)
        for name, bad in ((EVENTS, bad_events), (SAMPLES, bad_samples), (STACKS, bad_stacks)):
            if bad:
                notices.append(f"{bad:,} lines of {name} could not be read.")
    notices += [*bad_errors, *(f"{name} could not be read." for name in bad_hangs)]
    return RunData(
        name=meta["name"],
        path=str(path),
        meta={**meta, "git": meta.get("git") or _git(events)},
        ranks=tuple(ranks),
        samples=tuple({k: v for k, v in sample.items() if v is not None} for sample in samples),
        events=_merge_notes(events, assembled.notes),
        errors=errors,
        stacks=stacks,
        hangs=hangs,
        flight=flight,
        notices=tuple(notices),
    )


def _merge_notes(events: list[dict[str, Any]], notes: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Notes live in the segments; those that a seal that did not finish already copied are not doubled."""
    others = [event for event in events if event.get("event") != "note" or "seq" not in event]
    return tuple(sorted(others + notes, key=_wall_ns))


def _wall_ns(event: dict[str, Any]) -> int:
    wall_ns = event.get("wall_ns")
    return wall_ns if isinstance(wall_ns, int) else 0


def _git(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    found = (event.get("git") for event in reversed(events) if event.get("event") == "context")
    return next((git for git in found if isinstance(git, dict)), None)


def _deaths(meta: dict[str, Any], events: list[dict[str, Any]]) -> list[str]:
    notices = []
    if agent_alive(events) is False:
        notices.append("The agent died before the run ended; from then on there are no host and GPU samples.")
    elif not any(event.get("event") == "agent_start" for event in events):
        notices.append("No agent wrote to this run; there are no host and GPU samples.")
    if meta.get("end") is None and meta.get("launcher") is not None and not launcher_alive(meta):
        notices.append("The launcher died before it could say how the run ended.")
    return notices


def _numbers(ranks: Sequence[RankSeries]) -> dict[int, int | None]:
    """The rank that each pid is shown as; None when two processes had it."""
    numbers: dict[int, int | None] = {}
    for series in ranks:
        pid = series.identity.pid
        numbers[pid] = None if pid in numbers else series.rank
    return numbers


def read_errors(path: Path, numbers: dict[int, int | None]) -> tuple[tuple[RankError, ...], list[str]]:
    """What the dying processes wrote, in order of death, under the ranks that the series have."""
    errors: list[RankError] = []
    notices: list[str] = []
    for file in sorted((path / "errors").glob("*.json")):
        try:
            errors.append(_error_of(json.loads(file.read_bytes()), numbers))
        except (OSError, ValueError, RecursionError):
            notices.append(f"errors/{file.name} could not be read.")
    return tuple(sorted(errors, key=lambda error: error.wall_ns)), notices


def _read_flight(
    path: Path, ranks: Sequence[RankSeries], errors: Sequence[RankError]
) -> tuple[dict[str, Any], list[str]]:
    """Only of the last attempt, and only if a rank failed: a healthy run has nothing that could be compared."""
    last = max((series.identity.attempt for series in ranks), default=0)
    since_ns = min((series.anchor_wall_ns for series in ranks if series.identity.attempt == last), default=0)
    texts = {error.rank: error.traceback for error in errors if error.rank is not None and error.wall_ns >= since_ns}
    return read_flights(path, texts, since_ns=since_ns) if texts else ({}, [])


def _error_of(raw: object, numbers: dict[int, int | None]) -> RankError:
    if not isinstance(raw, dict) or not isinstance(raw.get("pid"), int):
        raise ValueError("not an error of ours")  # noqa: TRY004  # like every other fault of the bytes
    rank, codes, step = raw.get("rank"), raw.get("exit_codes"), raw.get("step")
    if isinstance(rank, int):
        shown = numbers.get(raw["pid"])
        rank = rank if shown is None else shown
    return RankError(
        rank=rank if isinstance(rank, int) else None,
        pid=raw["pid"],
        type=str(raw.get("type", "")),
        message=str(raw.get("message", "")),
        traceback=str(raw.get("traceback", "")),
        wall_ns=_wall_ns(raw),
        step=step if isinstance(step, int) else None,
        exit_codes={int(k): int(v) for k, v in codes.items()} if isinstance(codes, dict) else {},
    )
