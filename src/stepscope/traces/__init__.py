"""Trace analysis for torch.profiler and Nsight Systems: files → columns → analyses → findings.

The layers, lowest first. A module imports only from layers above it in this list:

    model/               a trace as columns in integer nanoseconds; which rows count, what launched what
    reading/             files → columns, with a cache for files that were read before
    device/ host/        analyses of one rank: its device work, its host threads
    collective_calls.py  the collective calls of one rank
    path/                the critical path of one rank, and what-if changes to it
    rank_analysis.py     all analyses of one rank → one RankAnalysis of bounded size
    engine.py            many files → many RankAnalyses, in local processes or on Ray
    across_ranks/        (same layer) ranks compared: calls matched, clocks, who arrives last, critical path, replay
    job.py               which files are the job; one JobAnalysis of all ranks
    rules/               figures of a job → findings, one file per family of rules
    rulebook.py          the rules in order, what each may claim, and who wins
    findings.py          runs them; order of findings, and the verdict
    outputs              exports.py, job_diff.py, sql.py: timelines, CSV, the comparison of two jobs, SQL

Analyses are functions from columns to plain values. Nothing here renders output.
"""
