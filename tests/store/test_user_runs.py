"""Folders of a user's runs, and the hub that serves all of them: remembered, forgotten, private."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.store.user_runs import UserHub, add_folder, announced, find_user_hub, known_folders, run_id, split_run_id


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


def made(tmp_path: Path, *names: str) -> list[Path]:
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_folders_are_remembered_once_and_only_for_this_user(environ: dict[str, str], tmp_path: Path) -> None:
    first, two = made(tmp_path, "one/runs", "two/runs")
    assert known_folders(environ) == {}
    for folder in (first, two, first):
        assert add_folder(folder, environ) == folder
    place = tmp_path / "state" / "stepscope" / "folders"
    assert set(known_folders(environ).values()) == {first, two}
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o600}


def test_without_a_state_folder_it_is_in_the_home_directory(tmp_path: Path) -> None:
    (runs,) = made(tmp_path, "runs")
    add_folder(runs, {"HOME": str(tmp_path)})
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / ".local/state/stepscope/folders"]


def test_two_runs_of_one_name_have_two_ids(tmp_path: Path) -> None:
    first, two = tmp_path / "one" / "night", tmp_path / "two" / "night"
    assert run_id(first) != run_id(two)
    assert [split_run_id(run_id(path))[0] for path in (first, two)] == ["night", "night"]
    assert run_id(first) == run_id(first)
    assert split_run_id(run_id(tmp_path / "a~b"))[0] == "a~b"


def test_a_folder_that_is_gone_is_forgotten_by_the_host_that_named_it(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = made(tmp_path, "here", "there")
    add_folder(here, environ)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
    add_folder(there, environ)
    monkeypatch.undo()
    for folder in (here, there):
        folder.rmdir()
    assert known_folders(environ) == {}
    left = [json.loads(path.read_text())["folder"] for path in tmp_path.rglob("folders/*.json")]
    assert left == [str(there)]
    there.mkdir()
    assert list(known_folders(environ).values()) == [there]


def test_the_number_of_folders_is_bounded(environ: dict[str, str], tmp_path: Path) -> None:
    folders = made(tmp_path, "a", "b", "c")
    for number, folder in enumerate(folders):
        add_folder(folder, environ, most=2)
        for path in tmp_path.rglob("folders/*.json"):
            if json.loads(path.read_text())["folder"] == str(folder):
                os.utime(path, (number, number))
    assert list(known_folders(environ).values()) == folders[1:]


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "folder": "/"}', "[" * 100_000])
def test_foreign_files_are_ignored(environ: dict[str, str], tmp_path: Path, text: str) -> None:
    (runs,) = made(tmp_path, "one")
    add_folder(runs, environ)
    place = tmp_path / "state" / "stepscope" / "folders"
    (place / "abcdef0123.json").write_text(text)
    assert list(known_folders(environ).values()) == [runs]
    place.chmod(0o777)
    assert known_folders(environ) == {}, "others could have put files there"
    with pytest.raises(OSError, match="others can write"):
        add_folder(runs, environ)


@pytest.mark.parametrize("existing", [False, True])
def test_other_users_cannot_enter_the_folder_of_a_user(
    environ: dict[str, str], tmp_path: Path, *, existing: bool
) -> None:
    """``mkdir`` creates missing parents with the umask's mode, and an older version left them open."""
    (runs,) = made(tmp_path, "one")
    place = tmp_path / "state" / "stepscope"
    before = os.umask(0o022)
    try:
        if existing:
            (place / "folders").mkdir(parents=True)
        add_folder(runs, environ)
        with announced(UserHub(url="http://127.0.0.1:7071", token="secret"), environ):
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (place, place / "hubs")}
    finally:
        os.umask(before)
    assert modes == {"stepscope": 0o700, "hubs": 0o700}
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o755, "folders that are not ours keep their mode"


def test_a_hub_is_found_while_its_process_runs(environ: dict[str, str], tmp_path: Path) -> None:
    hub = UserHub(url="http://127.0.0.1:7071", token="secret")
    assert find_user_hub(environ) is None
    with announced(hub, environ):
        (path,) = tmp_path.rglob("hubs/*.json")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert find_user_hub(environ) == hub
        document = json.loads(path.read_text())
        for wrong in ({"start_ticks": 1}, {"pid": -1}, {"url": None}, {"place": {}}, {"pid": None}):
            path.write_text(json.dumps({**document, **wrong}))
            assert find_user_hub(environ) is None, wrong
        path.write_text(json.dumps(document))
        path.chmod(0o622)
        assert find_user_hub(environ) is None, "others could have written it"
        path.chmod(0o600)
    assert find_user_hub(environ) is None
    assert not path.exists()
