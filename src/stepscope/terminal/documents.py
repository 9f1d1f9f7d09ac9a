"""What the hub sends: JSON documents and the messages of its event stream, decoded and checked.

The documents follow docs/api.md, limited to what the view shows; anything else is rejected. Times are in nanoseconds,
wall clocks in nanoseconds since 1970, memory in bytes. Unneeded keys are ignored, and a key that a newer hub omits has
a default that means "unknown".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from stepscope.errors import HubError
from stepscope.records.finding import status_severity

__all__ = [
    "Event",
    "Events",
    "Finding",
    "Findings",
    "GpuFigures",
    "HostFigures",
    "Identity",
    "Info",
    "Levels",
    "Machines",
    "Message",
    "MessageDecoder",
    "Rank",
    "RankNow",
    "RankSteps",
    "Ranks",
    "Reset",
    "Run",
    "Runs",
    "Sample",
    "Samples",
    "Status",
    "Steps",
    "SummaryAnswer",
    "Verdict",
    "Window",
    "decode",
]


# -- documents --------------------------------------------------------------------------------------------------------

Struct = msgspec.Struct
Number = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
"""A finite number that can be calculated with."""
T = TypeVar("T")


class Verdict(Struct, frozen=True, kw_only=True):
    kind: str = ""
    severity: str = "info"
    title: str = ""
    price: str | None = None
    ranks: tuple[int, ...] = ()
    advice: tuple[str, ...] = ()


class Finding(Struct, frozen=True, kw_only=True):
    kind: str = ""
    severity: str = "info"
    title: str = ""
    ranks: tuple[int, ...] = ()
    steps: tuple[int, int] | None = None
    advice: tuple[str, ...] = ()
    evidence: dict[str, Any] = msgspec.field(default_factory=dict)


class Judged(Struct, frozen=True, kw_only=True):
    collecting: str = ""


class Findings(Struct, frozen=True, kw_only=True):
    verdict: Verdict | None = None
    findings: tuple[Finding, ...] = ()
    live: bool = True
    judged: Judged = Judged()


class Status(Struct, frozen=True, kw_only=True):
    status: str = ""
    status_text: str = ""
    status_severity: str = ""
    over: bool = False
    attempt: int = 0
    world_size: int = 0
    ranks: int = 0
    live_ranks: int = 0
    still_ranks: int = 0
    states: dict[str, int] = msgspec.field(default_factory=dict)
    step: int = -1
    phases: tuple[str, ...] = ()
    clock: str = "host"
    """The clock of the findings: ``host`` or ``device``."""

    @property
    def words(self) -> str:
        """The status as it is shown."""
        return self.status_text or self.status

    @property
    def severity(self) -> str:
        return self.status_severity or status_severity(self.status)


class Context(Struct, frozen=True, kw_only=True):
    command: list[str] | None = None
    created_wall_ns: int | None = None
    end: dict[str, Any] | None = None


class Window(Struct, frozen=True, kw_only=True):
    """The recent steps that the table of ranks covers."""

    steps: int = 0
    stride: int = 1


class Info(Struct, frozen=True, kw_only=True):
    window: Window = Window()


class Run(Status, frozen=True, kw_only=True):
    id: str = ""
    name: str = ""
    context: Context = Context()
    info: Info = Info()
    verdict: Verdict | None = None


class RunRow(Struct, frozen=True, kw_only=True):
    id: str
    status: str = ""


class Runs(Struct, frozen=True, kw_only=True):
    total: int = 0
    runs: tuple[RunRow, ...] = ()


class Steps(Struct, frozen=True, kw_only=True):
    """Columns: entry i of each is bin i."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    mean_ns: dict[str, list[Number]] = msgspec.field(default_factory=dict)
    device_mean_ns: dict[str, list[Number | None]] = msgspec.field(default_factory=dict)
    start_wall_ns: tuple[int, ...] = ()
    memory_bytes: dict[str, list[Number | None]] = msgspec.field(default_factory=dict)


class Ranks(Struct, frozen=True, kw_only=True):
    total: int = 0
    start: int = 0
    order: str = "rank"
    rank: tuple[int, ...] = ()
    host: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    standing: tuple[str | None, ...] = ()
    last_step: tuple[int, ...] = ()
    live_step: tuple[int, ...] = ()
    live_phase: tuple[str | None, ...] = ()
    live_since_wall_ns: tuple[int, ...] = ()
    mean_ns: dict[str, list[Number]] = msgspec.field(default_factory=dict)
    device_mean_ns: dict[str, list[Number]] = msgspec.field(default_factory=dict)


class Identity(Struct, frozen=True, kw_only=True):
    host: str = ""
    pid: int = 0
    local_rank: int = 0
    device: str = ""
    device_name: str = ""


class RankNow(Struct, frozen=True, kw_only=True):
    state: str = ""
    standing: str | None = None
    last_step: int = -1
    live_phase: str | None = None
    lost: int = 0


class RankSteps(Struct, frozen=True, kw_only=True):
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    wall_ns: tuple[Number, ...] = ()
    memory_bytes: dict[str, list[Number | None]] = msgspec.field(default_factory=dict)


