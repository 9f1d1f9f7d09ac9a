"""What other nodes sent to a run, as records: their rings, events, samples, stacks, layers, from journals and parts.

Reads the journals (``store/inbox/journal.py``) of a run whose hub may still be writing them.  A node's wall times are
moved to the hub's clock by the offset that round trips measured.  Steps are timed by their machine's monotonic clock,
so only the anchor of a ring has to be moved.  For very large runs, only the ranks that matter are read.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import FrameError
from stepscope.records.files import open_file, sql_input_path
from stepscope.records.series import RankSeries, RankState
from stepscope.records.steps import COMM, SLOT_BYTES
from stepscope.step_table import RankSteps, join_steps
from stepscope.store.documents import NodeInfo, read_nodes
from stepscope.store.inbox.journal import (
    Live,
    SealedPositions,
    Spool,
    heard_of,
    journal_path,
    journals_after,
    live_of,
    raw_sidecars_of,
    read_journal,
    unpack_block,
)
from stepscope.store.inbox.parts import part_steps, read_part_steps, rest_path, sample_parts
from stepscope.store.live.failures import RankNumbers, checked_stacks
from stepscope.store.live.ring_files import RingSidecar
from stepscope.store.live.ring_records import RingRecords
from stepscope.store.paths import EVENTS, LAYERS, SAMPLES, STACKS
from stepscope.store.rank_series import BUILTIN_COLUMNS, Assembled, joined_rows
from stepscope.wire.frames import Frame, Part, inflate_part, read_frame, ring_id

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Remote", "Shown", "choose_rings", "is_too_large", "merge_late", "read_remote", "sealed_sidecars"]


# -- selection --------------------------------------------------------------------------------------------------------
# If a run has more steps than fit into memory, select the ranks that matter: the worst by each phase, and an even
# sample.  SQL over the parts (``store/inbox/parts.py``) finds the worst: by the median of each phase and of the whole
# step, over a subset if there are very many steps.  The rank that waits least is as interesting as those that work
# longest, since the others wait for it.

MOST_STEPS = 3_000_000
"""Steps of all ranks that are loaded without selection: 256 bytes each as records, and half of that in a table."""
RANKS = 512
WORST = 24
"""By each measure."""
_QUERIED_ROWS = 2_000_000
"""Steps that are examined to find them."""


@dataclass(frozen=True, kw_only=True)
class RingChoice:
    rings: dict[str, frozenset[bytes]]
    """By spool."""
    notice: str


def is_too_large(sealed: SealedPositions) -> bool:
    """Whether the run is too large to be loaded as a whole."""
    return sealed.steps > MOST_STEPS


def choose_rings(run_dir: Path, sealed: SealedPositions) -> RingChoice | None:
    """Return the rings to load; None: all of them."""
    if not is_too_large(sealed):
        return None
    names = {
        ring.number: (spool.name, ident) for spool in sealed.spools.values() for ident, ring in spool.rings.items()
    }
    numbers = [number for number in sorted(names) if number >= 0]
    chosen = _worst(part_steps(run_dir, sealed.parts), sealed.steps, most=RANKS // 2)
    spare = RANKS - len(chosen)
    chosen |= set(_evenly([number for number in numbers if number not in chosen], spare))
    rings: dict[str, set[bytes]] = {}
    for number in chosen & set(numbers):
        spool, ident = names[number]
        rings.setdefault(spool, set()).add(ident)
    notice = (
        f"This run has {sealed.steps:,} steps of {len(numbers):,} ranks on other nodes: {len(chosen):,} ranks were "
        f"analyzed, the slowest in each phase and an even sample; stepscope sql covers all of them."
    )
    return RingChoice(rings={spool: frozenset(own) for spool, own in rings.items()}, notice=notice)


def _worst(paths: Sequence[Path], steps: int, *, most: int) -> set[int]:
    """Return the worst by each measure in turn, until there are enough."""
    import duckdb

    if not paths:
        return set()
    every = max(1, steps // _QUERIED_ROWS)
    for path in paths:
        open_file(path).close()
    files = ", ".join(map(sql_input_path, paths))
    table = f"read_parquet([{files}], union_by_name = true)"
    with duckdb.connect(config={"threads": 2}) as con:
        con.execute("SET enable_progress_bar = false")
        there = {row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()}
        measures = [name for name in BUILTIN_COLUMNS if name in there]
        waiting = BUILTIN_COLUMNS[COMM] if BUILTIN_COLUMNS[COMM] in there else "0"
        medians = ", ".join(
            [f"median(wall_ns - {waiting}) AS work", "median(wall_ns) AS wall_ns"]
            + [f"median({name}) AS {name}" for name in measures]
        )
        con.execute(
            f"CREATE TABLE m AS SELECT ring, {medians} FROM {table} WHERE step % {every} = 0 AND step > 0 GROUP BY ring"
        )
        wanted = [
            f"SELECT ring FROM m ORDER BY {name} DESC, ring LIMIT {WORST}" for name in ("work", "wall_ns", *measures)
        ]
        found: list[list[tuple[Any, ...]]] = [con.execute(query).fetchall() for query in wanted]
    chosen: set[int] = set()
    for place in range(WORST):
        for rows in found:
            if place < len(rows) and len(chosen) < most:
                chosen.add(int(rows[place][0]))
    return chosen


def _evenly(numbers: Sequence[int], count: int) -> Iterable[int]:
    if len(numbers) <= count:
        return numbers
    return [numbers[place * len(numbers) // count] for place in range(count)]


# -- reading ----------------------------------------------------------------------------------------------------------

_STATES: tuple[RankState, ...] = ("starting", "running", "exited", "exception")
"""Indexed by the state number in a ring's header."""


