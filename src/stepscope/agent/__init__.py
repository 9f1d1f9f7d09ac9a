"""The agent: one process per node, beside the ranks, without torch, numpy or a database in it.

It drains rings into segments, samples the host, the ranks' processes and the GPUs each second, notices at once when a
rank dies, and writes it all to the run directory.  Nothing waits for it: when it dies the rings keep what they hold,
and another agent, or whoever opens the run, goes on from there.
"""
