"""Where the address and the key of a team's hub come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.cli.launch.team_hub import TeamHub, load_team_hub
from stepscope.errors import UsageError
from stepscope.store.create import create_run
from stepscope.store.documents import TEAM_HUB, read_meta

ADDRESS = "https://hub.example:7070"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / ".config" / "stepscope"
    folder.mkdir(parents=True)
    for name in ("key", "team-key"):
        (folder / name).write_text(f"{name} of sixteen characters\n")
        (folder / name).chmod(0o600)
    return tmp_path / "home"


def found(home: Path, project: Path, **environ: str) -> TeamHub | None:
    return load_team_hub(project, {"HOME": str(home), **environ})


def project_of(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "project"
    (folder / ".git").mkdir(parents=True)
    (folder / "stepscope.toml").write_text(text)
    return folder


def test_a_setting_is_all_it_takes(home: Path, tmp_path: Path) -> None:
    assert found(home, tmp_path) is None
    key = {"STEPSCOPE_HUB_KEY_FILE": str(home / ".config/stepscope/team-key")}
    (home / ".config/stepscope/config.toml").write_text(f'[hub]\naddress = "{ADDRESS}"\n')
    assert found(home, tmp_path) == TeamHub(url=ADDRESS, variables=key)
    project = project_of(tmp_path, '[hub]\naddress = "https://other.example"\n')
    assert found(home, project) == TeamHub(url="https://other.example", variables=key)
    assert found(home, project, STEPSCOPE_HUB=ADDRESS) == TeamHub(url=ADDRESS, variables=key)
    assert found(home, project, STEPSCOPE_HUB="off") is None
    secret = {"STEPSCOPE_HUB_KEY": "a secret of the environment"}
    assert found(home, project, **secret) == TeamHub(url="https://other.example", variables=secret)


def test_a_project_cannot_name_the_key(home: Path, tmp_path: Path) -> None:
    project = project_of(tmp_path, f'[hub]\naddress = "{ADDRESS}"\nkey_file = "key"\n')
    with pytest.raises(UsageError, match=r"stepscope\.toml:3: key_file can only be set in your own settings file"):
        found(home, project)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("address = 3", "address must be a text"),
        ('address = "hub.example"', "address must be an address"),
        ('adress = "https://hub.example"', "unknown key"),
    ],
)
def test_a_mistake_is_named_before_the_job_starts(home: Path, tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        found(home, project_of(tmp_path, f"[hub]\n{text}\n"))


def test_a_key_that_others_can_read_does_not_stop_the_job(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / ".config/stepscope/team-key").chmod(0o644)
    assert found(home, tmp_path, STEPSCOPE_HUB=ADDRESS) is None
    assert "this run is not sent to the team's hub" in capsys.readouterr().err


def test_a_run_has_a_name_of_its_own_there(tmp_path: Path) -> None:
    team = TeamHub(url=ADDRESS, variables={})
    names = set()
    for folder in ("one", "two"):
        made = create_run(tmp_path / folder, "night", ["train.py"], environ={}, sessions=tmp_path / "sessions")
        run = team.begin(made.run_dir)
        assert run.startswith("night-")
        assert read_meta(made.run_dir)[TEAM_HUB] == {"url": ADDRESS, "run": run, "node": 1, "nnodes": 2}
        names.add(run)
    assert len(names) == 2
