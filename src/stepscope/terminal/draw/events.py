"""What happened: the newest of it on one line, or as many of the newest as there is room for."""

from __future__ import annotations

import time

from rich.text import Text

from stepscope.terminal.documents import Event
from stepscope.terminal.draw.event_words import event_words, severity_of
from stepscope.terminal.snapshot import Snapshot
from stepscope.terminal.text import columns, fit

__all__ = ["draw_event_line", "draw_events"]

LABEL = 8
_STYLES = {"critical": "bold red", "warning": "yellow"}


def draw_event_line(known: Snapshot, width: int) -> Text:
    """The newest; while something is wrong with the connection, what that is."""
    if known.link in ("lost", "refused", "missing") and known.run is not None:
        return columns([(fit("hub", LABEL), "dim"), (known.why, "bold yellow")], width)
    if not known.events:
        return columns([(fit("event", LABEL), "dim"), ("none" if known.over else "none yet", "dim")], width)
    event = known.events[-1]
    return columns(
        [(fit("event", LABEL), "dim"), (f"{_clock(event)}  ", "dim"), (event_words(event), _style(event))], width
    )


def draw_events(known: Snapshot, width: int, height: int) -> list[Text]:
    """The newest at the top."""
    head = f"events · {len(known.events)} newest" if known.events else "events · none"
    shown = list(reversed(known.events))[: max(0, height - 1)]
    lines = [columns([(f"{_clock(event)}  ", "dim"), (event_words(event), _style(event))], width) for event in shown]
    return [columns([(head, "dim")], width), *lines]


def _style(event: Event) -> str:
    return _STYLES.get(severity_of(event), "")


def _clock(event: Event) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(event.wall_ns / 1e9))
    except (OverflowError, OSError, ValueError):
        return "--:--:--"
