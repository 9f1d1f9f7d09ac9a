"""``stepscope report``: the summary of a run, in whatever state it is."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.archive.location import ArchiveUrl
from stepscope.cli.arguments import RUN_OR_URL_HELP, locate_run, run_or_url, whole_number
from stepscope.errors import RunError, TraceError, UsageError
from stepscope.records.redaction import REDACTED
from stepscope.records.text import printable, say
from stepscope.store.documents import read_meta
from stepscope.store.paths import META, REDACTED_FILE, REPORT_FILE

if TYPE_CHECKING:
    from stepscope.reports.run_timeline import RunTimeline
    from stepscope.traces.model.columns import Trace

__all__ = ["EPILOG", "HELP", "add_arguments", "run", "step_range"]

HELP = "show the summary of a run: finished, killed or still running"
EPILOG = """\
examples:
  stepscope report                       the newest run in runs/
  stepscope report runs/NAME             the summary, as at the end of `stepscope run`
  stepscope report runs/NAME --json      the document of summary.json (docs/schema.md)
  stepscope report NAME --command        only the job's command, to paste into a shell
  stepscope report --follow              print findings as they appear, while the run is active
  stepscope report runs/NAME --html      write report.html into the run: its page as a single file
  stepscope report NAME --html a.html    the same, in another file; also for an active run
  stepscope report NAME --html --redact  to share: without hosts, users, paths and values (docs/security.md)
  stepscope report NAME --perfetto a.json.gz --steps 300-500
                                         steps, phases, collectives and findings of all ranks, for ui.perfetto.dev