class Rank(Struct, frozen=True, kw_only=True):
    rank: int
    identity: Identity = Identity()
    now: RankNow = RankNow()
    mean_ns: dict[str, Number] = msgspec.field(default_factory=dict)
    device_mean_ns: dict[str, Number] = msgspec.field(default_factory=dict)
    log: str | None = None
    steps: RankSteps = RankSteps()


class Heartbeat(Struct, frozen=True, kw_only=True):
    wall_ns: int
    """Current time on the run's clock."""


class Event(Struct, frozen=True, kw_only=True):
    number: int = 0
    node: str = ""
    wall_ns: int = 0
    event: str = ""
    rank: int | None = None
    host: str = ""
    state: str = ""
    title: str = ""
    message: str = ""
    reason: str = ""
    why: str = ""
    action: str = ""
    oom_kill: bool = False
    seconds: Number | None = None
    away_s: Number | None = None
    silent_s: Number | None = None
    nodes: tuple[int, ...] = ()
    # Present in some kinds only, and other versions may write them differently.
    kind: Any = None
    steps: Any = None
    end: Any = None
    late: Any = None
    before: Any = None
    offset_ns: Any = None
    source: Any = None
    count: Any = None
    counts: Any = None
    collective: Any = None
    exit_code: Any = None
    ignored: Any = None
    git: Any = None
    step: Any = None
    values: Any = None


class Events(Struct, frozen=True, kw_only=True):
    events: tuple[Event, ...] = ()


class Sample(Struct, frozen=True, kw_only=True):
    node: str = ""
    index: int | None = None
    rank: int | None = None
    values: dict[str, list[Number | None]] = msgspec.field(default_factory=dict)


class Samples(Struct, frozen=True, kw_only=True):
    series: tuple[Sample, ...] = ()
    left_out: int = 0


class Levels(Struct, frozen=True, kw_only=True):
    median: Number | None = None
    max: Number | None = None


class GpuFigures(Struct, frozen=True, kw_only=True):
    """GPU figures over the steady steps."""

    in_use: bool = True
    util_percent: Levels | None = None
    power_w: Levels | None = None
    temperature_c: Levels | None = None
    mem_used_max: Number | None = None
    mem_total: Number | None = None


class HostFigures(Struct, frozen=True, kw_only=True):
    cpu_percent: Levels | None = None
    """Over the steady steps."""
    mem_total: Number | None = None
    mem_available_min: Number | None = None


class Machines(Struct, frozen=True, kw_only=True):
    gpus: tuple[GpuFigures, ...] = ()
    nodes: tuple[HostFigures, ...] = ()


class Summary(Struct, frozen=True, kw_only=True):
    """The requested part of the summary."""

    host: Machines = Machines()


class SummaryAnswer(Struct, frozen=True, kw_only=True):
    summary: Summary = Summary()


class Reset(Struct, frozen=True, kw_only=True):
    why: str = ""
    last_step: int = -1


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a document; raises HubError if it does not match."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise HubError("this version does not understand the hub's response") from None


# -- event stream -----------------------------------------------------------------------------------------------------
# Server-sent events: from the bytes of a stream to messages. Pure.
#
# A message is a block of ``name: value`` lines that ends with an empty line. The bytes may be split anywhere. A block
# longer than ``LONGEST_MESSAGE_BYTES`` is not from our hub: it is dropped as it arrives, and counted.

LONGEST_MESSAGE_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Message:
    event: str
    data: bytes = b""
    id: str = ""


class MessageDecoder:
    def __init__(self, most_bytes: int = LONGEST_MESSAGE_BYTES) -> None:
        self._most = most_bytes
        self._pieces: list[bytes] = []
        self._held = 0
        self._passing = False
        self.dropped = 0
        """Number of blocks that were too long."""

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that are complete now."""
        piece = piece.replace(b"\r", b"")  # a proxy may change line ends
        tail = self._pieces[-1][-1:] if self._pieces else b""
        if b"\n\n" not in piece and not (tail == b"\n" and piece.startswith(b"\n")):
            self._hold(piece)
            return []
        *blocks, rest = (b"".join(self._pieces) + piece).split(b"\n\n")
        self._pieces, self._held = [], 0
        found: list[Message] = []
        for block in blocks:
            if self._passing or len(block) > self._most:
                self._passing = False
                self.dropped += 1
            elif message := _message(block):
                found.append(message)
        self._hold(rest)
        return found

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held > self._most:
            self._passing = True
            # The last byte may be the first half of the block's end.
            self._pieces, self._held = [piece[-1:]], 1


def _message(block: bytes) -> Message | None:
    """None for a comment, a ``retry`` or anything else that is not an event."""
    event, data, number = "", b"", ""
    for line in block.split(b"\n"):
        name, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not colon:
            continue
        if name == b"event":
            event = value.decode("ascii", "replace")
        elif name == b"data":
            data += b"\n" + value if data else value
        elif name == b"id" and b"\0" not in value:
            number = value.decode("ascii", "replace")
    return Message(event=event, data=data, id=number) if event else None
