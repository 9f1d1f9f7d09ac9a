"""Every number that a verdict depends on, with its reason.

A finding needs an effect (it costs something) and significance (it is not chance); the two are kept apart.
"""

from __future__ import annotations

__all__ = [
    "ANY_FALSE_ALARM",
    "BLOCKS",
    "BLOCK_STEPS",
    "BOTTLENECK_SHARE",
    "CARRIED_SHARE",
    "CLEAR_SPREADS",
    "CLEAR_STEPS",
    "COMM_STEPS_SHARE",
    "CRITICAL_SHARE",
    "EPOCH_STARTS_SHARE",
    "EXCESS_FLOOR_NS",
    "EXCESS_SHARE",
    "EXPLAINS_SHARE",
    "INPUT_CRITICAL_SHARE",
    "INPUT_FLOOR_NS",
    "INPUT_SHARE",
    "LARGE_SHARE",
    "LOW_MEMORY_SHARE",
    "MIN_STEPS",
    "NODE_SHARE",
    "OPPORTUNITY_SHARE",
    "PACE_STEPS",
    "SPREADS_APART",
    "STALLS_SHARE",
    "STRETCH_STEPS",
    "WANDER_BLOCKS",
    "WARMUP_AT_MOST",
    "WARMUP_SHARE",
    "WARMUP_SPREADS",
    "WARNING_FLOOR_NS",
    "WARNING_SHARE",
]

# -- which steps are compared -------------------------------------------------------------------------------------

MIN_STEPS = 10
"""Fewer steady steps give no spread to judge by: five blocks of two is the least a test can stand on."""
WARMUP_AT_MOST = 0.2
"""Of a run: a start that is slow for longer than a fifth is how the job behaves, not its warm-up."""
WARMUP_SPREADS = 6.0
"""A leading step this many robust spreads above the rest is warm-up (caches, allocator, lazy initialisation) …"""
WARMUP_SHARE = 0.25
"""… if it is also a quarter longer: on a very even job six spreads may be a few microseconds."""

# -- significance -------------------------------------------------------------------------------------------------

ANY_FALSE_ALARM = 1e-4
"""Chance that a healthy run gives any straggler at all, over all its ranks and phases (Bonferroni)."""
BLOCKS = 20
"""The run is cut into up to this many stretches, and their medians are the observations: a median is deaf to single
stalls, and stretches are less dependent on each other than steps."""
BLOCK_STEPS = 2
"""Steps in a block at the least."""
WANDER_BLOCKS = 8
"""Long stretches, in which a slow wander of a rank (thermal, a neighbour's job) shows."""
SPREADS_APART = 3.0
"""An excess must be this many times larger than the wander: the medians of long stretches scatter by that much by
themselves, and what does not stand out from it will change sides."""
CLEAR_SPREADS = 6.0
"""An excess so many spreads of single steps above zero needs no test; this also keeps a fault that began in the middle
of the run, whose two levels look like a wander to the test …"""
CLEAR_STEPS = 20
"""… from this many steps on: the spread of fewer is itself uncertain."""

STRETCH_STEPS = 8
"""The shortest stretch of steps that is called a stretch: five in the running median, and three to be sure."""

# -- uneven ranks -------------------------------------------------------------------------------------------------

EXCESS_SHARE = 0.02
"""Of the step: ranks of a healthy job differ by one or two per cent (NUMA, rank 0's logging) and nobody can help it."""
EXCESS_FLOOR_NS = 50_000
"""Differences of scheduling and caches between processes of one machine are tens of microseconds."""
WARNING_SHARE = 0.05
"""What a finding must cost of the step time to be worth somebody's attention."""
CRITICAL_SHARE = 0.20
"""A fifth of the machines' time: to be fixed before anything else."""
WARNING_FLOOR_NS = 200_000
"""Below a fifth of a millisecond per step there is nothing to fix in Python: told, not warned of."""
EXPLAINS_SHARE = 0.5
"""A phase is named when it explains at least half of a rank's excess."""
PACE_STEPS = 2.0
"""Ranks that wait for each other are never further apart than a step, and where the window cuts, two."""
CARRIED_SHARE = 0.25
"""Of a phase's excess must show in the rank's whole work, where that is measured: on a crowded machine the rest is lost
in the noise of other phases, but an excess that another phase makes up for holds nobody back."""
NODE_SHARE = 0.75
"""Of a host's ranks must be late for the host to be what is slow; one or two may hide in the noise."""
COMM_STEPS_SHARE = 0.5
"""Waiting counts as measured when this many of the steps carry a wait (some sources sample it)."""

# -- where the time goes ------------------------------------------------------------------------------------------

INPUT_SHARE = 0.10
"""Of the median rank's step.  Below it a second worker or a faster disk gains less than run-to-run noise."""
INPUT_CRITICAL_SHARE = 0.30
"""Nearly a third of the time nothing is computed."""
INPUT_FLOOR_NS = 2_000_000
"""Fetching and collating one batch in Python costs up to a millisecond or two by itself; a tiny model that spends 0.3
of its 1 ms there is healthy, and workers would make it slower."""
EPOCH_STARTS_SHARE = 0.10
"""More epoch starts than this and they belong to the rhythm of the job; fewer are left out of its input time."""
STALLS_SHARE = 0.02
"""The longest steps, left out of shares of time: a single stall is no bottleneck."""
BOTTLENECK_SHARE = 0.5
"""Of the stretches of a run must show a bottleneck; otherwise it is an episode."""
OPPORTUNITY_SHARE = 0.02
"""The least share worth naming as an opportunity in a healthy run."""
LARGE_SHARE = 0.20
"""From a fifth of the time on nobody would call a run free of bottlenecks, whatever it is that takes it."""

# -- crashes ------------------------------------------------------------------------------------------------------

LOW_MEMORY_SHARE = 0.05
"""Of a host's memory: with less than this available before a SIGKILL, the kernel's out-of-memory killer is likely."""
