"""Live diagnosis: a window of aligned steps in, findings out.  Pure functions: no I/O, no clock, no state.

Three parts, each importing only from those above it:

- ``engine``: what all rules share.  ``window`` selects the steps and ranks to compare, ``view`` chooses the clock and
  separates work from waiting, ``statistics`` holds the robust tests, ``thresholds`` every number with its reason, and
  ``claims`` the result of a rule: a finding and the step time it explains.
- ``rules``: one module per family of findings (``stragglers``, ``bounds``, ``crashes`` …); ``advice`` says what to do.
- ``findings``: runs the rules in order, ranks their findings and reports a healthy run; also follows a live job.

    window = build_window(run)
    findings = diagnose(run, window)
"""

from stepscope.diagnosis.engine.window import Apart, Window, build_window
from stepscope.diagnosis.findings import diagnose

__all__ = ["Apart", "Window", "build_window", "diagnose"]
