"""Incidents from what is observed: what opens, changes and ends them, and which messages that sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.alerts.engine import AlertEngine, RunName
from stepscope.alerts.model import Incident, Message
from stepscope.alerts.observation import MemoryAtEpoch, NodeSilence, NotFinite, Observation, RunEnd
from stepscope.alerts.requests import Acknowledgment
from stepscope.alerts.settings import DEFAULT_RULES, MEASURES, AlertSettings, Receiver, Rule
from stepscope.records.finding_history import FindingEpisode
from tests.support.example_counts import examples

S = 1_000_000_000
RUN = RunName(id="run-1", name="night")


# -- what the tests observe -------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


@dataclass
class Store:
    """Files in memory.  ``left``: after this many writes the process dies; a write of several messages may be cut."""

    messages_written: list[Message] = field(default_factory=list)
    lines: list[Incident] = field(default_factory=list)
    left: int | None = None

    def incidents(self) -> Iterable[Incident]:
        return list({incident.number: incident for incident in self.lines}.values())

    def messages(self) -> Iterable[Message]:
        return list({message.id: message for message in reversed(self.messages_written)}.values())[::-1]

    def append_messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._count()
            self.messages_written.append(message)
        self._count()

    def append_incident(self, incident: Incident) -> None:
        self._count()
        self.lines.append(incident)
        self._count()

    def _count(self) -> None:
        if self.left is None:
            return
        if self.left == 0:
            self.left = None
            raise Killed
        self.left -= 1

    def sent(self, receiver: str = "hook") -> list[tuple[str, str]]:
        return [(each.status, each.incident.kind) for each in self.messages() if each.receiver == receiver]


@dataclass
class Desk:
    requests: list[Acknowledgment] = field(default_factory=list)
    silent: bool = False

    def acknowledgments(self) -> Sequence[Acknowledgment]:
        found, self.requests = self.requests, []
        return found

    def silenced(self, incident: Incident, wall_ns: int) -> bool:
        return self.silent


def receiver(name: str = "hook", **more: Any) -> Receiver:
    return Receiver(name=name, type="webhook", **more)


def on_findings(**more: Any) -> Rule:
    return Rule(**{"name": "findings", "on": "findings", "receivers": ("hook",), **more})


def on_measure(name: str, **parameters: float) -> Rule:
    known = {key: about.default for key, about in MEASURES[name].parameters.items() if about.default is not None}
    return Rule(
        name=name,
        on="measure",
        measure=name,
        parameters={**known, **parameters},
        receivers=("hook",),
        send_as=MEASURES[name].severity,
        for_seconds=MEASURES[name].for_seconds,
    )


def alerts(*rules: Rule, receivers: Sequence[Receiver] = (), **more: Any) -> AlertSettings:
    known = {each.name: each for each in receivers or (receiver(),)}
    return AlertSettings(rules=rules or (on_findings(),), receivers=known, **more)


def finding(number: int = 1, kind: str = "compute_straggler", **more: Any) -> FindingEpisode:
    values = {
        "kind": kind,
        "severity": "critical",
        "title": f"{kind} on rank 2.",
        "ranks": [2],
        "phase": "forward",
        "steps": [300, 400],
        "cost": {"share": 0.4, "seconds": 4.0, "rank_hours": 0.01, "if_fixed": None},
        "evidence": {"place": "Model.forward, train.py:41"},
        "advice": ["Look at train.py:41."],
        "confidence": 0.95,
        **more,
    }
    return FindingEpisode(
        number=number,
        change="opened",
        finding=values,
        attempt=0,
        first_step=310,
        first_wall_ns=5 * S,
        step=310,
        wall_ns=5 * S,
    )


class Play:
    """An engine and its clock: ``see`` observes for some seconds, every two."""

    def __init__(self, rules: AlertSettings, store: Store | None = None, desk: Desk | None = None) -> None:
        self.store = Store() if store is None else store
        self.desk = Desk() if desk is None else desk
        self.settings = rules
        self.now_s = 1000.0
        self.base: dict[str, Any] = {"ranks": 4, "world_size": 4, "hosts": {2: "node-a"}, "step": 400}
        self.restart()

    def restart(self) -> None:
        self.engine = AlertEngine(
            self.store, self.settings, run=RUN, link=lambda number: f"http://hub/{number}", desk=self.desk
        )

    def see(self, *findings: FindingEpisode, seconds: float = 2.0, **more: Any) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 2.0
            self.base["step"] = more["step"] if "step" in more else self.base["step"] + 1
            seen = {**self.base, **more, "wall_ns": int(self.now_s * S), "findings": findings}
            self.engine.observe(Observation(**seen))

    def end(self, status: str = "finished", exit_code: int = 0) -> None:
        self.engine.conclude(RunEnd(wall_ns=int(self.now_s * S), status=status, exit_code=exit_code))


# -- one cause, one incident ------------------------------------------------------------------------------------------


def test_a_slow_rank_sends_a_message_with_its_place_and_one_when_it_recovers() -> None:
    play = Play(alerts())
    play.see(finding(), seconds=60)
    play.see(seconds=60)
    assert play.store.sent() == [("firing", "compute_straggler"), ("resolved", "compute_straggler")]
    first, last = play.store.messages()
    assert first.id == "run-1/1/1/hook"
    assert first.dedup_key == last.dedup_key == "stepscope/run-1/1"
    assert first.link == "http://hub/1"
    about = first.incident
    assert (about.ranks, about.hosts, about.line, about.since_step) == ((2,), ("node-a",), "train.py:41", 300)
    assert about.cost["share"] == 0.4
    assert about.advice == ("Look at train.py:41.",)
    # The group time passed before the first message, and the hold-off before the last.
    assert first.created_wall_ns == 1008 * S
    assert last.created_wall_ns == 1076 * S
    assert last.incident.resolved_why == "it recovered"


def test_a_slow_rank_has_recovered_where_its_steps_end_although_the_window_still_has_them() -> None:
    slow = {"title": "Rank 2 is slower from step 300 on."}
    walls = tuple((step, (1000 + step - 400) * S) for step in range(380, 480))
    play = Play(alerts())
    play.see(finding(**slow, steps=[300, 400]), seconds=20, judged_step=400, step_walls=walls)
    # It ended in step 421, at 1021 s; the rules first judge enough steps after it at 1030 s.
    over = {"title": "Rank 2 was slower in steps 310 to 421.", "steps": [310, 421]}
    play.see(finding(**over), seconds=10, judged_step=440, step_walls=walls)
    assert play.store.sent() == [("firing", "compute_straggler")]
    play.see(finding(**over), seconds=30, judged_step=445, step_walls=walls)
    assert play.store.sent() == [("firing", "compute_straggler"), ("resolved", "compute_straggler")]
    first, last = play.store.messages()
    assert first.incident.title == last.incident.title == "Rank 2 is slower from step 300 on."
    assert (last.incident.resolved_why, last.incident.since_step) == ("it recovered", 300)
    assert last.created_wall_ns == 1036 * S  # 15 s after it recovered


def test_a_rank_that_is_slow_again_before_the_hold_off_is_the_same_incident() -> None:
    walls = tuple((step, (1000 + step - 400) * S) for step in range(380, 500))
    play = Play(alerts())
    play.see(finding(steps=[300, 400]), seconds=20, judged_step=400, step_walls=walls)
    play.see(finding(steps=[300, 421]), seconds=10, judged_step=445, step_walls=walls)
    play.see(finding(steps=[432, 452]), seconds=10, judged_step=452, step_walls=walls)
    assert play.store.sent() == [("firing", "compute_straggler")]
    play.see(finding(steps=[432, 452]), seconds=40, judged_step=472, step_walls=walls)
    assert play.store.sent() == [("firing", "compute_straggler"), ("resolved", "compute_straggler")]


def test_a_rank_that_recovers_before_the_first_message_is_reported_and_resolved() -> None:
    """On a very busy machine the rules run every half minute: it may be over soon after it was found."""
    walls = tuple((step, (1000 + step - 400) * S) for step in range(380, 500))
    play = Play(alerts())
    play.see(finding(steps=[300, 400]), seconds=4, judged_step=400, step_walls=walls)
    play.see(finding(steps=[300, 401]), seconds=40, judged_step=430, step_walls=walls)
    assert play.store.sent() == [("firing", "compute_straggler"), ("resolved", "compute_straggler")]
    assert [each.created_wall_ns for each in play.store.messages()] == [1008 * S, 1016 * S]  # 15 s after it recovered


def test_another_cause_keeps_the_incident_of_a_rank_that_recovered() -> None:
    walls = tuple((step, (1000 + step - 400) * S) for step in range(380, 500))
    play = Play(alerts())
    change = finding(2, "change_point", ranks=[], evidence={})
    play.see(finding(steps=[300, 400]), change, seconds=20, judged_step=400, step_walls=walls)
    play.see(finding(steps=[300, 421]), change, seconds=30, judged_step=445, step_walls=walls)
    play.see(finding(steps=[300, 421]), seconds=14, judged_step=446, step_walls=walls)
    assert [status for status, _ in play.store.sent()] == ["firing"]
    play.see(finding(steps=[300, 421]), seconds=2, judged_step=446, step_walls=walls)
    assert [status for status, _ in play.store.sent()] == ["firing", "resolved"]


@pytest.mark.parametrize(
    ("line_s", "slow_s", "sent_s"),
    [
        (8, 0, 1010),  # with the line, as soon as it is known
        (60, 0, 1014),  # without, after a while
        (60, 20, 1008),  # at once if it has been slow for long
    ],
)
def test_the_first_message_about_a_slow_rank_waits_a_little_for_its_line(line_s: int, slow_s: int, sent_s: int) -> None:
    walls = ((300, (1000 - slow_s) * S), (400, 1001 * S))
    play = Play(alerts())
    play.see(finding(evidence={}), seconds=line_s, step_walls=walls)
    play.see(finding(), seconds=4, step_walls=walls)
    (first,) = play.store.messages()
    assert first.created_wall_ns == sent_s * S
    assert first.incident.line == ("train.py:41" if line_s == 8 else "")


def test_a_line_that_the_rules_withdraw_is_still_in_the_first_message() -> None:
    play = Play(alerts())
    play.see(finding(), seconds=2)
    play.see(finding(evidence={}), seconds=8)
    (first,) = play.store.messages()
    assert first.incident.line == "train.py:41"


def test_signals_of_one_topic_are_one_incident_led_by_the_one_that_explains_it() -> None:
    change = finding(1, "change_point", ranks=[], evidence={})
    slow = finding(2, "compute_straggler", cost={"share": 0.1})
    play = Play(alerts())
    play.see(change, seconds=4)
    play.see(change, slow, seconds=60)
    play.see(seconds=60)
    assert play.store.sent() == [("firing", "compute_straggler"), ("resolved", "compute_straggler")]
    (incident,) = play.engine.incidents
    assert incident.also == ("change_point on rank 2.",)
    assert incident.findings == (2, 1)


def test_incidents_of_different_topics_are_separate() -> None:
    play = Play(alerts())
    play.see(finding(), finding(2, "loss_nan", ranks=[]), finding(3, "memory_creep"), seconds=20)
    assert sorted(incident.topic for incident in play.engine.incidents) == ["memory", "numbers", "speed"]


def test_a_signal_that_passes_within_the_group_time_sends_nothing() -> None:
    play = Play(alerts())
    play.see(finding(), seconds=4)
    play.see(seconds=60)
    assert play.engine.incidents == ()
    assert play.store.sent() == []


def test_a_gap_shorter_than_the_hold_off_is_the_same_incident() -> None:
    play = Play(alerts(resolve_seconds=15))
    for _ in range(10):
        play.see(finding(), seconds=10)
        play.see(seconds=10)
    assert play.store.sent() == [("firing", "compute_straggler")]


def test_what_comes_and_goes_is_held_longer_each_time() -> None:
    play = Play(alerts(resolve_seconds=15))
    for _ in range(40):
        play.see(finding(), seconds=20)
        play.see(seconds=40)
    assert [status for status, _ in play.store.sent()] == ["firing", "resolved", "firing", "resolved", "firing"]


def test_a_finding_must_cost_enough_and_last() -> None:
    rule = on_findings(severity="warning", cost_share=0.2, for_seconds=10)
    play = Play(alerts(rule))
    play.see(finding(severity="info"), finding(2, severity="warning", cost={"share": 0.1}), seconds=60)
    play.see(finding(3, severity="warning", cost={"share": 0.3}), seconds=8)
    play.see(finding(4, confidence=0.6), seconds=60)
    assert play.store.sent() == []
    play.see(finding(5, severity="warning", cost={"share": 0.3}), seconds=20)
    assert play.store.sent() == [("firing", "compute_straggler")]


def test_time_between_steps_is_reported_by_default_if_a_rank_is_to_blame() -> None:
    rules = [replace(rule, receivers=("hook",)) for rule in DEFAULT_RULES if rule.name == "costly"]
    play = Play(alerts(*rules))
    play.see(finding(1, "between_steps", phase="other", ranks=[]), seconds=60)
    play.see(finding(2, "between_steps", phase="checkpoint", ranks=[0]), seconds=60)
    assert play.store.sent() == []
    play.see(finding(3, "between_steps", phase="other", ranks=[1]), seconds=20)
    assert play.store.sent() == [("firing", "between_steps")]


def test_memory_that_no_longer_grows_is_no_reason_to_act() -> None:
    grew = {"first_step": 100, "last_step": 400}
    play = Play(alerts())
    play.see(finding(1, "memory_creep", evidence=grew), seconds=60, step=500)
    assert play.engine.incidents == ()
    play.see(finding(1, "memory_creep", evidence=grew), seconds=60, step=420)
    assert play.store.sent() == [("firing", "memory_creep")]


# -- updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sent"),
    [
        ({}, 1),
        ({"cost": {"share": 0.5}}, 1),
        ({"cost": {"share": 0.85}}, 2),
        ({"ranks": [1, 2]}, 2),
    ],
)
def test_an_update_is_sent_if_rank_or_cost_change_much_and_not_too_often(change: dict[str, Any], sent: int) -> None:
    play = Play(alerts(update_seconds=300))
    play.see(finding(), seconds=20)
    play.see(finding(**change), seconds=200)
    assert len(play.store.sent()) == 1
    play.see(finding(**change), seconds=600)
    assert [status for status, _ in play.store.sent()] == ["firing", "updated"][:sent]


def test_an_incident_that_stays_open_is_written_less_and_less_often() -> None:
    play = Play(alerts())
    lines = []
    for hour in range(1, 21):
        for minute in range(60):
            play.now_s += 58
            play.see(finding(cost={"share": 0.4, "seconds": hour * 60.0 + minute}))
        lines.append(len(play.store.lines))
    assert lines[0] == pytest.approx(60, abs=2)
    assert lines[-1] - lines[-2] == pytest.approx(5, abs=1)
    assert lines[-1] < 400
    assert play.store.sent() == [("firing", "compute_straggler")]


def test_a_receiver_gets_only_what_it_wants() -> None:
    names = ("quiet", "loud")
    receivers = [receiver("quiet", updates=False, resolved=False), receiver("loud", severity="critical")]
    play = Play(alerts(on_findings(receivers=names), receivers=receivers, update_seconds=10))
    play.see(finding(severity="warning"), seconds=20)
    assert (play.store.sent("quiet"), play.store.sent("loud")) == ([("firing", "compute_straggler")], [])
    play.see(finding(), seconds=60)
    play.see(finding(ranks=[1]), seconds=60)
    play.see(seconds=60)
    assert [status for status, _ in play.store.sent("quiet")] == ["firing"]
    assert [status for status, _ in play.store.sent("loud")] == ["firing", "updated", "resolved"]


def test_an_acknowledged_incident_sends_only_its_end() -> None:
    play = Play(alerts(update_seconds=10, repeat_seconds=20))
    play.see(finding(), seconds=20)
    play.desk.requests.append(Acknowledgment(incident=1, by="ada"))
    play.see(finding(), seconds=2)
    play.see(finding(ranks=[0, 1]), seconds=100)
    play.see(seconds=60)
    assert [status for status, _ in play.store.sent()] == ["firing", "updated", "resolved"]
    assert [each.incident.state for each in play.store.messages()] == ["open", "acknowledged", "resolved"]
    assert list(play.store.messages())[-1].incident.acknowledged_by == "ada"


def test_a_silenced_incident_is_kept_and_sends_nothing_until_the_silence_ends() -> None:
    play = Play(alerts(), desk=Desk(silent=True))
    play.see(finding(), seconds=60)
    assert [incident.state for incident in play.engine.incidents] == ["open"]
    assert play.store.sent() == []
    play.desk.silent = False
    play.see(finding(), seconds=2)
    assert play.store.sent() == [("firing", "compute_straggler")]
    play.see(seconds=60)
    play.desk.silent = True
    play.see(finding(2, "loss_nan"), seconds=20)
    play.see(seconds=100)
    assert [status for status, _ in play.store.sent()] == ["firing", "resolved"]
    assert [incident.state for incident in play.engine.incidents] == ["resolved", "resolved"]


def test_a_receiver_that_gets_too_many_messages_is_sent_what_was_left_out() -> None:
    play = Play(alerts(messages_per_hour=4, resolve_seconds=2))
    for number, kind in enumerate(("compute_straggler", "loss_nan", "memory_creep"), 1):
        play.see(finding(number, kind), seconds=20)
        play.see(seconds=20)
    play.see(finding(4, "rank_lost"), seconds=20)
    assert play.store.sent()[-1] == ("firing", "messages_left_out")
    assert "rank_lost" not in [kind for _, kind in play.store.sent()]
    play.see(finding(4, "rank_lost"), seconds=3700)
    assert play.store.sent()[-2:] == [("resolved", "messages_left_out"), ("firing", "rank_lost")]
    left_out = next(each for each in play.engine.incidents if each.kind == "messages_left_out")
    assert left_out.also == ("3: memory_creep on rank 2.", "5: rank_lost on rank 2.")


# -- a job that stopped -----------------------------------------------------------------------------------------------


def test_a_hang_is_over_when_the_job_makes_steps_again() -> None:
    play = Play(alerts())
    hang = finding(1, "hang_input", steps=[401, 401])
    play.see(hang, seconds=60, step=400)
    play.see(seconds=120, step=400)
    assert play.store.sent() == [("firing", "hang_input")]
    play.see(seconds=20)
    assert play.store.sent() == [("firing", "hang_input"), ("resolved", "hang_input")]


def test_a_hang_that_ends_in_a_kill_is_one_message() -> None:
    play = Play(alerts(on_findings(), on_measure("run_failed"), on_measure("no_step", seconds=30)))
    hang = finding(1, "hang_input")
    play.see(hang, seconds=60, step=400, last_step_wall_ns=900 * S)
    play.see(hang, finding(2, "rank_crashed"), seconds=2, step=400, last_step_wall_ns=900 * S)
    play.end("crashed", 137)
    assert play.store.sent() == [("firing", "hang_input")]
    (incident,) = play.engine.incidents
    assert incident.state == "open"
    assert incident.also[-1] == "The run crashed with exit code 137 after step 400."


def test_the_end_of_a_run_is_sent_to_receivers_that_an_open_incident_did_not_have() -> None:
    hang = on_findings(kinds=("hang_input",), receivers=("chat",))
    failed = replace(on_measure("run_failed"), receivers=("pager",))
    play = Play(alerts(hang, failed, receivers=[receiver("chat"), receiver("pager")]))
    play.see(finding(1, "hang_input"), seconds=60, step=400)
    play.end("failed", 1)
    play.restart()
    play.end("failed", 1)
    assert play.store.sent("chat") == play.store.sent("pager") == [("firing", "hang_input")]
    *_, last = play.store.messages()
    assert (last.receiver, last.incident.also) == ("pager", ("The run failed with exit code 1 after step 400.",))
    assert tuple(play.store.incidents()) == play.engine.incidents


def test_the_end_of_a_run_is_sent_to_a_receiver_that_wants_only_what_is_critical() -> None:
    stuck = replace(on_measure("no_step", seconds=30), send_as="warning")
    failed = replace(on_measure("run_failed"), send_as="critical")
    play = Play(alerts(stuck, failed, receivers=[receiver(severity="critical")]))
    play.see(seconds=60, step=400, last_step_wall_ns=900 * S)
    assert play.store.sent() == []
    play.end("failed", 1)
    assert play.store.sent() == [("firing", "no_step")]
    (incident,) = play.engine.incidents
    assert (incident.severity, incident.rules) == ("critical", ("no_step", "run_failed"))


def test_a_run_may_end_while_a_rank_that_recovered_waits_for_its_first_message() -> None:
    walls = tuple((step, (1000 + step - 400) * S) for step in range(380, 500))
    play = Play(alerts())
    play.see(finding(steps=[300, 400]), seconds=4, judged_step=400, step_walls=walls)
    play.see(finding(steps=[300, 401]), seconds=2, judged_step=430, step_walls=walls)
    play.end("failed", 1)
    assert play.store.sent() == [("firing", "compute_straggler"), ("resolved", "compute_straggler")]


def test_a_crash_just_before_the_end_leads_over_the_failed_run() -> None:
    play = Play(alerts(on_findings(), on_measure("run_failed")))
    play.see(seconds=20)
    play.see(finding(1, "rank_crashed"), seconds=2)
    play.end("failed", 1)
    play.end("failed", 1)
    assert play.store.sent() == [("firing", "rank_crashed")]


def test_a_restarted_job_resolves_its_crash_when_it_makes_steps() -> None:
    play = Play(alerts())
    play.see(finding(1, "rank_crashed"), seconds=20, step=400)
    play.see(seconds=60, attempt=1, step=None)
    assert play.store.sent() == [("firing", "rank_crashed")]
    play.see(seconds=2, attempt=1, step=0)
    assert play.store.sent() == [("firing", "rank_crashed"), ("resolved", "rank_crashed")]
    assert play.engine.incidents[0].resolved_why == "the job makes steps again, in attempt 1"


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        ("finished", [("firing", "compute_straggler"), ("firing", "run_finished"), ("resolved", "compute_straggler")]),
        ("interrupted", [("firing", "compute_straggler"), ("resolved", "compute_straggler")]),
        ("failed", [("firing", "compute_straggler"), ("firing", "run_failed"), ("resolved", "compute_straggler")]),
    ],
)
def test_what_the_end_of_a_run_sends(status: str, sent: list[tuple[str, str]]) -> None:
    play = Play(alerts(on_findings(), on_measure("run_failed"), on_measure("run_finished")))
    play.see(finding(), seconds=20)
    play.end(status, 1)
    play.restart()
    play.end(status, 1)
    assert play.store.sent() == sent


def test_a_lost_node_is_reported_if_the_job_stands() -> None:
    silent = (NodeSilence(host="node-b", since_wall_ns=1000 * S, ranks=(2, 3)),)
    play = Play(alerts())
    play.see(seconds=10, nodes_silent=silent, last_step_wall_ns=1000 * S)
    assert play.store.sent() == []
    play.see(seconds=20, nodes_silent=silent, last_step_wall_ns=1000 * S)
    play.see(finding(1, "rank_lost"), seconds=30, nodes_silent=silent, last_step_wall_ns=1000 * S)
    assert play.store.sent() == [("firing", "node_lost")]
    (incident,) = play.engine.incidents
    assert (incident.kind, incident.also[0][:28]) == ("rank_lost", "Host node-b has not reported")


def test_a_rank_that_lost_its_connection_to_a_quiet_node_is_not_to_blame() -> None:
    reset = {"exception": "RuntimeError", "message": "[gloo/transport/tcp/pair.cc:537] Connection reset by peer"}
    crash = finding(1, "rank_crashed", ranks=[0], evidence=reset)
    quiet = (NodeSilence(host="node-b", since_wall_ns=1000 * S, ranks=(2, 3)),)
    play = Play(alerts())
    play.see(crash, seconds=2)
    play.see(crash, seconds=20, nodes_quiet=quiet)
    assert play.store.sent() == [("firing", "node_lost")]
    (incident,) = play.engine.incidents
    assert (incident.ranks, incident.hosts) == ((2, 3), ("node-b",))
    assert incident.title == (
        "Host node-b with ranks 2 and 3 no longer reports; rank 0 lost the connection to it and raised RuntimeError."
    )


# -- measures ---------------------------------------------------------------------------------------------------------


def epochs(*levels_mb: float, rank: int = 1) -> tuple[MemoryAtEpoch, ...]:
    return tuple(
        MemoryAtEpoch(rank=rank, epoch=at, step=at * 50, wall_ns=at * 10 * S, bytes=int(level * 1e6))
        for at, level in enumerate(levels_mb)
    )


@pytest.mark.parametrize(
    ("rule", "quiet", "loud", "title"),
    [
        (
            on_measure("memory_growth"),
            {"memory": (*epochs(500, 900, 950, 1000, 1600), *epochs(500, 505, 510, 520, 530, rank=0))},
            {"memory": (*epochs(500, 900, 1010, 1125, 1240), *epochs(500, 505, 510, 520, 530, rank=0))},
            "The memory of rank 1 grows by 110 MiB an epoch: from 858 MiB at step 50 to 1.2 GiB at step 200.",
        ),
        (
            on_measure("step_time"),
            {"steps": tuple(range(300)), "step_ns": (50e6, 52e6, 48e6) * 100},
            {"steps": tuple(range(300)), "step_ns": (50e6, 52e6, 48e6) * 92 + (80e6,) * 24},
            "Steps take 80.0 ms instead of 50.0 ms since step 280, 10.1 times their usual spread longer.",
        ),
        (
            on_measure("no_step", seconds=60),
            {"last_step_wall_ns": 900 * S, "doing": "evaluates"},
            {"last_step_wall_ns": 900 * S, "step": 12},
            "No step was completed for 1 min 48 s; the last was step 12.",
        ),
        (
            on_measure("not_finite"),
            {"not_finite": (NotFinite(name="loss", ranks=(0,), first_step=7, last_step=8, steps=2, finite_steps=0),)},
            {"not_finite": (NotFinite(name="loss", ranks=(0,), first_step=7, last_step=9, steps=3, finite_steps=0),)},
            "loss of rank 0 is NaN or infinite since step 7.",
        ),
        (
            replace(on_measure("throughput_below", samples_per_second=100.0), for_seconds=0.0),
            {"samples_per_second": 100.0},
            {"samples_per_second": 93.2},
            "The throughput is 93.2 samples/s, below 100.",
        ),
        (
            replace(on_measure("mfu_below", level=0.4), for_seconds=0.0),
            {"mfu": None},
            {"mfu": 0.31},
            "The model FLOPs utilization is 31%, below 40%.",
        ),
        (
            on_measure("checkpoint_age", minutes=10),
            {"checkpoint_wall_ns": 500 * S, "checkpoint_step": 40},
            {"checkpoint_wall_ns": 300 * S, "checkpoint_step": 40},
            "The last checkpoint is 11 min 48 s old (step 40).",
        ),
    ],
)
def test_measures(rule: Rule, quiet: dict[str, Any], loud: dict[str, Any], title: str) -> None:
    play = Play(alerts(rule))
    play.see(seconds=100, **quiet)
    assert play.engine.incidents == ()
    play = Play(alerts(rule))
    play.see(seconds=8, **loud)
    assert [incident.title for incident in play.engine.incidents] == [title]
    assert play.store.sent() == [("firing", rule.measure)]


def test_a_longer_step_time_stays_an_incident_until_it_is_as_before() -> None:
    play = Play(alerts(on_measure("step_time")))
    slow = {"steps": tuple(range(300)), "step_ns": (50e6,) * 276 + (80e6,) * 24}
    play.see(seconds=20, **slow)
    play.restart()
    play.see(seconds=200, steps=tuple(range(600)), step_ns=(80e6,) * 600)
    assert play.store.sent() == [("firing", "step_time")]
    play.see(seconds=40, steps=tuple(range(700)), step_ns=(80e6,) * 600 + (50e6,) * 100)
    assert play.store.sent() == [("firing", "step_time"), ("resolved", "step_time")]


# -- kills ------------------------------------------------------------------------------------------------------------


SCRIPT: tuple[tuple[FindingEpisode, ...], ...] = (
    (),
    (finding(1),),
    (finding(1), finding(2, "loss_nan")),
    (finding(2, "loss_nan"),),
    (),
)


@settings(max_examples=examples(200), deadline=None)
@given(kills=st.lists(st.integers(0, 12), max_size=20))
def test_every_receiver_gets_each_change_once_whenever_the_hub_is_killed(kills: list[int]) -> None:
    """The process dies before or after any write, again and again; it is started again and sees the run as it is."""
    rules = alerts(on_findings(receivers=("a", "b")), receivers=[receiver("a"), receiver("b")])
    play = Play(rules)
    left = list(reversed(kills))
    for findings in SCRIPT:
        for _ in range(60):
            play.store.left = left.pop() if left and play.store.left is None else play.store.left
            try:
                play.see(*findings)
            except Killed:
                play.restart()
    play.store.left = None
    play.see(seconds=100)
    for name in ("a", "b"):
        assert sorted(play.store.sent(name)) == [
            ("firing", "compute_straggler"),
            ("firing", "loss_nan"),
            ("resolved", "compute_straggler"),
            ("resolved", "loss_nan"),
        ]
    assert len({message.id for message in play.store.messages_written}) == len(play.store.messages_written)
    assert {incident.state for incident in play.store.incidents()} == {"resolved"}


# -- a disk that refuses ----------------------------------------------------------------------------------------------


@dataclass
class RefusingStore(Store):
    """The call of that number fails: before anything is written, or ``after`` all is, as a failed fsync does."""

    refused_call: int = -1
    after: bool = False
    calls: int = 0

    def append_messages(self, messages: Sequence[Message]) -> None:
        self._try(lambda: Store.append_messages(self, messages))

    def append_incident(self, incident: Incident) -> None:
        self._try(lambda: Store.append_incident(self, incident))

    def _try(self, write: Callable[[], None]) -> None:
        self.calls += 1
        refused = self.calls == self.refused_call
        if not refused or self.after:
            write()
        if refused:
            raise OSError(28, "No space left on device")


class PlayAfterRefusals(Play):
    """What the disk refuses is tried again at the next call."""

    def see(self, *findings: FindingEpisode, seconds: float = 2.0, **more: Any) -> None:
        for _ in range(int(seconds / 2)):
            with suppress(OSError):
                super().see(*findings, seconds=2.0, **more)

    def end(self, status: str = "finished", exit_code: int = 0) -> None:
        with suppress(OSError):
            super().end(status, exit_code)
        super().end(status, exit_code)


def another_cause(play: Play) -> None:
    play.see(seconds=40)
    play.see(finding(2, "loss_nan"), seconds=20)


def costs_more(play: Play) -> None:
    play.see(finding(cost={"share": 0.9}), seconds=20)
    play.see(seconds=40)


def recovers(play: Play) -> None:
    play.see(finding(), seconds=10)
    play.see(seconds=40)


def is_acknowledged(play: Play) -> None:
    play.see(finding(), seconds=4)
    play.desk.requests.append(Acknowledgment(incident=1, by="ada"))
    play.see(finding(), seconds=20)


def run_fails(play: Play) -> None:
    play.end("failed", 1)


def run_finishes(play: Play) -> None:
    play.see(finding(), seconds=2)
    play.end()


@pytest.mark.parametrize("after", [False, True], ids=["unwritten", "written"])
@pytest.mark.parametrize("refused_call", range(1, 8))
@pytest.mark.parametrize(
    ("follows", "sent"),
    [
        (another_cause, [("firing", "loss_nan")]),
        (costs_more, [("firing", "compute_straggler"), ("resolved", "compute_straggler")]),
        (recovers, [("firing", "compute_straggler"), ("resolved", "compute_straggler")]),
        (is_acknowledged, [("firing", "compute_straggler"), ("updated", "compute_straggler")]),
        (run_fails, [("firing", "compute_straggler"), ("firing", "run_failed"), ("resolved", "compute_straggler")]),
        (run_finishes, [("firing", "compute_straggler"), ("firing", "run_finished")]),
    ],
)
def test_no_message_is_lost_or_sent_twice_when_the_disk_refuses_once(
    follows: Callable[[Play], None], sent: list[tuple[str, str]], refused_call: int, after: bool
) -> None:
    store = RefusingStore(refused_call=refused_call, after=after)
    rules = alerts(on_findings(), on_measure("run_failed"), on_measure("run_finished"), update_seconds=10)
    play = PlayAfterRefusals(rules, store)
    play.see(finding(cost={"share": 0.2}), seconds=8)
    follows(play)
    assert set(sent) <= set(store.sent())
    ids = [message.id for message in store.messages_written]
    assert len(set(ids)) == len(ids)
    assert tuple(store.incidents()) == play.engine.incidents
    for incident in play.engine.incidents:
        own = [message for message in store.messages() if message.incident.number == incident.number]
        statuses = [message.status for message in own]
        assert {message.incident.kind for message in own} <= {incident.kind}
        assert statuses.count("firing") == (1 if incident.notified else 0)
        assert statuses.count("resolved") == (incident.state == "resolved" and incident.kind != "run_finished")
        assert [message.incident.messages for message in own] == list(range(1, len(own) + 1))
    play.restart()
    play.end()
    assert [message.id for message in store.messages_written][: len(ids)] == ids
    assert {incident.state for incident in play.engine.incidents} == {"resolved"}
