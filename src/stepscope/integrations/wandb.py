"""Weights & Biases: a run next to the script's own, linked to it; also offline (``WANDB_MODE=offline``).

The script's own run belongs to its process: W&B lets a second process write to it only online, and only if the script
itself chose shared mode.  Ours is a new run in the script's project and group, whose configuration and notes name the
script's run; that is not touched.

Rows have the step as their own x axis (``stepscope/step``), because they arrive late.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wandb

from stepscope.integrations.exporter import Exporter
from stepscope.integrations.run_feed import PREFIX, FindingChange, Row, RunAbout, finding_line
from stepscope.integrations.summary_figures import summary_figures
from stepscope.integrations.wandb_files import OWN_JOB_TYPE, ScriptRun, find_script_run

__all__ = ["make_exporter"]

PROJECT = "stepscope"
STEP = f"{PREFIX}step"
LONGEST_TAG = 64
OF_THE_SCRIPT = (
    *("WANDB_RUN_ID", "WANDB_NAME", "WANDB_NOTES", "WANDB_TAGS", "WANDB_RESUME", "WANDB_JOB_TYPE", "WANDB_SERVICE"),
    *("WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_LAUNCH", "WANDB_CONFIG_PATHS", "WANDB_CONFIG_DIR"),
)
"""Variables that describe the script's run, not ours."""
COLUMNS = ("step", "state", "severity", "kind", "finding")


def make_exporter(where: str) -> Exporter:
    return _WandB(where)


class _WandB:
    def __init__(self, project: str) -> None:
        self._project = project
        self._about = RunAbout(name="", command="", world_size=0, created_wall_ns=0)
        self._run: Any = None
        self._findings: list[list[Any]] = []
        self._exit_code = 1

    @property
    def where(self) -> str:
        if self._run is None:
            return ""
        return f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)

    def begin(self, run: RunAbout) -> None:
        """Remember the run; ours begins with the first row, when the script has begun its own."""
        self._about = run

    def write_rows(self, rows: Sequence[Row]) -> None:
        run = self._begun()
        for row in rows:
            run.log({STEP: row.step, **row.values})

    def write_finding(self, change: FindingChange) -> None:
        run = self._begun()
        row = [change.step, change.state, change.severity, change.kind, change.title]
        if row not in self._findings:
            self._findings.append(row)
        run.log({STEP: change.step, f"{PREFIX}findings": wandb.Table(columns=list(COLUMNS), data=self._findings)})
        tag = change.kind[:LONGEST_TAG]
        if change.state == "opened" and tag not in (run.tags or ()):
            run.tags = (*(run.tags or ()), tag)
        run.summary[f"{PREFIX}last_finding"] = finding_line(change)

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        run = self._begun()
        run.summary.update(summary_figures(status, summary))
        if files:
            artifact = wandb.Artifact(f"stepscope-{run.id}", type="report")
            for path in files:
                artifact.add_file(str(path))
            run.log_artifact(artifact)
        self._exit_code = 0 if status == "finished" else 1

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)

    def _begun(self) -> Any:
        if self._run is None:
            about = self._about
            script = find_script_run(Path(about.folder or "."), about.created_wall_ns, os.environ)
            with _without(OF_THE_SCRIPT):
                self._run = self._new(script)
            self._run.define_metric(STEP, hidden=True)
            self._run.define_metric(f"{PREFIX}*", step_metric=STEP)
        return self._run

    def _new(self, script: ScriptRun | None) -> Any:
        about = self._about
        config = {"command": about.command, "ranks": about.world_size, **about.settings}
        lines = []
        if about.page:
            config["page"] = about.page
            lines.append(f"Page: {about.page}")
        if script is not None:
            config["script_run"] = script.path
            lines.append(f"Phases and findings of the run {script.path}.")
        return wandb.init(
            id=secrets.token_hex(4),
            project=self._project
            or (script.project if script is not None else os.environ.get("WANDB_PROJECT", PROJECT)),
            entity=(script.entity if script is not None else "") or None,
            group=(script.group if script is not None else "") or None,
            name=about.name,
            notes="\n".join(lines) or None,
            tags=["stepscope", *(tag[:LONGEST_TAG] for tag in about.tags)],
            config=config,
            job_type=OWN_JOB_TYPE,
            settings=_settings(),
            reinit="create_new",
        )


def _settings() -> wandb.Settings:
    return wandb.Settings(
        console="off",
        silent=True,
        symlink=False,  # `wandb/latest-run` remains the script's
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,
        x_disable_meta=True,
    )


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Without these variables; only this process, which exports, sees that."""
    removed = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)
