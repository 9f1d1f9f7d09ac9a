"""The list of runs, and what was concluded from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rings import write_steps

from stepscope.errors import RunUnwritable
from stepscope.store.catalog import list_runs, newest_run
from stepscope.store.create import RunPaths, create_run
from stepscope.store.documents import end_run, load_summary, read_meta, save_findings, save_summary, write_meta


def test_a_summary_is_kept_in_all_its_forms(paths: RunPaths) -> None:
    summary = {"schema": 1, "run": "test", "findings": [{"kind": "input_bound"}]}
    assert load_summary(paths.run_dir) is None
    save_summary(paths.run_dir, summary, "All is well\n\n")
    assert load_summary(paths.run_dir) == summary
    assert (paths.run_dir / "summary.txt").read_text() == "All is well\n"
    assert '"kind": "input_bound"' in (paths.run_dir / "findings.json").read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_a_summary_that_cannot_be_read_is_none(paths: RunPaths, text: str) -> None:
    (paths.run_dir / "summary.json").write_bytes(text.encode(errors="surrogateescape"))
    assert load_summary(paths.run_dir) is None


def test_a_summary_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunUnwritable, match="cannot write the summary to"):
        save_summary(tmp_path / "none", {}, "")


def test_runs_newest_first(tmp_path: Path) -> None:
    for name in ("first", "second"):
        create_run(tmp_path, name, ["x"], sessions=tmp_path / "s")
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    entries, problems = list_runs(tmp_path)
    assert [entry.name for entry in entries] == ["second", "first"]
    assert problems == [f"{tmp_path}/broken/run.json is damaged or cut off: it is not valid JSON"]


def test_the_newest_run(tmp_path: Path) -> None:
    for name, created in (("b", 3), ("a", 7), ("c", 5)):
        run_dir = create_run(tmp_path, name, ["x"], sessions=tmp_path / "s").run_dir
        write_meta(run_dir, {**read_meta(run_dir), "created_wall_ns": created})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert newest_run(tmp_path) == tmp_path / "a"
    assert newest_run(tmp_path / "s") is None
    assert newest_run(tmp_path / "none") is None


def test_no_folder_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == ([], [])


def test_status(paths: RunPaths, rings: Any, drain: Any) -> None:
    ring = rings(0)
    write_steps(ring, 7)
    drain(ring)

    def status() -> str:
        ((entry,), _) = list_runs(paths.run_dir.parent)
        return entry.status

    assert status() == "running"
    meta = read_meta(paths.run_dir)
    write_meta(paths.run_dir, {**meta, "launcher": {"pid": 1 << 30, "start_ticks": 1}})
    ((entry,), _) = list_runs(paths.run_dir.parent)
    assert (entry.status, entry.ranks, entry.steps, entry.verdict) == ("unfinished", 1, 7, "")
    end_run(paths.run_dir, exit_code=1, status="failed")
    assert status() == "failed"
    save_summary(paths.run_dir, {"status": "crashed"}, "")
    assert status() == "crashed"


def test_a_run_that_stands_still_has_the_last_thing_that_its_watchdog_wrote_as_verdict(tmp_path: Path) -> None:
    run_dir = create_run(tmp_path, "night", ["x"], sessions=tmp_path / "s").run_dir
    assert [(entry.verdict, entry.severity) for entry in list_runs(tmp_path)[0]] == [("", None)]
    hangs = [{"title": "It stood still.", "severity": "warning"}, {"title": "It stands still.", "severity": "critical"}]
    save_findings(run_dir, hangs)
    assert [(entry.verdict, entry.severity) for entry in list_runs(tmp_path)[0]] == [("It stands still.", "critical")]
    (run_dir / "findings.json").write_text('{"findings": [1, null]}')
    assert [(entry.verdict, entry.severity) for entry in list_runs(tmp_path)[0]] == [("", None)]