@dataclass(kw_only=True)
class RemoteLines:
    """The lines of one node, already on the hub's clock."""

    host: str
    records: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {EVENTS: [], SAMPLES: [], STACKS: []})
    """By file."""
    layers: list[bytes] = field(default_factory=list)
    """Lines of ``layers.jsonl`` as they came: not all of them are parsed."""
    offset_ns: int = 0
    """How far the node's clock is ahead."""
    bad: int = 0
    """Invalid lines."""


@dataclass(kw_only=True)
class Remote:
    nodes: list[NodeInfo]
    """All known nodes that sent data or joined."""
    rings: list[RingRecords] = field(default_factory=list)
    whose: list[tuple[str, bytes]] = field(default_factory=list)
    """The spool and ``ring_id`` of each ring."""
    lines: list[RemoteLines] = field(default_factory=list)
    unreadable: int = 0
    """Frames that are damaged or of another version."""
    reduced: tuple[str, ...] = ()
    """A notice if not everything was read."""

    def records(self, file: str) -> list[dict[str, Any]]:
        """Return all nodes' lines of a file, node by node."""
        return [record for lines in self.lines for record in lines.records[file]]

    def notices(self, bad_lines: int) -> list[str]:
        """Return notices about what could not be read."""
        problems = []
        if self.unreadable:
            problems.append(f"{self.unreadable:,} frames from other nodes could not be read.")
        if bad := bad_lines + sum(lines.bad for lines in self.lines):
            problems.append(f"{bad:,} lines from other nodes could not be read.")
        return problems

    def stacks(self, numbers: RankNumbers) -> tuple[list[dict[str, Any]], int]:
        """Return all nodes' stacks under the ranks that are shown, and the number of invalid lines."""
        found: list[dict[str, Any]] = []
        bad = 0
        for lines in self.lines:
            own, none = checked_stacks(lines.records[STACKS], numbers.on(lines.host))
            found += own
            bad += none
        return found, bad


@dataclass(kw_only=True)
class _Ring:
    """One ring while frames are being read."""

    about: RingSidecar | None = None
    slots: list[NDArray[Any]] = field(default_factory=list)
    lost: int = 0
    torn: int = 0
    live: Live = (0, 0, 0, 0, 0)


