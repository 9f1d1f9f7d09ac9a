"""How a process ended: an uncaught exception is written down before the interpreter goes, an orderly exit is marked.

A process that did neither was killed; the agent sees that from outside.  Processes of ``torch.multiprocessing.spawn``
catch their exceptions themselves and hand them to their parent, which raises: it writes down the child's, not its own.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.identity import is_launcher, rank_from
from stepscope.recorder.recorder import Recorder
from stepscope.records.places import error_path
from stepscope.ring import RingState

__all__ = ["watch_end"]

MAX_TRACEBACK = 64 * 1024
MAX_MESSAGE = 4096


def watch_end(recorder: Recorder, run_dir: Path, *, helper: bool) -> None:
    """``helper``: a process that some rank started; its end is of interest only if it trained after all."""
    earlier = sys.excepthook
    pid = os.getpid()
    failed = False

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal failed
        failed = True
        if os.getpid() == pid and (not helper or recorder.ring is not None):
            # A launcher that was interrupted soon interrupts again: not within these milliseconds.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            _write_down(recorder, run_dir, error, "".join(traceback.format_exception(kind, error, trace)))
            recorder.set_state(RingState.EXCEPTION)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        earlier(kind, error, trace)

    def at_exit() -> None:
        if not failed and os.getpid() == pid:
            recorder.set_state(RingState.EXITED)

    sys.excepthook = excepthook
    atexit.register(at_exit)
    _mark_quick_exits(recorder)


def _mark_quick_exits(recorder: Recorder) -> None:
    """``os._exit(0)``, which runs no exit handlers, is an orderly end too: forked processes leave by it."""
    leave = os._exit

    def _exit(status: int) -> None:
        if status == 0:
            recorder.set_state(RingState.EXITED)
        leave(status)

    os._exit = _exit  # type: ignore[assignment]


@failsafe
def _write_down(recorder: Recorder, run_dir: Path, error: BaseException, text: str) -> None:
    account: dict[str, Any] = {
        "schema": 1,
        "rank": _rank(recorder),
        "pid": os.getpid(),
        "type": type(error).__name__,
        "message": str(error)[:MAX_MESSAGE],
        "traceback": text[-MAX_TRACEBACK:],
        "wall_ns": time.time_ns(),
        "step": recorder.step if recorder.ring is not None else None,
        "exit_codes": _exit_codes(error),
    }
    child, index = getattr(error, "error_pid", None), getattr(error, "error_index", None)
    if isinstance(child, int) and isinstance(index, int):
        account.update(rank=None)  # whatever this process was: now it speaks of another
        if type(error).__name__ == "ProcessRaisedException":
            _save(run_dir, {**account, **_of_child(str(error)), "pid": child, "rank": index})
    _save(run_dir, account)


def _save(run_dir: Path, account: dict[str, Any]) -> None:
    path = error_path(run_dir, account["pid"])
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(account))
    partial.replace(path)


def _rank(recorder: Recorder) -> int | None:
    """Whose error it is; None for a launcher, which fails because a rank did."""
    if recorder.ring is not None:
        return recorder.identity.rank
    return None if is_launcher(sys.orig_argv) else rank_from(os.environ) or 0


def _exit_codes(error: Any) -> dict[str, int]:
    """By rank, negative for a signal: what the errors of torchrun and of torch.multiprocessing know."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        return {str(rank): int(getattr(failure, "exitcode", 0)) for rank, failure in failures.items()}
    code = getattr(error, "exit_code", None)
    return {str(error.error_index): code} if isinstance(code, int) and hasattr(error, "error_index") else {}


def _of_child(message: str) -> dict[str, str]:
    """The child's exception as its parent has it: a line of the parent's, then the traceback as text."""
    text = message.partition("error:\n")[2].strip()
    last = next((line for line in reversed(text.splitlines()) if line and not line[0].isspace()), "")
    kind, _, what = last.partition(": ")
    return {"traceback": text[-MAX_TRACEBACK:], "type": kind.rpartition(".")[2], "message": what[:MAX_MESSAGE]}
