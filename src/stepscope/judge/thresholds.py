"""Every number that a verdict depends on, with its reason.

A finding needs an effect (it costs something) and significance (it is not chance); the two have separate thresholds.
"""

from __future__ import annotations

from stepscope.judge import finding_cost

# -- which steps are compared -----------------------------------------------------------------------------------------

MIN_STEPS = 10
"""Fewer steady steps give no usable spread: a test needs at least five blocks of two."""
WARMUP_AT_MOST = 0.2
"""Share of the run: a start that is slow for longer than a fifth is how the job behaves, not its warm-up."""
WARMUP_SPREADS = 6.0
"""A leading step this many robust spreads above the rest is warm-up (caches, allocator, lazy initialization) …"""
WARMUP_SHARE = 0.25
"""… if it is also a quarter longer: on a very even job six spreads may be a few microseconds."""

# -- significance -----------------------------------------------------------------------------------------------------

ANY_FALSE_ALARM = 1e-4
"""Chance that a healthy run reports any straggler at all, over all its ranks and phases (Bonferroni)."""
ANY_REMARK = 1e-3
"""The same for what is only information, because other programs disturb the run."""
BLOCKS = 20
"""The run is cut into about this many stretches, and their medians are the observations: a median ignores single
stalls, and stretches depend less on each other than steps."""
BLOCK_STEPS = 2
"""Minimum steps in a block."""
WANDER_BLOCKS = 8
"""Number of long stretches, which show a slow wander of a rank (thermal, another job on the host)."""
SPREADS_APART = 3.0
"""An excess must be this many times larger than the wander: the medians of long stretches scatter by that much without
a cause, and an excess within it will change sides."""
CLEAR_SPREADS = 6.0
"""An excess this many spreads of single steps above zero needs no test.  This also keeps a fault that began in the
middle of the run, whose two levels look like wander to the test …"""
CLEAR_STEPS = 20
"""… from this many steps on: the spread of fewer is itself uncertain …"""
CLEAR_SHARE = 0.65
"""… and in most of them: two ranks that are late in turns show no spread in one half of the steps."""
ALWAYS_SHARE, ALWAYS_NOISES = 0.95, 2.0
"""Nor does a rank need a test that is, in this share of its steps, this many times further behind its peers than a
typical rank deviates from them: however much its excess wanders, it does not change sides."""

CHANCE_ERRORS = 2.0
"""Standard errors of a mean that chance explains."""
PASSING_SHARE = 0.005
"""Share of the time that a stretch must cost to be reported: any rank is late briefly, more often in a longer run."""
STRETCH_STEPS = 8
"""The shortest run of steps that counts as a stretch: five in the running median, and three to be sure."""
SAMPLED_STRETCH_STEPS = 6
"""The same where only some steps are timed: they vary more, and a stretch has few of them.  Five in the running median,
and one to be sure."""
STEP_CLIP_SPREADS = 4.0
"""A step beyond it is a stall or the like, and says nothing about the level or the dependence of its neighbors."""
DEPENDENCE_STEPS = 30
"""Dependence is followed over this many steps."""
DEPENDENCE_AT_MOST = 0.95
"""Upper bound of the estimated dependence of neighboring stretches: beyond it the estimate is meaningless."""

# -- who arrives last -------------------------------------------------------------------------------------------------
# Of the intervals in which ranks wait for each other; used where there are too few of them for the tests above.

ARRIVALS_AT_LEAST = 3
"""Intervals with all ranks: one per step in the shortest trace that is meaningful …"""
ARRIVALS_FEW = 8
"""… but with fewer than this many, a rank must be last in all of them, each time by a similar delay …"""
EVENLY = 0.5
"""… meaning that its shortest delay is at least half of its longest.  Random delays are not that even (exponential ones
differ tenfold in three of four samples of that size)."""
LAST_SHARE = 0.5
"""Share of the intervals in which one rank arrived last; by chance it would be one in the number of ranks …"""
LAST_TIMES_CHANCE = 2.0
"""… and at least twice as often as chance, which matters with only two or three ranks …"""
LAST_AT_MOST = 0.9
"""… but a rank never needs more than this: of two ranks, one that is last nine times out of ten is late."""
BY_CHANCE = 0.01
"""The probability that one of several equal ranks arrives last this often: one false accusation in a hundred traces."""
HEAVY_SHARE = 0.9
"""Of the waiting: the intervals that account for it are also judged separately.  A rank whose input is late arrives
last once per step, and arrives with the others at the eighty collectives that follow."""

# -- uneven ranks -----------------------------------------------------------------------------------------------------

