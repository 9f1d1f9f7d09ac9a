"""``stepscope probe``: whether this node is fit for a job, from a short test of what a job uses."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError
from stepscope.records.text import printable, say

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "check whether this node is fit for a job"
EPILOG = """\
examples:
  stepscope probe                          about a minute: cores, memory, disk, GPUs
  stepscope probe --quick                  20 seconds
  stepscope probe --peers /shared/probe    also compare with the other nodes that use this folder
  stepscope probe --against good.json      compare with what --json printed on a good node
  torchrun --nproc-per-node 8 -m stepscope probe     links between GPUs, too; with --nnodes between nodes

Exit code: 0 the node is fit, or too busy to tell; 3 it is unfit; 2 the command line is wrong.
"""

DEFAULT_S, QUICK_S, SHORTEST_S, MOST_S = 60.0, 20.0, 2.0, 90.0
UNFIT = 3
MARKS = {"fit": "✔", "unfit": "✖", "busy": "▲"}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not SHORTEST_S <= value <= MOST_S:
        raise argparse.ArgumentTypeError(f"must be {SHORTEST_S:g} to {MOST_S:g}, not {text!r}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="measure for 20 seconds instead of a minute")
    length.add_argument("--seconds", type=_seconds, metavar="S", help="measure for so many seconds (2 to 90)")
    parser.add_argument(
        "--disk", type=Path, default=Path(), metavar="FOLDER", help="folder to write and read in (default: here)"
    )
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="FOLDER",
        help="folder that nodes share: compare with theirs, and leave ours there",
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with results in a file")
    parser.add_argument("--no-past", action="store_true", help="neither read nor extend this node's own past")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    from stepscope.node_check import judge, measure_node, read_past, read_peers, read_results

    # The folder for the disk is not looked at here: a mount that does not answer would block the check itself.
    if args.peers is not None and not args.peers.is_dir():
        raise UsageError(f"{args.peers} is not a folder")
    references = read_results(args.against) if args.against else []
    seconds = QUICK_S if args.quick else args.seconds or DEFAULT_S
    with _loads_end_with_it():
        result = measure_node(seconds, args.disk, os.environ)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # only helps to measure links; the first rank of each node reports
    past = [] if args.no_past else read_past(os.environ, result["host"])
    # A file that was given counts as the node's own past, however short: it is the reference that the user wants.
    own = [{**each, "host": result["host"], "state": "fit"} for each in references for _ in range(5)]
    peers, problem = [], ""
    try:
        peers = read_peers(args.peers, result["host"]) if args.peers else []
    except UsageError as error:
        problem = str(error)
    verdict = judge(result, [*past, *own], peers)
    result = {**result, **verdict.to_dict()}
    if args.json:
        print(json.dumps(result, indent=2), flush=True)
    else:
        print(printable(f"{MARKS[verdict.state]} {verdict.title}"))
        for row in verdict.rows:
            print(printable(f"    {'!' if row.low else ' '} {row.text}"))
        for name, reason in result["skipped"].items():
            print(printable(f"      {name}: not measured, {reason}"))
        sys.stdout.flush()
    for text in filter(None, [problem, *_stored(result, args)]):
        say(text)
    return UNFIT if verdict.state == "unfit" else 0


def _stored(result: Mapping[str, Any], args: argparse.Namespace) -> Iterator[str]:
    """Keep the result for later checks and for peers; yield what failed. The verdict holds either way."""
    from stepscope.node_check import append_past, publish

    if not args.no_past:
        try:
            append_past(result, os.environ)
        except OSError as error:
            yield f"the result cannot be kept for later checks: {error}"
    if args.peers:
        try:
            publish(result, args.peers)
        except UsageError as error:
            yield str(error)


@contextmanager
def _loads_end_with_it() -> Iterator[None]:
    """SIGTERM ends Python in the usual way, so that the loads, each in a session of its own, are killed at once."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
