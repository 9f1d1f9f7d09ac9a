"""Stacks by way of py-spy, if the machine has it, of processes that do not answer their signal.

It reads another process's memory, which many systems forbid: no answer is the usual one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack
from typing import IO, Any

from stepscope.records.hang import Frame, ThreadStack

__all__ = ["parse_dump", "spy"]

AT_ONCE = 4
LOOK_S = 0.02
MAX_BYTES = 1 << 20
MAX_THREADS = 200
MAX_FRAMES = 200


def spy(pids: Collection[int], *, patience_s: float) -> dict[int, tuple[ThreadStack, ...]]:
    """By pid, of the first few that answer in time."""
    program = shutil.which("py-spy")
    if program is None:
        return {}
    found: dict[int, tuple[ThreadStack, ...]] = {}
    deadline = time.monotonic() + patience_s
    with ExitStack() as stack:
        running = {pid: _start(program, pid, stack) for pid in list(pids)[:AT_ONCE]}
        while running and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            for pid, (process, output) in list(running.items()):
                if process.poll() is not None:
                    del running[pid]
                    output.seek(0)
                    if threads := parse_dump(output.read(MAX_BYTES)):
                        found[pid] = threads
        for process, _ in running.values():
            process.kill()
            process.wait()
    return found


def parse_dump(text: bytes) -> tuple[ThreadStack, ...]:
    """What ``py-spy dump --json`` printed; nothing when it is anything else."""
    try:
        threads = json.loads(text)
        return tuple(_thread(thread) for thread in threads[:MAX_THREADS])
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        return ()


def _start(program: str, pid: int, stack: ExitStack) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # the stack closes it
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=output, stderr=quiet), output


def _thread(thread: dict[str, Any]) -> ThreadStack:
    name = str(thread.get("thread_name") or "")
    frames = tuple(
        Frame(file=str(frame["filename"]), line=max(0, int(frame["line"])), function=str(frame["name"]))
        for frame in thread["frames"][:MAX_FRAMES]
    )
    return ThreadStack(main=name == "MainThread", name=name, frames=frames)
