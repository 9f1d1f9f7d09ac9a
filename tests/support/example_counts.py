"""How many examples a property-based test draws: all in ``make soak`` and ``make fuzz``, a quarter in ``make test``."""

from __future__ import annotations

import os

__all__ = ["examples"]

ALL = "STEPSCOPE_EXAMPLES" in os.environ or "STEPSCOPE_FUZZ" in os.environ
FEWEST = 10


def examples(number: int) -> int:
    """That many if all are asked for.  Examples are drawn in a fixed order, so fewer are the first of them."""
    return number if ALL else max(number // 4, min(number, FEWEST))
