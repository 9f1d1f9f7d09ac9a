"""The league: faults of known kind, rank, phase and step, and what Stepscope and TraceML say about them.

Reading order: ``truth`` (what is known of a run), ``cases`` (the matrix, as data), ``runner`` (a case under a tool),
``peer`` (TraceML's words in ours), ``replay`` (steps until detected), ``synthetic`` (the same over many seeds without a
process), ``score`` (claims against truth), ``table``.  docs/league.md says what it is for.

    PYTHONPATH=bench python -m league --only 'uneven/*' --traceml-python OTHER_ENV/bin/python
"""

__all__: list[str] = []
