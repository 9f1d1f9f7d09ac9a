"""``stepscope.init()`` without ``stepscope run``: the ranks of one launcher find each other and start one agent.

Nobody hands the ranks a run directory here, so they compute it: all processes of one launcher share their parent, and
a parent's pid and start time name a session that no other job on the node has.  The first rank to take the lock
starts ``stepscope attach``, which creates the run and becomes the agent.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from stepscope.records.places import ENV_CLAIM, ENV_RUN_DIR, ENV_SESSION, log_path, session_root
from stepscope.recorder import bootstrap
from stepscope.recorder.failure import watch_end
from stepscope.recorder.guard import warn
from stepscope.recorder.identity import attempt_from, rank_from
from stepscope.recorder.output import keep_output
from stepscope.ring.writer import process_start_ticks

__all__ = ["attach", "python_path"]


def attach(name: str | None, runs: Path) -> None:
    rank = rank_from(os.environ)
    owner = os.getpid() if rank is None else os.getppid()
    ticks = process_start_ticks(owner)
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "session"
    run_dir = (runs / f"{name or script}-{ticks:x}{owner:x}").absolute()
    session = session_root() / f"{owner}-{ticks}"
    session.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ[ENV_SESSION] = str(session)
    os.environ[ENV_RUN_DIR] = str(run_dir)
    os.environ[ENV_CLAIM] = "main" if rank is None else f"rank {rank}"
    if _first(session):
        _start_agent(session, run_dir)
    recorder = bootstrap.start(session, run_dir)
    for _ in range(100):  # the run directory is made by the agent; a second's patience at start-up costs no step
        if run_dir.is_dir():
            break
        time.sleep(0.01)
    keep_output(log_path(run_dir, rank=rank, attempt=attempt_from(os.environ)))
    watch_end(recorder, run_dir)


def python_path() -> str:
    """A PYTHONPATH under which this very Stepscope is found."""
    package = str(Path(__file__).parents[2])
    earlier = os.environ.get("PYTHONPATH", "")
    return package + os.pathsep + earlier if earlier else package


def _first(session: Path) -> bool:
    try:
        os.close(os.open(session / "agent.lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _start_agent(session: Path, run_dir: Path) -> None:
    command = [sys.executable, "-m", "stepscope", "attach", "--session", str(session), "--run-dir", str(run_dir)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("STEPSCOPE")}
    environment["PYTHONPATH"] = python_path()
    # A session of its own: the terminal's Ctrl-C and the launcher's kill of its process group are not for the agent.
    os.posix_spawn(
        sys.executable,
        [*command, "--", *sys.orig_argv],
        environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsid=True,
    )
    warn(f"recording to {run_dir}")
