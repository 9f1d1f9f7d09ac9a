"""Questions in Slack and their answers: text in, text and blocks out.

    question = parse_question("<@U012AB3CD> what is wrong with night?")
    message = slack_message(await answer_question(api, question, may_change=False, by="U0AB"))

The answers are those of the tools (``tools``).  Everything that comes from a run is escaped, so that nothing in it is a
link or mentions anybody, and an answer fits Slack's limits.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stepscope.alerts.receivers.slack import LONGEST_TEXT, MOST_BLOCKS, escaped
from stepscope.assistant.answers import Answer, bounded
from stepscope.assistant.hub_api import HubApi, RequestError
from stepscope.assistant.tool import checked_arguments
from stepscope.assistant.tools import CHANGING_TOOLS, READING_TOOLS
from stepscope.records.text import count_text, duration_text, share_text

__all__ = ["HELP_TEXT", "Question", "answer_question", "parse_question", "slack_message"]

Kind = Literal["verdict", "status", "incidents", "goodput", "silence", "acknowledge", "help"]
LONGEST_QUESTION = 1000
HELP_TEXT = """\
*what is wrong with RUN*: the verdict, what it costs and what to do (without RUN: the newest run)
*status*: the active runs, and the newest others
*incidents RUN*: its incidents; *incidents RUN 2*: one of them
*goodput RUN*: where the time went, and whether to restart
*silence RUN 2h*: no messages about it for that time
*ack RUN 2*: acknowledge incident 2"""
_MARKS = {"critical": "🔴", "warning": "🟠", "info": "🔵"}
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_MENTION = re.compile(r"<@[A-Z0-9]+(?:\|[^>]*)?>")
_LINK = re.compile(r"<(?:https?|mailto):[^|>]*\|([^>]*)>")
_TIME = re.compile(r"(\d{1,6}) ?(s|min|m|h|d)", re.IGNORECASE)
_RUN = r"(?P<run>(?!#?\d+$)\S+?)"
_NUMBER = r"#?(?P<number>\d{1,9})"
_WRONG = r"what(?:'s| is) (?:wrong|going on|up)"
_WRITTEN: tuple[tuple[Kind, str], ...] = (
    ("help", r"(?:help)?"),
    ("status", r"status|runs|list"),
    ("verdict", rf"{_WRONG}|why is (?:it|this) slow"),
    ("verdict", rf"(?:{_WRONG} (?:with|in)|status(?: of)?|verdict(?: of)?) {_RUN}"),
    ("verdict", rf"why (?:is|does|did) {_RUN} (?:so )?(?:slow|hang|hung|die|fail|crash|stuck|stop)\w*"),
    ("incidents", rf"incidents?(?: (?:of )?{_RUN})?(?: {_NUMBER})?"),
    ("goodput", rf"goodput(?: (?:of )?{_RUN})?"),
    ("silence", rf"(?:silence|mute) {_RUN} (?:for )?(?P<time>\d{{1,6}} ?(?:s|min|m|h|d))"),
    ("acknowledge", rf"(?:ack|acknowledge) {_RUN} {_NUMBER}"),
)
_FORMS = tuple((kind, re.compile(form, re.IGNORECASE)) for kind, form in _WRITTEN)


@dataclass(frozen=True, kw_only=True)
class Question:
    kind: Kind
    run: str | None = None
    number: int | None = None
    seconds: int | None = None
    problem: str = ""
    """Why the text was not understood; the answer then is the help."""


def parse_question(text: str) -> Question:
    """Understand a message, with or without the mention of the bot."""
    plain = html.unescape(_LINK.sub(r"\1", _MENTION.sub(" ", text[:LONGEST_QUESTION])))
    words = " ".join(plain.replace("\u2019", "'").split()).rstrip("?!. ")
    for kind, form in _FORMS:
        if (found := form.fullmatch(words)) is None:
            continue
        parts = found.groupdict()
        span = _TIME.fullmatch(parts.get("time") or "")
        return Question(
            kind=kind,
            run=(parts.get("run") or "").strip("`*_\"'") or None,
            number=int(parts["number"]) if parts.get("number") else None,
            seconds=int(span[1]) * _SECONDS[span[2].lower()] if span else None,
        )
    return Question(kind="help", problem=f"I do not understand “{words[:80]}”.")


async def answer_question(api: HubApi, question: Question, *, may_change: bool, by: str) -> str:
    """Return the answer in Slack's markup.  ``may_change``: whether this user may silence and acknowledge."""
    if question.kind == "help":
        return f"{escaped(question.problem)}\n{HELP_TEXT}".strip()
    try:
        return await _answered(api, question, may_change=may_change, by=by)
    except RequestError as error:
        return escaped(str(error).replace("list_runs shows all runs", "`status` lists runs"))


