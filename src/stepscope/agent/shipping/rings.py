"""One ring of a run directory, seen from the hub: who it is, where it is, and the records that the hub misses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from stepscope.records.series import RankState
from stepscope.records.slot import SLOT_BYTES, SLOT_HEAD
from stepscope.store.paths import segment_path, sidecar_path
from stepscope.store.segments import SegmentPart, parts_from
from stepscope.store.sidecar import RingSidecar, guess_sidecar
from stepscope.wire.blocks import RingRows, ring_id
from stepscope.wire.limits import LINES_BYTES

__all__ = ["Ring", "RingClaim", "Whereabouts"]

LIVE = ("live_phase", "live_since_ns", "live_step", "heard_wall_ns")
"""What of a sidecar changes all the time; the first three go with every block."""
STATES = get_args(RankState)

Whereabouts = tuple[int, int, int, int]
"""Step, since when, phase, state."""


@dataclass(frozen=True, kw_only=True)
class RingClaim:
    """What the hub knows of a ring when it has the batch."""

    after_seq: int
    offset: int
    told: bytes
    live: Whereabouts | None


class Ring:
    def __init__(self, run_dir: Path, key: str, after_seq: int) -> None:
        """The hub has its records up to ``after_seq``; who it is, is told once more."""
        self.key = key
        self.about: Mapping[str, Any] | None = None
        """The sidecar as a dictionary."""
        self._segment = segment_path(run_dir, key)
        self._sidecar = sidecar_path(run_dir, key)
        self._id = ring_id(key)
        self._stamp: tuple[int, int] | None = None
        self._lasting = b""
        self._entire = b""
        self._live: Whereabouts | None = None
        self._has = RingClaim(after_seq=after_seq, offset=0, told=b"", live=None)

    def look(self, *, final: bool) -> None:
        """Read the sidecar if it is another.  Without one there is nobody to tell of; in the end its name must do."""
        try:
            status = self._sidecar.stat()
            if (status.st_mtime_ns, status.st_ino) == self._stamp:
                return
            raw = json.loads(self._sidecar.read_bytes())
            known = RingSidecar.from_dict(raw)
            self._stamp = (status.st_mtime_ns, status.st_ino)
        except (FileNotFoundError, ValueError, RecursionError):
            if self.about is not None or not final or self._has.after_seq or not self.behind_bytes():
                return
            known = guess_sidecar(self.key)
            raw = known.to_dict()
        if known.key == self.key:
            self._keep(raw, known)

    def news(self, *, final: bool) -> bool:
        """Whether the hub does not know yet who this is."""
        return self.about is not None and self._has.told != self._to_tell(final)

    def told(self, *, final: bool) -> RingClaim:
        """What the hub will know when it has the sidecar."""
        return replace(self._has, told=self._to_tell(final))

    @property
    def known(self) -> bool:
        return bool(self._has.told)

    def behind_bytes(self, offset: int | None = None) -> int:
        """Of the segment, what was not sent, or lies after ``offset``."""
        try:
            return max(0, self._segment.stat().st_size - (self._has.offset if offset is None else offset))
        except FileNotFoundError:
            return 0

    def rows(self, claim: RingClaim | None, *, most: int) -> tuple[RingRows, RingClaim] | None:
        """About ``most`` records that the hub misses, and where the ring is; None when it knows both.

        ``claim`` is what the batch says of the ring already.
        """
        has, parts, offset = self._has, list[SegmentPart](), self._has.offset
        if self.behind_bytes():
            parts, offset = parts_from(self._segment, offset, after_seq=has.after_seq, most_slots=most)
        if not parts:
            self._has = replace(has, offset=offset)  # what was passed is at the hub
            if self._live in (None, has.live):
                return None
        slots = [slot for part in parts for slot in _slots(part, has.after_seq)]
        fresh = [part for part in parts if part.first_seq > has.after_seq]
        step, since_ns, phase, state = self._live or (0, 0, 0, 0)
        last_seq = parts[-1].last_seq if parts else has.after_seq
        rows = RingRows(
            ring=self._id,
            after_seq=has.after_seq,
            last_seq=last_seq,
            slots=slots,
            lost=sum(part.lost for part in fresh),
            torn=sum(part.torn for part in fresh),
            live_step=step,
            live_since_ns=since_ns,
            live_phase=phase,
            state=state,
        )
        told = claim.told if claim is not None else has.told
        return rows, RingClaim(after_seq=last_seq, offset=offset, told=told, live=self._live)

    def take(self, claim: RingClaim) -> None:
        """The hub has it."""
        self._has = claim

    def _keep(self, raw: dict[str, Any], known: RingSidecar) -> None:
        entire = json.dumps(raw)
        if len(entire) > LINES_BYTES // 2:
            raw = {**raw, "groups": [], "facts": {}}  # too much for a part; who it is matters more
            entire = json.dumps(raw)
        self.about = raw
        self._entire = _digest(entire)
        self._lasting = _digest(json.dumps({name: value for name, value in raw.items() if name not in LIVE}))
        self._live = (known.live_step, known.live_since_ns, known.live_phase, STATES.index(known.state))

    def _to_tell(self, final: bool) -> bytes:
        return self._entire if final else self._lasting


def _slots(part: SegmentPart, after_seq: int) -> list[bytes]:
    """Those that come after; of a frame that the hub has a part of, the rest."""
    slots = [part.slots[at : at + SLOT_BYTES] for at in range(0, len(part.slots), SLOT_BYTES)]
    if part.first_seq > after_seq:
        return slots
    return [slot for slot in slots if SLOT_HEAD.unpack_from(slot)[3] > after_seq]


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