EXCESS_SHARE = 0.02
"""Share of the step: ranks of a healthy job differ by one or two percent (NUMA, rank 0's logging), unavoidably."""
EXCESS_FLOOR_NS = 50_000
"""Scheduling and caches make processes of one machine differ by tens of microseconds."""
WARNING_SHARE = finding_cost.WARNING_SHARE
WARNING_FLOOR_NS = finding_cost.WARNING_FLOOR_NS
"""The same for live runs and traces."""
EXPLAINS_SHARE = 0.5
"""A phase is named when it explains at least half of a rank's excess."""
PACE_STEPS = 2.0
"""Ranks that wait for each other are never more than one step apart, or two at the edges of the window."""
CARRIED_SHARE = 0.25
"""Share of a phase's excess that must show in the rank's whole work, where that is measured.  On a crowded machine the
rest is lost in the noise of other phases, but an excess that another phase makes up for delays no other rank."""
UNEVEN_BATCHES_STEPS = 3
"""Sampled steps in which all ranks must have had batches of the same sizes, to say that they are uneven."""
UNEVEN_SHARE = 0.05
"""Share of the step by which the slowest rank, whichever it is, lags in the median step: less is normal scatter."""
UNEVEN_FLOOR_NS = 1_000_000
"""On a crowded machine the scheduler alone puts a millisecond between the first rank and the last."""
ROTATING_SPREADS = 5.0
"""The last rank stands out by this many spreads of the others; the largest of 1,024 normal values is at 3.3."""
ROTATING_EVEN = 2.0
"""The last rank's lag is about the same in each step: its excess is this multiple of its spread.  Random delays are not
so even (an exponential distribution's median is one of its spreads)."""
ROTATING_TURNS = 0.75
"""Share of the steps in which one rank may be last and it is still called a rotation."""
IMBALANCE_CORRELATION = 0.6
"""Between forward and backward, same rank and step: larger batches lengthen both, disturbances only one of them."""
BATCHES_ALIKE = 1.1
"""Factor between the most and the least that ranks have to compute in a sampled step: from here on, batches differ."""
IMBALANCE_WARNING_SHARE = 0.10
"""Batches of unequal size are a choice; up to a tenth of the time it is a common one."""
DDP_SAMPLES = 5
"""On a GPU, DDP reports its own figures once in a hundred steps; fewer are not informative."""
DDP_SHARE = 0.8
"""Share of these samples in which a rank must lag."""
IDLE_SHARE = 0.5
"""Share of the host's time between steps and for input in which its device is idle: then the device has no work left,
and this rank waits for its host."""
HOST_QUIET = 0.3
"""Quantile of a host's steps in which its device hardly blocks it in a given phase."""
HOST_FREE_SHARE = 0.75
"""A host's time in its quiet steps must be below this share of the step to count as its own pace: a host that seems to
need nearly all of it may be blocked by its device in every phase."""
AHEAD_SHARE = 0.3
"""Share of a device's lag that its host may spend in the same phase and still have launched in time."""
NODE_SHARE = 0.75
"""Share of a host's ranks that must be late for the host to be slow; one or two may hide in the noise."""
COMM_STEPS_SHARE = 0.5
"""Waiting counts as measured when this share of the steps has a wait (some sources sample it)."""
GAINABLE_SHARE = 0.9
"""If less than this share of what a bottleneck takes can be gained, its title says how much."""
UNCERTAIN_SHARE = 0.10
"""Share of a promised gain by which the exchange may change it without a word: recorded jobs gained within a tenth of
the promise where less of the exchange was at stake, and up to a fifth less where more was."""
HOST_LEAST_NS = 50_000
"""A host that does less than this per step without its device is not informative."""
SMALL_EXCHANGE_SHARE = 0.05
"""Share of the largest all_to_all: smaller ones carry token counts, and always have the same size."""
LEVEL_QUANTILE = 0.25
"""Of a stage's steps, which stands for its level: the fast steps are disturbed least."""
NOISE_STEPS = 200
"""Enough steps to estimate the noise of the typical rank."""
SIEVE_SHARE, SIEVE_SLACK = 0.85, 1.5
"""Share of the required z that is left in the largest window inside a stretch (its median's error, at most half its
steps missing), and how far chance may lower it."""
DIP_STEPS = 2
"""Steps of the running median that may dip without ending a stretch; more would join it with the noise before it."""
SMOOTHED_STEPS = 5
"""Width of the running median, in steps, used to find stretches: two wild steps in a row do not end one."""

# -- where the time goes ----------------------------------------------------------------------------------------------

INPUT_SHARE = 0.10
"""Share of the median rank's step.  Below it another worker or a faster disk gains less than run-to-run noise."""
INPUT_CRITICAL_SHARE = 0.30
"""Nearly a third of the time nothing is computed."""
INPUT_FLOOR_NS = 3_000_000
"""Fetching and collating one batch in Python costs one to two milliseconds on a slow core; a tiny model that spends 0.3
of its 1 ms there is healthy, and workers would make it slower.  A large share below this is reported, but not as a
warning."""
WORKER_BUSY_SHARE = 0.5
"""CPU time of a DataLoader worker, of one core: from here on it computes; a slow disk leaves it idle …"""
WORKER_IO_PRESSURE = 0.1
"""… and tasks wait for I/O for this share of the time (PSI)."""
H2D_SHARE = 0.10
"""As for input: what a pinned, asynchronous copy would hide."""
H2D_FLOOR_NS = 1_000_000
"""Copying a small batch always takes a few hundred microseconds."""
COMM_SHARE = 0.25
"""Share of the step, on the rank that waits least.  An all-reduce that is not hidden at all takes 10 to 20% of a
well-built data-parallel step; from a quarter on something can be done."""
COMM_CRITICAL_SHARE = 0.50
COMM_FLOOR_NS = 5_000_000
"""Ranks of a tiny model that share a machine's cores spend milliseconds in gloo's threads; real jobs do not."""
COMM_HOOK_SHARE = 0.10
"""Share of the step that the code of a communication hook takes: casting and compressing take a few percent."""
COMM_HOOK_CRITICAL_SHARE = 0.50
COMM_HOOK_FLOOR_NS = 2_000_000
"""Calling Python for some ten buckets takes a tenth of this."""
EXCHANGE_BYTES_PER_S = 200e6
"""Ranks of one host exchange gradients several times as fast, also on a busy machine …"""
EXCHANGE_START_NS = 2_000_000
"""… after as much for each bucket, until every rank gets a core."""
EXCHANGE_TIMES = 4.0
"""An exchange that takes this many times what its bytes need contains something else."""
BUBBLE_SLACK = 0.20
"""Share of the step that pipeline stages may wait for each other beyond what even stages would: stages are never quite
even, and each exchange takes a moment."""
OPTIMIZER_SHARE = 0.25
"""Adam without fused kernels takes up to a fifth of a small model's step; beyond that a setting is wrong."""
OPTIMIZER_CRITICAL_SHARE = 0.50
OPTIMIZER_FLOOR_NS = 2_000_000
"""A tiny model's optimizer is all Python."""
OTHER_SHARE = 0.10
"""Unexplained time inside the step: the share that is a bottleneck in any other phase."""
OTHER_FLOOR_NS = 2_000_000
"""Clipping, zeroing and a printed line cost a millisecond in Python."""
BETWEEN_SHARE = 0.10
"""Share of all time, between steps: evaluation and checkpoints are wanted, and usually cost up to a tenth."""
EVALUATION_SHARE = 0.20
"""Share of all time that an evaluation may take without a warning: how often it is worth is known to its owner only."""
BETWEEN_CRITICAL_SHARE = 0.30
"""Nearly a third of the time nothing is trained."""
STOPS_AT_LEAST = 2
"""Evaluations or checkpoints in the window: a single one is an event, not where the time goes."""
ALONE_SHARE = 0.20
"""A pause belongs to one rank if every other spends at most this share of that rank's time in it."""
COMPUTE_SHARE = 0.80
"""Forward, backward and optimizer together."""
EPOCH_STARTS_SHARE = 0.10
"""If more steps than this start an epoch, they belong to the job's rhythm; fewer are left out of its input time."""
STALLS_SHARE = 0.02
"""The longest steps, left out of shares of time: a single stall is not a bottleneck."""
BOTTLENECK_SHARE = 0.5
"""Share of a run's stretches that must show a bottleneck; otherwise it is an episode."""
OPPORTUNITY_SHARE = 0.02
"""The smallest share worth naming as an opportunity in a healthy run."""
LARGE_SHARE = 0.20
"""From a fifth of the time on a run is not free of bottlenecks, whatever takes it."""

