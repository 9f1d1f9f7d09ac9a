"""Live diagnosis: a window of aligned steps in, findings out.  Pure functions: no I/O, no clock, no state.

- ``engine``: what all rules share.  ``window`` selects the steps and ranks to compare, ``view`` chooses the clock and
  separates work from waiting.  Statistics, thresholds and claims are in ``judge``.
- ``rules``: one module per family of findings (``stragglers``, ``bounds``, ``crashes`` …), with its advice.
- ``rulebook``: the table of rules: their order, what each may claim, and who wins.
- ``findings``: runs the table, and then ``crowding`` and ``healthy``; ``hysteresis`` follows a live job.

    window = build_window(run)
    findings = diagnose(run, window)

All names are loaded on first use: a hub that serves finished runs needs the clock of ``engine``, and no rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.diagnosis.engine.window import Apart, Window, build_window
    from stepscope.diagnosis.findings import diagnose

__all__ = ["Apart", "Window", "build_window", "diagnose"]


def __getattr__(name: str) -> Any:
    if name == "diagnose":
        from stepscope.diagnosis.findings import diagnose

        return diagnose
    if name in __all__:
        from stepscope.diagnosis.engine import window

        return getattr(window, name)
    raise AttributeError(f"module 'stepscope.diagnosis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
