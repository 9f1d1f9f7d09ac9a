"""``stepscope attach``: the agent of a run that ``stepscope.init()`` began. Started by the ranks, not by users."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from stepscope import __version__
from stepscope.agent.hangs.on_hang import HangPolicy, seconds_from
from stepscope.agent.loop import tend
from stepscope.records import run_clock
from stepscope.store.create import create_run_at
from stepscope.store.paths import META

__all__ = ["HELP", "OPTIONS_BEFORE_JOB", "add_arguments", "run"]

HELP = "run the agent for a run started by stepscope.init() (internal)"
OPTIONS_BEFORE_JOB = ("--session", "--run-dir", "--owner")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", type=Path, required=True, help="folder of the rings")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run; created if it does not exist")
    parser.add_argument("--owner", type=int, required=True, metavar="PID", help="the run ends when this process exits")


def run(args: argparse.Namespace) -> int:
    run_clock.follow_environment()
    if not (args.run_dir / META).exists():
        create_run_at(args.run_dir, args.session, args.job, version=__version__)
    policy = HangPolicy(after_s=seconds_from(os.environ))
    return tend(args.run_dir, args.session, owner=args.owner, on_hang=policy)
