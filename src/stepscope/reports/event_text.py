"""Events in words: a sentence, a severity and a category for every kind that agents, hubs and the store write.

``event_document`` adds them to an event when the hub serves it, so page and terminal say the same, also about runs of
earlier versions.  Events may come from another version or from anyone: fields may be missing or of another type.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.flight.wording import spans_text, steps_text
from stepscope.hangs.report import past_title
from stepscope.records.finding import SEVERITIES, Severity
from stepscope.records.text import bytes_text, count_text, duration_text, ns_text
from stepscope.reports.evidence_text import flat_text, key_name

__all__ = ["EVENT_KINDS", "event_document", "exit_text", "rank_state_text"]

Event = Mapping[str, Any]


@dataclass(frozen=True)
class EventKind:
    category: str
    """Its name in a filter."""
    severity: Severity
    sentence: Callable[[Event], str]


def event_document(event: Event, *, over: bool) -> dict[str, Any]:
    """The event with ``text``, ``severity`` and ``category``. ``over``: whether the run is over.

    ``text_of_ranks``, for starts and ends of ranks: how the sentence continues after several of them.
    """
    kind = EVENT_KINDS.get(str(event.get("event")))
    found: dict[str, Any] = {
        "text": _sentence_of(event, kind, over=over),
        "severity": _severity_of(event, kind),
        "category": kind.category if kind else key_name(str(event.get("event", ""))),
    }
    if event.get("event") == "rank_start":
        found["text_of_ranks"] = "started."
    elif event.get("event") == "rank_end":
        found["text_of_ranks"] = f"{_ranks_ended(event)}."
    return {**event, **found}


def exit_text(code: int) -> str:
    """``ended by SIGKILL``, ``exit code 3``."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"


def rank_state_text(state: str) -> str:
    """``exited normally``, ``vanished``."""
    return _RANK_ENDS.get(state, state or "ended")


def _sentence_of(event: Event, kind: EventKind | None, *, over: bool) -> str:
    if kind is None:
        rest = flat_text({key: value for key, value in event.items() if key not in _COMMON})
        return f"{_capital(key_name(_text(event, 'event'))) or 'Something'}{f': {rest}' if rest else '.'}"
    if event["event"] == "hang" and over:
        return f"The job hung{_in_steps(event)}. {past_title(_text(event, 'kind'), _text(event, 'title'))}".rstrip()
    return kind.sentence(event)


def _severity_of(event: Event, kind: EventKind | None) -> Severity:
    if kind is None:
        return "info"
    if event["event"] == "rank_end":
        return "info" if event.get("state") == "exited" and event.get("oom_kill") is not True else "critical"
    if event["event"] == "node_bye" and _end_status(event) not in ("", "finished", "orphaned"):
        return "warning"
    if event["event"] == "capture_rank":
        return "warning" if event.get("state") == "failed" else "info"
    if event["event"] == "finding_changed":
        return next((severity for severity in SEVERITIES if severity == event.get("severity")), kind.severity)
    return kind.severity


# -- parts of sentences -----------------------------------------------------------------------------------------------

_COMMON = ("number", "node", "wall_ns", "event", "schema")
_RANK_ENDS = {
    "exited": "exited normally",
    "exception": "ended with an exception",
    "vanished": "vanished",
    "running": "was still running when last seen",
}
_KILLED = "was killed by the kernel (out of memory)"
_REFUSALS = {"key": "a different key", "token": "a wrong token"}


def _text(event: Any, key: str) -> str:
    value = event.get(key) if isinstance(event, Mapping) else None
    return value if isinstance(value, str) else ""


def _number(event: Event, key: str) -> float | None:
    value = event.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 else None


def _rank(event: Event) -> str:
    return f"Rank {event['rank'] if type(event.get('rank')) is int else '?'}"


def _node(event: Event) -> str:
    return f"Node {event.get('node', '?')}{f' ({host})' if (host := _text(event, 'host')) else ''}"


def _on(event: Event) -> str:
    return f" on {host}" if (host := _text(event, "host")) else ""


