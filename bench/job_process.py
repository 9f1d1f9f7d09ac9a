"""A job of a benchmark as a process: wait for it, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import SOURCE

__all__ = ["end_job", "finish_job"]


def finish_job(
    words: Sequence[str],
    log: Path,
    *,
    limit_s: float,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int | None:
    """Run a command on the sources beside us, with its output in ``log``: its exit code, or None if it was killed."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(variables or {})}
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def end_job(process: subprocess.Popen[bytes]) -> None:
    """Its own first, so that it ends its ranks; then whatever is left of the group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
