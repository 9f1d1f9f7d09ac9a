"""Copy what processes print into files from there into their logs, from outside.

A process whose descriptors 1 or 2 are regular files says so in ``outputs/PID.json`` (``recorder/output.py``) and goes
on to write to them.  The agent reads what is new at every look:

    a file of one process       all of it goes into that process's log: what native code and children print, in order
    a file that ranks share     lines of NCCL and of torch's C++ that say whose they are go into that rank's log; what
                                else native code is known to print on its way out goes into the job's, ``main.log``

    a file of ours in memory    as the first; what was copied of it is given back to the system

How far each file was read is kept beside the notes, for the agent that comes after one that died.  When the run is
over whoever opens it first copies the rest and removes the folder.  Nothing here is ever noticed by the job.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun
from stepscope.records.modes import file_mode
from stepscope.records.native_lines import is_native, labelled_pid, labelled_rank
from stepscope.records.places import PRINTED_SUFFIX, log_path, outputs_folder
from stepscope.store.atomic import write_json
from stepscope.store.meta import read_meta
from stepscope.store.reading import read_document
from stepscope.store.session import session_of

__all__ = ["OutputCopier", "copy_rest"]

CHUNK = 1 << 16
MOST_AT_ONCE = 4 << 20
"""Of one file at one look: the rings must not wait for longer."""
LONGEST_LINE = 1 << 16
POSITIONS = "positions"
"""No suffix: it is no note."""


class OutputCopier:
    """OSError from ``look`` when a log cannot be written; it is tried again at the next one."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = outputs_folder(run_dir)
        self._known: set[str] = set()
        self._sources: dict[str, _Source] = {}
        self._positions = _read(self._folder / POSITIONS)

    def look(self, *, last: bool = False) -> None:
        """Copy what is new; ``last``: all of it, and what has no line's end yet."""
        self._look_for_notes()
        before = dict(self._positions)
        try:
            for key, source in self._sources.items():
                try:
                    source.look(last=last)
                finally:
                    self._positions[key] = source.position
        finally:
            if self._positions != before:
                write_json(self._folder / POSITIONS, self._positions)
        for source in self._sources.values():
            source.give_back()

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources = {}

    def _look_for_notes(self) -> None:
        try:
            names = [entry.name for entry in os.scandir(self._folder) if entry.name.endswith(".json")]
        except OSError:
            return  # there is none: nothing is printed into a file
        for name in sorted(set(names) - self._known):
            self._known.add(name)
            note = _read(self._folder / name)
            for about in note.get("sources", ()):
                try:
                    self._add(note, about)
                except NotARun:
                    self._known.discard(name)  # run.json cannot be read now
                    break
                except (OSError, LookupError, TypeError, ValueError):
                    continue  # the file was gone before we came, or is somebody else's

    def _add(self, note: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        key = f"{about['dev']}:{about['ino']}"
        source = self._sources.get(key)
        if source is None:
            begin = self._positions.get(key, about["from"])
            held = self._is_held(Path(str(about["path"])))
            fd = _open(note["pid"], about, os.O_RDWR if held else os.O_RDONLY)
            source = self._sources[key] = _Source(fd, int(begin), self._run_dir, held=held)
        log = self._run_dir / "logs" / Path(str(note["log"])).name
        if about["whole"] and source.whole is None:
            source.whole = log
        source.writers.append((int(note["pid"]), note["rank"], log))

    def _is_held(self, path: Path) -> bool:
        """Whether it is a file of ours, in this run's session: nobody else's is ever emptied."""
        return path.suffix == PRINTED_SUFFIX and path.parent == session_of(self._run_dir, read_meta(self._run_dir))


class _Source:
    """A file that processes print into."""

    def __init__(self, fd: int, position: int, run_dir: Path, *, held: bool) -> None:
        self._fd = fd
        self._given_back = 0 if held else None
        self._job_log = log_path(run_dir, rank=None, attempt=0)
        self._begun = b""
        self.position = position
        """Up to where it was copied; of shared files in whole lines."""
        self.whole: Path | None = None
        """Where all of it goes."""
        self.writers: list[tuple[int, int | None, Path]] = []
        """Pid, rank and log."""

    def look(self, *, last: bool) -> None:
        size = os.fstat(self._fd).st_size
        if size < self.position + len(self._begun):  # somebody emptied it
            self.position, self._begun = 0, b""
        copied = 0
        while copied < MOST_AT_ONCE or last:
            data = os.pread(self._fd, CHUNK, self.position + len(self._begun))
            if not data:
                break
            self._take(data)
            copied += len(data)
        if last and self._begun:
            self._take_lines(self._begun)
            self.position, self._begun = self.position + len(self._begun), b""

    def give_back(self) -> None:
        """Of a file of ours in memory: the whole pages that were copied."""
        end = self.position // mmap.PAGESIZE * mmap.PAGESIZE
        if self._given_back is None or end <= self._given_back:
            return
        with suppress(OSError, ValueError):  # a file system that cannot do it
            with mmap.mmap(self._fd, end - self._given_back, offset=self._given_back) as pages:
                pages.madvise(mmap.MADV_REMOVE)
            self._given_back = end

    def close(self) -> None:
        os.close(self._fd)

    def _take(self, data: bytes) -> None:
        if self.whole is not None:
            _append(self.whole, data)
        if not self._shared():
            self.position += len(data)
            return
        lines, end, self._begun = (self._begun + data).rpartition(b"\n")
        if len(self._begun) > LONGEST_LINE:
            lines, self._begun = lines + end + self._begun, b""
            end = b""
        self._take_lines(lines + end)
        self.position += len(lines + end)

    def _shared(self) -> bool:
        """Whether others than the one whose log gets everything write here, too."""
        return any(log != self.whole for _, _, log in self.writers)

    def _take_lines(self, data: bytes) -> None:
        """Native lines to whom they belong, as far as they say."""
        found: dict[Path, list[bytes]] = {}
        for line in data.splitlines(keepends=True) if self._shared() else ():
            text = line.decode(errors="replace")
            log = self._whose(text)
            if log is not None and log != self.whole:
                found.setdefault(log, []).append(line if line.endswith(b"\n") else line + b"\n")
        for log, lines in found.items():
            _append(log, b"".join(lines))

    def _whose(self, line: str) -> Path | None:
        pid, rank = labelled_pid(line), labelled_rank(line)
        for who, number, log in reversed(self.writers):  # of a rank that was started again, the last
            if who == pid or (rank is not None and number == rank):
                return log
        return self._job_log if self.whole is None and is_native(line) else None


def copy_rest(run_dir: Path) -> None:
    """Of a run that is over: copy what no agent did, and forget where it came from; as far as that can be done."""
    folder = outputs_folder(run_dir)
    if not folder.is_dir():
        return
    copier = OutputCopier(run_dir)
    try:
        copier.look(last=True)
        shutil.rmtree(folder)
    except OSError:
        pass  # the directory cannot be written: logs stay as they are
    finally:
        copier.close()


def _open(pid: int, about: Mapping[str, Any], access: int) -> int:
    """By way of the process, as long as it is there: its file may have been removed, or have another name for us."""
    failure: OSError | None = None
    for path in (*(f"/proc/{pid}/fd/{fd}" for fd in about["fds"]), about["path"]):
        try:
            found = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            failure = error
            continue
        info = os.fstat(found)
        if (info.st_dev, info.st_ino) == (about["dev"], about["ino"]):
            return found
        os.close(found)
    raise failure or FileNotFoundError(about["path"])


def _append(log: Path, data: bytes) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, file_mode(log.parent))
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_document(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
