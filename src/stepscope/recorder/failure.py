"""How a process ended: an uncaught exception is written down before the interpreter goes, an orderly exit is marked.

A process that did neither was killed; the agent sees that from outside.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from stepscope.records.places import error_path
from stepscope.recorder.guard import failsafe
from stepscope.recorder.identity import rank_from
from stepscope.recorder.recorder import Recorder
from stepscope.ring import RingState

__all__ = ["watch_end"]

MAX_TRACEBACK = 64 * 1024
LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch", "deepspeed.launcher.runner")


def watch_end(recorder: Recorder, run_dir: Path) -> None:
    earlier = sys.excepthook
    pid = os.getpid()
    failed = False

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal failed
        failed = True
        if os.getpid() == pid:
            recorder.set_state(RingState.EXCEPTION)
            write_down(kind, error, trace)
        earlier(kind, error, trace)

    @failsafe
    def write_down(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))[-MAX_TRACEBACK:]
        path = error_path(run_dir, pid)
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            json.dumps(
                {
                    "schema": 1,
                    "rank": _rank(recorder),
                    "pid": pid,
                    "type": kind.__name__,
                    "message": str(error)[:4096],
                    "traceback": text,
                    "wall_ns": time.time_ns(),
                    "step": recorder.step if recorder.ring is not None else None,
                    "exit_codes": _exit_codes(error),
                }
            )
        )

    def at_exit() -> None:
        if not failed and os.getpid() == pid:
            recorder.set_state(RingState.EXITED)

    sys.excepthook = excepthook
    atexit.register(at_exit)


def _rank(recorder: Recorder) -> int | None:
    """Whose error it is; None for a launcher, which fails because a rank did."""
    if recorder.ring is not None:
        return recorder.identity.rank
    rank = rank_from(os.environ)
    return 0 if rank is None and not any(name in sys.modules for name in LAUNCHERS) else rank


def _exit_codes(error: Any) -> dict[str, int]:
    """What torchrun's ChildFailedError knows of its ranks: negative for a signal."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict):
        return {}
    return {str(rank): int(getattr(failure, "exitcode", 0)) for rank, failure in failures.items()}
