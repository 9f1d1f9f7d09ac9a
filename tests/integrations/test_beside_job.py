"""``stepscope run --to``: what tools have when the job is over, and that nothing of the job depends on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Commands, Completed
from tests.integrations.wandb_log import histories, wandb_records
from tests.support.loopback_receiver import LoopbackReceiver, Reply, loopback_receiver

RunStepscope = Callable[..., Completed]
TOY = Path(__file__).parents[1] / "toy_job.py"
SECRET = "tk-4f0c9a77d1"
LOGGING = """\
import sys, time
import stepscope, wandb

run = wandb.init(project="loops", name="mine", group="nightly", config={"lr": 0.1})
for step in range(30):
    with stepscope.step():
        time.sleep(0.002)
    run.log({"loss": 1 / (1 + step), "seen": step})
run.finish()
sys.exit(5)
"""


@pytest.mark.soak  # it starts W&B three times
def test_wandb_has_a_run_beside_the_scripts_own(commands: Commands, tmp_path: Path) -> None:
    """The script's own run is the same as without Stepscope; ours has its group and names it."""
    pytest.importorskip("wandb")
    (tmp_path / "train.py").write_text(LOGGING)
    found = {}
    for folder, words in {
        "bare": ["train.py"],
        "exported": ["-m", "stepscope", "run", "--name", "exported", "--to", "wandb", "train.py"],
    }.items():
        environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path / folder), "WANDB_TAGS": "theirs"}
        (tmp_path / folder).mkdir()
        done = commands.finish(commands.start_python(*words, env=environment))
        assert done.code == 5
        found[folder] = wandb_runs(tmp_path / folder)
    (bare,), (script, ours) = found["bare"].values(), sorted(found["exported"].values(), key=is_ours)
    assert history_of(script) == history_of(bare) == [(step, 1 / (1 + step), step) for step in range(30)]
    for name in ("project", "display_name", "run_group", "tags", "notes", "job_type"):
        assert getattr(run_of(script), name) == getattr(run_of(bare), name)
    assert config_of(script) == config_of(bare) == {"lr": 0.1}
    assert kinds_of(script) == kinds_of(bare)
    assert (tmp_path / "exported" / "wandb" / "latest-run").resolve().name.endswith(run_of(script).run_id)

    own = run_of(ours)
    assert (own.project, own.run_group, own.job_type, own.display_name) == ("loops", "nightly", "stepscope", "exported")
    config = config_of(ours)
    assert config["script_run"] == f"loops/{run_of(script).run_id}"
    assert config["page"].endswith("/#/run/exported")
    assert config["ranks"] == 1
    steps = [items["stepscope/step"] for items in histories(ours) if "stepscope/step_ms" in items]
    assert steps == sorted(set(steps))
    assert steps[-1] == 29


def wandb_runs(folder: Path) -> dict[str, list[Any]]:
    return {path.stem: list(wandb_records(path.read_bytes())) for path in folder.rglob("*.wandb")}


def run_of(records: list[Any]) -> Any:
    return next(record.run for record in records if record.WhichOneof("record_type") == "run")


def is_ours(records: list[Any]) -> bool:
    return bool(run_of(records).job_type == "stepscope")


def config_of(records: list[Any]) -> dict[str, Any]:
    pairs = {item.key: json.loads(item.value_json) for item in run_of(records).config.update}
    return {key: value for key, value in pairs.items() if key != "_wandb"}


def history_of(records: list[Any]) -> list[tuple[int, float, int]]:
    return [(items["_step"], items["loss"], items["seen"]) for items in histories(records)]


def kinds_of(records: list[Any]) -> dict[str, int]:
    """How many records there are by kind, without those that depend on the time."""
    kinds = [record.WhichOneof("record_type") for record in records]
    return {kind: kinds.count(kind) for kind in ("header", "run", "history", "exit", "artifact", "metric", "config")}


@pytest.fixture
def collector() -> Any:
    with loopback_receiver() as receiver:
        receiver.otherwise = lambda _: Reply(body=b"")
        yield receiver


