"""Messages to be sent, and what became of each: two append-only files in the run directory, with one writer each.

    alerts/outbox.jsonl    the run's hub: one line per message (``Message``), on disk before the incident mentions it
    alerts/sent.jsonl      the sender: one line whenever the state of a message changed (``Delivery``)

A message is identified by its id.  The hub may write one again after it was killed; readers take the first line of an
id.  A receiver's messages are sent in the order of the outbox.  Standard library only: the sender loads this.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from stepscope.alerts.model import Message
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.files import folder_mode
from stepscope.store.file_io import append_lines, fsync_file, fsync_folder, lines_from, record_in
from stepscope.store.paths import ALERTS, OUTBOX, SENT

__all__ = [
    "MOST_FILE_BYTES",
    "Delivery",
    "DeliveryState",
    "LineTail",
    "OutboxTail",
    "SentLog",
    "append_messages",
    "read_deliveries",
    "read_messages",
]

LONGEST_LINE = 256 << 10
"""A message to a job of thousands of ranks has some tens of kilobytes."""
MOST_FILE_BYTES = 64 << 20
"""Of each of the two files; further messages are not written.  The limits on rates reach this after years."""
MOST_SENT_BYTES = 2 * MOST_FILE_BYTES
"""Of ``sent.jsonl``: beyond the limit there is room for what must not be lost, the end of each message."""
MOST_MESSAGES = 50_000

LONGEST_TEXT = 2000
MOST_TEXTS = 32
MOST_RANKS = 4096

DeliveryState = Literal["waiting", "sending", "sent", "failed", "given_up"]
"""``waiting``: in the outbox only; ``failed``: will be tried again; ``given_up``: the receiver refused it for good."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The state of one message; a line of ``sent.jsonl``."""

    id: str
    state: DeliveryState
    tries: int = 0
    wall_ns: int = 0
    """When it reached this state."""
    why: str = ""
    """Of ``failed`` and ``given_up``: the reason, without addresses or secrets."""
    receipt: dict[str, Any] = field(default_factory=dict)
    """What later messages about the same incident need of the receiver's answer (Slack: channel and thread)."""

    @property
    def settled(self) -> bool:
        return self.state in ("sent", "given_up")


# -- the hub's side ---------------------------------------------------------------------------------------------------


def append_messages(run_dir: Path, messages: Iterable[Message]) -> None:
    """Append messages durably, all or none; OSError if the disk refuses or the outbox is full."""
    lines = [_message_line(_bounded(message)) for message in messages]
    if not lines:
        return
    path = run_dir / OUTBOX
    new = _make_folder(run_dir)
    if not new and _size(path) > MOST_FILE_BYTES:
        raise OSError(f"{OUTBOX} has reached its limit of {MOST_FILE_BYTES >> 20} MiB; no more messages are sent")
    append_lines(path, b"".join(lines))
    fsync_file(path)
    if new:
        fsync_folder(path.parent)
        fsync_folder(run_dir)


def _make_folder(run_dir: Path) -> bool:
    """Make the folder of the two files; return whether it is new."""
    try:
        (run_dir / ALERTS).mkdir(mode=folder_mode(run_dir))
    except FileExistsError:
        return False
    return True


def _line(record: Message | Delivery) -> bytes:
    return json.dumps({"schema": 1, **encoded(record)}, separators=(",", ":")).encode() + b"\n"


def _message_line(message: Message) -> bytes:
    """The line, without the values behind the message if it would be longer than readers accept."""
    line = _line(message)
    if len(line) > LONGEST_LINE:
        line = _line(replace(message, incident=replace(message.incident, evidence={}, cost={})))
    return line


def _bounded(message: Message) -> Message:
    """The message with texts and lists of bounded length."""
    incident = message.incident
    return replace(
        message,
        link=message.link[:LONGEST_TEXT],
        incident=replace(
            incident,
            title=incident.title[:LONGEST_TEXT],
            line=incident.line[:LONGEST_TEXT],
            advice=_bounded_texts(incident.advice),
            also=_bounded_texts(incident.also),
            hosts=_bounded_texts(incident.hosts),
            ranks=incident.ranks[:MOST_RANKS],
            findings=incident.findings[:MOST_TEXTS],
        ),
    )


