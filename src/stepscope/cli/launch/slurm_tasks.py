"""``srun -n 8 stepscope run train.py``: the tasks of one node form one run, though each has its own launcher.

They meet in a folder whose name follows from job, step and node. The first task is the leader: it creates the run,
starts the agent and then writes to a file where the run is. Each other task waits for that file, starts its rank in the
run, holds a shared lock while the rank lives, and finally writes how it ended. The leader ends when the lock is free.
The tasks depend on the leader for recording only: without its file, because it died or could not create a run, a rank
runs unrecorded; if the leader dies later, its agent continues and finishes the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from stepscope.cli.launch.command import SlurmStep
from stepscope.cli.launch.helpers import JobEnd
from stepscope.errors import RingNoSpace
from stepscope.records.files import make_session
from stepscope.records.paths import session_root
from stepscope.store import file_io

__all__ = ["Leader", "Member"]

WORD = "run.json"
LOCK = "tasks.lock"
LEADS = "leader.lock"
ENDS = "end-*.json"
PATIENCE_S = 60.0
"""Time that the leader gets to announce the run: its Python may load from a slow file system."""
MISSING_TASK_S = 5.0
"""How long the leader waits, at the end, for a task that has not started."""


def _meeting_folder(step: SlurmStep, base: Path | None = None) -> Path:
    """Create the folder; raises RingNoSpace if there is no room for it."""
    name = f"slurm-{step.job}.{step.step}-{step.restarts}-node{step.node}"
    return make_session(session_root() if base is None else base, name, exist_ok=True)


class Leader:
    """The first task of a step on one node; ``supervise`` waits for its ``over``."""

    def __init__(self, step: SlurmStep, base: Path | None = None) -> None:
        """Raises RingNoSpace if there is no room for the folder."""
        self._folder = _meeting_folder(step, base)
        self._expected = step.tasks_here - 1
        self._lock = _open_lock(self._folder, LOCK)
        self._leads = _open_lock(self._folder, LEADS)
        _try_lock(self._leads)
        self._waiting_since_s: float | None = None
        for left in [self._folder / WORD, *self._folder.glob(ENDS)]:
            left.unlink(missing_ok=True)  # left over from a leader that was killed

    def announce(self, run_dir: Path, session: Path) -> None:
        self._say({"run_dir": str(run_dir), "session": str(session)})

    def refuse(self, why: str) -> None:
        """Announce that the run failed, so that the others do not wait."""
        self._say({"why": why})

    def over(self) -> bool:
        """Whether all other tasks are over; first called when our own rank is."""
        now_s = time.monotonic()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        if len(self.ends()) >= self._expected:
            return True
        return now_s - self._waiting_since_s >= MISSING_TASK_S and _try_lock(self._lock)

    def ends(self) -> list[JobEnd]:
        found = [_end(_read(path)) for path in sorted(self._folder.glob(ENDS))]
        return [end for end in found if end is not None]

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
        os.close(self._leads)

    def _say(self, word: dict[str, Any]) -> None:
        try:
            file_io.write_json(self._folder / WORD, word)
        except OSError:
            pass  # disk full: the others run unrecorded


class Member:
    """Any other task of the node."""

    def __init__(self, step: SlurmStep, base: Path | None = None) -> None:
        """Raises RingNoSpace if there is no room for the folder."""
        self._step = step
        self._base = base
        self._folder = _meeting_folder(step, base)
        self._lock = -1

    def wait(self, patience_s: float = PATIENCE_S) -> tuple[Path, Path] | str:
        """The run directory and the session, or the reason why they are missing."""
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            if self._joined():
                word = _read(self._folder / WORD)
                if isinstance(word.get("run_dir"), str) and isinstance(word.get("session"), str):
                    return Path(word["run_dir"]), Path(word["session"])
                if isinstance(word.get("why"), str):
                    return str(word["why"])
            time.sleep(0.05)
        return "the first task on this node did not announce the run"

    def ended(self, end: JobEnd) -> None:
        try:
            file_io.write_json(self._end_file(), end.to_dict())
        except OSError:
            pass  # the leader and its folder are gone
        os.close(self._lock)
        self._clear()

    def _clear(self) -> None:
        """Remove the folder if the leader was killed and this is the last task."""
        locks: list[int] = []
        try:
            locks += [os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC) for name in (LEADS, LOCK)]
            if all(_try_lock(lock) for lock in locks):
                shutil.rmtree(self._folder, ignore_errors=True)
        except FileNotFoundError:
            pass  # the leader was faster
        finally:
            for lock in locks:
                os.close(lock)

    def _end_file(self) -> Path:
        return self._folder / ENDS.replace("*", str(self._step.task_here))

    def _joined(self) -> bool:
        """Whether we hold the lock of the current folder: a task may run several commands in a row.

        If our end file exists already, the run belongs to the previous command, and its leader has not finished.
        """
        path = self._folder / LOCK
        if self._lock >= 0 and not (path.exists() and os.path.samestat(os.fstat(self._lock), path.stat())):
            os.close(self._lock)
            self._lock = -1
        if self._lock < 0 and not self._end_file().exists():
            self._folder = _meeting_folder(self._step, self._base)
            self._lock = _open_lock(self._folder, LOCK)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        return self._lock >= 0


def _open_lock(folder: Path, name: str) -> int:
    try:
        return os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RingNoSpace(f"{folder} cannot be used ({error.strerror})") from error


def _try_lock(lock: int) -> bool:
    """Take the lock; return False if another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        word = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return word if isinstance(word, dict) else {}


def _end(word: dict[str, Any]) -> JobEnd | None:
    code, status = word.get("exit_code"), word.get("status")
    if isinstance(code, int) and status in ("finished", "failed", "crashed", "interrupted"):
        return JobEnd(exit_code=code, status=status)
    return None
