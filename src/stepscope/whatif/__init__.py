"""What a job would cost without its stragglers: operation-level traces, replayed over the ranks' dependencies.

    meta.py          the shape of the job: how many pipeline stages, data-parallel ranks …
    kinds.py         the kinds of operations there are
    table.py         the table of operations, read and checked
    operations.py    the same as arrays, the steps beside each other
    dependencies.py  which operation waits for which
    replay.py        every operation as early as these allow, for any set of durations
    attribution.py   the same job with some durations replaced: who or what makes it slow

docs/whatif.md has the formulas and where they come from.
"""

from __future__ import annotations

__all__: list[str] = []