def _bounded_texts(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text[:LONGEST_TEXT] for text in texts[:MOST_TEXTS])


# -- the sender's side ------------------------------------------------------------------------------------------------


class LineTail:
    """Follows an append-only file of JSON objects: ``read`` returns those added since the last call.

    A line that is still being written is left for the next call; a line that is too long or not an object is skipped.
    Of a file larger than any that we write, the rest is ignored.
    """

    def __init__(self, path: Path, *, most_bytes: int = MOST_FILE_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return some of them at a time; nothing only at the end of the file."""
        size = _size(self._path)
        if size < self._offset:
            self._offset = 0  # replaced by another file: ids show what is new
        while self._offset < size and self._offset <= self._most_bytes:
            data, _ = lines_from(self._path, self._offset, most_bytes=LONGEST_LINE, longest=LONGEST_LINE)
            self._offset += len(data)
            if records := [record for line in data.split(b"\n") if (record := record_in(line)) is not None]:
                return records
            if not data:
                break
        return []


class OutboxTail:
    """Follows the messages of an outbox, each id once; ``receiver``: only those."""

    def __init__(self, run_dir: Path, receiver: str | None = None) -> None:
        self._tail = LineTail(run_dir / OUTBOX)
        self._receiver = receiver
        self._ids: set[str] = set()

    def read(self) -> list[Message]:
        """Return messages added since the last call, some at a time; nothing only at the end."""
        while records := self._tail.read():
            if found := [message for record in records if (message := self._message(record)) is not None]:
                return found
        return []

    def _message(self, record: dict[str, Any]) -> Message | None:
        if self._receiver is not None and record.get("receiver") != self._receiver:
            return None
        try:
            message = decoded(Message, record)
        except (ValueError, RecursionError):
            return None
        if message.id in self._ids or len(self._ids) >= MOST_MESSAGES:
            return None
        self._ids.add(message.id)
        return _bounded(message)


class SentLog:
    """What became of each message.  Several threads of one process may use it; only one process may write it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / SENT
        self._lock = threading.Lock()
        self._states: dict[str, Delivery] = {}
        self._unwritten: dict[str, bytes] = {}
        """By id: only the last state counts."""
        for delivery in _all(LineTail(self._path, most_bytes=MOST_SENT_BYTES)):
            if delivery.id in self._states or len(self._states) < MOST_MESSAGES:
                self._states[delivery.id] = delivery

    @property
    def full(self) -> bool:
        """Whether the file has more than is read: it is unknown then what was sent, and nothing may be sent again."""
        return _size(self._path) > MOST_SENT_BYTES

    def state_of(self, message_id: str) -> Delivery | None:
        with self._lock:
            return self._states.get(message_id)

    def append(self, delivery: Delivery) -> None:
        """Write a line; a settled message survives a power loss.  What a full disk refuses is written later."""
        with self._lock:
            self._states[delivery.id] = delivery
            if not delivery.settled and _size(self._path) > MOST_FILE_BYTES:
                return  # only for display
            self._unwritten[delivery.id] = _line(delivery)
            try:
                _make_folder(self._run_dir)
                append_lines(self._path, b"".join(self._unwritten.values()))
                if delivery.settled:
                    fsync_file(self._path)
            except OSError:
                return
            self._unwritten.clear()


def read_messages(run_dir: Path) -> Iterator[Message]:
    """Yield all messages of a run's outbox, each id once."""
    tail = OutboxTail(run_dir)
    while messages := tail.read():
        yield from messages


def read_deliveries(run_dir: Path) -> Iterator[tuple[Message, Delivery]]:
    """Yield each message of a run with its state, in the order of the outbox."""
    log = SentLog(run_dir)
    for message in read_messages(run_dir):
        waiting = Delivery(id=message.id, state="waiting", wall_ns=message.created_wall_ns)
        yield message, log.state_of(message.id) or waiting


def _all(tail: LineTail) -> Iterator[Delivery]:
    while records := tail.read():
        for record in records:
            try:
                yield decoded(Delivery, record)
            except (ValueError, RecursionError):
                continue


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0
