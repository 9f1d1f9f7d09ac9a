"""The hub of a job of one node: nothing until somebody looks, and out of the job's sight."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from stepscope.cli.launch import record as launcher
from stepscope.store.user_runs import UserHub, announced, known_folders, run_id

WATCHED = """
import os, sys, time
import stepscope

def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""

print([name for name in os.environ if "KEY" in name or "TOKEN" in name and "TEST" not in name])
print([link for link in map(target, os.listdir("/proc/self/fd")) if link.startswith("socket:")], flush=True)
with stepscope.step():
    pass
while not os.path.exists("over"):
    time.sleep(0.02)
"""


def get(url: str, path: str, token: str = "") -> tuple[int, Any]:
    """As soon as somebody answers: a connection waits until the hub is there."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


@pytest.fixture
def watched(commands: Any, nodes: Any, script: Callable[..., Path], tmp_path: Path) -> dict[str, Any]:
    script(WATCHED)
    process = commands.start("run", "--name", "one", "script.py", env={"STEPSCOPE_KEY": "a key of the tests alone"})
    assert [process.stdout.readline() for _ in range(2)] == ["[]\n", "[]\n"]
    hub = json.loads((tmp_path / "runs" / "one" / "hub.json").read_text())
    return {"process": process, **hub}


def test_it_is_started_by_whoever_knocks_and_again_when_it_died(
    commands: Any, nodes: Any, watched: dict[str, Any], tmp_path: Path
) -> None:
    assert watched["url"].startswith("http://127.0.0.1:")
    assert ((tmp_path / "runs/one/hub.json").stat().st_mode & 0o777) == 0o600
    assert nodes.pids("stepscope.hub", "one") == []
    assert get(watched["url"], "/healthz") == (200, {"schema": 1, "status": "ok"})
    (first,) = nodes.pids("stepscope.hub", "one")
    os.kill(first, signal.SIGKILL)
    status, runs = get(watched["url"], "/api/v1/runs", watched["token"])
    assert status == 200
    assert "one" in json.dumps(runs)
    assert get(watched["url"], "/api/v1/runs", "wrong")[0] == 401
    (second,) = nodes.pids("stepscope.hub", "one")
    assert second != first
    (tmp_path / "over").touch()
    done = commands.finish(watched["process"])
    assert done.code == 0
    lines = done.stderr.splitlines()
    assert lines[:3] == [
        "stepscope: recording to runs/one",
        f"stepscope: page: {watched['url']}/#/run/one (its token: runs/one/hub.json)",
        "stepscope: the hub died (signal 9); restarting it",
    ]
    assert not (tmp_path / "runs/one/hub.json").exists()
    assert watched["token"] not in done.stderr


@pytest.mark.soak  # near: tests/hub/api/test_api_stream.py
def test_who_follows_is_told_the_end_and_may_ask_before_the_hub_goes(
    commands: Any, watched: dict[str, Any], tmp_path: Path
) -> None:
    where = urlsplit(watched["url"])
    following = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    following.request("GET", "/api/v1/runs/one/stream", headers={"Authorization": f"Bearer {watched['token']}"})
    answer = following.getresponse()
    begun = b""
    while b"reset" not in begun:  # after the run's time, which comes first
        assert len(begun) < 4096
        begun += answer.readline()
    (tmp_path / "over").touch()
    text = answer.read().decode()  # to its end: the hub closes it
    following.close()
    *_, status, end, _ = text.split("\n\n")
    assert end.startswith("event: end\n")
    assert status.startswith("event: status\n")
    document = json.loads(status.rpartition("data: ")[2])
    assert (document["status"], document["over"], document["newest_step"]) == ("finished", True, 0)
    assert commands.finish(watched["process"]).code == 0
    # What it said last is what the summary says, of the whole run.
    findings = [json.loads(part.rpartition("data: ")[2]) for part in text.split("\n\n") if "event: findings" in part][
        -1
    ]
    summary = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())
    for finding in (findings["verdict"], *findings["findings"]):
        for shown in ("text", "look"):  # what the page shows of it
            finding.pop(shown, None)
    assert (findings["live"], findings["findings"]) == (False, summary["findings"])
    assert findings["verdict"] == summary["verdict"]
    meta = json.loads((tmp_path / "runs" / "one" / "run.json").read_text())
    assert document["ended_wall_ns"] == meta["end"]["wall_ns"]


@pytest.mark.soak  # near: the next one, in which nobody knocks either
def test_when_nobody_knocks_there_is_none(commands: Any, nodes: Any, watched: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "over").touch()
    done = commands.finish(watched["process"])
    assert done.code == 0
    assert nodes.pids("stepscope.hub", "one") == []
    assert not (tmp_path / "runs/one/hub.json").exists()
    with pytest.raises(ConnectionRefusedError):
        get(watched["url"], "/healthz")


def test_the_last_lines_say_how_to_see_the_run_from_now_on(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], tmp_path: Path
) -> None:
    script("import glob; print(glob.glob('runs/*/hub.json'))\n")
    done = run_stepscope("run", "--name", "a b", "script.py", env={"STEPSCOPE_HTML": "1"})
    assert (done.code, done.stdout) == (0, "['runs/a b/hub.json']\n")
    assert done.stderr.splitlines()[-2:] == [
        f"stepscope: report: {(tmp_path / 'runs/a b/report.html').as_uri()}",
        "stepscope: page: stepscope serve 'runs/a b' --open",
    ]
    assert not (tmp_path / "runs/a b/hub.json").exists()
    (known,) = known_folders({"XDG_STATE_HOME": str(tmp_path / ".state")}).values()
    assert known == tmp_path / "runs"


@pytest.mark.soak  # near: every test that says --no-hub
def test_no_hub_means_none(run_stepscope: Callable[..., Any], script: Callable[..., Path]) -> None:
    script("import glob; print(glob.glob('runs/*/hub.json'))\n")
    quiet = run_stepscope("run", "--quiet", "--no-hub", "script.py", env={"XDG_STATE_HOME": os.devnull})
    assert (quiet.code, quiet.stdout, quiet.stderr) == (0, "[]\n", "")


def test_a_hub_of_the_user_is_linked_to_at_the_start_and_at_the_end(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], tmp_path: Path
) -> None:
    script("print('ran')\n")
    hub = UserHub(url="http://127.0.0.1:7071", token="secret", token_file="/config/token")
    with announced(hub, {"XDG_STATE_HOME": str(tmp_path / ".state")}):
        done = run_stepscope("run", "--name", "one", "script.py")
    first, page, *_, last = done.stderr.splitlines()
    assert first == "stepscope: recording to runs/one"
    link = f"http://127.0.0.1:7071/#/run/{quote(run_id(tmp_path / 'runs/one'))}"
    assert page == last == f"stepscope: page: {link} (its token: /config/token)"
    assert "secret" not in done.stderr, "this is no terminal"


def test_a_home_directory_that_does_not_respond_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(launcher, "HOME_S", 0.0)
    monkeypatch.setattr(launcher, "add_folder", lambda *_: stuck.wait(60))
    assert launcher._user_page(tmp_path / "one") is None
    stuck.set()
    for thread in threading.enumerate():
        if thread.name == "user-runs":
            thread.join(60)
