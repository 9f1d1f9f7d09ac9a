"""The timeline of an incident: everything that was recorded with a time, in one order.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stepscope.alerts.model import Incident
from stepscope.incidents.inputs import Inputs, Source, statement
from stepscope.incidents.onset import series_of, steps_file, wall_of_step
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.text import count_text
from stepscope.reports.event_text import event_document
from stepscope.store.paths import EVENTS, FINDING_HISTORY, INCIDENTS, META, OUTBOX, SENT

__all__ = ["MOST_ENTRIES", "timeline_of"]

MOST_ENTRIES = 80
AROUND_NS = 600 * 10**9
"""Events this long before the onset and after the end are listed."""
MOST_CHANGES = 20
"""Of the changes of one kind of record, such as the incident's own: the first and the last of them."""
_QUIET = frozenset(
    {"agent_start", "context", "hub_start", "rank_start", "note", "seen", "refused", "refusals", "refused_in_all"}
    | {"finding_opened", "finding_changed", "finding_resolved"}
)
"""Events that say nothing here, or that the history of findings has in full."""


def timeline_of(inputs: Inputs, signs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Statements with ``wall_ns``, ``what`` (the kind of record), ``severity`` and, where known, ``step``; by time."""
    own = [
        *_run(inputs),
        *({**sign, "what": "first sign", "severity": "info"} for sign in signs if sign.get("wall_ns")),
        *_onset(inputs),
        *_bounded(list(_incident_changes(inputs.changes))),
        *_bounded(list(_finding_changes(inputs.episodes))),
        *_bounded(list(_messages(inputs))),
        *_checkpoints(inputs),
        *_restarts(inputs),
    ]
    events = list(_events(inputs))
    room = max(0, MOST_ENTRIES - len(own))
    center = inputs.onset.wall_ns or 0
    nearest = sorted(events, key=lambda entry: (-_WEIGHT[entry["severity"]], abs(entry["wall_ns"] - center)))[:room]
    # The end of a run may begin and end an incident at one time; changes keep the order of their file.
    ordered = sorted([*own, *nearest], key=lambda entry: (entry["wall_ns"], _PLACE.get(entry["what"], 0)))
    left = len(events) - len(nearest)
    if left:
        last = ordered[-1]["wall_ns"] if ordered else 0
        text = f"{count_text(left, 'further event')} of this time left out here."
        ordered.append(statement(text, Source(file=EVENTS), wall_ns=last, what="event", severity="info"))
    return ordered


_PLACE = {"onset": 1, "finding": 2, "incident": 3, "message": 4}
"""The order of entries of the same time: what happened, what was made of it, who was informed."""
_WEIGHT = {"info": 0, "warning": 1, "critical": 2}


def _run(inputs: Inputs) -> Iterator[dict[str, Any]]:
    created = inputs.run.meta.get("created_wall_ns")
    source = Source(file=META)
    if type(created) is int:
        yield statement("The run began.", source, wall_ns=created, what="run", severity="info")
    if inputs.over and inputs.ended_wall_ns:
        text = f"The run ended: {inputs.status_text}."
        yield statement(text, source, wall_ns=inputs.ended_wall_ns, what="run", severity="info")


def _onset(inputs: Inputs) -> Iterator[dict[str, Any]]:
    onset = inputs.onset
    if onset.wall_ns is None:
        return
    step = "" if onset.step is None else f" in step {onset.step:,}"
    source = Source(file=steps_file(inputs.run)) if onset.by_step else inputs.finding_source
    severity = inputs.incident.severity
    text = f"Onset{step}."
    yield statement(text, source, wall_ns=onset.wall_ns, what="onset", severity=severity, step=onset.step)


def _incident_changes(changes: Sequence[tuple[int, Incident]]) -> Iterator[dict[str, Any]]:
    before: Incident | None = None
    for line, state in changes:
        text = _change_text(before, state)
        before = state
        if text:
            step = state.resolved_step if state.state == "resolved" else state.since_step
            yield statement(
                text,
                Source(file=INCIDENTS, line=line),
                wall_ns=state.changed_wall_ns or state.opened_wall_ns,
                what="incident",
                severity="info" if state.state == "resolved" else state.severity,
                step=step,
            )


def _change_text(before: Incident | None, state: Incident) -> str:
    if before is None:
        return f"The incident was opened: {state.title}"
    if state.state != before.state:
        if state.state == "acknowledged":
            return f"Acknowledged by {state.acknowledged_by or 'someone'}."
        if state.state == "resolved":
            return f"The incident is over{f': {state.resolved_why}' if state.resolved_why else ''}."
        return "The incident was opened again."
    if state.severity != before.severity:
        return f"Severity changed from {before.severity} to {state.severity}: {state.title}"
    if state.title != before.title:
        return f"It is now: {state.title}"
    if state.also != before.also and state.also:
        return f"Also: {state.also[-1]}"
    return ""


def _finding_changes(episodes: Sequence[tuple[int, FindingEpisode]]) -> Iterator[dict[str, Any]]:
    words = {"opened": "First shown", "changed": "Changed", "resolved": "No longer shown"}
    for line, episode in episodes:
        title = str(episode.finding.get("title", ""))
        why = f" ({episode.why})" if episode.why else ""
        severity = str(episode.finding.get("severity"))
        yield statement(
            f"{words[episode.change]}{why}: {title}",
            Source(file=FINDING_HISTORY, line=line),
            wall_ns=episode.wall_ns,
            what="finding",
            severity=severity if episode.change != "resolved" and severity in _WEIGHT else "info",
            step=episode.step,
        )


_STATES = {
    "waiting": "Waits to be sent",
    "sending": "Being sent",
    "sent": "Sent",
    "failed": "Not delivered yet",
    "given_up": "Refused by the receiver",
}


def _messages(inputs: Inputs) -> Iterator[dict[str, Any]]:
    for message, delivery in inputs.deliveries:
        tries = (
            f", {count_text(delivery.tries, 'try' if delivery.tries == 1 else 'trie')}" if delivery.tries > 1 else ""
        )
        why = f": {delivery.why}" if delivery.why else ""
        yield statement(
            f"{_STATES[delivery.state]}: message “{message.status}” to {message.receiver}{tries}{why}.",
            Source(file=OUTBOX if delivery.state == "waiting" else SENT, about=f"message {message.id}"),
            wall_ns=delivery.wall_ns or message.created_wall_ns,
            what="message",
            severity="info" if delivery.state in ("sent", "waiting", "sending") else "warning",
        )


def _checkpoints(inputs: Inputs) -> Iterator[dict[str, Any]]:
    """The last checkpoint before the onset and the first after it, as the steps of the lowest rank that saved show."""
    run, onset = inputs.run, inputs.onset
    if onset.step is None:
        return
    for series in series_of(run, onset.attempt):
        saved = np.asarray(series.steps.phase("checkpoint")) > 0 if len(series.steps) else np.zeros(0, bool)
        steps = [int(step) for step in np.asarray(series.steps["step"])[saved]] if saved.any() else []
        if not steps:
            continue
        before = [step for step in steps if step < onset.step]
        after = [step for step in steps if step >= onset.step]
        source = Source(file=steps_file(run), about=f"rank {series.rank}")
        for word, step in (("Last checkpoint before the onset", before[-1:]), ("First checkpoint after it", after[:1])):
            wall_ns = wall_of_step(series, step[0]) if step else None
            if wall_ns is not None:
                text = f"{word}, in step {step[0]:,}."
                yield statement(text, source, wall_ns=wall_ns, what="checkpoint", severity="info", step=step[0])
        return


def _restarts(inputs: Inputs) -> Iterator[dict[str, Any]]:
    begun: dict[int, int] = {}
    for series in inputs.run.ranks:
        attempt = series.identity.attempt
        begun[attempt] = min(begun.get(attempt, series.anchor_wall_ns), series.anchor_wall_ns)
    for attempt, wall_ns in sorted(begun.items())[1:MOST_CHANGES]:
        text = f"The ranks were started again: attempt {attempt}."
        yield statement(text, Source(file="ranks.json"), wall_ns=wall_ns, what="restart", severity="warning")


def _events(inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Events around the incident in words, ranks that did the same in one entry."""
    onset = inputs.onset
    if onset.wall_ns is None:
        return
    first, last = onset.wall_ns - AROUND_NS, (onset.end_wall_ns or onset.wall_ns) + AROUND_NS
    ends: dict[str, dict[str, Any]] = {}
    for event in inputs.run.events:
        wall_ns = event.get("wall_ns")
        if type(wall_ns) is not int or not first <= wall_ns <= last or event.get("event") in _QUIET:
            continue
        shown = event_document(event, over=inputs.over)
        found = statement(
            str(shown["text"]),
            Source(file=EVENTS, about=str(event.get("event"))),
            wall_ns=wall_ns,
            what="event",
            severity=shown["severity"],
        )
        if type(event.get("step")) is int:
            found["step"] = event["step"]
        if event.get("event") == "rank_end":
            known = ends.setdefault(str(shown.get("text_of_ranks")), {**found, "ranks": []})
            known["ranks"].append(event.get("rank"))
            continue
        yield found
    for text, entry in ends.items():
        ranks = entry.pop("ranks")
        if len(ranks) > 1:
            entry["text"] = f"{count_text(len(ranks), 'rank')} {text}"
        yield entry


def _bounded(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first and the last entries of very many."""
    if len(entries) <= MOST_CHANGES:
        return entries
    half = MOST_CHANGES // 2
    return [*entries[:half], *entries[-half:]]