BURST_PERIOD = 8
"""Steps: slow ones that come more often than this are the rhythm of a bottleneck, not separate jitter."""
BUSY_PROCESS_PERCENT = 80.0
"""Of one core: a training process that takes more hardly ever waits for workers."""
BUSY_CPU_PERCENT = 90.0
"""Median over the steady steps at which a host's CPUs count as saturated."""

# -- communication ----------------------------------------------------------------------------------------------------

EXCHANGE_STEPS = 8
"""Comparable steps whose collectives were recorded individually: in half of a run's stretches, and one to spare."""
EXCHANGE_RATIO = 1.5
"""Factor over the sibling groups, or over before: links of one kind differ by 20%, gloo on shared cores by a third."""
EXCHANGE_FLOOR_NS = 2_000_000
"""Per step: below it the scheduler decides how long ranks of one machine take to exchange anything."""
EXCHANGE_AGREES = 0.8
"""Share of these steps that must show it."""
BYTES_RATIO = 1.25
"""Factor over the bytes of the sibling groups: from here on the work differs, not the network …"""
BYTES_ALIKE = 1.1
"""… and up to here they sent the same; in between it is undecided."""
SAME_SIZE_SHARE = 0.2
"""Share of a step's large all_to_alls with one size on all ranks if the router distributes unevenly: half of all, those
to the experts in forward and those from them in backward; fewer if not all of them are recorded."""
ROUTED_SHARE = 0.6
"""Share of the steps in which the busiest rank's experts got the most tokens; chance gives a half for two ranks."""
OVERLAP_SHARE = 0.10
"""Share of the step spent in exposed exchange that could be hidden: as for a bottleneck in any other phase."""
OVERLAP_HIDDEN = 0.5
"""Share of an exchange during backward that is hidden: DDP's own buckets hide well over half, unless there is nothing
to hide it behind."""
OVERLAP_MB = 4.0
"""Size of the gradients: below it an all-reduce is latency, and cutting it into buckets adds more."""
OVERLAP_PARTS = 4
"""Parts into which the advice splits an exchange: the last cannot be hidden, and a quarter left is what counts."""
FSDP_LARGEST_SHARE = 0.5
"""Share of all parameters in one unit: little is left to compute while it is gathered."""
FEW_BUCKETS = 2
"""With fewer buckets nothing can be sent while the rest of backward runs."""
SMALL_BUCKET_MB = 4.0
"""Below it an all-reduce is latency, not bandwidth."""
CALLED_SHARE = 0.9
"""Share of the steps: an occasional call has no level."""
SIEVE_QUANTILES = (0.1, 0.9)
"""Any stretch worth reporting lies between them: a sieve before the search for it."""
BUCKET_LARGEST_SHARE = 0.5
"""Share of all gradients in one bucket: they are sent together, and late."""
BUCKET_OVERFULL = 1.5
"""Multiple of the size limit: DDP closes a bucket once it is full, so it exceeds that by less than a small layer."""
FEW_GATHERS = 2.5
"""Per step: forward and backward of one module that holds all parameters."""

# -- network ----------------------------------------------------------------------------------------------------------

PROBE_SLICES = 4
"""Slices of time (from one line about a path to the next) that must show it: the agents' lines do not come at once, and
a burst of a second appears in up to three slices."""
PROBE_WAYS_SHARE = 0.8
"""Share of a host's paths, and of the slices of the reported stretch: one in five may be lucky."""
PROBE_RTT_RATIO = 3.0
"""Factor over the round trip of the others: between racks it is twice that within one …"""
PROBE_RTT_FLOOR_US = 500.0
"""… and longer by this much: moderated interrupts and virtual switches add some hundred microseconds."""
PROBE_LOSS = 0.01
"""Share of the probes, both ways: from here on TCP runs at a tenth of its speed; a healthy network loses 0.1%."""
PROBE_LOSS_RATIO = 1.5
"""Factor over the loss of the other paths: with two lossy hosts of four, two thirds of those are lossy as well."""
PROBE_CHANCE = 1e-3
"""Chance that any host is named on a network with the same loss everywhere: probes are few, and what costs nothing is
reported, but not as a warning."""
PROBE_SPREAD = 0.75
"""Share of the slices, and of a host's paths, that would show a uniform loss: a burst and a bad link show in few."""
PROBE_ALIKE = 0.3
"""Share of a host's loss that must remain without its worst path; otherwise that path is lossy, not the host."""
PROBES_BACK_S = 240.0
"""How far back to look while a job runs, however short its steps are: probes are few."""
PROBES_LAG_S = 3.0
"""When a probe is given up: loss is known that much later."""
PROBES_AFTER_S = 10.0
"""A line describes the seconds before it."""
SPEED_RATIO = 0.5
"""Share of the others' link speed: 10 instead of 25 Gbit/s, 1 instead of 10."""
RETRANSMITS = 0.01
"""Share of the segments sent that is worth mentioning along with the probes …"""
RETRANSMITS_SEGMENTS = 50.0
"""… at this many segments per second or more."""
HIT_CHANCE = 0.02
"""Share of the steps outside a bad stretch that lie above the level against which those inside are compared …"""
HIT_Z = 4.0
"""… and how certain it must be that there are more of them inside."""
LOSSY_HOSTS_AT_MOST = 8
"""Lossy hosts to search for, one after the other; if there are more, it is the network."""
HEALTHY_LOSS_SHARE = 1e-4
"""Share of the packets that a healthy network loses: loss is compared with at least this."""
START_TRIPS = 10
"""Round trips in which TCP, after a pause, comes up to speed: its window doubles with each."""
STRAY_QUANTILES = (0.01, 0.99)
"""Of the steps that a bad network made longer, for its first and last step: single strays lie beyond."""
NETWORK_ALWAYS_SHARE = 0.9
"""Share of the steps: the first and last lines do not cover all of a run, and from here on it was bad all the time."""

