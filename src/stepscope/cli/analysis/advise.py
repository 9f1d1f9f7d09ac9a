"""``stepscope advise``: after a failure, whether to start the job again, as text and as an exit code."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stepscope.cli.arguments import RUN_HELP, count, locate_run
from stepscope.records.text import printable, say

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "after a failure: restart, restart without a host, or stop; also as an exit code"
EPILOG = """\
examples:
  stepscope advise                       about the newest run in runs/
  stepscope advise runs/NAME --json      with the evidence, as JSON
  stepscope advise NAME --steps 10000    the training has 10,000 steps in all: ending before that is too early

exit codes:
  0    restart
  10   restart without a host; standard output has the names of the hosts, one per line
  20   stop: the code or the data is at fault, or a person stopped it
  30   nothing to restart: the run finished
  3    no advice: the run is active, or how it ended is not known

Earlier attempts, and earlier runs of the same command in the same folder, count: what fails again in the same way is
not started again.  The reason is printed to standard error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help=RUN_HELP)
    parser.add_argument("--steps", type=count("steps"), metavar="N", help="steps that the whole training has")
    parser.add_argument("--json", action="store_true", help="print the advice with its evidence as JSON")


def run(args: argparse.Namespace) -> int:
    from stepscope.cli.ledger import earlier_ends
    from stepscope.goodput import advise
    from stepscope.store.catalog import is_active
    from stepscope.store.load import open_run

    run_dir = locate_run(args.path)
    advice = advise(
        open_run(run_dir),
        alive=is_active(run_dir),
        expected_steps=args.steps,
        earlier=earlier_ends(run_dir),
    )
    if args.json:
        print(json.dumps(advice.to_dict(), indent=2, allow_nan=False))
        return advice.exit_code
    for host in advice.hosts:
        print(printable(host))
    say(printable(advice.text))
    for source, text in advice.evidence:
        say(printable(f"  {source}: {text}"))
    return advice.exit_code
