"""Slack: an incoming webhook, or a bot, which keeps one thread per incident and its first message up to date.

A bot posts the first message about an incident to the channel.  Each later one replaces that message
(``chat.update``), so that the channel shows the present state, and is a reply in its thread.  Slack has no key that
makes posting twice harmless.  Each post of a bot therefore carries the message's id as metadata; if an earlier try may
have arrived, the bot searches for it first.  That needs the scope ``channels:history`` (``groups:history`` for a
private channel) and the channel's id instead of its name; without them, and with a webhook, such a message is sent
again.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from stepscope.alerts.message_text import fact_rows, headline, status_word
from stepscope.alerts.model import Message
from stepscope.alerts.receivers.exchange import (
    Answer,
    Context,
    Delivered,
    Destination,
    Exchange,
    HttpRequest,
    Outcome,
    Refused,
    RetryLater,
    clipped,
    json_request,
    outcome_of_status,
    web_link,
)

__all__ = [
    "LONGEST_HEADER",
    "LONGEST_MESSAGE",
    "LONGEST_TEXT",
    "MOST_BLOCKS",
    "bot",
    "message_body",
    "probe",
    "webhook",
]

MOST_BLOCKS = 50
LONGEST_TEXT = 3000
LONGEST_HEADER = 150
LONGEST_MESSAGE = 40_000
LONGEST_URL = 3000
"""Slack's limits, as documented for blocks and ``chat.postMessage``."""
_LONGEST_PIECE = LONGEST_TEXT - 200
"""Of text from the run, escaped; the rest is for what is put around it."""
_API = "https://slack.com/api"
_EVENT = "stepscope_message"
_SEARCHED = 100
"""Messages that are searched for an earlier try."""
_MARKS = {"critical": "🔴", "warning": "🟠", "info": "🔵"}
_RESOLVED_MARK = "🟢"
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_TEMPORARY = ("ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable", "request_timeout")
_HINTS = {
    "channel_not_found": "give the channel's id, and invite the bot to it",
    "not_in_channel": "invite the bot to the channel",
    "is_archived": "the channel is archived",
    "invalid_auth": "the bot token is not valid",
    "not_authed": "the bot token is missing",
    "token_revoked": "the bot token was revoked",
    "account_inactive": "the bot was removed",
    "missing_scope": "the bot token needs the scope chat:write",
}


# -- the text ---------------------------------------------------------------------------------------------------------


def message_body(message: Message, mention: str = "") -> dict[str, Any]:
    """``text`` for notifications, and ``blocks``; ``mention`` (``<!here>``, ``<@U012AB3CD>``) only when it fires."""
    incident = message.incident
    mark = _RESOLVED_MARK if message.status == "resolved" else _MARKS[incident.severity]
    call = f"{mention} " if mention and message.status == "firing" else ""
    header = clipped(f"{mark} {status_word(message)}: {message.run}", LONGEST_HEADER)
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": header, "emoji": True}},
        _section(f"{call}*{escaped(incident.title)}*"),
    ]
    blocks += [
        _section(f"*{label}*\n{escaped(clipped(text, LONGEST_TEXT // 2))}") for label, text in fact_rows(message)
    ]
    if (link := web_link(message.link)) and len(link) <= LONGEST_URL:
        button = {"type": "button", "text": {"type": "plain_text", "text": "Open the incident"}, "url": link}
        blocks.append({"type": "actions", "elements": [button]})
    text = f"{call}{mark} {escaped(headline(message))}"
    return {"text": text, "blocks": blocks[:MOST_BLOCKS]}


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": clipped(text, LONGEST_TEXT)}}


def escaped(text: str) -> str:
    """Text in which nothing is a link or mentions anybody, not longer than a block takes."""
    pieces, length = [], 0
    for letter in text:
        piece = _ESCAPES.get(letter, letter)
        length += len(piece)
        if length > _LONGEST_PIECE:
            pieces.append("…")
            break
        pieces.append(piece)
    return "".join(pieces)


# -- an incoming webhook ----------------------------------------------------------------------------------------------


