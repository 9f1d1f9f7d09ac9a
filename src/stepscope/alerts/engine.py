"""Incidents of a run: what opens, changes and ends them, and who is sent a message about it.

    engine = AlertEngine(IncidentFiles(run_dir), settings, run=RunName(...))
    engine.observe(observation)         # every two seconds
    engine.conclude(end)                # once, when the run is over

Signals of one topic at one time have one cause and are one incident.  The signal that explains it best leads: it gives
the incident its title.  An incident is sent when it has been there for a moment, again if it changed much, and once
more when it is over.

The state is in two append-only files.  Messages are written before the incident that mentions them, and their ids
follow from the number of the incident and the number of the change.  After a kill the engine reads both files: a change
whose messages were written, perhaps not all, is completed (``_complete``); one without messages is decided anew.  Each
receiver thus gets every change once, whenever the hub dies.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, get_args

from stepscope.alerts import thresholds
from stepscope.alerts.conditions import STRETCHES, RuleState, end_signals, judge_rule, leads_by, recovered_ns
from stepscope.alerts.incident_file import append_incident, read_incidents
from stepscope.alerts.model import Incident, Message, MessageStatus, Signal, Topic
from stepscope.alerts.observation import Observation, RunEnd
from stepscope.alerts.outbox import append_messages, read_messages
from stepscope.alerts.requests import Acknowledgment
from stepscope.alerts.settings import AlertSettings
from stepscope.records.finding import SEVERITIES
from stepscope.records.text import count_text

__all__ = ["AlertEngine", "Desk", "IncidentFiles", "IncidentStore", "RunName"]

LONGEST_KEY = 255
"""Characters of a ``dedup_key``: the limit of PagerDuty."""
LEFT_OUT = "messages_left_out"


# -- what the engine needs --------------------------------------------------------------------------------------------


class IncidentStore(Protocol):
    """Where incidents and messages are kept; writes are durable, or raise OSError."""

    def incidents(self) -> Iterable[Incident]: ...
    def messages(self) -> Iterable[Message]: ...
    def append_messages(self, messages: Sequence[Message]) -> None: ...
    def append_incident(self, incident: Incident) -> None: ...


class IncidentFiles:
    """The files of a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def incidents(self) -> Iterable[Incident]:
        return read_incidents(self._run_dir)

    def messages(self) -> Iterable[Message]:
        return read_messages(self._run_dir)

    def append_messages(self, messages: Sequence[Message]) -> None:
        append_messages(self._run_dir, messages)

    def append_incident(self, incident: Incident) -> None:
        append_incident(self._run_dir, incident)


class Desk(Protocol):
    """What people requested (``alerts/requests.py``): acknowledgments since the last call, and silences."""

    def acknowledgments(self) -> Sequence[Acknowledgment]: ...
    def silenced(self, incident: Incident, wall_ns: int) -> bool: ...


class _NobodyAtDesk:
    def acknowledgments(self) -> Sequence[Acknowledgment]:
        return ()

    def silenced(self, incident: Incident, wall_ns: int) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class RunName:
    id: str
    """Different for two runs of the same name: it is part of the ids of messages."""
    name: str
    """For people."""


# -- the engine -------------------------------------------------------------------------------------------------------


