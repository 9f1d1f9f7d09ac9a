"""Acknowledgments and silences: what each covers and for how long, and files that others damaged."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest
from alert_messages import incident

from stepscope.alerts.requests import (
    RequestDesk,
    Silence,
    acknowledge,
    add_silence,
    add_user_silence,
    end_silence,
    end_user_silence,
    run_silences,
    silences_path,
    user_silences,
)
from stepscope.errors import RunUnwritable, UsageError
from stepscope.store.paths import ALERT_REQUESTS

NOW = 1_800_000_000_000_000_000
HOUR = 3_600_000_000_000


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "night-3"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}


def lasting(hours: int = 1, **fields: str) -> Silence:
    return Silence(id="", until_wall_ns=NOW + hours * HOUR, **fields)


def test_acknowledgments_arrive_once(run_dir: Path, environ: dict[str, str]) -> None:
    desk = RequestDesk(run_dir, environ)
    assert list(desk.acknowledgments()) == []
    acknowledge(run_dir, [1, 2], by="anna", wall_ns=NOW)
    assert [(each.incident, each.by) for each in desk.acknowledgments()] == [(1, "anna"), (2, "anna")]
    assert list(desk.acknowledgments()) == []
    # A hub that was started again gets all of them; the engine passes over incidents that are not open.
    assert [each.incident for each in RequestDesk(run_dir, environ).acknowledgments()] == [1, 2]
    assert stat.S_IMODE((run_dir / ALERT_REQUESTS).stat().st_mode) == 0o600
    assert stat.S_IMODE((run_dir / ALERT_REQUESTS).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("fields", "covered"),
    [
        ({}, True),
        ({"kind": "compute_straggler"}, True),
        ({"kind": "*_straggler"}, True),
        ({"kind": "input_bound"}, False),
        ({"host": "node7"}, True),
        ({"host": "node*"}, True),
        ({"host": "node8"}, False),
        ({"run": "night-*"}, True),
        ({"run": "day"}, False),
        ({"kind": "*_straggler", "host": "node8"}, False),
    ],
)
def test_what_a_silence_covers(run_dir: Path, environ: dict[str, str], fields: dict[str, str], covered: bool) -> None:
    add_user_silence(environ, lasting(**fields), wall_ns=NOW)
    slow = incident(kind="compute_straggler", hosts=("node7",))
    for hours, silenced in ((0, covered), (1, False)):
        desk = RequestDesk(run_dir, environ, now_ns=lambda hours=hours: NOW + hours * HOUR)
        # The run's clock is hours away from the time of day, which was set.
        assert [desk.silenced(slow, NOW + ahead * HOUR) for ahead in (-2, 0, 2)] == [silenced] * 3


def test_a_silence_of_a_host_does_not_hide_another(run_dir: Path, environ: dict[str, str]) -> None:
    add_silence(run_dir, lasting(host="node7"), wall_ns=NOW)
    desk = RequestDesk(run_dir, environ)
    assert desk.silenced(incident(hosts=("node7",)), NOW)
    assert not desk.silenced(incident(hosts=("node7", "node8")), NOW)
    assert not desk.silenced(incident(hosts=()), NOW)


def test_a_silence_of_a_run_begins_and_ends_while_it_is_active(run_dir: Path, environ: dict[str, str]) -> None:
    desk = RequestDesk(run_dir, environ)
    assert not desk.silenced(incident(), NOW)
    silence = add_silence(run_dir, lasting(why="new loader", by="anna", run="not used"), wall_ns=NOW)
    assert desk.silenced(incident(), NOW)
    assert run_silences(run_dir) == [silence]
    assert (silence.why, silence.by, silence.run, silence.from_wall_ns) == ("new loader", "anna", "", NOW)
    assert not end_silence(run_dir, "ffffffff", by="", wall_ns=NOW)
    assert end_silence(run_dir, silence.id, by="anna", wall_ns=NOW)
    assert not desk.silenced(incident(), NOW)
    assert run_silences(run_dir) == []


def test_silences_of_the_user(environ: dict[str, str]) -> None:
    first = add_user_silence(environ, lasting(1), wall_ns=NOW)
    second = add_user_silence(environ, lasting(3), wall_ns=NOW)
    assert user_silences(environ) == (first, second)
    assert stat.S_IMODE(silences_path(environ).stat().st_mode) == 0o600
    third = add_user_silence(environ, lasting(4), wall_ns=NOW + 2 * HOUR)
    assert user_silences(environ) == (second, third)
    assert end_user_silence(environ, second.id)
    assert not end_user_silence(environ, second.id)
    assert user_silences(environ) == (third,)


def test_silences_have_limits(run_dir: Path, environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="must end in the future"):
        add_silence(run_dir, lasting(-1), wall_ns=NOW)
    with pytest.raises(UsageError, match="a year at most"):
        add_user_silence(environ, lasting(10_000), wall_ns=NOW)
    assert len(add_silence(run_dir, lasting(why="x" * 5000), wall_ns=NOW).why) == 500


def test_several_people_at_once(run_dir: Path, environ: dict[str, str]) -> None:
    def request(number: int) -> None:
        for _ in range(10):
            acknowledge(run_dir, [number], by=str(number), wall_ns=NOW)
            add_user_silence(environ, lasting(), wall_ns=NOW)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [each.incident for each in RequestDesk(run_dir, environ).acknowledgments()]
    assert sorted(found) == sorted(list(range(4)) * 10)
    assert len(user_silences(environ)) == 40


@pytest.mark.parametrize("text", ["", "null", "[]", '{"silences": 3}', '{"silences": [{"id": 1}]}', "[" * 100_000])
def test_damaged_files_silence_nothing(run_dir: Path, environ: dict[str, str], text: str) -> None:
    silences_path(environ).parent.mkdir(parents=True)
    silences_path(environ).write_text(text)
    (run_dir / ALERT_REQUESTS).parent.mkdir()
    (run_dir / ALERT_REQUESTS).write_text(f'{text}\n{{"action": "silence"}}\n{json.dumps({"action": 3})}\n')
    desk = RequestDesk(run_dir, environ)
    assert not desk.silenced(incident(), NOW)
    assert list(desk.acknowledgments()) == []


def test_nothing_is_written_through_a_link(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run_dir / ALERT_REQUESTS).parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunUnwritable, match="is a link, which a run does not contain"):
        acknowledge(run_dir, [1], by="", wall_ns=NOW)
    assert list((tmp_path / "elsewhere").iterdir()) == []