def webhook(destination: Destination, message: Message, context: Context) -> Exchange:
    body = message_body(message, destination.option("mention"))
    answer = yield json_request(destination.secrets["url"], body)
    return outcome_of_status(answer)


# -- a bot ------------------------------------------------------------------------------------------------------------


def bot(destination: Destination, message: Message, context: Context) -> Exchange:
    caller = _Caller(destination)
    body = message_body(message, destination.option("mention"))
    thread = _thread_of(context)
    if thread:
        updated = caller.outcome((yield caller.call("chat.update", {**thread, **body})))
        if isinstance(updated, RetryLater):
            return updated  # if it is refused, the first message was deleted, say: a reply is still worth sending
    channel = thread.get("channel") or destination.option("channel")
    if context.repeated:
        answer = yield caller.search(channel, thread.get("ts", ""), message)
        if (found := _found(answer, message.id)) is not None:
            return Delivered(receipt=thread or {"channel": channel, "ts": found})
    post = {"channel": channel, **body, "unfurl_links": False, "metadata": _metadata(message)}
    if thread:
        post["thread_ts"] = thread["ts"]
    answer = yield caller.call("chat.postMessage", post)
    outcome = caller.outcome(answer)
    if isinstance(outcome, Delivered):
        return Delivered(receipt=thread or _receipt(answer))
    return outcome


def _thread_of(context: Context) -> dict[str, str]:
    """Where the first message about the incident is."""
    channel, ts = context.receipt.get("channel"), context.receipt.get("ts")
    return {"channel": channel, "ts": ts} if isinstance(channel, str) and isinstance(ts, str) and ts else {}


def _receipt(answer: Answer) -> dict[str, str]:
    about = answer.json()
    channel, ts = about.get("channel"), about.get("ts")
    return {"channel": channel[:100], "ts": ts[:100]} if isinstance(channel, str) and isinstance(ts, str) else {}


def _metadata(message: Message) -> dict[str, Any]:
    return {"event_type": _EVENT, "event_payload": {"id": message.id}}


def _found(answer: Answer, message_id: str) -> str | None:
    """The timestamp of the message with that id, if the answer to a search contains it."""
    messages = answer.json().get("messages")
    for posted in messages if isinstance(messages, list) else ():
        metadata = posted.get("metadata") if isinstance(posted, dict) else None
        payload = metadata.get("event_payload") if isinstance(metadata, dict) else None
        if isinstance(payload, dict) and payload.get("id") == message_id:
            return str(posted.get("ts", ""))
    return None


def probe(destination: Destination) -> Exchange:
    """Whether Slack accepts the bot's token; posts nothing."""
    caller = _Caller(destination)
    return caller.outcome((yield caller.call("auth.test", {})))


class _Caller:
    """Calls of Slack's Web API by one bot."""

    def __init__(self, destination: Destination) -> None:
        self._api = destination.option("api", _API).rstrip("/")
        self._headers = {"Authorization": f"Bearer {destination.secrets['token']}"}

    def call(self, method: str, document: dict[str, Any]) -> HttpRequest:
        return json_request(f"{self._api}/{method}", document, self._headers)

    def search(self, channel: str, thread: str, message: Message) -> HttpRequest:
        since = {"oldest": f"{message.created_wall_ns / 1e9 - 60:.6f}"} if not thread else {"ts": thread}
        words = {"channel": channel, "include_all_metadata": "true", "limit": _SEARCHED, **since}
        method = "conversations.replies" if thread else "conversations.history"
        return HttpRequest(method="GET", url=f"{self._api}/{method}?{urlencode(words)}", headers=self._headers)

    @staticmethod
    def outcome(answer: Answer) -> Outcome:
        about = answer.json()
        if answer.status != 200 or "ok" not in about:
            plain = outcome_of_status(answer)
            return RetryLater(why="the answer is not Slack's") if isinstance(plain, Delivered) else plain
        if about["ok"] is True:
            return Delivered()
        error = str(about.get("error", "unknown error"))[:100]
        if error in _TEMPORARY:
            return RetryLater(why=f"Slack: {error}", after_s=answer.retry_after_s)
        hint = _HINTS.get(error)
        return Refused(why=f"Slack: {error}{f' ({hint})' if hint else ''}")
