"""Every number that a verdict depends on, with its reason.

A finding needs an effect (it costs something) and significance (it is not chance); the two are kept apart.
"""

from __future__ import annotations

__all__ = [
    "LIVE_STEPS",
    "CONFIRM_STEPS",
    "RELEASE_STEPS",
    "UNEVEN_SHARE",
    "UNEVEN_FLOOR_NS",
    "ROTATING_SPREADS",
    "ROTATING_EVEN",
    "ROTATING_TURNS",
    "IMBALANCE_CORRELATION",
    "IMBALANCE_WARNING_SHARE",
    "H2D_SHARE",
    "H2D_FLOOR_NS",
    "COMM_SHARE",
    "COMM_CRITICAL_SHARE",
    "COMM_FLOOR_NS",
    "OPTIMIZER_SHARE",
    "OPTIMIZER_CRITICAL_SHARE",
    "OPTIMIZER_FLOOR_NS",
    "OTHER_SHARE",
    "OTHER_FLOOR_NS",
    "BETWEEN_SHARE",
    "BETWEEN_CRITICAL_SHARE",
    "STOPS_AT_LEAST",
    "ALONE_SHARE",
    "COMPUTE_SHARE",
    "ANY_FALSE_ALARM",
    "BLOCKS",
    "BLOCK_STEPS",
    "BOTTLENECK_SHARE",
    "CARRIED_SHARE",
    "CLEAR_SPREADS",
    "CLEAR_SHARE",
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
"""… from this many steps on: the spread of fewer is itself uncertain …"""
CLEAR_SHARE = 0.65
"""… and in most of them: two ranks that are late in turns have no spread about the one half."""

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
UNEVEN_SHARE = 0.05
"""Of the step that the slowest rank is behind in the median step, whoever it is: less is the scatter of any cluster."""
UNEVEN_FLOOR_NS = 1_000_000
"""On a crowded machine the scheduler alone puts a millisecond between the first rank and the last."""
ROTATING_SPREADS = 5.0
"""The last rank of a step stands out by so many spreads of the others; the largest of 1,024 normal values does by 3.3."""
ROTATING_EVEN = 2.0
"""What it is behind by is about the same in each step: the excess is so many of its own spreads.  Chance delays are not
(an exponential distribution's median is one of its spreads)."""
ROTATING_TURNS = 0.75
"""Of the steps one rank may be last and it is still called a rotation."""
IMBALANCE_CORRELATION = 0.6
"""Of forward with backward, same rank and step: larger batches are longer in both, disturbances hit one of them."""
IMBALANCE_WARNING_SHARE = 0.10
"""Batches of unequal size are a choice; up to a tenth of the time it is a common one."""
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
H2D_SHARE = 0.10
"""As for input: what a pinned, asynchronous copy would hide."""
H2D_FLOOR_NS = 1_000_000
"""A copy of a small batch is a few hundred microseconds whatever one does."""
COMM_SHARE = 0.25
"""Of the step, on the rank that waits least.  An all-reduce that is not hidden at all takes 10 to 20% of a well-built
data-parallel step; from a quarter on something can be done."""
COMM_CRITICAL_SHARE = 0.50
COMM_FLOOR_NS = 5_000_000
"""Ranks of a tiny model that share a machine's cores spend milliseconds in gloo's threads; nobody trains like that."""
OPTIMIZER_SHARE = 0.25
"""Adam without fused kernels takes up to a fifth of the step of a small model; beyond, a setting is wrong."""
OPTIMIZER_CRITICAL_SHARE = 0.50
OPTIMIZER_FLOOR_NS = 2_000_000
"""A tiny model's optimizer is all Python."""
OTHER_SHARE = 0.10
"""Time inside the step that nothing explains: as much as is called a bottleneck in any other phase."""
OTHER_FLOOR_NS = 2_000_000
"""Clipping, zeroing and a printed line cost a millisecond in Python."""
BETWEEN_SHARE = 0.10
"""Of all time, between steps: evaluation and checkpoints are wanted, and a tenth is what people pay for them."""
BETWEEN_CRITICAL_SHARE = 0.30
"""Nearly a third of the time nothing is trained."""
STOPS_AT_LEAST = 2
"""Evaluations or checkpoints in the window: a single one is an event, not where the time goes."""
ALONE_SHARE = 0.90
"""Of what all ranks spend in a phase one must spend for it to be that rank's own doing."""
COMPUTE_SHARE = 0.80
"""Forward, backward and optimizer together."""
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

# -- while it runs ------------------------------------------------------------------------------------------------

LIVE_STEPS = 256
"""Looked at while a job runs: enough for a rank that is 3% slow, few enough that what is over is soon gone."""
CONFIRM_STEPS = 2
"""Between the first look that finds something and the one that shows it."""
RELEASE_STEPS = 20
"""Without it before it is withdrawn: longer than the period of most things that come and go."""

# -- crashes ------------------------------------------------------------------------------------------------------

LOW_MEMORY_SHARE = 0.05
"""Of a host's memory: with less than this available before a SIGKILL, the kernel's out-of-memory killer is likely."""
