"""MLflow: a run in an experiment, through ``MlflowClient`` and an explicit run id (``active_run()`` is per thread).

``MLFLOW_RUN_ID``, as ``mlflow run`` sets it for the script, makes ours the same run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from stepscope.integrations.exporter import Exporter
from stepscope.integrations.run_feed import PREFIX, FindingChange, Row, RunAbout, finding_line
from stepscope.integrations.summary_figures import summary_figures

__all__ = ["make_exporter"]

EXPERIMENT = "stepscope"
MOST_METRICS = 1000
"""In a request; more are refused."""
LONGEST_TAG = 5000
LONGEST_PARAM = 500
STATES = {"finished": "FINISHED", "interrupted": "KILLED"}
"""By status of the run; any other is a failure."""


def make_exporter(where: str) -> Exporter:
    return _MLflow(where)


class _MLflow:
    def __init__(self, uri: str) -> None:
        self._client = MlflowClient(tracking_uri=uri or None)
        self._run_id = os.environ.get("MLFLOW_RUN_ID", "")
        self._own = not self._run_id
        self._lines: list[str] = []
        self._state = "FAILED"

    @property
    def where(self) -> str:
        return f"MLflow run {self._run_id}" if self._run_id else ""

    def begin(self, run: RunAbout) -> None:
        if not self._run_id:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
            known = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if known is None else known.experiment_id
            self._run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        settings = {"command": run.command, "ranks": str(run.world_size), **run.settings}
        params = [Param(f"{PREFIX}{name}", value[:LONGEST_PARAM]) for name, value in settings.items()]
        tags = [RunTag(f"{PREFIX}tag/{tag}", "true") for tag in run.tags]
        tags += [RunTag(f"{PREFIX}page", run.page)] if run.page else []
        self._client.log_batch(self._run_id, params=params, tags=tags)

    def write_rows(self, rows: Sequence[Row]) -> None:
        now_ms = int(time.time() * 1e3)
        metrics = [
            Metric(name, value, row.wall_ns // 1_000_000 or now_ms, row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MOST_METRICS])

    def write_finding(self, change: FindingChange) -> None:
        line = finding_line(change)
        if line not in self._lines:
            self._lines.append(line)
        self._client.set_tag(self._run_id, f"{PREFIX}finding/{change.number}", line[:LONGEST_TAG])
        self._client.log_text(self._run_id, "\n".join(self._lines) + "\n", "stepscope/findings.txt")

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        for name, value in summary_figures(status, summary).items():
            if isinstance(value, str):
                self._client.set_tag(self._run_id, name, value[:LONGEST_TAG])
            else:
                self._client.log_metric(self._run_id, f"{name.replace(PREFIX, f'{PREFIX}summary/')}", value)
        for path in files:
            self._client.log_artifact(self._run_id, str(path), "stepscope")
        self._state = STATES.get(status, "FAILED")

    def close(self) -> None:
        if self._run_id and self._own:
            self._client.set_terminated(self._run_id, self._state)
