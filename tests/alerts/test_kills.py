"""The hub and the sender are killed at random during incidents: nothing is lost, and every incident is sent once."""

from __future__ import annotations

from pathlib import Path

import pytest
from alert_kills import kill_hubs, kill_hubs_of_run, kill_senders

pytestmark = pytest.mark.faults


def check_hubs(folder: Path, kills: int, seed: int) -> None:
    result = kill_hubs(folder, kills=kills, seed=seed)
    assert (result.statuses, result.ids) == (["firing", "resolved"], 2)


def check_senders(folder: Path, kills: int, seed: int) -> None:
    """Receivers recognize a message that comes twice by its id; a bot finds what it posted."""
    result = kill_senders(folder, kills=kills, seed=seed)
    kinds = ("slack", "slack_bot", "pagerduty", "alertmanager", "webhook", "command")
    assert result.unsettled == 0
    assert result.lost == dict.fromkeys(kinds, 0)
    assert result.out_of_order == dict.fromkeys(kinds, 0)
    assert result.twice["slack_bot"] == 0
    # At most the message that was under way at each kill.
    assert max(result.twice.values()) <= kills


def test_the_hub_is_killed_during_an_incident(tmp_path: Path) -> None:
    check_hubs(tmp_path, kills=3, seed=7)


def test_the_sender_is_killed_while_it_delivers(tmp_path: Path) -> None:
    check_senders(tmp_path, kills=2, seed=7)


@pytest.mark.soak
def test_the_hub_is_killed_twenty_times_during_an_incident(tmp_path: Path) -> None:
    check_hubs(tmp_path, kills=20, seed=1)


@pytest.mark.soak
def test_the_sender_is_killed_twenty_times(tmp_path: Path) -> None:
    check_senders(tmp_path, kills=20, seed=1)


@pytest.mark.soak
def test_the_hub_of_a_job_that_hangs_is_killed(tmp_path: Path) -> None:
    result = kill_hubs_of_run(tmp_path, kills=4, seed=1)
    assert (result.kills, result.statuses, result.ids) == (4, ["firing", "resolved"], 2)
