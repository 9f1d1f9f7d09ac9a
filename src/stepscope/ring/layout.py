"""The byte layout of a ring file: a header page, then ``capacity`` words (``ring/words.py``).

    0     8s   magic  b"STEPRING"
    8     u32  version, u32 header_bytes
    16    u64  capacity         words after the header
    24    u64  pid
    32    u64  start time of the process in clock ticks since boot (tells a reused pid), 0 if unknown
    40    u64  anchor_mono_ns   the same instant on the monotonic clock …
    48    u64  anchor_wall_ns   … and on the wall clock
    56    u64  head             how many words were ever written, as last announced; word n stands at n % capacity
    64    u64  state            RingState
    72    u64  hook_failures    errors of ours that the guard swallowed
    80    u64  trains           the thread that trains, by the number that faulthandler gives it; 0: the main one
    96    u64  running          as stacks, for a main thread that is not waiting in the kernel; of the one that trains
    104   u64  server           1 while torch's worker server listens at PID.sock beside the ring
    112   u64  threads          as stacks, but of all threads, to PID.threads
    120   u64  stacks           0, or a signal that makes the process write its stack to PID.stacks beside the ring,
                                with the descriptor of that file from bit 8 on
    128   7 x 32s               the user's phase names, utf-8, zero padded
    512   u32 length, u32 crc, utf-8 JSON of RankIdentity
    2048  u32 length, u32 crc, utf-8 JSON of the facts (``records/facts.py``); zeros until there are any
    4096  u32 length, u32 crc, utf-8 JSON of the process groups (``records/collectives.py``); likewise

All words are little endian and written by the one writer only.  The head is announced after the last data word of a
step, and now and then within a long step, but never between the end of a step and its data words.  Beyond the head
there may be time words already: they show where the process is now.

The file's space is reserved before it is mapped: a full file system is an error at creation, never a SIGBUS later.
"""

from __future__ import annotations

import enum
import struct

__all__ = [
    "BLOCK_HEAD",
    "DEFAULT_CAPACITY",
    "FACTS_BYTES",
    "FACTS_OFFSET",
    "FIXED",
    "GROUPS_BYTES",
    "GROUPS_OFFSET",
    "HEADER_BYTES",
    "HEAD_WORD",
    "HOOK_FAILURES_WORD",
    "IDENTITY_BYTES",
    "IDENTITY_OFFSET",
    "MAGIC",
    "MIN_CAPACITY",
    "NAMES_OFFSET",
    "NAME_BYTES",
    "RESERVE_WORDS",
    "RUNNING_WORD",
    "SERVER_WORD",
    "STACKS_FD_SHIFT",
    "STACKS_WORD",
    "STATE_WORD",
    "THREADS_WORD",
    "TRAINS_WORD",
    "TURN_WORDS",
    "VERSION",
    "WORD_BYTES",
    "RingState",
]

MAGIC = b"STEPRING"
VERSION = 2
HEADER_BYTES = 8192
WORD_BYTES = 8
MIN_CAPACITY = 1 << 12
DEFAULT_CAPACITY = 1 << 18
"""2 MiB per rank: about 26,000 steps of an ordinary loop; the agent looks five times a second."""
TURN_WORDS = 256
"""Within a long step the head is announced after so many words."""
RESERVE_WORDS = 4 * TURN_WORDS
"""With less room than this at the end of a round the writer goes on at the beginning."""

FIXED = struct.Struct("<8s2I5Q")
"""magic, version, header_bytes, capacity, pid, start ticks, anchor_mono_ns, anchor_wall_ns."""

HEAD_WORD = 7
STATE_WORD = 8
HOOK_FAILURES_WORD = 9
TRAINS_WORD = 10
RUNNING_WORD = 12
SERVER_WORD = 13
THREADS_WORD = 14
STACKS_WORD = 15
STACKS_FD_SHIFT = 8

NAMES_OFFSET = 128
NAME_BYTES = 32
IDENTITY_OFFSET = 512
FACTS_OFFSET = 2048
GROUPS_OFFSET = 4096
BLOCK_HEAD = struct.Struct("<II")
"""Length and crc of the text that follows: one that is being rewritten is recognised."""
IDENTITY_BYTES = FACTS_OFFSET - IDENTITY_OFFSET - BLOCK_HEAD.size
FACTS_BYTES = GROUPS_OFFSET - FACTS_OFFSET - BLOCK_HEAD.size
GROUPS_BYTES = HEADER_BYTES - GROUPS_OFFSET - BLOCK_HEAD.size
"""The longest texts that fit."""


class RingState(enum.IntEnum):
    STARTING = 0
    RUNNING = 1
    EXITED = 2
    """The interpreter shut down in order."""
    EXCEPTION = 3
    """An uncaught exception ended it."""
