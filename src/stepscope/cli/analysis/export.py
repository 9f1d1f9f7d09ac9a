"""``stepscope export``: write a run to a tracker, or to telemetry."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.alerts.settings_places import PROJECT_FILE
from stepscope.cli.arguments import RUN_HELP, amount, locate_run
from stepscope.errors import ExportError, UsageError
from stepscope.page.links import page_link
from stepscope.records.text import count_text, say
from stepscope.store.documents import read_hub_file

if TYPE_CHECKING:
    from stepscope.integrations.exporter import Outcome
    from stepscope.integrations.settings import ExportSettings

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "write a run to TensorBoard, W&B, MLflow, Trackio or OpenTelemetry"
EPILOG = """\
examples:
  stepscope export NAME --to tensorboard:logs        event files in logs/NAME
  stepscope export NAME --to wandb                   a run of W&B (WANDB_MODE=offline: on this disk)
  stepscope export NAME --to mlflow:http://host:5000
  stepscope export NAME --to trackio --to otlp:http://localhost:4318
  stepscope export NAME --follow --to tensorboard:logs   an active run, until it is over

Step time and phases (median and worst rank), throughput, memory, findings, the summary and report.html
(docs/export.md).  `stepscope run --to …` does the same while a job runs.  Without --to, where [export] in
stepscope.toml says.  A tool that does not answer for two minutes is given up.  Each tool is an extra: pip install
'stepscope[wandb]', and so on.
"""
EVERY_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help=RUN_HELP)
    parser.add_argument(
        "--to",
        metavar="TOOL[:WHERE],…",
        action="append",
        default=[],
        help="tensorboard:FOLDER, wandb[:PROJECT], mlflow[:URI], trackio[:PROJECT], otlp:URL; several separated by "
        "commas; instead of [export] in stepscope.toml",
    )
    parser.add_argument("--follow", action="store_true", help="of an active run: continue until it is over")
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=amount("seconds"),
        default=EVERY_S,
        help=f"with --follow: how often something is sent (default: {EVERY_S:.0f})",
    )


def run(args: argparse.Namespace) -> int:
    from stepscope.integrations.exporter import tool_defaults
    from stepscope.integrations.settings import OFF, load_export_settings

    words = [OFF, *args.to] if args.to else []
    settings = load_export_settings(Path.cwd(), words, os.environ)
    if not settings.destinations:
        raise UsageError(f"where to? use --to TOOL[:WHERE], or [export] in {PROJECT_FILE}")
    for notice in settings.notices:
        say(notice)
    run_dir = locate_run(args.path)
    os.environ.update(tool_defaults(settings.destinations, os.environ))
    outcomes = asyncio.run(_export(run_dir, settings, args.every if args.follow else None))
    for outcome in outcomes:
        if not outcome.problem:
            rows, findings = count_text(outcome.rows, "row"), count_text(outcome.findings, "finding")
            print(f"{outcome.destination.text}: {rows}, {findings}; {outcome.where}")
    failed = [outcome for outcome in outcomes if outcome.problem]
    if failed:
        raise ExportError("; ".join(f"{outcome.destination.text}: {outcome.problem}" for outcome in failed))
    return 0


async def _export(run_dir: Path, settings: ExportSettings, every_s: float | None) -> tuple[Outcome, ...]:
    from stepscope.assistant.hub_api import HubApi
    from stepscope.hub.runs import Runs
    from stepscope.integrations.exporter import export
    from stepscope.integrations.run_feed import RunFeed

    hub = read_hub_file(run_dir)
    base = settings.link or ("" if hub is None else hub.url)
    api = HubApi(Runs.of_folder(run_dir))
    try:
        return await export(
            RunFeed(api, await api.run_id(None)),
            settings.destinations,
            run_dir=run_dir,
            page=page_link(base, run_dir.name) if base else "",
            wait=None if every_s is None else lambda: asyncio.sleep(every_s),
            tell=say,
        )
    finally:
        await api.close()
