"""Other programs beside a job: real processes that use the CPU, as on a machine that is shared.

    with machine_load("bursts"):
        ...                                  # the job

They are none of the job's own processes, and end by themselves if the one that started them does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["LOADS", "burning", "machine_load"]

LOADS = ("none", "one", "all", "bursts")
"""Nothing; one busy process; one for each core; one for each core that is busy for 0.3 to 3 s now and then, each time
on another core."""

BURNER = "import os\np = os.getppid()\nwhile os.getppid() == p:\n    for _ in range(1_000_000): pass"
BURSTS = """
import os, random, sys, time
parent, mine = os.getppid(), random.Random(int(sys.argv[1]))
cores = sorted(os.sched_getaffinity(0))
while os.getppid() == parent:
    os.sched_setaffinity(0, {mine.choice(cores)})
    end = time.monotonic() + mine.uniform(0.3, 3.0)
    while time.monotonic() < end:
        for _ in range(100_000): pass
    time.sleep(mine.uniform(0.3, 3.0))
"""


@contextlib.contextmanager
def machine_load(kind: str) -> Iterator[None]:
    cores = len(os.sched_getaffinity(0))
    commands: dict[str, list[tuple[str, ...]]] = {
        "none": [],
        "one": [(BURNER,)],
        "all": [(BURNER,)] * cores,
        "bursts": [(BURSTS, str(number)) for number in range(cores)],
    }
    with _beside(commands[kind]):
        yield


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """So many processes that are busy all the time."""
    with _beside([(BURNER,)] * count):
        yield


@contextlib.contextmanager
def _beside(commands: list[tuple[str, ...]]) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-S", "-c", *words]) for words in commands]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
