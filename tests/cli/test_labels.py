"""``stepscope tag`` and ``stepscope delete``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.store.create import create_run
from stepscope.store.documents import end_run, read_meta, write_meta


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("old", "new"):
        run_dir = create_run(tmp_path / "runs", name, ["x"], sessions=tmp_path / "s").run_dir
        write_meta(run_dir, {**read_meta(run_dir), "launcher": None, "created_wall_ns": 1_700_000_000 * 10**9})
        end_run(run_dir, exit_code=0, status="finished")
    return tmp_path / "runs"


def test_tag(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs / "old")
    assert run_command(["tag", run]) == 0
    assert capsys.readouterr().out == f"run  {run}\nno name, tags or note yet\n"
    assert run_command(["tag", run, "a", "b", "--name", "Before", "--note", "one\ntwo", "c"]) == 0
    assert capsys.readouterr().out == f"run  {run}\nname  Before\ntags  a b c\nnote  one\ntwo\n"
    assert run_command(["tag", "--json", run, "--remove", "b", "--remove", "c", "--name", ""]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "", "tags": ["a"], "note": "one\ntwo"}
    with pytest.raises(UsageError, match="'a,b' is not a valid tag"):
        run_command(["tag", run, "a,b"])


def test_a_tag_of_a_run_is_checked_before_it_begins() -> None:
    with pytest.raises(UsageError, match="--tag: 'a b' is not a valid tag"):
        run_command(["run", "--tag", "a b", "train.py"])


def test_delete_asks_first(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = str(runs / "old"), str(runs / "new")
    with pytest.raises(UsageError, match="use --yes"):
        run_command(["delete", old])
    for answer, code, left in (("\n", 1, {"old", "new"}), ("y\n", 0, {"new"})):
        with monkeypatch.context() as patch:
            typed = io.StringIO(answer)
            typed.isatty = lambda: True  # type: ignore[method-assign]
            patch.setattr("sys.stdin", typed)
            assert run_command(["delete", old]) == code
        assert {path.name for path in runs.iterdir()} == left
        shown = capsys.readouterr().err
        assert f"  {old}: finished, " in shown
        assert "Delete this run for good? [y/N] " in shown
    write_meta(runs / "new", {**read_meta(runs / "new"), "hub": {"url": "x"}})
    assert run_command(["delete", "--yes", new]) == 3
    assert capsys.readouterr().err.startswith(f"stepscope: {new} was not deleted: it has data")
    assert (runs / "new").is_dir()
