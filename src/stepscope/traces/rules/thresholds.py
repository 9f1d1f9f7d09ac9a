"""Every number that a verdict on a trace depends on, with its reason.

A trace is short: a few steps of thousands. A share alone is therefore never enough; there are also floors on the time
per step and on the total time traced.
"""

from __future__ import annotations

from typing import Final

from stepscope.judge import finding_cost, thresholds

# -- minimum cost of a finding --------------------------------------------------------------------------------------

WARNING_SHARE: Final = finding_cost.WARNING_SHARE
FLOOR_NS: Final = finding_cost.WARNING_FLOOR_NS
"""Per step; the same for live runs and traces."""
TRACE_FLOOR_NS: Final = 10_000_000
"""Total length of the steps. A few milliseconds of one step are an example, not evidence: reported as info only."""
CRITICAL_STEPS: Final = 2
"""A single step, or a trace without steps, may be a warm-up: it is never called critical."""
SURE_STEPS: Final = 3
"""From this many steps on, a figure counts as typical of the job."""
SURE: Final = 0.95
TWO_STEPS: Final = 0.8
ONE_STEP: Final = 0.6
NO_STEPS: Final = 0.5
"""Confidence by the number of steps. Without profiler steps, setup cannot be distinguished from training."""

PART_SHARE: Final = 0.05
"""Of the step: when nothing stands out, smaller parts are not reported."""
START_UP_SHARE: Final = 0.30
"""Of a trace without profiler steps, in a single runtime call: the first call loads the driver and all kernels."""
REMEDY_GAIN: Final = 0.5
"""The price of a time that has no single cause (a slow host, a busy network). No remedy saves all of it; compiling,
larger batches and smaller data types save about half.
"""

# -- host -----------------------------------------------------------------------------------------------------------

LOADER_SHARE: Final = 0.05
"""Of the step in the DataLoader: the TensorBoard plugin's well-known threshold, used for info findings …"""
LOADER_WARNING_SHARE: Final = 0.10
"""… and the threshold for warnings, since a healthy small model spends five percent in its loader …"""
LOADER_FLOOR_NS: Final = 1_000_000
"""… and more than the Python cost of taking a finished batch off a queue and pinning it."""
LOADER_EXPOSED_SHARE: Final = 0.95
"""Of the time in the DataLoader: if the device idles for less of it, the title says for how much."""
HOST_IDLE_SHARE: Final = 0.10
"""Of the step that a device waits for the host. Every step, however well built, begins and ends with a little of it."""
PYTHON_SHARE: Final = 0.10
"""Of the step in which a process without a device runs no operator, in stretches of a millisecond or more; the same
share as for devices that wait …
"""
PYTHON_FLOOR_NS: Final = 1_000_000
"""… and more than the bookkeeping of a training loop costs."""
SYNC_SHARE: Final = 0.05
"""Of the step that a device could have been busy if the host had not waited for it."""
GAPS_SHARE: Final = 0.10
"""Of the step between kernels that are already queued; the hardware needs a microsecond or two after each kernel."""
GC_SHARE: Final = 0.02
"""Of the step: ranks that wait for each other collect at different times, so their pauses add up."""
HOST_COPIES_SHARE: Final = 0.10
"""Of the step of a rank without a device, in aten::copy_: layouts, data types and batches that are copied once more."""
OPTIMIZER_SHARE: Final = 0.10
"""Of the step in an optimizer that updates each parameter for itself …"""
OPTIMIZER_CALLS: Final = 100
"""… with so many operators in a step: fewer are a small model, for which it makes no difference."""
GIL_SHARE: Final = 0.20
"""Of the step in which another thread runs Python while the main thread does, too.  The profiler itself makes Python
slower, so less may be its doing.
"""
COMPILE_SHARE: Final = 0.02
"""Of the step: a healthy job compiles in its first steps only."""
BREAKS_AT_LEAST: Final = 1
"""Compiled regions beyond the first in a step: each ends in Python and begins with its guards."""
PIECES_AT_LEAST: Final = 2
"""Entries into compiled code per step; a model compiled as a whole is entered once."""
SMALL_KERNEL_NS: Final = 100_000
"""Mean length of kernels that a host may fail to keep up with: a PyTorch operator costs the host 5 to 20 µs, and up to
100 in modules with Python around it.
"""
KERNELS_MANY: Final = 100
"""Per step: a host that launches fewer is busy with something else."""
DELAY_SMALL_NS: Final = 30_000
"""Median delay from launch to start: with so short a delay the device was waiting for most launches …"""
QUEUED_FEW: Final = 4.0
"""… and where delays are unknown, the mean number of kernels launched but not started that means the same. A host that
is ahead has dozens to hundreds queued.
"""

# -- device ---------------------------------------------------------------------------------------------------------

