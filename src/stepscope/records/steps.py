"""The record of a step: its phases, its flags, and the byte layout of the slots it is stored in.

A step's wall-clock time is split over the phase slots exclusively: an instant belongs to one phase, so the slots of a
step always add up to its length.  The first nine are built in; the last seven are for names the user gives.
"""

from __future__ import annotations

import struct

__all__ = [
    "BACKWARD",
    "BUILTIN_PHASES",
    "CHECKPOINT",
    "COLLECTIVE",
    "COLLECTIVE_ENTRIES",
    "COLLECTIVE_ENTRY",
    "COMM",
    "COMM_ENTRIES",
    "COMM_ENTRY",
    "COMM_HOOK_PHASE",
    "COMM_RECORD",
    "COMPUTE_PHASES",
    "DEVICE",
    "DEVICE_FIELDS",
    "DEVICE_SLOT",
    "ENTRIES_HEAD",
    "EVAL",
    "FIRST_USER_SLOT",
    "FLAG_CAPTURED",
    "FLAG_COMPILED",
    "FLAG_DISCOVERY",
    "FLAG_EPOCH_START",
    "FLAG_EXPLICIT",
    "FLAG_FIRST",
    "FLAG_REPLAYED",
    "FLAG_SAMPLED",
    "FLAG_SKIPPED",
    "FORWARD",
    "GRAPH_PHASE",
    "H2D",
    "INPUT",
    "NOTE",
    "NOTE_BYTES",
    "NOTE_SLOT",
    "OPTIMIZER",
    "OTHER",
    "PHASE_SLOTS",
    "SEEN",
    "SLOT_BYTES",
    "SLOT_HEAD",
    "STEP",
    "STEP_FIELDS",
    "STEP_HEAD",
    "STEP_SLOT",
    "shown_name",
]


# -- Phases -----------------------------------------------------------------------------------------------------------

OTHER = 0
"""Time that no hook claims: logging, ``.item()``, metrics, the loop itself."""
INPUT = 1
"""Waiting for the next batch."""
H2D = 2
"""Copying tensors to the device."""
FORWARD = 3
"""Inside the outermost modules called with gradients."""
BACKWARD = 4
"""Inside autograd, except known waits for peers."""
COMM = 5
"""Waiting for peers or the network, not hidden behind compute."""
OPTIMIZER = 6
EVAL = 7
"""Inside the same modules without gradients, and waiting for their input."""
CHECKPOINT = 8
"""Inside ``torch.save`` or distributed checkpointing."""

BUILTIN_PHASES = ("other", "input", "h2d", "forward", "backward", "comm", "optimizer", "eval", "checkpoint")
FIRST_USER_SLOT = len(BUILTIN_PHASES)
PHASE_SLOTS = 16
GRAPH_PHASE = "cuda_graph"
"""Takes a user's slot in processes that replay whole steps as CUDA graphs: forward, backward and optimizer in one."""
COMM_HOOK_PHASE = "comm_hook"
"""Takes a user's slot in processes that give DDP a communication hook: the Python code of that hook."""
COMPUTE_PHASES = ("forward", "backward", "optimizer", GRAPH_PHASE)
"""The phases that training itself consists of."""
RESERVED_NAMES = frozenset({"wall", "work", "rank", "step", "allocated", "reserved", "peak_allocated"})
"""Figures that appear next to the phases in answers, under these names."""


def shown_name(name: str) -> str:
    """The displayed name of a user's phase: ``work`` is another figure already, so ``work_phase``."""
    return f"{name}_phase" if name in RESERVED_NAMES else name


# -- Slot layout ------------------------------------------------------------------------------------------------------
# The byte layout of one stored record: 256 bytes, little endian, for every kind.
#
#     0    u32  zero
#     4    u16  kind       STEP, DEVICE, NOTE, COMM or COLLECTIVE
#     6    u16  flags      see the FLAG_ constants
#     8    u64  seq        where in the ring's stream the record ended: grows from record to record, with gaps; the COMM
#                          and COLLECTIVE records of a step have that of its STEP record
#     16   ...  240 bytes of payload, by kind:
#
#     STEP    step, start_ns, wall_ns                          3 x u64
#             phase_ns[16]                                    16 x u64   host time, exclusive; sums to wall_ns
#             allocated, reserved, peak_allocated              3 x u64   bytes on the device; 0 when not read; the
#                                                                        peak is since the process began
#             micro_batches, forwards                          2 x u32
#             ddp_compute_ns, ddp_comm_ns                      2 x u64   DDP's own last figures, 0 = none
#             batches, zero                                    2 x u32   waits for input: batches, and new iterators
#             between_ns                                           u64   phase_ns[other] before the first phase but comm
#             ddp_exposed_ns                                       u64   the part of ddp_comm_ns after computing
#             16 zero bytes
#     DEVICE  step, wall_ns, phase_ns[16]                     18 x u64   device time between the phase's marks
#     NOTE    step, u16 length, utf-8 JSON                    at most NOTE_BYTES of it
#     COMM    step, count, then ``count`` entries of 32 bytes  at most COMM_ENTRIES; several records if there are more
#               op, group u8; flags u16; count u32; bytes, exposed_ns, span_ns u64
#     COLLECTIVE  step, count, then ``count`` entries of 40 bytes  at most COLLECTIVE_ENTRIES, in order of their calls
#               op, group u8; flags u16; nth u32; bytes, start_ns, exposed_ns, end_ns u64
#
# COMM and COLLECTIVE records of a step follow its STEP record; ``records/collectives.py`` says what their fields mean.
#
# The training process never creates these: it writes single words (``ring/layout.py``), from which a reader of the ring
# builds them (``ring/decoder.py``).
#
# ``STEP_FIELDS`` and ``DEVICE_FIELDS`` describe the same bytes as numpy dtypes, as plain lists: the agent builds
# records without numpy.

