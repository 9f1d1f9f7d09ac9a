"""``stepscope trace --watch``: one verdict per recording that arrives in a folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError, UsageError
from stepscope.records.text import count_text, printable, say

if TYPE_CHECKING:
    from stepscope.traces.arrivals import Recording
    from stepscope.traces.engine import Options

__all__ = ["POLL_S", "watch_folder"]

POLL_S = 2.0


def watch_folder(
    folder: Path,
    options: Options,
    *,
    as_json: bool = False,
    wait: Callable[[], None] = lambda: time.sleep(POLL_S),
    clock: Callable[[], float] = time.monotonic,
    settle_s: float | None = None,
) -> int:
    """Analyze recordings as they arrive until interrupted; ``wait`` passes the time between two looks."""
    from stepscope.traces.arrivals import Arrivals

    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; --watch waits for traces that arrive in one")
    arrivals = Arrivals(folder) if settle_s is None else Arrivals(folder, settle_s=settle_s)
    there = f"; files that are there already ({arrivals.passed_over}) are not analyzed" * bool(arrivals.passed_over)
    say(f"waiting for traces in {folder} (Ctrl-C ends it){there}")
    try:
        while True:
            for recording in arrivals.poll(clock()):
                document = verdict_on(recording, options)
                if document is not None:
                    _print(document, as_json)
            wait()
    except KeyboardInterrupt:
        return 0


def verdict_on(recording: Recording, options: Options) -> dict[str, Any] | None:
    """The outcome of one recording; None if its files are no traces."""
    from stepscope.reports.trace import document_of
    from stepscope.traces.reading.files import may_be_trace
    from stepscope.traces.trace_set import analyze_files

    files = [path for path in recording.files if may_be_trace(path)]
    if not files:
        return None
    about: dict[str, Any] = {"folder": str(recording.folder), "files": [path.name for path in files]}
    try:
        job = analyze_files(files, [], options)
    except StepscopeError as error:
        return {**about, "problem": str(error)}
    document = document_of(job)
    verdict = document["verdict"]
    return {
        **about,
        "problem": None,
        "ranks": [analysis.rank for analysis in job.ranks],
        "steps": document["steps"]["count"],
        "step_ns": document["steps"]["pace_ns"],
        **{key: verdict[key] for key in ("kind", "severity", "title", "price", "advice")},
        "notices": [*([job.mixed] if job.mixed else []), *job.notices],
    }


def _print(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        what = document["files"][0] if len(document["files"]) == 1 else count_text(len(document["files"]), "file")
        text = document["problem"] or f"{document['title']}{' ' + document['price'] if document['price'] else ''}"
        print(printable(f"{document['folder']} ({what}): {text}"))
    sys.stdout.flush()
