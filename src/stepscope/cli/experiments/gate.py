"""``stepscope gate``: pass or fail a run against its baselines, or traces against limits, for CI."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from stepscope.cli.arguments import count, existing
from stepscope.cli.experiments.compare import add_input_arguments, print_document, read_inputs
from stepscope.errors import CompareError, UsageError
from stepscope.records.text import say

__all__ = ["EPILOG", "HELP", "USAGE_EXIT", "add_arguments", "more_words", "run"]

HELP = "pass or fail a run against baselines, or traces against limits, for CI"
EPILOG = """\
The last input is the run to judge; all others are its baselines. Inputs are as for `stepscope compare`.

examples:
  stepscope gate base1 base2 base3 new --max-slowdown 2%
  stepscope gate base new --max-slowdown 5% --max-memory 5% --no-new-findings
  stepscope gate new --baselines ci-baselines                    against the baselines of the branch main
  stepscope gate new --baselines ci-baselines --record           and keep it as one of them, unless it is slower
  stepscope gate new --baselines ci-baselines --markdown         for a pull request (docs/compare.md)
  stepscope gate --trace traces/ --max-idle 20% --max-step 50ms --max-kernel '*gemm*=5ms'

Exit codes: 0 pass, 1 regression or limit exceeded, 2 cannot tell, 3 bad input or usage.
"""
DEFAULT_SLOWDOWN = 0.02
USAGE_EXIT = 3
"""2 means that the runs do not decide it; a mistyped option must not look like that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", metavar="RUN|FILE", type=Path, nargs="*", help="the baselines, then the run to judge")
    parser.add_argument(
        "--max-slowdown",
        metavar="PERCENT",
        type=percentage("slowdown"),
        help="the largest slowdown of the step time that passes (default: 2 percent)",
    )
    parser.add_argument(
        "--max-memory",
        metavar="PERCENT|SIZE",
        type=memory_limit,
        help="how much more peak memory passes; with --trace the peak itself, such as 12GiB",
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
    add_trace_arguments(parser)


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    traces = parser.add_argument_group("limits on traces, each for the worst rank")
    traces.add_argument(
        "--trace", metavar="PATH", type=Path, nargs="+", help="traces of one job, judged by these limits alone"
    )
    traces.add_argument("--max-step", metavar="TIME", type=duration_ns, help="length of a step, such as 50ms")
    traces.add_argument(
        "--max-idle",
        metavar="PERCENT",
        type=percentage("idle time"),
        help="the steps' time in which the device is idle",
    )
    traces.add_argument(
        "--max-comm", metavar="PERCENT", type=percentage("communication"), help="the steps' time in communication"
    )
    traces.add_argument(
        "--max-exposed", metavar="PERCENT", type=percentage("communication"), help="the same, while nothing computes"
    )
    traces.add_argument(
        "--max-kernel",
        metavar="NAME=TIME",
        type=kernel_limit,
        action="append",
        default=[],
        help="a step's time in kernels of this name (* and ? are wildcards); more than once",
    )


TRACE_LIMITS = "--max-step, --max-idle, --max-comm, --max-exposed, --max-memory or --max-kernel"
UNITS_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
UNITS_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS_BYTES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-zµ]{1,3})", re.IGNORECASE)


def _quantity(text: str, units: Mapping[str, int]) -> int:
    match = QUANTITY.fullmatch(text.strip())
    amount = 0.0 if match is None else float(match[1]) * units.get(match[2].lower(), 0)
    return round(amount)


def duration_ns(text: str) -> int:
    """Type of a time limit: ``50ms``."""
    found = _quantity(text, UNITS_NS)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a time above 0 with its unit (ns, us, ms, s), not {text!r}")
    return found


def kernel_limit(text: str) -> tuple[str, int]:
    """Type of a kernel's limit: ``*gemm*=5ms``; the name may contain ``=``."""
    name, equals, limit = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=TIME, such as '*gemm*=5ms', not {text!r}")
    return name, duration_ns(limit)


