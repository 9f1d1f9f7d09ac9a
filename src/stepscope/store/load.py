"""Load a run in any state: live, finished, sealed, or killed halfway, including what other nodes sent to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import NotARun, RunUnwritable
from stepscope.records.layers import LayerRecords, read_layers
from stepscope.records.run_clock import now_of
from stepscope.records.series import NOTED, RankError, RankSeries, RunData
from stepscope.records.text import Progress, count_text, duration_text, no_progress
from stepscope.store import locks
from stepscope.store.captures import CAPTURES_JUDGED, read_captures
from stepscope.store.documents import (
    NodeInfo,
    clock_offsets,
    read_finding_history,
    read_meta,
    read_nodes,
    read_refused,
)
from stepscope.store.file_io import read_jsonl
from stepscope.store.live.failures import (
    RankNumbers,
    nccl_dumped,
    read_errors,
    read_flights,
    read_joined_hangs,
    read_stacks,
    read_unrecorded,
)
from stepscope.store.live.logs import read_last_line, read_native, read_training_log
from stepscope.store.live.sample_files import LayerChoice, layer_records, layers_on_disk, thinned
from stepscope.store.liveness import agent_alive, launcher_alive, node_silent, processes_alive
from stepscope.store.locks import locked
from stepscope.store.paths import EVENTS, HUB_EVENTS, LAYERS, POSITIONS, SAMPLES, STACKS

if TYPE_CHECKING:
    from stepscope.store.inbox.remote import Remote, Shown

__all__ = ["Loaded", "load_run", "open_run"]


# -- node notices -----------------------------------------------------------------------------------------------------
# Notices about nodes that never joined, were lost, have a wrong clock, or were refused.

CLOCK_OFF_S = 1.0
REFUSED = {
    "tls": "TLS failed or the certificate was rejected",
    "key": "join requests with a different key",
    "join": "join requests to a different run",
    "join_rate": "too frequent join requests",
    "token": "wrong tokens",
    "frame": "invalid frames",
    "rank": "ranks that another node already has",
    "spool": "frames sent under another node's name",
    "node_taken": "a node number already in use",
    "connections": "too many connections",
    "connection_rate": "too frequent connections",
    "body_large": "requests too large",
    "body_slow": "requests too slow",
    "head_slow": "requests too slow to start",
    "head_large": "headers too large",
    "http": "invalid HTTP",
    "disk": "disk full",
}
"""The hub's reasons for refusing a request, in words."""
SHOWN = 8
"""The number of nodes per kind of notice that get a separate sentence."""


