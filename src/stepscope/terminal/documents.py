"""What the hub sends, decoded and checked, and what is known of a run at one moment. Pure.

The documents follow docs/api.md, limited to what the view shows; anything else is rejected. Times are in nanoseconds,
wall clocks in nanoseconds since 1970, memory in bytes. Unneeded keys are ignored, and a key that a newer hub omits has
a default that means "unknown".

Below them is the snapshot: what is known of a run, the figures taken from it, and what the view requests.

A snapshot is an immutable value: each message makes a new one. It contains only what a screen can show: the newest
steps, the newest events, the visible rows of the table. Nothing in it grows with the length of the run or the number of
ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from stepscope.errors import HubError
from stepscope.records.finding import status_severity

__all__ = [
    "KEPT_STEPS",
    "Event",
    "Events",
    "Finding",
    "Findings",
    "GpuFigures",
    "HostFigures",
    "Identity",
    "Info",
    "Levels",
    "Link",
    "Machines",
    "Message",
    "MessageDecoder",
    "Output",
    "Rank",
    "RankNow",
    "RankSteps",
    "Ranks",
    "Reset",
    "Run",
    "Runs",
    "Sample",
    "Samples",
    "Snapshot",
    "Status",
    "StepRow",
    "Steps",
    "SummaryAnswer",
    "Verdict",
    "Wanted",
    "Window",
    "apply_message",
    "decode",
    "on_clock",
    "recent_rows",
    "row_steps",
    "steps_per_second",
    "still_s",
    "stretch_steps",
    "usual_wall_ns",
    "usual_words",
    "window_steps",
    "with_run",
    "with_steps",
]

# -- documents --------------------------------------------------------------------------------------------------------

Struct = msgspec.Struct
Number = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
"""A finite number that can be calculated with."""
T = TypeVar("T")


class Verdict(Struct, frozen=True, kw_only=True):
    kind: str = ""
    severity: str = "info"
    look: str = ""
    """How it is marked: its severity, or ``healthy``."""
    title: str = ""
    price: str | None = None
    ranks: tuple[int, ...] = ()
    advice: tuple[str, ...] = ()


class FindingText(Struct, frozen=True, kw_only=True):
    look: str = ""
    facts: tuple[str, ...] = ()
    """Kind, ranks, phase and steps in short."""
    price: tuple[str, ...] = ()


class Finding(Struct, frozen=True, kw_only=True):
    kind: str = ""
    severity: str = "info"
    title: str = ""
    ranks: tuple[int, ...] = ()
    advice: tuple[str, ...] = ()
    text: FindingText = FindingText()

    @property
    def look(self) -> str:
        return self.text.look or self.severity


class Judged(Struct, frozen=True, kw_only=True):
    text: str = ""
    """On which steps and ranks the findings are based."""


class Findings(Struct, frozen=True, kw_only=True):
    verdict: Verdict | None = None
    findings: tuple[Finding, ...] = ()
    nothing: tuple[str, ...] = ()
    """Without findings: a headline and a sentence."""
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
    hung_ranks: int = 0
    hung_steps: tuple[int, int] | None = None
    """First and last of the steps in which the job hangs; None: it makes progress, or is over."""
    ranks_text: str = ""
    """``7 of 8 ranks hung``."""
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
    hang_state: tuple[str | None, ...] = ()
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
    hang_state: str | None = None
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
    wall_ns: int = 0
    event: str = ""
    text: str = ""
    """As a sentence; empty from a hub of an earlier version."""
    severity: str = "info"
    # Of a hang.
    kind: str = ""
    title: str = ""

    @property
    def sentence(self) -> str:
        return self.text or self.event.replace("_", " ")


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


# -- snapshot ---------------------------------------------------------------------------------------------------------

KEPT_STEPS = 1024
"""Maximum number of steps that the hub's table of ranks covers during a run."""
KEPT_EVENTS = 256

Link = Literal["opening", "live", "lost", "refused", "missing", "over", "ended"]
"""State of the connection to the hub; ``over``: it ended with the run; ``ended``: and there is no more data."""


