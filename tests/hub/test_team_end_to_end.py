"""A job with nothing but a setting: its run is at the team's hub, also if that was away when the job ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.store.documents import TEAM_HUB, read_meta
from tests.hub.api.test_serve_command import url_of


@pytest.mark.soak  # near: test_team_joining.py, without processes of its own
def test_a_job_joins_and_what_the_hub_missed_is_sent_later(
    commands: Any, run_stepscope: Any, toy: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "stepscope").mkdir(parents=True)
    (home / "stepscope" / "team-key").write_text("the key of the team's hub\n")
    (home / "stepscope" / "team-key").chmod(0o600)
    (tmp_path / "team").mkdir()
    served = {"XDG_CONFIG_HOME": str(tmp_path / "service"), "STEPSCOPE_KEY": "the key of the team's hub"}
    user = {"XDG_CONFIG_HOME": str(home), "STEPSCOPE_USER": "anna", "STEPSCOPE_HTML": "0"}
    hub = commands.start("serve", "team", "--join", "--port", "0", env=served)
    url = url_of(hub)
    user["STEPSCOPE_HUB"] = url
    done = run_stepscope("run", "--name", "first", toy, env=user)
    assert done.code == 0
    assert "stepscope: the team's hub has the run: " in done.stderr
    assert TEAM_HUB not in read_meta(tmp_path / "runs" / "first")
    assert read_meta(tmp_path / "runs" / "first")["sealed"] is True
    hub.terminate()
    hub.wait(60)
    away = run_stepscope("run", "--name", "second", toy, env=user)
    assert (away.code, "send the rest later with" in away.stderr) == (0, True)
    assert read_meta(tmp_path / "runs" / "second")["sealed"] is False
    port = url.rpartition(":")[2]
    hub = commands.start("serve", "team", "--join", "--port", port, env=served)
    url_of(hub)
    assert run_stepscope("send", "runs/second", env=user).code == 0
    assert read_meta(tmp_path / "runs" / "second")["sealed"] is True
    hub.terminate()
    hub.wait(60)
    received = {path.name.rpartition("-")[0]: read_meta(path) for path in (tmp_path / "team").iterdir()}
    assert {name: (meta["user"], meta["end"]["status"]) for name, meta in received.items()} == {
        "first": ("anna", "finished"),
        "second": ("anna", "finished"),
    }