def node_notices(
    meta: Mapping[str, Any],
    nodes: Sequence[NodeInfo],
    refused: Mapping[str, int],
    *,
    lost: Callable[[NodeInfo], bool],
    over: bool,
) -> list[str]:
    """Return the notices about a run's nodes.

    ``refused`` counts requests from unknown senders by reason; ``lost`` decides whether a node that sent no goodbye is
    gone; ``over``: no more nodes can join.
    """
    notices = _absent_notices(meta, nodes) if over else []
    nodes = [node for node in nodes if node.spool != meta.get("spool")]  # this host's own agent is listed, too
    hosts = {node.spool: node.host for node in nodes}
    gone = [_lost_notice(node, hosts) for node in nodes if node.bye is None and lost(node)]
    off = [node for node in nodes if abs(node.offset_ns or 0) > CLOCK_OFF_S * 1e9]
    notices += _some(gone, "more nodes were lost")
    notices += _some([_clock_notice(node) for node in off], "more clocks are off")
    badly = [node for node in nodes if node.bye is not None and node.bye.get("status") not in ("finished", "orphaned")]
    notices += _some([_ended_notice(node) for node in badly if node.node], "more nodes ended badly")
    bad = [f"{_who(node)}: {count_text(node.refused, 'frame')} refused." for node in nodes if node.refused]
    notices += _some(bad, "more nodes sent refused frames")
    if refused:
        counts = sorted(refused.items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{REFUSED.get(why, why.replace('_', ' '))} ({count:,})" for why, count in counts)
        notices.append(f"The hub refused {count_text(sum(refused.values()), 'request')}: {reasons}.")
    return notices


def _absent_notices(meta: Mapping[str, Any], nodes: Sequence[NodeInfo]) -> list[str]:
    expected = meta.get("nnodes")
    if not isinstance(expected, int) or not 1 < expected <= 1 << 20:
        return []
    missing = sorted(set(range(1, expected)) - {node.node for node in nodes})
    if not missing:
        return []
    if len(missing) == 1:
        return [f"Node {missing[0]} never joined; its data is missing."]
    shown = ", ".join(str(number) for number in missing[:SHOWN])
    more = f" and {len(missing) - SHOWN:,} more" if len(missing) > SHOWN else ""
    return [f"Nodes {shown}{more} never joined; their data is missing."]


def _lost_notice(node: NodeInfo, hosts: Mapping[str, str]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(node.heard_wall_ns / 1e9))
    after = f"; host {hosts[node.replaced_by]} replaced it" if node.replaced_by in hosts else ""
    return f"{_who(node)} was lost: it last sent data at {when} and never reported how it ended{after}."


def _ended_notice(node: NodeInfo) -> str:
    bye = node.bye or {}
    code = f" (exit code {bye['exit_code']})" if bye.get("exit_code") is not None else ""
    how = "was interrupted" if bye.get("status") == "interrupted" else str(bye.get("status"))
    return f"{_who(node)} {how}{code}."


def _clock_notice(node: NodeInfo) -> str:
    seconds = (node.offset_ns or 0) / 1e9
    way = "ahead" if seconds > 0 else "behind"
    return f"{_who(node)}: its clock is {duration_text(abs(seconds))} {way}; times are shown by this host's clock."


def _who(node: NodeInfo) -> str:
    return f"Node {node.node} (host {node.host})"


def _some(sentences: list[str], more: str) -> list[str]:
    rest = len(sentences) - SHOWN
    return sentences if rest <= 0 else [*sentences[:SHOWN], f"{rest:,} {more}."]


# -- loading ----------------------------------------------------------------------------------------------------------

_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Loaded:
    data: RunData
    kept_notices: tuple[str, ...]
    """Notices that can only be determined now; the others follow from data that remains after sealing."""
    shown: Shown
    """The rank and attempt under which each ring of another node is shown."""
    sent_samples: list[dict[str, Any]]
    """Everything that other nodes sent and is not sealed yet; of very many, ``data`` contains only some."""
    samples_left_out: bool = False


@dataclass(kw_only=True)
class _Found:
    """The data that sealed and open runs have in common."""

    series: list[RankSeries]
    notices: list[str]
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]] | None
    """None: left out."""
    notes: list[dict[str, Any]]
    remote: Remote
    shown: Shown
    live: bool = False


def open_run(path: Path, *, progress: Progress = no_progress) -> RunData:
    """Read a run; NotARun if the folder is not a run.  ``notices`` lists what is missing.

    ``progress`` counts processes as they are read.
    """
    return load_run(path, progress=progress).data


def load_run(path: Path, *, alone: bool = False, samples: bool = True, progress: Progress = no_progress) -> Loaded:
    """Read a run as ``open_run`` does; ``alone`` omits data from other nodes that is not sealed with the rest.

    ``samples=False`` omits sealed samples, to be read later (``sealed_samples``).
    """
    for _ in range(_TRIES):
        if locks.is_stage_committed(path):
            _finish(path)
        meta = read_meta(path)
        form = _form(path, meta)
        try:
            loaded = _load(path, meta, alone=alone, samples=samples, progress=progress)
        except FileNotFoundError:
            continue  # the run was sealed while we read it
        except OSError as error:
            raise NotARun(f"{error.filename or path} cannot be read: {error.strerror}") from error
        if _form(path, read_meta(path)) == form:
            return loaded
    raise NotARun(f"{path} is damaged: part of it is missing")


