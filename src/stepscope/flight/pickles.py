"""Unpickle data from untrusted sources: no code is run, memory and stack are bounded.

A pickle can do harm even without calling anything, so there are three protections. No name may be looked up
(``find_class`` refuses everything), so nothing can be imported or called. The kernel limits memory in proportion to the
size of the file (a few bytes can claim a memo of gigabytes). The stack is deep enough for tuples nested as deep as the
file has bytes, which Python hashes without checking the depth.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from stepscope.errors import DumpError

__all__ = ["MAX_BYTES", "PlainUnpickler", "load_plain", "memory_bounded"]

MAX_BYTES = 1 << 29
"""A ring of 2,000 entries with deep stacks takes about 10 MB."""
MEMORY_PER_BYTE = 48
"""An empty dictionary is one byte in a pickle and 64 in memory; dumps of torch take 4 to 8."""
MEMORY_AT_LEAST = 1 << 28
STACK_PER_BYTE = 224
STACK_AT_LEAST = 1 << 23
STACK_AT_MOST = 1 << 36
PAGE = 4096


class PlainUnpickler(pickle.Unpickler):
    """Refuses every name that a pickle requests."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"refers to {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("refers to an external object")


def load_plain(data: bytes) -> Any:
    """The dictionaries, lists, tuples, strings and numbers in a pickle; DumpError for anything else."""
    if len(data) > MAX_BYTES:
        raise DumpError(f"too large for a dump: {len(data)} bytes")
    answer: list[Any] = []
    failure: list[BaseException] = []

    def load() -> None:
        try:
            answer.append(PlainUnpickler(io.BytesIO(data)).load())
        # Damaged opcodes make the unpickler raise almost any exception.
        except (pickle.UnpicklingError, EOFError, MemoryError, RecursionError, OverflowError) as error:
            failure.append(error)
        except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
            failure.append(error)

    stack = min(max(len(data) * STACK_PER_BYTE, STACK_AT_LEAST), STACK_AT_MOST) // PAGE * PAGE
    with memory_bounded(len(data), stack):
        if len(data) * STACK_PER_BYTE <= STACK_AT_LEAST:
            load()
        else:
            _in_deep_thread(load, stack)
    if not answer:
        raise DumpError(f"not a pickle of plain data: {_told(failure)}")
    return answer[0]


def _in_deep_thread(load: Any, stack: int) -> None:
    before = threading.stack_size(stack)
    try:
        thread = threading.Thread(target=load, name="stepscope-unpickle")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()


@contextlib.contextmanager
def memory_bounded(size: int, stack: int = 0) -> Iterator[None]:
    """Limit the growth of the process to what a dump of that size needs.

    There is no limit if the kernel does not report the size of the process.
    """
    extra = size * MEMORY_PER_BYTE + MEMORY_AT_LEAST + stack
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + extra
        wanted = limit if soft == resource.RLIM_INFINITY else min(limit, soft)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    except (OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _told(failure: list[BaseException]) -> str:
    if not failure:
        return "no answer"
    text = str(failure[0]).split("\n")[0][:120]
    return text if isinstance(failure[0], pickle.UnpicklingError) and text else type(failure[0]).__name__
