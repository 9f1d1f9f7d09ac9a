"""A finished run in the model of a live run, so that one code path serves both.

The step table of the run fills the model's arrays; if the whole run fits into the memory limit, every step of every
rank is kept.  Events, samples and stacks stay the records that were loaded.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.diagnosis.engine.window import last_attempt
from stepscope.errors import RunError
from stepscope.hub.live.digests import LOG_ROOM, DigestLog
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.step_arrays import Planes
from stepscope.hub.open_run import FIRST_S
from stepscope.records.series import NOTED, SEEN_EVENT, RunData, noted_numbers
from stepscope.store.paths import EVENTS, SAMPLES, STACKS

__all__ = ["bring_samples", "past_run"]

PLANE_BYTES = 96 << 20
"""Memory for the steps of one finished run; steps that do not fit are kept in bins."""
KEPT_STEPS = 1 << 20
LEAST_STEPS = 256
"""Steps to make room for if a run is shorter."""
LEAST_ROOM = 64
"""Bins to make room for if a run is shorter: the log cannot fold fewer."""


def past_run(data: RunData, nodes: Mapping[str, str] | None = None, *, log_room: int = LOG_ROOM) -> LiveRun:
    """Put a finished run into the model.  ``nodes``: the node name by host during the run; the default is the host.

    ``log_room``: bins in the log of digests.
    """
    nodes = {} if nodes is None else nodes
    current = last_attempt(data.ranks)
    recorded = [series.steps["step"] for series in current if len(series.steps)]
    newest = max((int(steps[-1]) for steps in recorded), default=0)
    oldest = min((int(steps[0]) for steps in recorded), default=0)
    steps = max(LEAST_STEPS, min(newest + 1, KEPT_STEPS))
    planes = Planes(budget_bytes=PLANE_BYTES, most_steps=steps, room=max(1, len(current)))
    # A short run gets only the room it can use: its report is made while the job is ending.
    room = min(log_room, max(LEAST_ROOM, newest + 1))
    digests = DigestLog(room, steps_per_bin=_steps_per_bin(newest - oldest + 1, room))
    live = LiveRun(name=data.name, meta=data.meta, planes=planes, digests=digests)
    live.received.most_of_node = sys.maxsize  # they are already thinned, evenly
    live.take_series(sorted(data.ranks, key=lambda series: (series.identity.attempt, series.rank)), nodes)
    pids = {series.identity.pid for series in current}
    for event in data.events:
        if event.get("event") in NOTED and event.get("pid") in pids and type(event.get("step")) is int:
            live.noted.add(event["step"], noted_numbers(event), seen=event["event"] == SEEN_EVENT)
    happened = [event for event in data.events if event.get("event") != SEEN_EVENT]
    for file, records in ((EVENTS, happened), (SAMPLES, data.samples), (STACKS, data.stacks)):
        for node, own in _by_node(live, records, nodes).items():
            live.received.put_records(file, own, node=node)
    live.tick()
    return live


def _steps_per_bin(steps: int, room: int) -> int:
    """Return a power of two; what still does not fit is folded, and the newest steps stay in bins of this size."""
    found = 1
    while steps > 2 * room * found:
        found *= 2
    return found


def _by_node(
    live: LiveRun, records: Sequence[dict[str, Any]], nodes: Mapping[str, str]
) -> dict[str, list[dict[str, Any]]]:
    by_node: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        host = str(record.get("node") or record.get("host") or live.meta.get("host") or "")
        by_node.setdefault(nodes.get(host, host), []).append(record)
    return by_node


# -- deferred samples -------------------------------------------------------------------------------------------------
# The samples of a finished run are loaded last, when the page is already drawn: at the first request for samples, which
# waits (``OpenRun.sampled``), or after two seconds.  A night of a large job has hundreds of thousands, and the stored
# verdict, the steps and the map do not need them.

SAMPLES_AT_ONCE = 5_000
"""Lines to put in before other tasks get a turn."""


async def bring_samples(path: Path, live: LiveRun, nodes: Mapping[str, str], requested: asyncio.Event) -> None:
    """Read the samples in a thread and put them in, when they are requested; ``nodes`` as in ``past_run``.

    They stay open with the run, so they are kept as lines, which take a third of the memory of records.
    """
    await asyncio.wait((waiting := asyncio.ensure_future(requested.wait()),), timeout=FIRST_S)
    waiting.cancel()
    try:
        by_node = await asyncio.to_thread(_read_samples, path, live, nodes)
    except (RunError, OSError):
        return  # removed or damaged meanwhile: the next request for the run reports it
    for node, lines in by_node.items():
        for first in range(0, len(lines), SAMPLES_AT_ONCE):
            live.lines(SAMPLES, lines[first : first + SAMPLES_AT_ONCE], node=node, offset_ns=0)
            await asyncio.sleep(0)


def _read_samples(path: Path, live: LiveRun, nodes: Mapping[str, str]) -> dict[str, list[bytes]]:
    from stepscope.store.sealed.samples import sealed_samples  # loads DuckDB, which hubs of live runs do not need

    encode = msgspec.json.Encoder().encode_lines
    return {node: encode(own).splitlines() for node, own in _by_node(live, sealed_samples(path), nodes).items()}
