"""Pure rules: a window of aligned steps in, findings out.  No I/O, no clock, no state.

Reading order: ``window`` (which steps are compared), ``view`` (which clock, and what is work and what is wait),
``robust`` (the statistics), ``thresholds`` (every number and its reason), then one file per family of findings
(``crashes``, ``stragglers``, ``bounds``, ``healthy``) and ``rules``, which asks them all.

    window = build_window(run.ranks)
    findings = diagnose(run, window)
"""

from stepscope.diagnosis.engine.window import Apart, Window, build_window
from stepscope.diagnosis.findings import diagnose

__all__ = ["Apart", "Window", "build_window", "diagnose"]
