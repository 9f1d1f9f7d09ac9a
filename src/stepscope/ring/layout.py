"""The byte layout of a ring file: a header page, then ``capacity`` words (see "Words" below).

    0     8s   magic  b"STEPRING"
    8     u32  version, u32 header_bytes
    16    u64  capacity         words after the header
    24    u64  pid
    32    u64  start time of the process in clock ticks since boot (detects a reused pid), 0 if unknown
    40    u64  anchor_mono_ns   the same instant on the monotonic clock …
    48    u64  anchor_wall_ns   … and on the wall clock
    56    u64  head             how many words were ever written, as last announced; word n is at n % capacity
    64    u64  state            RingState
    72    u64  hook_failures    Stepscope errors that the guard swallowed
    80    u64  trains           faulthandler's number for the thread that trains; 0: the main thread
    88    u64  workers          like running, for a forked DataLoader worker instead of this process, to PID.workers
    96    u64  running          like stacks, for a main thread that is not waiting in the kernel; dumps the training one
    104   u64  server           1 while torch's worker server listens at PID.sock next to the ring
    112   u64  threads          like stacks, but for all threads, to PID.threads
    120   u64  stacks           0, or a signal that makes the process write its stack to PID.stacks next to the ring,
                                with the descriptor of that file from bit 8 on
    128   7 x 32s               the user's phase names, utf-8, zero padded
    352   u64  requests         how many requests were put next to the ring; the only word that others write
    512   u32 length, u32 crc, utf-8 JSON of RankIdentity
    2048  u32 length, u32 crc, utf-8 JSON of the facts (``records/identity.py``); zeros until there are any
    4096  u32 length, u32 crc, utf-8 JSON of the process groups (``records/collectives.py``); likewise

All words are little endian, and all but one are written only by the one writer. The head is announced after the last
data word of a step and occasionally within a long step, but never between the end of a step and its data words. There
may be time words beyond the head already: they show where the process is now.

The file's space is reserved before it is mapped: a full file system is an error at creation, never a SIGBUS later.
"""

from __future__ import annotations

import enum
import struct

from stepscope.records.collectives import MAX_GROUPS

__all__ = [
    "ALLOCATED",
    "ANY_PEER",
    "ASYNC_BIT",
    "BLOCK_HEAD",
    "CODE_MASK",
    "COLLECTIVE",
    "COLLECTIVE_DATA",
    "DATA",
    "DDP_COMM",
    "DDP_COMPUTE",
    "DDP_EXPOSED",
    "DDP_SAMPLED_COMPUTE",
    "DEFAULT_CAPACITY",
    "DEVICE_PHASE",
    "DEVICE_STEP",
    "ENTER",
    "FACTS_BYTES",
    "FACTS_OFFSET",
    "FIXED",
    "GROUPS_BYTES",
    "GROUPS_OFFSET",
    "GROUP_SHIFT",
    "HEADER_BYTES",
    "HEAD_WORD",
    "HOOK_FAILURES_WORD",
    "IDENTITY_BYTES",
    "IDENTITY_OFFSET",
    "MAGIC",
    "MIN_CAPACITY",
    "NAMES_OFFSET",
    "NAME_BYTES",
    "NOTE_TEXT",
    "OP_SHIFT",
    "PEAK_ALLOCATED",
    "PEER",
    "REQUESTS_WORD",
    "RESERVED",
    "RESERVE_WORDS",
    "RUNNING_WORD",
    "SERVER_WORD",
    "SIZE_MASK",
    "STACKS_FD_SHIFT",
    "STACKS_WORD",
    "START",
    "STATE_WORD",
    "STEP_ABOUT",
    "STEP_DATA",
    "STEP_END",
    "TAG_MASK",
    "TAG_SHIFT",
    "TEXT",
    "TEXT_BYTES",
    "THREADS_WORD",
    "TIME_SHIFT",
    "TRAINS_WORD",
    "TURN_WORDS",
    "VALUE_MASK",
    "VERSION",
    "WAIT",
    "WAIT_DATA",
    "WORD_BYTES",
    "WORKERS_WORD",
    "WRAP",
    "RingState",
    "collective_fields",
    "data_word",
    "note_words",
]


# -- Header -----------------------------------------------------------------------------------------------------------

MAGIC = b"STEPRING"
VERSION = 2
HEADER_BYTES = 8192
WORD_BYTES = 8
MIN_CAPACITY = 1 << 12
DEFAULT_CAPACITY = 1 << 18
"""2 MiB per rank, about 26,000 steps of an ordinary loop. The agent reads five times a second."""
TURN_WORDS = 256
"""Within a long step, the head is announced after this many words."""
RESERVE_WORDS = 4 * TURN_WORDS
"""With less room than this at the end of a round, the writer continues at the beginning."""

FIXED = struct.Struct("<8s2I5Q")
"""magic, version, header_bytes, capacity, pid, start ticks, anchor_mono_ns, anchor_wall_ns."""

HEAD_WORD = 7
STATE_WORD = 8
HOOK_FAILURES_WORD = 9
TRAINS_WORD = 10
WORKERS_WORD = 11
RUNNING_WORD = 12
SERVER_WORD = 13
THREADS_WORD = 14
STACKS_WORD = 15
STACKS_FD_SHIFT = 8
REQUESTS_WORD = 44
"""In the gap after the names of phases, on a separate cache line."""

