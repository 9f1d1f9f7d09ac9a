"""The events of a Kineto (Chrome) trace as they stand in the file: only the fields that somebody asks for.

msgspec fills these straight from the bytes, one class per phase (``ph``), and skips what is not named here.  It looks
for a key from the field after the last one found on: fields stand in the order in which Kineto writes them, and each
one more costs every event a little.  ``ts`` and ``dur`` are microseconds, whole or with three decimals.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Final

import msgspec

__all__ = [
    "EVENT",
    "NO_ARGS",
    "PHASES",
    "Args",
    "Begin",
    "End",
    "FlowEnd",
    "FlowStart",
    "Ignored",
    "Instant",
    "MemoryArgs",
    "Metadata",
    "NamedArgs",
    "NoEvent",
    "OldInstant",
    "Slice",
]

Number = int | float
MISSING: Final = float("nan")


class Args(msgspec.Struct, gc=False, frozen=True):
    """Of slices of all kinds: telling the kinds apart first would cost more than it saves."""

    external: int = msgspec.field(name="External id", default=-1)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=-1)
    device: int = -1
    stream: int = -1
    correlation: int = -1
    external_old: int = msgspec.field(name="external id", default=-1)
    bytes: int = -1
    blocks_per_sm: Number | None = msgspec.field(name="blocks per SM", default=None)
    warps_per_sm: Number | None = msgspec.field(name="warps per SM", default=None)
    occupancy: Number | None = msgspec.field(name="est. achieved occupancy %", default=None)
    graph: int = msgspec.field(name="graph id", default=-1)
    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    stack: str = msgspec.field(name="Call stack", default="")
    module: str = msgspec.field(name="Module Hierarchy", default="")
    python_parent: int | None = msgspec.field(name="Python parent id", default=None)
    python: int = msgspec.field(name="Python id", default=-1)
    python_module: int | None = msgspec.field(name="Python module id", default=None)
    on_stream: int = msgspec.field(name="wait_on_stream", default=-1)
    record_correlation: int = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)
    collective: str = msgspec.field(name="Collective name", default="")
    in_elements: int = msgspec.field(name="In msg nelems", default=-1)
    out_elements: int = msgspec.field(name="Out msg nelems", default=-1)
    group_size: int = msgspec.field(name="Group size", default=-1)
    dtype: str = ""
    group: str = msgspec.field(name="Process Group Name", default="")
    description: str = msgspec.field(name="Process Group Description", default="")
    ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=msgspec.Raw())
    seq: int = msgspec.field(name="Seq", default=-1)


class MemoryArgs(msgspec.Struct, gc=False, frozen=True):
    device_type: int = msgspec.field(name="Device Type", default=-1)
    device: int = msgspec.field(name="Device Id", default=-1)
    address: int = msgspec.field(name="Addr", default=-1)
    bytes: int = msgspec.field(name="Bytes", default=0)
    allocated: int = msgspec.field(name="Total Allocated", default=-1)
    reserved: int = msgspec.field(name="Total Reserved", default=-1)


class NamedArgs(msgspec.Struct, gc=False, frozen=True):
    name: str = ""


NO_ARGS: Final = Args()


class Slice(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    cat: str | None = None
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    dur: float = 0.0
    args: Args = NO_ARGS


class Begin(msgspec.Struct, gc=False, tag_field="ph", tag="B"):
    cat: str | None = None
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    args: Args = NO_ARGS


class End(msgspec.Struct, gc=False, tag_field="ph", tag="E"):
    """Of the innermost that is open on its thread."""

    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    args: Args = NO_ARGS


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    args: MemoryArgs = MemoryArgs()


class OldInstant(Instant, gc=False, tag_field="ph", tag="I"):
    """As Chrome called it before."""


class FlowStart(msgspec.Struct, gc=False, tag_field="ph", tag="s"):
    id: int | str | None = None
    pid: int | str = -1
    tid: int | str = -1
    ts: Number = MISSING
    cat: str | None = None


class FlowEnd(FlowStart, gc=False, tag_field="ph", tag="f"):
    pass


class Metadata(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    args: NamedArgs = NamedArgs()


class Ignored(msgspec.Struct, gc=False, tag_field="ph", tag="C"):
    """Counters, asynchronous ranges, steps of flows and whatever else Chrome has."""


class NoEvent(msgspec.Struct, gc=False):
    """Something in the list that has no phase."""


OTHER_PHASES: Final = "bneSTpFtPNODRcVv(),"
NAMED: Final[tuple[Any, ...]] = (Slice, Begin, End, Instant, OldInstant, FlowStart, FlowEnd, Metadata)
PHASES: Final[dict[str, Any]] = {
    phase: msgspec.defstruct(f"Ignored{ord(phase)}", [], bases=(Ignored,), gc=False, tag_field="ph", tag=phase)
    for phase in OTHER_PHASES
} | {each.__struct_config__.tag: each for each in NAMED}
"""The classes by phase."""
EVENT: Final[Any] = functools.reduce(operator.or_, PHASES.values(), Ignored)
