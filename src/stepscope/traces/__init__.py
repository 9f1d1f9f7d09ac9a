"""Traces of torch.profiler and Nsight Systems: files → columns → analyses → findings.

Read in this order:

    columns.py      what a trace is to everything after the reading: arrays, one row per slice, integer nanoseconds
    read.py         which files are traces; kineto.py (Chrome JSON) and nsight.py (SQLite) read them
    opening.py      one file → its traces, from cache.py (kept.py, parquet.py) where it was read before
    engine.py       many files → one analysis per rank, by worker.py's processes or Ray; per file: analyse.py
    window.py       which rows count: profiler steps, the last one left out
    links.py        which call launched which device work; calls.py: which call lies inside which
    rank.py         all analyses of one rank → one RankAnalysis of bounded size (this is what a worker or Ray returns)
    job.py          RankAnalysis of all ranks → one JobAnalysis: collectives, clocks, critical path across ranks
    findings.py     JobAnalysis → findings, in the form of live ones

Analyses are functions from columns to plain values; nothing here prints or draws.
"""
