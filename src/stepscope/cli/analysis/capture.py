"""``stepscope capture``: a few steps of some ranks of a running job, recorded by torch.profiler and analyzed.

The command appends a request to the run directory and follows the record that the run's hub keeps
(``hub/captures.py``), so it works on every machine that has the directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stepscope.alerts.requests import user_name
from stepscope.cli.analysis.process_capture import add_process_arguments, run_process_capture
from stepscope.cli.arguments import RUN_HELP, amount, count, locate_run
from stepscope.cli.output import format_table
from stepscope.errors import RunError, UsageError
from stepscope.flight.wording import ranks_text
from stepscope.records.capture import CAPTURE_STEPS, CaptureRecord, CaptureRequest, RankChoice
from stepscope.records.dataclass_json import encoded
from stepscope.records.paths import CAPTURES, capture_folder
from stepscope.records.run_clock import wall_ns
from stepscope.records.text import bytes_text, duration_text, printable
from stepscope.store.captures import left_behind, read_capture, read_captures, request_capture
from stepscope.store.documents import read_hub_file, read_meta
from stepscope.store.liveness import processes_alive

__all__ = ["EPILOG", "HELP", "add_arguments", "capture_text", "run"]

HELP = "profile a few steps of some ranks of a running job, and say what takes their time"
EPILOG = """\
examples:
  stepscope capture                        the newest active run: its worst rank and a median rank, 6 steps
  stepscope capture NAME --ranks 0,3       these ranks
  stepscope capture NAME --ranks all --steps 2 --memory
  stepscope capture NAME --list            the captures of a run, finished or not
  stepscope capture NAME --json            the record as data (docs/capture-reference.md)
  stepscope capture --pid 4711             a process that has KINETO_USE_DAEMON=1, started without Stepscope
  stepscope capture --pid 4711 --pid 4712 --steps 6     two ranks of such a job