NAMES_OFFSET = 128
NAME_BYTES = 32
IDENTITY_OFFSET = 512
FACTS_OFFSET = 2048
GROUPS_OFFSET = 4096
BLOCK_HEAD = struct.Struct("<II")
"""Length and crc of the text that follows, so that a reader detects an unfinished rewrite."""
IDENTITY_BYTES = FACTS_OFFSET - IDENTITY_OFFSET - BLOCK_HEAD.size
FACTS_BYTES = GROUPS_OFFSET - FACTS_OFFSET - BLOCK_HEAD.size
GROUPS_BYTES = HEADER_BYTES - GROUPS_OFFSET - BLOCK_HEAD.size
"""The maximum lengths of the texts."""


class RingState(enum.IntEnum):
    STARTING = 0
    RUNNING = 1
    EXITED = 2
    """The interpreter shut down normally."""
    EXCEPTION = 3
    """An uncaught exception ended it."""


# -- Words ------------------------------------------------------------------------------------------------------------
# A ring's stream consists of 64-bit words that the training process writes one at a time.
#
#     bit 63 clear   a time word: monotonic nanoseconds << 5 | code
#                      code 0 … 15    at that instant the process returned to this phase from an inner one
#                      code 16        at that instant a step ended; its data words follow
#                      code 17 … 31   at that instant the process entered the phase code - 16
#     bit 63 set     a data word: tag in bits 55 … 62, value in bits 0 … 54
#
# Data words directly follow the end of a step and describe it: STEP_ABOUT always and first, then what else is known.
# START says that the next time word begins the recording instead of changing a phase. DEVICE_STEP and its DEVICE_PHASE
# words are one record of an earlier step. NOTE_TEXT is followed by as many TEXT words as its bytes need, six bytes in
# each. WRAP says that nothing more follows in this round of the ring.
#
# COLLECTIVE precedes the time word of the instant at which a collective was called (for a send or recv, PEER comes in
# between). With a code up to 15, that time word is only the instant, whatever its phase. WAIT precedes the time word
# that starts a wait for a collective; for a blocking call the two time words are the same. These words may appear
# anywhere within a step.
#
# Time only grows, so a word left over from the previous round is older than its predecessor and is recognized.

TIME_SHIFT = 5
CODE_MASK = 31
ENTER = 16
"""Added to a phase's slot when the phase is entered."""
STEP_END = ENTER
"""``other`` is the remainder and is never entered, so its code is free."""

DATA = 1 << 63
TAG_SHIFT = 55
TAG_MASK = 0xFF
VALUE_MASK = (1 << TAG_SHIFT) - 1

START = 1
STEP_ABOUT = 2
"""step << 20 | continuing phase << 16 | flags."""
DDP_COMPUTE = 3
DDP_COMM = 4
ALLOCATED = 5
RESERVED = 6
PEAK_ALLOCATED = 7
DEVICE_STEP = 8
NOTE_TEXT = 9
"""step << 16 | bytes of text."""
TEXT = 10
WRAP = 11
DDP_SAMPLED_COMPUTE = 12
"""Like DDP_COMPUTE, but of an earlier step and on the device clock: do not subtract it from this step's backward."""
COLLECTIVE = 13
"""op << 50 | group << 44 | async << 43 | bytes. The next time word, possibly of the current phase, is the call."""
PEER = 14
"""For a send or recv just called: the other rank (global), or ANY_PEER."""
WAIT = 15
"""How many collectives were called after the one that is waited for: 0 for the last one called."""
DDP_EXPOSED = 32
"""How long the exchange of gradients outlasted computing them, for the previous step, like DDP_COMPUTE."""
STEP_DATA = DATA | STEP_ABOUT << TAG_SHIFT
DEVICE_PHASE = 16
"""Plus the slot: 16 … 31. The value is in nanoseconds."""

TEXT_BYTES = 6


COLLECTIVE_DATA = DATA | COLLECTIVE << TAG_SHIFT
WAIT_DATA = DATA | WAIT << TAG_SHIFT
OP_SHIFT = 50
GROUP_SHIFT = 44
ASYNC_BIT = 1 << 43
SIZE_MASK = ASYNC_BIT - 1
ANY_PEER = VALUE_MASK


def data_word(tag: int, value: int) -> int:
    return DATA | tag << TAG_SHIFT | min(value, VALUE_MASK)


def collective_fields(value: int) -> tuple[int, int, int]:
    """Return operation, group and bytes from the value of a COLLECTIVE word."""
    return value >> OP_SHIFT, value >> GROUP_SHIFT & (MAX_GROUPS - 1), value & SIZE_MASK


def note_words(step: int, text: bytes) -> list[int]:
    pieces = (text[at : at + TEXT_BYTES] for at in range(0, len(text), TEXT_BYTES))
    words = [data_word(TEXT, int.from_bytes(piece.ljust(TEXT_BYTES, b"\0"), "little")) for piece in pieces]
    return [data_word(NOTE_TEXT, step << 16 | len(text)), *words]
