"""What a rank wrote when it failed: its own fault, or only word of a peer's.  Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DISAGREED", "TAKEN_ALONG", "FailureText", "failure_in"]

TAKEN_ALONG = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "connection closed",
    "connection was closed",
    "socket closed",
    "remote process exited",
    "ncclremoteerror",
    "nccl communicator was aborted",
    "heartbeat",
    "timed out waiting",
    "timeout waiting",
    "wait timeout",
    "failed to recv",
    "failed to connect",
    "read timeout",
    "read error",
    "write timeout",
    "nccl watchdog",
    "peer process",
    "application timeout caused pair closure",
)
"""How the death of a peer reads in those that talked to it (gloo, NCCL, TCPStore)."""
DISAGREED = ("op.preamble.length", "watchdog caught collective operation timeout", "collective operation timeout")
"""How a collective reads on which ranks did not agree, or to which somebody did not come."""
STOPPED = ("KeyboardInterrupt", "SignalException", "SystemExit")
MESSAGE_SHOWN = 200

_LAST_LINE = re.compile(r"^(?:\[rank\d+\]:\s?)?([A-Za-z_][\w.]*)(?:: (.*))?$")


@dataclass(frozen=True, kw_only=True)
class FailureText:
    type: str
    message: str
    own: bool
    """Whether it began here, as far as the words tell."""


def failure_in(text: str) -> FailureText | None:
    """The exception at the end of the last traceback; None when there is no traceback."""
    at = text.rfind("Traceback (most recent call last)")
    if at < 0:
        return None
    found = None
    for line in text[at:].splitlines()[1:]:
        if match := _LAST_LINE.match(line):
            found = match
            break
    if found is None:
        return None
    kind, message = found[1].rpartition(".")[2], (found[2] or "").strip()
    low = f"{kind} {message}".lower()
    taken = any(words in low for words in (*TAKEN_ALONG, *DISAGREED)) or kind in STOPPED
    return FailureText(type=kind, message=message[:MESSAGE_SHOWN], own=not taken)