@dataclass(frozen=True, kw_only=True)
class StepRow:
    first: int
    last: int
    mean_ns: Mapping[str, float]
    """Mean over the ranks by ``wall``, ``work`` and phase, on the host's clock unless ``on_clock`` made it."""
    memory_bytes: Mapping[str, float]
    start_wall_ns: int = 0
    """Start of its first step, as reported by one rank; 0: unknown."""
    device_ns: Mapping[str, float] = field(default_factory=dict)
    """By phase on the devices, mean over the ranks; empty: they were not timed."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """The end of a file of the run."""

    path: str
    text: bytes = b""
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    link: Link = "opening"
    why: str = ""
    """The problem with the connection."""
    run: Run | None = None
    status: Status | None = None
    findings: Findings | None = None
    steps: tuple[StepRow, ...] = ()
    events: tuple[Event, ...] = ()
    ranks: Ranks | None = None
    slowest: Ranks | None = None
    """The row of the rank that works longest."""
    rank: Rank | None = None
    gpus: Samples | None = None
    hosts: Samples | None = None
    processes: Samples | None = None
    machines: Machines | None = None
    """Hosts and GPUs as in the summary of a finished run."""
    output: Output | None = None
    page: str = ""
    """Address of the page; empty: unknown."""
    seen_wall_ns: int = 0
    """Time of the last message, on the run's clock."""
    stepped_wall_ns: int = 0
    """Time of the last steps, on the run's clock; 0: none since the connection was made."""
    beat: int = 0
    """Counts messages, so that a change tells the reader to ask again."""

    @property
    def over(self) -> bool:
        return self.status is not None and self.status.over

    @property
    def final(self) -> bool:
        """Whether no more data will follow for this run."""
        final = self.findings is not None and not self.findings.live
        return self.over and (final or self.link == "ended")

    @property
    def device_timed(self) -> bool:
        """Whether there are device times, so that host times must be labeled."""
        return any(row.device_ns for row in self.steps)

    @property
    def on_device(self) -> bool:
        """Whether the findings use the devices' clock; the figures then do, too."""
        return self.status is not None and self.status.clock == "device" and self.device_timed

    @property
    def step(self) -> int:
        """The last step that all ranks finished; -1: none yet."""
        reported = self.status.step if self.status is not None else -1
        return max(reported, self.steps[-1].last if self.steps else -1)


def apply_message(known: Snapshot, message: Message) -> Snapshot:
    """Apply a message of the stream; raises HubError if it cannot be decoded."""
    if message.event == "steps":
        return with_steps(known, decode(message.data, Steps))
    if message.event == "again":
        return _with_corrections(known, decode(message.data, Steps))
    if message.event == "events":
        last = known.events[-1].number if known.events else 0
        fresh = tuple(event for event in decode(message.data, Events).events if event.number > last)
        return replace(known, events=(*known.events, *fresh)[-KEPT_EVENTS:], beat=known.beat + 1)
    if message.event == "findings":
        return replace(known, findings=decode(message.data, Findings), beat=known.beat + 1)
    if message.event == "status":
        return replace(known, status=decode(message.data, Status), beat=known.beat + 1)
    if message.event == "reset":
        again = decode(message.data, Reset).why != "first"
        return replace(known, steps=(), events=(), beat=known.beat + 1) if again else known
    return known


def with_run(known: Snapshot, run: Run) -> Snapshot:
    # The stream reports problems sooner and in more detail; this is for a run whose stream has not begun.
    found = known.findings or Findings(verdict=run.verdict)
    return replace(known, run=run, status=run, findings=found)


def with_steps(known: Snapshot, steps: Steps) -> Snapshot:
    rows = _step_rows(steps)
    if not rows:
        return known
    earlier = tuple(row for row in known.steps if row.last < rows[0].first)
    return replace(known, steps=(*earlier, *rows)[-KEPT_STEPS:], beat=known.beat + 1)


def _with_corrections(known: Snapshot, steps: Steps) -> Snapshot:
    """Replace steps with their corrected values."""
    anew = {(row.first, row.last): row for row in _step_rows(steps)}
    rows = tuple(anew.get((row.first, row.last), row) for row in known.steps)
    return replace(known, steps=rows, beat=known.beat + 1)


def _step_rows(steps: Steps) -> tuple[StepRow, ...]:
    count = len(steps.first)
    lengths = {len(steps.last), *(len(values) for values in steps.mean_ns.values())}
    if lengths != {count} or (count and "wall" not in steps.mean_ns):
        raise HubError("this version does not understand the hub's response")
    return tuple(
        StepRow(
            first=steps.first[at],
            last=steps.last[at],
            mean_ns={name: values[at] for name, values in steps.mean_ns.items()},
            device_ns=_device_times(steps, at),
            start_wall_ns=steps.start_wall_ns[at] if at < len(steps.start_wall_ns) else 0,
            memory_bytes={
                name: level
                for name, values in steps.memory_bytes.items()
                if at < len(values) and (level := values[at]) is not None
            },
        )
        for at in range(count)
    )


def _device_times(steps: Steps, at: int) -> dict[str, float]:
    """Times by phase; empty if no device was timed in that step."""
    found = {name: values[at] if at < len(values) else None for name, values in steps.device_mean_ns.items()}
    known = {name: float(value) for name, value in found.items() if value is not None}
    return known if any(known.values()) else {}


