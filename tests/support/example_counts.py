"""How many examples a test draws: all in ``make soak`` and ``make fuzz``, an eighth in ``make test``."""

from __future__ import annotations

import os

__all__ = ["ALL", "examples", "seeds"]

ALL = "STEPSCOPE_EXAMPLES" in os.environ or "STEPSCOPE_FUZZ" in os.environ
FEWEST = 6
FEWEST_SEEDS = 2


def examples(number: int) -> int:
    """That many if all are asked for.  Examples are drawn in a fixed order, so fewer are the first of them."""
    return number if ALL else max(number // 8, min(number, FEWEST))


def seeds(number: int) -> range:
    """The seeds of a test that is marked ``seeds``: simulated jobs that differ in their noise only."""
    return range(number if ALL else max(number // 4, FEWEST_SEEDS))