# -- while the job runs -----------------------------------------------------------------------------------------------

LIVE_STEPS = 256
"""Steps judged while a job runs: enough for a rank that is 3% slow, few enough that the past soon drops out."""
LIVE_TIMED_STEPS = 64
"""Where devices are timed in some steps only, use this many of those …"""
LIVE_STEPS_AT_MOST = 4096
"""… however far back that is, up to here: 64 of 64."""
PACE_RECENT_STEPS = 20
"""Steps that show that the pace of a job changed: then the rules are evaluated at once …"""
PACE_CHANGED = 1.2
"""… if their median differs by this factor from that of ``LIVE_STEPS``: less than that is hardly critical."""
CONFIRM_STEPS = 2
"""Steps between the first look that finds something and the one that shows it."""
RELEASE_STEPS = 20
"""Steps without it before it is withdrawn: longer than the period of most intermittent problems."""
SHOWN_SHARE = 0.5
"""Share of a run's steps in which a finding was shown as critical: its reader expects it in the summary."""
# -- over time --------------------------------------------------------------------------------------------------------

LOCAL_STEPS = 21
"""A step is compared with the median of this many around it: ten slow ones in a row do not move it, and a drift over
hundreds of steps does not make every late step a spike."""
SPIKE_SHARE = 0.5
"""Share of the typical step: the eye sees a step half as long again; smaller ones matter only if they are periodic."""
SPIKE_SPREADS = 8.0
"""… and this many robust spreads above its neighbors: on an uneven job half a step is nothing special."""
SPIKE_FLOOR_NS = 1_000_000
"""One scheduling slice of a busy machine; below it every process has spikes."""
LAYER_LOOK_STEPS = 2.0
"""A step in which Stepscope looked at the layers may be this many typical steps longer: at most one was measured …"""
LOOK_NS = 250_000_000
"""… or as much longer as it takes to count what grows: 20 to 90 ms were measured, on a busy machine up to 200 …"""
FIRST_LOOK_NS = 500_000_000
"""… and the first look even more: a GPU loads the kernels for it, which took 120 ms on an H200."""
STALL_STEPS = 3.0
"""Typical steps lost at once that make a stall noticeable …"""
STALL_NS = 1_000_000_000
"""… or a second, however long the steps are; from here on a stall is a warning …"""
STALL_FLOOR_NS = 100_000_000
"""… and never mentioned below a tenth of one: tiny steps lose three of their kind whenever a process is moved."""
STALL_OVER_SPIKES = 5.0
"""… and where spikes are constant, only if it is this many times larger: among ten noisy ones some are always three
times their median."""
CORE_SHARE = 0.1
"""Share of a stall's slowest step: neighbors that lost less do not count as part of it."""
STALLS_AT_MOST = 3
"""Large spikes that are single events; from four on they recur, and that is the finding."""
RECURRING_SPIKES = 4
"""Spikes that are no longer an accident …"""
PERIODIC_SPIKES = 3
"""… or three, if their distances are equal."""
JITTER_SHARE = 0.02
"""Share of the time: spikes that cost less together occur on every machine."""
PERIODIC_SHARE = 0.01
"""Share of the time for periodic ones: those have one cause and can be fixed (+15% every tenth step costs 1.5%)."""
JITTER_WARNING_SHARE = 0.15
"""Share of the time for irregular ones: a busy machine loses a tenth anyway; and a second in all, as for a stall."""
SAME_RANK_SHARE = 0.8
"""Share of the spikes on one rank needed to blame it; if it is a different one each time, it is chance."""
SAME_RANK_CHANCE = 1e-3
"""Chance that irregular spikes would favor some rank as much at random."""
REGULAR_SHARE = 0.8
"""Share of the spikes (or periods) that must keep the beat; a stray one does not hide it."""
BEATS_SHARE = 0.6
"""Share of the beats that must have a spike: a few may drown in the noise."""
USUAL_PASSES_SHARE = 0.10
"""Minimum share of steps with an ordinary number of backward passes: the last step of an epoch may have fewer."""
ALIKE_STEPS = 3
"""Steps with equally many backward passes whose median is used for such a step; with fewer, scale in proportion."""
PASS_AT_MOST = 5.0
"""Factor over a usual pass that an extra one may take by design: a generator is larger than its critic, but compiling a
kernel again is not a pass."""
FORWARD_AT_MOST = 1.5
"""Factor over the usual time for each call of the model that a longer step may take: episodes differ in length."""
RHYTHM_CHANCE = 0.1
"""Chance that random spikes would keep a beat as well, counted conservatively: less than 1% of them do."""
LONGEST_PERIOD = 100
"""In steps: for small and rarer spikes even +100% is below one percent of the time."""
FOLDS = 5
"""Minimum periods: the median of five withstands two strays."""
TREND_STEPS = 20
"""Fewer steps cannot show growth with the required certainty."""
TREND_BLOCKS = 8
"""The same for their stretches."""
TREND_WARNING_CHANCE = 1e-6
"""For a warning: nine of ten pairs of stretches rise.  Very uneven steps occasionally reach the next one."""
TREND_CHANCE = 1e-4
"""Chance that a series without trend shows one (Mann–Kendall)."""
GROWTH_SHARE = 0.05
"""Share of the typical step: the smallest growth or change that is reported …"""
GROWTH_WARNING_SHARE = 0.10
"""… and that is a warning: clocks and room temperature move a machine by a few percent in an afternoon."""
LEVEL_STEPS = 8
"""The shortest stretch with its own level: its median withstands three strays."""
SHORT_STRETCH_STEPS = 10
"""Wander is measured between stretches of this many steps: about the shortest change of interest."""
CHANGE_CHANCE = 1e-4
"""Chance that a series without change shows one anywhere (Bonferroni)."""
CHANGE_SPREADS = 4.0
"""A change is a warning if it is this many times larger than all wander, itself included; it is reported from
SPREADS_APART times the wander between changes on."""
OTHERS_USUAL_SHARE = 0.10
"""Share of the step that all other phases took before a change: less says nothing about the machine's pace."""
DROP_STEPS = 10
"""The shortest slow stretch that is a drop of throughput; shorter ones are stalls."""
DROP_SHARE = 0.10
"""Slower by this share: a smaller slowdown that has passed is not worth reporting."""
STALL_NEAR_STEPS = 1
"""A stall shows in the step that was under way, or in the one after it."""
LOCATE_STEPS = 32
"""A sample of the steps: their median is accurate to a few percent of their spread."""
MORE_BYTES_RATIO = 2.0
"""Times the bytes of other steps: such a step has more to exchange."""
MORE_CAUSES_SHARE = 0.25
"""Share of a slow step's extra time: the title must mention other causes that add at least this much."""
STALL_NEIGHBORS = 10
"""Steps on each side of a stall that show what is usual there."""
BESIDE_STEPS = 50
"""On each side of a change, to locate it: what happened long before is unrelated."""
RISE_BLOCKS = 5
"""Stretches that must rise for a wander to be a trend: fewer rise one after the other by chance."""
RISE_AGREES = 0.8
"""Kendall's tau: a wandering rank hardly ever rises in nine of ten pairs of stretches."""
POINT_CLIP_SPREADS = 3.0
"""How far a point may lie from its local median before it is clipped, in the search for changes."""
LEAST_SPREAD_SHARE = 1e-3
"""Share of the level: no clock or machine is steadier than this; without it a constant series changes everywhere."""
CHANGES_AT_MOST = 4
"""Changes excluded from the estimate of wander; any more of them are wander."""

