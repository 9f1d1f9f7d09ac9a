"""What the hub has of each sender: how far its rings and files have come.  In memory; the journal is what remembers.

A frame is first compared with this (``compare``), without changing anything: what of it is old, what is new, what is
beyond the next thing to come.  Once the new parts are on disk, ``take`` moves the positions on.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stepscope.errors import FrameError, StepscopeError
from stepscope.store.paths import ring_key
from stepscope.store.sidecar import RingSidecar
from stepscope.store.taken import TakenRows, cut_block, read_table, repack_block, unpack_block
from stepscope.wire.blocks import ring_id
from stepscope.wire.frames import Frame, FrameHead, Part, inflate_part, part_of
from stepscope.wire.joining import Positions

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "LIVE_FIELDS",
    "Compared",
    "Gap",
    "Heard",
    "Live",
    "RingPosition",
    "Spool",
    "briefly",
    "compare",
    "heard_of",
    "live_of",
    "sidecars_of",
    "take",
    "take_journalled",
]

Live = tuple[int, int, int, int, int]
"""How far a ring is: its last sequence number, since when it is in its phase, its state, step, phase.  Only grows."""
Heard = tuple[bool, int]
"""Of a sidecar: whether its process is gone, and when it was written.  The greatest counts."""
LIVE_FIELDS = ("last_seq", "live_since_ns", "state", "live_step", "live_phase")
_NOWHERE: Live = (0, 0, 0, 0, 0)


RINGS = 1 << 14
"""Of one sender; more is no node."""
FILES = 1 << 14


class Gap(StepscopeError):
    """A frame begins beyond what the hub has: the sender goes on from ``positions``."""

    def __init__(self, positions: Positions) -> None:
        super().__init__("a frame begins beyond what was received so far")
        self.positions = positions


@dataclass(slots=True)
class RingPosition:
    key: str
    heard: Heard
    live: Live = _NOWHERE
    number: int = -1
    """What its steps are kept under in parts; -1: there are none yet."""
    shown: tuple[int, int] | None = None
    """Attempt and rank under which its steps were sealed."""


@dataclass(slots=True)
class Spool:
    """One sender."""

    name: str
    rings: dict[bytes, RingPosition] = field(default_factory=dict)
    """By ``ring_id``."""
    files: dict[str, int] = field(default_factory=dict)
    """By name, the bytes of lines and logs."""
    whole: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name, when a whole file was sent, by the sender's clock, and its crc32."""

    def positions(self) -> Positions:
        rings = {ring.key: ring.live[0] for ring in self.rings.values()}
        return Positions(rings=rings, files={**self.files, **{name: crc for name, (_, crc) in self.whole.items()}})


@dataclass(slots=True)
class Compared:
    """A frame against what was there before it."""

    parts: list[Part] = field(default_factory=list)
    """What of it is new, to be kept."""
    cut: bool = False
    """Whether these are not all of the frame's."""
    old_parts: int = 0
    """Parts that were there already, at least in part."""
    rings: list[RingSidecar] = field(default_factory=list)
    blocks: list[TakenRows] = field(default_factory=list)
    lines: dict[str, list[bytes]] = field(default_factory=dict)
    logs: list[tuple[str, int, bytes]] = field(default_factory=list)
    """Name, offset and bytes."""
    whole: list[tuple[str, bytes]] = field(default_factory=list)
    heard: dict[bytes, tuple[str, Heard]] = field(default_factory=dict)
    live: dict[bytes, Live] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)


def compare(spool: Spool, frame: Frame) -> Compared:
    """Gap when something between is missing, FrameError when a part is none; the spool stays as it is."""
    found = Compared()
    for part in frame.parts:
        if part.kind == "rings":
            kept = _rings(spool, found, part)
        elif part.kind == "steps":
            kept = _steps(spool, found, part)
        elif part.kind == "file":
            kept = _whole(spool, found, part, frame.head)
        else:
            kept = _stretch(spool, found, part)
        if kept is not part:
            found.cut = True
            found.old_parts += 1
        if kept is not None:
            found.parts.append(kept)
    if len(spool.files) + len(spool.whole) + len(found.files) + len(found.stamps) > FILES:
        raise FrameError("a node with more files than a node can have")
    return found


def take(spool: Spool, found: Compared) -> None:
    """Now it is there."""
    for ident, (key, heard) in found.heard.items():
        ring = spool.rings.get(ident)
        if ring is None:
            spool.rings[ident] = RingPosition(key, heard)
        else:
            ring.heard = heard
    for ident, live in found.live.items():
        spool.rings[ident].live = live
    spool.files.update(found.files)
    spool.whole.update(found.stamps)


def take_journalled(spool: Spool, frame: Frame, tables: Mapping[int, NDArray[Any]] | None = None) -> None:
    """A frame out of the journal, which holds nothing twice: only how far it reaches is looked at.

    ``tables``: of its blocks, by ``id`` of their parts, from those who unpacked them anyway.
    """
    for part in frame.parts:
        if part.kind == "rings":
            for key, heard, _ in briefly(part):
                ring = spool.rings.setdefault(ring_id(key), RingPosition(key, heard))
                ring.heard = max(ring.heard, heard)
        elif part.kind == "steps":
            for ident, live in live_of(read_table(part.data) if tables is None else tables[id(part)]):
                if ident in spool.rings:
                    spool.rings[ident].live = max(spool.rings[ident].live, live)
        elif part.kind == "file":
            stamp = (frame.head.sent_wall_ns, zlib.crc32(inflate_part(part)))
            spool.whole[part.name] = max(stamp, spool.whole.get(part.name, stamp))
        else:
            spool.files[part.name] = max(part.offset + part.size, spool.files.get(part.name, 0))