def _finish(path: Path) -> None:
    try:
        with locked(path):
            locks.finish_stage(path)
    except OSError as error:
        raise RunUnwritable(f"cannot finish sealing {path}: {error.strerror or error}") from error


def _form(path: Path, meta: dict[str, Any]) -> tuple[bool, int]:
    """Whether a run is sealed, and which seal it is: data that other nodes send late is sealed after the rest."""
    sealed = meta.get("sealed") is True
    try:
        return sealed, (path / POSITIONS).stat().st_ino if sealed else 0
    except FileNotFoundError:
        return sealed, 0


def _load(path: Path, meta: dict[str, Any], *, alone: bool, samples: bool, progress: Progress) -> Loaded:
    sealed = meta.get("sealed") is True
    if sealed:
        from stepscope.store.sealed.parquet import one_database

        with one_database():
            found = _find_sealed(path, alone=alone, samples=samples, progress=progress)
    else:
        found = _find_open(path, meta, alone=alone, progress=progress)
    remote, notices = found.remote, found.notices
    offsets = clock_offsets(remote.nodes)
    numbers = RankNumbers(found.series, str(meta.get("host")))
    errors, bad_errors = read_errors(path, numbers, offsets)
    stacks, bad_stacks = read_stacks(path, numbers.of)
    sent_stacks, bad_sent = remote.stacks(numbers)
    layers, bad_layers, bad_sent_layers = _read_layers(path, remote, numbers)
    hangs, bad_hangs = read_joined_hangs(path, found.series, errors, remote.nodes)
    flight, large = ({}, []) if found.live else _read_flight(path, found.series, errors)
    if not sealed:
        for name, bad in ((STACKS, bad_stacks), (LAYERS, bad_layers)):
            if bad and not found.live:
                notices.append(f"{bad:,} lines of {name} could not be read.")
        notices += [*bad_errors, *(f"{name} could not be read." for name in bad_hangs)]
    notices += remote.notices(bad_sent + bad_sent_layers)
    of_nodes = node_notices(
        meta, remote.nodes, read_refused(path), lost=_lost_nodes(meta, live=found.live), over=not found.live
    )
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
        unrecorded=() if found.series else read_unrecorded(path),
        stacks=_in_order(stacks, sent_stacks),
        layers=layers,
        hangs=hangs,
        flight=flight,
        training_log=read_training_log(path, found.series),
        native={} if found.live else read_native(path, found.series, errors),
        last_line="" if found.live or found.series else read_last_line(path),
        nodes=_nodes(remote.nodes, found.shown, str(meta.get("spool", ""))),
        history=read_finding_history(path),
        captures=read_captures(path, most=CAPTURES_JUDGED),
        notices=(*notices, *large, *of_nodes, *remote.reduced),
    )
    return Loaded(
        data=data,
        kept_notices=tuple(notices),
        shown=found.shown,
        sent_samples=sent_samples,
        samples_left_out=found.samples is None,
    )


def _find_sealed(path: Path, *, alone: bool, samples: bool, progress: Progress) -> _Found:
    from stepscope.store.inbox.journal import read_positions
    from stepscope.store.inbox.remote import choose_rings, merge_late, read_remote, sealed_sidecars
    from stepscope.store.rank_series import assemble_ranks
    from stepscope.store.sealed.parquet import read_ranks
    from stepscope.store.sealed.samples import sealed_samples

    series, notices = read_ranks(path, progress=progress)
    positions = read_positions(path)
    known = sealed_sidecars(series, positions.spools, read_nodes(path))
    choice = None if alone else choose_rings(path, positions)
    remote = read_remote(path, positions, lost=lambda node: True, known=known, choice=choice, nothing=alone)
    late = assemble_ranks(remote.rings, among=series)
    series, shown = merge_late(series, late, remote.whose, positions.spools)
    left_out = not samples and not remote.records(SAMPLES)  # late samples must be merged in order
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
    from stepscope.store.inbox.journal import read_positions
    from stepscope.store.inbox.remote import choose_rings, read_remote
    from stepscope.store.live.ring_records import collect_rings
    from stepscope.store.rank_series import assemble_ranks
    from stepscope.store.sealed.samples import open_samples

    live = processes_alive(path) or (meta.get("end") is None and launcher_alive(meta))
    rings, notices = collect_rings(path, meta, live=live, progress=progress)
    positions = read_positions(path)
    choice = None if alone else choose_rings(path, positions)
    remote = read_remote(path, positions, lost=_lost_nodes(meta, live=live), choice=choice, nothing=alone)
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


