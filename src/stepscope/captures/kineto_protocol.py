"""What Kineto asks its daemon, and what the daemon answers, as bytes.

A process with ``KINETO_USE_DAEMON`` in its environment has a thread in libkineto that asks for work every 5 seconds,
with a datagram from its own Unix socket to the daemon's: the abstract name ``dynolog``, with a zero byte at its
end, or the file ``dynolog`` in the folder ``KINETO_IPC_SOCKET_DIR``.  All numbers are in the machine's byte order:

    uint64 size, char[32] type, size bytes of payload
    "ctxt"   from the process: int32 gpu, int32 pid, int64 job; to count the processes of a GPU, not answered here
    "req"    from the process: int32 mask, int32 n, int64 job, int32 pids[n] (itself, then its ancestors); the mask has
             bit 1 while its profiler is free.  Answered with the text of a configuration, or not at all.

The process does not insist on an answer; what arrives too late for one request is taken for the next one's answer.
The pids are those of its own namespace and anyone may write them, so they are not read: the kernel says who sent a
datagram.  Seen in torch 2.13 (libkineto's IPC fabric).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from stepscope.records.capture import CAPTURE_WARMUP

__all__ = [
    "DAEMON_NAME",
    "LARGEST_DATAGRAM",
    "POLL_S",
    "WARMUP_S",
    "ClientMessage",
    "TraceOptions",
    "config_text",
    "pack_message",
    "parse_message",
]

DAEMON_NAME = "dynolog"
LARGEST_DATAGRAM = 4096
"""A request with the deepest tree of processes that we have seen has 100 bytes."""
POLL_S = 5.0
"""How often libkineto asks."""
WARMUP_S = 1
"""Before a capture by time: the profiler runs, and its events are dropped.  CUPTI starts in it."""
_HEADER = struct.Struct("=Q32s")
_REQUEST = struct.Struct("=iiq")
_REGISTRATION = struct.Struct("=iiq")
_ACTIVITIES = 2
_MOST_PIDS = 512
_OWN_LINES = set("\n\r\0")


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What to record: a time, or steps of the optimizer."""

    duration_ms: int = 500
    steps: int | None = None
    """Calls of ``Optimizer.step``, in place of the time."""
    stacks: bool = True
    shapes: bool = False


@dataclass(frozen=True, kw_only=True)
class ClientMessage:
    kind: Literal["request", "registration"]
    profiler_free: bool = True
    """Whether a configuration would be accepted now."""


def parse_message(datagram: bytes) -> ClientMessage | None:
    """Read a datagram from anyone; None unless it is exactly one of the two messages."""
    if not _HEADER.size < len(datagram) <= LARGEST_DATAGRAM:
        return None
    size, name = _HEADER.unpack_from(datagram)
    payload = datagram[_HEADER.size :]
    if size != len(payload):
        return None
    kind = name.partition(b"\0")[0]
    if kind == b"ctxt" and size == _REGISTRATION.size:
        return ClientMessage(kind="registration")
    if kind == b"req" and size >= _REQUEST.size:
        mask, pids, _job = _REQUEST.unpack_from(payload)
        if 0 <= pids <= _MOST_PIDS and size == _REQUEST.size + 4 * pids:
            return ClientMessage(kind="request", profiler_free=bool(mask & _ACTIVITIES))
    return None


def pack_message(kind: str, payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), kind.encode()) + payload


def config_text(options: TraceOptions, log_file: str, *, start_wall_ms: int) -> str:
    """The configuration for one trace; ValueError if the path would become more than a value of it.

    ``start_wall_ms``: when a capture by time begins, 0 for as soon as possible.  libkineto puts the pid into the name
    of the file, writes to NAME.tmp next to it, and renames that at the end.
    """
    if _OWN_LINES & set(log_file) or log_file != log_file.strip():
        raise ValueError(f"{log_file!r} cannot be written in a configuration of Kineto")
    lines = [f"ACTIVITIES_LOG_FILE={log_file}"]
    if options.steps is not None:
        lines += [
            "PROFILE_START_ITERATION=0",
            "PROFILE_START_ITERATION_ROUNDUP=1",
            f"ACTIVITIES_WARMUP_ITERATIONS={CAPTURE_WARMUP}",
            f"ACTIVITIES_ITERATIONS={options.steps}",
        ]
    else:
        lines += [
            f"PROFILE_START_TIME={start_wall_ms}",
            f"ACTIVITIES_WARMUP_PERIOD_SECS={WARMUP_S}",
            f"ACTIVITIES_DURATION_MSECS={options.duration_ms}",
        ]
    lines += [f"{name}=true" for name, on in _switches(options) if on]
    return "\n".join(lines) + "\n"


def _switches(options: TraceOptions) -> tuple[tuple[str, bool], ...]:
    return (("PROFILE_WITH_STACK", options.stacks), ("PROFILE_REPORT_INPUT_SHAPES", options.shapes))
