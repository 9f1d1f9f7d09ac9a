"""The rules while a job runs: which ranks are judged, the copy they are judged on, and when.

    loop = RuleLoop(live)
    await loop.run()                # until canceled

Every few seconds the loop copies the last steps of the judged ranks (``select``, ``snapshot``), which is quick, and
applies the rules to the copy in a thread, so that rows are taken in meanwhile.  Evaluations take at most a tenth of
the time: the longer one took, the later the next starts.  While nobody watches a run, its hub evaluates the rules less
often (``UNATTENDED``), but a hang or a death within a second of its file.  ``diagnosis.hysteresis`` shows a finding
only if two evaluations agree.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.window import last_attempt
from stepscope.diagnosis.healthy import collecting_text
from stepscope.diagnosis.hysteresis import AT_ONCE, Change, Watched, evaluate, live_window
from stepscope.goodput.ledger import AttemptAccount
from stepscope.hangs.report import hang_state_by_rank
from stepscope.hub.live.finding_history import FindingHistory
from stepscope.hub.live.goodput import accounts_of, ledger_document
from stepscope.hub.live.lines import Raw, parse_raw
from stepscope.hub.live.live_run import SUMMED_RANKS, Judged, LiveRun
from stepscope.hub.live.registry import STATES
from stepscope.hub.live.step_arrays import Slots
from stepscope.judge import thresholds
from stepscope.judge.finding_cost import finding_order
from stepscope.records.finding import Finding
from stepscope.records.hang import HangRecord
from stepscope.records.layers import read_layers
from stepscope.records.paths import error_path, hangs_folder
from stepscope.records.series import RankError, RankSeries, RunData
from stepscope.reports.tables import communication_table, throughput_table
from stepscope.step_table import NO_STEPS, PLAIN, StepTable, phases_in_order
from stepscope.store.captures import CAPTURES_JUDGED, read_captures
from stepscope.store.documents import clock_offsets, read_nodes
from stepscope.store.live.failures import RankNumbers, checked_stacks, read_errors, read_joined_hangs
from stepscope.store.live.sample_files import layer_as_shown
from stepscope.store.rank_series import collective_rows, comm_rows

__all__ = [
    "ATTENDED",
    "MOST_JUDGED",
    "UNATTENDED",
    "Pace",
    "RuleLoop",
    "Snapshot",
    "catch_up",
    "keep_up",
    "run_data_of",
    "select",
    "snapshot",
]


# -- run data ---------------------------------------------------------------------------------------------------------
# The last steps of some ranks as a ``RunData``, the input of the rules for a finished run, made from the live model.
#
# ``snapshot`` only copies, which is quick: it runs in the event loop.  ``run_data_of`` arranges the copy as a step
# table, parses lines and reads the few files there are: it runs in a thread.

SAMPLED_NODES = 64
"""The number of nodes whose samples are parsed for one evaluation."""
Table = dict[str, Any] | None
"""Of a summary."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    name: str
    run_dir: Path | None
    meta: dict[str, Any]
    step: int
    """The last step that all live ranks have made."""
    of_ranks: int
    steps: NDArray[np.int64]
    rings: tuple[int, ...]
    """The registry's number of each rank."""
    ranks: tuple[RankSeries, ...]
    """Without their steps."""
    have: NDArray[np.bool_]
    """[step, rank], like everything below."""
    arrays: dict[str, NDArray[Any]]
    exchanges: tuple[Slots, ...]
    events: tuple[dict[str, Any], ...]
    samples: tuple[Raw, ...]
    stacks: tuple[Raw, ...]
    layers: tuple[Raw, ...]
    accounts: tuple[AttemptAccount, ...] | None = None
    """What the processes of all attempts did; None: unknown."""


