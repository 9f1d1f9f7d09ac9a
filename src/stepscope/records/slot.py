"""The byte layout of one ring slot; 256 bytes, little endian, whatever it holds.

    0    u32  crc32 of bytes 4..256
    4    u16  kind       STEP, DEVICE or NOTE
    6    u16  flags      see the FLAG_ constants
    8    u64  seq        1 for the first slot ever written, then counting
    16   ...  240 bytes of payload, by kind:

    STEP    step, start_ns, wall_ns, cpu_ns                  4 x u64
            phase_ns[16]                                    16 x u64   host time, exclusive; sums to wall_ns
            allocated, reserved, peak_allocated              3 x u64   bytes on the device; 0 when not sampled
            micro_batches, forwards                          2 x u32
            ddp_compute_ns, ddp_comm_ns                      2 x u64   what DDP's own logging said, 0 = nothing
            batches, zero                                    2 x u32   DataLoader batches taken
            24 zero bytes
    DEVICE  step, wall_ns, phase_ns[16]                     18 x u64   device time between the phase's marks
    NOTE    step, u16 length, utf-8 JSON                    at most NOTE_BYTES of it

The writer packs a slot in one go and copies it in one go; a reader trusts a slot only when its crc and its seq are
right.  No memory ordering between processes is assumed (Arm reorders stores), which is why there is a checksum.

``STEP_FIELDS`` and ``DEVICE_FIELDS`` describe the same bytes as numpy dtypes (as plain lists: this module runs in the
training process, where numpy is not ours to import).
"""

from __future__ import annotations

import struct

from stepscope.records.phases import PHASE_SLOTS

__all__ = [
    "CRC",
    "DEVICE",
    "DEVICE_BODY",
    "DEVICE_FIELDS",
    "FLAG_COMPILED",
    "FLAG_DISCOVERY",
    "FLAG_EPOCH_START",
    "FLAG_EXPLICIT",
    "FLAG_FIRST",
    "FLAG_SKIPPED",
    "NOTE",
    "NOTE_BYTES",
    "NOTE_HEAD",
    "SLOT_BYTES",
    "SLOT_HEAD",
    "STEP",
    "STEP_BODY",
    "STEP_FIELDS",
]

SLOT_BYTES = 256

STEP = 1
DEVICE = 2
NOTE = 3

FLAG_COMPILED = 1
"""torch.compile compiled something during this step."""
FLAG_SKIPPED = 2
"""GradScaler found an overflow and skipped the optimizer."""
FLAG_EPOCH_START = 4
"""A DataLoader iterator was made during this step."""
FLAG_EXPLICIT = 8
"""The step's borders were given by ``stepscope.step()``."""
FLAG_DISCOVERY = 16
"""Root modules were being looked for during this step."""
FLAG_FIRST = 32
"""The first step of its process: it begins at the first activity seen, not at the end of another step."""

CRC = struct.Struct("<I")
SLOT_HEAD = struct.Struct("<IHHQ")
"""crc, kind, flags, seq."""

STEP_BODY = struct.Struct(f"<HHQ4Q{PHASE_SLOTS}Q3Q2I2Q2I24x")
"""Everything after the crc of a STEP slot."""
DEVICE_BODY = struct.Struct(f"<HHQ2Q{PHASE_SLOTS}Q96x")
"""Everything after the crc of a DEVICE slot."""
NOTE_HEAD = struct.Struct("<HHQQH")
"""Everything after the crc of a NOTE slot, up to its text."""
NOTE_BYTES = SLOT_BYTES - CRC.size - NOTE_HEAD.size

_Fields = list[tuple[str, str] | tuple[str, str, tuple[int, ...]]]

STEP_FIELDS: _Fields = [
    ("crc", "<u4"),
    ("kind", "<u2"),
    ("flags", "<u2"),
    ("seq", "<u8"),
    ("step", "<u8"),
    ("start_ns", "<u8"),
    ("wall_ns", "<u8"),
    ("cpu_ns", "<u8"),
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
    ("spare", "V24"),
]

DEVICE_FIELDS: _Fields = [
    ("crc", "<u4"),
    ("kind", "<u2"),
    ("flags", "<u2"),
    ("seq", "<u8"),
    ("step", "<u8"),
    ("wall_ns", "<u8"),
    ("phase_ns", "<u8", (PHASE_SLOTS,)),
    ("spare", "V96"),
]