# -- lines of code -----------------------------------------------------------------------------------------------------

PLACE_USUAL_SHARE = 0.1
"""Share of the other stacks: a line that at most so many of them have is what the ranks do differently …"""
PLACE_EXCESS_SHARE = 0.85
"""… and so is a line in a phase of which at least this share is more than the others need, whose stacks are
then rarely in it."""
PLACE_CHANCE = 0.05
"""The largest accepted probability that a line is missing on other ranks only by chance."""
PLACE_AGREE_SHARE = 0.6
"""Share of the stacks that must have a frame for it to be named: the message says "mostly"."""
PLACE_STACKS = 2
"""A single one may have been taken anywhere."""

# -- crashes ----------------------------------------------------------------------------------------------------------

LOW_MEMORY_SHARE = 0.05
"""Share of a host's memory: with less available before a SIGKILL, the kernel's out-of-memory killer is likely."""
DEATH_MEMORY_S = 30.0
"""How long before a death the host's memory is checked."""
DEATH_LEAD_S = 5.0
"""Minimum lead of an exception over a death that did not cause it: deaths are noticed late, clocks differ."""

# -- memory -----------------------------------------------------------------------------------------------------------

CREEP_LEFT_OUT = 0.1
"""Share of the run, at its start: the allocator, lazily made buffers and the first batches grow memory once."""
CREEP_SHARE = 0.05
"""Share of the memory at the start.  malloc fragmentation and shape caches move a healthy process by less …"""
CREEP_FLOOR_BYTES = 64 << 20
"""… and a small process by some tens of MiB."""
CREEP_BYTES_PER_STEP = 100_000
"""Growth at this pace, 100 MB in 1,000 steps, counts whatever its share of a large job …"""
CREEP_DEVICE_BYTES = 16 << 20
"""… from this growth on: at the ends of steps, a healthy device holds the same bytes again and again."""
CREEP_BYTES_PER_EPOCH = 100_000_000
"""The same for growth that comes with the epochs, however long these are."""
CREEP_FLOORS_BYTES = 100_000_000
"""Over the whole run, from its floors: a level that rose steadily by less may be a heap that fragments."""
CREEP_FLOORS_DRIFT_T = 3.0
"""As CREEP_DRIFT_T; floors are judged again and again while a run lasts."""
CREEP_FLOORS_PACE = 0.8
"""The second half of the time must bring this share of what the first brought: of an exponential that has come a long
way it is less than 0.6, of a square root or a logarithm less than 0.75."""
CREEP_EPOCHS = 3
"""Begun, to know how long one is; the first one fills caches of the data …"""
CREEP_EPOCH_AWAITED = 50_000
"""… so it is awaited, if the loader says that it is no longer than this."""
CREEP_FLOORS_STEPS = 1_000
"""Where there are no epochs: the part of the run that fills caches."""
CREEP_FLOORS_LENGTH = 5
"""The run must be this many times as long as that part: then slowing down shows."""
CREEP_BLOCKS = 24
"""Stretches whose lowest points are compared: the low points of a sawtooth do not rise; and 24 successive rises are
significant (z = 6.8) for any number of ranks."""
CREEP_SAMPLES = 12
"""Fewer cannot be significant (z = 4.5 at most); then the rise must be obvious."""
CREEP_THIRD_SHARE = 0.5
"""Each third of the run must rise by at least half of its even share: a cache that fills up slows down (an exponential
that has reached 95% rises by a third of it in its last third)."""
CREEP_DRIFT_T = 2.5
"""Against a random walk (t of its moves), which Mann–Kendall takes for a trend; five equal stairs in a run pass."""
CREEP_FEW_SAMPLES = 3
"""Minimum samples to show a continuing rise: two rises.  Samples come once a second."""
CREEP_FEW_BYTES = 256 << 20
"""Obvious: more than a library loaded late or a first evaluation takes …"""
CREEP_FEW_SHARE = 0.20
"""… and a fifth of the process …"""
CREEP_FEW_EVEN = 0.25
"""… with no rise below a quarter of the mean one."""
CREEP_ALIKE_SHARE = 0.5
"""A rank that rises as steadily and by half as much as those that crossed the line has the same leak."""
CREEP_SOON_S = 3600.0
"""Memory that runs out within an hour ends the run before anyone looks again …"""
CREEP_SOON_RUNS = 2.0
"""… and so does memory that runs out before the run is three times as long."""
CREEP_SETTLING_S = 60.0
"""Host memory that was seen to grow for less time than this, with nothing known that grows, may be an allocator that
settles (malloc's arenas, image decoding): information only …"""
CREEP_SETTLING_BYTES = 256 << 20
"""… if it grew by less than this …"""
CREEP_SETTLING_RUNS = 50.0
"""… and runs out after more than so many times the steps in which it was seen to grow."""
CREEP_READINGS_OLD = 1.5
"""Readings of malloc come until each 1.3 times as far a step; if the run is this many times as far, they are old."""
CREEP_FREE_SHARE = 0.7
"""If so much of the growth was freed and is kept by glibc; a leak of middle-sized blocks leaves gaps of up to half."""
CREEP_FREE_BYTES = 1 << 30
"""… it is no leak, until it has grown by this, since it may not end.  In jobs with tensors of 0.1 to 30 MB, it was
60 to 300 MB."""
CREEP_LATE_S = 86_400.0
"""More than a day ahead: most runs are over by then."""
OOM_SHARE = 0.10
"""After an out-of-memory error: what would free less than this share of what was in use is not worth a sentence."""
OOM_PART_SHARE = 0.02
"""Smaller parts are not named."""
OOM_PLACE_SHARE = 0.6
"""Modules that hold this share of a kind of memory are named for it."""
PRESSURE_SHARE = 0.92
"""Share of a device's memory needed at the peak: a longer sequence or the last uneven batch takes the rest."""
PRESSURE_CRITICAL_SHARE = 0.97
"""Libraries and the driver may take some hundred MiB at any time; the allocator starts to free and retry here."""
IMBALANCE_SHARE = 0.20
"""Share of the largest: peers hold the same model, and differ by a bucket or an uneven batch."""
IMBALANCE_BYTES = 512 << 20
"""Contexts, NCCL's buffers and workspaces differ by some hundred MiB."""
FRAGMENTED_SHARE = 0.30
"""Share of the reserved memory never in use at once: blocks of 2 MiB and rounding explain a few percent."""
FRAGMENTED_BYTES = 1 << 30
"""Below it there is nothing useful to gain."""
DEVICE_FULL_SHARE = 0.70
"""Share of a device's memory: below it there is room, and uneven or fragmented memory does no harm."""
FSDP_GATHERED_SHARE = 0.05
"""Share of a device's memory: gathered parameters that take less are not what fills it."""
CHECKPOINTS_KEEP_SHARE = 0.3
"""Share of the activations that a checkpoint around each block usually leaves: the inputs of blocks, and one block."""

