"""The document of an incident from loaded values.  Pure: the same inputs always give the same document.

Each section has ``statements``, sentences with a ``source`` and, if they are about a moment, ``wall_ns``; tables have a
source per row.  docs/incidents.md describes the keys.  A section without content is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.alerts.model import Incident
from stepscope.diagnosis.rulebook import RULES
from stepscope.incidents.inputs import GitChanges, Inputs, Source, statement
from stepscope.incidents.onset import first_signs, hosts_of, step_times, steps_file
from stepscope.incidents.samples import samples_section
from stepscope.incidents.timeline import timeline_of
from stepscope.records.capture import CaptureRecord
from stepscope.records.hang import HangRecord
from stepscope.records.paths import HANGS
from stepscope.records.series import RunData
from stepscope.records.text import (
    count_text,
    duration_text,
    hang_name,
    ms_text,
    named_ranks,
    ns_text,
    number_text,
    phase_place,
    printable_document,
    share_text,
)
from stepscope.reports.evidence_text import evidence_rows
from stepscope.reports.finding_text import finding_document, kind_name
from stepscope.reports.hang_text import hang_document
from stepscope.store.paths import CAPTURE_RECORD, INCIDENTS, META, STACKS, SUMMARY

__all__ = [
    "MOST_BYTES",
    "NOT_RECORDED",
    "SCHEMA",
    "build_document",
    "incident_row",
    "incident_state_text",
    "list_document",
    "rule_of",
]

SCHEMA = 1
MOST_BYTES = 200_000
"""Of the document as JSON."""
STACKS_AROUND_NS = 120 * 10**9
MOST_STACKS = 8
MOST_ERRORS = 4
MOST_FRAMES = 16
MOST_RANKS = 64
MOST_ROWS = 40
LONGEST_TEXT = 2000
LARGEST_NUMBER = 1e30
LAST_WALL_NS = 1 << 62
CAPTURED_BEFORE_NS = 60 * 10**9
"""A capture that was taken so shortly before an incident was noticed belongs to it."""
CAPTURE_STATES = {
    "ordered": "ordered",
    "profiling": "being taken",
    "delivering": "being collected",
    "analyzing": "being analyzed",
    "done": "complete",
    "failed": "given up",
}
STATE_TEXTS = {"open": "open", "acknowledged": "acknowledged", "resolved": "over"}


def rule_of(kind: str) -> str:
    """The rule that gives findings of a kind; for hangs and crashes their module, for a measure its name."""
    if kind.startswith("hang_"):
        return "hangs/judge.py"
    return next((f"{rule.name} ({kind})" for rule in RULES if kind in rule.kinds), kind)


# -- list -------------------------------------------------------------------------------------------------------------


def list_document(
    incidents: Sequence[Incident], *, made_from: str, notice: str = "", run: str = "", over: bool = True
) -> dict[str, Any]:
    """All incidents of a run, as ``stepscope incident RUN`` and the API list them."""
    return {
        "schema": SCHEMA,
        "run": run,
        "over": over,
        "made_from": made_from,
        "notice": notice,
        "incidents": [incident_row(incident, over=over) for incident in incidents],
    }


def incident_row(incident: Incident, *, over: bool) -> dict[str, Any]:
    """``over``: whether its run is."""
    found = {
        "number": incident.number,
        "topic": incident.topic,
        "state": incident.state,
        "state_text": incident_state_text(incident.state, incident.acknowledged_by, over=over),
        "kind": incident.kind,
        "kind_text": _kind_text(incident.kind),
        "severity": incident.severity,
        "title": incident.title[:LONGEST_TEXT],
        "ranks": list(incident.ranks[:MOST_RANKS]),
        "hosts": list(incident.hosts[:MOST_RANKS]),
        "line": incident.line,
        "phase": incident.phase,
        "attempt": incident.attempt,
        "since_step": incident.since_step,
        "since_wall_ns": incident.since_wall_ns or incident.opened_wall_ns or None,
        "opened_wall_ns": incident.opened_wall_ns or None,
        "resolved_wall_ns": incident.resolved_wall_ns,
        "resolved_step": incident.resolved_step,
        "resolved_why": incident.resolved_why,
        "acknowledged_by": incident.acknowledged_by,
        "cost": incident.cost,
        "cost_text": _cost_text(incident.cost),
        "rules": list(incident.rules),
        "also": list(incident.also[:MOST_ROWS]),
    }
    return dict(printable_document(found))


def incident_state_text(state: str, acknowledged_by: str, *, over: bool) -> str:
    """``open``, ``acknowledged by ada``, ``over``; a run that fails ends with its incident open."""
    if state == "acknowledged" and acknowledged_by:
        return f"acknowledged by {acknowledged_by}"
    return "open when the run ended" if over and state == "open" else STATE_TEXTS[state]


def _kind_text(kind: str) -> str:
    name = kind_name(kind)
    return name or kind.replace("_", " ")


def _cost_text(cost: Mapping[str, Any]) -> str:
    """``37% of the time, 8.48 s``."""
    share, seconds = _number(cost.get("share")), _number(cost.get("seconds"))
    parts = [
        f"{share_text(share)} of the time" if share else "",
        duration_text(seconds) if seconds else "",
    ]
    return ", ".join(part for part in parts if part)


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if good else None


# -- document ---------------------------------------------------------------------------------------------------------


def build_document(inputs: Inputs) -> dict[str, Any]:
    """Everything that is known about one incident."""
    signs = first_signs(inputs.run, inputs.incident, inputs.onset)
    sections = {
        "finding": _finding(inputs),
        "onset": _onset(inputs, signs),
        "impact": _impact(inputs),
        "errors": _errors(inputs),
        "logs": _logs(inputs),
        "samples": samples_section(inputs.run, inputs.onset),
        "stacks": _stacks(inputs),
        "captures": _captures(inputs),
        "changes": _changes(inputs),
        "earlier": _earlier(inputs),
        "timeline": timeline_of(inputs, signs),
    }
    document = {
        "schema": SCHEMA,
        "kind": "incident",
        "run": _run(inputs),
        "count": inputs.count,
        "made_from": inputs.made_from,
        "notice": NOT_RECORDED if inputs.made_from != INCIDENTS else "",
        "incident": {**incident_row(inputs.incident, over=inputs.over), "source": _incident_source(inputs).to_dict()},
        **{name: section for name, section in sections.items() if section},
    }
    return _fitted(dict(printable_document(document)))


NOT_RECORDED = (
    "This run has no incidents.jsonl (it was recorded before this version, or without a hub), so its incidents are its "
    "final findings of severity warning or critical, in their order."
)


def _run(inputs: Inputs) -> dict[str, Any]:
    meta = inputs.run.meta
    command = meta.get("command")
    created = meta.get("created_wall_ns")
    return {
        "name": inputs.run.name,
        "over": inputs.over,
        "status_text": inputs.status_text,
        "created_wall_ns": created if type(created) is int else None,
        "ended_wall_ns": inputs.ended_wall_ns,
        "world_size": inputs.world_size,
        "host": str(meta.get("host") or ""),
        "command": [str(word) for word in command][:200] if isinstance(command, list) else [],
        "source": Source(file=META).to_dict(),
    }


def _incident_source(inputs: Inputs) -> Source:
    if inputs.made_from != INCIDENTS:
        return Source(file=inputs.made_from, about=f"finding {inputs.incident.number}")
    lines = [line for line, _ in inputs.changes]
    return Source(file=INCIDENTS, line=lines[-1] if lines else None)


def _finding(inputs: Inputs) -> dict[str, Any]:
    """The finding that leads with its evidence in words; of an incident about a measure, the measure's values."""
    incident, source = inputs.incident, inputs.finding_source
    advice = list(incident.advice)
    statements = [statement(incident.title, source)]
    text: Mapping[str, Any] = {}
    if inputs.finding is not None:
        text = finding_document(_tame(inputs.finding), over=inputs.over)["text"]
        given = inputs.finding.get("advice")
        advice = [str(line) for line in given] if isinstance(given, list) else advice
        if text.get("meaning"):
            statements.append(statement(str(text["meaning"]), Source(rule=rule_of(incident.kind))))
    also = incident.also[:MOST_ROWS]
    statements += [statement(f"Also: {title}", _incident_source(inputs)) for title in also]
    rules = ", ".join(incident.rules)
    return {
        "statements": statements,
        "facts": list(text.get("facts", ())),
        "price": list(text.get("price", ())),
        "time_left": text.get("time_left"),
        "confidence": text.get("confidence"),
        "charts": list(text.get("charts", ())),
        "evidence": text.get("evidence") or _measure_rows(incident),
        "advice": [statement(line[:LONGEST_TEXT], Source(rule=rule_of(incident.kind))) for line in advice[:MOST_ROWS]],
        "alert_rules": rules,
        "source": source.to_dict(),
    }


