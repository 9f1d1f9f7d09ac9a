"""How far the senders of a run came, worked out from what is on disk: what is sealed, then the journals after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import FrameError
from stepscope.store.journal import journal_path, journals, read_journal
from stepscope.store.positions import Sealed, read_positions
from stepscope.store.spools import Spool, take_journalled
from stepscope.wire.frames import FrameHead, read_frame

__all__ = ["Recovered", "journals_after", "recover", "unsealed_bytes"]

_TRIES = 20


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
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # a helper of a hub that was killed made a part of it meanwhile
            return _recover(run_dir, heard)
    return _recover(run_dir, heard)


def journals_after(run_dir: Path, sealed: Sealed) -> list[int]:
    """The journals behind what is sealed.  FileNotFoundError when one more was sealed, and removed, meanwhile.

    Without that look a journal that just became a part would be in neither.
    """
    numbers = journals(run_dir, after=sealed.through)
    if read_positions(run_dir).through != sealed.through:
        raise FileNotFoundError(f"a journal of {run_dir} was sealed meanwhile")
    return numbers


def _recover(run_dir: Path, heard: Callable[[FrameHead, int], None]) -> Recovered:
    sealed = read_positions(run_dir)
    spools = dict(sealed.spools)
    last, end = sealed.through + 1, 0
    for last in journals_after(run_dir, sealed):
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
