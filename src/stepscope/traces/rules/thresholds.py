"""Every number that a verdict on a trace depends on, with its reason.

A trace is short: some steps of thousands.  So a share alone is never enough, there is a floor on the time per step and
on what was seen in all.
"""

from __future__ import annotations

from typing import Final

# -- what a finding must cost ---------------------------------------------------------------------------------------

WARNING_SHARE: Final = 0.05
"""Of the step time: as for live findings; less is not worth anybody's attention."""
CRITICAL_SHARE: Final = 0.20
"""A fifth of the machines' time: to be fixed before anything else."""
FLOOR_NS: Final = 200_000
"""Per step: below a fifth of a millisecond there is nothing to fix in Python."""
TRACE_FLOOR_NS: Final = 10_000_000
"""Of steps in all.  A few milliseconds of one step are an example, no evidence: told, not warned of."""
CRITICAL_STEPS: Final = 2
"""A single step, or a trace without steps, may be a warm-up: it is never called critical."""
SURE_STEPS: Final = 3
"""From so many steps on a figure is taken for how the job behaves."""
SURE: Final = 0.95
TWO_STEPS: Final = 0.8
ONE_STEP: Final = 0.6
NO_STEPS: Final = 0.5
"""Confidence by what was seen; without profiler steps setting up and training cannot be told apart."""

PART_SHARE: Final = 0.05
"""Of the step: parts of it that are smaller need not be told where nothing stands out."""
START_UP_SHARE: Final = 0.30
"""Of a trace without profiler steps in a single call of the runtime: the first one loads the driver and all kernels."""
REMEDY_GAIN: Final = 0.5
"""Of a time that has no single cause (a slow host, a busy network), no remedy saves all: half is what compiling, larger
batches and smaller data types bring, so half is its price."""

# -- the host -------------------------------------------------------------------------------------------------------

LOADER_SHARE: Final = 0.05
"""Of the step in the DataLoader: the TensorBoard plugin's threshold, which people know …"""
LOADER_WARNING_SHARE: Final = 0.10
"""… which is told; a warning it is from here on, since a small model's loader takes five per cent and is well …"""
LOADER_FLOOR_NS: Final = 1_000_000
"""… and more than what taking a finished batch off a queue and pinning it costs in Python."""
HOST_IDLE_SHARE: Final = 0.10
"""Of the step a device waits for the host.  Each step ends and begins with a little of it, however well it is built."""
PYTHON_SHARE: Final = 0.10
"""Of the step in which a process without a device runs no operator, in stretches of a millisecond and more: as for
devices that wait …"""
PYTHON_FLOOR_NS: Final = 1_000_000
"""… and more than the bookkeeping of a training loop costs."""
SYNC_SHARE: Final = 0.05
"""Of the step that a device could have been kept busy had the host not waited for it."""
GAPS_SHARE: Final = 0.10
"""Of the step between kernels that are queued already; a microsecond or two after each of them is the hardware's."""
GC_SHARE: Final = 0.02
"""Of the step: collections of ranks that wait for each other come at different times and add up over the ranks."""
COMPILE_SHARE: Final = 0.02
"""Of the step: a job compiles in its first steps and then no more."""
BREAKS_AT_LEAST: Final = 1
"""Compiled regions beyond the first in a step: each ends in Python and begins with its guards."""
PIECES_AT_LEAST: Final = 2
"""Times that compiled code is entered in a step; a model compiled as a whole is entered once."""
SMALL_KERNEL_NS: Final = 100_000
"""Mean length of kernels that a host may not keep up with: an operator of PyTorch costs it 5 to 20 µs, in modules with
Python around them up to 100."""
KERNELS_MANY: Final = 100
"""In a step: a host that launches fewer has something else to do."""
DELAY_SMALL_NS: Final = 30_000
"""From launch to start, in the median: so little means that the device was waiting for most of them …"""
QUEUED_FEW: Final = 4.0
"""… as does so few launched and not begun, on average, where delays are not known.  A host that is ahead has dozens to
hundreds waiting."""

# -- the device -----------------------------------------------------------------------------------------------------

