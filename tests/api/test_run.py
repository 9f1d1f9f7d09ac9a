"""``stepscope.open``: a finished, a killed and an active run as data frames; their figures are those of the reports."""

from __future__ import annotations

import csv
import json
import shutil
from operator import methodcaller
from pathlib import Path

import numpy as np
import pytest
from fakes.cluster import Cluster, slow_at
from made_runs import Feed, record

import stepscope
from stepscope.cli.main import run_command
from stepscope.errors import NotARun, StepscopeError, UsageError

STEPS = 120
html_of = methodcaller("_repr_html_")
"""As a notebook calls it."""


@pytest.fixture
def night(here: Path) -> stepscope.Run:
    return stepscope.open("night")


def test_a_finished_run(night: stepscope.Run, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (night.name, night.status, night.active, night.ranks) == ("night", "finished", False, (0, 1, 2, 3))
    assert night.path == Path("runs/night")
    assert night.verdict.startswith("Rank 1 is ")
    assert night.notices == ("No agent wrote to this run; there are no host and GPU samples.",)
    assert repr(night) == f"<Run night: finished, 4 ranks: {night.verdict}>"
    assert run_command(["report", "--json", "night"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == night.summary["findings"]
    assert night.verdict in str(night)
    assert night.verdict in stepscope.open(here / "runs" / "night").reload().verdict


def test_opening_changes_nothing(here: Path) -> None:
    def files() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in sorted((here / "runs" / "before").rglob("*"))}

    before = files()
    assert len(stepscope.open("before").steps()) == 4 * 200
    assert files() == before


def test_steps_and_phases(night: stepscope.Run) -> None:
    steps, phases = night.steps(), night.phases()
    assert list(steps["rank"]) == [rank for rank in range(4) for _ in range(STEPS)]
    assert list(steps["step"]) == 4 * list(range(STEPS))
    assert phases.columns[:4] == ("rank", "attempt", "step", "wall_ns")
    assert phases.columns[4:6] == ("input_ns", "forward_ns")
    assert (phases["step"] == steps["step"]).all()
    host = [name for name in phases.columns[4:] if not name.startswith("device_")]
    assert (np.sum([phases[name] for name in host], axis=0) == phases["wall_ns"]).all()
    assert "checkpoint_ns" not in phases.columns
    shares = night.phase_shares()
    assert dict(zip(shares["phase"], shares["mean_ms"], strict=True)) == {
        name: row["mean_ms"] for name, row in night.summary["phases"].items()
    }
    assert shares["worst_rank"][list(shares["phase"]).index("input")] == 1


def test_findings(night: stepscope.Run) -> None:
    first, stored = night.findings().rows()[0], night.summary["findings"][0]
    assert first["kind"] == "input_straggler"
    assert (first["title"], first["ranks"], first["phase"]) == (night.verdict, (1,), "input")
    assert [first["first_step"], first["last_step"]] == stored["steps"]
    assert (first["cost_share"], first["cost_seconds"]) == (stored["cost"]["share"], stored["cost"]["seconds"])
    assert first["advice"] == tuple(stored["advice"])
    assert len(night.findings()) == len(night.summary["findings"])


def test_layers(night: stepscope.Run) -> None:
    layers = night.layers(rank=2)
    assert layers.columns[:3] == ("name", "type", "parent")
    assert layers.note.startswith("Rank 2 in step ")
    whole = layers.rows()[0]
    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    assert whole["name"] == ""
    assert sum(whole[f"{kind}_bytes"] for kind in kinds) == whole["total_bytes"]
    assert whole["share"] == 1.0
    none = stepscope.open("before").layers()
    assert (len(none), none.columns, none.note) == (0, layers.columns, "no layers were sampled")


def test_metrics_notes_samples_and_events(night: stepscope.Run) -> None:
    metrics, notes = night.metrics(), night.notes()
    assert metrics.columns == ("rank", "step", "name", "value")
    assert metrics.rows()[:2] == [
        {"rank": 0, "step": 0, "name": "loss", "value": 2.0},
        {"rank": 1, "step": 0, "name": "loss", "value": 2.0},
    ]
    assert len(notes) == 2 * STEPS + 1
    assert notes.rows()[-1]["value"] == "last.pt"
    gpus = night.samples("gpu")
    assert {"index", "util_percent", "power_w"} <= set(gpus.columns)
    assert "load1" not in gpus.columns
    assert len(night.samples()) == sum(len(night.samples(kind)) for kind in ("host", "process", "gpu", "probe"))
    with pytest.raises(UsageError, match=r"^no samples of kind 'gpus'; kinds: host, process, gpu, probe$"):
        night.samples("gpus")
    assert "note" in list(night.events()["event"])
    assert len(night.collectives()) == 0


def test_sql(night: stepscope.Run) -> None:
    slowest = night.sql("SELECT rank, max(input_ns) AS most FROM steps GROUP BY rank ORDER BY most DESC LIMIT 1")
    assert slowest["rank"].tolist() == [1]
    mixed = night.sql("SELECT * FROM (VALUES (1, 'a', true, [1, 2]), (NULL, NULL, NULL, NULL)) AS t(n, s, b, l)")
    assert mixed.rows() == [{"n": 1.0, "s": "a", "b": True, "l": (1, 2)}, dict.fromkeys("nsbl")]
    assert night.sql("SELECT title FROM findings")["title"][0] == night.verdict
    with pytest.raises(UsageError, match="SQL: Catalog Error: Table with name nope does not exist!"):
        night.sql("SELECT * FROM nope")
    with pytest.raises(UsageError, match="SQL: COPY is not allowed"):
        night.sql("COPY steps TO 'steps.csv'")


def test_a_frame(night: stepscope.Run, tmp_path: Path) -> None:
    findings = night.findings()
    findings.write_csv(tmp_path / "findings.csv")
    with (tmp_path / "findings.csv").open(newline="") as file:
        first = next(csv.DictReader(file))
    assert (first["title"], first["ranks"]) == (night.verdict, "1")
    shown = html_of(night.steps())
    assert shown.startswith("<table><thead><tr><th>rank</th>")
    assert shown.endswith(f"<p>{4 * STEPS - 20} more rows</p>")
    with pytest.raises(KeyError, match="no column 'wall'; columns: rank, attempt"):
        night.steps()["wall"]
    assert "<pre>" in html_of(night)


def test_a_killed_run_and_an_archived_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    cluster = Cluster(ranks=2, steps=60, faults=(slow_at(1, "input", 30.0),)).run()
    killed = stepscope.open(record(tmp_path / "runs", "killed", cluster, sealed=False))
    assert (len(killed.steps()), killed.active) == (120, False)
    assert killed.verdict.startswith("Rank 1 is ")
    shutil.copytree(here / "runs" / "before", tmp_path / "old" / "before")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert run_command(["report", "--quiet", "old/before"]) == 0
    assert run_command(["archive", "old/before", "--to", f"file://{tmp_path}/store"]) == 0
    assert len(stepscope.open(f"file://{tmp_path}/store/before").steps()) == 4 * 200


def test_an_active_run(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "runs", "live", Cluster(ranks=2, steps=60, faults=(slow_at(1, "input", 30.0),)))
    feed.make(20)
    run = stepscope.open(feed.run_dir)
    assert (run.active, run.status, len(run.steps())) == (True, "running", 40)
    assert list(run.sql("SELECT kind FROM findings")["kind"]) == [row["kind"] for row in run.summary["findings"]]
    feed.make(20)
    assert (len(run.steps()), len(run.reload().steps())) == (40, 80)
    feed.end()
    assert (run.reload().active, run.reload().status) == (False, "finished")


def test_the_newest_run_and_what_is_no_run(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stepscope.open().path.parent == Path("runs")
    with pytest.raises(NotARun, match=r"^runs is a folder of runs, not a run; name one of them"):
        stepscope.open("runs")
    with pytest.raises(StepscopeError, match=r"^no run named nigt: .*; did you mean night\?$"):
        stepscope.open("nigt")
    (tmp_path / "traces").mkdir()
    with pytest.raises(NotARun, match=r"is not a run \(there is no run.json\); for traces there is stepscope.traces"):
        stepscope.open(tmp_path / "traces")


def test_the_library_decides_the_type(night: stepscope.Run) -> None:
    pandas = pytest.importorskip("pandas")
    table = night.steps().to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert len(table) == 4 * STEPS