# -- loss -------------------------------------------------------------------------------------------------------------

LOST_NOTES = 3
"""Noted values in a row, up to the last one, that are no numbers: then the run is lost."""
PASSING_NAN_SHARE = 0.05
"""Share of all noted values: fewer that are no numbers, with numbers after them, are a remark."""
RATE_STEPS = 20
"""Steps before a jump in which a learning rate that rises …"""
RATE_ROSE = 10.0
"""… by this factor, and stays there, is named as its cause."""
SPIKE_BEFORE = 50
"""Noted values that show what is usual before a jump …"""
SPIKE_AFTER = 20
"""… and at least so many after it, which are all …"""
LOSS_JUMP_SPREADS = 8.0
"""… above it by so many robust spreads …"""
LOSS_JUMP_SHARE = 0.5
"""… and by this share of it."""

# -- layers -----------------------------------------------------------------------------------------------------------

SKIPPED_SAMPLES = 5
"""Successive sampled steps whose update was not applied, up to the last one …"""
SKIPPED_STEPS = 24
"""… from the first to the last: a GradScaler that begins at 65,536 has reached 1 after 16 steps, whatever the loss."""
EXPLODING_SAMPLES = 5
"""Successive samples, up to the last one: a bad batch or a restart of the learning rate is over by then …"""
EXPLODING_TIMES = 100.0
"""… with this many times the usual norm: warm-up, unfreezing and harder data make it ten times as large …"""
EXPLODING_TIMES_HIGHEST = 10.0
"""… and this many times the highest so far: the first steps of a run often have the largest gradients …"""
EXPLODING_BEFORE = 10
"""… after so many samples that show what is usual …"""
EXPLODING_BEFORE_STEPS = 100
"""… over so many steps: gradients rise from next to nothing while layers that begin at zero are learned."""
EXPLODING_VALUES = 400
"""Values of a curve that are looked at: every one of a short run, evenly spaced ones of a long one."""
EXPLODING_LAYER_SHARE = 0.9
"""Share of the total norm: one layer's growth counts if hardly anything but its gradient is left."""
STARTING_STEPS = 5
"""The first steps of a run: layers behind one that begins at zero (LoRA, gates) have no gradient yet."""
VANISHING_SAMPLES = 5
"""Samples, all of them …"""
VANISHING_STEPS = 50
"""… over so many steps …"""
VANISHING_LAYERS = 3
"""… in so many layers in a row, from the first on: one layer alone may be meant to learn little …"""
VANISHING_SHARE = 1e-6
"""… with this share of the gradients, relative to the weights, of the layers that have large ones …"""
VANISHING_GRADIENT = 1e-8
"""… and a typical gradient of an element below Adam's epsilon: no optimizer makes anything of it …"""
VANISHING_RISE = 10.0
"""… that has not become this many times larger since: a model that begins with closed gates opens them."""
VANISHING_MODEL = 6
"""Layers in the model; of fewer, the first three are no part of it."""
DEAD_SAMPLES = 3
"""Samples, all of them …"""
DEAD_STEPS = 20
"""… over so many steps."""
DECAY_SLACK = 2.0
"""Weight decay alone shrinks weights by the sum of its updates, up to this factor while the learning rate changes …"""
DECAY_ROUNDING = 3e-4
"""… and up to the rounding of the norms, of which four digits are known …"""
DECAY_SHARE = 0.02
"""… or, where rounding hides it, by updates with this share of those of other layers: those are 30 times as large with
a strong decay, and 1,000 times with the default of AdamW."""
ROUTED_SIBLINGS = 3
"""Numbered modules of one kind, of which some have a gradient in some samples only: something chooses between them."""
EXCHANGED_SHARE = 0.5
"""Share of the parameters' bytes: a step that exchanges less than this exchanges neither gradients nor weights …"""
AVERAGED_STEPS_SHARE = 0.5
"""… and up to this share of the steps that do, from AVERAGED_TIMES on, are averages of weights (Local SGD)."""
AVERAGED_TIMES = 2
AVERAGE_AT_MOST = 2.0
"""Factor over the usual average that one may take: ranks that trained alone arrive at different times."""
DESYNC_COMPARISONS = 3
"""Where ranks exchanged nothing so far, they may be about to average for the first time: compare so often …"""
DESYNC_ALONE_STEPS = 100
"""… or for so many steps."""
DIFFER_EVERYWHERE = 0.9
"""Share of the layers with trainable parameters: then the weights as a whole differ, not a part of the model …"""
DIFFER_LOCALLY = 0.1
"""… and up to this share (or one) it is a change within a layer."""
MOVED_TIMES = 10.0
"""Of two ranks that differ, the one whose weights moved this many times as far since they were equal is the cause …"""
MOVED_OVER_TRAINING = 3.0
"""… if that is also this many times as far as training moved them before, per step; otherwise the other one may have
gone back to older weights."""
HISTORY_STEPS, HISTORY_RANKS = 256, 8
"""Sampled steps that are looked at closely, evenly spaced, and ranks: a look takes less than a second …"""
HISTORY_STEPS_LEAST = 32
"""… and has enough steps, however many ranks hold parts of the model."""
LAYER_STEPS = 2
"""Sampled steps that must show in which layer a slow rank loses its time."""
LAYER_MOSTLY = 0.7
"""Share of the extra time from which on a layer is said to have most of it; below it the share is named."""
NONFINITE_LATER_STEPS = 8
"""Steps after one with NaN that may show in which layer it began."""