def _tame(value: Any) -> Any:
    """The same without numbers that no unit can represent: a finding of a run may come from anyone."""
    if isinstance(value, Mapping):
        return {str(key): _tame(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_tame(inner) for inner in value]
    huge = isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) < LARGEST_NUMBER
    return None if huge else value


def _measure_rows(incident: Incident) -> list[dict[str, Any]]:
    return evidence_rows(_tame(incident.evidence)) if incident.evidence else []


def _onset(inputs: Inputs, signs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    incident, onset, run = inputs.incident, inputs.onset, inputs.run
    hosts = incident.hosts or hosts_of(run, onset.ranks, onset.attempt)
    created = run.meta.get("created_wall_ns")
    statements = []
    if onset.wall_ns is not None:
        after = (
            f", {ns_text(onset.wall_ns - created, whole=True)} after the start of the run"
            if type(created) is int
            else ""
        )
        step = "" if onset.step is None else f" in step {onset.step:,}"
        source = (
            Source(file=steps_file(run), about=f"start of step {onset.step:,}")
            if onset.by_step
            else inputs.finding_source
        )
        statements.append(statement(f"It began{step}{after}.", source, wall_ns=onset.wall_ns))
    elif onset.step is not None:
        statements.append(statement(f"It began in step {onset.step:,}.", inputs.finding_source))
    if incident.opened_wall_ns and onset.wall_ns is not None and inputs.made_from == INCIDENTS:
        delay = ns_text(max(incident.opened_wall_ns - onset.wall_ns, 0), whole=True)
        line = inputs.changes[0][0] if inputs.changes else None
        text = f"The incident was opened {delay} later."
        statements.append(statement(text, Source(file=INCIDENTS, line=line), wall_ns=incident.opened_wall_ns))
    where = [named_ranks(onset.ranks)] if onset.ranks else ["All ranks"]
    where += [f"on {', '.join(hosts[:8])}"] if hosts else []
    where += [phase_place(incident.phase)] if incident.phase else []
    where += [f"at {incident.line}"] if incident.line else []
    statements.append(statement(f"Where: {' '.join(where)}.", inputs.finding_source))
    if incident.state == "resolved" and incident.resolved_wall_ns and inputs.made_from == INCIDENTS:
        step = "" if incident.resolved_step is None else f" in step {incident.resolved_step:,}"
        why = f": {incident.resolved_why}" if incident.resolved_why else ""
        text = f"It was over{step}{why}."
        statements.append(statement(text, _incident_source(inputs), wall_ns=incident.resolved_wall_ns))
    return {
        "step": onset.step,
        "wall_ns": onset.wall_ns,
        "ranks": list(onset.ranks[:MOST_RANKS]),
        "hosts": list(hosts[:MOST_RANKS]),
        "line": incident.line,
        "phase": incident.phase,
        "attempt": onset.attempt,
        "statements": [*statements, *signs],
    }


def _impact(inputs: Inputs) -> dict[str, Any]:
    """What it cost: as the rule priced it, and since its onset as times and steps show."""
    incident, onset, run = inputs.incident, inputs.onset, inputs.run
    cost = incident.cost
    share, seconds, hours = (_number(cost.get(name)) for name in ("share", "seconds", "rank_hours"))
    statements = []
    priced = [
        f"{share_text(share)} of the training time" if share else "",
        f"{duration_text(seconds)} in all" if seconds else "",
        f"{number_text(hours)} rank-hours" if hours and hours >= 0.001 else "",
    ]
    if any(priced):
        text = f"It costs {', '.join(part for part in priced if part)}."
        statements.append(statement(text, Source(file=inputs.finding_source.file, rule=rule_of(incident.kind))))
    fixed = cost.get("if_fixed")
    step_ms, speedup = (
        _number(fixed.get(name)) if isinstance(fixed, Mapping) else None for name in ("step_ms", "speedup")
    )
    if step_ms and speedup and speedup > 1:
        text = f"Without it a step takes {ms_text(step_ms)}: {number_text(speedup)} times as fast."
        statements.append(statement(text, Source(file=inputs.finding_source.file, rule=rule_of(incident.kind))))
    lasted_ns = None
    if onset.wall_ns is not None and onset.end_wall_ns is not None and onset.end_wall_ns > onset.wall_ns:
        lasted_ns = onset.end_wall_ns - onset.wall_ns
        ranks = inputs.world_size
        spent = lasted_ns / 1e9 * ranks / 3600
        end = "it was over" if incident.state == "resolved" and inputs.made_from == INCIDENTS else "the last record"
        text = (
            f"From the onset until {end} {ns_text(lasted_ns, whole=lasted_ns > 10**10)} passed, "
            f"{number_text(spent)} rank-hours of {count_text(ranks, 'rank')}."
        )
        statements.append(statement(text, Source(file=META, about="times of onset and end")))
    statements += _pace(run, inputs) + _goodput(inputs)
    return {
        "share": share,
        "seconds": seconds,
        "rank_hours": hours,
        "since_onset_s": None if lasted_ns is None else round(lasted_ns / 1e9, 3),
        "statements": statements or [statement("It has no price: no step was lost or longer.", inputs.finding_source)],
    }


def _pace(run: RunData, inputs: Inputs) -> list[dict[str, Any]]:
    """The median step before and since the onset."""
    onset = inputs.onset
    if onset.step is None or inputs.incident.topic != "speed":
        return []
    steps, times, _, _ = step_times(run, replace(onset, ranks=()))
    before, after = times[(steps < onset.step) & (steps >= onset.step - 200)], times[_since(steps, inputs)]
    if min(len(before), len(after)) < 8:
        return []
    low, high = float(np.median(before)), float(np.median(after))
    counts = count_text(len(before), "step"), count_text(len(after), "step")
    text = f"The median step took {ns_text(low)} in {counts[0]} before it and {ns_text(high)} in {counts[1]} since."
    about = f"steps {int(steps[steps < onset.step][-len(before)]):,} to {int(steps[_since(steps, inputs)][-1]):,}"
    return [statement(text, Source(file=steps_file(run), about=about))]


def _since(steps: NDArray[np.int64], inputs: Inputs) -> NDArray[np.bool_]:
    """The steps from the onset until it was over."""
    last = inputs.incident.resolved_step
    inside = steps >= (inputs.onset.step or 0)
    return inside if last is None else inside & (steps <= last)


def _goodput(inputs: Inputs) -> list[dict[str, Any]]:
    """How much of the whole run was useful; not of an active one, whose newest steps are not in the files yet."""
    if inputs.ledger is None or not inputs.over:
        return []
    return [statement(f"Goodput of the whole run: {inputs.ledger}.", Source(file=SUMMARY, command="stepscope goodput"))]


def _errors(inputs: Inputs) -> dict[str, Any]:
    """Exceptions of the affected ranks."""
    incident = inputs.incident
    if incident.topic not in ("stopped", "run") and not incident.kind.startswith(("rank_", "hang_", "out_of")):
        return {}
    rows = []
    named = [error for error in inputs.run.errors if error.rank in incident.ranks]
    # What ended a hung job from outside is not its cause.
    named = named or ([] if incident.kind.startswith("hang_") else list(inputs.run.errors))
    found = sorted(named, key=lambda error: (error.rank is None, error.wall_ns))
    for error in found[:MOST_ERRORS]:
        lines = error.traceback.rstrip().splitlines()
        rows.append(
            {
                "rank": error.rank,
                "text": f"{error.type}: {error.message}"[:LONGEST_TEXT] if error.type else error.message[:LONGEST_TEXT],
                "traceback": [line[:300] for line in lines[-MOST_ROWS:]],
                "wall_ns": error.wall_ns or None,
                "source": Source(file=f"errors/{error.pid}.json").to_dict(),
            }
        )
    return {"errors": rows, "left_out": len(inputs.run.errors) - len(rows)} if rows else {}


def _logs(inputs: Inputs) -> dict[str, Any]:
    if not inputs.logs and not inputs.logs_note:
        return {}
    pieces = []
    for piece in inputs.logs:
        lines = [*piece.before, *piece.after]
        last = None if piece.first_line is None else piece.first_line + len(lines) - 1
        about = "" if piece.first_line is not None else f"from byte {piece.offset:,}"
        pieces.append(
            {
                "rank": piece.rank,
                "file": piece.file,
                "offset": piece.offset,
                "first_line": piece.first_line,
                "before": len(piece.before),
                "lines": lines,
                "text": piece.how,
                "source": Source(file=piece.file, line=piece.first_line, last_line=last, about=about).to_dict(),
            }
        )
    note = [statement(inputs.logs_note, Source(file="logs/"))] if inputs.logs_note else []
    return {"statements": note, "pieces": pieces}


def _captures(inputs: Inputs) -> dict[str, Any]:
    if not inputs.captures:
        return {}
    onset, lasting = inputs.onset, inputs.onset.end_wall_ns or LAST_WALL_NS
    since_ns = (onset.wall_ns or 0) - CAPTURED_BEFORE_NS

    def of_incident(record: CaptureRecord) -> bool:
        return since_ns <= record.requested_wall_ns <= lasting

    own = sorted(inputs.captures, key=lambda record: (not of_incident(record), record.requested_wall_ns))
    rows = [
        statement(
            _capture_text(record),
            Source(file=f"captures/{record.order.id}/{CAPTURE_RECORD}"),
            **({"wall_ns": record.requested_wall_ns} if 0 < record.requested_wall_ns < LAST_WALL_NS else {}),
            capture=record.order.id,
        )
        for record in own[:MOST_ROWS]
    ]
    return {"statements": rows}


def _capture_text(record: CaptureRecord) -> str:
    """``Steps 340 to 345 of ranks 0 and 2: Rank 2 spends 30.1 ms more …``."""
    order = record.order
    first, last = order.at_step, order.at_step + max(order.steps, 1) - 1
    steps = f"Step {first}" if first == last else f"Steps {first} to {last}"
    ranks = f" of {named_ranks(order.ranks).lower()}" if order.ranks else ""
    unfinished = record.problem or f"the capture is {CAPTURE_STATES[record.state]}"
    return f"{steps}{ranks}: {record.verdict if record.state == 'done' else unfinished}"[:LONGEST_TEXT]


# -- stacks -----------------------------------------------------------------------------------------------------------


def _stacks(inputs: Inputs) -> dict[str, Any]:
    """Where ranks were: as the watchdog found them in the hang, and as the agent sampled them around the onset."""
    hangs = [_hang(record, inputs.over) for record in _hangs(inputs)]
    places = _places(inputs)
    return {"hangs": hangs, "places": places} if hangs or places else {}


def _hangs(inputs: Inputs) -> list[HangRecord]:
    onset = inputs.onset
    if inputs.incident.topic != "stopped" or onset.wall_ns is None:
        return []
    last = onset.end_wall_ns or (1 << 63)
    records = [
        hang
        for hang in inputs.run.hangs
        if hang.stopped_wall_ns <= last and (hang.over_wall_ns or last) >= onset.wall_ns - 10**9
    ]
    return sorted(records, key=lambda hang: abs(hang.stopped_wall_ns - (onset.wall_ns or 0)))[:2]


def _hang(record: HangRecord, over: bool) -> dict[str, Any]:
    shown = hang_document(record, over=over)
    file = f"{HANGS}/{hang_name(record.host, record.number)}"
    groups = []
    for group in record.stacks[:MOST_STACKS]:
        thread = next(iter(group.threads), None)
        frames = [] if thread is None else [f"{each.file}:{each.line} in {each.function}" for each in thread.frames]
        groups.append(
            {
                "ranks": list(group.ranks[:MOST_RANKS]),
                "who": ("workers of " if group.workers_of else "") + _ranks_text(group.ranks),
                "frames": [frame[:300] for frame in frames[:MOST_FRAMES]],
                "source": Source(file=file).to_dict(),
            }
        )
    sentences = [record.title if not over else str(shown["title"]), *shown["evidence"][:8]]
    return {
        "statements": [statement(str(text), Source(file=file, rule="hangs/judge.py")) for text in sentences if text],
        "groups": groups,
    }


def _ranks_text(ranks: Sequence[int]) -> str:
    text = named_ranks(ranks) if ranks else ""
    return text[:1].lower() + text[1:]


def _places(inputs: Inputs) -> list[dict[str, Any]]:
    """Sampled stacks around the onset by rank group, phase and innermost line; most frequent first."""
    onset = inputs.onset
    if onset.wall_ns is None:
        return []
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for stack in inputs.run.stacks:
        wall_ns, frames = stack.get("wall_ns"), stack.get("frames")
        if (
            type(wall_ns) is not int
            or abs(wall_ns - onset.wall_ns) > STACKS_AROUND_NS
            or not (isinstance(frames, list) and frames)
        ):
            continue
        if onset.ranks and stack.get("rank") not in onset.ranks:
            continue
        key = (stack.get("rank"), stack.get("phase"), _frame(frames[0]), wall_ns >= onset.wall_ns)
        alike.setdefault(key, []).append(stack)
    rows = []
    for (rank, phase, _, after), stacks in sorted(alike.items(), key=lambda item: (-len(item[1]), str(item[0]))):
        frames = [_frame(frame) for frame in stacks[0]["frames"]][:MOST_FRAMES]
        when = "after the onset" if after else "before the onset"
        text = f"Rank {rank} was seen here {count_text(len(stacks), 'time')} {when}, {phase_place(phase or 'other')}."
        about = f"steps {min(_step(each) for each in stacks):,} to {max(_step(each) for each in stacks):,}"
        rows.append(
            {**statement(text, Source(file=STACKS, about=about)), "rank": rank, "count": len(stacks), "frames": frames}
        )
    return rows[:MOST_STACKS]


def _frame(frame: Any) -> str:
    if not isinstance(frame, Mapping):
        return ""
    line = f":{frame['line']}" if frame.get("line") else ""
    return f"{frame.get('file', '')}{line} in {frame.get('function', '')}"[:300]


def _step(stack: Mapping[str, Any]) -> int:
    step = stack.get("step")
    return step if type(step) is int else 0


# -- other runs -------------------------------------------------------------------------------------------------------


def _changes(inputs: Inputs) -> dict[str, Any]:
    """What is different from the last good run of the same job."""
    good = inputs.good
    if good is None:
        if not inputs.good_note:
            return {}
        return {"statements": [statement(inputs.good_note, Source(file=META, about="of the runs in the same folder"))]}
    source = Source(file=f"{good.name}/{META}")
    how = "the same command" if good.same_command else "the same script"
    between = (
        f" {count_text(good.runs_between, 'run')} of it since then {'was' if good.runs_between == 1 else 'were'} not."
        if good.runs_between
        else ""
    )
    statements = [
        statement(
            f"{good.name} is the last good run of {how} with {count_text(inputs.world_size, 'rank')}: it finished "
            f"without a critical finding and without one of this kind.{between}",
            Source(file=f"{good.name}/{SUMMARY}"),
            wall_ns=good.created_wall_ns,
        )
    ]
    if good.step_ms:
        text = f"Its median step took {ms_text(good.step_ms)}."
        statements.append(statement(text, Source(file=f"{good.name}/{SUMMARY}")))
    rows = [
        {
            **{name: row.get(name) for name in ("kind", "name", "label")},
            "before": _value_text(row.get("before")),
            "after": _value_text(row.get("after")),
            "source": Source(file=f"{META}, {SUMMARY}", about=f"of both runs: {row.get('name')}").to_dict(),
        }
        for row in good.rows[:MOST_ROWS]
    ]
    if not good.rows:
        statements.append(statement("No setting, version, host or device that was recorded differs.", source))
    found = {
        "run": good.name,
        "statements": statements,
        "rows": rows,
        "rows_left_out": max(len(good.rows) - MOST_ROWS, 0),
    }
    return {**found, **_git(good.git)} if good.git is not None else found


def _value_text(value: Any) -> str:
    return "–" if value is None else str(value)[:300]


def _git(git: GitChanges) -> dict[str, Any]:
    span = f"{git.before[:10]}..{git.after[:10]}"
    source = Source(command=f"git log {span}")
    if git.problem:
        text = f"The commits are {git.before[:10]} and {git.after[:10]}; what lies between is unknown: {git.problem}."
        return {"git": {"statements": [statement(text, Source(file=META, about="git"))], "commits": [], "files": []}}
    if git.before == git.after:
        text = f"Both ran commit {git.after[:10]}."
        return {"git": {"statements": [statement(text, Source(file=META, about="git"))], "commits": [], "files": []}}
    word = f"{count_text(git.commit_count, 'commit')} {'fewer' if git.backward else 'since'}"
    lines = f"{count_text(git.added, 'line')} added and {git.removed:,} removed"
    statements = [
        statement(f"{word}: {span}.", source),
        statement(f"{count_text(git.file_count, 'file')} changed, {lines}.", Source(command=f"git diff --stat {span}")),
    ]
    commits = [
        {
            "hash": commit.hash,
            "wall_ns": commit.wall_s * 10**9,
            "author": commit.author,
            "text": f"{commit.hash[:10]} {commit.subject}",
            "source": source.to_dict(),
        }
        for commit in git.commits
    ]
    files = [
        {
            "path": change.path,
            "added": change.added,
            "removed": change.removed,
            "text": f"{change.path} " + ("(binary)" if change.added is None else f"+{change.added} −{change.removed}"),
            "source": Source(command=f"git diff --stat {span}").to_dict(),
        }
        for change in git.files
    ]
    left = {"commits_left_out": git.commit_count - len(commits), "files_left_out": git.file_count - len(files)}
    return {"git": {"statements": statements, "commits": commits, "files": files, **left}}


def _earlier(inputs: Inputs) -> dict[str, Any]:
    if not inputs.scanned:
        return {}
    more = f"; {count_text(inputs.unscanned, 'older run')} were not searched" if inputs.unscanned else ""
    rows = [
        {
            "run": earlier.run,
            "number": earlier.number,
            "kind": earlier.kind,
            "kind_text": _kind_text(earlier.kind),
            "severity": earlier.severity,
            "title": earlier.title[:400],
            "wall_ns": earlier.wall_ns,
            "same": list(earlier.same),
            "source": Source(file=f"{earlier.run}/{earlier.file}").to_dict(),
        }
        for earlier in inputs.earlier
    ]
    count = count_text(len(rows), "earlier incident") if rows else "No earlier incident"
    runs = count_text(inputs.scanned, "other run")
    text = f"{count} of the same kind, host or line of code in {runs} of the folder{more}."
    return {"statements": [statement(text, Source(file=f"*/{INCIDENTS}, */{SUMMARY}"))], "incidents": rows}


# -- size -------------------------------------------------------------------------------------------------------------


def _fitted(document: dict[str, Any]) -> dict[str, Any]:
    """Shorten the parts that can be read elsewhere until the document is small enough, and say so."""
    cuts = (
        ("logs", "pieces", "lines", 10),
        ("stacks", "hangs", "groups", 2),
        ("errors", "errors", "traceback", 10),
        ("samples", "charts", "series", 0),
    )
    for section, rows, name, most in cuts:
        if len(json.dumps(document)) <= MOST_BYTES:
            return document
        for row in document.get(section, {}).get(rows, ()):
            if section == "logs":
                begin = max(0, row["before"] - most)
                row["before"], row["lines"] = row["before"] - begin, row["lines"][begin : row["before"] + most]
            row[name] = row[name][: 2 * most]
        document["shortened"] = True
    for name in ("samples", "stacks", "logs", "errors", "earlier", "changes", "timeline", "finding"):
        if len(json.dumps(document)) <= MOST_BYTES:
            return document
        document.pop(name, None)
    return document
