"""The reading end of the ring; lives in the agent and in whoever opens a run whose agent died."""

from __future__ import annotations

import mmap
import zlib
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import RingForeign, RingVersion
from stepscope.records.identity import RankIdentity
from stepscope.records.phases import BUILTIN_PHASES, PHASE_SLOTS
from stepscope.records.slot import SLOT_BYTES, SLOT_HEAD
from stepscope.ring.layout import (
    FIXED,
    HEAD_WORD,
    HEADER_BYTES,
    HOOK_FAILURES_WORD,
    IDENTITY_HEAD,
    IDENTITY_OFFSET,
    LIVE_SHIFT,
    LIVE_STEP_WORD,
    LIVE_WORD,
    MAGIC,
    NAME_BYTES,
    NAMES_OFFSET,
    STATE_WORD,
    VERSION,
    RingState,
)

__all__ = ["RingBatch", "RingHeader", "RingReader"]

MAX_SLOTS = 1 << 24
"""A slot count above this is garbage, not a ring."""
MAX_PID = 1 << 31


@dataclass(frozen=True, kw_only=True)
class RingHeader:
    """The header as it stood at one instant."""

    pid: int
    start_ticks: int
    anchor_mono_ns: int
    anchor_wall_ns: int
    head: int
    state: RingState
    live_phase: int
    live_since_ns: int
    live_step: int
    hook_failures: int
    phase_names: tuple[str, ...]
    identity: RankIdentity


@dataclass(frozen=True, kw_only=True)
class RingBatch:
    """Whole slots in order of seq, and what could not be had."""

    slots: list[bytes]
    last_seq: int
    """Give this to the next ``read``."""
    lost: int
    """Overwritten before this read."""
    torn: int
    """Given up as unreadable."""


class RingReader:
    """Read a ring while its writer goes on, or after it died.

    A slot whose checksum is wrong is either being written right now or damaged.  The reader stops in front of it and
    tries again on the next ``read``; once it has stood in the way ``PATIENCE`` times it is counted as torn and passed.
    """

    PATIENCE = 3

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            head = file.read(FIXED.size)
            if len(head) < FIXED.size or not head.startswith(MAGIC):
                raise RingForeign(f"{path} is not a ring (or not yet one)")
            _, version, header_bytes, slot_bytes, slots, *about = FIXED.unpack(head)
            self._pid, self._ticks, self._mono, self._wall = about
            if version != VERSION:
                raise RingVersion(f"{path} has ring layout {version}; this Stepscope reads layout {VERSION}")
            sizes = (header_bytes, slot_bytes)
            if sizes != (HEADER_BYTES, SLOT_BYTES) or not 0 < slots <= MAX_SLOTS or self._pid >= MAX_PID:
                raise RingForeign(f"{path} has a damaged header")
            size = HEADER_BYTES + slots * SLOT_BYTES
            if file.seek(0, 2) < size:
                raise RingForeign(f"{path} is cut off")
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self._slots: int = slots
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self._stuck_at = 0
        self._stuck_times = 0
        self._identity = RankIdentity(host="", pid=self._pid)

    def header(self) -> RingHeader:
        words = self._words
        state, live = words[STATE_WORD], words[LIVE_WORD]
        return RingHeader(
            pid=self._pid,
            start_ticks=self._ticks,
            anchor_mono_ns=self._mono,
            anchor_wall_ns=self._wall,
            head=words[HEAD_WORD],
            state=RingState(state) if state in RingState._value2member_map_ else RingState.RUNNING,
            live_phase=live % PHASE_SLOTS,
            live_since_ns=live >> LIVE_SHIFT,
            live_step=words[LIVE_STEP_WORD],
            hook_failures=words[HOOK_FAILURES_WORD],
            phase_names=self._phase_names(),
            identity=self._read_identity(),
        )

    @property
    def slot_count(self) -> int:
        """How many slots the ring holds; a writer further ahead than this overwrites what was not read."""
        return self._slots

    def head(self) -> int:
        """The seq of the newest slot, without the cost of a whole ``header()``."""
        head: int = self._words[HEAD_WORD]
        return head

    def read(self, after: int, *, limit: int = 1 << 16) -> RingBatch:
        """All whole slots with a seq above ``after``, at most ``limit`` of them.

        A whole slot right after the head counts too: its writer was stopped, perhaps for ever, between writing the
        slot and moving the head.
        """
        head = self._words[HEAD_WORD]
        seq = max(after + 1, head - self._slots + 1)
        lost = seq - (after + 1)
        torn = 0
        slots: list[bytes] = []
        while len(slots) < limit:
            at = HEADER_BYTES + ((seq - 1) % self._slots) * SLOT_BYTES
            slot = self._map[at : at + SLOT_BYTES]
            crc, _, _, found = SLOT_HEAD.unpack_from(slot)
            whole = found >= seq and crc == zlib.crc32(memoryview(slot)[4:])
            if whole and found == seq:
                slots.append(slot)
            elif seq > head:
                break
            elif whole:
                lost += 1  # the writer lapped us between reading its head and this slot
            elif self._lose_patience(seq):
                torn += 1
            else:
                break
            seq += 1
        return RingBatch(slots=slots, last_seq=seq - 1, lost=lost, torn=torn)

    def close(self) -> None:
        self._words.release()
        self._map.close()

    def _lose_patience(self, seq: int) -> bool:
        self._stuck_times = self._stuck_times + 1 if seq == self._stuck_at else 1
        self._stuck_at = seq
        return self._stuck_times >= self.PATIENCE

    def _phase_names(self) -> tuple[str, ...]:
        user = (
            self._map[at : at + NAME_BYTES].rstrip(b"\0").decode(errors="replace")
            for at in range(NAMES_OFFSET, NAMES_OFFSET + (PHASE_SLOTS - len(BUILTIN_PHASES)) * NAME_BYTES, NAME_BYTES)
        )
        return (*BUILTIN_PHASES, *user)

    def _read_identity(self) -> RankIdentity:
        """The identity; while it is being rewritten, the last one that was whole."""
        length, crc = IDENTITY_HEAD.unpack_from(self._map, IDENTITY_OFFSET)
        at = IDENTITY_OFFSET + IDENTITY_HEAD.size
        text = self._map[at : min(at + length, HEADER_BYTES)]
        if zlib.crc32(text) == crc:
            try:
                self._identity = RankIdentity.from_json(text)
            except (ValueError, RecursionError):
                pass  # a foreign identity under a right checksum: keep what we have
        return self._identity
