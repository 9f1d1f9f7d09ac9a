"""How far the senders of a run came, worked out from what is on disk: what is sealed, then the journals after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import FrameError
from stepscope.store.journal import journal_path, journals, read_journal
from stepscope.store.positions import Sealed, read_positions
from stepscope.store.spools import Spool, take_journalled
from stepscope.wire.frames import FrameHead, read_frame

__all__ = ["Recovered", "recover", "unsealed_bytes"]


@dataclass(frozen=True, kw_only=True)
class Recovered:
    sealed: Sealed
    spools: dict[str, Spool]
    last: int
    """Number of the journal to go on with …"""
    end: int
    """… and where its last whole record ends."""


def recover(run_dir: Path, heard: Callable[[FrameHead, int], None] = lambda head, wall_ns: None) -> Recovered:
    """``heard`` is told of every frame in the journals, and when it came."""
    sealed = read_positions(run_dir)
    spools = dict(sealed.spools)
    last, end = sealed.through + 1, 0
    for last in journals(run_dir, after=sealed.through):
        end = 0
        for received in read_journal(journal_path(run_dir, last)):
            end = received.end
            try:
                frame = read_frame(received.raw)
                take_journalled(spools.setdefault(frame.head.spool, Spool(frame.head.spool)), frame)
            except FrameError:
                continue  # of another version; it stays for whoever can read it
            heard(frame.head, received.wall_ns)
    return Recovered(sealed=sealed, spools=spools, last=last, end=end)


def unsealed_bytes(run_dir: Path) -> int:
    """What other nodes sent and is in no sealed file yet."""
    numbers = journals(run_dir, after=read_positions(run_dir).through)
    return sum(journal_path(run_dir, number).stat().st_size for number in numbers)