@dataclass(kw_only=True)
class _Sender:
    info: NodeInfo
    rings: dict[bytes, _Ring] = field(default_factory=dict)
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    chosen: frozenset[bytes] | None = None
    """The rings to read; None: all."""


def read_remote(
    run_dir: Path,
    sealed: SealedPositions,
    *,
    lost: Callable[[NodeInfo], bool],
    known: Mapping[tuple[str, bytes], RingSidecar] | None = None,
    choice: RingChoice | None = None,
    nothing: bool = False,
) -> Remote:
    """Read everything in parts and journals.  FileNotFoundError if it was sealed meanwhile.

    ``lost``: whether a node that sent no goodbye is gone.  ``known``: sidecars of rings that were sent before what is
    in the journals.  ``choice``: the rings to read, if there are too many.  ``nothing``: read only the list of nodes.
    """
    chosen = None if choice is None else choice.rings
    senders = {node.spool: _Sender(info=node, chosen=_chosen(chosen, node.spool)) for node in read_nodes(run_dir)}
    for (spool, ident), about in (known or {}).items():
        if spool in senders:
            senders[spool].rings[ident] = _Ring(about=about)
    files = [part.path(run_dir) for part in sample_parts(run_dir, sealed.parts)]
    files += [rest_path(run_dir, number) for number in sealed.parts]
    files += [journal_path(run_dir, number) for number in journals_after(run_dir, sealed)]
    unreadable = 0
    for received in itertools.chain.from_iterable(read_journal(path) for path in files if not nothing):
        try:
            _take(senders, read_frame(received.raw), received.wall_ns, chosen)
        except FrameError:
            unreadable += 1
    if sealed.parts and not nothing:
        _take_parts(run_dir, sealed, senders)
    remote = Remote(nodes=[sender.info for sender in senders.values()], unreadable=unreadable)
    remote.reduced = () if choice is None else (choice.notice,)
    remote.nodes.sort(key=lambda node: (node.node, node.joined_wall_ns, node.spool))
    for node in remote.nodes:
        sender = senders[node.spool]
        gone = node.bye is None and lost(node)
        for ident, ring in sender.rings.items():
            if ring.about is not None:
                remote.whose.append((node.spool, ident))
                remote.rings.append(_records(ring, ring.about, node, gone=gone))
        remote.lines.append(_decoded(node, sender.lines))
    return remote


def _chosen(rings: Mapping[str, frozenset[bytes]] | None, spool: str) -> frozenset[bytes] | None:
    return None if rings is None else rings.get(spool, frozenset())


def _take_parts(run_dir: Path, sealed: SealedPositions, senders: Mapping[str, _Sender]) -> None:
    """Put the steps in parts before those in journals; a ring's earlier progress is only in the positions."""
    rings: dict[int, _Ring] = {}
    for name, spool in sealed.spools.items():
        for ident, position in spool.rings.items():
            sender = senders.get(name)
            if sender is not None and (sender.chosen is None or ident in sender.chosen):
                ring = sender.rings.setdefault(ident, _Ring())
                ring.live = max(ring.live, position.live)
                rings[position.number] = ring
    wanted = None if all(sender.chosen is None for sender in senders.values()) else sorted(rings)
    for number, slots in read_part_steps(part_steps(run_dir, sealed.parts), wanted):
        if number in rings:
            rings[number].slots.insert(0, slots)


def shifted(wall_ns: int, offset_ns: int | None) -> int:
    """Convert a node's wall time to the hub's clock; 0 is not a time."""
    return max(wall_ns - (offset_ns or 0), 1) if wall_ns else 0


