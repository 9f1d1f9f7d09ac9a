"""When messages are sent: in order, again after failures, never after a refusal.  No time passes, nothing is sent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from alert_messages import BEGAN_NS, lifecycle, message
from shifted_clock import shift_clock

from stepscope.alerts.delivery import (
    ReceiverQueue,
    backoff_s,
    deliver_leftovers,
    deliver_once,
    destination_of,
    destinations_of,
)
from stepscope.alerts.outbox import SentLog, append_messages, read_deliveries
from stepscope.alerts.receivers.exchange import Answer, Destination, HttpRequest, Request
from stepscope.alerts.settings import AlertSettings, Receiver, Secret
from stepscope.alerts.transport import NeverSent, NotSent
from stepscope.errors import UsageError
from stepscope.store.locks import LockBusy, take_lock
from stepscope.store.paths import ALERTS, OUTBOX, SENT

HOOK = Destination(name="hook", type="webhook", secrets={"url": "http://host/secret-path"})
ALERTMANAGER = Destination(name="hook", type="alertmanager", secrets={"url": "http://host:9093"})


class SimulatedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_ns(self) -> int:
        return BEGAN_NS + int(self.now_s * 1e9)


class SimulatedReceiver:
    """Answers as ``behavior`` says; a request takes no time unless it sets the clock."""

    def __init__(self, behavior: Callable[[Request], Answer] = lambda _: Answer()) -> None:
        self.behavior = behavior
        self.requests: list[HttpRequest] = []
        self.accepted: list[str] = []

    def carry_out(self, request: Request, destination: Destination) -> Answer:
        assert isinstance(request, HttpRequest)
        self.requests.append(request)
        answer = self.behavior(request)
        if answer.status < 300:
            self.accepted.append(request.headers.get("X-Stepscope-Id", ""))
        return answer


class Delivering:
    """A queue, its clock and its receiver."""

    def __init__(
        self, run_dir: Path, destination: Destination = HOOK, receiver: SimulatedReceiver | None = None
    ) -> None:
        self.clock = SimulatedClock()
        self.receiver = receiver or SimulatedReceiver()
        self.run_dir = run_dir
        self.destination = destination
        self.start()

    def start(self) -> None:
        """As a new process would."""
        log = SentLog(self.run_dir)
        self.queue = ReceiverQueue(
            self.run_dir, self.destination, log, carrier=self.receiver, clock=self.clock, share=lambda: 1.0
        )

    def run_until(self, until_s: float) -> None:
        while self.clock.now_s < until_s:
            self.clock.now_s = min(self.clock.now_s + self.queue.step(), until_s)

    def states(self) -> list[tuple[str, int, str]]:
        return [(delivery.state, delivery.tries, delivery.why) for _, delivery in read_deliveries(self.run_dir)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "run-1"
    folder.mkdir(parents=True)
    append_messages(folder, lifecycle())
    return folder


def ids(*numbers: int, incident: int = 1) -> list[str]:
    return [f"run-1/{incident}/{number}/hook" for number in numbers]


def test_messages_are_sent_in_order_and_once(run_dir: Path) -> None:
    case = Delivering(run_dir)
    case.run_until(5)
    assert case.receiver.accepted == ids(1, 2, 3)
    assert case.states() == [("sent", 1, "")] * 3
    case.start()
    case.run_until(10)
    assert case.receiver.accepted == ids(1, 2, 3)
    append_messages(run_dir, [message(1, number=2)])
    case.run_until(15)
    assert case.receiver.accepted == ids(1, 2, 3) + ids(1, incident=2)


def _down(_: Request) -> Answer:
    raise NotSent("connection refused")


def test_a_receiver_that_is_down_for_ten_minutes(run_dir: Path) -> None:
    case = Delivering(run_dir)

    def behavior(request: Request) -> Answer:
        return _down(request) if case.clock.now_s < 600 else Answer()

    case.receiver.behavior = behavior
    case.run_until(599)
    assert case.receiver.accepted == []
    assert case.states() == [("failed", 8, "connection refused"), ("waiting", 0, ""), ("waiting", 0, "")]
    case.run_until(662)
    assert case.receiver.accepted == ids(1, 2, 3)
    # 1, 2, 4 … seconds, then one a minute: neither a flood, nor a minute lost at a short outage.
    assert len(case.receiver.requests) == 15 + 3
    lines = [json.loads(line) for line in (run_dir / SENT).read_text().splitlines()]
    assert [(line["state"], line["tries"]) for line in lines if line["id"] == ids(1)[0]] == [
        ("sending", 1),
        *(("failed", tries) for tries in (1, 2, 4, 8)),
        ("sent", 16),
    ]


def test_retry_after_of_429_is_honored(run_dir: Path) -> None:
    case = Delivering(run_dir)
    answers = [Answer(status=429, retry_after_s=45.0), Answer(status=503, retry_after_s=20.0)]
    case.receiver.behavior = lambda _: answers.pop(0) if answers else Answer()
    case.run_until(44)
    assert len(case.receiver.requests) == 1
    case.run_until(46)
    assert len(case.receiver.requests) == 2
    case.run_until(64)
    assert len(case.receiver.requests) == 2
    case.run_until(70)
    assert case.receiver.accepted == ids(1, 2, 3)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_these_answers_are_retried(run_dir: Path, status: int) -> None:
    answers = [Answer(status=status, body=b"not now")]
    case = Delivering(run_dir, receiver=SimulatedReceiver(lambda _: answers.pop() if answers else Answer()))
    case.run_until(0.9)
    assert case.states()[0] == ("failed", 1, f"HTTP {status}: not now")
    case.run_until(2)
    assert case.receiver.accepted == ids(1, 2, 3)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 410, 413])
def test_these_answers_end_it(run_dir: Path, status: int) -> None:
    answers = [Answer(status=status, body=b"no such \x1b[31mhook at http://host/secret-path")]
    case = Delivering(run_dir, receiver=SimulatedReceiver(lambda _: answers.pop() if answers else Answer()))
    case.run_until(1)
    why = ": redirects to another address, which is not followed" if status == 301 else ": no such [31mhook at •••"
    assert case.states() == [("given_up", 1, f"HTTP {status}{why}"), ("sent", 1, ""), ("sent", 1, "")]
    assert b"secret-path" not in (run_dir / SENT).read_bytes()


def test_what_can_never_be_sent_is_given_up(run_dir: Path) -> None:
    def behavior(_: Request) -> Answer:
        raise NeverSent("its address is not a valid http or https URL")

    case = Delivering(run_dir, receiver=SimulatedReceiver(behavior))
    case.run_until(1)
    assert case.states() == [("given_up", 1, "its address is not a valid http or https URL")] * 3


def test_a_sender_killed_while_sending_sends_again(run_dir: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(_: Request) -> Answer:
        raise Killed

    case = Delivering(run_dir, receiver=SimulatedReceiver(kill))
    with pytest.raises(Killed):
        case.queue.step()
    assert case.states()[0] == ("sending", 1, "")
    case.receiver.behavior = lambda _: Answer()
    case.start()
    case.run_until(1)
    assert case.receiver.accepted == ids(1, 2, 3)


def test_messages_of_days_ago_are_given_up(run_dir: Path) -> None:
    case = Delivering(run_dir)
    case.clock.now_s = 4 * 86_400.0
    case.queue.step()
    case.run_until(4 * 86_400.0 + 1)
    assert case.receiver.requests == []
    assert case.states() == [("given_up", 0, "could not be sent for 3 days")] * 3


@pytest.mark.parametrize("ahead_s", [-4 * 86_400, 4 * 86_400])
def test_the_age_of_a_message_is_that_on_the_clock_of_its_run(tmp_path: Path, ahead_s: int) -> None:
    """The time of day was set by four days while the run was active."""
    now_ns = shift_clock(tmp_path, ahead_s * 10**9)
    old = replace(message(1, number=1), created_wall_ns=now_ns - 300_000 * 10**9)
    new = replace(message(1, number=2), created_wall_ns=now_ns)
    append_messages(tmp_path, [old, new])
    receiver = SimulatedReceiver()
    counts = deliver_once(tmp_path, [HOOK], carrier=receiver)
    assert (counts.sent, counts.given_up, receiver.accepted) == (1, 1, [new.id])
    times = [delivery.wall_ns - now_ns for _, delivery in read_deliveries(tmp_path)]
    assert all(0 <= after_ns < 86_400 * 10**9 for after_ns in times)


def test_backoff_doubles_up_to_a_minute_and_is_spread() -> None:
    assert [backoff_s(tries, 1.0) for tries in (1, 2, 3, 6, 7, 1000)] == [1.0, 2.0, 4.0, 32.0, 60.0, 60.0]
    assert backoff_s(7, 0.0) == 30.0


# -- alerts that must be renewed --------------------------------------------------------------------------------------


def test_open_alerts_are_renewed_until_they_are_resolved(tmp_path: Path) -> None:
    begun, changed, ended = lifecycle()
    append_messages(tmp_path, [begun])
    case = Delivering(tmp_path, ALERTMANAGER)
    case.run_until(0.5)
    assert len(case.receiver.requests) == 1
    case.run_until(130)
    posted = [json.loads(request.body)[0] for request in case.receiver.requests]
    assert [alert["endsAt"] for alert in posted] == [
        "2027-01-15T08:05:00.000Z",
        "2027-01-15T08:06:00.000Z",
        "2027-01-15T08:07:00.000Z",
    ]
    case.start()  # a new sender knows from the files what is open
    case.run_until(200)
    assert len(case.receiver.requests) == 4
    append_messages(tmp_path, [changed, ended])
    case.run_until(1000)
    assert len(case.receiver.requests) == 6
    assert json.loads(case.receiver.requests[-1].body)[0]["endsAt"] == "2027-01-15T08:03:20.000Z"


def test_a_renewal_that_fails_is_repeated_sooner(tmp_path: Path) -> None:
    append_messages(tmp_path, lifecycle()[:1])
    case = Delivering(tmp_path, ALERTMANAGER)
    case.run_until(1)
    case.receiver.behavior = _down
    case.run_until(92)
    assert len(case.receiver.requests) == 1 + 3


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_a_receiver_without_its_secret_waits_for_the_next_sender(run_dir: Path) -> None:
    receiver = Receiver(name="hook", type="webhook", secrets={"url": Secret("env", "HOOK_URL")})
    settings = AlertSettings(receivers={"hook": receiver})
    (destination,), problems = destinations_of(settings, {})
    assert problems == {"hook": "the environment variable HOOK_URL is not set"}
    with pytest.raises(UsageError):
        destination_of(receiver, {})
    carrier, clock = SimulatedReceiver(), SimulatedClock()
    queue = ReceiverQueue(
        run_dir, destination, SentLog(run_dir), carrier=carrier, clock=clock, problem=problems["hook"]
    )
    assert queue.step() > 0
    assert carrier.requests == []
    assert [delivery.state for _, delivery in read_deliveries(run_dir)] == ["failed", "waiting", "waiting"]
    while clock.now_s < 86_400:
        clock.now_s += queue.step()
    assert (run_dir / SENT).read_text().count("\n") <= 11  # of thousands of tries
    assert carrier.requests == []
    found, problems = destinations_of(settings, {"HOOK_URL": "http://host/x"})
    assert (problems, "http://host/x" in repr(found)) == ({}, False)
    queue = ReceiverQueue(run_dir, found[0], SentLog(run_dir), carrier=carrier, clock=clock)
    while queue.step() == 0:
        pass
    assert carrier.accepted == ids(1, 2, 3)


# -- a large sent.jsonl -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mebibytes", "accepted"), [(65, ids(1, 2, 3)), (129, [])])
def test_what_may_have_been_sent_is_not_sent_again_if_the_file_is_too_large(
    run_dir: Path, mebibytes: int, accepted: list[str]
) -> None:
    append_messages(run_dir, [])
    (run_dir / SENT).write_bytes(b"{}\n")
    os.truncate(run_dir / SENT, mebibytes << 20)
    case = Delivering(run_dir)
    for _ in range(2):
        case.start()
        case.run_until(case.clock.now_s + 100)
    assert case.receiver.accepted == accepted


# -- what earlier senders left ----------------------------------------------------------------------------------------


def age(run_dir: Path, seconds: float) -> None:
    """Let the outbox of a run look as if it was last written so long before the simulated clock's beginning."""
    when = BEGAN_NS / 1e9 - seconds
    os.utime(run_dir / OUTBOX, (when, when))