TINY_COUNT_SHARE: Final = 0.5
"""Of the kernels are shorter than 10 µs …"""
TINY_PER_STEP: Final = 500
"""… and there are so many in a step: an optimizer's handful costs nothing …"""
TINY_TIME_SHARE: Final = 0.10
"""… and together with the gaps they cause they take so much of the step."""
PAGEABLE_SHARE: Final = 0.05
"""Of the step that the device copies from or to pageable memory and does nothing else."""
PAGEABLE_BYTES: Final = 1 << 20
"""Per step: below it, it is a scalar or a batch of labels."""
COPIES_SHARE: Final = 0.05
"""Of the step that the device copies from or to pinned memory and does nothing else: told …"""
COPIES_WARNING_SHARE: Final = 0.15
"""… and warned of from here on: a second stream takes some care, and does not pay for less."""
FP32_SHARE: Final = 0.10
"""Of the step in matrix products and convolutions that could use Tensor Cores: peak rates promise 4 to 16 times, real
layers at least double."""
TENSOR_CORES_FROM: Final = 7
"""Compute capability (Volta)."""
TF32_FROM: Final = 8
"""Compute capability (Ampere)."""
ATTENTION_OCCUPANCY: Final = 0.10
"""Of the warps that fit.  Flash attention runs at 0.12 to 0.25 by design (registers and shared memory); below, there
are too few blocks for the device."""
ATTENTION_SHARE: Final = 0.10
"""Of the step in such kernels."""
UNDERUSED_SHARE: Final = 0.50
"""Of the time that the device does anything: the TensorBoard plugin's threshold."""

# -- between ranks --------------------------------------------------------------------------------------------------

EXPOSED_SHARE: Final = 0.10
"""Of the step that a device only communicates: the TensorBoard plugin's threshold."""
EXPOSED_HOST_SHARE: Final = 0.25
"""As live, where threads of the host exchange (gloo): they share its cores with the computation …"""
EXPOSED_HOST_FLOOR_NS: Final = 5_000_000
"""… and on a crowded machine a tiny model spends milliseconds of a step in them, whatever one does."""
OVERLAP_LOW: Final = 0.50
"""Of the communication is hidden: a bucketed all-reduce hides all but its last bucket."""
HIDEABLE_SHARE: Final = 0.75
"""Of what is exposed that can be hidden: the last bucket comes when nothing is left to compute."""
LAST_SHARE: Final = 0.5
"""Of the collectives one rank came last in: by chance it would be one of so many ranks …"""
LAST_TIMES_CHANCE: Final = 2.0
"""… and twice as often as chance would have it, where there are only two or three."""
LAST_AT_MOST: Final = 0.9
"""… but never more often than this: of two ranks one that is last nine times of ten is late."""
BY_CHANCE: Final = 0.01
"""The probability that some rank of equal ones comes last so often: one false accusation in a hundred traces."""
HEAVY_SHARE: Final = 0.9
"""Of the waiting: the collectives that have it are looked at by themselves.  A rank whose input is late comes last once
a step, and to the eighty collectives that follow with the others."""
MANY_TIMES: Final = 10.0
"""What waiting takes by what the transfer takes: from here on that is worth a word."""
STRAGGLER_SHARE: Final = 0.02
"""Of the step that others wait for it: as live, ranks of a healthy job differ by one or two per cent."""
NEARLY_ALL: Final = 0.75
"""Of what the others wait for a rank: if fixing it alone gains less, that is said beside it."""
EXPLAINS_SHARE: Final = 0.5
"""Of the lateness: what a rank does longer than its peers is named when it explains half of it."""
COLLECTIVES_AT_LEAST: Final = 3
"""Matched over all ranks: one a step in the shortest trace that says anything …"""
COLLECTIVES_FEW: Final = 8
"""… but below this many a rank must be last in all of them, and each time by about as much …"""
EVENLY: Final = 0.5
"""… that is, the least of its delays is half of the longest: delays by chance are not (exponential ones differ tenfold
in three of four samples of that size)."""
PEERS_AT_LEAST: Final = 3
"""Ranks: of two nobody can say which is the odd one."""
SLOW_RANK_SHARE: Final = 0.10
"""By how much a rank's steps, or its computation, are longer than the median rank's: clocks of healthy devices differ
by up to five per cent."""
SLOW_HOST_FLOOR_NS: Final = 5_000_000
"""Per step, of ranks without a device: on a crowded machine the scheduler puts milliseconds between equal ranks."""

# -- memory ---------------------------------------------------------------------------------------------------------

NEAR_LIMIT_SHARE: Final = 0.90
"""Of the device's memory in use at the peak: the TensorBoard plugin's threshold; a longer batch ends the job."""
LIMIT_CRITICAL_SHARE: Final = 0.97
"""What is left would not hold a workspace."""
FRAGMENTED_SHARE: Final = 0.30
"""Of what is reserved at the peak is not in use: blocks of 2 MiB and rounding explain a few per cent."""
FRAGMENTED_BYTES: Final = 1 << 30
"""Below it nothing is won that anybody needs."""
DEVICE_FULL_SHARE: Final = 0.70
"""Of a device's memory reserved: below it there is room, and fragmented memory hurts nobody."""

__all__ = [name for name in dir() if name.isupper()]  # all of it, and it is long
