"""What receivers are sent, exactly, and what becomes of their answers.  Nothing is sent here."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alert_messages import BEGAN_NS, lifecycle, message

from stepscope.alerts.message_text import fact_rows, headline, message_document, plain_text
from stepscope.alerts.model import Message
from stepscope.alerts.receivers import TYPES, receiver_functions
from stepscope.alerts.receivers.alertmanager import alert_of
from stepscope.alerts.receivers.exchange import (
    Answer,
    AppriseRequest,
    CommandRequest,
    Context,
    Delivered,
    Destination,
    HttpRequest,
    Outcome,
    Refused,
    Request,
    RetryLater,
)
from stepscope.alerts.receivers.pagerduty import LONGEST_DEDUP_KEY, LONGEST_SUMMARY, event_body
from stepscope.alerts.receivers.slack import (
    LONGEST_HEADER,
    LONGEST_MESSAGE,
    LONGEST_TEXT,
    MOST_BLOCKS,
    message_body,
)
from stepscope.alerts.receivers.webhook import signature, signature_valid
from stepscope.alerts.settings import RECEIVERS

NOW_NS = BEGAN_NS + 30 * 10**9
LINK = "http://127.0.0.1:8000/#/runs/run-1/incidents/1"
TITLE = "Rank 2 is 29 ms slower than its peers in forward; all other ranks wait for it."
COST = (
    "61% of the training time (12.5 s so far); without it a step takes 20.0 ms instead of 50.0 ms on average, "
    "2.50× as fast. 2.50 GPU hours."
)
OK = Answer(body=b'{"ok": true, "channel": "C1", "ts": "17.5"}')


def exchanged(
    kind: str,
    sent: Message,
    *answers: Answer,
    options: Mapping[str, Any] | None = None,
    secrets: Mapping[str, str] | None = None,
    receipt: Mapping[str, Any] | None = None,
    repeated: bool = False,
) -> tuple[list[Request], Outcome]:
    """The requests of an exchange with these answers, and its outcome."""
    defaults = {"url": "https://host/hook", "token": "xoxb-1", "routing_key": "R0UT"}
    values = {name: defaults[name] for name in RECEIVERS[kind].needed if name in defaults}  # type: ignore[index]
    destination = Destination(name="hook", type=kind, options=options or {}, secrets={**values, **(secrets or {})})
    context = Context(wall_ns=NOW_NS, receipt=receipt or {}, repeated=repeated)
    exchange = receiver_functions(kind).exchange(destination, sent, context)
    requests = [next(exchange)]
    for answer in answers:
        try:
            requests.append(exchange.send(answer))
        except StopIteration as finished:
            return requests, finished.value
    raise AssertionError(f"another answer is needed for {requests[-1]}")


def http(request: Request) -> HttpRequest:
    assert isinstance(request, HttpRequest)
    return request


def document(request: Request) -> Any:
    return json.loads(http(request).body)


def test_types_are_those_of_the_settings() -> None:
    assert set(TYPES) == set(RECEIVERS)
    with pytest.raises(ValueError, match="no receiver of type 'pigeon'"):
        receiver_functions("pigeon")


# -- the text ---------------------------------------------------------------------------------------------------------


def test_a_message_says_what_where_since_when_what_it_costs_and_what_to_do() -> None:
    begun, _, ended = lifecycle()
    assert headline(begun) == f"[Firing] run-1: {TITLE}"
    assert fact_rows(begun) == [
        ("Where", "Rank 2 on node-1 in forward at train.py:42"),
        ("Since", "step 300, 2027-01-15 08:00:00 UTC"),
        ("Cost", COST),
        ("What to do", "Look at the code at train.py:42."),
        ("Rule", "critical"),
    ]
    assert plain_text(begun).endswith(f"\nRule: critical\n{LINK}")
    assert headline(ended) == f"[Resolved] run-1: {TITLE}"
    assert ("Over", "after 4 min in step 900: it recovered") in fact_rows(ended)


def test_hostile_values_give_text_all_the_same() -> None:
    hostile = message(cost={"share": "x", "seconds": [], "rank_hours": {}}, since_wall_ns=1 << 62, ranks=(), hosts=())
    assert [label for label, _ in fact_rows(hostile)] == ["Where", "Since", "What to do", "Rule"]


# -- webhook and command ----------------------------------------------------------------------------------------------


def test_webhook_posts_the_message_as_json_and_signs_it() -> None:
    (request,), outcome = exchanged("webhook", message(), Answer(), secrets={"secret": "s3cret", "token": "t0ken"})
    body = http(request).body
    assert document(request) == {
        "schema": 1,
        "id": "run-1/1/1/hook",
        "status": "firing",
        "state": "open",
        "kind": "persistent_straggler",
        "topic": "speed",
        "severity": "critical",
        "title": TITLE,
        "text": plain_text(message()),
        "run": "run-1",
        "incident": 1,
        "dedup_key": "run-1/1",
        "ranks": [2],
        "phase": "forward",
        "hosts": ["node-1"],
        "line": "train.py:42",
        "since_step": 300,
        "since": "2027-01-15T08:00:00.000Z",
        "resolved_step": None,
        "resolved": "",
        "resolved_why": "",
        "acknowledged_by": "",
        "cost": message().incident.cost,
        "advice": ["Look at the code at train.py:42."],
        "also": [],
        "rules": ["critical"],
        "attempt": 0,
        "sent_number": 1,
        "created": "2027-01-15T08:00:01.000Z",
        "link": LINK,
    }
    assert http(request).headers == {
        "Content-Type": "application/json; charset=utf-8",
        "X-Stepscope-Id": "run-1/1/1/hook",
        "X-Stepscope-Status": "firing",
        "X-Stepscope-Signature": signature("s3cret", body, NOW_NS // 10**9),
        "Authorization": "Bearer t0ken",
    }
    assert outcome == Delivered()


def test_a_signature_is_checked_as_the_docs_say() -> None:
    header = signature("s3cret", b'{"a":1}', 1_800_000_000)
    assert header.startswith("t=1800000000,v1=")
    assert signature_valid(header, "s3cret", b'{"a":1}', 1_800_000_100)
    assert not signature_valid(header, "s3cret", b'{"a":1}', 1_800_000_301)
    assert not signature_valid(header, "s3cret", b'{"a":2}', 1_800_000_000)
    assert not signature_valid(header, "other", b'{"a":1}', 1_800_000_000)
    for broken in ("", "t=,v1=", "t=x,v1=y", "t=1800000000", "t=" + "9" * 5000 + ",v1=é", "v1=ü,t=1800000000"):
        assert not signature_valid(broken, "s3cret", b'{"a":1}', 1_800_000_000)


def test_the_recipe_of_the_docs_checks_signatures(root: Path) -> None:
    page = (root / "docs/alert-settings.md").read_text()
    (recipe,) = re.findall(r"```python\n(import hashlib.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(recipe, names)
    now_s = int(time.time())
    assert names["is_from_stepscope"](signature("s3cret", b"{}", now_s), "s3cret", b"{}")
    assert not names["is_from_stepscope"](signature("s3cret", b"{}", now_s), "other", b"{}")
    assert not names["is_from_stepscope"](signature("s3cret", b"{}", now_s - 400), "s3cret", b"{}")


def test_an_id_that_is_not_a_valid_header_is_quoted() -> None:
    odd = replace(message(), id="run\r\nX-Evil: 1/é/1")
    (request,), _ = exchanged("webhook", odd, Answer())
    assert http(request).headers["X-Stepscope-Id"] == "run%0D%0AX-Evil:%201/%C3%A9/1"


def test_command_gets_the_message_on_its_standard_input() -> None:
    (request,), outcome = exchanged("command", message(), Answer(), options={"command": ["notify", "--urgent"]})
    assert isinstance(request, CommandRequest)
    assert (request.argv, json.loads(request.stdin)) == (("notify", "--urgent"), message_document(message()))
    assert outcome == Delivered()


def test_apprise_gets_title_and_text() -> None:
    (request,), _ = exchanged("apprise", message(title="t" * 5000), Answer())
    assert isinstance(request, AppriseRequest)
    assert (len(request.title), len(request.body) <= 1800, request.severity) == (200, True, "critical")
    (resolved,), _ = exchanged("apprise", lifecycle()[2], Answer())
    assert isinstance(resolved, AppriseRequest)
    assert resolved.severity == "resolved"


# -- Slack ------------------------------------------------------------------------------------------------------------


def section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def test_slack_webhook_gets_blocks_and_a_text_for_notifications() -> None:
    (request,), outcome = exchanged("slack", message(), Answer(body=b"ok"), options={"mention": "<!here>"})
    assert document(request) == {
        "text": f"<!here> 🔴 [Firing] run-1: {TITLE}",
        "blocks": [
            {"type": "header", "text": {"type": "plain_text", "text": "🔴 Firing: run-1", "emoji": True}},
            section(f"<!here> *{TITLE}*"),
            section("*Where*\nRank 2 on node-1 in forward at train.py:42"),
            section("*Since*\nstep 300, 2027-01-15 08:00:00 UTC"),
            section(f"*Cost*\n{COST}"),
            section("*What to do*\nLook at the code at train.py:42."),
            section("*Rule*\ncritical"),
            {
                "type": "actions",
                "elements": [
                    {"type": "button", "text": {"type": "plain_text", "text": "Open the incident"}, "url": LINK}
                ],
            },
        ],
    }
    assert outcome == Delivered()


def test_slack_texts_cannot_mention_anybody_and_keep_the_limits() -> None:
    large = message(
        title="<!channel> & <@U1>" * 4000,
        also=("<" * 5000,) * 100,
        advice=("&" * 5000,) * 100,
        line="x" * 9000,
        hosts=("h" * 500,) * 500,
        ranks=tuple(range(5000)),
        rules=("r" * 100,) * 100,
        resolved_why="w" * 9000,
    )
    for hostile in (large, replace(large, run="r" * 3000, link="https://host/" + "l" * 9000, status="resolved")):
        body = message_body(hostile)
        assert len(body["blocks"]) <= MOST_BLOCKS
        assert len(json.dumps(body, ensure_ascii=False)) <= LONGEST_MESSAGE
        assert len(body["blocks"][0]["text"]["text"]) <= LONGEST_HEADER
        texts = [block["text"]["text"] for block in body["blocks"] if block["type"] == "section"]
        assert max(map(len, texts)) <= LONGEST_TEXT
        assert not any("<" in text for text in (body["text"], *texts))
    assert not any(block["type"] == "actions" for block in message_body(replace(large, link="javascript:x"))["blocks"])


def test_slack_bot_keeps_one_thread_and_updates_its_first_message() -> None:
    begun, changed, ended = lifecycle()
    (first,), outcome = exchanged("slack_bot", begun, OK, options={"channel": "#alerts"})
    assert http(first).url == "https://slack.com/api/chat.postMessage"
    assert http(first).headers["Authorization"] == "Bearer xoxb-1"
    assert document(first) == {
        "channel": "#alerts",
        **message_body(begun),
        "unfurl_links": False,
        "metadata": {"event_type": "stepscope_message", "event_payload": {"id": begun.id}},
    }
    assert outcome == Delivered(receipt={"channel": "C1", "ts": "17.5"})
    for later in (changed, ended):
        receipt = {"channel": "C1", "ts": "17.5"}
        requests, outcome = exchanged("slack_bot", later, OK, OK, receipt=receipt, options={"api": "http://slack/api/"})
        assert [http(request).url for request in requests] == [
            "http://slack/api/chat.update",
            "http://slack/api/chat.postMessage",
        ]
        assert document(requests[0]) == {"channel": "C1", "ts": "17.5", **message_body(later)}
        assert document(requests[1])["thread_ts"] == "17.5"
        assert outcome == Delivered(receipt=receipt)


def test_slack_bot_searches_for_what_an_earlier_try_may_have_posted() -> None:
    begun, changed, _ = lifecycle()
    posted = {"ts": "18.5", "metadata": {"event_type": "stepscope_message", "event_payload": {"id": begun.id}}}
    found = Answer(body=json.dumps({"ok": True, "messages": [{}, None, {"metadata": []}, posted]}).encode())
    (search,), outcome = exchanged("slack_bot", begun, found, options={"channel": "C1"}, repeated=True)
    assert http(search).method == "GET"
    query = "channel=C1&include_all_metadata=true&limit=100&oldest=1799999941.000000"
    assert http(search).url == f"https://slack.com/api/conversations.history?{query}"
    assert outcome == Delivered(receipt={"channel": "C1", "ts": "18.5"})
    # Without the scope it cannot search: it posts again.
    refused = Answer(body=b'{"ok": false, "error": "missing_scope"}')
    requests, outcome = exchanged("slack_bot", begun, refused, OK, options={"channel": "C1"}, repeated=True)
    assert [http(request).url.rpartition("/")[2].partition("?")[0] for request in requests] == [
        "conversations.history",
        "chat.postMessage",
    ]
    # A reply is searched in its thread, after the first message was updated.
    receipt = {"channel": "C1", "ts": "17.5"}
    requests, outcome = exchanged("slack_bot", changed, OK, found, OK, receipt=receipt, repeated=True)
    assert [http(request).url.rpartition("/")[2].partition("?")[0] for request in requests] == [
        "chat.update",
        "conversations.replies",
        "chat.postMessage",
    ]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(status=429, retry_after_s=30.0), RetryLater(why="HTTP 429", after_s=30.0)),
        (
            Answer(body=b'{"ok":false,"error":"ratelimited"}', retry_after_s=9),
            RetryLater(why="Slack: ratelimited", after_s=9),
        ),
        (Answer(body=b'{"ok":false,"error":"internal_error"}'), RetryLater(why="Slack: internal_error")),
        (Answer(body=b"<html>login</html>"), RetryLater(why="the answer is not Slack's")),
        (Answer(body=b"[" * 100_000), RetryLater(why="the answer is not Slack's")),
        (Answer(status=503, body=b"down"), RetryLater(why="HTTP 503: down")),
        (
            Answer(body=b'{"ok":false,"error":"channel_not_found"}'),
            Refused(why="Slack: channel_not_found (give the channel's id, and invite the bot to it)"),
        ),
        (Answer(body=b'{"ok":false,"error":"msg_blocks_too_long"}'), Refused(why="Slack: msg_blocks_too_long")),
        (Answer(status=404, body=b"no_team"), Refused(why="HTTP 404: no_team")),
    ],
)
def test_slack_answers(answer: Answer, outcome: Outcome) -> None:
    assert exchanged("slack_bot", message(), answer, options={"channel": "C1"})[1] == outcome


def test_slack_bot_replies_although_the_first_message_was_deleted() -> None:
    gone = Answer(body=b'{"ok":false,"error":"message_not_found"}')
    receipt = {"channel": "C1", "ts": "17.5"}
    assert exchanged("slack_bot", lifecycle()[2], gone, OK, receipt=receipt)[1] == Delivered(receipt=receipt)
    later = Answer(status=500)
    assert exchanged("slack_bot", lifecycle()[2], later, receipt=receipt)[1] == RetryLater(why="HTTP 500")


# -- PagerDuty --------------------------------------------------------------------------------------------------------


def test_pagerduty_event() -> None:
    accepted = Answer(status=202, body=b'{"status":"success"}')
    (request,), outcome = exchanged("pagerduty", message(), accepted)
    assert http(request).url == "https://events.pagerduty.com/v2/enqueue"
    assert document(request) == {
        "routing_key": "R0UT",
        "event_action": "trigger",
        "dedup_key": "run-1/1",
        "client": "Stepscope",
        "client_url": LINK,
        "links": [{"href": LINK, "text": "The incident in Stepscope"}],
        "payload": {
            "summary": f"run-1: {TITLE}",
            "source": "node-1",
            "severity": "critical",
            "timestamp": "2027-01-15T08:00:00.000Z",
            "component": "rank 2",
            "group": "run-1",
            "class": "persistent_straggler",
            "custom_details": {
                "where": "Rank 2 on node-1 in forward at train.py:42",
                "since": "step 300, 2027-01-15 08:00:00 UTC",
                "cost": COST,
                "cost_figures": message().incident.cost,
                "what_to_do": "Look at the code at train.py:42.",
                "rule": "critical",
                "state": "open",
                "kind": "persistent_straggler",
                "incident": 1,
                "phase": "forward",
                "hosts": ["node-1"],
                "line": "train.py:42",
                "since_step": 300,
                "advice": ["Look at the code at train.py:42."],
                "also": [],
                "rules": ["critical"],
                "ranks": [2],
            },
        },
    }
    assert outcome == Delivered()


def test_pagerduty_actions_and_severities() -> None:
    begun, changed, ended = lifecycle()
    acknowledged = replace(changed, incident=replace(changed.incident, state="acknowledged", acknowledged_by="ann"))
    options = {"api": "http://events/"}
    actions = []
    for sent, receipt in (
        (begun, {}),
        (changed, {}),
        (acknowledged, {}),
        (acknowledged, {"acknowledged": True}),
        (ended, {}),
    ):
        (request,), outcome = exchanged("pagerduty", sent, Answer(status=202), options=options, receipt=receipt)
        assert http(request).url == "http://events/v2/enqueue"
        assert document(request)["dedup_key"] == "run-1/1"
        actions.append((document(request)["event_action"], outcome))
    known = Delivered(receipt={"acknowledged": True})
    assert actions == [
        ("trigger", Delivered()),
        ("trigger", Delivered()),
        ("acknowledge", known),
        ("trigger", Delivered()),
        ("resolve", Delivered()),
    ]
    severities = [
        event_body(message(severity=each), "trigger", "")["payload"]["severity"] for each in ("info", "warning")
    ]
    assert severities == ["info", "warning"]


def test_pagerduty_limits() -> None:
    large = message(title="t" * 5000, hosts=("h" * 900,) * 90, ranks=tuple(range(9000)), also=("a" * 2000,) * 32)
    large = replace(large, dedup_key="k" * 300, run="r" * 999)
    body = event_body(large, "trigger", "R0UT")
    assert len(body["payload"]["summary"]) == LONGEST_SUMMARY
    assert len(body["dedup_key"]) == LONGEST_DEDUP_KEY
    assert body["dedup_key"] == event_body(replace(large, status="resolved"), "resolve", "R0UT")["dedup_key"]
    assert body["dedup_key"] != event_body(replace(large, dedup_key="k" * 301), "trigger", "R0UT")["dedup_key"]
    assert len(json.dumps(body)) < 512_000


# -- Alertmanager -----------------------------------------------------------------------------------------------------


def test_alertmanager_alert() -> None:
    options = {"labels": {"team": "vision"}, "username": "me"}
    secrets = {"url": "http://am:9093/prefix/", "password": "pw"}
    (request,), outcome = exchanged("alertmanager", message(), Answer(), options=options, secrets=secrets)
    assert http(request).url == "http://am:9093/prefix/api/v2/alerts"
    assert http(request).headers["Authorization"] == "Basic bWU6cHc="
    labels = {
        "alertname": "StepscopeIncident",
        "run": "run-1",
        "incident": "1",
        "kind": "persistent_straggler",
        "severity": "critical",
        "topic": "speed",
        "team": "vision",
    }
    assert document(request) == [
        {
            "labels": labels,
            "annotations": {
                "summary": TITLE,
                "description": plain_text(message()),
                "where": "Rank 2 on node-1 in forward at train.py:42",
                "since": "step 300, 2027-01-15 08:00:00 UTC",
                "cost": COST,
                "what_to_do": "Look at the code at train.py:42.",
                "rule": "critical",
            },
            "startsAt": "2027-01-15T08:00:00.000Z",
            "endsAt": "2027-01-15T08:05:30.000Z",
            "generatorURL": LINK,
        }
    ]
    assert outcome == Delivered(receipt={"labels": labels})


def test_alertmanager_ends_the_alert_with_the_labels_of_before() -> None:
    (first,), outcome = exchanged("alertmanager", message(severity="warning"), Answer())
    assert isinstance(outcome, Delivered)
    (second,), _ = exchanged("alertmanager", lifecycle()[1], Answer(), receipt=outcome.receipt)
    now, before = document(second)
    assert (now["labels"]["severity"], before["labels"]) == ("critical", document(first)[0]["labels"])
    assert (now["endsAt"], before["endsAt"]) == ("2027-01-15T08:05:30.000Z", "2027-01-15T08:00:30.000Z")
    (third,), _ = exchanged("alertmanager", lifecycle()[2], Answer(), receipt={"labels": now["labels"]})
    assert len(document(third)) == 1


def test_an_alert_never_ends_before_it_begins() -> None:
    destination = Destination(name="am", type="alertmanager", secrets={"url": "http://am"})
    odd = message(1, "resolved", resolved_wall_ns=5, since_wall_ns=BEGAN_NS)
    alert = alert_of(destination, odd, NOW_NS)
    assert alert["endsAt"] == alert["startsAt"] == "2027-01-15T08:00:00.000Z"