@lru_cache(maxsize=1)
def sidecars_of(part: Part) -> tuple[RingSidecar, ...]:
    """FrameError when one of them is none.  The last answer is kept: those who check a frame ask before it is taken."""
    try:
        said = msgspec.json.decode(inflate_part(part))
        if not isinstance(said, list):
            raise FrameError("rings are no list")
        return tuple(RingSidecar.from_dict(raw) for raw in said)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FrameError("who a ring is cannot be read") from error


def briefly(part: Part) -> list[tuple[str, Heard, dict[str, Any]]]:
    """Rings that were checked when they came: the key, when it was heard of, and the rest as it stands there."""
    try:
        return [
            (
                ring_key(raw["identity"]["host"], raw["pid"], raw["anchor_wall_ns"]),
                (raw["ended_wall_ns"] is not None, raw["heard_wall_ns"]),
                raw,
            )
            for raw in msgspec.json.decode(inflate_part(part))
        ]
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError) as error:
        raise FrameError("who a ring is cannot be read") from error


def _rings(spool: Spool, found: Compared, part: Part) -> Part | None:
    new = False
    for about in sidecars_of(part):
        ident, heard = ring_id(about.key), heard_of(about)
        known = found.heard[ident][1] if ident in found.heard else None
        if known is None and ident in spool.rings:
            known = spool.rings[ident].heard
        if known is None or heard > known:
            found.heard[ident] = (about.key, heard)
            found.rings.append(about)
            new = True
    if len(spool.rings) + len(found.heard) > RINGS:
        raise FrameError("a node with more rings than a node can have")
    return part if new else None


def _steps(spool: Spool, found: Compared, part: Part) -> Part | None:
    taken = unpack_block(part.data)
    after: list[int] = []
    keep: list[bool] = []
    whole = True
    columns = (taken.table[name].tolist() for name in ("after_seq", "rows", "lost", "torn"))
    for (ident, live), begin, rows, lost, torn in zip(live_of(taken.table), *columns, strict=True):
        have = found.live.get(ident)
        if have is None:
            ring = spool.rings.get(ident)
            if ring is None and ident not in found.heard:
                raise Gap(spool.positions())
            have = ring.live if ring is not None else _NOWHERE
        if begin > have[0]:
            raise Gap(spool.positions())
        new = live > have if begin == have[0] or not rows else live[0] > have[0]
        if new and begin < have[0]:
            if lost or torn:
                raise Gap(spool.positions())  # how much of what was lost is in what we have, only the sender knows
            whole = False
        if new:
            found.live[ident] = live
        after.append(have[0])
        keep.append(new)
    if not all(keep):
        whole = False
    if whole:
        found.blocks.append(taken)
        return part
    if not any(keep):
        return None
    taken = cut_block(taken, np.array(after, np.uint64), np.array(keep))
    found.blocks.append(taken)
    return part_of("steps", repack_block(taken))


def _stretch(spool: Spool, found: Compared, part: Part) -> Part | None:
    """Lines, or bytes of a log."""
    have = found.files.get(part.name, spool.files.get(part.name, 0))
    if part.offset > have:
        raise Gap(spool.positions())
    if part.offset + part.size <= have:
        return None
    raw = inflate_part(part)
    if part.kind == "lines" and not raw.endswith(b"\n"):
        raise FrameError("lines are cut off")
    kept = part
    if part.offset < have:
        raw = raw[have - part.offset :]
        kept = part_of(part.kind, raw, name=part.name, offset=have)
    found.files[part.name] = have + len(raw)
    if part.kind == "lines":
        found.lines.setdefault(part.name, []).extend(raw[:-1].split(b"\n"))
    else:
        found.logs.append((part.name, have, raw))
    return kept


def _whole(spool: Spool, found: Compared, part: Part, head: FrameHead) -> Part | None:
    """What was sent last counts, even if it comes first."""
    raw = inflate_part(part)
    stamp = (head.sent_wall_ns, zlib.crc32(raw))
    have = found.stamps.get(part.name) or spool.whole.get(part.name)
    if have is not None and (stamp[0] < have[0] or stamp[1] == have[1]):
        return None
    found.stamps[part.name] = stamp
    found.whole.append((part.name, raw))
    return part


def heard_of(about: RingSidecar) -> Heard:
    """To tell which of two sidecars of a ring counts."""
    return about.ended_wall_ns is not None, about.heard_wall_ns


def live_of(table: NDArray[Any]) -> list[tuple[bytes, Live]]:
    """How far each ring of a block is, by its ``ring_id``."""
    ids = table["ring"].tobytes()
    size = table.dtype["ring"].itemsize
    numbers = zip(*(table[name].tolist() for name in LIVE_FIELDS), strict=True)
    return [(ids[i * size : (i + 1) * size], live) for i, live in enumerate(numbers)]
