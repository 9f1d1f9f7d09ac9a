"""``stepscope alerts``: checks and tries receivers, lists what was sent, takes acknowledgments and silences."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from alert_messages import incident, message
from loopback_receiver import LoopbackReceiver, Reply, closed_port
from shifted_clock import shift_clock

from stepscope.alerts.incident_file import append_incident
from stepscope.alerts.outbox import Delivery, SentLog, append_messages
from stepscope.alerts.requests import RequestDesk, run_silences, user_silences
from stepscope.cli.main import run_command
from stepscope.errors import NotARun, UsageError
from stepscope.store.create import create_run
from stepscope.store.documents import read_meta, write_meta

SECRET = "s3cr3t-of-the-hook"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and a user without settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("USER", "anna")
    monkeypatch.delenv("STEPSCOPE_ALERT", raising=False)
    return tmp_path


@pytest.fixture
def run_dir(place: Path) -> Path:
    return create_run(place / "runs", "night", ["train.py"], sessions=place / "sessions").run_dir


Output = pytest.CaptureFixture[str]
HOUR_NS = 3600 * 10**9


def test_check_says_what_applies_and_sends_nothing(
    receiver: LoopbackReceiver, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_ALERT", f"{receiver.url}/{SECRET} alertmanager={receiver.url}")
    assert run_command(["alerts", "check", "--alert", "no_step=300"]) == 0
    shown = capsys.readouterr().out
    assert SECRET not in shown
    assert shown.startswith(
        """\
settings: STEPSCOPE_ALERT, --alert

receivers
  ✓ webhook: reachable; `stepscope alerts test` shows whether it accepts messages
      webhook, url: given directly (STEPSCOPE_ALERT)
  ✓ alertmanager: reachable, and accepts us
      alertmanager, url: given directly (STEPSCOPE_ALERT)

