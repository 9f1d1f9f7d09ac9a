"""The words of which a ring's stream is made: 64 bits each, written one at a time by the training process.

    bit 63 clear   a time word: monotonic nanoseconds << 5 | code
                     code 0 … 15    at that instant the phase became this one again (the inner one was left)
                     code 16        at that instant a step ended; its data words follow
                     code 17 … 31   at that instant the phase code - 16 was entered
    bit 63 set     a data word: tag in bits 55 … 62, value in bits 0 … 54

Data words come right behind the end of a step and speak of it: STEP always and first, then what else is known.  START
says that the next time word begins the record rather than changing a phase.  DEVICE and its DEVICE_PHASE words are one
record of an earlier step; NOTE is followed by as many TEXT words as its bytes need, six bytes in each.  WRAP says that
nothing more follows in this round of the ring.

COLLECTIVE stands before the time word of the instant at which a collective was called (of a send or recv with PEER in
between); with a code up to 15 that word is nothing but the instant, whatever its phase.  WAIT stands before the time
word with which a wait for a collective begins: of a call that blocks these are the same.  They come anywhere within a
step.

Time only grows, so a word left over from the ring's last round is older than the one before it and is recognised.
"""

from __future__ import annotations

from stepscope.records.collectives import MAX_GROUPS

__all__ = [
    "ALLOCATED",
    "ANY_PEER",
    "ASYNC_BIT",
    "CODE_MASK",
    "COLLECTIVE",
    "COLLECTIVE_DATA",
    "DATA",
    "DDP_COMM",
    "DDP_COMPUTE",
    "DDP_EXPOSED",
    "DDP_SAMPLED_COMPUTE",
    "DEVICE_PHASE",
    "DEVICE_STEP",
    "ENTER",
    "GROUP_SHIFT",
    "NOTE_TEXT",
    "OP_SHIFT",
    "PEAK_ALLOCATED",
    "PEER",
    "RESERVED",
    "SIZE_MASK",
    "START",
    "STEP_ABOUT",
    "STEP_DATA",
    "STEP_END",
    "TAG_MASK",
    "TAG_SHIFT",
    "TEXT",
    "TEXT_BYTES",
    "TIME_SHIFT",
    "VALUE_MASK",
    "WAIT",
    "WAIT_DATA",
    "WRAP",
    "collective_fields",
    "data_word",
    "note_words",
]

TIME_SHIFT = 5
CODE_MASK = 31
ENTER = 16
"""Added to a phase's slot when it is entered."""
STEP_END = ENTER
"""``other`` is what is left over and never entered, so its code is free."""

DATA = 1 << 63
TAG_SHIFT = 55
TAG_MASK = 0xFF
VALUE_MASK = (1 << TAG_SHIFT) - 1

START = 1
STEP_ABOUT = 2
"""step << 20 | phase that goes on << 16 | flags."""
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
"""As DDP_COMPUTE, but of some earlier step and on the device's clock: it cannot be taken from this step's backward."""
COLLECTIVE = 13
"""op << 50 | group << 44 | async << 43 | bytes: the next time word (its phase may be the present one) is its call."""
PEER = 14
"""Of a send or recv just called: the other rank (in the world), or ANY_PEER."""
WAIT = 15
"""How many collectives were called since the one that is waited for: 0 for the last one called."""
DDP_EXPOSED = 32
"""How long the exchange of gradients went on when they were all computed; of the step before, like DDP_COMPUTE."""
STEP_DATA = DATA | STEP_ABOUT << TAG_SHIFT
DEVICE_PHASE = 16
"""Plus the slot: 16 … 31; the value is nanoseconds."""

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
    """Operation, group and bytes of a COLLECTIVE word's value."""
    return value >> OP_SHIFT, value >> GROUP_SHIFT & (MAX_GROUPS - 1), value & SIZE_MASK


def note_words(step: int, text: bytes) -> list[int]:
    pieces = (text[at : at + TEXT_BYTES] for at in range(0, len(text), TEXT_BYTES))
    words = [data_word(TEXT, int.from_bytes(piece.ljust(TEXT_BYTES, b"\0"), "little")) for piece in pieces]
    return [data_word(NOTE_TEXT, step << 16 | len(text)), *words]
