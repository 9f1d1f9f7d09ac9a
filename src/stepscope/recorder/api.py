"""The public API inside a training script, and how ``init()`` finds the run of its launcher's other ranks.

Nothing here raises into the script, and all of it is a no-op when recording is off.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from stepscope.errors import RingNoSpace, StepscopeError
from stepscope.recorder import bootstrap
from stepscope.recorder.guard import failsafe, warn
from stepscope.recorder.hooks.notes import note_texts
from stepscope.recorder.identity import rank_from
from stepscope.recorder.ledger import NOT_NOW
from stepscope.records.files import make_session, take_folder
from stepscope.records.paths import (
    ENV_CLOCK,
    ENV_RUN_DIR,
    ENV_SESSION,
    SESSION_LOCK,
    helper_command,
    helper_environment,
    session_root,
    timed_collectives,
)
from stepscope.records.run_clock import clock_now, process_start_ticks
from stepscope.records.steps import FLAG_EXPLICIT, OTHER
from stepscope.records.text import TIME_IN_NAME, checked_name, default_name

__all__ = ["init", "note", "phase", "step", "summary", "watch"]


# -- Joining a run ----------------------------------------------------------------------------------------------------
# ``stepscope.init()`` without ``stepscope run``: the ranks of one launcher find each other and start one agent.
#
# The ranks get no run directory here.  All processes of one launcher share their parent, and a parent's pid and start
# time name a session that no other job on the node has.  The process that gets the lock in there chooses the run
# directory and the run's clock, writes both into the lock file and starts ``stepscope attach``, which inherits the lock
# and becomes the agent; the others read the file.  The lock is released when the agent ends, for whatever reason, so
# the next rank that arrives starts another.

ANNOUNCEMENT_TIMEOUT_S = 10.0
"""How long the rank with the lock may take to publish the run; it needs a millisecond."""


def attach_to_run(name: str | None, runs: Path) -> None:
    """Record this process in the run of its launcher's ranks; if that is not possible it continues unrecorded."""
    try:
        session, run_dir, clock = _join_run(name, runs)
    except (StepscopeError, OSError) as error:
        reason = f"cannot create a run in {runs}: {error.strerror}" if isinstance(error, OSError) else error
        warn(f"this process is not recorded: {reason}")
        return
    os.environ[ENV_SESSION] = str(session)
    os.environ[ENV_RUN_DIR] = str(run_dir)
    os.environ[ENV_CLOCK] = clock
    os.environ.update(timed_collectives(os.environ))
    bootstrap.start_from_environment()


def _join_run(name: str | None, runs: Path) -> tuple[Path, Path, str]:
    """The session, the run directory and the clock of this job."""
    deadline = time.monotonic() + ANNOUNCEMENT_TIMEOUT_S
    owner = os.getpid() if rank_from(os.environ) is None else os.getppid()
    while time.monotonic() < deadline:
        session = _session(f"{owner}-{process_start_ticks(owner)}")
        path = session / SESSION_LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the agent of an earlier job has just removed the session
        try:
            first = _locked(lock)
            if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
                continue
            announced = _announced_run(lock)
            if first:
                try:
                    announced = _begin_run(lock, announced, session, name, runs)
                except (StepscopeError, OSError):
                    path.unlink()
                    session.rmdir()
                    raise
            if announced is not None:
                return session, *announced
        finally:
            os.close(lock)
        time.sleep(0.01)
    raise RingNoSpace(f"the other ranks did not publish their run directory ({path})")


def _session(name: str) -> Path:
    """In memory; on disk if that is not possible."""
    try:
        return make_session(session_root(), name, exist_ok=True)
    except RingNoSpace:
        return make_session(Path(tempfile.gettempdir()) / session_root().name, name, exist_ok=True)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _announced_run(lock: int) -> tuple[Path, str] | None:
    """The run directory, and its clock in the format of ``ENV_CLOCK``."""
    text = os.pread(lock, 1 << 16, 0)
    clock, _, run_dir = text[:-1].partition(b"\n")
    return (Path(os.fsdecode(run_dir)), os.fsdecode(clock)) if text.endswith(b"\n") else None


def _begin_run(
    lock: int, earlier: tuple[Path, str] | None, session: Path, name: str | None, runs: Path
) -> tuple[Path, str]:
    """Continue the run of an agent that died, or begin one; and start an agent for it."""
    if earlier is None or _is_over(earlier[0]):
        wanted = default_name(sys.argv, time.strftime(TIME_IN_NAME)) if name is None else checked_name(name)
        run_dir = take_folder(runs, wanted)
        os.ftruncate(lock, 0)
        clock = clock_now()
        os.pwrite(lock, b"%s\n%s\n" % (os.fsencode(clock), os.fsencode(run_dir)), 0)
        if name is not None and run_dir.name != name:
            warn(f"a run named {name} already exists; this one is named {run_dir.name}")
        warn(f"recording to {run_dir}")
    else:
        run_dir, clock = earlier
    _start_agent(lock, session, run_dir, clock)
    return run_dir, clock


