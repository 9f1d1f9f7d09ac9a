"""Slow hosts and links of a fleet as incidents: one message when one is found, and one when it is no longer slow.

They show only over many runs, so no run's hub sees them; ``stepscope fleet --alert WORD`` reports them, from cron for
example.  The outbox in ``folder`` is the only account: what the last message about a cause says is what a receiver
knows.  So a call that was killed, or a receiver that was down, loses nothing and sends nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from stepscope.alerts.model import Incident, Message
from stepscope.alerts.outbox import append_messages, read_messages
from stepscope.records.files import private_folder
from stepscope.store.locks import file_locked

__all__ = ["Suspect", "report_suspects"]

RUN = "fleet"
"""What messages name in place of a run."""
OVER = "it is not slower than others any more, or has no recent runs"
_PRIVATE_FILE = 0o600


@dataclass(frozen=True, kw_only=True)
class Suspect:
    kind: str
    hosts: tuple[str, ...]
    title: str
    phase: str | None = None
    since_wall_ns: int = 0
    advice: tuple[str, ...] = ()
    cost: str = ""
    """A sentence."""

    @property
    def key(self) -> str:
        """The same for all messages about it; host names may be long, and come from run folders."""
        return f"stepscope-fleet-{sha256(' '.join((self.kind, *self.hosts)).encode()).hexdigest()[:32]}"


def report_suspects(
    folder: Path, suspects: Iterable[Suspect], receivers: Sequence[str], *, now_wall_ns: int
) -> tuple[int, int]:
    """Put what receivers do not know yet into the outbox of a folder; return how many causes are new, and over."""
    private_folder(folder)
    found = {suspect.key: suspect for suspect in suspects}
    with file_locked(folder / ".lock", _PRIVATE_FILE):
        last: dict[tuple[str, str], Message] = {}
        numbers: dict[str, int] = {}
        for message in read_messages(folder):
            last[message.receiver, message.dedup_key] = message
            numbers[message.dedup_key] = message.incident.number
        number = max(numbers.values(), default=0)
        messages: list[Message] = []
        begun: dict[str, Incident] = {}
        for key, suspect in found.items():
            unaware = [name for name in receivers if not _is_open(last, name, key)]
            if unaware:
                # A receiver that is new joins the incident that others know.
                known = [message.incident for (_, own), message in last.items() if own == key and _fires(message)]
                number += not known
                begun[key] = known[0] if known else _begun(suspect, number, now_wall_ns)
                messages += [_message(begun[key], key, name, now_wall_ns) for name in unaware]
        ended = [message for message in last.values() if _fires(message) and message.dedup_key not in found]
        messages += [_end(message, now_wall_ns) for message in ended if message.receiver in receivers]
        append_messages(folder, messages)
    return len(begun), len({message.dedup_key for message in ended if message.receiver in receivers})


def _is_open(last: Mapping[tuple[str, str], Message], receiver: str, key: str) -> bool:
    return (receiver, key) in last and _fires(last[receiver, key])


def _fires(message: Message) -> bool:
    return message.status != "resolved"


def _begun(suspect: Suspect, number: int, now_wall_ns: int) -> Incident:
    return Incident(
        number=number,
        topic="speed",
        state="open",
        kind=suspect.kind,
        severity="warning",
        title=suspect.title,
        rules=(suspect.kind,),
        hosts=suspect.hosts,
        phase=suspect.phase,
        since_wall_ns=suspect.since_wall_ns,
        opened_wall_ns=now_wall_ns,
        changed_wall_ns=now_wall_ns,
        advice=suspect.advice,
        also=(suspect.cost,) if suspect.cost else (),
        messages=1,
    )


def _message(incident: Incident, key: str, receiver: str, now_wall_ns: int) -> Message:
    return Message(
        id=f"{key}/{incident.number}/{incident.messages}/{receiver}",
        receiver=receiver,
        status="resolved" if incident.state == "resolved" else "firing",
        run=RUN,
        dedup_key=key,
        created_wall_ns=now_wall_ns,
        incident=incident,
    )


def _end(message: Message, now_wall_ns: int) -> Message:
    over = replace(
        message.incident,
        state="resolved",
        changed_wall_ns=now_wall_ns,
        resolved_wall_ns=now_wall_ns,
        resolved_why=OVER,
        messages=2,
    )
    return _message(over, message.dedup_key, message.receiver, now_wall_ns)
