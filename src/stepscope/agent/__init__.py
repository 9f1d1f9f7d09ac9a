"""The agent: one process per node next to the ranks, without torch, numpy or a database.

It drains rings into segments, samples the host, the ranks' processes and the GPUs every second, notices immediately
when a rank dies, and writes everything to the run directory. Nothing waits for it: if it dies, the rings keep their
contents, and another agent or the next process that opens the run continues from there.
"""
