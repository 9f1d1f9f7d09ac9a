"""What other nodes sent to a run, put together again: the records of their rings, their events, samples and stacks.

Reads the journals (``store/journal.py``) of a run whose hub may still be writing them.  Every wall clock of a node is
moved onto the hub's by the offset that round trips told; steps are timed by the monotonic clock of their machine, so
only the anchor of a ring has to be moved.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.errors import FrameError
from stepscope.records.series import RankState
from stepscope.records.slot import SLOT_BYTES
from stepscope.store.collect import RingRecords
from stepscope.store.failures import Numbers
from stepscope.store.journal import journal_path, read_journal
from stepscope.store.nodes import NodeInfo, read_nodes
from stepscope.store.parts import part_steps, read_part_steps, rest_path
from stepscope.store.paths import EVENTS, SAMPLES, STACKS
from stepscope.store.positions import Sealed
from stepscope.store.recovery import journals_after
from stepscope.store.sample_parts import sample_parts
from stepscope.store.selection import Choice
from stepscope.store.sidecar import RingSidecar
from stepscope.store.spools import Live, briefly, heard_of, live_of
from stepscope.store.stacks import checked_stacks
from stepscope.store.taken import unpack_block
from stepscope.wire.blocks import ring_id
from stepscope.wire.frames import Frame, Part, inflate_part, read_frame

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Remote", "RemoteLines", "read_remote", "shifted"]

_STATES: tuple[RankState, ...] = ("starting", "running", "exited", "exception")
"""By the number that a ring's header has for it."""


@dataclass(kw_only=True)
class RemoteLines:
    """The lines of one node, already on the hub's clock."""

    host: str
    records: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {EVENTS: [], SAMPLES: [], STACKS: []})
    """By file."""
    bad: int = 0
    """Lines that are none."""


@dataclass(kw_only=True)
class Remote:
    nodes: list[NodeInfo]
    """Everybody who sent or joined, as far as known."""
    rings: list[RingRecords] = field(default_factory=list)
    whose: list[tuple[str, bytes]] = field(default_factory=list)
    """Of each ring, the spool and its ``ring_id``."""
    lines: list[RemoteLines] = field(default_factory=list)
    unreadable: int = 0
    """Frames of another version, or damaged."""
    reduced: tuple[str, ...] = ()
    """That not all of it was read, if so."""

    def records(self, file: str) -> list[dict[str, Any]]:
        """All nodes' lines of a file, node by node."""
        return [record for lines in self.lines for record in lines.records[file]]

    def notices(self, bad_stacks: int) -> list[str]:
        """What of it could not be read."""
        said = []
        if self.unreadable:
            said.append(f"{self.unreadable:,} frames of other nodes could not be read.")
        if bad := bad_stacks + sum(lines.bad for lines in self.lines):
            said.append(f"{bad:,} lines of other nodes could not be read.")
        return said

    def stacks(self, numbers: Numbers) -> tuple[list[dict[str, Any]], int]:
        """All nodes' stacks under the ranks that are shown, and how many lines were none."""
        found: list[dict[str, Any]] = []
        bad = 0
        for lines in self.lines:
            own, none = checked_stacks(lines.records[STACKS], numbers.on(lines.host))
            found += own
            bad += none
        return found, bad


@dataclass(kw_only=True)
class _Ring:
    """One ring while the frames are gone through."""

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
    sealed: Sealed,
    *,
    lost: Callable[[NodeInfo], bool],
    known: Mapping[tuple[str, bytes], RingSidecar] | None = None,
    choice: Choice | None = None,
    nothing: bool = False,
) -> Remote:
    """Everything in parts and journals.  FileNotFoundError when it was sealed under our eyes.

    ``lost``: whether a node that never said goodbye is gone.  ``known``: who a ring is that said so before what is
    here.  ``choice``: the rings to read, where there are too many.  ``nothing``: only who the nodes are.
    """
    chosen = None if choice is None else choice.rings
    senders = {node.spool: _Sender(info=node, chosen=_chosen(chosen, node.spool)) for node in read_nodes(run_dir)}
    for (spool, ident), about in (known or {}).items():
        if spool in senders:
            senders[spool].rings[ident] = _Ring(about=about)
    files = [one.path(run_dir) for one in sample_parts(run_dir, sealed.parts)]
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


def _take_parts(run_dir: Path, sealed: Sealed, senders: Mapping[str, _Sender]) -> None:
    """The steps in parts go before those in journals; where a ring was, only the positions know by now."""
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
    """An instant of a node's wall clock on the hub's; 0 is no instant."""
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
    """``nodes.json`` is written now and then; what the frames say is as new as it gets."""
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
    for key, heard, raw in briefly(part):
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
                raise FrameError("who a ring is cannot be read") from error


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
        ended_ns = node.heard_wall_ns or None  # by the hub's clock: until then at least its node was there
    about = replace(
        about,
        anchor_wall_ns=shifted(about.anchor_wall_ns, node.offset_ns),
        heard_wall_ns=shifted(about.heard_wall_ns, node.offset_ns),
        ended_wall_ns=ended_ns,
    )
    return RingRecords(about=about, slots=slots, lost=ring.lost, torn=ring.torn)


def _decoded(node: NodeInfo, lines: Mapping[str, Iterable[bytes]]) -> RemoteLines:
    found = RemoteLines(host=node.host)
    for name, texts in lines.items():
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