def _take(
    senders: dict[str, _Sender], frame: Frame, wall_ns: int, rings: Mapping[str, frozenset[bytes]] | None
) -> None:
    head = frame.head
    sender = senders.get(head.spool)
    if sender is None:
        about = NodeInfo(node=head.node, host="", spool=head.spool, joined_wall_ns=wall_ns)
        sender = senders[head.spool] = _Sender(info=about, chosen=_chosen(rings, head.spool))
    _hear(sender, frame, wall_ns)
    if sender.chosen is not None and not sender.chosen:
        return
    for part in frame.parts:
        if part.kind == "rings":
            _take_sidecars(sender, part)
        elif part.kind == "steps":
            _take_block(sender, part)
        elif part.kind == "lines":
            sender.lines.setdefault(part.name, []).append(inflate_part(part))


def _hear(sender: _Sender, frame: Frame, wall_ns: int) -> None:
    """Update the node from a frame: ``nodes.json`` is only written from time to time."""
    head, info = frame.head, sender.info
    if wall_ns > info.heard_wall_ns:
        sender.info = replace(
            info,
            heard_wall_ns=wall_ns,
            offset_ns=info.offset_ns if head.offset_ns is None else head.offset_ns,
            rtt_ns=info.rtt_ns if head.offset_ns is None else head.rtt_ns,
        )
    if head.bye is not None:
        sender.info = replace(sender.info, bye=dict(head.bye))


def _take_sidecars(sender: _Sender, part: Part) -> None:
    for key, heard, raw in raw_sidecars_of(part):
        ident = ring_id(key)
        if not sender.info.host:
            sender.info = replace(sender.info, host=raw["identity"]["host"])
        if sender.chosen is not None and ident not in sender.chosen:
            continue
        ring = sender.rings.setdefault(ident, _Ring())
        if ring.about is None or heard > heard_of(ring.about):
            try:
                ring.about = RingSidecar.from_dict(raw)
            except ValueError as error:
                raise FrameError("a ring's identity cannot be read") from error


def _take_block(sender: _Sender, part: Part) -> None:
    taken = unpack_block(part.data)
    at = 0
    for (ident, live), (rows, lost, torn) in zip(
        live_of(taken.table), taken.table[["rows", "lost", "torn"]].tolist(), strict=True
    ):
        end = at + rows
        if sender.chosen is None or ident in sender.chosen:
            ring = sender.rings.setdefault(ident, _Ring())
            if rows:
                ring.slots.append(taken.slots[at:end])
            ring.lost += lost
            ring.torn += torn
            ring.live = max(ring.live, live)
        at = end


def _records(ring: _Ring, about: RingSidecar, node: NodeInfo, *, gone: bool) -> RingRecords:
    slots = np.concatenate(ring.slots) if ring.slots else np.zeros((0, SLOT_BYTES), np.uint8)
    _, since_ns, state, step, phase = ring.live
    if since_ns > about.live_since_ns:
        about = replace(about, live_since_ns=since_ns, live_step=step, live_phase=phase % len(about.phase_names))
    if about.ended_wall_ns is None and about.state in ("starting", "running"):
        about = replace(about, state=max(about.state, _STATES[state % len(_STATES)], key=_STATES.index))
        if about.state in ("starting", "running") and gone:
            about = replace(about, state="vanished")
    ended_ns = None if about.ended_wall_ns is None else shifted(about.ended_wall_ns, node.offset_ns)
    if about.state == "vanished" and ended_ns is None:
        ended_ns = node.heard_wall_ns or None  # on the hub's clock; the node existed at least until then
    about = replace(
        about,
        anchor_wall_ns=shifted(about.anchor_wall_ns, node.offset_ns),
        heard_wall_ns=shifted(about.heard_wall_ns, node.offset_ns),
        ended_wall_ns=ended_ns,
    )
    return RingRecords(about=about, slots=slots, lost=ring.lost, torn=ring.torn)


def _decoded(node: NodeInfo, lines: Mapping[str, Iterable[bytes]]) -> RemoteLines:
    found = RemoteLines(host=node.host, offset_ns=node.offset_ns or 0)
    for name, texts in lines.items():
        if name == LAYERS:
            found.layers = b"".join(texts).splitlines()
            continue
        for line in b"".join(texts).splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                found.bad += bool(line.strip())
                continue
            if type(record.get("wall_ns")) is int:
                record["wall_ns"] = shifted(record["wall_ns"], node.offset_ns)
            if name == SAMPLES:
                record = {key: value for key, value in record.items() if value is not None}
            found.records[name].append(record)
    return found


