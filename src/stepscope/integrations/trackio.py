"""Trackio: a run in a local project, which ``trackio show`` draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio
from trackio import AlertLevel, Artifact

from stepscope.integrations.exporter import Exporter
from stepscope.integrations.run_feed import FindingChange, Row, RunAbout, finding_line
from stepscope.integrations.summary_figures import summary_figures

__all__ = ["make_exporter"]

PROJECT = "stepscope"
LEVELS = {"info": AlertLevel.INFO, "warning": AlertLevel.WARN, "critical": AlertLevel.ERROR}


def make_exporter(where: str) -> Exporter:
    return _Trackio(where or PROJECT)


class _Trackio:
    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None
        self._last_step = 0

    @property
    def where(self) -> str:
        return f"trackio show --project {self._project}"

    def begin(self, run: RunAbout) -> None:
        config = {"command": run.command, "ranks": run.world_size, **run.settings}
        if run.page:
            config["page"] = run.page
        self._run = trackio.init(
            project=self._project, name=run.name, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def write_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(dict(row.values), step=row.step)
            self._last_step = row.step

    def write_finding(self, change: FindingChange) -> None:
        level = AlertLevel.INFO if change.state == "resolved" else LEVELS[change.severity]
        self._run.alert(change.kind, finding_line(change), level=level, step=change.step)

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._run.log(summary_figures(status, summary), step=self._last_step)
        if files:
            report = Artifact(f"stepscope-{self._run.name}", type="report")
            for path in files:
                report.add_file(path)
            self._run.log_artifact(report)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
