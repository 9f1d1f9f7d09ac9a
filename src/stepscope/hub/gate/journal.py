"""What the hub itself has to say of a run, as events: nodes that come, go and come back, clocks, what was refused.

A file of its own beside what the nodes sent, since ``events.jsonl`` is the agent's.  What the disk refuses waits here,
within bounds, and is tried again; the live model hears of it at once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from stepscope.records import run_clock
from stepscope.records.messages import say
from stepscope.store.jsonl import append_jsonl
from stepscope.store.paths import EVENTS, HUB_EVENTS

__all__ = ["HubJournal", "LineSink"]

_WAITING: Final = 2000
_NODE: Final = "0"


class LineSink(Protocol):
    """``LiveRun``, as far as lines go."""

    def lines(self, file: str, lines: Sequence[bytes], *, node: str, offset_ns: int) -> None: ...


class HubJournal:
    def __init__(self, run_dir: Path, live: LineSink, *, wall: Callable[[], int] = run_clock.wall_ns) -> None:
        self.run_dir = run_dir
        self._path = run_dir / HUB_EVENTS
        self._live = live
        self._wall = wall
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_WAITING)
        self._full = False

    def event(self, event: str, **fields: Any) -> None:
        if line := _line(event, fields):
            say(line)
        record = {"schema": 1, "wall_ns": self._wall(), "event": event, **fields}
        self._waiting.append(record)
        self._live.lines(EVENTS, [json.dumps(record).encode()], node=_NODE, offset_ns=0)

    def flush(self) -> None:
        """Write what waits, if that can be."""
        if not self._waiting:
            return
        try:
            append_jsonl(self._path, self._waiting)
        except OSError as error:
            self.refused(error)
            return
        self._waiting.clear()

    def refused(self, error: OSError) -> None:
        """The disk takes nothing: told once, until it does again."""
        if self._full:
            return
        self._full = True
        message = f"the hub cannot write to {self._path.parent}: {error.strerror}"
        self.event("warning", message=message)
        say(f"{message}; the other nodes keep what they have")

    def accepted(self) -> None:
        """A frame was written."""
        if self._full:
            self._full = False
            self.event("warning", message=f"the hub can write to {self._path.parent} again")


def _line(event: str, fields: Mapping[str, Any]) -> str:
    """What whoever sits at node 0 should know while the job runs; empty: it can wait for the summary."""
    who = f"node {fields.get('node')} ({fields.get('host')})"
    if event == "node_lost":
        return f"{who} has not been heard of for {fields['silent_s']:.0f} s"
    if event == "node_back":
        return f"{who} is back"
    if event == "node_absent":
        numbers = ", ".join(str(number) for number in fields["nodes"][:8])
        return f"not yet heard of: node {numbers}{' …' if len(fields['nodes']) > 8 else ''}; waiting for it"
    if event == "node_bye" and (end := fields["end"]).get("status") not in ("finished", "orphaned", None):
        return f"{who} ended: {end['status']} (exit code {end.get('exit_code')})"
    if event == "refused" and fields["reason"] == "key":
        return f"{fields['source']} wants to join and has another key; see docs/multi-node.md"
    return ""
