"""What real trackers have after an export, read back with their own code."""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.integrations.exporter import Destination, Outcome, make_exporter
from stepscope.integrations.run_feed import PREFIX, News, RunAbout
from stepscope.integrations.summary_figures import summary_figures
from tests.integrations.wandb_log import histories, summary_of, wandb_records

ExportRun = Callable[..., tuple[Outcome, ...]]
TITLE = "Rank 2 is 29.6 ms slower than its peers in forward"


@pytest.fixture
def figures(run_summary: dict[str, Any]) -> dict[str, float | str]:
    """What a tool shows for the run as a whole."""
    found = summary_figures("finished", run_summary)
    phase = run_summary["phases"]["forward"]
    assert found[f"{PREFIX}step_p99_ms"] == run_summary["step_time"]["p99_ms"]
    assert (found[f"{PREFIX}forward_ms"], found[f"{PREFIX}forward_worst_ms"]) == (phase["median_ms"], phase["worst_ms"])
    return found


def test_tensorboard(export_run: ExportRun, news: News, run_summary: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (outcome,) = export_run([f"tensorboard:{tmp_path}"])
    assert outcome.problem == ""
    events = EventAccumulator(str(tmp_path / "night"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == {name for row in news.rows for name in row.values}
    for name in (f"{PREFIX}step_ms", f"{PREFIX}phase/forward_worst_ms"):
        scalars = events.Scalars(name)
        assert [each.step for each in scalars] == list(range(200))
        assert [each.value for each in scalars] == pytest.approx([row.values[name] for row in news.rows], rel=1e-6)
        assert scalars[100].wall_time == pytest.approx(news.rows[100].wall_ns / 1e9, abs=1e-3)
    steady = [each.value for each in events.Scalars(f"{PREFIX}phase/forward_worst_ms")[1:]]
    assert statistics.mean(steady) == pytest.approx(run_summary["phases"]["forward"]["worst_ms"], rel=1e-3)
    (finding,) = events.Tensors(f"{PREFIX}findings")
    assert TITLE in finding.tensor_proto.string_val[0].decode()
    (summary,) = events.Tensors(f"{PREFIX}summary")
    assert "Rank 2 is slow." in summary.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("/proc/x", "_proc_x"),
        ("../../X", "_.._X"),
        ("..", "run"),
        (".hidden", "hidden"),
        ("a/b c", "a_b c"),
        ("a.b", "a.b"),
    ],
)
def test_the_name_of_a_run_stays_in_the_folder_of_tensorboard(tmp_path: Path, name: str, folder: str) -> None:
    """It may be a label with slashes."""
    pytest.importorskip("tensorboard")
    exporter = make_exporter(Destination(tool="tensorboard", where=str(tmp_path / "a" / "logs")))
    exporter.begin(RunAbout(name=name, command="train.py", world_size=1, created_wall_ns=1))
    exporter.close()
    (events,) = tmp_path.rglob("events.*")
    assert events.parent == tmp_path / "a" / "logs" / folder


@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")  # of what MLflow asks SQLAlchemy for
def test_mlflow(
    export_run: ExportRun,
    news: News,
    figures: dict[str, float | str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"sqlite:///{tmp_path}/ml.db"
    (outcome,) = export_run([f"mlflow:{uri}"])
    assert outcome.problem == ""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("stepscope")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, f"{PREFIX}step_ms")
    assert [each.step for each in history] == list(range(200))
    assert [each.value for each in history] == [row.values[f"{PREFIX}step_ms"] for row in news.rows]
    assert TITLE in run.data.tags[f"{PREFIX}finding/1"]
    assert (run.info.status, run.data.params[f"{PREFIX}command"]) == ("FINISHED", "python train.py")
    numbers = {name.removeprefix(PREFIX): value for name, value in figures.items() if not isinstance(value, str)}
    assert {name: run.data.metrics[f"{PREFIX}summary/{name}"] for name in numbers} == numbers
    texts = {name: value for name, value in figures.items() if isinstance(value, str)}
    assert {name: run.data.tags[name] for name in texts} == texts
    assert {each.path for each in client.list_artifacts(run.info.run_id, "stepscope")} == {
        "stepscope/findings.txt",
        "stepscope/summary.txt",
    }


def exported_alone(run_dir: Path, word: str, environment: dict[str, str], folder: Path) -> str:
    """Export in a process of its own: the library reads its settings when it is imported."""
    command = [sys.executable, "-m", "stepscope", "export", str(run_dir), "--to", word]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=folder, check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout


def test_trackio(news: News, figures: dict[str, float | str], run_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    environment = {"TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert "trackio:loops: 200 rows, 1 finding" in exported_alone(run_dir, "trackio:loops", environment, tmp_path)
    (database,) = tmp_path.rglob("loops.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    logged = [(step, json.loads(text)) for step, text in rows]
    steps = {step: values[f"{PREFIX}step_ms"] for step, values in logged if f"{PREFIX}step_ms" in values}
    assert steps == {row.step: pytest.approx(row.values[f"{PREFIX}step_ms"]) for row in news.rows}
    (summary,) = (values for _, values in logged if f"{PREFIX}status" in values)
    assert {name: summary[name] for name in figures} == figures
    with sqlite3.connect(database) as connection:
        alerts = connection.execute("select title, text, level, step from alerts").fetchall()
    assert [(title, level) for title, _, level, _ in alerts] == [("compute_straggler", "error")]
    assert TITLE in alerts[0][1]


def test_wandb_offline(news: News, figures: dict[str, float | str], run_dir: Path, tmp_path: Path) -> None:
    """The file that ``wandb sync`` would upload, decoded as W&B's own LevelDB log of protocol buffers."""
    pytest.importorskip("wandb")
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    assert "wandb:loops: 200 rows, 1 finding; wandb sync" in exported_alone(
        run_dir, "wandb:loops", environment, tmp_path
    )
    (path,) = tmp_path.rglob("*.wandb")
    records = list(wandb_records(path.read_bytes()))
    (begun,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (begun.project, begun.display_name) == ("loops", "night")
    history = {
        items[f"{PREFIX}step"]: items[f"{PREFIX}step_ms"] for items in histories(records) if f"{PREFIX}step_ms" in items
    }
    assert history == {row.step: pytest.approx(row.values[f"{PREFIX}step_ms"]) for row in news.rows}
    summary = summary_of(records)
    assert {name: summary[name] for name in figures} == figures
