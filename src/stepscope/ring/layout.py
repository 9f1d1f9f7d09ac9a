"""The byte layout of a ring file: a header page, then ``slot_count`` slots (``records/slot.py``).

    0     8s   magic  b"STEPRING"
    8     u32  version, u32 header_bytes
    16    u32  slot_bytes, u32 slot_count
    24    u64  pid
    32    u64  start time of the process in clock ticks since boot (tells a reused pid), 0 if unknown
    40    u64  anchor_mono_ns   the same instant on the monotonic clock …
    48    u64  anchor_wall_ns   … and on the wall clock
    56    u64  head             seq of the newest slot; slot of seq s is (s - 1) % slot_count
    64    u64  state            RingState
    72    u64  live             the live word: since when (monotonic ns << 5) the process is in which phase (low 4 bits)
    80    u64  zero
    88    u64  live_step        and in which step
    96    u64  hook_failures    errors of ours that the guard swallowed
    104   u64  last_collective  reserved for communication
    128   7 x 32s               the user's phase names, utf-8, zero padded
    512   u32 length, u32 crc, utf-8 JSON of RankIdentity

All words are little endian and written by the one writer only.  The file's space is reserved before it is mapped, so
a full file system is an error at creation and never a SIGBUS later.
"""

from __future__ import annotations

import enum
import struct

__all__ = [
    "ANCHOR_MONO_WORD",
    "ANCHOR_WALL_WORD",
    "DEFAULT_SLOTS",
    "FIXED",
    "HEADER_BYTES",
    "HEAD_WORD",
    "HOOK_FAILURES_WORD",
    "IDENTITY_HEAD",
    "IDENTITY_OFFSET",
    "LIVE_SHIFT",
    "LIVE_STEP_WORD",
    "LIVE_WORD",
    "MAGIC",
    "NAMES_OFFSET",
    "NAME_BYTES",
    "STATE_WORD",
    "VERSION",
    "RingState",
]

MAGIC = b"STEPRING"
VERSION = 1
HEADER_BYTES = 4096
DEFAULT_SLOTS = 8192
"""2 MiB per rank: 1.6 s at 5,000 steps a second; the agent drains five times a second."""

FIXED = struct.Struct("<8s4I4Q")
"""magic, version, header_bytes, slot_bytes, slot_count, pid, start ticks, anchor_mono_ns, anchor_wall_ns."""

ANCHOR_MONO_WORD = 5
ANCHOR_WALL_WORD = 6
HEAD_WORD = 7
STATE_WORD = 8
LIVE_WORD = 9
LIVE_SHIFT = 5
"""Four bits of phase; the fifth says whether the phase was begun or returned to."""
LIVE_STEP_WORD = 11
HOOK_FAILURES_WORD = 12

NAMES_OFFSET = 128
NAME_BYTES = 32
IDENTITY_OFFSET = 512
IDENTITY_HEAD = struct.Struct("<II")


class RingState(enum.IntEnum):
    STARTING = 0
    RUNNING = 1
    EXITED = 2
    """The interpreter shut down in order."""
    EXCEPTION = 3
    """An uncaught exception ended it."""
