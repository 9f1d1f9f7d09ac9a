"""Every number that a verdict depends on, with its reason.

A finding needs an effect (it costs something) and significance (it is not chance); the two are kept apart.
"""

from __future__ import annotations

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
"""The run is cut into about this many stretches, and their medians are the observations: a median is deaf to single
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

CHANCE_ERRORS = 2.0
"""Standard errors of a mean that chance explains."""
PASSING_SHARE = 0.005
"""Of the time a stretch must cost to be told: ranks are late for a moment now and then, and a longer run has more."""
STRETCH_STEPS = 8
"""The shortest stretch of steps that is called a stretch: five in the running median, and three to be sure."""
SAMPLED_STRETCH_STEPS = 6
"""The same where steps are timed now and then only: they are less alike, and few of a stretch are there.  Five in the
running median, and one to be sure."""

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
"""The last rank stands out by so many spreads of the others; the largest of 1,024 normal values does by 3.3."""
ROTATING_EVEN = 2.0
"""What it is behind by is about the same in each step: the excess is so many of its own spreads.  Chance delays are not
(an exponential distribution's median is one of its spreads)."""
ROTATING_TURNS = 0.75
"""Of the steps one rank may be last and it is still called a rotation."""
IMBALANCE_CORRELATION = 0.6
"""Of forward with backward, same rank and step: larger batches are longer in both, disturbances hit one of them."""
IMBALANCE_WARNING_SHARE = 0.10
"""Batches of unequal size are a choice; up to a tenth of the time it is a common one."""
DDP_SAMPLES = 5
"""DDP's own figures on a GPU come once in a hundred steps; fewer say nothing."""
DDP_SHARE = 0.8
"""Of these samples a rank must be behind in."""
IDLE_SHARE = 0.5
"""Of what a host does between the steps and for input, its device stands still: then it has nothing left to do, and the
host is what this rank waits for."""
HOST_QUIET = 0.3
"""Quantile of a host's steps in which it hardly stands still for its device in a given phase."""
HOST_FREE_SHARE = 0.75
"""Of a step a host must take less than this, by its quiet steps, for that to be its own pace: a host that seems to need
nearly all of it may as well stand still for its device in every phase."""
AHEAD_SHARE = 0.3
"""Of what a rank's device is late by, its host spends in the same phase at most: then it did launch in time."""
NODE_SHARE = 0.75
"""Of a host's ranks must be late for the host to be what is slow; one or two may hide in the noise."""
COMM_STEPS_SHARE = 0.5
"""Waiting counts as measured when this many of the steps carry a wait (some sources sample it)."""

# -- where the time goes ------------------------------------------------------------------------------------------

INPUT_SHARE = 0.10
"""Of the median rank's step.  Below it a second worker or a faster disk gains less than run-to-run noise."""
INPUT_CRITICAL_SHARE = 0.30
"""Nearly a third of the time nothing is computed."""
INPUT_FLOOR_NS = 3_000_000
"""Fetching and collating one batch in Python costs one to two milliseconds by itself on a slow core; a tiny model that
spends 0.3 of its 1 ms there is healthy, and workers would make it slower.  A large share below this is told, not warned
of."""
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
BUBBLE_SLACK = 0.20
"""Of the step that the stages of a pipeline may wait for each other beyond what even ones would: stages are never quite
even, and each exchange takes a moment."""
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
BESIDE_SHARE = 0.20
"""Of what one rank spends in a stop, the most that any other may spend in it for it to be that one's own doing."""
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

BURST_PERIOD = 8
"""Steps: slow ones that come more often than this are the rhythm of a bottleneck, not jitter beside it."""

# -- communication --------------------------------------------------------------------------------------------------

EXCHANGE_STEPS = 8
"""Steps whose collectives were kept one by one and can be compared: in half of a run's stretches, and one to spare."""
EXCHANGE_RATIO = 1.5
"""Times as long as among its siblings, or as before: links of one kind differ by a fifth, and gloo on shared cores by a
third."""
EXCHANGE_FLOOR_NS = 2_000_000
"""A step: below it the scheduler decides how long ranks of one machine take to exchange anything."""
EXCHANGE_AGREES = 0.8
"""Of these steps must show it."""
BYTES_RATIO = 1.25
"""Times the bytes of the sibling groups: from here on it is the work that differs, not the network …"""
BYTES_ALIKE = 1.1
"""… and up to here the same was sent; in between nobody can say."""
SAME_SIZE_SHARE = 0.2
"""Of the large all_to_alls of a step have one size on all ranks, where it is the router that deals out unequally: in
forward those to the experts, in backward those from them, half of all; fewer where not all of them are seen."""
ROUTED_SHARE = 0.6
"""Of the steps: the rank that works longest is the one whose experts got most; of two ranks chance makes a half."""
OVERLAP_SHARE = 0.10
"""Of the step that is exchange and not hidden, though it could be: as much as is a bottleneck in any other phase."""
OVERLAP_HIDDEN = 0.5
"""Of an exchange beside backward: with DDP's own buckets well over half is hidden, unless there is nothing to hide it
behind."""
OVERLAP_MB = 4.0
"""Of gradients: below it an all-reduce is latency, and cutting it into buckets makes more of it."""
OVERLAP_PARTS = 4
"""Parts in which an exchange is advised to go out: the last one cannot be hidden, and a quarter left is what counts."""

# -- network --------------------------------------------------------------------------------------------------------

PROBE_SLICES = 4
"""Slices of time (from one line about a way to the next) that must show it: the agents' lines do not come at once, and
a burst of a second stands in up to three slices."""
PROBE_WAYS_SHARE = 0.8
"""Of a host's ways, and of the slices of the stretch that is told of: one in five may be lucky."""
PROBE_RTT_RATIO = 3.0
"""Times the round trip of the others: from rack to rack it is twice that within one …"""
PROBE_RTT_FLOOR_US = 500.0
"""… and by so much longer: moderated interrupts and virtual switches make up some hundred microseconds."""
PROBE_LOSS = 0.01
"""Of the probes, there and back: TCP is at a tenth of its speed from here on; a healthy network loses a thousandth."""
PROBE_LOSS_RATIO = 1.5
"""Times the loss of the other ways: with two lossy hosts of four, two thirds of the others' ways are lossy as well."""
PROBE_CHANCE = 1e-3
"""That any host is named on a network that loses as much everywhere: probes are few, and what costs nothing is told and
not warned of."""
PROBE_SPREAD = 0.75
"""Of the slices, and of a host's ways, that would show a loss if it were even: a burst and a link show in few."""
PROBE_ALIKE = 0.3
"""Of a host's loss must be left without its worst way; else that way is what is lossy."""
PROBES_BACK_S = 240.0
"""Looked back at while a job runs, however short its steps are: probes are few."""
PROBES_LAG_S = 3.0
"""After which a probe is given up: loss is known that much later."""
PROBES_AFTER_S = 10.0
"""A line tells of the seconds before it."""
SPEED_RATIO = 0.5
"""Of the others' link speed: 10 instead of 25 Gbit/s, 1 instead of 10."""
RETRANSMITS = 0.01
"""Of the segments sent: worth a word beside the probes …"""
RETRANSMITS_SEGMENTS = 50.0
"""… of so many a second at the least."""
HIT_CHANCE = 0.02
"""Of the steps outside a bad stretch that lie above the level with which those inside are compared …"""
HIT_Z = 4.0
"""… and how sure it must be that there are more of them inside."""

# -- while it runs ------------------------------------------------------------------------------------------------

LIVE_STEPS = 256
"""Looked at while a job runs: enough for a rank that is 3% slow, few enough that what is over is soon gone."""
LIVE_TIMED_STEPS = 64
"""Where devices are timed in some steps only, so many of those …"""
LIVE_STEPS_AT_MOST = 4096
"""… however far back that is, up to here: 64 of 64."""
CONFIRM_STEPS = 2
"""Between the first look that finds something and the one that shows it."""
RELEASE_STEPS = 20
"""Without it before it is withdrawn: longer than the period of most things that come and go."""
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
USUAL_PASSES_SHARE = 0.10
"""Of the steps have as many backward passes, or it is no ordinary step: the last one of an epoch may have fewer."""
ALIKE_STEPS = 3
"""Steps with as many backward passes, whose median says what such a step takes; of fewer it is taken in proportion."""
PASS_AT_MOST = 5.0
"""Times a usual pass, what a further one may take by design: a generator is larger than its critic, but a kernel that
is compiled anew is not a pass."""
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
TREND_WARNING_CHANCE = 1e-6
"""For a warning: nine of ten pairs of stretches rise.  Very uneven steps reach the next one now and then."""
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

SAMPLE_LOOKS_BACK_S = 1.0
"""What a sample tells of: NVML's utilization and power are means over a sixth of a second to a second."""
SAMPLES_APART_S = 0.9
"""The agent samples once a second, GPUs more often at first: the rules use samples that are this far apart, a little
less than a second, so that none is lost to an early tick."""
MACHINE_SAMPLES = 3
"""Samples about a second apart: fewer are a moment, not a run."""
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
CPU_ROOM_PERCENT = 80.0
"""Of all cores: below, they are not full by anybody's word."""
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

# Remarks about settings.
FEW_SAMPLES = 16
"""Of a rank in a step, below which the statistics of BatchNorm are noisy: SyncBatchNorm is worth its exchange."""
WALK_NS_PER_TENSOR = 2_500.0
"""What find_unused_parameters=True costs at the most: 0.9 to 2.3 µs per parameter tensor, measured on 48 layers."""
WALK_SHARE = 0.01
"""Of the step: a shorter walk is not worth a sentence."""
LAST_BATCH_SHARE = 0.01
"""Of the time that a short batch at the end of each epoch costs beyond its samples."""
LAST_BATCH_EPOCHS = 3
"""So many of them, before their steps are called slow."""
LAST_BATCH_COMPILE_NS = 1e9
"""Compiling for the short batch: less is not noticed, unless it is so large a share of a short run."""

__all__ = [name for name in dir() if name.isupper()]  # all of it, and it is long
