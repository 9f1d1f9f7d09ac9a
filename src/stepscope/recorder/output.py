"""Keeps a copy of what a process prints, without coming between it and its terminal.

The process still writes to its streams directly.  How the copy is made depends on the streams:

    a regular file that is this process's own   the agent copies the file: all of it, with native code's and children's
    a file that ranks share                     a tee in Python; the agent adds native lines that say whose they are
    a pipe, a socket, a terminal                a tee in Python; what native code prints is not kept

The tee is the ``write`` of the raw stream below ``sys.stdout`` and ``sys.stderr``: to the same descriptor as before,
and then to the log.  The streams themselves stay the same objects, with their buffering, encoding and ``isatty``, for
all code that holds them; if the log cannot be written the copy stops without any effect on the script.

A run directory on a network or FUSE file system may stop responding, and a ``print`` must not wait for that: there the
tee writes into a file of the session, in memory, which the agent copies and empties.  While it cannot, lines beyond
MOST_SPOOLED are lost.

``stepscope run --native-output`` turns everything but terminals into the first case: each rank's descriptors 1 and 2
become a file of the run, which a helper process forwards to the original destination (``agent/output_forwarder.py``).

Why native output is not captured by default (tried on Linux):

A pipe and a process that empties it: if that process is killed, the job's writes fail with EPIPE (and SIGPIPE kills
children that do not ignore it); if it is stopped, the job blocks after 64 KB; what is in the pipe is lost when a
cgroup is OOM-killed. A pseudo-terminal: EIO and ``isatty`` False once the other side is gone, not the controlling
terminal, its own window size. A file in between cannot block, but a full disk fails the job's ``print``: that is
``--native-output``. LD_PRELOAD of ``write`` misses ``fputs``, ``fprintf`` and glibc's own messages, which call the
kernel inside libc. Replacing C's ``stderr`` loses its descriptor. ptrace, seccomp and eBPF need rights that a job
does not have. NCCL_DEBUG_FILE takes NCCL's lines away from the terminal; torch's C++ logs only to stderr.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from stepscope.recorder.guard import above_standard_streams
from stepscope.records.files import file_mode, folder_mode, is_remote
from stepscope.records.paths import ENV_NATIVE, ENV_SESSION, PRINTED_SUFFIX, output_note, outputs_folder

__all__ = ["keep_output"]

LONGEST_LINE = 1 << 13
MOST_SPOOLED = 1 << 20
"""In addition to its ring, which takes twice that: eight ranks fit into the 64 MB of a container."""
MISSED = b"[stepscope: lines are missing here; the run directory did not answer]\n"


def keep_output(run_dir: Path, log: Path, *, rank: int | None, launcher: bool) -> None:
    """Copy this process's output to ``log``; ``rank``: None for the script, or for what starts ranks (``launcher``)."""
    spool = _spool_file(run_dir)
    try:
        log.parent.mkdir(mode=folder_mode(run_dir), parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        copy = above_standard_streams(os.open(spool or log, flags, file_mode(run_dir)))
    except OSError:
        return
    spooled = _spool(run_dir)
    sources = _sources(copy, alone=rank is None and not launcher, spooled=spooled)
    if spool is not None:
        sources.append(_source(os.fstat(copy), str(spool), whole=True))
    if sources and not _leave_note(run_dir, log, rank, sources):
        if spool is not None:
            return  # the agent would not empty it
        sources = []
    copied = {fd for source in sources if source["whole"] for fd in source["fds"]}
    for stream in (sys.stdout, sys.stderr):
        _put_copy_below(stream, copy, copied, MOST_SPOOLED if spool is not None else None)


def _spool_file(run_dir: Path) -> Path | None:
    """Where the copy is kept until the agent takes it; None: it goes into the log at once."""
    session = Path(os.environ.get(ENV_SESSION, ""))
    if not is_remote(run_dir) or not session.is_absolute() or is_remote(session):
        return None
    return session / f"{os.getpid()}{PRINTED_SUFFIX}"


# -- Files that the agent copies --------------------------------------------------------------------------------------


def _sources(log: int, *, alone: bool, spooled: set[int]) -> list[dict[str, Any]]:
    """Those of our descriptors 1 and 2 that are regular files: the agent can read them without involving us.

    ``whole``: everything written to it from now on comes from us and our children.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for fd in _printed_to():
        try:
            info = os.fstat(fd)
            path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - a rank's start waits for this
        except OSError:
            continue
        if not stat.S_ISREG(info.st_mode) or os.path.samestat(info, os.fstat(log)):
            continue
        whole = alone or fd in spooled or not _parent_has(info)
        source = found.setdefault((info.st_dev, info.st_ino), _source(info, path, whole=whole))
        source["fds"].append(fd)
    return list(found.values())


def _source(info: os.stat_result, path: str, *, whole: bool) -> dict[str, Any]:
    return {"path": path, "dev": info.st_dev, "ino": info.st_ino, "from": info.st_size, "fds": [], "whole": whole}


def _printed_to() -> list[int]:
    """Which of descriptors 1 and 2 are the script's streams; those of a notebook go elsewhere."""
    found = set()
    for stream in (sys.stdout, sys.stderr):
        try:
            if type(stream) is io.TextIOWrapper and not stream.closed:
                found.add(stream.fileno())
        except (OSError, ValueError):  # in memory, or detached
            continue
    return sorted(found & {1, 2})


def _parent_has(info: os.stat_result) -> bool:
    """Whether our parent (torchrun), and so the other ranks, write to the same file; True if unknown."""
    try:
        return any(os.path.samestat(info, os.stat(f"/proc/{os.getppid()}/fd/{fd}")) for fd in (1, 2))  # noqa: PTH116
    except OSError:
        return True


def _leave_note(run_dir: Path, log: Path, rank: int | None, sources: list[dict[str, Any]]) -> bool:
    """Publish the files to the agent; return whether that worked."""
    note = {"schema": 1, "pid": os.getpid(), "rank": rank, "log": f"{log.parent.name}/{log.name}", "sources": sources}
    path = output_note(run_dir, os.getpid())
    try:
        path.parent.mkdir(mode=folder_mode(run_dir), exist_ok=True)
        partial = path.with_suffix(".tmp")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file_mode(run_dir)), "w") as file:
            file.write(json.dumps(note))
        partial.replace(path)
    except OSError:
        return False
    return True


