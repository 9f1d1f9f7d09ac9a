"""Every number that a verdict depends on, with its reason.

A finding needs an effect (it costs something) and significance (it is not chance); the two are kept apart.
"""

from __future__ import annotations

__all__ = [
    "ANY_FALSE_ALARM",
    "BEATS_SHARE",
    "BLOCKS",
    "BLOCK_STEPS",
    "BOTTLENECK_SHARE",
    "CARRIED_SHARE",
    "CHANGE_CHANCE",
    "CHANGE_SPREADS",
    "CLEAR_SPREADS",
    "CLEAR_STEPS",
    "COMM_STEPS_SHARE",
    "CORE_SHARE",
    "CRITICAL_SHARE",
    "DROP_SHARE",
    "DROP_STEPS",
    "EPOCH_STARTS_SHARE",
    "EXCESS_FLOOR_NS",
    "EXCESS_SHARE",
    "EXPLAINS_SHARE",
    "FOLDS",
    "GROWTH_SHARE",
    "GROWTH_WARNING_SHARE",
    "INPUT_CRITICAL_SHARE",
    "INPUT_FLOOR_NS",
    "INPUT_SHARE",
    "JITTER_SHARE",
    "JITTER_WARNING_SHARE",
    "LARGE_SHARE",
    "LEVEL_STEPS",
    "LOCAL_STEPS",
    "LONGEST_PERIOD",
    "LOW_MEMORY_SHARE",
    "MIN_STEPS",
    "OPPORTUNITY_SHARE",
    "PACE_STEPS",
    "PERIODIC_SHARE",
    "PERIODIC_SPIKES",
    "RECURRING_SPIKES",
    "REGULAR_SHARE",
    "RHYTHM_CHANCE",
    "SAME_RANK_CHANCE",
    "SAME_RANK_SHARE",
    "SHORT_STRETCH_STEPS",
    "SPIKE_FLOOR_NS",
    "SPIKE_SHARE",
    "SPIKE_SPREADS",
    "SPREADS_APART",
    "STALLS_AT_MOST",
    "STALLS_SHARE",
    "STALL_FLOOR_NS",
    "STALL_NS",
    "STALL_OVER_SPIKES",
    "STALL_STEPS",
    "TREND_BLOCKS",
    "TREND_CHANCE",
    "TREND_STEPS",
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

# -- over time ----------------------------------------------------------------------------------------------------

LOCAL_STEPS = 21
"""A step is set against the median of so many around it: ten slow ones in a row do not move it, and a drift over
hundreds of steps does not make every late step a spike."""
SPIKE_SHARE = 0.5
"""Of the typical step: a step half as long again is seen by the eye; smaller ones matter only when they keep a beat."""
SPIKE_SPREADS = 6.0
"""… and so many robust spreads above its neighbours: on an uneven job half a step is nothing special."""
SPIKE_FLOOR_NS = 1_000_000
"""One scheduling slice of a busy machine; below it every process has spikes."""
STALL_STEPS = 3.0
"""Typical steps lost at once, from which on one look at the clock notices it …"""
STALL_NS = 1_000_000_000
"""… or a second, however long the steps are; a stall is warned of from here on …"""
STALL_FLOOR_NS = 100_000_000
"""… and never mentioned below a tenth of one: tiny steps lose three of their kind whenever a process is moved."""
STALL_OVER_SPIKES = 5.0
"""… and where there are spikes all the time, only when it is so many times larger than they are: of ten noisy ones some
are always three times their median."""
CORE_SHARE = 0.1
"""Of the slowest step of a stall: its neighbours that lost less are not called a part of it."""
STALLS_AT_MOST = 3
"""Large spikes that are single events; from four on they recur, and that they do is the finding."""
RECURRING_SPIKES = 4
"""Spikes that are no accident any more …"""
PERIODIC_SPIKES = 3
"""… or three, when their distances are equal."""
JITTER_SHARE = 0.02
"""Of the time: spikes that cost less together are what every machine has."""
PERIODIC_SHARE = 0.01
"""Of the time, where they keep a beat: that has one cause and can be helped (+15% every tenth step costs 1.5%)."""
JITTER_WARNING_SHARE = 0.15
"""Of the time, without a beat: a busy machine loses a tenth by itself; and a second in all, as of a stall."""
SAME_RANK_SHARE = 0.8
"""Of the spikes must lie with one rank to blame it; with a different one each time it is chance who is hit."""
SAME_RANK_CHANCE = 1e-3
"""Chance that spikes without a beat would favour some rank as much by themselves."""
REGULAR_SHARE = 0.8
"""Of the spikes (or periods) must keep the beat; a stray one does not hide it."""
BEATS_SHARE = 0.6
"""Of the beats must have a spike: a few may drown in the noise."""
RHYTHM_CHANCE = 0.1
"""Chance that spikes at random would keep a beat as well, by a careful count: of spikes at random less than 1% do."""
LONGEST_PERIOD = 100
"""Steps: of small and rarer spikes even +100% is below one per cent of the time."""
FOLDS = 5
"""Periods to be seen at the least: the median of five stands against two strays."""
TREND_STEPS = 20
"""Fewer steps cannot show growth with the certainty asked for, whatever they do."""
TREND_BLOCKS = 8
"""The same for their stretches."""
TREND_CHANCE = 1e-4
"""Chance that a series without trend gives one (Mann–Kendall)."""
GROWTH_SHARE = 0.05
"""Of the typical step: the least growth or change that is told …"""
GROWTH_WARNING_SHARE = 0.10
"""… and that is warned of: clocks and room temperature move a machine by a few per cent in an afternoon."""
LEVEL_STEPS = 8
"""The shortest stretch that has a level of its own: its median stands against three strays."""
SHORT_STRETCH_STEPS = 10
"""Wander is judged between stretches of so many steps: about the shortest change that is looked for."""
CHANGE_CHANCE = 1e-4
"""Chance that a series without change gives one at any place (Bonferroni)."""
CHANGE_SPREADS = 4.0
"""A change is warned of when it is so many times larger than all wander, itself included; it is told from SPREADS_APART
times the wander between changes on."""
DROP_STEPS = 10
"""The shortest slow stretch that is a drop of throughput; shorter ones are stalls."""
DROP_SHARE = 0.10
"""By so much slower: what passed by itself is not worth telling below it."""

# -- crashes ------------------------------------------------------------------------------------------------------

LOW_MEMORY_SHARE = 0.05
"""Of a host's memory: with less than this available before a SIGKILL, the kernel's out-of-memory killer is likely."""
