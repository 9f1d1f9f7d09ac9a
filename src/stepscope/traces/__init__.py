"""Traces of torch.profiler and Nsight Systems: files → columns → analyses → findings.

Read in this order:

    columns.py      what a trace is to everything after the reading: arrays, one row per slice, integer nanoseconds
    read.py         paths in, traces out; below it kineto.py (Chrome JSON), nsight.py (SQLite), cache.py (Parquet)
    window.py       which rows count: profiler steps, the last one left out
    links.py        which call launched which device work; calls.py: which call lies inside which
    rank.py         all analyses of one rank → one RankAnalysis of bounded size (this is what a worker or Ray returns)
    job.py          RankAnalysis of all ranks → one JobAnalysis: collectives, clocks, critical path across ranks
    findings.py     JobAnalysis → findings, in the form of live ones

Analyses are functions from columns to plain values; nothing here prints or draws.
"""
