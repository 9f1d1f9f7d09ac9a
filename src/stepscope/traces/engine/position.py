"""How far a process has read a file, by the kernel's own account: no reader has to tell."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["position_in", "watched"]

EVERY_S: Final = 0.2


def position_in(path: Path, pid: int) -> int:
    """Bytes from the start of the file; 0 where the process has not opened it, or nobody knows."""
    wanted = path.resolve()
    process = Path(f"/proc/{pid}")
    furthest = 0
    try:
        links = list((process / "fd").iterdir())
    except OSError:
        return 0
    for link in links:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if link.readlink() == wanted:
                first = (process / "fdinfo" / link.name).read_text().split("\n", 1)[0]
                furthest = max(furthest, int(first.split()[1]))
    return furthest


@contextlib.contextmanager
def watched(path: Path, tell: Callable[[int], None] | None, every_s: float = EVERY_S) -> Iterator[None]:
    """While this process reads ``path`` in the body, a thread tells how far it is."""
    if tell is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            tell(position_in(path, os.getpid()))

    thread = threading.Thread(target=watch, name="stepscope-position", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
