"""``stepscope gate``: pass or fail a run against its baselines, for CI."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stepscope.cli.arguments import count
from stepscope.cli.experiments.compare import add_input_arguments, print_document, read_inputs
from stepscope.errors import CompareError, UsageError
from stepscope.records.text import say

__all__ = ["EPILOG", "HELP", "USAGE_EXIT", "add_arguments", "run"]

HELP = "pass or fail a run against baselines, for CI"
EPILOG = """\
The last input is the run to judge; all others are its baselines. Inputs are as for `stepscope compare`.

examples:
  stepscope gate base1 base2 base3 new --max-slowdown 2%
  stepscope gate base new --max-slowdown 5% --max-memory 5% --no-new-findings
  stepscope gate new --baselines ci-baselines                    against the baselines of the branch main
  stepscope gate new --baselines ci-baselines --record           and keep it as one of them, unless it is slower
  stepscope gate new --baselines ci-baselines --markdown         for a pull request (docs/compare.md)

Exit codes: 0 pass, 1 regression, 2 cannot tell, 3 bad input or usage.
"""
USAGE_EXIT = 3
"""2 means that the runs do not decide it; a mistyped option must not look like that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", metavar="RUN|FILE", type=Path, nargs="+", help="the baselines, then the run to judge")
    parser.add_argument(
        "--max-slowdown",
        metavar="PERCENT",
        type=percentage("slowdown"),
        default=0.02,
        help="the largest slowdown of the step time that passes (default: 2 percent)",
    )
    parser.add_argument(
        "--max-memory", metavar="PERCENT", type=percentage("memory"), help="how much more peak memory passes"
    )
    parser.add_argument(
        "--no-new-findings", action="store_true", help="fail if the run has a warning that no baseline has"
    )
    parser.add_argument("--baselines", metavar="DIR", type=Path, help="a folder of baselines by branch")
    parser.add_argument("--branch", metavar="NAME", default="main", help="whose baselines (default: main)")
    parser.add_argument("--record", action="store_true", help="keep the run in that folder, unless it is a regression")
    parser.add_argument(
        "--keep", metavar="N", type=count("baselines"), default=10, help="how many baselines a branch has (default: 10)"
    )
    add_input_arguments(parser)


def percentage(what: str) -> Callable[[str], float]:
    """Type of a limit: ``2%`` or ``2``, as a share."""

    def parse(text: str) -> float:
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            number = -1.0
        if not 0 < number <= 1000:
            raise argparse.ArgumentTypeError(f"must be a percentage of {what} above 0, such as 2%, not {text!r}")
        return number / 100

    return parse


def more_words(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Accept ``gate A --max-slowdown 2% B``: B is an input as well."""
    args.inputs += map(Path, words)


def run(args: argparse.Namespace) -> int:
    # numpy and the readers are loaded only now: `stepscope --help` must not wait for them.
    from stepscope.compare.comparison import EXIT_CODES, Limits, alike, gate_inputs, record_baseline, stored_baselines

    if args.record and args.baselines is None:
        raise UsageError("--record needs --baselines DIR, the folder to keep the run in")
    if len(args.inputs) < 2 and args.baselines is None:
        raise UsageError("name at least two inputs, a baseline and the run to judge, or a folder with --baselines")
    *baselines, candidate = read_inputs(args.inputs, args)
    if args.baselines is not None:
        stored = stored_baselines(args.baselines, args.branch, candidate)
        fitting = alike(stored, candidate)
        # A job that was changed on purpose begins a new row of baselines.
        baselines += fitting or ([] if args.record else stored)
    if not baselines:
        if not args.record:
            raise CompareError(f"no baselines of branch {args.branch} in {args.baselines}; make one with --record")
        path = record_baseline(args.baselines, args.branch, candidate, keep=args.keep)
        say(f"kept as {path}; there was no baseline to compare it with")
        return EXIT_CODES["pass"]
    document = gate_inputs(
        baselines,
        candidate,
        Limits(slowdown=args.max_slowdown, memory=args.max_memory, new_findings=not args.no_new_findings),
    )
    result = document["gate"]["result"]
    if args.record and result != "regression":
        say(f"kept as {record_baseline(args.baselines, args.branch, candidate, keep=args.keep)}")
    try:
        print_document(document, args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads the text may stop; the exit code must stay.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code: int = document["gate"]["exit_code"]
    return code
