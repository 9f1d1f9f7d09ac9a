"""What a rank wrote when it failed: its own fault, or only word of a peer's.  Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["FailureText", "failure_in", "lost_peer"]

OF_THE_NETWORK = ("DistBackendError", "DistNetworkError", "DistStoreError")
"""Exceptions that torch.distributed raises when a peer or the way to it is not there."""
OF_PYTHON = ("OSError", "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError")
"""Exceptions that torch's native code never raises: without a traceback, these are the script's own."""

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
NATIVE = ("gloo", "nccl", "c10d", "tcpstore", "pair.cc", "pair closure", *DISAGREED)
"""Words in a message that only the libraries below a collective write."""
FROM_A_WORKER = re.compile(r"Caught \w+ in ")
"""How torch begins the message of an exception that a DataLoader worker, or a replica, raised first."""
CHAINED = re.compile(r"\n(?:The above exception was the direct cause|During handling of the above exception).*\n")
FRAME = re.compile(r'^[^\S\n]*(?:\[rank\d+\]:)?[\s|]*File "(.+?)", line \d+', re.MULTILINE)
COLLECTIVE = re.compile(
    r"[/\\]torch[/\\](?:distributed[/\\](?!checkpoint)|nn[/\\]parallel[/\\]distributed|autograd[/\\]|_ops\.py)"
    r"|[/\\]stepscope[/\\]recorder[/\\](?:calls|collectives|functional|waiting)\.py"
)
"""Files whose frame is the innermost one when a collective fails: it was called from there into native code."""
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
    frames = []
    for line in text[at:].splitlines()[1:]:
        if found := _LAST_LINE.match(line):
            break
        frames.append(line)
    else:
        return None
    kind, message = found[1].rpartition(".")[2], (found[2] or "").strip()
    taken = lost_peer(kind, message, "\n".join(frames)) or kind in STOPPED
    return FailureText(type=kind, message=message[:MESSAGE_SHOWN], own=not taken)


def lost_peer(kind: str, message: str, traceback: str = "") -> bool:
    """Whether an exception only says that a collective failed because of another rank.

    Its words alone do not tell: a script that downloads its data, too, has connections refused and reset.  So the
    exception, or one that it was raised for, must come out of a collective.
    """
    if kind in OF_THE_NETWORK:
        return True
    low = f"{kind} {message}".lower()
    if not any(words in low for words in (*TAKEN_ALONG, *DISAGREED)) or FROM_A_WORKER.match(message):
        return False
    innermost = [frames[-1] for part in CHAINED.split(traceback) if (frames := FRAME.findall(part))]
    if innermost and any(map(COLLECTIVE.search, innermost)):
        return True
    if any(words in low for words in NATIVE):
        return True
    return not innermost and kind not in OF_PYTHON
