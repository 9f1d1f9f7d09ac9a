"""Traces of torch.profiler and Nsight Systems: files → columns → analyses → findings.

Read in this order:

    model/          a trace as columns, integer nanoseconds; which rows count, what launched what
    reading/        files → columns;  cache/: what was read before
    device/ host/   analyses of one rank;  path/: its critical path, and what if
    rank.py         all of them → one RankAnalysis of bounded size
    engine/         many files → many RankAnalyses, by processes here or by Ray
    ranks/          ranks compared: collectives, clocks
    job.py          RankAnalyses → one JobAnalysis, with findings.py and its rules/
    diff/           two jobs compared;  timeline/, sql.py, csv_out.py: other ways out

Analyses are functions from columns to plain values; nothing here draws.
"""