def _read_layers(path: Path, remote: Remote, numbers: RankNumbers) -> tuple[LayerRecords, int, int]:
    """Return the chosen samples of all nodes under the ranks that are shown, and how many lines are invalid."""
    choice = LayerChoice()
    choice.see(layers_on_disk(path))
    for sent in remote.lines:
        choice.see(sent.layers)
    own, bad = layer_records(filter(choice.takes, layers_on_disk(path)), numbers)
    sent_records: list[dict[str, Any]] = []
    bad_sent = 0
    for sent in remote.lines:
        records, none = layer_records(filter(choice.takes, sent.layers), numbers, sent.host, sent.offset_ns)
        sent_records += records
        bad_sent += none
    # Another node may have described the model first.
    layers, wrong = read_layers(sorted([*own, *sent_records], key=lambda record: record.get("kind") != "model"))
    return layers, bad + wrong, bad_sent


def _nodes(nodes: Iterable[NodeInfo], shown: Shown, own: str) -> tuple[dict[str, Any], ...]:
    """Return each node with what it sent; ``here``: it sent nothing, because this is its own run directory."""
    sent: dict[str, list[tuple[int, int]]] = {}
    for (spool, _), pair in shown.items():
        sent.setdefault(spool, []).append(pair)
    return tuple(
        {**asdict(node), "here": node.spool == own, "series": sorted(sent.get(node.spool, ()))} for node in nodes
    )


def _lost_nodes(meta: Mapping[str, Any], *, live: bool) -> Callable[[NodeInfo], bool]:
    """Whether a node that sent no goodbye is gone: after a silence, or immediately once the run is over."""
    now_ns = now_of(meta)
    return lambda node: not live or node_silent(node, now_ns)


def _hub_events(path: Path, sealed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the hub's events without sealed ones: a seal may have been killed before it cleaned up."""
    events, _ = read_jsonl(path / HUB_EVENTS)
    known = {json.dumps(event) for event in sealed} if events else set()
    return [event for event in events if json.dumps(event) not in known]


def _merge_notes(
    events: list[dict[str, Any]], notes: list[dict[str, Any]], *, doubled: bool
) -> tuple[dict[str, Any], ...]:
    """Merge the notes from the segments; drop copies left by an unfinished seal (``doubled``)."""
    if doubled:
        events = [event for event in events if event.get("event") not in NOTED or "seq" not in event]
    return tuple(sorted([*events, *notes], key=_wall_ns))


def _in_order(own: Sequence[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Sort by time if there are other nodes; otherwise keep the order."""
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
        notices.append("The agent died before the run ended; there are no host and GPU samples after that.")
    elif not any(event.get("event") == "agent_start" for event in events):
        notices.append("No agent wrote to this run; there are no host and GPU samples.")
    if meta.get("end") is None and meta.get("launcher") is not None and not launcher_alive(meta):
        notices.append("The launcher died before it could record how the run ended.")
    return notices


def _read_flight(
    path: Path, ranks: Sequence[RankSeries], errors: Sequence[RankError]
) -> tuple[dict[str, Any], list[str]]:
    """Read only the last attempt, and only if a rank failed: a healthy run has nothing to compare."""
    last = max((series.identity.attempt for series in ranks), default=0)
    since_ns = min((series.anchor_wall_ns for series in ranks if series.identity.attempt == last), default=0)
    texts = {error.rank: error.traceback for error in errors if error.rank is not None and error.wall_ns >= since_ns}
    failed = texts or nccl_dumped(path, since_ns=since_ns)
    return read_flights(path, texts, since_ns=since_ns) if failed else ({}, [])