def memory_limit(text: str) -> tuple[float, int]:
    """Type of a limit of memory: a share (``5%``), or bytes (``12GiB``); the other is 0."""
    found = _quantity(text, UNITS_BYTES)
    return (0.0, found) if found else (percentage("memory, or a size such as 12GiB,")(text), 0)


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
    """Accept ``gate A --max-slowdown 2% B``: B is an input as well, with ``--trace`` a trace."""
    args.inputs += map(Path, words)


def run(args: argparse.Namespace) -> int:
    limits = [name for name in ("max_step", "max_idle", "max_comm", "max_exposed", "max_kernel") if getattr(args, name)]
    if args.trace is not None:
        return _run_on_traces(args)
    if limits:
        raise UsageError(f"--{limits[0].replace('_', '-')} is a limit on traces: name them with --trace PATH")
    if args.max_memory is not None and not args.max_memory[0]:
        raise UsageError("--max-memory of runs is a percentage, such as 5%: how much more than the baselines passes")
    return _run_on_runs(args)


def _run_on_traces(args: argparse.Namespace) -> int:
    from stepscope.cli.analysis.trace import analyze_traces, unread_files
    from stepscope.comparison.trace_gate import TraceLimits, gate_trace, render_gate, render_gate_markdown
    from stepscope.traces.engine import Options
    from stepscope.traces.reading.cache import Cache
    from stepscope.traces.reading.files import find_traces

    of_runs = {
        "--max-slowdown": args.max_slowdown is not None,
        "--no-new-findings": args.no_new_findings,
        "--baselines": args.baselines is not None,
        "--record": args.record,
        "--column": args.column is not None,
        "--unit": args.unit is not None,
        "--html": args.html is not None,
    }
    if given := [name for name, is_given in of_runs.items() if is_given]:
        raise UsageError(f"not for --trace: {', '.join(given)}; limits on traces are {TRACE_LIMITS}")
    if args.max_memory is not None and not args.max_memory[1]:
        raise UsageError("--max-memory of traces is a size, such as 12GiB")
    # A path after other options is a trace as well.
    paths = [*args.trace, *args.inputs]
    for path in paths:
        existing(path)
    limits = TraceLimits(
        step_ns=args.max_step,
        idle=args.max_idle,
        comm=args.max_comm,
        exposed=args.max_exposed,
        memory_bytes=args.max_memory[1] if args.max_memory else None,
        kernels=tuple(args.max_kernel),
    )
    if limits == TraceLimits():
        raise UsageError(f"name a limit: {TRACE_LIMITS}")
    files, passed_over = find_traces(paths)
    job = analyze_traces(files, passed_over, Options(cache=Cache.of_environment()), "local")
    document = gate_trace(job, limits, unread=unread_files(job, files))
    with _lasting_exit_code():
        if args.json:
            print(json.dumps(document, indent=2, allow_nan=False))
        elif args.markdown:
            print(render_gate_markdown(document), end="")
        else:
            color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            print(
                render_gate(document, width=min(shutil.get_terminal_size((80, 24)).columns, 120), color=color), end=""
            )
        sys.stdout.flush()
    code: int = document["exit_code"]
    return code


@contextmanager
def _lasting_exit_code() -> Iterator[None]:
    """Keep the exit code if whoever reads the text stops."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run_on_runs(args: argparse.Namespace) -> int:
    # numpy and the readers are loaded only now: `stepscope --help` must not wait for them.
    from stepscope.comparison.comparison import (
        EXIT_CODES,
        Limits,
        alike,
        gate_inputs,
        record_baseline,
        stored_baselines,
    )

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
        Limits(
            slowdown=DEFAULT_SLOWDOWN if args.max_slowdown is None else args.max_slowdown,
            memory=args.max_memory[0] if args.max_memory else None,
            new_findings=not args.no_new_findings,
        ),
    )
    result = document["gate"]["result"]
    if args.record and result != "regression":
        say(f"kept as {record_baseline(args.baselines, args.branch, candidate, keep=args.keep)}")
    with _lasting_exit_code():
        print_document(document, args)
        sys.stdout.flush()
    code: int = document["gate"]["exit_code"]
    return code
