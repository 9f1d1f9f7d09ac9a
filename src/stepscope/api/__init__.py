"""The Python API for recorded runs: ``stepscope.open(run)`` and ``stepscope.compare(a, b)``; traces have a similar one.

- ``run``: ``Run``, a run as it was when it was opened; its tables are data frames (``stepscope/frame.py``).
- ``comparison``: ``Comparison``, the result of ``stepscope compare`` as an object.

Nothing is computed here: summary, findings, layers and comparisons come from the functions that the command line
uses, tables from ``stepscope sql``.  ``import stepscope`` loads none of this; the process that trains has no need of
it.  What is public, and for how long: docs/python-api.md.
"""

from stepscope.api.comparison import Comparison, compare
from stepscope.api.run import Run, open  # noqa: A004

__all__ = ["Comparison", "Run", "compare", "open"]
