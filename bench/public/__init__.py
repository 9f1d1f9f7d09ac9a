"""Public training programs, bare and recorded, on a quiet and on a busy machine (``make public``).

Reading order: ``cases`` (the programs, as data), ``data`` (the datasets they read), ``runner`` (runs one), ``faults``
(a program with a fault), ``score`` (compares and judges), ``__main__`` (all of them).  bench/README.md has its options.
"""
