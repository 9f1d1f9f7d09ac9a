"""``stepscope attach``: the agent of a run that ``stepscope.init()`` began.  Started by the ranks, not by people."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepscope import __version__
from stepscope.agent.process import tend
from stepscope.store.create import create_run_at
from stepscope.store.paths import META

__all__ = ["HELP", "add_arguments", "run"]

HELP = "be the agent of a run that stepscope.init() began (started by its ranks)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", type=Path, required=True, help="folder of the rings")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run; made, or gone on with")
    parser.add_argument(
        "--owner", type=int, required=True, metavar="PID", help="while this process lives, so does the run"
    )
    parser.add_argument("job", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if not (args.run_dir / META).exists():
        words = args.job[1:] if args.job[:1] == ["--"] else args.job
        create_run_at(args.run_dir, args.session, words, version=__version__)
    return tend(args.run_dir, args.session, owner=args.owner)