def _in_step(event: Event) -> str:
    return f" in step {event['step']:,}" if type(event.get("step")) is int else ""


def _in_steps(event: Event) -> str:
    steps = event.get("steps")
    known = isinstance(steps, list | tuple) and len(steps) == 2 and all(type(step) is int for step in steps)
    return f" in {steps_text(*steps)}" if known and steps else ""


def _seconds(event: Event, key: str) -> str:
    seconds = _number(event, key)
    return "some time" if seconds is None else duration_text(seconds, whole=True)


def _rank_end(event: Event) -> str:
    how = _KILLED if event.get("oom_kill") is True else rank_state_text(_text(event, "state"))
    collective = event.get("collective")
    call = f"; its last call was {_text(collective, 'op') or 'a collective'}" if isinstance(collective, Mapping) else ""
    return f"{_rank(event)} {how}{_on(event)}{call}."


def _ranks_ended(event: Event) -> str:
    how = _KILLED if event.get("oom_kill") is True else rank_state_text(_text(event, "state"))
    return f"were{how.removeprefix('was')}" if how.startswith("was ") else how


def _end_status(event: Event) -> str:
    return _text(event.get("end"), "status")


def _end(event: Event) -> str:
    status, end = _end_status(event), event.get("end")
    code = end.get("exit_code") if isinstance(end, Mapping) else None
    if not status:
        return ""
    if type(code) is not int or not code:
        return f": {status}"
    # Do not call it a failure or a crash: the run's own status decides that from more than the exit code.
    return f": {exit_text(code)}" if status == "failed" and code > 0 else f": {status}, {exit_text(code)}"


def _absent(event: Event) -> str:
    found = event.get("nodes")
    nodes = sorted({node for node in found if type(node) is int}) if isinstance(found, list | tuple) else []
    return f"Not connected yet: node{'' if len(nodes) == 1 else 's'} {spans_text(nodes)}."


def _clock_skew(event: Event) -> str:
    node, offset_ns = _node(event).replace("Node", "node", 1), _number(event, "offset_ns")
    if offset_ns is None:
        return f"The clock of {node} is off; times are corrected."
    way = "behind" if offset_ns < 0 else "ahead"
    return f"The clock of {node} is {ns_text(abs(offset_ns))} {way}; times are corrected."


def _refused(event: Event) -> str:
    why = _text(event, "why") or _refusal(_text(event, "reason"))
    return f"A connection from {_text(event, 'source') or 'an unknown address'} was rejected: {why}."


def _refusals(event: Event) -> str:
    count = event["count"] if type(event.get("count")) is int else 0
    return f"Rejected for {_refusal(_text(event, 'reason'))}: {count_text(count, 'time')} so far."


def _refused_in_all(event: Event) -> str:
    counts = event.get("counts")
    parts = [f"{_refusal(str(why))} {times}×" for why, times in counts.items()] if isinstance(counts, Mapping) else []
    return f"Rejected in total: {', '.join(parts) or 'some'}."


def _refusal(reason: str) -> str:
    return _REFUSALS.get(reason, key_name(reason) if reason else "an unknown reason")


def _on_hang_end(event: Event) -> str:
    code = event.get("exit_code")
    return f"The --on-hang command ended{f', {exit_text(code)}' if type(code) is int else ''}."


def _context(event: Event) -> str:
    git = event.get("git")
    if not isinstance(git, Mapping):
        return "The code is not in a git repository."
    return f"The code is at commit {_text(git, 'commit')[:10]}{', with changes' if git.get('dirty') is True else ''}."


def _capture_rank(event: Event) -> str:
    if event.get("state") == "failed":
        problem = _text(event, "problem").strip() or "It failed."
        return f"The capture {_text(event, 'capture')} has no trace of {_rank(event).lower()}. {_capital(problem)}"
    first, last, size = (_number(event, name) for name in ("first_step", "last_step", "file_bytes"))
    steps = f"{steps_text(int(first), int(last))} of " if first is not None and last is not None and first >= 0 else ""
    how_much = f", {bytes_text(int(size))}" if size else ""
    return f"Captured {steps}{_rank(event).lower()}{how_much}."


