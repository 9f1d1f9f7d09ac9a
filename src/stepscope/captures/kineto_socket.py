"""The daemon's socket: the address that libkineto sends to, with the kernel's word on who sent each datagram.

Abstract names exist once per network namespace, and the file once per folder, so there is one daemon at a time.

libkineto compares the name of a socket that it hears from with what it expects, and ends its whole process if they
differ (torch 2.13).  So a file is bound by the very path that the process has in ``KINETO_IPC_SOCKET_DIR``, which must
be the same folder for both: no link, no ``/proc/PID/root``, no descriptor.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stepscope.captures.kineto_process import TracedProcess
from stepscope.captures.kineto_protocol import DAEMON_NAME, LARGEST_DATAGRAM
from stepscope.errors import CaptureError

__all__ = ["DaemonSocket", "Datagram", "listen"]

MOST_DATAGRAMS = 64
_CREDENTIALS = struct.Struct("=iII")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)
_SO_PASSCRED = 16 if not hasattr(socket, "SO_PASSCRED") else socket.SO_PASSCRED
_SCM_CREDENTIALS = 2


@dataclass(frozen=True, kw_only=True)
class Datagram:
    content: bytes
    pid: int
    """As the kernel reports it, in our namespace; 0: outside of it, or not reported."""
    user: int
    address: bytes
    """Where an answer goes, as the sender wrote it."""


class DaemonSocket:
    """One address.  ``folder``: the folder of its file as the process has it; empty for the abstract name."""

    def __init__(self, folder: str = "", *, name: str = DAEMON_NAME) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._file: os.stat_result | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_PASSCRED, 1)
            self._socket.setblocking(False)
            if folder:
                self._bind_file(f"{folder}/{name}")
            else:
                self._bind_abstract(name)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def _bind_abstract(self, name: str) -> None:
        try:
            self._socket.bind(f"\0{name}\0")
        except OSError:
            raise CaptureError(_occupied(f"the abstract socket {name}")) from None

    def _bind_file(self, address: str) -> None:
        path = Path(address)
        try:
            if os.path.lexists(path):
                if not _is_left_over(path):
                    raise CaptureError(_occupied(address))
                path.unlink()
            self._socket.bind(address)
            self._path, self._file = path, path.lstat()
        except OSError as error:
            raise CaptureError(f"cannot create the socket {address}: {error.strerror or error}") from None

    def datagrams(self) -> Iterator[Datagram]:
        """Those that have arrived, ``MOST_DATAGRAMS`` at a time: a process that never stops sending delays the others
        no more than that.  A cut off one, or one without a sender, is dropped.
        """
        for _ in range(MOST_DATAGRAMS):
            try:
                content, ancillary, flags, address = self._socket.recvmsg(LARGEST_DATAGRAM, _ANCILLARY_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not address:
                continue
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == _SCM_CREDENTIALS and len(data) == _CREDENTIALS.size:
                    pid, user, _group = _CREDENTIALS.unpack(data)
                    yield Datagram(content=content, pid=pid, user=user, address=os.fsencode(address))

    def answer(self, datagram: Datagram, content: bytes) -> bool:
        """Send to whoever sent it; False if that is no longer possible."""
        address: bytes | str = datagram.address
        if self._folder:
            # Only the name counts, in the folder that both use.
            name = Path(os.fsdecode(datagram.address)).name
            if name in ("", ".."):
                return False
            address = f"{self._folder}/{name}"
        elif not datagram.address.startswith(b"\0"):
            return False
        try:
            self._socket.sendto(content, address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        if self._path is None or self._file is None:
            return
        with suppress(OSError):
            if os.path.samestat(self._path.lstat(), self._file):  # not another daemon's that took our place
                self._path.unlink()
        self._path = None


@contextmanager
def listen(processes: tuple[TracedProcess, ...], *, name: str = DAEMON_NAME) -> Iterator[list[DaemonSocket]]:
    """Open every address that these processes send to, once."""
    sockets: dict[str, DaemonSocket] = {}
    try:
        for process in processes:
            folder = process.socket_folder
            if folder and not process.shares_files(Path(folder)):
                raise CaptureError(
                    f"{process.name} expects its daemon in {folder}, which is missing or another folder here; run "
                    f"this command there: `nsenter --target {process.pid} --mount stepscope capture "
                    f"--pid {process.pid}`"
                )
            if folder not in sockets:
                sockets[folder] = DaemonSocket(folder, name=name)
        yield list(sockets.values())
    finally:
        for opened in sockets.values():
            opened.close()


def _is_left_over(path: Path) -> bool:
    """Whether a socket file has no process any more."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _occupied(address: str) -> str:
    return (
        f"{address} is in use by another daemon, such as Dynolog's, or by another capture; wait for that capture, or "
        f"request the trace from that daemon (`dyno gputrace`)"
    )