def snapshot(live: LiveRun, columns: NDArray[np.intp]) -> Snapshot:
    """Copy these columns; call it in the event loop."""
    live.settle()
    planes = live.planes
    steps = planes.complete()
    block = np.ix_(planes.row_of(steps), columns)
    rings = tuple(live.ring_of[columns].tolist())
    of = live.registry.of
    nodes = [live.registry.nodes[node] for node in np.unique(of["node"][live.ring_of[columns]])]
    every = max(1, -(-len(nodes) // SAMPLED_NODES))
    return Snapshot(
        name=live.name,
        run_dir=live.run_dir,
        meta=dict(live.meta),
        step=live.frontier,
        of_ranks=planes.columns,
        steps=steps,
        rings=rings,
        ranks=tuple(_without_steps(live, ring) for ring in rings),
        have=planes.have[block],
        arrays={name: plane[block] for name, plane in planes.arrays.items()},
        exchanges=live.exchanges.since(planes.oldest) if len(columns) == planes.columns else (),
        events=(*live.events(0, limit=MOST_EVENTS), *live.noted.health, *live.noted.seen),
        samples=tuple(live.received.raw("samples.jsonl", nodes[::every])),
        stacks=tuple(live.received.raw("stacks.jsonl", nodes[::every])),
        layers=tuple(live.received.layers.raw(nodes[::every])),
        accounts=accounts_of(live, {ring: _without_steps(live, ring) for ring in _summed_rings(live)}),
    )


def _summed_rings(live: LiveRun) -> list[int]:
    n = live.registry.count
    found: list[int] = np.flatnonzero(live.registry.of["rank"][:n] < SUMMED_RANKS).tolist()
    return found


def _without_steps(live: LiveRun, ring: int) -> RankSeries:
    registry, of = live.registry, live.registry.of
    offset_ns = live.offsets_ns.get(registry.nodes[int(of["node"][ring])], 0)
    ended = int(of["ended_wall_ns"][ring])
    numbers: dict[str, Any] = {name: int(of[name][ring]) for name in _NUMBERS}
    return RankSeries(
        identity=registry.identity(ring),
        rank=int(of["shown"][ring]),
        state=registry.state(ring),
        phase_names=registry.phase_names(ring),
        anchor_wall_ns=int(of["anchor_wall_ns"][ring]) - offset_ns,
        ended_wall_ns=ended - offset_ns if ended else None,
        facts=registry.facts(ring),
        groups=registry.groups(ring),
        steps=NO_STEPS,
        **numbers,
    )


_NUMBERS = ("anchor_mono_ns", "live_phase", "live_since_ns", "lost", "torn", "hook_failures")
MOST_EVENTS = 2000


def run_data_of(copy: Snapshot) -> RunData:
    """Return what the loader of a run would return."""
    table = table_of(copy)
    exchanges = _by_ring(copy.exchanges)
    series = []
    for place, (ring, rank) in enumerate(zip(copy.rings, copy.ranks, strict=True)):
        steps, slots = table.rank(place), exchanges.get(ring)
        comm = None if slots is None else comm_rows(slots, steps["step"], rank.groups)
        collectives = None if slots is None else collective_rows(slots, steps["step"], rank.groups)
        series.append(replace(rank, steps=steps, comm=comm, collectives=collectives))
    numbers = RankNumbers(series, str(copy.meta.get("host")))
    errors: tuple[RankError, ...] = ()
    hangs: tuple[HangRecord, ...] = ()
    if copy.run_dir is not None:
        nodes = read_nodes(copy.run_dir)
        errors, _ = read_errors(copy.run_dir, numbers, clock_offsets(nodes))
        hangs, _ = read_joined_hangs(copy.run_dir, series, errors, nodes)
    stacks, _ = checked_stacks(parse_raw(copy.stacks), numbers.of)
    layers, _ = read_layers(layer_as_shown(record, numbers) for record in parse_raw(copy.layers))
    return RunData(
        name=copy.name,
        path="" if copy.run_dir is None else str(copy.run_dir),
        meta=copy.meta,
        ranks=tuple(series),
        samples=tuple(_as_stored(line) for line in parse_raw(copy.samples)),
        events=copy.events,
        errors=errors,
        stacks=stacks,
        layers=layers,
        hangs=hangs,
        captures=() if copy.run_dir is None else read_captures(copy.run_dir, most=CAPTURES_JUDGED),
    )


def _as_stored(line: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the line as its agent wrote it: rules look up a rank's samples by host name."""
    own = {"node": line["host"] or line["node"]}
    return {key: value for key, value in line.items() if value is not None and key != "host"} | own


def table_of(copy: Snapshot) -> StepTable:
    """Arrange the copied planes rank by rank; steps that a rank does not have are left out."""
    there = np.ascontiguousarray(copy.have.T)
    chosen: Any = slice(None) if there.all() else there.reshape(-1)

    def column(values: NDArray[Any], kind: str) -> NDArray[Any]:
        found: NDArray[Any] = np.ascontiguousarray(values.T, kind).reshape(-1)[chosen]
        return found

    named = (name for names in dict.fromkeys(rank.phase_names for rank in copy.ranks) for name in names)
    phases = phases_in_order(name for name in named if {f"phase:{name}", f"device:{name}"} & copy.arrays.keys())

    def by_phase(kind: str) -> NDArray[np.float64]:
        found = np.zeros((len(phases), int(there.sum())))
        for place, name in enumerate(phases):
            if (plane := copy.arrays.get(f"{kind}:{name}")) is not None:
                found[place] = column(plane, "f8")
        return found

    timed = column(copy.arrays["device"], "?") if "device" in copy.arrays else None
    return StepTable(
        first=np.concatenate(([0], np.cumsum(there.sum(axis=1)))).astype(np.intp),
        step=np.broadcast_to(copy.steps, there.shape).reshape(-1)[chosen].copy(),
        plain={name: column(copy.arrays[name], kind) for name, kind in PLAIN.items() if name in copy.arrays},
        phases=phases,
        phase_ns=by_phase("phase"),
        device_ns=None if timed is None else np.where(timed, by_phase("device"), np.nan),
        timed=timed,
    )


def _by_ring(batches: Sequence[Slots]) -> dict[int, NDArray[np.uint8]]:
    if not batches:
        return {}
    ring = np.concatenate([batch.ring for batch in batches])
    slots = np.concatenate([batch.slots for batch in batches])
    order = np.argsort(ring, kind="stable")
    rings, first = np.unique(ring[order], return_index=True)
    return dict(zip(rings.tolist(), np.split(slots[order], first[1:]), strict=True))


# -- rank selection ---------------------------------------------------------------------------------------------------
# The rules judge all ranks, or the worst and an even sample of the rest.
#
# Rules compare ranks with each other.  Among a hundred thousand, the few that delay the others are those with the most
# work, or the most of one phase, over the window; a few hundred ranks show what is normal as well as all do.  The
# rules therefore judge the worst by each measure, those that failed or lag behind, and an even sample in order of
# ranks.  The same numbers always give the same selection.

PACE_RANKS = 64
"""Ranks whose steps show whether the pace of the job changed."""
MOST_JUDGED = 512
WORST_PER_MEASURE = 16
"""The number of ranks selected by each measure."""
ENDED_BADLY = 32


def select(live: LiveRun, most: int = MOST_JUDGED) -> NDArray[np.intp]:
    """Return columns in order of ranks, without silent ranks that are not known to have ended."""
    of = live.registry.of
    state, shown = of["state"][live.ring_of], of["shown"][live.ring_of]
    gone = (state >= STATES.index("exited")) | (of["ended_wall_ns"][live.ring_of] > 0)
    order = np.argsort(shown, kind="stable")
    order = order[(live.live_columns() | gone)[order]]
    if len(order) <= most:
        return order
    chosen = np.zeros(live.planes.columns, np.bool_)
    for values in _measures(live):
        chosen[order[_largest(values[order], WORST_PER_MEASURE)]] = True
    badly = order[np.isin(state[order], [STATES.index("exception"), STATES.index("vanished")])]
    chosen[badly[:ENDED_BADLY]] = True
    running = order[~gone[order]]
    chosen[running[_largest(-of["last_step"][live.ring_of][running], WORST_PER_MEASURE)]] = True
    rest = order[~chosen[order]]
    room = max(0, most - int(chosen.sum()))
    chosen[rest[np.linspace(0, len(rest) - 1, min(room, len(rest))).astype(np.intp)]] = True
    return order[chosen[order]]


def _measures(live: LiveRun) -> list[NDArray[np.float32]]:
    """[column] each: work and every phase, on the host and on the device."""
    n, arrays = live.planes.columns, live.planes.arrays
    means = live.means(("work", *live.used_phases()))
    found = [values for name, values in means.items() if name != "comm"]
    on_device = [name for name in arrays if name.startswith("device:")]
    if on_device:
        count = np.maximum(arrays["device"][:, :n].sum(axis=0), 1)
        sums = {name: np.asarray(arrays[name][:, :n].sum(axis=0) / count, np.float32) for name in on_device}
        worked = [values for name, values in sums.items() if name != "device:comm"]
        found += [*worked, np.sum(worked, axis=0, dtype=np.float32)] if worked else []
    return found


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    if len(values) <= count:
        return np.arange(len(values))
    largest: NDArray[np.intp] = np.argpartition(values, len(values) - count)[len(values) - count :]
    return largest


# -- evaluation loop --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often rows are taken in and the rules are evaluated."""

    least_s: float
    """The shortest time between two evaluations."""
    most_s: float
    """The longest, however long an evaluation takes: someone may be waiting for an alert."""
    share: float
    """The share of the time that evaluations may take."""
    tick_s: float
    """The time between two rounds of intake."""

    def period_s(self, took_s: float) -> float:
        return max(self.least_s, min(self.most_s, took_s / self.share))


ATTENDED = Pace(least_s=1.0, most_s=float("inf"), share=0.1, tick_s=0.25)
"""While someone may be reading the run."""
UNATTENDED = Pace(least_s=5.0, most_s=20.0, share=0.005, tick_s=2.0)
"""While a hub is alone with its run: it shares the machine with the training, and agents write every two seconds."""
CONFIRM_S = 2.0
"""The time until the next evaluation if the last one found something for the first time: two have to agree."""
CONFIRM_SHARE = 0.05
EARLY_S = 3.0
"""The shortest time until an evaluation because the pace of the job changed …"""
EARLY_MOST = 4
EARLY_LEAST_S = 0.1
"""… of which so many may follow each other, or more if they take less than this time."""
WATCHED_TICK_S = 0.1
"""The time between two rounds of intake while a client is watching."""
BACKLOG_S = 0.09
"""A poll that takes longer is catching up with hours of a run: the next follows almost at once."""
BACKLOG_TICK_S = 0.02
AGAIN_S = 60.0
"""The delay after a failed evaluation."""


Whole = Callable[[], Coroutine[Any, Any, tuple[LiveRun, Callable[[], object]]]]
"""Reads a whole run; returns its model, and what polls for more."""


class RuleLoop:
    def __init__(
        self,
        live: LiveRun,
        *,
        most_judged: int = MOST_JUDGED,
        cpu_clock: Callable[[], float] = time.thread_time,
        history: FindingHistory | None = None,
        unattended: Pace = ATTENDED,
        threaded: bool = True,
    ) -> None:
        """``history``: continue it.  ``unattended``: the pace while no client watches.

        ``threaded``: whether to judge in a thread; without, nothing else happens in the event loop meanwhile.
        """
        self._live = live
        self.history = history
        self.unattended = unattended
        self.threaded = threaded
        self.eager = False
        """Whether a capture is in progress: rows are then taken in as often as while a client may read the run."""
        self.captured = 0
        """How many captures are over.  Each makes a finding say more, so the rules do not wait when it grows."""
        self._continued = history is None
        """Whether the hysteresis has what the history says was shown before the hub was started again."""
        self._most = most_judged
        self._cpu_clock = cpu_clock
        self._watched: tuple[Watched, ...] = ()
        self._goodput: Table = None
        self._unseen = live.partial
        """Whether earlier steps went by unseen: then the first evaluation is preceded by one without the last steps."""
        self._attempt = live.registry.attempt
        self._seen: tuple[int, ...] = ()
        self._captured = 0
        """``captured`` in the last evaluation."""
        self._early_s = EARLY_MOST * EARLY_LEAST_S
        """How long early evaluations may take."""

    def move_to(self, live: LiveRun) -> None:
        """Continue on a model that has more of the same run; what was found stays found."""
        live.judge(self._live.judged)
        self._live, self._seen = live, ()

    async def run(self, *, first_s: float = 0.0) -> None:
        """Evaluate the rules repeatedly after ``first_s``; the first time as soon as there is a step."""
        await asyncio.sleep(first_s)
        while True:
            while not self._due():
                await asyncio.sleep(self.pace.tick_s)
            await self.evaluate()
            began_s = time.monotonic()
            await self._pause()
            earned_s = self.unattended.share * (time.monotonic() - began_s)
            self._early_s = min(self._early_s + earned_s, EARLY_MOST * max(self._live.judged.took_s, EARLY_LEAST_S))

    @property
    def pace(self) -> Pace:
        if self._live.watched:
            return ATTENDED
        return replace(self.unattended, tick_s=ATTENDED.tick_s) if self.eager else self.unattended

    async def _pause(self) -> None:
        """Wait until the next evaluation is due; a hang, a death or the end of a capture does not wait."""
        began_s, alarms = time.monotonic(), _alarms(self._live)
        new = any(not each.shown and each.finding.severity != "info" for each in self._watched)
        confirmed_s = max(CONFIRM_S, self._live.judged.took_s / CONFIRM_SHARE) if new else float("inf")
        while (
            alarms == _alarms(self._live)
            and self._captured == self.captured
            and not self._changed(time.monotonic() - began_s)
        ):
            pace = self.pace
            period_s = min(pace.period_s(self._live.judged.took_s), confirmed_s)
            left_s = began_s + max(period_s, ATTENDED.least_s) - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, pace.tick_s))

    def _changed(self, waited_s: float) -> bool:
        """Whether steps take much longer or shorter than before, and there is time for an early evaluation.

        Looking takes a millisecond.  Early evaluations may take as much time as the others on average; a few are free.
        """
        took_s = self._live.judged.took_s
        if waited_s < EARLY_S or self._early_s < took_s or not pace_changed(self._live):
            return False
        self._early_s -= took_s
        return True

    async def evaluate(self) -> tuple[Change, ...]:
        """Evaluate once; return what changed.  Does nothing without a new step, hang or death since the last time."""
        live = self._live
        live.tick()
        if live.registry.attempt != self._attempt:
            self._attempt, self._watched, self._seen = live.registry.attempt, (), ()
        if not self._due():
            return ()
        self._seen, self._captured = self._now(), self.captured
        began = self._cpu_clock()
        copy = snapshot(live, select(live, self._most))
        copied_s = self._cpu_clock() - began
        if self.history is not None and not self._continued:
            self._continued = True
            self._watched = self.history.watched(step=copy.step, attempt=self._attempt)
        watched, changes, standing, tables, (collecting, first_step), judged_s = (
            await asyncio.to_thread(self._judge, copy) if self.threaded else self._judge(copy)
        )
        self._watched = watched
        took_s = copied_s + judged_s
        shown = _shown(watched, copy)
        if self.history is not None:
            self.history.note(shown, step=copy.step, attempt=self._attempt)
        live.judge(
            Judged(
                findings=shown,
                standing=standing,
                communication=tables[0],
                throughput=tables[1],
                goodput=self._goodput,
                collecting=collecting,
                first_step=first_step,
                step=copy.step,
                ranks=len(copy.ranks),
                of_ranks=copy.of_ranks,
                evaluations=live.judged.evaluations + 1,
                took_s=took_s,
                period_s=self.pace.period_s(took_s),
                failed=live.judged.failed,
            )
        )
        return changes

    def _due(self) -> bool:
        """Whether there is anything new since the last evaluation."""
        live = self._live
        return self._now() != self._seen or live.registry.attempt != self._attempt or live.ended()

    def _now(self) -> tuple[int, ...]:
        return self._live.frontier, self.captured, *_told_of(self._live.run_dir)

    def _judge(
        self, copy: Snapshot
    ) -> tuple[tuple[Watched, ...], tuple[Change, ...], dict[int, str], tuple[Table, Table], tuple[str, int], float]:
        began = self._cpu_clock()
        data = run_data_of(copy)
        if self._unseen:
            self._unseen = False
            self._watched, _ = evaluate(_without_last(data, thresholds.CONFIRM_STEPS), self._watched)
        self._goodput = ledger_document(copy.accounts, copy.meta, data.hangs)
        window = live_window(data)
        watched, changes = evaluate(data, self._watched, window)
        tables = communication_table(window), throughput_table(data, window, last_attempt(data.ranks))
        standing, collecting = hang_state_by_rank(data.hangs), collecting_text(window)
        since = (collecting, int(window.steps[0]) if len(window.steps) else copy.step)
        return watched, changes, standing, tables, since, self._cpu_clock() - began


def _without_last(data: RunData, steps: int) -> RunData:
    """Return the run as it was so many steps before."""
    newest = max((int(series.steps["step"][-1]) for series in data.ranks if len(series.steps)), default=0)
    last = max(newest - steps, 0)
    ranks = tuple(
        replace(series, steps=series.steps.part(slice(0, int(np.searchsorted(series.steps["step"], last, "right")))))
        for series in data.ranks
    )
    return replace(data, ranks=ranks)


async def keep_up(
    live: LiveRun,
    *,
    poll: Callable[[], object] | None = None,
    loop: RuleLoop | None = None,
    whole: Whole | None = None,
    each_tick: Callable[[], None] | None = None,
) -> None:
    """Take in rows and digest steps a few times a second, and evaluate the rules now and then, until canceled.

    ``poll``: an additional source of rows, such as a tail.  A failing rule is a bug in Stepscope but must not stop the
    intake: the error is reported, and the rules run again after a while.  ``loop``: pass one to evaluate once more
    afterwards.  ``whole``: reads all of a run of which ``live`` has only the last steps, and takes its place.
    ``each_tick``: called after each round.
    """
    loop = RuleLoop(live) if loop is None else loop
    judging = asyncio.create_task(loop.run())
    reading = None if whole is None else asyncio.create_task(whole())
    try:
        while True:
            if reading is not None and reading.done():
                judging.cancel()
                await asyncio.gather(judging, return_exceptions=True)
                before, (live, poll) = live, reading.result()
                loop.move_to(live)
                live.requested_s = before.requested_s
                before.touch()  # whoever waits for news of it looks again, and finds the other one
                reading, judging = None, asyncio.create_task(loop.run())
            began_s = time.monotonic()
            if poll is not None:
                poll()
            backlog = time.monotonic() - began_s > BACKLOG_S
            live.tick()
            if judging.done():
                live.judge(replace(live.judged, failed=repr(judging.exception())))
                judging = asyncio.create_task(loop.run(first_s=AGAIN_S))
            if each_tick is not None:
                each_tick()
            await asyncio.sleep(BACKLOG_TICK_S if backlog else WATCHED_TICK_S if live.watched else loop.pace.tick_s)
    finally:
        tasks = [judging, *([] if reading is None else [reading])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def catch_up(live: LiveRun, poll: Callable[[], object], stop: threading.Event | None = None) -> None:
    """Take in all that there is before the rules begin: in half of it they would find what is long over."""
    while stop is None or not stop.is_set():
        began_s = time.monotonic()
        poll()
        live.tick()
        if time.monotonic() - began_s < BACKLOG_S:
            return


def pace_changed(live: LiveRun) -> bool:
    """Whether the last steps take much longer or shorter than those of the window."""
    planes = live.planes
    steps = planes.complete()
    steps = steps[steps <= live.frontier][-thresholds.LIVE_STEPS :]
    if len(steps) < 2 * thresholds.PACE_RECENT_STEPS:
        return False
    columns = np.unique(np.linspace(0, planes.columns - 1, min(planes.columns, PACE_RANKS)).astype(np.intp))
    block = np.ix_(planes.row_of(steps), columns)
    wall = planes.arrays["wall_ns"][block].max(axis=1)
    recent, usual = np.median(wall[-thresholds.PACE_RECENT_STEPS :]), np.median(wall)
    return bool(max(recent, usual) > thresholds.PACE_CHANGED * min(recent, usual))


def _alarms(live: LiveRun) -> tuple[int, ...]:
    """What the next evaluation does not wait for: a hang, a death, the first value that is not finite."""
    return *_told_of(live.run_dir), live.noted.not_finite


def _told_of(run_dir: Path | None) -> tuple[int, ...]:
    """Return a value that changes when a hang or death file arrives: a hung job makes no steps."""
    if run_dir is None:
        return ()
    return tuple(_changed_ns(folder) for folder in (hangs_folder(run_dir), error_path(run_dir, 0).parent))


def _changed_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _shown(watched: Sequence[Watched], copy: Snapshot) -> tuple[Finding, ...]:
    """Return the most severe and costly findings first; the cost is scaled from the judged ranks to all."""
    share = copy.of_ranks / max(1, len(copy.ranks))
    shown = [_for_all(each.finding, share) for each in watched if each.shown]
    return tuple(sorted(shown, key=_order, reverse=True))


def _for_all(finding: Finding, share: float) -> Finding:
    hours = finding.cost.get("rank_hours")
    if share == 1.0 or not isinstance(hours, int | float):
        return finding
    return replace(finding, cost={**finding.cost, "rank_hours": round(hours * share, 4)})


def _order(finding: Finding) -> tuple[Any, ...]:
    """Sort a hang or a dead rank before anything else, as in the summary."""
    stopped = finding.kind in AT_ONCE and finding.severity == "critical"
    return stopped, *finding_order(finding)