The ranks start torch.profiler after one of their next steps and write their traces to the run directory, in
captures/ID. `stepscope trace` opens them, and so do Perfetto and TensorBoard. Exit code: 0, or 3 if it failed.
"""
WAIT_S = 300.0
FIRST_ANSWER_S = 150.0
"""A hub looks for requests once a second, but may be busy reading a long run, or wait for the first steps."""
EVERY_S = 0.2
CHECK_S = 5.0
"""The time between two checks whether the job is still there."""
LAST_S = 30.0
"""When the job has ended: how long its hub may take to complete the record."""
YOUNG_S = 30.0
CONNECT_S = 2.0
MOST_LISTED = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help=RUN_HELP)
    parser.add_argument(
        "--ranks",
        default="worst",
        metavar="RANKS",
        help="numbers as 0,3; all; worst: the rank that a finding names, or that works longest, and a median rank "
        "(default: worst)",
    )
    parser.add_argument(
        "--steps",
        type=count("steps"),
        metavar="N",
        help=f"how many steps (default: {CAPTURE_STEPS}, after two for warm-up)",
    )
    parser.add_argument("--memory", action="store_true", help="record allocations, too")
    parser.add_argument("--shapes", action="store_true", help="record the shapes of operands, too")
    parser.add_argument(
        "--stacks",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="record which line of the script calls what (default: yes)",
    )
    parser.add_argument(
        "--wait",
        type=amount("seconds"),
        default=WAIT_S,
        metavar="SECONDS",
        help=f"give up if nothing happens for this long (default: {WAIT_S:.0f})",
    )
    add_process_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--list", action="store_true", help="list the captures of the run")
    form.add_argument("--json", action="store_true", help="print the record as JSON")


def run(args: argparse.Namespace) -> int:
    if args.pid:
        return _capture_processes(args)
    if args.ms is not None or args.output is not None:
        raise UsageError("--ms and --output are for --pid; a capture of a run is in its folder")
    choose, ranks = _ranks(args.ranks)
    run_dir = locate_run(args.path, prefer_live=not args.list)
    if args.list:
        return _list(run_dir)
    _check(run_dir)
    request = CaptureRequest(
        id="",
        wall_ns=wall_ns(),
        choose=choose,
        ranks=ranks,
        steps=args.steps or CAPTURE_STEPS,
        memory=args.memory,
        stacks=args.stacks,
        shapes=args.shapes,
        by=user_name(os.environ),
    )
    request = request_capture(run_dir, request)
    with _awake_hub(run_dir), _progress() as show:
        record = _follow(run_dir, request.id, args.wait, show)
    if args.json:
        print(json.dumps({"schema": 1, **encoded(record)}, indent=2))
    elif record.state == "done":
        print(capture_text(run_dir, record))
    if record.state == "failed" and not args.json:
        raise RunError(f"no capture: {printable(record.problem) or 'it failed'}")
    return 0 if record.state == "done" else RunError.exit_code


def _capture_processes(args: argparse.Namespace) -> int:
    wrong = {
        "a run": (args.path, "name the run, or its processes"),
        "--ranks": (args.ranks != "worst", "name each process with a --pid of its own"),
        "--memory": (args.memory, "allocations are recorded in captures of a run only"),
        "--list": (args.list, "it lists the captures of a run; those of processes are where --output puts them"),
    }
    for name, (given, why) in wrong.items():
        if given:
            raise UsageError(f"--pid and {name} exclude each other: {why}")
    return run_process_capture(
        args.pid,
        ms=args.ms,
        steps=args.steps,
        stacks=args.stacks,
        shapes=args.shapes,
        output=args.output,
        as_json=args.json,
    )


def _ranks(text: str) -> tuple[RankChoice, tuple[int, ...]]:
    if text == "worst":
        return "worst", ()
    if text == "all":
        return "all", ()
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 8 for word in words):
        raise UsageError(f"--ranks: numbers separated by commas, `worst` or `all`, not {text!r}")
    return "listed", tuple(int(word) for word in words)


def _check(run_dir: Path) -> None:
    """RunError if no hub would answer a request."""
    meta = read_meta(run_dir)
    if _over(run_dir, meta):
        raise RunError(f"{run_dir} has ended; a capture needs a running job (--list shows those that it has)")
    hub = meta.get("hub")
    if isinstance(hub, dict) and hub.get("node"):
        raise RunError(f"{run_dir} is only the part of node {hub['node']}; run this on node 0, or use the page")
    if read_hub_file(run_dir) is None:
        raise RunError(f"{run_dir} is recorded without a hub (--no-hub), which orders captures; --profile needs none")
    active = next((record for record in read_captures(run_dir) if _is_active(record)), None)
    if active is not None:
        raise RunError(f"another capture of {run_dir} is in progress ({active.order.id}); wait until it is over")


@contextmanager
def _awake_hub(run_dir: Path) -> Iterator[None]:
    """The hub of a young run on one node starts when someone connects; later it runs anyway."""
    hub, created_ns = read_hub_file(run_dir), read_meta(run_dir).get("created_wall_ns")
    connection = None
    if hub is not None and isinstance(created_ns, int) and wall_ns() - created_ns < YOUNG_S * 1e9:
        where = urlsplit(hub.url)
        with suppress(OSError, ValueError):
            connection = socket.create_connection((str(where.hostname), where.port or 0), timeout=CONNECT_S)
    try:
        yield
    finally:
        if connection is not None:
            connection.close()


def _is_active(record: CaptureRecord) -> bool:
    return record.state in ("ordered", "profiling", "delivering") and record.reason in ("request", "finding")


def _over(run_dir: Path, meta: dict[str, Any]) -> bool:
    return meta.get("end") is not None or not processes_alive(run_dir)


# -- progress ---------------------------------------------------------------------------------------------------------


def _follow(run_dir: Path, request: str, wait_s: float, show: Callable[[str], None]) -> CaptureRecord:
    """Wait until the capture is over; RunError if nothing happens for ``wait_s``, or the run ends."""
    changed_s = checked_s = time.monotonic()
    record: CaptureRecord | None = None
    ended = False
    while True:
        before, record = record, _record_of(run_dir, request, record)
        now_s = time.monotonic()
        if record is not None and record.state in ("done", "failed"):
            return record
        if record is not None and (before is None or before.state != record.state):
            changed_s, ended = now_s, False
        show(_doing(record))
        most_s = min(wait_s, FIRST_ANSWER_S) if record is None else wait_s
        if now_s - changed_s >= most_s:
            raise RunError(f"nothing happened for {duration_text(most_s, whole=True)}: {_unfinished(run_dir, record)}")
        if now_s - checked_s >= CHECK_S:
            checked_s = now_s
            if ended and (read_hub_file(run_dir) is None or now_s - changed_s >= LAST_S):
                record = _record_of(run_dir, request, record)
                if record is not None:
                    return left_behind(record)
                raise RunError("the run ended before the capture was complete")
            if not ended and _over(run_dir, read_meta(run_dir)):
                ended, changed_s = True, now_s  # its hub may be about to complete the record
        time.sleep(EVERY_S)


def _unfinished(run_dir: Path, record: CaptureRecord | None) -> str:
    if record is None:
        return "the run's hub did not take the request"
    later = (
        f"it begins when its ranks reach step {record.order.at_step}" if record.state == "ordered" else "it continues"
    )
    return (
        f"the capture is still {record.state} ({later}); "
        f"`stepscope capture {shlex.quote(str(run_dir))} --list` shows when it is done"
    )


def _record_of(run_dir: Path, request: str, record: CaptureRecord | None) -> CaptureRecord | None:
    if record is not None:
        return read_capture(run_dir, record.order.id) or record
    return next((found for found in reversed(read_captures(run_dir)) if found.request == request), None)


def _doing(record: CaptureRecord | None) -> str:
    if record is None:
        return "requesting"
    order = record.order
    steps, whose = _steps(record), ranks_text(order.ranks)
    if record.state == "ordered":
        return f"ordered: {steps} of {whose}"
    if record.state == "profiling":
        return f"profiling {steps} of {whose}"
    return "delivering the traces" if record.state == "delivering" else "analyzing the traces"


def _steps(record: CaptureRecord) -> str:
    first = [report.first_step for report in record.reports if report.first_step >= 0]
    last = [report.last_step for report in record.reports if report.last_step >= 0]
    begin = min(first, default=record.order.at_step)
    end = max(last, default=record.order.at_step + record.order.steps - 1)
    return f"step {begin}" if begin == end else f"steps {begin} to {end}"


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """One line on a terminal, overwritten and removed at the end."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    began_s = time.monotonic()

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text} … {time.monotonic() - began_s:.0f} s")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