def _spool(run_dir: Path) -> set[int]:
    """With ``--native-output``: replace those descriptors that are the job's by files of the run; return which."""
    targets = os.environ.get(ENV_NATIVE, "").split()
    if len(targets) != 2:
        return set()
    folder = outputs_folder(run_dir)
    kinds = {fd: kind for fd in _printed_to() if (kind := _kind(fd, targets, folder))}
    done: set[int] = set()
    for fd, kind in kinds.items():
        try:
            folder.mkdir(mode=folder_mode(run_dir), exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            spool = os.open(folder / f"{os.getpid()}.{kind}", flags, file_mode(run_dir))
        except OSError:
            continue
        os.dup2(spool, fd)
        os.close(spool)
        done.add(fd)
    return done


def _kind(fd: int, targets: list[str], folder: Path) -> str:
    """Which of the job's streams a descriptor is: ``1``, ``2``, ``12`` for both in one, or empty for neither."""
    try:
        info = os.fstat(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115
        if folder.exists() and path.parent.samefile(folder):
            return path.suffix[1:]  # our parent's file: torchrun's, or that of the process we were forked from
    except OSError:
        return ""
    own = f"{info.st_dev}:{info.st_ino}"
    return "".join(name for name, target in zip("12", targets, strict=True) if target == own)


# -- Tee --------------------------------------------------------------------------------------------------------------


class _Tee:
    """Copies what a stream writes to its descriptor to the log: in whole lines, so that lines do not mix.

    It replaces ``write`` on the one raw stream below ``sys.stdout`` or ``sys.stderr``.  The rest of the stream stays
    the same, and other threads may print meanwhile.
    """

    def __init__(self, raw: io.FileIO, copy: int, most: int | None) -> None:
        """``most``: limit in bytes for data waiting in ``copy``, a file in memory, for the agent."""
        self._write = raw.write
        self._copy, self._most = copy, most
        self._begun = self._missed = b""
        raw.write = self.write  # type: ignore[method-assign]
        atexit.register(self._keep)
        os.register_at_fork(after_in_child=self._lose)

    def write(self, data: Any) -> int | None:
        written = self._write(data)
        if written and self._copy >= 0:
            self._begun += memoryview(data)[:written]
            # Unbuffered, ``print`` writes a line and its newline separately, and so do the other ranks to the same
            # terminal: the longer we take in between, the more often their lines run into each other.
            if self._begun.endswith(b"\n") or len(self._begun) >= LONGEST_LINE:
                self._keep()
        return written

    def copy_to(self, copy: int, most: int | None) -> None:
        """Switch to another log: in a forked child, which has its own name, or once a rank is known."""
        self._copy, self._most, self._begun = copy, most, b""

    def _lose(self) -> None:
        """In a forked child: the unfinished line belongs to the parent, which will complete it."""
        self._begun = b""

    def _keep(self) -> None:
        begun, self._begun = self._begun, b""
        if not begun:
            return
        try:
            if self._most is not None and os.fstat(self._copy).st_blocks * 512 >= self._most:
                self._missed = MISSED
                return
            os.write(self._copy, self._missed + begun)
            self._missed = b""
        except OSError:
            if self._most is None:
                self._copy = -1
            else:
                self._missed = MISSED


def _put_copy_below(stream: Any, copy: int, copied: set[int], most: int | None) -> None:
    """Install a tee, except on streams that the agent copies (``copied``) or that are not plain files (a notebook)."""
    if type(stream) is not io.TextIOWrapper:
        return
    try:
        buffer = stream.buffer
    except ValueError:  # detached
        return
    raw = getattr(buffer, "raw", buffer)  # with ``python -u`` there is no buffer in between
    if type(raw) is not io.FileIO:
        return
    tee = getattr(raw.write, "__self__", None)
    own = -1 if raw.fileno() in copied else copy
    if isinstance(tee, _Tee):
        tee.copy_to(own, most)
    elif own >= 0:
        _Tee(raw, own, most)
