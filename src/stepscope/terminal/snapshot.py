"""What is known of a run at one moment, the figures taken from it, and what the view asks the hub for. Pure.

What is known of a run at one moment, as a value: what comes makes a new one.  Pure.

It holds what a screen can show and no more: the newest steps, the newest events, the rows of the table that are in
sight.  Nothing in it grows with the length of the run or the number of its ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stepscope.errors import HubError
from stepscope.terminal.documents import (
    Event,
    Events,
    Findings,
    Machines,
    Message,
    Rank,
    Ranks,
    Reset,
    Run,
    Samples,
    Status,
    Steps,
    decode,
)

__all__ = [
    "KEPT_STEPS",
    "Link",
    "Output",
    "Snapshot",
    "StepRow",
    "Wanted",
    "apply_message",
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


# -- snapshot ---------------------------------------------------------------------------------------------------------

KEPT_STEPS = 1024
"""As many as the hub's table of ranks is of at most, while a run goes on."""
KEPT_EVENTS = 256

Link = Literal["opening", "live", "lost", "refused", "missing", "over", "ended"]
"""How the connection to the hub is; ``over``: it went with the run; ``ended``: and nobody has more to say."""


@dataclass(frozen=True, kw_only=True)
class StepRow:
    first: int
    last: int
    mean_ns: Mapping[str, float]
    """By ``wall``, ``work`` and phase, over the ranks, by the clock of the host."""
    memory_bytes: Mapping[str, float]
    start_wall_ns: int = 0
    """When its first step began, by the word of one rank; 0: not known."""
    device_timed: bool = False
    """Whether the devices were timed in it too."""


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
    """What is wrong with the connection, in words."""
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
    """Of a run that is over: what the summary says of hosts and GPUs."""
    output: Output | None = None
    seen_wall_ns: int = 0
    """When something last came, by the run's clock."""
    stepped_wall_ns: int = 0
    """When steps last came, by the run's clock; 0: none since the connection was made."""
    beat: int = 0
    """Counts what came: whoever asks for more asks again when it is another number."""

    @property
    def over(self) -> bool:
        return self.status is not None and self.status.over

    @property
    def final(self) -> bool:
        """Whether this is the last word on the run."""
        said = self.findings is not None and not self.findings.live
        return self.over and (said or self.link == "ended")

    @property
    def device_timed(self) -> bool:
        """Whether there are device times, so that those of the host have to be called so."""
        return any(row.device_timed for row in self.steps)

    @property
    def still_in(self) -> tuple[int, int] | None:
        """The first and the last of the steps that the job stands in; None: it goes on, or is over."""
        found = self.findings.findings if self.findings is not None and not self.over else ()
        lasting = (one for one in found if one.kind.startswith("hang_") and one.evidence.get("over") is None)
        return next((one.steps for one in lasting), None)

    @property
    def step(self) -> int:
        """The last that all ranks made; -1: none yet."""
        said = self.status.step if self.status is not None else -1
        return max(said, self.steps[-1].last if self.steps else -1)


def apply_message(known: Snapshot, message: Message) -> Snapshot:
    """With what a message of the stream says; HubError for one that says nothing that can be understood."""
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
    # The stream says more of what is wrong, and says it sooner; this is for a run whose stream has not begun.
    found = known.findings or Findings(verdict=run.verdict)
    return replace(known, run=run, status=run, findings=found)


def with_steps(known: Snapshot, steps: Steps) -> Snapshot:
    rows = _step_rows(steps)
    if not rows:
        return known
    kept = tuple(row for row in known.steps if row.last < rows[0].first)
    return replace(known, steps=(*kept, *rows)[-KEPT_STEPS:], beat=known.beat + 1)


def _with_corrections(known: Snapshot, steps: Steps) -> Snapshot:
    """With the steps that are others now in the place of what was said of them."""
    anew = {(row.first, row.last): row for row in _step_rows(steps)}
    rows = tuple(anew.get((row.first, row.last), row) for row in known.steps)
    return replace(known, steps=rows, beat=known.beat + 1)