SLOT_BYTES = 256

STEP = 1
DEVICE = 2
NOTE = 3
COMM_RECORD = 4
COLLECTIVE = 5

FLAG_COMPILED = 1
"""torch.compile compiled something, or a CUDA graph was captured, during this step."""
FLAG_SKIPPED = 2
"""GradScaler found an overflow and skipped the optimizer."""
FLAG_EPOCH_START = 4
"""A DataLoader iterator was created during this step."""
FLAG_EXPLICIT = 8
"""``stepscope.step()`` set the step's boundaries."""
FLAG_DISCOVERY = 16
"""A search for root modules was active during this step."""
FLAG_FIRST = 32
"""The first step of its process: it begins at the first activity seen, not at the end of another step."""
FLAG_REPLAYED = 64
"""The step was a replay of a CUDA graph: everything in it is one phase, GRAPH_PHASE."""
FLAG_SAMPLED = 128
"""The layers were looked at in this step and not in its neighbors, which makes it longer."""
FLAG_CAPTURED = 256
"""A profiler of Stepscope was starting, running or writing on some rank of the job during this step."""

SLOT_HEAD = struct.Struct("<IHHQ")
"""zero, kind, flags, seq."""

STEP_SLOT = struct.Struct(f"<4xHHQ3Q{PHASE_SLOTS}Q3Q2I2Q2I2Q16x")
DEVICE_SLOT = struct.Struct(f"<4xHHQ2Q{PHASE_SLOTS}Q96x")
STEP_HEAD = struct.Struct("<4xH10x3Q")
"""kind, step, start_ns, wall_ns of a STEP record."""
NOTE_SLOT = struct.Struct("<4xHHQQH230s")
SEEN = "~"
"""Names in a note begin with this if the recorder itself saw the value: the loss, the gradient norm."""
NOTE_BYTES = 230

ENTRIES_HEAD = struct.Struct("<4xHHQQQ")
"""kind, flags, seq, step, count: the beginning of COMM and COLLECTIVE records."""
COMM_ENTRY = struct.Struct("<BBHIQQQ")
COMM_ENTRIES = (SLOT_BYTES - ENTRIES_HEAD.size) // COMM_ENTRY.size
COLLECTIVE_ENTRY = struct.Struct("<BBHIQQQQ")
COLLECTIVE_ENTRIES = (SLOT_BYTES - ENTRIES_HEAD.size) // COLLECTIVE_ENTRY.size

_Fields = list[tuple[str, str] | tuple[str, str, tuple[int, ...]]]

STEP_FIELDS: _Fields = [
    ("head", "<u4"),
    ("kind", "<u2"),
    ("flags", "<u2"),
    ("seq", "<u8"),
    ("step", "<u8"),
    ("start_ns", "<u8"),
    ("wall_ns", "<u8"),
    ("phase_ns", "<u8", (PHASE_SLOTS,)),
    ("allocated", "<u8"),
    ("reserved", "<u8"),
    ("peak_allocated", "<u8"),
    ("micro_batches", "<u4"),
    ("forwards", "<u4"),
    ("ddp_compute_ns", "<u8"),
    ("ddp_comm_ns", "<u8"),
    ("batches", "<u4"),
    ("zero", "<u4"),
    ("between_ns", "<u8"),
    ("ddp_exposed_ns", "<u8"),
    ("spare", "V16"),
]

DEVICE_FIELDS: _Fields = [
    ("head", "<u4"),
    ("kind", "<u2"),
    ("flags", "<u2"),
    ("seq", "<u8"),
    ("step", "<u8"),
    ("wall_ns", "<u8"),
    ("phase_ns", "<u8", (PHASE_SLOTS,)),
    ("spare", "V96"),
]
