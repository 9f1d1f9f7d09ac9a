"""A real Alertmanager: what our receiver posts arrives there, and what it sends on is compared with what we send."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alert_messages import message
from loopback_receiver import LoopbackReceiver, Received, closed_port
from waiting import until

from stepscope.alerts.delivery import ReceiverQueue, SystemClock
from stepscope.alerts.model import Message
from stepscope.alerts.outbox import SentLog, append_messages, read_deliveries
from stepscope.alerts.receivers.exchange import Destination
from stepscope.alerts.transport import Transport

PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="Alertmanager is not installed")

CONFIGURATION = """
route: {{receiver: all, group_by: [run], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers:
- name: all
  webhook_configs: [{{url: {url}/am/webhook, send_resolved: true}}]
  slack_configs: [{{api_url: {url}/am/slack, channel: '#alerts', send_resolved: true}}]
  pagerduty_configs: [{{routing_key: R0UT, url: {url}/am/pagerduty, send_resolved: true}}]
"""


def get(url: str) -> Any:
    """The JSON there; None if there is no answer yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.loads(answer.read() or b"null")
    except (OSError, ValueError):
        return None


@pytest.fixture
def alertmanager(tmp_path: Path, receiver: LoopbackReceiver) -> Iterator[str]:
    assert PROGRAM is not None
    (tmp_path / "am.yml").write_text(CONFIGURATION.format(url=receiver.url))
    where = f"127.0.0.1:{closed_port()}"
    words = [f"--config.file={tmp_path / 'am.yml'}", f"--storage.path={tmp_path / 'am'}"]
    words += [f"--web.listen-address={where}", "--cluster.listen-address="]
    with (tmp_path / "am.log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, *words], stdout=log, stderr=log)
    try:
        until(lambda: get(f"http://{where}/api/v2/status"))
        yield f"http://{where}"
    finally:
        process.kill()
        process.wait()


class OurSender:
    """Delivers to all of our receivers at once, without threads."""

    def __init__(self, run_dir: Path, destinations: list[Destination]) -> None:
        self._run_dir = run_dir
        log, carrier, clock = SentLog(run_dir), Transport({}), SystemClock()
        self._names = [destination.name for destination in destinations]
        self._queues = [
            ReceiverQueue(run_dir, destination, log, carrier=carrier, clock=clock) for destination in destinations
        ]

    def send(self, template: Message) -> None:
        named = [replace(template, receiver=name, id=f"{template.id}-{name}") for name in self._names]
        append_messages(self._run_dir, named)
        for queue in self._queues:
            while not queue.step():
                pass
        assert {delivery.state for _, delivery in read_deliveries(self._run_dir)} == {"sent"}


def shapes(value: Any) -> Any:
    """The types of a document's values."""
    if isinstance(value, dict):
        return {key: shapes(each) for key, each in value.items()}
    return type(value).__name__


def test_an_incident_from_begin_to_end(tmp_path: Path, receiver: LoopbackReceiver, alertmanager: str) -> None:
    run_dir = tmp_path / "run-1"
    run_dir.mkdir()
    ours = OurSender(
        run_dir,
        [
            Destination(name="am", type="alertmanager", secrets={"url": alertmanager}),
            Destination(name="hook", type="webhook", secrets={"url": f"{receiver.url}/our/webhook"}),
            Destination(name="slack", type="slack", secrets={"url": f"{receiver.url}/our/slack"}),
            Destination(
                name="pd",
                type="pagerduty",
                options={"api": f"{receiver.url}/our/v2/enqueue"},
                secrets={"routing_key": "R0UT"},
            ),
        ],
    )

    def got(path: str, count: int) -> list[Received]:
        """The first requests to a path, as soon as there are so many."""
        receiver.wait_for(lambda: sum(request.path == path for request in receiver.requests) >= count)
        return [request for request in receiver.requests if request.path == path]

    now_ns = time.time_ns()
    begun = replace(message(), created_wall_ns=now_ns)
    begun = replace(begun, incident=replace(begun.incident, since_wall_ns=now_ns, opened_wall_ns=now_ns))
    ours.send(begun)
    (alert,) = until(lambda: get(f"{alertmanager}/api/v2/alerts"))
    assert alert["labels"] == {
        "alertname": "StepscopeIncident",
        "incident": "1",
        "kind": "persistent_straggler",
        "run": "run-1",
        "severity": "critical",
        "topic": "speed",
    }
    assert alert["annotations"]["summary"] == begun.incident.title
    assert alert["generatorURL"] == begun.link
    assert (alert["status"]["state"], [each["name"] for each in alert["receivers"]]) == ("active", ["all"])
    (group,) = get(f"{alertmanager}/api/v2/alerts/groups")
    assert (group["labels"], len(group["alerts"])) == ({"run": "run-1"}, 1)
    for path in ("/am/webhook", "/am/slack", "/am/pagerduty"):
        assert len(got(path, 1)) == 1

    ended_ns = time.time_ns()
    known = {"state": "resolved", "resolved_wall_ns": ended_ns, "resolved_why": "it recovered"}
    incident = replace(begun.incident, **known)  # type: ignore[arg-type]
    ours.send(replace(begun, id="run-1/1/2", status="resolved", incident=incident))
    theirs = {name: got(f"/am/{name}", 2) for name in ("webhook", "slack", "pagerduty")}
    our = {name: got(f"/our/{name}", 2) for name in ("webhook", "slack")}
    our["pagerduty"] = got("/our/v2/enqueue", 2)
    until(lambda: get(f"{alertmanager}/api/v2/alerts") == [])

    # One notification when it begins and one when it is over, from them and from us.
    assert [request.json["status"] for request in theirs["webhook"]] == ["firing", "resolved"]
    assert [request.json["status"] for request in our["webhook"]] == ["firing", "resolved"]
    for name, requests in theirs.items():
        assert [request.method for request in requests] == [request.method for request in our[name]]
        types = {request.headers["Content-Type"].partition(";")[0] for request in (*requests, *our[name])}
        assert types == {"application/json"}

    # PagerDuty: whatever Alertmanager sends, we send in the same shape, with the same actions.
    for their_event, our_event in zip(theirs["pagerduty"], our["pagerduty"], strict=True):
        assert their_event.json["event_action"] == our_event.json["event_action"]
        assert their_event.json["routing_key"] == our_event.json["routing_key"]
        their_shape, our_shape = shapes(their_event.json), shapes(our_event.json)
        assert {"routing_key", "event_action", "dedup_key", "client", "client_url", "payload"} <= their_shape.keys()
        assert {"summary", "source", "severity"} <= their_shape["payload"].keys()
        their_shape["payload"].pop("custom_details")  # free-form in both
        assert isinstance(our_shape["payload"].pop("custom_details"), dict)
        assert their_shape["payload"].items() <= our_shape["payload"].items()
        assert {key: shape for key, shape in their_shape.items() if key != "payload"}.items() <= our_shape.items()
    assert [request.json["event_action"] for request in our["pagerduty"]] == ["trigger", "resolve"]
    for events in (theirs["pagerduty"], our["pagerduty"]):
        assert len({request.json["dedup_key"] for request in events}) == 1

    # Slack: theirs is an attachment, ours are blocks; both name state and run, and link to the source.
    for their_post, our_post in zip(theirs["slack"], our["slack"], strict=True):
        (attachment,) = their_post.json["attachments"]
        header, *_ = our_post.json["blocks"]
        assert "run-1" in attachment["title"]
        assert "run-1" in header["text"]["text"]
        assert isinstance(attachment["fallback"], str)
        assert isinstance(our_post.json["text"], str)
        assert begun.link in json.dumps(our_post.json["blocks"])
    assert [("RESOLVED" in request.json["attachments"][0]["title"]) for request in theirs["slack"]] == [False, True]
    assert [("Resolved" in request.json["text"]) for request in our["slack"]] == [False, True]
