"""Archive a run at its end (``stepscope run --archive``), in a separate process.

The launcher waits for it.  Whatever becomes of it, the exit code is the job's; one line says how to try again.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from importlib.util import find_spec

from stepscope.archive.location import ArchiveUrl
from stepscope.cli.launch.helpers import Mask, forget_signals, spawn, watched_signals
from stepscope.errors import UsageError
from stepscope.records.paths import helper_command, helper_environment
from stepscope.records.text import say

__all__ = ["archive_at_end", "check_installed"]

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL, when the user does not want to wait."""
PAUSE_S = 1.0
_LIBRARIES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}


def check_installed(url: ArchiveUrl) -> None:
    """UsageError before the job starts, rather than an error after it."""
    library = _LIBRARIES.get(url.scheme, "fsspec")
    if find_spec("fsspec") is None or find_spec(library) is None:
        extra = "archive-gcs" if library == "gcsfs" else "archive"
        raise UsageError(f"--archive {url.scheme}:// needs a package: pip install 'stepscope[{extra}]'")


def archive_at_end(run: str, url: ArchiveUrl, mask: Mask, *, quiet: bool) -> None:
    """Archive a run that is over; call within ``signals_held``, whose mask the process gets."""
    repeat = f"try again: {shlex.join(['stepscope', 'archive', run, '--to', str(url)])}"
    words = ["archive", run, "--to", str(url), *(["--quiet"] if quiet else [])]
    forget_signals()
    try:
        pid = spawn(helper_command("stepscope", *words), helper_environment(os.environ), mask)
    except OSError as error:
        say(f"the run was not archived: {error.strerror}; {repeat}")
        return
    code = _wait(pid)
    if code:
        say(f"the run was not archived{' (stopped)' if code < 0 else ''}; {repeat}")


def _wait(pid: int) -> int:
    """Wait for the process, or until a signal ends the wait; return its exit code."""
    deadline_s = float("inf")
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        caught = signal.sigtimedwait(watched_signals(), PAUSE_S)
        if caught is not None and caught.si_signo != signal.SIGCHLD:
            os.kill(pid, signal.SIGTERM)
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