# -- machine ----------------------------------------------------------------------------------------------------------

SAMPLE_LOOKS_BACK_S = 1.0
"""Period that a sample covers: NVML's utilization and power are means over a sixth of a second to a second."""
SAMPLES_APART_S = 0.9
"""The agent samples once a second, GPUs more often at first.  The rules use samples this far apart, a little less than
a second, so that none is lost to an early tick."""
MACHINE_SAMPLES = 3
"""Samples about a second apart: fewer are a moment, not a run."""
UTILIZATION_SAMPLES = 5
"""NVML's utilization covers a sixth of a second to a second: a handful, to have sampled more than one step."""
UTILIZATION_LOW_PERCENT = 50.0
"""The GPU is idle for more than half of the time, unlike in any healthy job of its size …"""
UTILIZATION_WARNING_PERCENT = 40.0
"""… and here it is a warning, if we see what it waits for; a tiny model cannot fill a large GPU."""
WAITED_FOR_SHARE = LARGE_SHARE
"""Share of the host's step: the GPU waits for a phase outside the training that takes this much."""
THROTTLED_SHARE = 0.10
"""Share of the samples: less often is a passing peak …"""
THROTTLED_SAMPLES = 2
"""… and a single sample is not throttling."""
POWER_CAP_SHARE = 0.5
"""Share of the samples: a GPU that works hard touches its power limit all the time, as intended."""
POWER_CAP_CLOCK_SHARE = 0.10
"""Share below the clocks of its peers or its own best: then the limit has a measurable cost."""
SLOW_CLOCK_SHARE = 0.08
"""Share below its peers' clocks: GPUs of one kind differ by up to 5% under load; this much delays all ranks."""
CLOCK_BUSY_PERCENT = 50.0
"""Utilization at which a clock is informative: an idle GPU lowers it."""
CPU_FULL_PERCENT = 95.0
"""Of all cores."""
CPU_ROOM_PERCENT = 80.0
"""Of all cores: below it, they are not full by any measure."""
CPU_RUNNABLE_PER_CORE = 1.5
"""Runnable tasks: at one per core a full CPU is well used and no task waits …"""
CPU_HEAVY_PER_CORE = 3.0
"""… and here each waits for twice the time it runs."""
CPU_PRESSURE = 0.5
"""Share of the time in which some task waited for a processor (PSI); also under a quota, when cores look idle."""
CPU_OWN_SHARE = 0.8
"""Share of the CPU in use: the job keeps itself busy."""
CPU_OTHERS_SHARE = 0.7
"""Share of the CPU in use; if the job has less than this, other programs take a third of the machine from it."""
WAITING_AT_MOST = 0.95
"""Share of a rank's work: a rank that works at all does not wait for a processor longer than this."""
WAITING_MORE_SHARE = 0.05
"""Share of a rank's work by which it must wait longer for a processor than its peers, to be slow because of that."""
WAITING_SHARE = 0.10
"""Share of the ranks' work spent waiting for a processor: from here on uneven steps are the machine's …"""
UNDISTURBED_STEPS = 0.25
"""… and so is a bottleneck that does not show in this share of the steps, the fastest ones, if it is not known how long
ranks waited."""
DISTURBED_STEPS = 0.10
"""Share of the steps in which some rank waits that much: then ranks are also judged without the waiting …"""
WAITING_KNOWN_SHARE = 0.75
"""… unless more of a rank's work is waiting: errors are several times as large, relative to the rest …"""
SECONDS_AT_LEAST = 4
"""… or fewer seconds are described by a sample: they do not show how much they scatter."""
SECONDS_AT_MOST = 64
"""Of a long run, which is judged in longer stretches instead of single seconds."""
LEAST_WAIT_SHARE = 0.01
"""Share of its work that a step waited at least, although it took no longer than the others of its second."""
LEAST_SECONDS = 2
"""Seconds on each side of a change, which itself is within one more."""
TURNS_AT_LEAST = 5
"""Turns of each rank that show that ranks are late in turn …"""
RANKS_IN_TURN = 64
"""… of up to so many ranks: with more, a run is hardly long enough, and every order is tried."""
SERIES_AT_MOST = 64
"""Phases of ranks in which a rhythm is searched, those that stand out most."""
CPU_WANTED_SHARE = 0.5
"""Share of what each runnable task gets; a rank that uses less mostly sleeps, and others take nothing from it."""
RAM_LOW_SHARE = 0.05
"""Share of a host's memory available: the kernel drops file caches, and reading data becomes slow …"""
RAM_CRITICAL_SHARE = 0.02
"""… and here its out-of-memory killer comes next."""
RAM_SWAP_BYTES = 256 << 20
"""Swapped out during the run: idle pages of other programs are less …"""
RAM_SWAP_SHARE = 0.20
"""… and are swapped without need while more than this is available."""
RAM_PRESSURE = 0.2
"""Share of the time in which some task waited for memory (PSI); zero on a healthy machine."""
CPU_WAIT_SAMPLE_NS = 1.5e9
"""A sample describes the second before it; a step further from all of them is unknown."""
OFF_CPU_SHARE = 0.05
"""Share of the time of the steps that a wait for the disk, or for pages from it, must take to be named as a cause."""
OFF_CPU_SAMPLE_NS = 1e9
"""Time before a sample that its shares and rates describe."""
OFF_CPU_SECONDS = 2.0
"""Time that samples must describe: the state of a process is read five times a second."""
FAULTS_A_STEP = 2.0
"""Major page faults per step beyond those of the peers; a healthy process has none once its code is loaded."""
FAULT_LEAST_NS = 20_000.0
"""What a page from swap takes at least, in compressed memory; from a disk it takes five times as long or more."""
SWAPPED_BYTES = 16 << 20
"""Memory of a rank in swap, from which on its major faults count as swapping: idle pages of libraries are less."""
WORKERS_DISK_SHARE = 0.5
"""Share of their time that a rank's DataLoader workers wait for the disk, to be late because of that."""
THROTTLED_CPU_SHARE = 0.10
"""Share of the time in which the quota of the ranks' cgroup is used up …"""
STEAL_SHARE = 0.10
"""… or that the hypervisor takes from a host's processors: less is common in the cloud and does not show in steps."""

