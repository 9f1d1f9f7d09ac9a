"""Open a run, whatever became of it: live, finished, sealed, or killed half way; with what other nodes sent to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import NotARun, RunUnwritable
from stepscope.records.progress import Progress, unheard
from stepscope.records.run_clock import now_of
from stepscope.records.series import RankError, RankSeries, RunData
from stepscope.store import staging
from stepscope.store.failures import Numbers, read_errors
from stepscope.store.flights import nccl_dumped, read_flights
from stepscope.store.jsonl import read_jsonl
from stepscope.store.locks import locked
from stepscope.store.meta import read_meta
from stepscope.store.native import read_native
from stepscope.store.node_notices import node_notices
from stepscope.store.nodes import NodeInfo, clock_offsets, read_nodes, read_refused
from stepscope.store.paths import EVENTS, HUB_EVENTS, POSITIONS, SAMPLES, STACKS
from stepscope.store.processes import agent_alive, launcher_alive, node_silent, processes_alive
from stepscope.store.stacks import read_stacks
from stepscope.store.standstills import read_standstills
from stepscope.store.thinning import thinned
from stepscope.store.training_log import read_training_log

if TYPE_CHECKING:
    from stepscope.store.late import Shown
    from stepscope.store.remote import Remote

__all__ = ["Loaded", "load_run", "open_run"]

_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Loaded:
    data: RunData
    kept_notices: tuple[str, ...]
    """Those that can be told only now; the others follow from what stays when the run is sealed."""
    shown: Shown
    """What the rings of other nodes became."""
    sent_samples: list[dict[str, Any]]
    """All that other nodes sent and is not sealed yet; of very many, ``data`` has some."""
    samples_left_out: bool = False


@dataclass(kw_only=True)
class _Found:
    """What the two forms of a run have in common."""

    series: list[RankSeries]
    notices: list[str]
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]] | None
    """None: left out."""
    notes: list[dict[str, Any]]
    remote: Remote
    shown: Shown
    live: bool = False


def open_run(path: Path, *, progress: Progress = unheard) -> RunData:
    """Read a run; NotARun when it is none.  What is missing stands in ``notices``.

    ``progress`` is told processes, as they are read.
    """
    return load_run(path, progress=progress).data


def load_run(path: Path, *, alone: bool = False, samples: bool = True, progress: Progress = unheard) -> Loaded:
    """As ``open_run``; ``alone``: without what other nodes sent and is not sealed with the rest.

    ``samples``: False leaves out those that are sealed, to be read later (``sealed_samples``).
    """
    for _ in range(_TRIES):
        if staging.is_committed(path):
            _finish(path)
        meta = read_meta(path)
        form = _form(path, meta)
        try:
            loaded = _load(path, meta, alone=alone, samples=samples, progress=progress)
        except FileNotFoundError:
            continue  # it was sealed under our eyes
        if _form(path, read_meta(path)) == form:
            return loaded
    raise NotARun(f"{path} is damaged: a part of it is missing")


def _finish(path: Path) -> None:
    try:
        with locked(path):
            staging.finish(path)
    except OSError as error:
        raise RunUnwritable(f"{path} was being sealed and cannot be: {error.strerror or error}") from error


def _form(path: Path, meta: dict[str, Any]) -> tuple[bool, int]:
    """Whether a run is sealed, and which time: what other nodes send late is sealed after the rest."""
    sealed = meta.get("sealed") is True
    try:
        return sealed, (path / POSITIONS).stat().st_ino if sealed else 0
    except FileNotFoundError:
        return sealed, 0


def _load(path: Path, meta: dict[str, Any], *, alone: bool, samples: bool, progress: Progress) -> Loaded:
    sealed = meta.get("sealed") is True
    if sealed:
        found = _find_sealed(path, alone=alone, samples=samples, progress=progress)
    else:
        found = _find_open(path, meta, alone=alone, progress=progress)
    remote, notices = found.remote, found.notices
    offsets = clock_offsets(remote.nodes)
    numbers = Numbers(found.series, str(meta.get("host")))
    errors, bad_errors = read_errors(path, numbers, offsets)
    stacks, bad_stacks = read_stacks(path, numbers.of)
    sent_stacks, bad_sent = remote.stacks(numbers)
    hangs, bad_hangs = read_standstills(path, found.series, errors, remote.nodes)
    flight, large = ({}, []) if found.live else _read_flight(path, found.series, errors)
    if not sealed:
        if bad_stacks and not found.live:
            notices.append(f"{bad_stacks:,} lines of {STACKS} could not be read.")
        notices += [*bad_errors, *(f"{name} could not be read." for name in bad_hangs)]
    notices += remote.notices(bad_sent)
    told = node_notices(meta, remote.nodes, read_refused(path), lost=_lost(meta, live=found.live), over=not found.live)
    seen = _hub_events(path, found.events if sealed else [])
    sent_samples = remote.records(SAMPLES)
    data = RunData(
        name=meta["name"],
        path=str(path),
        meta=meta if sealed else {**meta, "git": meta.get("git") or _git(found.events)},
        ranks=tuple(found.series),
        samples=_samples(found.samples or (), sent_samples),
        events=_merge_notes([*found.events, *seen, *remote.records(EVENTS)], found.notes, doubled=not sealed),
        errors=errors,
        stacks=_in_order(stacks, sent_stacks),
        hangs=hangs,
        flight=flight,
        training_log=read_training_log(path, found.series),
        native={} if found.live else read_native(path, found.series, errors),
        nodes=_nodes(remote.nodes, found.shown, str(meta.get("spool", ""))),
        notices=(*notices, *large, *told, *remote.reduced),
    )
    return Loaded(
        data=data,
        kept_notices=tuple(notices),
        shown=found.shown,
        sent_samples=sent_samples,
        samples_left_out=found.samples is None,
    )


def _find_sealed(path: Path, *, alone: bool, samples: bool, progress: Progress) -> _Found:
    from stepscope.store.assemble import assemble_ranks
    from stepscope.store.late import merge_late, sealed_sidecars
    from stepscope.store.parquet import read_ranks
    from stepscope.store.positions import read_positions
    from stepscope.store.remote import read_remote
    from stepscope.store.samples import sealed_samples
    from stepscope.store.selection import choose

    series, notices = read_ranks(path, progress=progress)
    positions = read_positions(path)
    known = sealed_sidecars(series, positions.spools, read_nodes(path))
    choice = None if alone else choose(path, positions)
    remote = read_remote(path, positions, lost=lambda node: True, known=known, choice=choice, nothing=alone)
    late = assemble_ranks(remote.rings, among=series)
    series, shown = merge_late(series, late, remote.whose, positions.spools)
    left_out = not samples and not remote.records(SAMPLES)  # what came late has its place among them
    return _Found(
        series=series,
        notices=[*notices, *late.notices],
        events=read_jsonl(path / EVENTS)[0],
        samples=None if left_out else sealed_samples(path),
        notes=late.notes,
        remote=remote,
        shown=shown,
    )


def _find_open(path: Path, meta: dict[str, Any], *, alone: bool, progress: Progress) -> _Found:
    from stepscope.store.assemble import assemble_ranks
    from stepscope.store.collect import collect_rings
    from stepscope.store.positions import read_positions
    from stepscope.store.remote import read_remote
    from stepscope.store.samples import open_samples
    from stepscope.store.selection import choose

    live = processes_alive(path) or (meta.get("end") is None and launcher_alive(meta))
    rings, notices = collect_rings(path, meta, live=live, progress=progress)
    positions = read_positions(path)
    choice = None if alone else choose(path, positions)
    remote = read_remote(path, positions, lost=_lost(meta, live=live), choice=choice, nothing=alone)
    assembled = assemble_ranks([*rings, *remote.rings])
    events, bad_events = read_jsonl(path / EVENTS)
    samples, bad_samples = open_samples(path)
    notices += assembled.notices
    if not live:
        notices += _deaths(meta, events)
        for name, bad in ((EVENTS, bad_events), (SAMPLES, bad_samples)):
            if bad:
                notices.append(f"{bad:,} lines of {name} could not be read.")
    pairs = zip(remote.whose, assembled.shown[len(rings) :], strict=True)
    return _Found(
        series=assembled.series,
        notices=notices,
        events=events,
        samples=samples,
        notes=assembled.notes,
        remote=remote,
        shown={whose: pair for whose, pair in pairs if pair is not None},
        live=live,
    )


def _nodes(nodes: Iterable[NodeInfo], shown: Shown, own: str) -> tuple[dict[str, Any], ...]:
    """Each with what it sent; ``here``: it sent nothing, because this is its own run directory."""
    sent: dict[str, list[tuple[int, int]]] = {}
    for (spool, _), pair in shown.items():
        sent.setdefault(spool, []).append(pair)
    return tuple(
        {**asdict(node), "here": node.spool == own, "series": sorted(sent.get(node.spool, ()))} for node in nodes
    )


def _lost(meta: Mapping[str, Any], *, live: bool) -> Callable[[NodeInfo], bool]:
    """Whether a node that said no goodbye is gone: after a while, and when the run is over at once."""
    now_ns = now_of(meta)
    return lambda node: not live or node_silent(node, now_ns)


def _hub_events(path: Path, sealed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the hub saw, without what is sealed with the rest: a seal may have been killed before it cleaned up."""
    events, _ = read_jsonl(path / HUB_EVENTS)
    known = {json.dumps(event) for event in sealed} if events else set()
    return [event for event in events if json.dumps(event) not in known]


