"""How a process ended: an uncaught exception is recorded before the interpreter exits, an orderly exit is marked.

A process that did neither was killed; the agent sees that from outside.  Processes of multiprocessing, and of
``torch.multiprocessing.spawn``, catch and format their exceptions themselves: they are intercepted there.  The parent
of the latter raises too: if a child was not recorded, the parent records the exception for it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.identity import is_launcher, rank_from
from stepscope.records import run_clock
from stepscope.records.files import file_mode, folder_mode
from stepscope.records.paths import error_path, flight_path, hangs_folder, snapshot_path
from stepscope.records.text import memory_cause

if TYPE_CHECKING:
    from stepscope.recorder.recorder import Recorder

__all__ = ["record_failure", "watch_end", "watch_multiprocessing"]

MAX_TRACEBACK = 64 * 1024
MAX_MESSAGE = 4096
ENDS_OF_PROCESSES = (("multiprocessing.process", "_bootstrap"), ("torch.multiprocessing.spawn", "_wrap"))
JUST_OVER_NS = 60 * 10**9


def watch_end(known: Callable[[], Recorder | None], run_dir: Path, *, helper: bool) -> None:
    """Record how this process ends; ``helper``: a rank started it, so its end matters only if it trained after all.

    ``known``: returns the recorder, or None before there is one.
    """
    earlier = sys.excepthook
    pid = os.getpid()
    failed = False

    def trained() -> bool:
        """Whether this very process trained; a process that the script forked may have, and inherits these hooks."""
        recorder = known()
        return recorder is not None and recorder.ring is not None and recorder.identity.pid == os.getpid()

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        nonlocal failed
        failed = True
        if (os.getpid() == pid and not helper) or trained():
            record_failure(known(), run_dir, error, "".join(traceback.format_exception(kind, error, trace)))
        earlier(kind, error, trace)

    def kept_inside(error: BaseException, text: str) -> None:
        nonlocal failed
        if trained():
            failed = True
            record_failure(known(), run_dir, error, text)

    def at_exit() -> None:
        if not failed:
            _mark_exited(known())

    sys.excepthook = excepthook
    atexit.register(at_exit)
    _mark_quick_exits(known)
    watch_multiprocessing(kept_inside)


def watch_multiprocessing(failed: Callable[[BaseException, str], None]) -> None:
    """Call ``failed`` with an exception that ends a process of multiprocessing, which no hook sees.

    Both kinds of process format the exception just before: that call is intercepted.  A wrapper around their function
    would appear in the traceback that they show.
    """
    for name in ("print_exc", "format_exc"):
        original = getattr(traceback, name)

        def listening(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if (caller.f_globals.get("__name__"), caller.f_code.co_name) in ENDS_OF_PROCESSES:
                error = sys.exc_info()[1]
                if error is not None:
                    failed(error, "".join(traceback.format_exception(error)))
            return original(*args, **kwargs)

        setattr(traceback, name, functools.wraps(original)(listening))


def _mark_exited(recorder: Recorder | None) -> None:
    if recorder is not None:
        from stepscope.ring.layout import RingState

        recorder.set_state(RingState.EXITED)


def record_failure(recorder: Recorder | None, run_dir: Path, error: BaseException, text: str) -> None:
    # An interrupted launcher soon interrupts again: not within these milliseconds.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    account = _write_down(recorder, run_dir, error, text)
    if recorder is not None:
        from stepscope.ring.layout import RingState

        if account is not None and account["rank"] is not None:
            _keep_memory(recorder, run_dir, error, account)
        recorder.set_state(RingState.EXCEPTION)
        _keep_flight(recorder, run_dir)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@failsafe
def _keep_memory(recorder: Recorder, run_dir: Path, error: BaseException, account: dict[str, Any]) -> None:
    """If memory ran out: add what held it to the account, and keep the state of CUDA's allocator next to it.

    A dying process holds the rest of the job up for it: 2 s at most, and the time to write a bounded file.
    """
    cause = memory_cause(account["type"], account["message"])
    torch: Any = sys.modules.get("torch")
    if cause is None or getattr(torch, "nn", None) is None:
        return
    from stepscope.recorder.layers.memory_dump import MemoryDump, save_snapshot

    device = "cuda" if cause == "oom_cuda" else "cpu"
    dump = MemoryDump(torch, device, error.__traceback__, compiled=recorder.has_compiled)
    memory = dump.account([recorder.activations_of(tree) for tree in dump.trees])
    account["memory"] = memory
    _save(run_dir, account)
    recorder.keep_layers(dump.trees, dump.sizes)
    if device == "cuda" and torch.cuda.is_initialized():
        path = snapshot_path(run_dir, account["rank"])
        problem = failsafe(save_snapshot)(torch, path)
        memory["snapshot"] = None if problem or problem is None else f"{path.parent.name}/{path.name}"
        memory["snapshot_problem"] = problem or ("" if problem == "" else "it failed")
        _save(run_dir, account)


@failsafe
def _keep_flight(recorder: Recorder, run_dir: Path) -> None:
    """Keep the Flight Recorder's data: only comparing the dumps of several ranks may show which one disagreed.

    At most two thousand calls, fifty milliseconds.  If the job hung, the agent has the data from that time, which is
    more useful than the current data.
    """
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None or recorder.ring is None or recorder.identity.world_size < 2 or _hung(run_dir):
        return
    collectives = _flight(c10d)
    if collectives:
        path = flight_path(run_dir, recorder.identity.rank)
        path.parent.mkdir(mode=folder_mode(run_dir), exist_ok=True)
        _replace(path, collectives)


def _flight(c10d: Any) -> bytes:
    """The data of all recorders: NCCL has its own, and so has, from torch 2.15 on, every backend."""
    from stepscope.flight.dump import combined

    nccl: Any = getattr(c10d, "_dump_nccl_trace_json", None)
    gloo: Any = getattr(c10d, "_dump_fr_trace_json", None)
    answers = [nccl(True, False) if nccl else b""]
    if "backend" in (getattr(gloo, "__doc__", None) or ""):
        answers.append(gloo(True, False, "nccl2"))
    return combined(*answers, gloo(True, False) if gloo else b"")


def _hung(run_dir: Path) -> bool:
    """Whether the job hangs, or did until a moment ago."""
    for path in hangs_folder(run_dir).glob("*.json"):
        try:
            hang = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if not isinstance(hang, dict) or hang.get("over") == "recovered":
            continue
        over_ns = hang.get("over_wall_ns")
        if not isinstance(over_ns, int) or run_clock.wall_ns() - over_ns < JUST_OVER_NS:
            return True
    return False


def _mark_quick_exits(known: Callable[[], Recorder | None]) -> None:
    """Mark ``os._exit(0)``, which runs no exit handlers, as an orderly end: forked processes exit this way."""
    leave = os._exit

    def _exit(status: int) -> None:
        if status == 0:
            _mark_exited(known())
        leave(status)

    os._exit = _exit  # type: ignore[assignment]


@failsafe
def _write_down(recorder: Recorder | None, run_dir: Path, error: BaseException, text: str) -> dict[str, Any]:
    trained = recorder is not None and recorder.ring is not None
    account: dict[str, Any] = {
        "schema": 1,
        "rank": _rank(recorder),
        "pid": os.getpid(),
        "type": type(error).__name__,
        "message": str(error)[:MAX_MESSAGE],
        "traceback": text[-MAX_TRACEBACK:],
        "wall_ns": run_clock.wall_ns(),
        "step": recorder.step if recorder is not None and trained else None,
        "script": not trained and not is_launcher(sys.orig_argv) and rank_from(os.environ) is None,
        "exit_codes": _exit_codes(error),
    }
    child, index = getattr(error, "error_pid", None), getattr(error, "error_index", None)
    if isinstance(child, int) and isinstance(index, int):
        account.update(rank=None)  # whatever this process was: this report is about another
        if type(error).__name__ == "ProcessRaisedException" and not error_path(run_dir, child).exists():
            _save(run_dir, {**account, **_of_child(str(error)), "pid": child, "rank": index})
    _save(run_dir, account)
    return account


def _save(run_dir: Path, account: dict[str, Any]) -> None:
    path = error_path(run_dir, account["pid"])
    path.parent.mkdir(mode=folder_mode(run_dir), exist_ok=True)
    _replace(path, json.dumps(account).encode())


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".tmp")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file_mode(path.parent)), "wb") as file:
        file.write(data)
    partial.replace(path)


def _rank(recorder: Recorder | None) -> int | None:
    """The rank the error belongs to; None for a launcher, which fails because a rank did."""
    if recorder is not None and recorder.ring is not None:
        return recorder.identity.rank
    return None if is_launcher(sys.orig_argv) else rank_from(os.environ) or 0


def _exit_codes(error: Any) -> dict[str, int]:
    """Exit codes by rank, negative for a signal, from the errors of torchrun and torch.multiprocessing."""
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