# Remarks about settings.
FEW_SAMPLES = 16
"""Samples of a rank in a step below which BatchNorm's statistics are noisy: SyncBatchNorm is worth its exchange."""
WALK_NS_PER_TENSOR = 2_500.0
"""Upper bound of the cost of find_unused_parameters=True: 0.9 to 2.3 µs per parameter tensor, measured on 48 layers."""
WALK_SHARE = 0.01
"""Share of the step: a shorter walk is not worth a sentence."""
LAST_BATCH_SHARE = 0.01
"""Share of the time that a short batch at the end of each epoch costs beyond its samples."""
LAST_BATCH_EPOCHS = 3
"""Short batches needed before their steps are called slow."""
LAST_BATCH_COMPILE_NS = 1e9
"""Compiling for the short batch: less is not noticed, unless it reaches LAST_BATCH_SHARE of a short run."""
UNUSED_PASSES = 90
"""Backward passes without an unused parameter after which we call all of them used: the sample after step 100."""
FIRST_WORKERS = 4
"""DataLoader workers to start with, if there are cores for them."""

# -- captures ---------------------------------------------------------------------------------------------------------

CAPTURE_STEP_SHARE = 0.05
"""Share of a captured step by which one rank must work longer: with few steps, less may be chance …"""
CAPTURE_FLOOR_NS = 300_000
"""… and so may less than this, whatever the share: writing down every call costs some ranks more than others."""
CAPTURE_STEPS = 3
"""Captured steps from which on it counts in how many of them the rank works longer …"""
CAPTURE_MOST_STEPS = 0.75
"""… and the share of them that is needed: a single stall is not what the rank does in each step."""
CAPTURE_ALONE_SHARE = 0.1
"""Share of a step that an operator must take which only one of the ranks runs, if all work equally long …"""
CAPTURE_ALONE_STEPS = 2
"""… and captured steps, in each of which it must run: in a single one it may be what a rank does now and then …"""
CAPTURE_ALIKE_SHARE = 0.9
"""… and share of the work in operators that ranks share that must be in those that they call equally often: stages of a
pipeline call them more or less often, and what only the last one runs is there by design."""
CAPTURE_EXPLAINS = 0.5
"""Share of what a rank works longer that an operator, kernel or line must explain to be named as its place."""
CAPTURE_WHOLE_SHARE = 0.8
"""Share of a rank's work in a step from which on a function is around the step: loops keep a little for themselves."""
CAPTURE_ALSO_SHARE = 0.1
"""Share from which further operators, kernels and lines are listed."""
CAPTURE_SLOWER = 1.2
"""How many times as long the same calls take on a slow processor or device: less is within what ranks differ."""
CAPTURE_JOINED = 5
"""Findings of traces that join a run's as information: the most costly; the capture has the others."""
CAPTURE_DISTURBED = 1.25
"""How many times as long as usual steps may take while they are profiled: beyond it, a host that cannot keep up with
its device may be the profiler's doing."""

__all__ = [name for name in dir() if name.isupper()]
