"""A client for torch's worker server: HTTP over a Unix socket, many processes at once, with a deadline.

The server is a native thread in a rank that answers without the GIL; ``recorder/`` starts it in jobs with several
ranks. ``fr_trace_json`` is gloo's Flight Recorder, ``dump_nccl_trace_json`` is NCCL's. torch 2.15 has one recorder per
backend, selected by name (``?backend=nccl2``). ``dump_traceback`` needs the GIL, so its silence shows that the GIL is
held. Answers are untrusted: they are bounded in size and time, and only complete answers count.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from stepscope.flight.dump import combined

__all__ = ["FLIGHT", "NCCL_FLIGHT", "NEEDS_GIL", "Questions", "ask_active", "ask_flights", "ask_servers"]

Key = TypeVar("Key", bound=Hashable)

FLIGHT = "fr_trace_json"
NCCL_FLIGHT = "dump_nccl_trace_json"
NCCL2_FLIGHT = "fr_trace_json?backend=nccl2"
"""For ProcessGroupNCCL2 (torch 2.15). Older versions ignore the backend and answer for gloo."""
ACTIVE = "?includecollectives=true&onlyactive=true"
"""For NCCL's own recorder: skips finished collectives, which takes 2 ms instead of 50."""
HAS_CALLS = b'"entries"'
"""Appears in the dump of a Flight Recorder that has recorded anything."""
OF_NCCL = b'"profiling_name":"nccl'
NEEDS_GIL = "dump_traceback"

MAX_BODY = 32 << 20
"""Limit for one answer. Two thousand entries take one MiB."""
MAX_HEAD = 1 << 14
CHUNK = 1 << 18


class _Call:
    """One pending request."""

    def __init__(self, path: Path, handler: str, max_body: int) -> None:
        """Raise OSError if no server listens there."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        head = f"POST /handler/{handler} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        self._to_send = head.encode()
        self._received = bytearray()
        self._max_body = max_body
        self.answer: bytes | None = None

    def send(self) -> bool:
        """Send more of the request; return whether all of it is sent. Raise OSError if the other end is gone."""
        self._to_send = self._to_send[self.socket.send(self._to_send) :]
        return self.sent

    @property
    def sent(self) -> bool:
        return not self._to_send

    def receive(self) -> bool:
        """Receive more; return whether it is over: answered, refused, truncated or too long."""
        data = self.socket.recv(CHUNK)
        self._received += data
        head, gap, _ = bytes(self._received[:MAX_HEAD]).partition(b"\r\n\r\n")
        if not gap:
            return not data or len(self._received) >= MAX_HEAD
        length = _length(head)
        if length is None or length > self._max_body:
            return True
        start = len(head) + len(gap)
        if len(self._received) - start < length:
            return not data
        self.answer = bytes(self._received[start : start + length])
        return True


class Questions(Generic[Key]):
    """The same question to many servers. Leaving the context cancels pending requests."""

    def __init__(self, servers: Mapping[Key, Path], handler: str, *, max_body: int = MAX_BODY) -> None:
        self.answers: dict[Key, bytes] = {}
        """The bodies of the complete answers (status 200) so far."""
        self._calls: dict[Key, _Call] = {}
        """Pending requests."""
        self._selector = selectors.DefaultSelector()
        for key, path in servers.items():
            try:
                call = _Call(path, handler, max_body)
            except (OSError, ValueError):
                continue  # no server listens, its queue is full, or the path is too long for a socket
            self._calls[key] = call
            self._selector.register(call.socket, selectors.EVENT_WRITE, (key, call))

    def __enter__(self) -> Questions[Key]:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for call in self._calls.values():
            call.socket.close()

    def wait(self, patience_s: float) -> None:
        """Wait until all requests are over, but not longer than ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while self._calls:
            for ready, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                key, call = ready.data
                if _over(self._selector, ready, call):
                    self._end(key, call)
            if time.monotonic() >= deadline:
                return

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``wait`` would have something to do."""
        return self._selector.fileno()

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return not self._calls

    def unanswered(self, key: Key) -> bool:
        """Return whether its server took the question and has not answered yet."""
        self.wait(0.0)
        return key in self._calls and self._calls[key].sent

    def _end(self, key: Key, call: _Call) -> None:
        self._selector.unregister(call.socket)
        self._calls.pop(key).socket.close()
        if call.answer is not None:
            self.answers[key] = call.answer


def ask_servers(
    servers: Mapping[Key, Path], handler: str, *, patience_s: float, max_body: int = MAX_BODY
) -> dict[Key, bytes]:
    """Return the bodies of the complete answers (status 200) that arrived in time."""
    with Questions(servers, handler, max_body=max_body) as asked:
        asked.wait(patience_s)
        return asked.answers


def ask_flights(servers: Mapping[Key, Path], *, patience_s: float) -> dict[Key, bytes]:
    """Return the ranks' Flight Recorders: gloo's, NCCL's, or both in one document (``flight/dump.py``)."""
    deadline = time.monotonic() + patience_s
    gloo = ask_servers(servers, FLIGHT, patience_s=patience_s)
    heard = {key: servers[key] for key in gloo}
    nccl = ask_servers(heard, NCCL_FLIGHT, patience_s=max(0.0, deadline - time.monotonic()))
    nccl |= _ask_nccl2(heard, nccl, patience_s=max(0.0, deadline - time.monotonic()))
    return {key: combined(nccl.get(key, b""), answer) for key, answer in gloo.items()}


def ask_active(servers: Mapping[Key, Path], *, patience_s: float) -> dict[Key, bytes]:
    """Return the unfinished collectives of NCCL's recorders. This is cheap enough to be done twice."""
    deadline = time.monotonic() + patience_s
    answers = ask_servers(servers, NCCL_FLIGHT + ACTIVE, patience_s=patience_s)
    return answers | _ask_nccl2(servers, answers, patience_s=max(0.0, deadline - time.monotonic()))


def _ask_nccl2(servers: Mapping[Key, Path], nccl: Mapping[Key, bytes], *, patience_s: float) -> dict[Key, bytes]:
    """Ask those servers that support NCCL but whose NCCL recorder knows no group."""
    unused = {key: servers[key] for key, answer in nccl.items() if HAS_CALLS not in answer and b'"ranks"' not in answer}
    answers = ask_servers(unused, NCCL2_FLIGHT, patience_s=patience_s) if unused else {}
    return {key: answer for key, answer in answers.items() if OF_NCCL in answer}


def _over(selector: selectors.BaseSelector, ready: selectors.SelectorKey, call: _Call) -> bool:
    try:
        if ready.events == selectors.EVENT_READ:
            return call.receive()
        if call.send():
            selector.modify(call.socket, selectors.EVENT_READ, ready.data)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


def _length(head: bytes) -> int | None:
    """Return the body length of a successful answer; None for anything else."""
    status, *lines = head.split(b"\r\n")
    words = status.split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or words[1] != b"200":
        return None
    for line in lines:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            value = value.strip()
            return int(value) if value.isdigit() and len(value) < 12 else None
    return None
