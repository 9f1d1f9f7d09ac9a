"""Events and findings in words, a sentence or a line each: for the screen, the plain view and report --follow.

The sentences and the severity of events are the same as on the page (``web/src/words/events.ts``). Pure.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from stepscope.flight.wording import steps_text
from stepscope.hangs.report import past_title
from stepscope.records.text import count_text, duration_text, printable
from stepscope.reports.layout import MARKS
from stepscope.terminal.documents import Event

__all__ = ["EVENT_KINDS", "event_words", "finding_line", "news_line", "severity_of"]


# -- events -----------------------------------------------------------------------------------------------------------

_RANK_ENDS = {
    "exited": "exited normally",
    "exception": "ended with an exception",
    "vanished": "vanished",
    "running": "was still running when last seen",
}
_REFUSALS = {"key": "a different key", "token": "a wrong token"}


def event_words(event: Event, *, over: bool = False) -> str:
    """An event in words. ``over``: whether the run is over, so that a hang is described in the past tense."""
    if event.event == "hang" and over:
        return f"The job hung{_in_steps(event)}. {past_title(str(event.kind), event.title)}".rstrip()
    if event.event in EVENT_KINDS:
        return EVENT_KINDS[event.event][1](event)
    said = event.message or event.title or event.reason or event.why or event.action
    name = event.event.replace("_", " ").strip()
    return f"{_capital(name) or 'Something'}{f': {said}' if said else ''}{_rank_or_host(event)}{'' if said else '.'}"


def severity_of(event: Event) -> str:
    if event.event == "rank_end":
        return "info" if event.state == "exited" and not event.oom_kill else "critical"
    if event.event == "node_bye":
        return "warning" if _said(_in(event.end, "status")) not in ("", "finished", "orphaned") else "info"
    return EVENT_KINDS[event.event][0] if event.event in EVENT_KINDS else "info"


def _rank(event: Event) -> str:
    return f"Rank {event.rank if event.rank is not None else '?'}"


def _node(event: Event) -> str:
    return f"Node {event.node}{f' ({event.host})' if event.host else ''}"


def _on(event: Event) -> str:
    return f" on {event.host}" if event.host else ""


def _rank_or_host(event: Event) -> str:
    return f" (rank {event.rank})" if event.rank is not None else _on(event)


def _rank_end(event: Event) -> str:
    how = _RANK_ENDS.get(event.state, event.state or "ended")
    how = "was killed by the kernel (out of memory)" if event.oom_kill else how
    call = f"; its last call was {_in(event.collective, 'op') or 'a collective'}" if event.collective else ""
    return f"{_rank(event)} {how}{_on(event)}{call}."


def _end(event: Event) -> str:
    status, code = _said(_in(event.end, "status")), _in(event.end, "exit_code")
    if not status:
        return ""
    if not isinstance(code, int) or not code:
        return f": {status}"
    # Do not call it a failure or a crash: the run's own status decides that from more than the exit code.
    return f": {_code(code)}" if status == "failed" and code > 0 else f": {status}, {_code(code)}"


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    known = {one.value: one.name for one in signal.Signals}
    return f"ended by {known.get(-code, f'signal {-code}')}"


def _clock_skew(event: Event) -> str:
    offset_ns = event.offset_ns
    if not isinstance(offset_ns, (int, float)):
        return f"The clock of {_node(event).replace('Node', 'node', 1)} is off; times are corrected."
    way = "behind" if offset_ns < 0 else "ahead"
    much = duration_text(abs(offset_ns) / 1e9)
    return f"The clock of {_node(event).replace('Node', 'node', 1)} is {much} {way}; times are corrected."


def _absent(event: Event) -> str:
    return f"Not connected yet: node{'' if len(event.nodes) == 1 else 's'} {', '.join(map(str, event.nodes))}."


def _in_steps(event: Event) -> str:
    steps = event.steps
    known = isinstance(steps, list) and len(steps) == 2 and all(type(step) is int for step in steps)
    return f" in {steps_text(*steps)}" if known else ""


def _on_hang_end(event: Event) -> str:
    code = event.exit_code
    return f"The --on-hang command ended{f', {_code(code)}' if isinstance(code, int) else ''}."


def _context(event: Event) -> str:
    if not isinstance(event.git, Mapping):
        return "The code is not in a git repository."
    changes = ", with changes" if event.git.get("dirty") is True else ""
    return f"The code is at commit {_said(event.git.get('commit'))[:10]}{changes}."


def _note(event: Event) -> str:
    step = f" in step {event.step}" if isinstance(event.step, int) else ""
    return f"{_rank(event)} noted{step}: {_flat(event.values)}"


def _refused_in_all(event: Event) -> str:
    counts = event.counts if isinstance(event.counts, Mapping) else {}
    said = ", ".join(f"{_refusal(str(why))} {times}×" for why, times in counts.items())
    return f"Rejected in total: {said or 'some'}."


def _refusal(reason: str) -> str:
    return _REFUSALS.get(reason, reason.replace("_", " ") or "an unknown reason")


def _seconds(value: float | None) -> str:
    return duration_text(value, whole=True) if value is not None else "some time"


def _flat(value: Any) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, Mapping) else str(value or "")


def _sentence(text: str) -> str:
    start = _capital(text.strip())
    return start if start.endswith((".", "!", "?", "…")) else f"{start or 'A warning without text'}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _in(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def _said(value: Any) -> str:
    return value if isinstance(value, str) else ""


EVENT_KINDS: Mapping[str, tuple[str, Callable[[Event], str]]] = {
    "agent_start": ("info", lambda event: f"Recording started{_on(event)}."),
    "agent_end": ("info", lambda event: f"Recording ended{_on(event)}{_end(event)}."),
    "hub_start": ("info", lambda event: "The job's hub started."),
    "node_joined": ("info", lambda event: f"{_node(event)} joined{', late' if event.late is True else ''}."),
    "node_replaced": ("warning", lambda event: f"{_node(event)} replaced {_said(event.before) or 'another'}."),
    "node_absent": ("warning", _absent),
    "node_lost": ("critical", lambda event: f"{_node(event)} has been silent for {_seconds(event.silent_s)}."),
    "node_back": ("info", lambda event: f"{_node(event)} is back after {_seconds(event.silent_s)}."),
    "node_bye": ("info", lambda event: f"{_node(event)} ended{_end(event)}."),
    "clock_skew": ("warning", _clock_skew),
    "hub_lost": (
        "warning",
        lambda event: f"The hub cannot be reached: {event.why or 'it does not answer'}. Recording continues.",
    ),
    "hub_found": ("info", lambda event: f"The hub is reachable again after {_seconds(event.away_s)}."),
    "hub_refused": ("critical", lambda event: f"The hub rejected this node: {event.why}."),
    "refused": (
        "warning",
        lambda event: (
            f"A connection from {_said(event.source) or 'an unknown address'} was rejected: "
            f"{event.why or _refusal(event.reason)}."
        ),
    ),
    "refusals": (
        "warning",
        lambda event: (
            f"Rejected for {_refusal(event.reason)}: "
            f"{count_text(event.count if isinstance(event.count, int) else 0, 'time')} so far."
        ),
    ),
    "refused_in_all": ("info", _refused_in_all),
    "rank_start": ("info", lambda event: f"{_rank(event)} started{_on(event)}."),
    "rank_end": ("critical", _rank_end),
    "hang": ("critical", lambda event: f"The job hangs{_in_steps(event)}. {event.title}".rstrip()),
    "hang_over": ("warning", lambda event: f"The job continues after a hang of {_seconds(event.seconds)}."),
    "not_a_hang": ("info", lambda event: f"No progress for a while, but no hang: {event.reason}"),
    "on_hang": ("warning", lambda event: f"Because of the hang, Stepscope {event.action or 'acted as configured'}."),
    "on_hang_end": ("info", _on_hang_end),
    "probes": (
        "info",
        lambda event: event.message or f"Ignored packets on the probe port: {_flat(event.ignored)}.",
    ),
    "context": ("info", _context),
    "warning": ("warning", lambda event: _sentence(event.message)),
    "note": ("info", _note),
}
"""Severity and sentence of each kind; contains every kind that agents, hubs and the store write."""


# -- lines ------------------------------------------------------------------------------------------------------------
# Plain lines about a live run, shared by all commands that follow one.

WITHDRAWN = "○"


def news_line(step: int, words: str, *, wall_s: float | None = None) -> str:
    """``02:14:07  step 1,200   …``."""
    clock = time.strftime("%H:%M:%S", time.localtime(wall_s))
    return f"{clock}  step {max(step, 0):<7,} {printable(words)}"


def finding_line(step: int, severity: str, title: str, *, withdrawn: bool = False, wall_s: float | None = None) -> str:
    mark = WITHDRAWN if withdrawn else MARKS.get(severity, MARKS["info"])
    return news_line(step, f"{mark} {'no longer: ' if withdrawn else ''}{title}", wall_s=wall_s)