def _merge_notes(
    events: list[dict[str, Any]], notes: list[dict[str, Any]], *, doubled: bool
) -> tuple[dict[str, Any], ...]:
    """Notes live in the segments; those that a seal that did not finish already copied (``doubled``) do not count."""
    if doubled:
        events = [event for event in events if event.get("event") != "note" or "seq" not in event]
    return tuple(sorted([*events, *notes], key=_wall_ns))


def _in_order(own: Sequence[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """By time where there are other nodes; else as they lie."""
    return tuple(sorted([*own, *others], key=_wall_ns)) if others else tuple(own)


def _samples(own: Sequence[dict[str, Any]], sent: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    both = _in_order(own, sent)
    return tuple(thinned(both)) if sent else both


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


def _read_flight(
    path: Path, ranks: Sequence[RankSeries], errors: Sequence[RankError]
) -> tuple[dict[str, Any], list[str]]:
    """Only of the last attempt, and only if a rank failed: a healthy run has nothing that could be compared."""
    last = max((series.identity.attempt for series in ranks), default=0)
    since_ns = min((series.anchor_wall_ns for series in ranks if series.identity.attempt == last), default=0)
    texts = {error.rank: error.traceback for error in errors if error.rank is not None and error.wall_ns >= since_ns}
    failed = texts or nccl_dumped(path, since_ns=since_ns)
    return read_flights(path, texts, since_ns=since_ns) if failed else ({}, [])
