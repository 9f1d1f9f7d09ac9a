"""Many runs together: what a cluster's GPU hours were spent on, and which hosts, links and changes made jobs slow.

    record     what the catalog has of a run, from its summary
    catalog    these records of tens of thousands of runs in a DuckDB file, updated from the run folders
    columns    the records as arrays, the input of everything below
    hours      GPU hours by cause, over time, by job, team, user and host
    chance     how likely a count is by chance
    hosts      hosts that were the slow one more often than by chance
    links      pairs of hosts between which the exchange is slow
    changes    moments at which many jobs became slower or faster, and what changed then
    document   all of it as the document of ``stepscope fleet --json`` and the HTTP API (docs/fleet-reference.md)

Only ``catalog`` reads or writes files.
"""

from __future__ import annotations

__all__: list[str] = []