def test_several_tools_from_settings_and_the_command_line(
    run_stepscope: RunStepscope, collector: LoopbackReceiver, tmp_path: Path
) -> None:
    """Both get the run; a key in the environment is in no file of the run."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("opentelemetry.proto")
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    (tmp_path / "stepscope.toml").write_text(
        f'[export]\nto = ["tensorboard:tb", "otlp:{collector.url}"]\nlink = "https://hub.example"\n'
    )
    environment = {"OTEL_EXPORTER_OTLP_HEADERS": f"api-key={SECRET}"}
    done = run_stepscope("run", "--name", "a", "--to", "tensorboard:more,tensorboard:tb", TOY, env=environment)
    assert done.code == 0
    assert "tensorboard: tensorboard --logdir more" in done.stderr
    assert f"otlp: {collector.url}" in done.stderr
    assert list((tmp_path / "tb" / "a").glob("events.*"))
    assert list((tmp_path / "more" / "a").glob("events.*"))
    (last,) = [
        record
        for request in collector.accepted
        if request.path == "/v1/logs"
        for record in ExportLogsServiceRequest.FromString(request.body).resource_logs[0].scope_logs[0].log_records
        if record.event_name == "stepscope.run.ended"
    ]
    links = {pair.key: pair.value.string_value for pair in last.attributes}
    assert links["url.full"] == "https://hub.example/#/run/a"
    assert {request.headers["Api-Key"] for request in collector.accepted} == {SECRET}
    assert done.run_dir is not None
    assert [path for path in done.run_dir.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []


@pytest.mark.soak
@pytest.mark.parametrize("tool", ["mlflow", "otlp", "wandb"])
def test_a_server_that_never_answers(run_stepscope: RunStepscope, tmp_path: Path, tool: str) -> None:
    """The job ends with its own exit code; the other tool has everything, and so has a later export."""
    packages = {"mlflow": "mlflow", "otlp": "opentelemetry.proto", "wandb": "wandb"}
    pytest.importorskip(packages[tool])
    pytest.importorskip("tensorboard")
    (tmp_path / "train.py").write_text(
        "import stepscope, sys\nfor _ in range(20):\n  with stepscope.step(): pass\nsys.exit(7)\n"
    )
    with loopback_receiver() as hole:
        hole.otherwise = lambda _: Reply(never=True)
        word = tool if tool == "wandb" else f"{tool}:{hole.url}"
        environment = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": hole.url}
        done = run_stepscope("run", "--name", "a", "--to", f"{word},tensorboard:tb", "train.py", env=environment)
    assert done.code == 7
    assert f"{tool}: it does not answer" in done.stderr
    assert f"`stepscope export {done.run_dir} --to {word},tensorboard:tb` writes all of it" in done.stderr
    assert steps_of(tmp_path / "tb" / "a") == 19
    with loopback_receiver() as collector:
        collector.otherwise = lambda _: Reply(body=b"")
        elsewhere = {
            "mlflow": ["--to", f"mlflow:sqlite:///{tmp_path}/ml.db"],
            "otlp": ["--to", f"otlp:{collector.url}"],
            "wandb": ["--to", "wandb"],
        }
        offline = {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"}
        done = run_stepscope("export", done.run_dir, *elsewhere[tool], env=offline)
    assert done.code == 0, done.stderr
    assert ": 20 rows, " in done.stdout


def steps_of(folder: Path) -> int:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return int(events.Scalars("stepscope/step_ms")[-1].step)


@pytest.mark.soak
def test_wandb_cannot_write(run_stepscope: RunStepscope, tmp_path: Path) -> None:
    """Without a folder of its own W&B uses a temporary one, and says so; the job does not notice."""
    pytest.importorskip("wandb")
    (tmp_path / "file").write_text("")
    environment: Mapping[str, str] = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path / "file" / "below"),
        "TMPDIR": str(tmp_path),
    }
    done = run_stepscope("run", "--name", "a", "--to", "wandb", TOY, env=environment)
    assert done.code == 0
    assert "stepscope: wandb: " in done.stderr
