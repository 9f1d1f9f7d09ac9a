"""Write a ring; runs in the training process.

Not thread safe and not fork safe: only one thread of one process may write. The recorder ensures both.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepscope.errors import RingNoSpace
from stepscope.records import run_clock
from stepscope.records.collectives import ProcessGroup, groups_to_json
from stepscope.records.identity import RankIdentity, pack_facts
from stepscope.records.run_clock import process_start_ticks
from stepscope.records.steps import FIRST_USER_SLOT, PHASE_SLOTS
from stepscope.ring.layout import (
    BLOCK_HEAD,
    DEFAULT_CAPACITY,
    FACTS_BYTES,
    FACTS_OFFSET,
    FIXED,
    GROUPS_BYTES,
    GROUPS_OFFSET,
    HEADER_BYTES,
    IDENTITY_BYTES,
    IDENTITY_OFFSET,
    MAGIC,
    NAME_BYTES,
    NAMES_OFFSET,
    STATE_WORD,
    VERSION,
    WORD_BYTES,
    RingState,
)

__all__ = ["RingWriter"]

SCRIPT_CHARS = 128
"""How much to keep of a script path that does not fit into the header."""


class RingWriter:
    """A ring file and its header.

    ``header`` and ``body`` are its two parts as 64-bit words. The recorder's ledger fills ``body`` and announces the
    head: it is the hottest code in Stepscope and writes directly into them.
    """

    def __init__(self, path: Path, identity: RankIdentity, *, capacity: int = DEFAULT_CAPACITY) -> None:
        """Create the file; raise RingNoSpace if it cannot be created or its bytes cannot be reserved."""
        if sys.byteorder != "little":
            raise RingNoSpace("rings need a little-endian machine")
        size = HEADER_BYTES + capacity * WORD_BYTES
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RingNoSpace(f"cannot create {path}: {error.strerror}") from error
        try:
            _reserve(fd, size)
            # Populate the pages now, not in the first steps: a page fault in the middle of training costs microseconds.
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            path.unlink()
            raise RingNoSpace(f"cannot reserve {size:,} bytes at {path}: {error.strerror}") from error
        finally:
            os.close(fd)
        self.path = path
        self.capacity = capacity
        self.header = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self.body = memoryview(self._map)[HEADER_BYTES:].cast("Q")
        self.set_identity(identity)
        fixed = (VERSION, HEADER_BYTES, capacity, identity.pid, process_start_ticks(identity.pid))
        # Write the magic last: readers ignore the file until it is there.
        self._map[8 : FIXED.size] = FIXED.pack(MAGIC, *fixed, time.perf_counter_ns(), run_clock.wall_ns())[8:]
        self._map[:8] = MAGIC

    def set_identity(self, identity: RankIdentity) -> None:
        text = identity.to_json()
        if len(text) > IDENTITY_BYTES:
            # Only a path can be that long, and its end says more than its beginning.
            text = replace(identity, script=identity.script[-SCRIPT_CHARS:]).to_json()
        self._set_block(IDENTITY_OFFSET, text)

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        self._set_block(FACTS_OFFSET, pack_facts(facts, FACTS_BYTES))

    def set_groups(self, groups: Sequence[ProcessGroup]) -> None:
        self._set_block(GROUPS_OFFSET, groups_to_json(groups, GROUPS_BYTES))

    def set_phase_name(self, slot: int, name: str) -> None:
        if not FIRST_USER_SLOT <= slot < PHASE_SLOTS:
            raise ValueError(f"slot {slot} is not a user slot")
        at = NAMES_OFFSET + (slot - FIRST_USER_SLOT) * NAME_BYTES
        text = name.encode()[:NAME_BYTES].decode(errors="ignore").encode()
        self._map[at : at + NAME_BYTES] = text.ljust(NAME_BYTES, b"\0")

    def set_state(self, state: RingState) -> None:
        self.header[STATE_WORD] = int(state)

    def _set_block(self, at: int, text: bytes) -> None:
        block = BLOCK_HEAD.pack(len(text), zlib.crc32(text)) + text
        self._map[at : at + len(block)] = block

    def close(self) -> None:
        """Unmap; the file stays for its readers."""
        self.header.release()
        self.body.release()
        self._map.close()


def _reserve(fd: int, size: int) -> None:
    """Make the file system commit to ``size`` bytes: allocate them or, where that is not supported, write them."""
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:
        _reserve_by_writing(fd, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        _reserve_by_writing(fd, size)


def _reserve_by_writing(fd: int, size: int) -> None:
    zeros = bytes(1 << 16)
    left = size
    while left:
        left -= os.write(fd, zeros[: min(left, len(zeros))])