A finished run is sealed and its summary is saved in it; if the run is not writable, the summary is only shown.
"""
WIDEST = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=run_or_url, nargs="?", help=RUN_OR_URL_HELP)
    parser.add_argument("--json", action="store_true", help="print summary.json instead of text")
    parser.add_argument(
        "--command",
        dest="command_line",
        action="store_true",
        help="print only the job's command, to paste into a shell",
    )
    parser.add_argument("--follow", action="store_true", help="print findings as they appear, while the run is active")
    parser.add_argument(
        "--html",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the page as a single file (default: report.html in the run)",
    )
    parser.add_argument(
        "--redact",
        action="store_true",
        help="replace host names, users, paths, addresses and command-line values in the output and in the page; "
        f"the page contains no logs and is {REDACTED_FILE} in the run unless --html names a file",
    )
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        type=Path,
        help="write the run as a timeline of all ranks (.json.gz), with its captures",
    )
    parser.add_argument(
        "--steps",
        metavar="A-B",
        type=step_range,
        help="its steps (default: 200 around the onset of the leading finding)",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing; still write the files")
    parser.add_argument("--no-color", action="store_true", help="no colors, even on a terminal")


def step_range(text: str) -> tuple[int, int]:
    """Type of ``A-B``, or one step."""
    first, dash, last = text.partition("-")
    low = whole_number(first)
    high = whole_number(last) if dash else low
    if high < low:
        raise argparse.ArgumentTypeError(f"must be A-B with A before B, not {text!r}")
    return low, high


def run(args: argparse.Namespace) -> int:
    # numpy and the store's engine are loaded only now: `stepscope --help` must not wait for them.
    from stepscope.cli.finalize import finalize_run

    color = sys.stdout.isatty() and not args.no_color and not os.environ.get("NO_COLOR")
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST)
    path, html = _paths(args.path, args.html)
    if isinstance(path, ArchiveUrl) and html == "":
        raise UsageError("an archived run does not change; name a file for its page: --html FILE")
    run_dir = locate_run(path)
    if args.steps is not None and args.perfetto is None:
        raise UsageError("--steps is for --perfetto FILE")
    if args.perfetto is not None and args.redact:
        raise UsageError("--perfetto and --redact cannot be used together: a timeline has host names and groups")
    if args.command_line:
        if args.redact:
            raise UsageError(
                "--command and --redact cannot be used together: the command may contain what --redact removes"
            )
        return _print_command(run_dir)
    if args.follow:
        from stepscope.cli.finalize import follow_run

        follow_run(run_dir)
    usual = run_dir / (REDACTED_FILE if args.redact else REPORT_FILE)
    page = None if html is None else Path(html) if html else usual
    summary, text = finalize_run(run_dir, color=color, width=width, quiet=args.quiet, html=page, redact=args.redact)
    if args.perfetto is not None:
        note = write_run_timeline(run_dir, summary, args.perfetto, args.steps)
        if not args.quiet:
            say(f"{args.perfetto}: {note}")
    if args.quiet:
        return 0
    if page is not None:
        say(f"{page}: {page.stat().st_size / 1e6:.1f} MB, opens in any browser")
    if args.redact:
        say("redacted except for exception messages, source lines and names that you chose; read it before you send it")
    print(json.dumps(summary, indent=2, allow_nan=False) if args.json else text, end="" if not args.json else "\n")
    return 0


CLOCKS_APART_NS = 3600 * 10**9
"""A capture of steps that are drawn is not an hour away from them."""


def write_run_timeline(run_dir: Path, summary: Mapping[str, Any], out: Path, steps: tuple[int, int] | None) -> str:
    """Write the run as a timeline, with the traces of captures of these steps; return a sentence about it."""
    from stepscope.records.files import replaced
    from stepscope.reports.run_timeline import run_timeline
    from stepscope.store.load import open_run
    from stepscope.traces.exports import write_run

    try:
        timeline = run_timeline(open_run(run_dir), summary["findings"], steps)
    except ValueError as error:
        raise RunError(f"{run_dir}: no timeline: {error}") from None
    problems: list[str] = []
    traces = _captured(run_dir, timeline, problems)
    try:
        with replaced(out) as spare:
            write_run(timeline.tracks, timeline.hosts, traces, spare, zero_ns=timeline.zero_ns)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
    return " ".join([timeline.note, *problems])


def _captured(run_dir: Path, timeline: RunTimeline, problems: list[str]) -> Iterator[tuple[int, Trace]]:
    """Read the traces of captures of these steps, one by one; the latest of a rank's are enough."""
    from stepscope.records.paths import capture_folder
    from stepscope.store.captures import read_captures, trace_name, trace_sizes
    from stepscope.traces.reading.cache import open_traces

    seen: set[int] = set()
    for record in reversed(read_captures(run_dir)):
        begin = record.order.at_step
        if begin > timeline.last or begin + record.order.steps <= timeline.first:
            continue
        there = trace_sizes(run_dir, record.order.id)
        for rank in sorted(set(timeline.hosts).intersection(record.order.ranks) - seen):
            name = trace_name(rank)
            if name not in there:
                continue
            try:
                (trace, *_) = open_traces(capture_folder(run_dir, record.order.id) / name, None)
            except TraceError as error:
                problems.append(f"Left out: {error}.")
                continue
            seen.add(rank)
            if abs(trace.meta.origin_ns - timeline.start_ns) > CLOCKS_APART_NS:
                problems.append(f"Left out: {name} of {record.order.id}, whose clock is not that of the run.")
                continue
            yield rank, trace


def _print_command(run_dir: Path) -> int:
    command = read_meta(run_dir).get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if not words:
        raise RunError(f"{run_dir} does not contain its command")
    if any(REDACTED in word for word in words):
        say(f"values that may be secrets were not recorded; replace {REDACTED}")
    print(printable(shlex.join(words)))
    return 0


def _paths(path: Path | ArchiveUrl | None, html: str | None) -> tuple[Path | ArchiveUrl | None, str | None]:
    """The run and the file; ``--html RUN`` means the run, since no page is named like one."""
    if html and path is None and (Path(html) / META).is_file():
        return Path(html), ""
    if html and Path(html).is_dir():
        raise UsageError(f"--html {html} is a folder; name a file in it")
    return path, html