async def _answered(api: HubApi, question: Question, *, may_change: bool, by: str) -> str:
    if question.kind == "status":
        return _status_text((await _call(api, "list_runs", limit=100)).document)
    if question.kind == "verdict":
        return _verdict_text((await _call(api, "get_verdict", run=question.run)).document)
    if question.kind == "goodput":
        return escaped((await _call(api, "get_goodput", run=question.run)).text)
    if question.kind == "incidents":
        return await _incidents_text(api, question)
    if not may_change:
        raise RequestError("only people that `stepscope slack --allow-changes` was started for may do this")
    if question.kind == "silence":
        minutes = max((question.seconds or 0) // 60, 1)
        return escaped((await _call(api, "silence_run", by, run=question.run, minutes=minutes)).text)
    return escaped((await _call(api, "acknowledge_incident", by, run=question.run, incident=question.number)).text)


async def _call(api: HubApi, name: str, by: str = "", **arguments: object) -> Answer:
    tool = next(tool for tool in (*READING_TOOLS, *CHANGING_TOOLS) if tool.name == name)
    given = {key: value for key, value in arguments.items() if value is not None}
    return bounded(await tool.call(api, checked_arguments(tool, given, by=by)))


def _status_text(document: Mapping[str, Any]) -> str:
    rows = document["runs"]
    active = [row for row in rows if row["status"] in ("running", "hung")]
    others = [row for row in rows if row not in active][: max(5 - len(active), 3)]
    lines = [f"*{len(active)} active*" if active else "*No run is active.*"]
    lines += map(_run_line, active[:15])
    if len(active) > 15:
        lines.append(f"and {len(active) - 15} more")
    if others:
        lines += ["*Newest others*", *map(_run_line, others)]
    return "\n".join(lines)


def _run_line(row: Mapping[str, Any]) -> str:
    facts = [str(row["status"])]
    facts += [count_text(row[thing], thing[:-1]) for thing in ("ranks", "steps") if row[thing]]
    facts += [duration_text(row["duration_s"], whole=True)] if row["duration_s"] else []
    line = f"• *{escaped(str(row['id']))}*: {escaped(', '.join(facts))}"
    if row["verdict"]:
        cost = f" ({share_text(row['cost_share'])} of the time)" if row["cost_share"] else ""
        line += f"\n   {_MARKS.get(row['severity'], '')} {escaped(row['verdict'])}{cost}"
    return line


def _verdict_text(document: Mapping[str, Any]) -> str:
    facts = [document["status_text"], document["ranks_text"]]
    facts += [f"step {document['step']}"] if isinstance(document["step"], int) and document["step"] >= 0 else []
    lines = [f"*{escaped(document['run'])}*: {escaped(', '.join(facts))}"]
    verdict = document["verdict"]
    if verdict is None:
        return "\n".join([*lines, *map(escaped, document["nothing_found"] or ())])
    lines.append(f"{_MARKS.get(verdict['severity'], '')} *{escaped(verdict['title'])}*")
    if verdict["price"]:
        lines.append(f"It costs {escaped(verdict['price'])}")
    lines += [f"• {escaped(advice)}" for advice in verdict["advice"]]
    more = [row for row in document["further_findings"] if row["severity"] != "info"]
    if more:
        lines += ["*Also*", *(f"{_MARKS.get(row['severity'], '')} {escaped(row['title'])}" for row in more[:5])]
    return "\n".join(lines)


async def _incidents_text(api: HubApi, question: Question) -> str:
    if question.number is not None:
        return escaped((await _call(api, "get_incident", run=question.run, number=question.number)).text)
    document = (await _call(api, "list_incidents", run=question.run)).document
    rows = document["incidents"]
    lines = [f"*{escaped(document['run'])}*: {count_text(len(rows), 'incident')}"]
    for row in reversed(rows[-10:]):
        cost = f" ({escaped(row['cost_text'])})" if row.get("cost_text") else ""
        state = "over" if row["state"] == "resolved" else row["state"]
        mark = "🟢" if row["state"] == "resolved" else _MARKS.get(row["severity"], "")
        lines.append(f"{mark} {row['number']}, {state}: {escaped(row['title'])}{cost}")
    return "\n".join(lines)


def slack_message(text: str) -> dict[str, Any]:
    """Return ``text`` and ``blocks`` of a message: sections of whole lines, within Slack's limits."""
    sections: list[str] = []
    for line in (whole[:LONGEST_TEXT] for whole in text.split("\n")):
        if sections and len(sections[-1]) + 1 + len(line) <= LONGEST_TEXT:
            sections[-1] += f"\n{line}"
        else:
            sections.append(line)
    blocks = [
        {"type": "section", "text": {"type": "mrkdwn", "text": section}} for section in sections if section.strip()
    ]
    return {"text": text[:LONGEST_TEXT], "blocks": blocks[: min(MOST_BLOCKS, 10)]}
