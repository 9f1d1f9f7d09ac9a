"""The events of a Kineto (Chrome) trace as they stand in the file: only the fields that somebody asks for.

msgspec fills these straight from the bytes and skips what is not named here.  ``ts`` and ``dur`` are microseconds,
whole or with three decimals.  As doubles they are exact to the nanosecond up to 2⁵³/1000 µs; a file with larger ones
that have decimals (microseconds since 1970) is read with ``ExactEvent``.
"""

from __future__ import annotations

import msgspec

__all__ = ["Args", "Event", "ExactEvent"]

Number = int | float


class Args(msgspec.Struct, gc=False, frozen=True):
    external: int = msgspec.field(name="External id", default=-1)
    external_old: int = msgspec.field(name="external id", default=-1)
    correlation: int = -1
    stream: int = -1
    device: int = -1
    bytes: Number = -1
    occupancy: Number | None = msgspec.field(name="est. achieved occupancy %", default=None)
    blocks_per_sm: Number | None = msgspec.field(name="blocks per SM", default=None)
    warps_per_sm: Number | None = msgspec.field(name="warps per SM", default=None)
    graph: int = msgspec.field(name="graph id", default=-1)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw())
    stack: str = msgspec.field(name="Call stack", default="")
    module: str = msgspec.field(name="Module Hierarchy", default="")
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=-1)
    collective: str = msgspec.field(name="Collective name", default="")
    group: str = msgspec.field(name="Process Group Name", default="")
    description: str = msgspec.field(name="Process Group Description", default="")
    ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=msgspec.Raw())
    group_size: int = msgspec.field(name="Group size", default=-1)
    seq: int = msgspec.field(name="Seq", default=-1)
    in_elements: int = msgspec.field(name="In msg nelems", default=-1)
    out_elements: int = msgspec.field(name="Out msg nelems", default=-1)
    dtype: str = ""
    on_stream: int = msgspec.field(name="wait_on_stream", default=-1)
    record_correlation: int = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)
    python: int = msgspec.field(name="Python id", default=-1)
    python_parent: int | None = msgspec.field(name="Python parent id", default=None)
    python_module: int | None = msgspec.field(name="Python module id", default=None)
    device_type: int = msgspec.field(name="Device Type", default=-1)
    device_id: int = msgspec.field(name="Device Id", default=-1)
    memory_bytes: int = msgspec.field(name="Bytes", default=0)
    allocated: int = msgspec.field(name="Total Allocated", default=-1)
    reserved: int = msgspec.field(name="Total Reserved", default=-1)
    address: int = msgspec.field(name="Addr", default=-1)
    name: str = ""
    """Of a thread or process, in metadata."""


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: float = 0.0
    dur: float = 0.0
    id: int | str | None = None
    args: Args = NO_ARGS


class ExactEvent(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: msgspec.Raw = msgspec.Raw(b"0")
    dur: float = 0.0
    id: int | str | None = None
    args: Args = NO_ARGS
