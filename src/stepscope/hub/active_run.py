"""Models of a run that is still recorded, read from its files.

All steps of a day take many seconds to read.  Clients first get a model of the last steps (``recent_run``); all of them
are read into another model, in a thread, which then takes its place (``whole_run``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.open_run import FIRST_S, OpenRun, Poll
from stepscope.store.paths import INBOX

__all__ = ["all_of", "recent_run", "whole_run"]


def recent_run(path: Path, meta: Mapping[str, Any]) -> tuple[LiveRun, Poll] | None:
    """Return a model with the last steps of a long run on one node, and its poll; None for other runs."""
    from stepscope.hub.ingest.tail import Tail, is_long
    from stepscope.hub.live.rules import catch_up

    if (path / INBOX).exists() or not is_long(path):
        return None
    live = LiveRun(name=path.name, run_dir=path, meta=meta)
    live.partial = True
    poll = Tail(path, live, recent=True).poll
    catch_up(live, poll)
    return live, poll


async def whole_run(run: OpenRun, *, after_s: float = FIRST_S) -> tuple[LiveRun, Poll]:
    """Read all steps of an active run; then its model is the run's, and polled from there on."""
    stop = threading.Event()
    await asyncio.sleep(after_s)
    try:
        live, poll = await asyncio.to_thread(_read_all, run.path, run.live.meta, stop)
    finally:
        stop.set()  # a thread cannot be canceled
    run.live = live
    if run.poll is not None:
        run.poll = poll
    return live, poll


def _read_all(path: Path, meta: Mapping[str, Any], stop: threading.Event) -> tuple[LiveRun, Poll]:
    from stepscope.hub.live.rules import catch_up

    live, poll = all_of(path, meta)
    catch_up(live, poll, stop)
    return live, poll


def all_of(path: Path, meta: Mapping[str, Any]) -> tuple[LiveRun, Poll]:
    live = LiveRun(name=path.name, run_dir=path, meta=meta)
    return live, _poll_of(path, live)


def _poll_of(path: Path, live: LiveRun) -> Poll:
    """Poll what this node writes and, in a job with several nodes, what the others send."""
    # Imported here: writing report.html during a job does not need them, and memory is scarce.
    from stepscope.hub.ingest.tail import InboxTail, Tail

    here, others = Tail(path, live), InboxTail(path, live)
    return lambda: (here.poll(), others.poll())
