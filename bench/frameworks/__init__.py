"""Frameworks with known faults: whether Stepscope names the kind, the rank and the line (``make frameworks``).

Reading order: ``jobs/`` (what trains, in each framework), ``cases`` (the matrix and what should be found, as data),
``score`` (findings against that), ``__main__`` (runs the cases).  bench/README.md has its options.
"""