# -- late data --------------------------------------------------------------------------------------------------------
# What arrived after a run was sealed (``stepscope send``): more records of sealed rings, and new rings.  No I/O.

Shown = dict[tuple[str, bytes], tuple[int, int]]
"""By spool and ``ring_id``: attempt and rank of its series."""


def sealed_sidecars(
    ranks: Sequence[RankSeries], spools: Mapping[str, Spool], nodes: Sequence[NodeInfo]
) -> dict[tuple[str, bytes], RingSidecar]:
    """Return the sidecars of sealed rings as their nodes would send them: late blocks do not repeat them."""
    series = {(rank.identity.attempt, rank.rank): rank for rank in ranks}
    offsets = {node.spool: node.offset_ns or 0 for node in nodes}
    found = {}
    for name, spool in spools.items():
        for ident, ring in spool.rings.items():
            if ring.shown in series:
                found[name, ident] = _sealed_sidecar(series[ring.shown], offsets.get(name, 0))
    return found


def merge_late(
    ranks: Sequence[RankSeries], late: Assembled, whose: Sequence[tuple[str, bytes]], spools: Mapping[str, Spool]
) -> tuple[list[RankSeries], Shown]:
    """Return all series, and which ring became which; ``whose`` identifies each assembled ring."""
    merged = {(rank.identity.attempt, rank.rank): rank for rank in ranks}
    added = {(rank.identity.attempt, rank.rank): rank for rank in late.series}
    shown: Shown = {
        (name, ident): ring.shown
        for name, spool in spools.items()
        for ident, ring in spool.rings.items()
        if ring.shown is not None
    }
    for (name, ident), pair in zip(whose, late.shown, strict=True):
        if pair is None:
            continue
        before = shown.get((name, ident))
        if before is not None and before in merged:
            merged[before] = _joined_series(merged[before], added[pair])
            continue
        attempt, rank = pair
        while (attempt, rank) in merged:
            rank += 1
        merged[attempt, rank] = replace(added[pair], rank=rank)
        shown[name, ident] = (attempt, rank)
    return [merged[pair] for pair in sorted(merged)], shown


def _sealed_sidecar(series: RankSeries, offset_ns: int) -> RingSidecar:
    unknown = series.state == "vanished" and series.ended_wall_ns is None
    return RingSidecar(
        identity=series.identity,
        pid=series.identity.pid,
        start_ticks=0,
        anchor_mono_ns=series.anchor_mono_ns,
        anchor_wall_ns=series.anchor_wall_ns + offset_ns,
        phase_names=series.phase_names,
        state="running" if unknown else series.state,
        live_phase=series.live_phase,
        live_since_ns=series.live_since_ns,
        live_step=0,
        hook_failures=series.hook_failures,
        ended_wall_ns=None if series.ended_wall_ns is None else series.ended_wall_ns + offset_ns,
        facts=series.facts,
        groups=series.groups,
    )


def _joined_series(old: RankSeries, new: RankSeries) -> RankSeries:
    """Append late records; the anchors stay, since a node's clock is not measured better afterwards."""
    return replace(
        new,
        rank=old.rank,
        anchor_mono_ns=old.anchor_mono_ns,
        anchor_wall_ns=old.anchor_wall_ns,
        steps=_joined_steps(old.steps, new.steps),
        lost=old.lost + new.lost,
        torn=old.torn + new.torn,
        comm=joined_rows(old.comm, new.comm),
        collectives=joined_rows(old.collectives, new.collectives),
    )


def _joined_steps(old: RankSteps, new: RankSteps) -> RankSteps:
    both = join_steps([old, new])
    rows = np.unique(both.step, return_index=True)[1]
    return both.part(rows, np.array([0, len(rows)], np.intp)).rank(0)