TINY_COUNT_SHARE: Final = 0.5
"""Share of the kernels that are shorter than 10 µs …"""
TINY_PER_STEP: Final = 500
"""… and there are this many per step: an optimizer's handful costs nothing …"""
TINY_TIME_SHARE: Final = 0.10
"""… and with the gaps they cause they take this share of the step."""
PAGEABLE_SHARE: Final = 0.05
"""Of the step in which the device only copies from or to pageable memory."""
PAGEABLE_BYTES: Final = 1 << 20
"""Per step: less is a scalar or a batch of labels."""
COPIES_SHARE: Final = 0.05
"""Of the step in which the device only copies from or to pinned memory: reported as info …"""
COPIES_WARNING_SHARE: Final = 0.15
"""… and as a warning from here on: a second stream needs care and does not pay off below this."""
FP32_SHARE: Final = 0.10
"""Of the step in matrix products and convolutions that could use Tensor Cores: peak rates promise 4 to 16 times the
speed, real layers at least double it.
"""
TENSOR_CORES_FROM: Final = 7
"""Compute capability (Volta)."""
TF32_FROM: Final = 8
"""Compute capability (Ampere)."""
ATTENTION_OCCUPANCY: Final = 0.10
"""Of the warps that fit. Flash attention runs at 0.12 to 0.25 by design (registers and shared memory); below that,
there are too few blocks for the device.
"""
ATTENTION_SHARE: Final = 0.10
"""Of the step in such kernels."""
OCCUPANCY_LOW: Final = 0.25
"""Of the warps that fit: elementwise kernels and reductions hide the latency of memory with warps, and need
at least a quarter of them.  Products and convolutions hide it in registers and are not meant.
"""
OCCUPANCY_SHARE: Final = 0.10
"""Of the step in kernels below it."""
BLOCKS_FEW: Final = 0.5
"""Blocks per multiprocessor: with fewer in a product or convolution, at least half of the device has nothing to do.
Persistent kernels launch one for each.
"""
BLOCKS_SHARE: Final = 0.10
"""Of the step in such products and convolutions."""
BANDWIDTH_SHARE: Final = 0.50
"""Of the step in kernels that do a few operations for each byte that they read or write: elementwise, copies, norms,
softmax, reductions.  A transformer without compilation spends up to 40% in them.
"""
UNDERUSED_SHARE: Final = 0.50
"""Share of the time in which the device does anything: the TensorBoard plugin's threshold."""

# -- ranks ----------------------------------------------------------------------------------------------------------

EXPOSED_SHARE: Final = 0.10
"""Of the step in which a device only communicates: the TensorBoard plugin's threshold."""
EXPOSED_HOST_SHARE: Final = 0.25
"""The same for host threads that communicate (gloo), as for live findings: they share cores with the computation …"""
EXPOSED_HOST_FLOOR_NS: Final = 5_000_000
"""… and on a crowded machine even a tiny model spends milliseconds of a step in them."""
OVERLAP_LOW: Final = 0.50
"""Share of the communication that is hidden: a bucketed all-reduce hides all but its last bucket."""
HIDEABLE_SHARE: Final = 0.75
"""Of the exposed communication that can be hidden: the last bucket arrives when nothing is left to compute."""
MANY_TIMES: Final = 10.0
"""Waiting divided by transfer: from this ratio on it is worth mentioning."""
STRAGGLER_SHARE: Final = thresholds.EXCESS_SHARE
"""Of the step that others wait for a rank; the same for live runs and traces, as are the tests of who is late."""
NEARLY_ALL: Final = 0.75
"""Of the time the others wait for a rank: if fixing it alone gains less, the finding says so."""
EXPLAINS_SHARE: Final = thresholds.EXPLAINS_SHARE
"""Of the lateness, or of a wait: extra time is named as the cause if it explains this share; the same for live runs."""
PEERS_AT_LEAST: Final = 3
"""Ranks: with two, it is impossible to say which is the outlier."""
SLOW_RANK_SHARE: Final = 0.10
"""How much longer a rank's steps, or its computation, are than the median rank's: clocks of healthy devices differ by
up to five percent.
"""
SLOW_HOST_FLOOR_NS: Final = 5_000_000
"""Per step, for ranks without a device: on a crowded machine the scheduler puts milliseconds between equal ranks."""

# -- memory ---------------------------------------------------------------------------------------------------------

NEAR_LIMIT_SHARE: Final = 0.90
"""Of the device's memory in use at the peak: the TensorBoard plugin's threshold; a longer batch would crash the job."""
LIMIT_CRITICAL_SHARE: Final = 0.97
"""The remainder would not hold a workspace."""
FRAGMENTED_SHARE: Final = 0.30
"""Of the memory reserved at the peak that is not in use: 2 MiB blocks and rounding explain a few percent."""
FRAGMENTED_BYTES: Final = 1 << 30
"""Recovering less is not worth the effort."""
DEVICE_FULL_SHARE: Final = 0.70
"""Of a device's memory reserved: below it there is room, and fragmentation is harmless."""

# -- what changed between two traces --------------------------------------------------------------------------------

SAME_SHARE: Final = 0.02
"""Of the former time: kernel durations differ by this much from run to run."""
SAME_NS: Final = 1_000
"""Per step: the clock resolution of most traces."""
LEADS_SHARE: Final = 0.2
"""Of the change of the step that one operator must explain to be named."""
OTHER_CALLS_SHARE: Final = 0.05
"""By how much the number of calls must differ to be reported as the reason."""
CLEAR_ERRORS: Final = 3.0
"""The difference of means must exceed this many standard errors …"""
CHANGE_SHARE: Final = 0.01
"""… and this share of the step: less is not of interest."""

__all__ = [name for name in dir() if name.isupper()]  # every constant above