class AlertEngine:
    """Call it from one thread.  OSError: the disk refused; what was to be written is tried again at the next call."""

    def __init__(
        self,
        store: IncidentStore,
        settings: AlertSettings,
        *,
        run: RunName,
        link: Callable[[int], str] = lambda number: "",
        desk: Desk | None = None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._run = run
        self._link = link
        self._desk: Desk = _NobodyAtDesk() if desk is None else desk
        self._states = {rule.name: RuleState() for rule in settings.rules}
        self._incidents = {incident.number: incident for incident in store.incidents()}
        self._open: dict[Topic, int] = {}
        self._pending: dict[Topic, int] = {}
        """Since when there are signals of a topic that has no incident yet."""
        self._awaiting: dict[Topic, list[Signal]] = {}
        """Those of a topic that has no incident yet, and of the last observation."""
        self._signals: dict[Topic, list[Signal]] = {}
        """Those of the last observation."""
        self._signal_ns: dict[Topic, int] = {}
        """When there was last a signal of a topic."""
        self._other_ns: dict[Topic, int] = {}
        """The same for signals that say nothing about when they ended."""
        self._lead_ns: dict[Topic, int] = {}
        """The same for the kind that leads."""
        self._stopped_step: dict[Topic, tuple[int, int]] = {}
        """Attempt and step at that time."""
        self._last: dict[int, Message] = {}
        """By incident, the last message."""
        self._ids: set[str] = set()
        self._sent_ns: dict[str, deque[int]] = {}
        """By receiver, when it was sent something within the hour."""
        self._written: dict[int, Incident] = {}
        self._written_ns: dict[int, int] = {}
        self._began_ns: int | None = None
        self._seen = Observation(wall_ns=0)
        self._ended = False
        self._unfinished: list[Message] = []
        """Of changes that an earlier hub began to write, the last message."""
        self._unwritten: list[Incident] = []
        """Incidents of which the messages were written, and the disk refused the incident."""
        self._requests: list[Acknowledgment] = []
        self._titles: dict[int, str] = {}
        """By open incident, how its lead puts it now: sent with the next update."""
        self._restore()

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All that are known, by number."""
        return tuple(self._incidents[number] for number in sorted(self._incidents))

    def observe(self, seen: Observation) -> None:
        """Evaluate the rules, and follow what they show."""
        if self._ended:
            return
        self._seen = seen
        self._began_ns = seen.wall_ns if self._began_ns is None else self._began_ns
        self._complete()
        unknown = self._judge(seen)
        self._take_requests(seen.wall_ns)
        for topic in get_args(Topic):
            if topic != "delivery":
                self._follow(topic, unknown)
        self._follow_limit(seen.wall_ns)

    def conclude(self, end: RunEnd) -> None:
        """End what ends with the run.  Calling it again, also after a restart, changes nothing."""
        self._complete()
        self._seen = seen = replace(self._seen, wall_ns=max(end.wall_ns, self._seen.wall_ns))
        self._take_requests(seen.wall_ns)
        for topic in list(self._pending):
            self._begin(topic, self._awaiting[topic])
        for signal in end_signals(self._settings.rules, seen, end):
            self._end_with(signal)
        ending = {"finished": "the run finished", "interrupted": "the run was interrupted"}
        why = ending.get(end.status, "the run ended")
        for topic, number in list(self._open.items()):
            if topic != "stopped" or end.status in ending:
                self._resolve(self._incidents[number], why)
        self._ended = True

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def _judge(self, seen: Observation) -> set[str]:
        """Evaluate the rules; return those that the run does not show yet."""
        found: dict[Topic, list[Signal]] = {}
        unknown = set()
        for rule in self._settings.rules:
            judged = judge_rule(rule, seen, self._states[rule.name])
            self._states[rule.name] = judged.state
            if not judged.known:
                unknown.add(rule.name)
            for signal in judged.signals:
                found.setdefault(signal.topic, []).append(signal)
        self._signals = {topic: sorted(own, key=leads_by, reverse=True) for topic, own in found.items()}
        return unknown

    def _follow(self, topic: Topic, unknown: set[str]) -> None:
        seen, signals = self._seen, self._signals.get(topic, [])
        number = self._open.get(topic)
        if number is None:
            signals = [self._with_line(signal) for signal in signals] or self._recovered(topic)
        self._awaiting[topic] = signals
        if signals:
            self._signal_ns[topic] = seen.wall_ns
            if any(signal.kind not in STRETCHES for signal in signals):
                self._other_ns[topic] = seen.wall_ns
            self._stopped_step[topic] = seen.attempt, -1 if seen.step is None else seen.step
            if number is not None:
                self._continue(self._incidents[number], signals)
            elif seen.wall_ns - self._pending.setdefault(topic, seen.wall_ns) >= self._group_s(signals[0]) * 1e9:
                self._begin(topic, signals)
            return
        self._pending.pop(topic, None)
        if number is None:
            return
        incident = self._incidents[number]
        if self._is_over(incident, unknown):
            self._resolve(incident, self._why_over(incident))
        else:
            self._notify(incident)

    def _recovered(self, topic: Topic) -> list[Signal]:
        """Signals of ranks that recovered while their first message was waiting: it is sent all the same."""
        past = {episode.number for episode in self._seen.findings if recovered_ns(episode.finding, self._seen)}
        return [signal for signal in self._awaiting.get(topic, ()) if signal.finding in past]

    def _with_line(self, signal: Signal) -> Signal:
        """The signal with the line of code that its finding named before, while its first message was waiting.

        The rules withdraw a line if later stacks of the same function are in another one as often.
        """
        if signal.line or signal.finding is None:
            return signal
        place = signal.finding, signal.ranks, signal.phase
        before = (each for each in self._awaiting.get(signal.topic, ()) if each.line)
        line = next((each.line for each in before if (each.finding, each.ranks, each.phase) == place), "")
        return replace(signal, line=line)

    def _group_s(self, lead: Signal) -> float:
        """How long to wait for further signals of the same cause, and for the line of code at fault."""
        slow_s = (self._seen.wall_ns - lead.since_wall_ns) / 1e9
        awaits_line = lead.kind in STRETCHES and not lead.line and slow_s < thresholds.LINE_LATEST_S
        return self._settings.group_seconds + (thresholds.LINE_S if awaits_line else 0.0)

    # -- begin --------------------------------------------------------------------------------------------------------

    def _begin(self, topic: Topic, signals: Sequence[Signal]) -> None:
        lead, seen = signals[0], self._seen
        number = max(self._incidents, default=0) + 1
        incident = Incident(
            number=number,
            topic=topic,
            state="open",
            kind=lead.kind,
            severity=lead.severity,
            title=lead.title,
            opened_wall_ns=seen.wall_ns,
            attempt=seen.attempt,
        )
        self._signal_ns[topic] = self._lead_ns[topic] = seen.wall_ns
        self._stopped_step.setdefault(topic, (seen.attempt, -1 if seen.step is None else seen.step))
        self._notify(self._joined(incident, signals, lead))

    def _end_with(self, signal: Signal) -> None:
        """Report the end of the run.  An incident that explains it is sent to the receivers that do not know of it."""
        if not any(incident.kind == signal.kind for incident in self._incidents.values()):
            number = self._open.get(signal.topic)
            if number is None:
                self._begin(signal.topic, [signal])
            elif signal.rule not in self._incidents[number].rules:
                incident = self._incidents[number]
                joined = replace(
                    incident,
                    rules=(*incident.rules, signal.rule),
                    receivers=tuple(dict.fromkeys((*incident.receivers, *signal.receivers))),
                    severity=max(incident.severity, signal.severity, key=SEVERITIES.index),
                    also=tuple(dict.fromkeys((*incident.also, signal.title))),
                )
                self._notify(joined)
                self._write(self._incidents[number])  # at once, also if nothing was sent
        number = self._open.get(signal.topic)
        if number is not None and self._incidents[number].kind == "run_finished":
            now_ns = self._seen.wall_ns
            self._write(replace(self._incidents[number], state="resolved", resolved_wall_ns=now_ns))

    # -- change -------------------------------------------------------------------------------------------------------

    def _continue(self, incident: Incident, signals: Sequence[Signal]) -> None:
        """Join further signals; another one leads if it explains more, or if the one that led is gone."""
        seen, topic = self._seen, incident.topic
        best = signals[0]
        lead = next((signal for signal in signals if signal.kind == incident.kind), None)
        if lead is not None:
            self._lead_ns[topic] = seen.wall_ns
            if leads_by(best)[:3] > leads_by(lead)[:3]:
                lead = best
        else:
            gone_ns = seen.wall_ns - self._lead_ns.setdefault(topic, seen.wall_ns)
            explains = best.finding is not None and not incident.findings
            lead = best if explains or gone_ns >= self._settings.resolve_seconds * 1e9 else None
        self._notify(self._joined(incident, signals, lead))

    def _joined(self, incident: Incident, signals: Sequence[Signal], lead: Signal | None) -> Incident:
        """The incident with what these signals show; without ``lead`` it keeps its own title and place."""
        others = [signal for signal in signals if signal is not lead]
        since_steps = [signal.since_step for signal in signals if signal.since_step is not None]
        if incident.since_step is not None and incident.attempt == self._seen.attempt:
            since_steps.append(incident.since_step)
        since_ns = [
            each for each in (incident.since_wall_ns, *(signal.since_wall_ns for signal in signals)) if each > 0
        ]
        findings = [signal.finding for signal in ([lead] if lead else []) + others if signal.finding is not None]
        evidence = {signal.rule: signal.evidence for signal in signals if signal.evidence}
        joined = replace(
            incident,
            rules=tuple(dict.fromkeys((*incident.rules, *(signal.rule for signal in signals)))),
            receivers=tuple(dict.fromkeys((*incident.receivers, *(each for s in signals for each in s.receivers)))),
            since_step=min(since_steps, default=None),
            since_wall_ns=min(since_ns, default=self._seen.wall_ns),
            findings=tuple(dict.fromkeys((*findings, *incident.findings)))[:32],
            evidence={**incident.evidence, **evidence},
        )
        if lead is None:
            return joined
        same = lead.kind == incident.kind and lead.ranks == incident.ranks
        self._titles[incident.number] = lead.title
        titles = dict.fromkeys(signal.title for signal in others if signal.title != lead.title)
        return replace(
            joined,
            kind=lead.kind,
            severity=max((signal.severity for signal in signals), key=SEVERITIES.index),
            title=incident.title if same and lead.kind in STRETCHES else lead.title,
            ranks=lead.ranks,
            phase=lead.phase,
            hosts=lead.hosts,
            line=lead.line or (incident.line if same else ""),
            cost=lead.cost,
            advice=lead.advice,
            also=tuple(titles),
        )

    def _notify(self, incident: Incident) -> None:
        """Send what is due about an open incident: to new receivers that there is one, to others that it changed."""
        now_ns = self._seen.wall_ns
        if self._desk.silenced(incident, now_ns):
            self._write(incident, sparingly=True)
            return
        wanted = [name for name in incident.receivers if self._wants(name, incident)]
        new = [name for name in wanted if name not in incident.notified]
        free = [name for name in new if self._has_room(name, now_ns)]
        if free:
            self._send(replace(incident, notified=(*incident.notified, *free)), "firing", free)
        else:
            known = [name for name in incident.notified if name in wanted and self._settings.receivers[name].updates]
            room = [name for name in known if self._has_room(name, now_ns)]
            if room and self._is_update(incident):
                self._send(replace(incident, title=self._titles.get(incident.number, incident.title)), "updated", room)
            else:
                self._write(incident, sparingly=True)
        left_out = [name for name in new if name not in free]
        if left_out:
            self._leave_out(incident, left_out)

    def _wants(self, name: str, incident: Incident) -> bool:
        receiver = self._settings.receivers.get(name)
        return receiver is not None and SEVERITIES.index(incident.severity) >= SEVERITIES.index(receiver.severity)

    def _is_update(self, incident: Incident) -> bool:
        """Whether it changed much since the last message, and that is long enough ago."""
        last = self._last.get(incident.number)
        if last is None or incident.state != "open":
            return False
        waited_s = (self._seen.wall_ns - last.created_wall_ns) / 1e9
        if 0 < self._settings.repeat_seconds <= waited_s:
            return True
        if waited_s < self._settings.update_seconds:
            return False
        before = last.incident
        if incident.ranks != before.ranks or incident.kind != before.kind:
            return True
        if SEVERITIES.index(incident.severity) > SEVERITIES.index(before.severity):
            return True
        was, now = (float(each.cost.get("share") or 0.0) for each in (before, incident))
        if abs(now - was) < thresholds.UPDATE_COST_SHARE:
            return False
        return max(was, now) >= thresholds.UPDATE_COST_FACTOR * min(was, now)

    def _take_requests(self, now_ns: int) -> None:
        self._requests += self._desk.acknowledgments()
        while self._requests:
            request = self._requests[0]
            incident = self._incidents.get(request.incident)
            if incident is not None and incident.state == "open":
                changed = replace(incident, state="acknowledged", acknowledged_by=request.by, changed_wall_ns=now_ns)
                self._send(changed, "updated", [name for name in changed.notified if name in self._settings.receivers])
            self._requests.pop(0)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _is_over(self, incident: Incident, unknown: set[str]) -> bool:
        seen, topic = self._seen, incident.topic
        began_ns = seen.wall_ns if self._began_ns is None else self._began_ns
        settled = topic in self._signal_ns or seen.wall_ns - began_ns >= thresholds.SETTLE_S * 1e9
        if not settled:
            return False
        if any(rule in unknown for rule in incident.rules):
            return False
        quiet_ns = seen.wall_ns - self._quiet_since_ns(incident, self._signal_ns.setdefault(topic, began_ns))
        if quiet_ns < self._hold_off_s(incident) * 1e9:
            return False
        return topic != "stopped" or self._makes_steps(incident)

    def _quiet_since_ns(self, incident: Incident, signal_ns: int) -> int:
        """When its cause was last there: at the last signal, or before if its finding says when the rank recovered."""
        own = (episode for episode in self._seen.findings if episode.number in incident.findings)
        ended_ns = max((recovered_ns(episode.finding, self._seen) for episode in own), default=0)
        return max(min(ended_ns, signal_ns), self._other_ns.get(incident.topic, 0)) if ended_ns else signal_ns

    def _hold_off_s(self, incident: Incident) -> float:
        since_ns = self._seen.wall_ns - thresholds.FLAP_S * 1e9
        earlier = sum(
            each.topic == incident.topic and each.resolved_wall_ns is not None and each.resolved_wall_ns >= since_ns
            for each in self._incidents.values()
        )
        plain_s = self._settings.resolve_seconds
        return max(plain_s, min(plain_s * 2.0 ** min(earlier, 20), thresholds.HOLD_OFF_LONGEST_S))

    def _makes_steps(self, incident: Incident) -> bool:
        """Whether the job made steps since it stopped, in the same attempt or after a restart."""
        seen = self._seen
        if seen.step is None:
            return False
        default = incident.attempt, -1 if incident.since_step is None else incident.since_step
        return (seen.attempt, seen.step) > self._stopped_step.get(incident.topic, default)

    def _why_over(self, incident: Incident) -> str:
        seen = self._seen
        if incident.topic == "stopped":
            restarted = f", in attempt {seen.attempt}" if seen.attempt != incident.attempt else ""
            return f"the job makes steps again{restarted}"
        if seen.attempt != incident.attempt:
            return "the job was restarted"
        if incident.topic == "checkpoint":
            return "a checkpoint was written"
        if incident.kind in STRETCHES:
            return "it recovered"
        return "memory no longer grows" if incident.topic == "memory" else "the last steps no longer show it"

    def _resolve(self, incident: Incident, why: str) -> None:
        seen = self._seen
        over = replace(
            incident,
            state="resolved",
            resolved_wall_ns=seen.wall_ns,
            resolved_step=seen.step,
            resolved_why=why,
        )
        known = [name for name in incident.notified if name in self._settings.receivers]
        self._send(over, "resolved", [name for name in known if self._settings.receivers[name].resolved])

    # -- limit --------------------------------------------------------------------------------------------------------

    def _has_room(self, name: str, now_ns: int) -> bool:
        number = self._open.get("delivery")
        if number is not None and name in self._incidents[number].notified:
            return False
        return self._sent_lately(name, now_ns) < self._settings.messages_per_hour

    def _sent_lately(self, name: str, now_ns: int) -> int:
        times = self._sent_ns.setdefault(name, deque())
        while times and now_ns - times[0] > thresholds.LIMIT_S * 1e9:
            times.popleft()
        return len(times)

    def _leave_out(self, incident: Incident, names: Sequence[str]) -> None:
        """Say once that a receiver has got too many messages, and keep what it was not sent."""
        now_ns, number = self._seen.wall_ns, self._open.get("delivery")
        limit = count_text(self._settings.messages_per_hour, "message")
        about = Incident(
            number=max(self._incidents, default=0) + 1,
            topic="delivery",
            state="open",
            kind=LEFT_OUT,
            severity="warning",
            title=f"The limit of {limit} an hour is reached; further incidents are only on the page for now.",
            since_step=self._seen.step,
            since_wall_ns=now_ns,
            opened_wall_ns=now_ns,
            attempt=self._seen.attempt,
        )
        if number is not None:
            about = self._incidents[number]
        text = f"{incident.number}: {incident.title}"
        if text not in about.also and len(about.also) < thresholds.MOST_LEFT_OUT:
            about = replace(about, also=(*about.also, text))
        new = [name for name in names if name not in about.notified]
        if new:
            receivers = (*about.receivers, *new)
            self._send(replace(about, receivers=receivers, notified=(*about.notified, *new)), "firing", new)
        elif about != self._incidents[about.number]:
            self._write(about)

    def _follow_limit(self, now_ns: int) -> None:
        number = self._open.get("delivery")
        if number is None:
            return
        about = self._incidents[number]
        most = self._settings.messages_per_hour * thresholds.LIMIT_RELEASE_SHARE
        if all(self._sent_lately(name, now_ns) <= most for name in about.notified):
            self._resolve(about, f"{count_text(len(about.also), 'incident')} not sent in time; messages are sent again")

    # -- writing ------------------------------------------------------------------------------------------------------

    def _send(self, incident: Incident, status: MessageStatus, names: Sequence[str]) -> None:
        """Write the messages, then the incident.  Without receivers only the incident is written."""
        if not names:
            self._write(incident)
            return
        now_ns = self._seen.wall_ns
        changed = replace(incident, messages=incident.messages + 1, changed_wall_ns=now_ns)
        messages = [self._message(changed, status, name, now_ns) for name in names]
        self._put(messages)
        try:
            self._write(changed)
        except OSError:
            # The messages are out, and their ids are used: what follows is the next change.
            self._unwritten.append(changed)
            self._remember(changed)
            raise

    def _message(self, incident: Incident, status: MessageStatus, name: str, now_ns: int) -> Message:
        return Message(
            id=f"{self._run.id}/{incident.number}/{incident.messages}/{name}",
            receiver=name,
            status=status,
            run=self._run.name,
            dedup_key=_dedup_key(self._run.id, incident.number),
            created_wall_ns=now_ns,
            incident=incident,
            link=self._link(incident.number),
        )

    def _put(self, messages: Sequence[Message]) -> None:
        new = [message for message in messages if message.id not in self._ids]
        refused: OSError | None = None
        if new:
            try:
                self._store.append_messages(new)
            except OSError as error:
                refused = error
                # They may be in the file nevertheless, where a sender finds them: then only fsync failed.
                found = {message.id for message in self._store.messages()}
                new = [message for message in new if message.id in found]
        for message in new:
            self._note(message)
        if refused is not None and not new:
            raise refused

    def _note(self, message: Message) -> None:
        self._ids.add(message.id)
        self._sent_ns.setdefault(message.receiver, deque()).append(message.created_wall_ns)
        self._last[message.incident.number] = message

    def _write(self, incident: Incident, *, sparingly: bool = False) -> None:
        """Write and remember the state of an incident; ``sparingly``: not every small change of it."""
        now_ns, before = self._seen.wall_ns, self._written.get(incident.number)
        if before is not None and replace(incident, changed_wall_ns=before.changed_wall_ns) == before:
            self._remember(before)
            return
        apart_ns = max(thresholds.WRITE_S * 1e9, thresholds.WRITE_SHARE * (now_ns - incident.opened_wall_ns))
        recent = now_ns - self._written_ns.get(incident.number, 0) < apart_ns
        if sparingly and before is not None and recent and _essence(before) == _essence(incident):
            self._remember(incident)
            return
        incident = replace(incident, changed_wall_ns=now_ns)
        self._store.append_incident(incident)
        self._written[incident.number], self._written_ns[incident.number] = incident, now_ns
        self._remember(incident)

    def _remember(self, incident: Incident) -> None:
        self._incidents[incident.number] = incident
        self._pending.pop(incident.topic, None)
        if incident.state != "resolved":
            self._open[incident.topic] = incident.number
            return
        if self._open.get(incident.topic) == incident.number:
            del self._open[incident.topic]
        for memory in (self._written, self._written_ns, self._last, self._titles):
            memory.pop(incident.number, None)
        over = [number for number, each in self._incidents.items() if each.state == "resolved"]
        for number in sorted(over)[: -thresholds.MOST_OVER]:
            del self._incidents[number]

    # -- restart ------------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Take up what an earlier hub left behind."""
        latest: dict[int, Message] = {}
        for message in self._store.messages():
            self._note(message)
            about = message.incident
            if about.messages >= getattr(latest.get(about.number), "incident", about).messages:
                latest[about.number] = message
        self._last = {}
        for number, incident in self._incidents.items():
            self._written[number] = incident
        for number, message in sorted(latest.items()):
            known = self._incidents.get(number)
            if known is None or known.messages < message.incident.messages:
                self._unfinished.append(message)
                self._incidents[number] = message.incident
        for number in sorted(self._incidents):
            if number in latest:
                self._last[number] = latest[number]
            self._remember(self._incidents[number])
        for incident in (self._incidents[number] for number in self._open.values()):
            for rule in incident.rules:
                if rule in self._states:
                    since = dict.fromkeys(map(str, incident.findings), 0)
                    kind = {incident.kind: 0} if rule in incident.evidence or not incident.findings else {}
                    evidence = incident.evidence.get(rule) or {}
                    self._states[rule] = RuleState(since_ns={**since, **kind}, evidence=evidence)

    def _complete(self) -> None:
        """Finish changes of which messages were written, but not all of them, or not the incident."""
        while self._unwritten:
            incident = self._unwritten[0]
            self._store.append_incident(incident)
            if incident.state != "resolved":
                self._written[incident.number] = incident
            self._unwritten.pop(0)
        while self._unfinished:
            message = self._unfinished[0]
            incident, status = message.incident, message.status
            first = f"{self._run.id}/{incident.number}/"
            names = [name for name in incident.notified if name in self._settings.receivers]
            if status == "firing":
                # Those that were sent an earlier change know of it.
                earlier = {
                    name
                    for name in names
                    for number in range(1, incident.messages)
                    if f"{first}{number}/{name}" in self._ids
                }
                names = [name for name in names if name not in earlier]
            elif status == "resolved":
                names = [name for name in names if self._settings.receivers[name].resolved]
            else:
                acknowledged = incident.state == "acknowledged"
                names = [name for name in names if acknowledged or self._settings.receivers[name].updates]
            self._put([self._message(incident, status, name, message.created_wall_ns) for name in names])
            self._store.append_incident(incident)
            if incident.state != "resolved":
                self._written[incident.number] = incident
            self._unfinished.pop(0)


def _essence(incident: Incident) -> tuple[object, ...]:
    """What is written at once when it changes."""
    return incident.state, incident.kind, incident.severity, incident.ranks, incident.notified, incident.receivers


def _dedup_key(run_id: str, number: int) -> str:
    key = f"stepscope/{run_id}/{number}"
    if len(key) <= LONGEST_KEY:
        return key
    return f"stepscope/{hashlib.sha256(run_id.encode()).hexdigest()}/{number}"