def _warning(event: Event) -> str:
    text = _capital(_text(event, "message").strip())
    return text if text.endswith((".", "!", "?", "…")) else f"{text or 'A warning without text'}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# -- kinds ------------------------------------------------------------------------------------------------------------

EVENT_KINDS: Mapping[str, EventKind] = {
    "agent_start": EventKind("recording", "info", lambda event: f"Recording started{_on(event)}."),
    "agent_end": EventKind("recording", "info", lambda event: f"Recording ended{_on(event)}{_end(event)}."),
    "context": EventKind("recording", "info", _context),
    "hub_start": EventKind("hub", "info", lambda event: "The job's hub started."),
    "hub_lost": EventKind(
        "hub",
        "warning",
        lambda event: f"The hub cannot be reached: {_text(event, 'why') or 'it does not answer'}. Recording continues.",
    ),
    "hub_found": EventKind(
        "hub", "info", lambda event: f"The hub is reachable again after {_seconds(event, 'away_s')}."
    ),
    "hub_refused": EventKind(
        "hub", "critical", lambda event: f"The hub rejected this node: {_text(event, 'why') or 'no reason given'}."
    ),
    "node_joined": EventKind(
        "nodes", "info", lambda event: f"{_node(event)} joined{', late' if event.get('late') is True else ''}."
    ),
    "node_replaced": EventKind(
        "nodes", "warning", lambda event: f"{_node(event)} replaced {_text(event, 'before') or 'another'}."
    ),
    "node_absent": EventKind("nodes", "warning", _absent),
    "node_lost": EventKind(
        "nodes", "critical", lambda event: f"{_node(event)} has been silent for {_seconds(event, 'silent_s')}."
    ),
    "node_back": EventKind(
        "nodes", "info", lambda event: f"{_node(event)} is back after {_seconds(event, 'silent_s')}."
    ),
    "node_bye": EventKind("nodes", "info", lambda event: f"{_node(event)} ended{_end(event)}."),
    "clock_skew": EventKind("nodes", "warning", _clock_skew),
    "refused": EventKind("refused", "warning", _refused),
    "refusals": EventKind("refused", "warning", _refusals),
    "refused_in_all": EventKind("refused", "info", _refused_in_all),
    "rank_start": EventKind("ranks", "info", lambda event: f"{_rank(event)} started{_on(event)}."),
    "rank_end": EventKind("ranks", "critical", _rank_end),
    "hang": EventKind(
        "hangs", "critical", lambda event: f"The job hangs{_in_steps(event)}. {_text(event, 'title')}".rstrip()
    ),
    "hang_over": EventKind(
        "hangs", "warning", lambda event: f"The job continues after a hang of {_seconds(event, 'seconds')}."
    ),
    "not_a_hang": EventKind(
        "hangs", "info", lambda event: f"No progress for a while, but no hang: {_text(event, 'reason')}"
    ),
    "on_hang": EventKind(
        "hangs",
        "warning",
        lambda event: f"Because of the hang, Stepscope {_text(event, 'action') or 'acted as configured'}.",
    ),
    "on_hang_end": EventKind("hangs", "info", _on_hang_end),
    "probes": EventKind(
        "network",
        "info",
        lambda event: (
            _text(event, "message") or f"Ignored packets on the probe port: {flat_text(event.get('ignored'))}."
        ),
    ),
    "warning": EventKind("warnings", "warning", _warning),
    "capture_rank": EventKind("captures", "info", _capture_rank),
    "note": EventKind(
        "notes", "info", lambda event: f"{_rank(event)} noted{_in_step(event)}: {flat_text(event.get('values'))}"
    ),
    "finding_opened": EventKind(
        "findings", "critical", lambda event: f"Found{_in_step(event)}: {_text(event, 'title')}"
    ),
    "finding_changed": EventKind(
        "findings", "info", lambda event: f"Less severe{_in_step(event)}: {_text(event, 'title')}"
    ),
    "finding_resolved": EventKind(
        "findings", "info", lambda event: f"No longer found{_in_step(event)}: {_text(event, 'title')}"
    ),
}
