"""Every number that decides whether a job hangs and which rank is named, with its unit and reason.

Limits on sizes, and how much a text shows, are next to the code that they bound.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AFTER_S",
    "AT_REST_S",
    "AT_WORK",
    "BEGUN",
    "BUSY",
    "BUSY_GPU_PERCENT",
    "BUSY_SHARE",
    "CHECK_AGAIN_S",
    "CHILD",
    "CONTEXT_CALLS",
    "DIVERGED_SHARE",
    "FEW_OF_CIRCLE",
    "GAP_S",
    "LAST_WORDS_S",
    "LOSS_COUNTS_S",
    "LOSS_S",
    "LOST_HOST_S",
    "MOTIONLESS",
    "MOVING_BYTES_S",
    "RARELY_S",
    "RUNNING_SHARE",
    "SLEEPING_SHARE",
    "SPINNING_SHARE",
    "STALE",
    "STEPS",
    "SURE",
    "UNSURE",
    "GatherLimits",
]

# -- when a job is examined: seconds ----------------------------------------------------------------------------------

AFTER_S = 10.0
"""Without progress before an inquiry, unless ``--hang-after`` says otherwise."""
STEPS = 5
"""Usual steps without progress to wait for, if that is longer: a job with steps of a minute is not late after 10 s."""
LOSS_S = 2.5
"""How long a stall must last if a rank died: its launcher ends the others soon, and their stacks with them."""
LOSS_COUNTS_S = 30.0
"""Ranks that made progress for this long after a death are not waiting for the dead rank."""
GAP_S = 3.0
"""After a longer gap between two checks the agent was stopped, or the machine slept: the time before does not count."""

LAST_WORDS_S = 0.3
"""Limit for reading the Flight Recorders of ranks that outlive one: their launcher takes 100 ms to end them."""


@dataclass(frozen=True, kw_only=True)
class GatherLimits:
    """How long gathering the evidence waits for what, in seconds: two or three in all, whatever does not answer."""

    window_s: float = 1.5
    """Between the two samples of every rank: what moves meanwhile is working."""
    stacks_s: float = 0.6
    """Stacks by signal: they arrive within milliseconds, or the process cannot answer."""
    server_s: float = 1.5
    """Flight Recorders from torch's worker server."""
    gil_s: float = 0.5
    """A rank that does not answer in this time although its server does has its GIL held."""
    workers_s: float = 1.0
    """Stacks of all DataLoader workers, one after the other."""
    spy_s: float = 1.5
    """py-spy, for processes that answer neither."""
    source_s: float = 0.5
    """Lines of source code: their file system may be what hangs."""


# -- when it is examined again: seconds -------------------------------------------------------------------------------

CHECK_AGAIN_S = 1.0
"""Minimum time until the next check."""
RARELY_S = 60.0
"""Maximum time until the next check of a job whose collectives end."""
AT_REST_S = 60.0
"""Time between two checks of an idle notebook: each one requests its stack."""

# -- how long an excuse holds: multiples of the threshold -------------------------------------------------------------

AT_WORK = 60.0
"""A compilation, a checkpoint, an evaluation, and the time before the first step: minutes are usual."""
BUSY = 6.0
"""A rank, or its workers, computing something unknown; the first batch without any movement."""
BEGUN = 1.5
"""A collective that the devices of all ranks have started, and that is in progress on the network."""
CHILD = 3.0
"""A single-process job that waits for a child process without any movement: it may be about to end."""
MOTIONLESS = 12.0
"""A checkpoint or an evaluation without movement, which may wait for a server; ranks still to come."""
STALE = 20.0
"""An excuse of another host: excuses are checked repeatedly, and an older one does not belong to this hang."""

# -- what counts as activity ------------------------------------------------------------------------------------------

BUSY_SHARE = 0.1
"""Share of a core: more than a process uses that only waits, less than one gets that shares a core with several …"""
RUNNING_SHARE = 0.02
"""… and the limit if the main thread is runnable right now, on a machine with far too few cores."""
SPINNING_SHARE = 0.8
"""Share of a core of a thread that spins while it waits for its device …"""
SLEEPING_SHARE = 0.2
"""… and of one that sleeps while it waits for its peers; anything between decides nothing."""
MOVING_BYTES_S = 100_000.0
"""Bytes per second read and written by a process that works on files; logs alone are less."""
BUSY_GPU_PERCENT = 90.0
"""Utilization of a GPU that has work: a kernel that never ends shows 100."""
LOST_HOST_S = 8.0
"""Seconds: a host that was silent for this long when the job stopped is lost. Agents report every second, in jobs of
thousands of hosts every twenty.
"""

# -- which ranks are named --------------------------------------------------------------------------------------------

FEW_OF_CIRCLE = 0.25
"""Share of the ranks that wait for each other: if fewer are in another call than the rest, these are to blame. With
more, either side may have the wrong order.
"""
DIVERGED_SHARE = 0.5
"""After a divergence, at least this share of the collectives differ; fewer are a difference that passed."""
CONTEXT_CALLS = 3
"""Preceding collectives that predict the next one: fewer confuse the calls of a step, more are rarely repeated."""
SURE = 0.95
UNSURE = 0.6
"""Confidence of the finding; the second if the verdict is undecidable."""
