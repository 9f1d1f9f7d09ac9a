"""The list of runs, and what was concluded from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rings import write_steps

from stepscope.errors import RunUnwritable
from stepscope.store import catalog
from stepscope.store.catalog import KnownRuns, list_runs, newest_run, run_entry
from stepscope.store.create import RunPaths, create_run
from stepscope.store.documents import end_run, load_summary, read_meta, save_findings, save_summary, write_meta
from stepscope.store.live.ring_files import RingSidecar, guess_sidecar, write_sidecar


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


# -- Lists of runs: what is read a second time, what is not, and how fast a run is that has no summary yet ------------


SUMMARY = {"schema": 1, "status": "finished", "world_size": 4, "steps": {"total": 9}, "step_time": {"p50_ms": 12.5}}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """``over`` has a summary, ``ended`` has none, ``begun`` goes on as far as anybody knows."""
    for name in ("over", "ended", "begun"):
        create_run(tmp_path / "runs", name, ["x"], sessions=tmp_path / "s")
    for name in ("over", "ended"):
        end_run(tmp_path / "runs" / name, exit_code=0, status="finished")
    save_summary(tmp_path / "runs" / "over", SUMMARY, "")
    return tmp_path / "runs"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs of which something was read."""
    names: list[str] = []

    def reading(path: Path) -> catalog.RunEntry:
        names.append(path.name)
        return run_entry(path)

    monkeypatch.setattr(catalog, "run_entry", reading)
    return names


def test_a_run_that_is_over_is_read_once(runs: Path, read: list[str]) -> None:
    known = KnownRuns()
    first = list_runs(runs, known=known)
    assert read == ["begun", "ended", "over"]
    assert list_runs(runs, known=known) == first
    assert read[3:] == ["begun", "ended"]  # of which something may still come


def test_one_that_changed_is_read_again_and_one_that_is_gone_is_forgotten(runs: Path, read: list[str]) -> None:
    known = KnownRuns()
    list_runs(runs, known=known)
    save_summary(runs / "over", {**SUMMARY, "world_size": 8}, "")
    entries, _ = list_runs(runs, known=known)
    assert {entry.path.name: entry.ranks for entry in entries}["over"] == 8
    shutil.rmtree(runs / "over")
    assert len(list_runs(runs, known=known)[0]) == 2
    assert list(known) == []


def test_without_that_nothing_is_kept(runs: Path, read: list[str]) -> None:
    assert list_runs(runs) == list_runs(runs)
    assert len(read) == 6


def test_how_far_it_is(runs: Path) -> None:
    calls: list[tuple[int, int]] = []
    list_runs(runs, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 3), (1, 3), (2, 3)]


def sidecar(pid: int, usual_step_ns: int, attempt: int = 0) -> RingSidecar:
    guessed = guess_sidecar(f"node0-{pid}-{pid:x}")
    identity = replace(guessed.identity, rank=pid, world_size=4, attempt=attempt)
    return replace(guessed, identity=identity, usual_step_ns=usual_step_ns)


def test_a_run_without_a_summary_has_the_step_time_that_its_agent_last_wrote(runs: Path) -> None:
    """Of the ranks that were started last, the median; nothing of one that has made no step yet."""
    assert run_entry(runs / "begun").median_step_ms is None
    for about in (sidecar(1, 500_000_000), sidecar(2, 20_000_000, 1), sidecar(3, 30_000_000, 1), sidecar(4, 0, 1)):
        write_sidecar(runs / "begun", about)
    assert run_entry(runs / "begun").median_step_ms == 25.0
    write_sidecar(runs / "over", sidecar(1, 500_000_000))
    assert run_entry(runs / "over").median_step_ms == 12.5


def test_a_sidecar_of_before_says_nothing_of_it() -> None:
    document = json.loads(json.dumps(sidecar(1, 7).to_dict()))
    assert RingSidecar.from_dict(document).usual_step_ns == 7
    del document["usual_step_ns"]
    assert RingSidecar.from_dict(document).usual_step_ns == 0