def test_the_next_sender_in_a_folder_delivers_the_rest(run_dir: Path) -> None:
    runs = run_dir.parent
    recent, own = runs / "recent", runs / "own"
    for folder in (recent, own):
        folder.mkdir()
        append_messages(folder, lifecycle(run=folder.name))
    age(run_dir, 3600)
    age(own, 3600)
    age(recent, 60)
    receiver = SimulatedReceiver()
    counts = deliver_leftovers(runs, [HOOK], without=own, carrier=receiver, clock=SimulatedClock())
    assert (counts.sent, counts.given_up, counts.waiting) == (3, 0, 0)
    assert receiver.accepted == ids(1, 2, 3)
    second = deliver_leftovers(runs, [HOOK], without=own, carrier=receiver, clock=SimulatedClock())
    assert second.sent == 0


def test_a_receiver_that_is_down_is_tried_once_for_all_runs_left(run_dir: Path) -> None:
    other = run_dir.parent / "other"
    other.mkdir()
    append_messages(other, [replace(message(run="other"), receiver="second"), message(run="other")])
    age(run_dir, 7200)
    age(other, 3600)
    second = replace(HOOK, name="second", secrets={"url": "http://second/"})
    receiver = SimulatedReceiver(lambda request: _down(request) if "host" in getattr(request, "url", "") else Answer())
    counts = deliver_leftovers(run_dir.parent, [HOOK, second], carrier=receiver, clock=SimulatedClock())
    assert (counts.sent, counts.waiting) == (1, 1)
    assert [request.url for request in receiver.requests] == ["http://host/secret-path", "http://second/"]


def test_a_run_with_a_sender_of_its_own_is_left_alone(run_dir: Path) -> None:
    lock = take_lock(run_dir / ALERTS)
    try:
        with pytest.raises(LockBusy):
            deliver_once(run_dir, [HOOK], carrier=SimulatedReceiver())
    finally:
        os.close(lock)
    assert deliver_once(run_dir, [HOOK], carrier=SimulatedReceiver(), clock=SimulatedClock()).sent == 3