# -- text -------------------------------------------------------------------------------------------------------------


def capture_text(run_dir: Path, record: CaptureRecord) -> str:
    """What a capture found, for the terminal."""
    lines = [record.verdict or "The traces show nothing unusual."]
    texts = [difference.text for difference in (*record.differences, *record.changes)]
    lines += [f"  {text}" for text in texts if text != record.verdict]
    titles = [str(finding.get("title", "")) for finding in record.findings]
    lines += [f"  {title}" for title in titles if title and title != record.verdict]
    usual_ms, step_ms = (record.figures.get(name) for name in ("usual_step_ms", "step_ms"))
    cost = ""
    if isinstance(usual_ms, int | float) and isinstance(step_ms, int | float):
        cost = f"; a step took {step_ms:.1f} ms instead of {usual_ms:.1f} ms"
    about = f"{_steps(record)} of {ranks_text(record.order.ranks)}, {bytes_text(record.size_bytes)}{cost}"
    lines += [about[:1].upper() + about[1:]]
    lines += [f"Rank {report.rank}: {report.problem}" for report in record.reports if report.problem]
    if record.problem:
        lines.append(record.problem)
    lines.append(str(capture_folder(run_dir, record.order.id)))
    return "\n".join(printable(line) for line in lines)


def _list(run_dir: Path) -> int:
    records = read_captures(run_dir)
    if _over(run_dir, read_meta(run_dir)):
        records = tuple(map(left_behind, records))
    if not records:
        print(f"no captures in {run_dir / CAPTURES}")
        return 0
    rows = [
        [
            record.order.id,
            record.reason if not record.finding else f"{record.reason}: {record.finding}",
            ",".join(map(str, record.order.ranks[:8])) + ("…" if len(record.order.ranks) > 8 else ""),
            bytes_text(record.size_bytes) if record.size_bytes else "",
            record.state,
            record.verdict or record.problem,
        ]
        for record in reversed(records[-MOST_LISTED:])
    ]
    print(
        format_table(["capture", "why", "ranks", "size", "state", "verdict"], [[printable(c) for c in r] for r in rows])
    )
    return 0
