"""Every number that decides when alerts are sent, with its unit and reason.

What the user can set is in ``alerts/settings.py``.
"""

from __future__ import annotations

__all__ = [
    "CONFIDENT",
    "DEVIATION_SHARE",
    "ENDED_STEPS",
    "EPOCHS",
    "EXCUSED_S",
    "FINITE_AGAIN_STEPS",
    "FLAP_S",
    "GROWS_EACH_SHARE",
    "HOLD_OFF_LONGEST_S",
    "IDLE_PERCENT",
    "LEVEL_STEPS",
    "LEVEL_STEPS_LEAST",
    "LIMIT_RELEASE_SHARE",
    "LIMIT_S",
    "LINE_LATEST_S",
    "LINE_S",
    "MOST_LEFT_OUT",
    "MOST_OVER",
    "NODE_STOPPED_S",
    "PAST_SHARE",
    "RELEASE_SHARE",
    "SETTLE_S",
    "SPREAD_FLOOR",
    "STALE_SAMPLE_S",
    "UPDATE_COST_FACTOR",
    "UPDATE_COST_SHARE",
    "USUAL_STEPS",
    "WRITE_S",
    "WRITE_SHARE",
]

# -- findings ---------------------------------------------------------------------------------------------------------

CONFIDENT = 0.65
"""The least confidence of a finding that is sent.  Of two ranks without measured waiting, which one is late is a guess
(0.6); hangs and deaths are sent whatever is known about their cause."""

PAST_SHARE = 0.25
"""Memory that has not grown for this share of the steps in which it grew no longer grows."""

ENDED_STEPS = 20
"""Steps after the last one of a slow stretch, by the rules' last evaluation, from which on the rank has recovered: as
many as withdraw a finding (``RELEASE_STEPS`` of ``judge/thresholds.py``)."""

# -- measures ---------------------------------------------------------------------------------------------------------

LEVEL_STEPS = 200
"""Steps before the judged ones that make up the level of the step time …"""
LEVEL_STEPS_LEAST = 50
"""… and the fewest: the spread of less is itself uncertain by a fifth."""
SPREAD_FLOOR = 0.01
"""The least spread, as a share of the level: on a very even job 1.5 spreads may be some microseconds."""
DEVIATION_SHARE = 0.05
"""A longer step time is reported from this share of the level on, as for findings (``WARNING_SHARE``)."""
RELEASE_SHARE = 0.5
"""It is over when at most this share of the deviation that was needed is left: no flapping at the edge."""
EPOCHS = 3
"""Epochs over which memory must grow, after the first one, which fills caches and pools."""
GROWS_EACH_SHARE = 0.5
"""In each of them by at least this share of the limit: a single jump (a cache, a validation set) is no leak."""
IDLE_PERCENT = 5.0
"""Utilization up to which a GPU has no work: a display or a monitor alone shows one or two percent."""
STALE_SAMPLE_S = 30.0
"""A GPU whose last sample is older is not known to be idle: its agent is busy or gone."""
EXCUSED_S = 600.0
"""How much longer than its limit a job may make no step while it compiles, evaluates, writes a checkpoint or starts: as
long as the watchdog waits at most (``AT_WORK`` times ``AFTER_S`` in ``hangs/thresholds.py``)."""
USUAL_STEPS = 5
"""Usual steps that may pass without one, if that is longer than the limit: as for hangs (``STEPS``)."""
FINITE_AGAIN_STEPS = 20
"""Steps with finite values after which a loss that was not finite is over: a scaler that skips steps in turn is not."""
NODE_STOPPED_S = 15.0
"""A node that no longer reports is reported if the job made no step for this long since: otherwise only its agent is
gone, and the ranks there are training."""

# -- incidents --------------------------------------------------------------------------------------------------------

LINE_S = 6.0
"""How much longer than the group time the first message about a slow rank waits for its line of code: stacks of a rank
that became slow are taken within seconds, and two evaluations of the rules follow …"""
LINE_LATEST_S = 22.0
"""… but not if it has been slow for this long: the message is due within half a minute."""
FLAP_S = 3600.0
HOLD_OFF_LONGEST_S = 600.0
"""The time after which an incident is over (``resolve_seconds`` of the settings) is doubled for each earlier incident
of the same topic within ``FLAP_S`` seconds, up to ``HOLD_OFF_LONGEST_S``: what comes and goes is one incident."""
SETTLE_S = 20.0
"""After the hub was started again nothing is over for this long: its first evaluations see part of the run."""
UPDATE_COST_FACTOR = 2.0
"""Its cost changed much: by this factor …"""
UPDATE_COST_SHARE = 0.05
"""… and by this share of the step time."""
WRITE_S = 60.0
"""Changes that are not sent are written at most this often …"""
WRITE_SHARE = 0.01
"""… and at most once in this share of the incident's age: one that is open for weeks must not fill the disk."""
LIMIT_S = 3600.0
"""The limit of messages is per hour …"""
LIMIT_RELEASE_SHARE = 0.5
"""… and once a receiver reached it, it gets messages again when at most this share of it was sent in the last hour."""
MOST_LEFT_OUT = 20
"""Titles of messages that were left out, in the message that says so."""
MOST_OVER = 200
"""Incidents that are over and kept in memory; the file has all."""