def _step_rows(steps: Steps) -> tuple[StepRow, ...]:
    count = len(steps.first)
    lengths = {len(steps.last), *(len(values) for values in steps.mean_ns.values())}
    if lengths != {count} or (count and "wall" not in steps.mean_ns):
        raise HubError("the hub says something that this version does not understand")
    return tuple(
        StepRow(
            first=steps.first[at],
            last=steps.last[at],
            mean_ns={name: values[at] for name, values in steps.mean_ns.items()},
            device_timed=any(at < len(values) and values[at] for values in steps.device_mean_ns.values()),
            start_wall_ns=steps.start_wall_ns[at] if at < len(steps.start_wall_ns) else 0,
            memory_bytes={
                name: level
                for name, values in steps.memory_bytes.items()
                if at < len(values) and (level := values[at]) is not None
            },
        )
        for at in range(count)
    )


# -- pace -------------------------------------------------------------------------------------------------------------
# The steps that figures are taken of, how fast they come, and for how long none has.  Pure.
#
# All figures of the screen are of one stretch: that of the hub's table of ranks, its window over the last steps.  So
# the phases add up to the step, and the table agrees with both.

USUAL_WINDOW = 256
"""Steps, of a hub that does not say how many it holds."""
RATE_STEPS = 20
"""The rate is one of now, as on the page."""
STILL_S = 10.0
STILL_STEPS = 5
"""Without a step for longer than both, and it is no longer only a slow one."""


def recent_rows(known: Snapshot) -> tuple[StepRow, ...]:
    """The stretch that figures are taken of."""
    steps = window_steps(known.run) or USUAL_WINDOW
    first = known.steps[-1].last - steps + 1 if known.steps else 0
    return tuple(row for row in known.steps if row.last >= first)


def window_steps(run: Run | None) -> int:
    """How many steps the hub's table of ranks is of; 0: it does not say."""
    return run.info.window.steps * max(1, run.info.window.stride) if run is not None else 0


def row_steps(row: StepRow) -> int:
    return max(1, row.last - row.first + 1)


def stretch_steps(known: Snapshot) -> int:
    return sum(map(row_steps, recent_rows(known)))


def usual_wall_ns(known: Snapshot) -> float:
    """Of the steps of the stretch, each the mean over its ranks: the median, and of steps that are known only several
    together, which have none, the mean; 0: there are none."""
    rows = recent_rows(known)
    if not rows:
        return 0.0
    if _are_single_steps(rows):
        return statistics.median(row.mean_ns["wall"] for row in rows)
    return sum(row.mean_ns["wall"] * row_steps(row) for row in rows) / sum(map(row_steps, rows))


def usual_words(known: Snapshot) -> str:
    """What that figure is: ``median of 256``."""
    return f"{'median' if _are_single_steps(recent_rows(known)) else 'mean'} of {stretch_steps(known):,}"


def _are_single_steps(rows: Sequence[StepRow]) -> bool:
    return all(row_steps(row) == 1 for row in rows)


def steps_per_second(known: Snapshot, now_wall_ns: int) -> float | None:
    """By the clock of the ranks; None unless steps come now."""
    if known.over or known.link != "live" or still_s(known, now_wall_ns) is not None:
        return None
    rows = known.steps[-RATE_STEPS - 1 :]
    if len(rows) < 2:
        return None
    took_ns, made = rows[-1].start_wall_ns - rows[0].start_wall_ns, rows[-1].first - rows[0].first
    return made / took_ns * 1e9 if took_ns > 0 and made > 0 else None


def still_s(known: Snapshot, now_wall_ns: int) -> float | None:
    """For how long no step has ended, where that is far longer than one takes; None: they come, or it is over.

    Steps that came here are believed before any clock: ours may differ from that of the ranks.
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


# -- wanted -----------------------------------------------------------------------------------------------------------
# What is to be seen besides the stream of news: the rows in sight, a rank, what was printed.


@dataclass(frozen=True, kw_only=True)
class Wanted:
    order: str = "work"
    start: int = 0
    limit: int = 10
    rank: int | None = None
    output: bool = False
    """What that rank printed, or the job."""
