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
    "CLOCK_BUSY_PERCENT",
    "COMM_STEPS_SHARE",
    "CPU_FULL_PERCENT",
    "CPU_HEAVY_PER_CORE",
    "CPU_OTHERS_SHARE",
    "CPU_OWN_SHARE",
    "CPU_PRESSURE",
    "CPU_RUNNABLE_PER_CORE",
    "CPU_WANTED_SHARE",
    "CREEP_ALIKE_SHARE",
    "CREEP_BLOCKS",
    "CREEP_DRIFT_T",
    "CREEP_FEW_BYTES",
    "CREEP_FEW_EVEN",
    "CREEP_FEW_SAMPLES",
    "CREEP_FEW_SHARE",
    "CREEP_FLOOR_BYTES",
    "CREEP_LATE_S",
    "CREEP_LEFT_OUT",
    "CREEP_SAMPLES",
    "CREEP_SHARE",
    "CREEP_SOON_RUNS",
    "CREEP_SOON_S",
    "CREEP_THIRD_SHARE",
    "CRITICAL_SHARE",
    "DEVICE_FULL_SHARE",
    "EPOCH_STARTS_SHARE",
    "EXCESS_FLOOR_NS",
    "EXCESS_SHARE",
    "EXPLAINS_SHARE",
    "FRAGMENTED_BYTES",
    "FRAGMENTED_SHARE",
    "IMBALANCE_BYTES",
    "IMBALANCE_SHARE",
    "INPUT_CRITICAL_SHARE",
    "INPUT_FLOOR_NS",
    "INPUT_SHARE",
    "LARGE_SHARE",
    "LOW_MEMORY_SHARE",
    "MACHINE_SAMPLES",
    "MIN_STEPS",
    "OPPORTUNITY_SHARE",
    "PACE_STEPS",
    "POWER_CAP_CLOCK_SHARE",
    "POWER_CAP_SHARE",
    "PRESSURE_CRITICAL_SHARE",
    "PRESSURE_SHARE",
    "RAM_CRITICAL_SHARE",
    "RAM_LOW_SHARE",
    "RAM_PRESSURE",
    "RAM_SWAP_BYTES",
    "RAM_SWAP_SHARE",
    "SLOW_CLOCK_SHARE",
    "SPREADS_APART",
    "STALLS_SHARE",
    "THROTTLED_SAMPLES",
    "THROTTLED_SHARE",
    "UTILISATION_LOW_PERCENT",
    "UTILISATION_SAMPLES",
    "UTILISATION_WARNING_PERCENT",
    "WAITED_FOR_SHARE",
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

# -- crashes ------------------------------------------------------------------------------------------------------

LOW_MEMORY_SHARE = 0.05
"""Of a host's memory: with less than this available before a SIGKILL, the kernel's out-of-memory killer is likely."""

# -- memory -------------------------------------------------------------------------------------------------------

CREEP_LEFT_OUT = 0.1
"""Of the run, at its start: the allocator, lazily made buffers and the first batches grow memory once."""
CREEP_SHARE = 0.05
"""Of what there was at the start.  Fragmentation of malloc and caches of shapes move a healthy process by less …"""
CREEP_FLOOR_BYTES = 64 << 20
"""… and in a small process by some tens of MiB."""
CREEP_BLOCKS = 24
"""Stretches whose lowest points are compared: the low points of a sawtooth do not rise; and 24 that rise one by one are
significant (z = 6.8) whatever the number of ranks."""
CREEP_SAMPLES = 12
"""Fewer cannot be significant (z = 4.5 at the most); then the rise must be plain to see."""
CREEP_THIRD_SHARE = 0.5
"""Each third of the run must rise by at least half of its even share: a cache that fills up slows down (an exponential
that has come to 95% rises by a third of it in its last third)."""
CREEP_DRIFT_T = 2.5
"""Against a random walk (t of its moves), which Mann–Kendall takes for a trend; five equal stairs in a run pass."""
CREEP_FEW_SAMPLES = 3
"""The least that show a rise that goes on: two rises.  Samples come once a second."""
CREEP_FEW_BYTES = 256 << 20
"""Plain to see: more than a library loaded late or a first evaluation takes …"""
CREEP_FEW_SHARE = 0.20
"""… and a fifth of the process …"""
CREEP_FEW_EVEN = 0.25
"""… with no rise below a quarter of the mean one."""
CREEP_ALIKE_SHARE = 0.5
"""A rank that rises as steadily and by half as much as those that crossed the line has the same leak."""
CREEP_SOON_S = 3600.0
"""Memory that is gone within an hour ends the run before anybody looks again …"""
CREEP_SOON_RUNS = 2.0
"""… and so does what is gone before the run is three times as long."""
CREEP_LATE_S = 86_400.0
"""More than a day ahead: most runs are over by then."""
PRESSURE_SHARE = 0.92
"""Of a device's memory that is needed at the peak: a longer sequence or the last uneven batch takes the rest."""
PRESSURE_CRITICAL_SHARE = 0.97
"""Libraries and the driver take some hundred MiB when they please; the allocator begins to free and retry here."""
IMBALANCE_SHARE = 0.20
"""Of the largest: peers hold the same model, and differ by a bucket or an uneven batch."""
IMBALANCE_BYTES = 512 << 20
"""Contexts, NCCL's buffers and workspaces differ by some hundred MiB."""
FRAGMENTED_SHARE = 0.30
"""Of the reserved memory was never in use at once: blocks of 2 MiB and rounding explain a few per cent."""
FRAGMENTED_BYTES = 1 << 30
"""Below it nothing is won that anybody needs."""
DEVICE_FULL_SHARE = 0.70
"""Of a device's memory: below it there is room, and uneven or fragmented memory hurts nobody."""