def _is_over(run_dir: Path) -> bool:
    try:
        return bool(json.loads((run_dir / "run.json").read_bytes())["sealed"])
    except (OSError, ValueError, LookupError, TypeError):
        return True


def _start_agent(lock: int, session: Path, run_dir: Path, clock: str) -> None:
    # torchrun restarts its ranks when one fails: the agent lives until torchrun ends.
    owner = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    words = ("--owner", str(owner), "--session", str(session), "--run-dir", str(run_dir), "--", *sys.orig_argv)
    agent = helper_command("stepscope", "attach", *words)
    # Started by a shell that ends at once: a script that waits for its children must not see one that it did not start.
    # The agent's input is the lock: it has nothing to read, and it is held while the agent lives.  A reader of our
    # output through a pipe must not have to wait for the agent's end; a terminal does not wait.
    silent = "" if os.isatty(2) else "2>/dev/null"
    shell = ["/bin/sh", "-c", f'"$@" <&3 >/dev/null {silent} &', "stepscope", *agent]
    files = [(os.POSIX_SPAWN_DUP2, lock, 3)]
    # A separate session: the terminal's Ctrl-C and the launcher's kill of its process group must not reach the agent.
    environment = {**helper_environment(os.environ), ENV_CLOCK: clock}
    pid = os.posix_spawn(shell[0], shell, environment, file_actions=files, setsid=True)
    os.waitpid(pid, 0)


# -- Public functions -------------------------------------------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")

SUMMARY_TIMEOUT_S = 60


@failsafe
def init(*, name: str | None = None, dir: str = "runs") -> None:  # noqa: A002 - what the user calls it
    """Record this process if it was not started by ``stepscope run`` (which has begun already).

    All ranks of one launcher on one node join one run.  An agent process is started next to them; it ends with them and
    leaves the summary in ``dir/NAME``.
    """
    if bootstrap.current() is not None or bootstrap.switched_off(os.environ):
        return
    if ENV_SESSION in os.environ:
        bootstrap.start_from_environment()  # started by a process that is being recorded: join its run
    else:
        attach_to_run(name, Path(dir))


class step:  # noqa: N801 - reads as a statement in the user's script
    """Explicit step boundaries: a step ends where the ``with`` block ends, and optimizers no longer end steps."""

    def __enter__(self) -> None:
        recorder = bootstrap.current()
        if recorder is not None:
            recorder.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = bootstrap.current()
        if recorder is not None and kind is None:
            recorder.end_step(FLAG_EXPLICIT)


class phase:  # noqa: N801
    """A named part of a step, as a context manager or a decorator; names like ``input`` count as built-in phases."""

    def __init__(self, name: str) -> None:
        self._name = str(name)
        self._outer: list[int] = []

    def __enter__(self) -> None:
        recorder = bootstrap.current()
        slot = OTHER if recorder is None else recorder.slot_of(self._name)
        self._outer.append(NOT_NOW if recorder is None or slot == OTHER else recorder.ledger.enter(slot))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = bootstrap.current()
        outer = self._outer.pop()
        if outer != NOT_NOW and recorder is not None:
            recorder.ledger.leave(outer)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with phase(self._name):
                return function(*args, **kwargs)

        return inside


@failsafe
def note(**values: Any) -> None:
    """Store values with the current step (a loss, a batch size), or right after a step with the one that just ended.

    They appear as charts on the page, as ``note`` events of the run, and in the table ``metrics`` of ``stepscope sql``.
    """
    recorder = bootstrap.current()
    if recorder is None:
        return
    for text in note_texts(values):
        recorder.note(text)


@failsafe
def watch(model: Any, *, activations: bool = True, gradients: bool = True) -> None:
    """Name the model whose layers are sampled (docs/layers.md), also if it is on a GPU.

    Without this, the modules that the script calls are sampled.  ``activations=False`` leaves out what is
    kept for backward, peaks, and the search for NaN in outputs; ``gradients=False`` their norms and the time of
    backward.
    """
    recorder = bootstrap.current()
    if recorder is not None and recorder.layers is not None:
        recorder.layers.watch(model, activations=activations, gradients=gradients)


def summary() -> dict[str, Any]:
    """The summary of the run so far (docs/schema.md); empty when off.  Computed in a separate process."""
    run_dir = os.environ.get(ENV_RUN_DIR)
    if bootstrap.current() is None or not run_dir:
        return {}
    try:
        # The interpreter that began the run: the job's own may lack the packages for a summary.
        python = json.loads(Path(run_dir, "run.json").read_bytes())["executable"]
        command = helper_command("stepscope", "report", "--json", run_dir, python=python)
        done = subprocess.run(
            command, env=helper_environment(os.environ), capture_output=True, timeout=SUMMARY_TIMEOUT_S, check=True
        )
        result: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        warn(f"no summary available: {error}")
        return {}
    return result
