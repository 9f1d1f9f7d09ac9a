"""Lists of runs: what is read a second time, what is not, and how fast a run is that has no summary yet."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.store import catalog
from stepscope.store.catalog import KnownRuns, list_runs, run_entry
from stepscope.store.create import create_run
from stepscope.store.documents import end_run, save_summary
from stepscope.store.live.ring_files import RingSidecar, guess_sidecar, write_sidecar

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
