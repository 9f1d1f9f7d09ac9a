"""Jobs on NCCL with known faults: the verdicts' league (``make gpu-league``) and what recording them costs.

Reading order: ``job`` (what trains), ``cases`` (the matrix, as data), ``score`` (findings against what was measured),
``shared_gpu`` (several ranks on one GPU), ``league`` (runs the cases), ``overhead``.  docs/league.md says what it is
for.
"""