rules
"""
    )
    rows = [line.split("  ") for line in shown.splitlines()]
    assert ["no_step", "no step is completed for 300 seconds", "webhook, alertmanager", "--alert"] in [
        [cell.strip() for cell in row if cell.strip()] for row in rows
    ]
    assert [(request.method, request.path) for request in receiver.requests] == [("GET", "/api/v2/status")]


def test_check_without_receivers(capsys: Output) -> None:
    assert run_command(["alerts", "check"]) == 0
    assert "settings: none; these are the defaults\n\nreceivers\n  none: nothing is sent" in capsys.readouterr().out


def test_check_of_receivers_that_are_not_there(receiver: LoopbackReceiver, capsys: Output) -> None:
    receiver.replies = [Reply(status=401, body=b"who are you")]
    words = [f"http://127.0.0.1:{closed_port()}/x", "command=./nothing-here", f"alertmanager={receiver.url}"]
    assert run_command(["alerts", "check", *(part for word in words for part in ("--alert", word))]) == 1
    shown = capsys.readouterr().out
    assert "✗ webhook: not reachable: connection refused\n" in shown
    assert "✗ command: ./nothing-here is not an executable program\n" in shown
    assert "✗ alertmanager: HTTP 401: who are you\n" in shown


def test_a_mistake_is_reported_before_anything_is_tried(place: Path, receiver: LoopbackReceiver) -> None:
    (place / "stepscope.toml").write_text("[alerts]\ngruop = 3\n")
    with pytest.raises(UsageError, match=r'^stepscope\.toml:2: unknown key "gruop"; did you mean group\?$'):
        run_command(["alerts", "test", "--alert", receiver.url])
    assert receiver.requests == []


def test_test_sends_a_message_and_its_end(receiver: LoopbackReceiver, capsys: Output) -> None:
    assert run_command(["alerts", "test", "--alert", f"{receiver.url}/{SECRET}"]) == 0
    assert capsys.readouterr().out == "✓ webhook: delivered a test message and its end\n"
    sent: list[Any] = [request.json for request in receiver.requests]
    assert [(each["status"], each["kind"], each["run"]) for each in sent] == [
        ("firing", "test", "test"),
        ("resolved", "test", "test"),
    ]
    assert sent[0]["title"] == "This is a test of Stepscope's alerts. Nothing is wrong."
    assert sent[0]["dedup_key"] == sent[1]["dedup_key"]


def test_test_reports_what_a_receiver_answers(receiver: LoopbackReceiver, capsys: Output) -> None:
    receiver.otherwise = lambda _: Reply(status=404, body=f"no {SECRET}".encode())
    assert run_command(["alerts", "test", "--alert", f"{receiver.url}/{SECRET}"]) == 1
    assert capsys.readouterr().out == "✗ webhook: not delivered: HTTP 404: no •••\n"


def test_test_needs_a_receiver() -> None:
    with pytest.raises(UsageError, match="no receiver is set; add one, such as --alert slack"):
        run_command(["alerts", "test"])


def test_list_shows_incidents_and_what_became_of_messages(run_dir: Path, capsys: Output) -> None:
    append_incident(run_dir, incident(kind="compute_straggler"))
    append_messages(run_dir, [message(receiver=name) for name in ("slack", "hook", "mail")])
    log = SentLog(run_dir)
    log.append(Delivery(id=message(receiver="slack").id, state="sent", tries=1, wall_ns=1_700_000_000_000_000_000))
    log.append(Delivery(id=message(receiver="hook").id, state="failed", tries=3, why="HTTP 503"))
    assert run_command(["alerts", "list", "night"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "night: 1 incident"
    assert lines[1].startswith("  1  open, critical, since 2027-01-15 ")
    assert lines[2] == "     Rank 2 is 29 ms slower than its peers in forward; all other ranks wait for it."
    assert lines[3].startswith("     slack: firing, sent 2023-11-1")
    assert lines[4] == "     hook: firing, failed after 3 tries and will be tried again: HTTP 503"
    assert lines[5:] == ["     mail: firing, waiting"]
    assert run_command(["alerts", "list", "night", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["runs"]
    assert [sent["state"] for sent in document["incidents"][0]["sent"]] == ["sent", "failed", "waiting"]


def test_list_without_a_run_shows_active_ones(place: Path, run_dir: Path, capsys: Output) -> None:
    assert run_command(["alerts", "list"]) == 0
    assert capsys.readouterr().out == "night: no incidents\n"
    with pytest.raises(NotARun):
        run_command(["alerts", "list", "nigth"])


def test_acknowledge(run_dir: Path, capsys: Output) -> None:
    for number, state in ((1, "open"), (2, "resolved"), (3, "open")):
        append_incident(run_dir, incident(number=number, state=state, title=f"incident {number}"))
    desk = RequestDesk(run_dir, {"HOME": str(run_dir)})
    assert run_command(["alerts", "ack", "night", "3", "--by", "bert"]) == 0
    assert [(each.incident, each.by) for each in desk.acknowledgments()] == [(3, "bert")]
    assert run_command(["alerts", "ack", "night"]) == 0
    assert [(each.incident, each.by) for each in desk.acknowledgments()] == [(1, "anna"), (3, "anna")]
    assert capsys.readouterr().out.splitlines()[0] == "acknowledged incident 3 of night: incident 3"
    with pytest.raises(UsageError, match=r"^night has no incident 7; there are: 1, 2, 3$"):
        run_command(["alerts", "ack", "night", "7"])


def test_a_run_that_ended_with_an_open_incident(run_dir: Path, capsys: Output) -> None:
    append_incident(run_dir, incident(number=1, state="open"))
    append_incident(run_dir, incident(number=2, state="resolved", acknowledged_by="anna"))
    write_meta(run_dir, {**read_meta(run_dir), "launcher": None})
    assert run_command(["alerts", "list", "night"]) == 0
    states = [line.split(",")[0] for line in capsys.readouterr().out.splitlines() if line[2:3].isdigit()]
    assert states == ["  1  open when the run ended", "  2  over"]
    assert run_command(["alerts", "ack", "night"]) == 0
    shown = capsys.readouterr().out
    assert shown == "night is over: nothing more is sent about its incidents, and they stay as they are\n"
    assert RequestDesk(run_dir, {"HOME": str(run_dir)}).acknowledgments() == []


@pytest.mark.parametrize("ahead_ns", [-2 * HOUR_NS, 2 * HOUR_NS])
def test_a_silence_of_a_run_is_on_its_clock(run_dir: Path, capsys: Output, ahead_ns: int) -> None:
    """The time of day was set by two hours while the run was active."""
    now_ns = shift_clock(run_dir, ahead_ns)
    assert run_command(["alerts", "silence", "--run", "night", "--for", "1h"]) == 0
    (silence,) = run_silences(run_dir)
    assert 0 <= silence.until_wall_ns - now_ns - HOUR_NS < 60 * 10**9
    assert 0 <= silence.from_wall_ns - now_ns < 60 * 10**9
    shown = capsys.readouterr().out
    until = time.localtime((silence.until_wall_ns - ahead_ns) / 1e9)
    assert time.strftime("%H:%M:%S", until) in shown
    run_command(["alerts", "list", "night"])
    assert f"  silence {silence.id}  everything, until " in capsys.readouterr().out


def test_silence_a_run_and_all_runs(run_dir: Path, capsys: Output) -> None:
    began_ns = time.time_ns()
    assert run_command(["alerts", "silence", "--run", "night", "--for", "2h", "--why", "new loader"]) == 0
    (silence,) = run_silences(run_dir)
    assert (silence.why, silence.by, silence.run) == ("new loader", "anna", "")
    assert 0 <= silence.until_wall_ns - began_ns - 7200 * 10**9 < 60 * 10**9
    words = ["--kind", "*_straggler", "--host", "node7", "--run", "night-*", "--until", "2099-01-01 08:00"]
    with pytest.raises(UsageError, match="a year at most"):
        run_command(["alerts", "silence", *words])
    assert run_command(["alerts", "silence", *words[:-2], "--for", "3d"]) == 0
    (own,) = user_silences({"XDG_STATE_HOME": str(run_dir.parents[1] / "state")})
    assert (own.kind, own.host, own.run) == ("*_straggler", "node7", "night-*")
    capsys.readouterr()
    run_command(["alerts", "list", "night"])
    shown = capsys.readouterr().out
    assert f"  silence {silence.id}  everything, until " in shown
    assert f"  {own.id}  run night-* and kind *_straggler and host node7, until " in shown
    assert run_command(["alerts", "silence", "--remove", own.id]) == 0
    assert run_command(["alerts", "silence", "--remove", silence.id]) == 0
    assert run_silences(run_dir) == []
    assert capsys.readouterr().out == f"removed the silence {own.id}\nremoved the silence {silence.id} of night\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["silence"], "a silence needs --for or --until"),
        (["silence", "--for", "2h", "--until", "18:00"], "a silence needs --for or --until"),
        (["silence", "--for", "2"], "--for: must be a time such as 30m, 2h or 3d, not '2'"),
        (["silence", "--until", "soon"], "--until: must be a time such as 18:00 or \"2026-11-20 08:00\", not 'soon'"),
        (
            ["silence", "--for", "2h", "--kind", "compute_stragler"],
            "--kind: there is no kind of finding or measure 'compute_stragler'; did you mean compute_straggler?",
        ),
        (["silence", "--remove", "abc"], "there is no silence abc; name the run with --run if it is over"),
        (
            ["silence", "--remove", "x"],
            "--remove takes the ID of a silence, such as 3fa9c1d2; `stepscope alerts list` shows them",
        ),
        (["check", "x"], "unknown argument: x (see `stepscope alerts --help`)"),
    ],
)
def test_mistakes(words: list[str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_command(["alerts", *words])
    assert str(caught.value) == line
