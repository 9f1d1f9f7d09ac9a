"""What a job would cost without its stragglers: operation-level traces, replayed over the ranks' dependencies.

    operations.py    the shape of the job, the kinds of operations, and their table as arrays [operation, step, lane]
    replay.py        the dependencies, when all ends for any set of durations (``judge/replay.py``), and the
                     attribution of the slowdown to ranks, stages and kinds of operations

docs/whatif.md has the formulas and their sources.
"""

from __future__ import annotations

__all__: list[str] = []