# -- machine ------------------------------------------------------------------------------------------------------

MACHINE_SAMPLES = 3
"""Samples come once a second: fewer are a moment, not a run."""
UTILISATION_SAMPLES = 5
"""NVML's utilisation looks back a sixth of a second to a second: a handful, to have seen more than one step."""
UTILISATION_LOW_PERCENT = 50.0
"""The GPU is idle for more than half of the time, which no healthy job of its size is …"""
UTILISATION_WARNING_PERCENT = 40.0
"""… and here it is a warning, if something is seen that it waits for; a tiny model cannot fill a large GPU."""
WAITED_FOR_SHARE = LARGE_SHARE
"""Of the host's step: a phase beside the training that takes this much is what the GPU waits for."""
THROTTLED_SHARE = 0.10
"""Of the samples: less often is a passing peak …"""
THROTTLED_SAMPLES = 2
"""… and a single sample is none."""
POWER_CAP_SHARE = 0.5
"""Of the samples: a GPU that works hard touches its power limit all the time, that is what the limit is for."""
POWER_CAP_CLOCK_SHARE = 0.10
"""Below the clocks of its peers or its own best: then the limit costs something that can be told."""
SLOW_CLOCK_SHARE = 0.08
"""Below its peers' clocks: GPUs of one kind differ by up to five per cent under load; this much holds up all ranks."""
CLOCK_BUSY_PERCENT = 50.0
"""Utilisation at which a clock says anything: an idle GPU lowers it by itself."""
CPU_FULL_PERCENT = 95.0
"""Of all cores."""
CPU_RUNNABLE_PER_CORE = 1.5
"""Tasks that want to run: at one per core a full CPU is well used and nobody waits …"""
CPU_HEAVY_PER_CORE = 3.0
"""… and here each waits twice as long as it runs."""
CPU_PRESSURE = 0.5
"""Share of the time in which some task had to wait for a processor (PSI); also with a quota, when cores look idle."""
CPU_OWN_SHARE = 0.8
"""Of the CPU in use: the job keeps itself busy."""
CPU_OTHERS_SHARE = 0.7
"""Of the CPU in use; when the job has less than this, others take a third of the machine from it."""
CPU_WANTED_SHARE = 0.5
"""Of what each runnable task gets; a rank that uses less sleeps most of the time, and others take nothing from it."""
RAM_LOW_SHARE = 0.05
"""Of a host's memory available: the kernel drops file caches, and reading data becomes slow …"""
RAM_CRITICAL_SHARE = 0.02
"""… and here its out-of-memory killer comes next."""
RAM_SWAP_BYTES = 256 << 20
"""Swapped out during the run: idle pages of other programs are less …"""
RAM_SWAP_SHARE = 0.20
"""… and go without need while more than this is available."""
RAM_PRESSURE = 0.2
"""Share of the time in which some task waited for memory (PSI); a healthy machine has none."""