# -- pace -------------------------------------------------------------------------------------------------------------
# The steps that figures are based on, how fast they arrive, and for how long none has. Pure.
#
# All figures on the screen are based on the same stretch of steps: the window of the hub's table of ranks. So the
# phases add up to the step, and the table agrees with both.

USUAL_WINDOW = 256
"""Steps, for a hub that does not report its window."""
RATE_STEPS = 20
"""Steps for the current rate, as on the page."""
STILL_S = 10.0
STILL_STEPS = 5
"""Without a step for longer than both limits, the job is more than slow."""


def recent_rows(known: Snapshot) -> tuple[StepRow, ...]:
    """The stretch of steps that figures are based on, by the clock of the findings.

    On the device only some steps are timed.
    """
    steps = window_steps(known.run) or USUAL_WINDOW
    first = known.steps[-1].last - steps + 1 if known.steps else 0
    rows = tuple(row for row in known.steps if row.last >= first)
    return on_clock(rows) or rows if known.on_device else rows


def on_clock(rows: Sequence[StepRow]) -> tuple[StepRow, ...]:
    """The rows that were timed on the device, with those times."""
    return tuple(replace(row, mean_ns=_with_sums(row.device_ns)) for row in rows if row.device_ns)


def _with_sums(phases: Mapping[str, float]) -> dict[str, float]:
    wall = sum(phases.values())
    return {"wall": wall, "work": wall - phases.get("comm", 0.0), **phases}


def window_steps(run: Run | None) -> int:
    """Number of steps that the hub's table of ranks covers; 0: not reported."""
    return run.info.window.steps * max(1, run.info.window.stride) if run is not None else 0


def row_steps(row: StepRow) -> int:
    return max(1, row.last - row.first + 1)


def stretch_steps(known: Snapshot) -> int:
    return sum(map(row_steps, recent_rows(known)))


def usual_wall_ns(known: Snapshot) -> float:
    """Median over the stretch of the step times, each the mean over its ranks; 0 without steps.

    Rows that combine several steps have no median; then it is the mean.
    """
    rows = recent_rows(known)
    if not rows:
        return 0.0
    if _are_single_steps(rows):
        return statistics.median(row.mean_ns["wall"] for row in rows)
    return sum(row.mean_ns["wall"] * row_steps(row) for row in rows) / sum(map(row_steps, rows))


def usual_words(known: Snapshot) -> str:
    """Describe that figure: ``median of 256``."""
    return f"{'median' if _are_single_steps(recent_rows(known)) else 'mean'} of {stretch_steps(known):,}"


def _are_single_steps(rows: Sequence[StepRow]) -> bool:
    return all(row_steps(row) == 1 for row in rows)


def steps_per_second(known: Snapshot, now_wall_ns: int) -> float | None:
    """Step rate on the ranks' clock; None unless steps are arriving now."""
    if known.over or known.link != "live" or still_s(known, now_wall_ns) is not None:
        return None
    rows = known.steps[-RATE_STEPS - 1 :]
    if len(rows) < 2:
        return None
    took_ns, made = rows[-1].start_wall_ns - rows[0].start_wall_ns, rows[-1].first - rows[0].first
    return made / took_ns * 1e9 if took_ns > 0 and made > 0 else None


def still_s(known: Snapshot, now_wall_ns: int) -> float | None:
    """Seconds without a finished step, if that is far longer than a step takes; None: steps arrive, or the run is over.

    The arrival of steps takes precedence over any clock: ours may differ from that of the ranks.
    """
    if known.over or known.link != "live" or not known.steps or not now_wall_ns:
        return None
    last = known.steps[-1]
    ended_ns = known.stepped_wall_ns
    if not ended_ns:
        created_ns = (known.run.context.created_wall_ns if known.run is not None else None) or 0
        ended_ns = max(int(last.start_wall_ns + last.mean_ns["wall"]), created_ns) if last.start_wall_ns > 0 else 0
    idle_s = (now_wall_ns - ended_ns) / 1e9 if ended_ns > 0 else 0.0
    return idle_s if idle_s > max(STILL_S, STILL_STEPS * usual_wall_ns(known) / 1e9) else None


# -- requests ---------------------------------------------------------------------------------------------------------
# What the view needs in addition to the stream: the visible rows, a rank, the output.


@dataclass(frozen=True, kw_only=True)
class Wanted:
    order: str = "work"
    start: int = 0
    limit: int = 10
    rank: int | None = None
    output: bool = False
    """Output of that rank, or of the job."""
