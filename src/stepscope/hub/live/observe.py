"""What the alerts' rules see of a live run: an ``Observation``, built every two seconds.

    observer = Observer(live, measures=frozenset({"memory_growth"}))
    engine.observe(observer.observe(history.open))

Takes one or two milliseconds for a few ranks: it reads what is new since the last call, and only what rules need
(``measures``).  Of very many ranks it reads an even sample where any of them will do.  Only the hub's event loop calls
it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low as median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.alerts import thresholds
from stepscope.alerts.conditions import STRETCHES, code_line, line_in
from stepscope.alerts.observation import GpuUse, MemoryAtEpoch, NodeSilence, NotFinite, Observation
from stepscope.diagnosis.engine.code_location import seen_lately
from stepscope.flight.stacks import is_user_file
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.live.registry import ENDED
from stepscope.hub.live.step_arrays import NONE
from stepscope.judge import thresholds as judge_thresholds
from stepscope.records import run_clock
from stepscope.records.finding_history import FindingEpisode
from stepscope.records.series import noted_health
from stepscope.records.steps import (
    BUILTIN_PHASES,
    CHECKPOINT,
    EVAL,
    FLAG_CAPTURED,
    FLAG_COMPILED,
    FLAG_DISCOVERY,
    FLAG_EPOCH_START,
    FLAG_FIRST,
    FLAG_SAMPLED,
)

__all__ = ["Observer"]

STEPS = 1200
"""Steps of a small job whose lengths are passed on: a rule on the step time may use up to 1,000 …"""
CELLS = 1 << 18
"""… and at most this many steps times ranks."""
RANKS = 64
"""Ranks whose memory and losses are followed, evenly chosen."""
WALLS = 64
"""Steps whose times are passed on."""
EPOCHS_KEPT = thresholds.EPOCHS + 3
RSS_APART_NS = 2_500_000_000
"""Two epochs that began within this time are counted as one: processes are sampled once a second."""
RSS_NEAR_NS = 10_000_000_000
"""A sample further from the beginning of an epoch, or longer before it, says nothing about it."""
MOST_NEW_EVENTS = 10_000
QUIET_S = 3.0
"""A node that has not reported for this long is quiet: agents report every second."""
STACKS_NS = 30_000_000_000
MOST_STACKS = 500
STEPS_COMPARED = 64
"""Steps in which the times of slow ranks are compared with those of the others."""
UNUSUAL = FLAG_FIRST | FLAG_COMPILED | FLAG_DISCOVERY | FLAG_SAMPLED | FLAG_CAPTURED
LONG_PHASES = {BUILTIN_PHASES[EVAL]: "evaluates", BUILTIN_PHASES[CHECKPOINT]: "writes a checkpoint"}


@dataclass(kw_only=True)
class _Values:
    """Whether a loss or gradient norm of one rank is finite."""

    first_step: int = NONE
    last_step: int = NONE
    steps: int = 0
    finite_step: int = NONE
    finite_steps: int = 0

    def take(self, step: int, finite: bool) -> None:
        if finite:
            self.finite_steps += step != self.finite_step
            self.finite_step = step
            return
        if not self.steps or self.finite_steps:
            self.first_step, self.steps = step, 0
        self.steps += step != self.last_step or not self.steps
        self.last_step, self.finite_steps = step, 0


class Observer:
    def __init__(
        self,
        live: LiveRun,
        *,
        measures: Collection[str] = (),
        now_ns: Callable[[], int] = run_clock.wall_ns,
    ) -> None:
        """``measures``: those that rules are set for."""
        self._live = live
        self._measures = frozenset(measures)
        self._now_ns = now_ns
        self._began_ns = now_ns()
        self._events_seen = 0
        self._excuse: tuple[int, str] | None = None
        self._silent: dict[str, NodeSilence] = {}
        self._gpus: dict[tuple[str, int], GpuUse] = {}
        self._gpu_ns = 0
        self._begin_attempt()

    def move_to(self, live: LiveRun) -> None:
        """Continue on a model that has more of the same run; it is read from its beginning."""
        self._live, self._events_seen, self._gpu_ns = live, 0, 0
        self._begin_attempt()

    def observe(self, findings: Sequence[FindingEpisode]) -> Observation:
        """``findings``: the open episodes.  The model must have all that the run's files have (``catch_up``)."""
        live, now_ns = self._live, self._now_ns()
        live.settle()
        if live.registry.attempt != self._attempt:
            self._begin_attempt()
        self._read_events()
        steps = live.planes.complete()
        steps = steps[steps <= live.frontier]
        self._scan(steps)
        if "gpu_idle" in self._measures:
            self._read_gpus()
        if "not_finite" in self._measures:
            self._read_values()
        last_ns = live.newest_step_end_ns()
        doing, doing_since_ns = self._doing(last_ns)
        throughput = live.judged.throughput or {}
        lengths = self._lengths(steps) if "step_time" in self._measures else ((), ())
        return Observation(
            wall_ns=now_ns,
            attempt=live.registry.attempt,
            step=None if live.frontier == NONE else live.frontier,
            ranks=live.planes.columns,
            world_size=live.registry.world_size,
            findings=tuple(findings),
            judged_step=live.judged.step if live.judged.evaluations else None,
            hosts=self._hosts_by_rank(),
            steps=lengths[0],
            step_ns=lengths[1],
            step_walls=self._walls(steps),
            last_step_wall_ns=last_ns,
            doing=doing,
            doing_since_wall_ns=doing_since_ns,
            memory=tuple(each for own in self._memory.values() for each in own),
            gpus=tuple(self._gpus.values()),
            not_finite=self._not_finite(),
            samples_per_second=_number(throughput.get("samples_per_second")),
            tokens_per_second=_number(throughput.get("tokens_per_second")),
            mfu=_number(throughput.get("mfu")),
            first_step_wall_ns=self._first_step_ns,
            checkpoint_wall_ns=self._checkpoint[1] if self._checkpoint else None,
            checkpoint_step=self._checkpoint[0] if self._checkpoint else None,
            nodes_silent=tuple(self._silent.values()),
            nodes_quiet=self._quiet_nodes(now_ns),
            lines_by_phase=self._lines_by_phase(now_ns, _phases_without_line(findings)),
            lines_by_finding=self._lines_by_finding(now_ns, findings, steps),
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def _begin_attempt(self) -> None:
        self._attempt = self._live.registry.attempt
        self._scanned = NONE
        self._epochs = 0
        self._memory: dict[int, deque[MemoryAtEpoch]] = {}
        self._checkpoint: tuple[int, int] | None = None
        self._first_step_ns: int | None = None
        self._values: dict[tuple[str, int], _Values] = {}
        self._newest_notes: list[Mapping[str, Any] | None] = [None, None]
        self._hosts: tuple[tuple[int, int], dict[int, str]] = ((-1, -1), {})

    def _columns(self, most: int) -> NDArray[np.intp]:
        """Some columns, evenly chosen."""
        columns = self._live.planes.columns
        return np.unique(np.linspace(0, columns - 1, min(most, columns)).astype(np.intp)) if columns else np.arange(0)

    def _lengths(self, steps: NDArray[np.int64]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The last steps that were like others, and the median length of each over the ranks."""
        planes = self._live.planes
        if not len(steps):
            return (), ()
        steps = steps[-min(STEPS, max(64, CELLS // planes.columns)) :]
        columns = self._columns(CELLS // len(steps))
        block = np.ix_(planes.row_of(steps), columns)
        have, wall = planes.have[block], planes.arrays["wall_ns"][block]
        usual = have.any(axis=1)
        if "flags" in planes.arrays:
            usual &= ~(planes.arrays["flags"][block] & UNUSUAL).any(axis=1)
        for phase in LONG_PHASES:
            if f"phase:{phase}" in planes.arrays:
                long = np.any(planes.arrays[f"phase:{phase}"][block] > 0, axis=1)
                usual = usual & ~long
                usual &= ~np.concatenate(([False], long[:-1]))  # the others wait for that rank in their next step
        if not usual.any():
            return (), ()
        lengths = np.nanmedian(np.where(have[usual], wall[usual], np.nan), axis=1)
        return tuple(steps[usual].tolist()), tuple(lengths.tolist())

    def _walls(self, steps: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
        if not len(steps):
            return ()
        chosen = steps[np.unique(np.linspace(0, len(steps) - 1, min(WALLS, len(steps))).astype(np.intp))]
        return tuple(zip(chosen.tolist(), self._began_at(chosen), strict=True))

    def _began_at(self, steps: NDArray[np.int64]) -> list[int]:
        """When each of these steps began on the first rank that made it."""
        planes = self._live.planes
        rows = planes.row_of(steps)
        have = planes.have[rows, : planes.columns]
        column = have.argmax(axis=1)
        starts = planes.arrays["start_ns"][rows, column]
        walls = np.zeros(len(steps), object)
        for at in np.unique(column).tolist():  # mostly one: a call for each step takes most of an observation
            walls[column == at] = self._live.wall_ns_of(at, starts[column == at])
        return [int(wall_ns) for wall_ns in walls]

    def _scan(self, steps: NDArray[np.int64]) -> None:
        """Look for epochs that began and for checkpoints in steps that were not seen before."""
        live, planes = self._live, self._live.planes
        fresh = steps[steps > self._scanned]
        if not len(fresh):
            return
        self._scanned = int(fresh[-1])
        if self._first_step_ns is None:
            self._first_step_ns = self._began_at(fresh[:1])[0]
        rows, n = planes.row_of(fresh), planes.columns
        saved = planes.arrays.get(f"phase:{BUILTIN_PHASES[CHECKPOINT]}")
        if saved is not None and (written := fresh[(saved[rows, :n] > 0).any(axis=1)]).size:
            last = int(written[-1])
            row = int(planes.row_of(written[-1:])[0])
            longest = int(planes.arrays["wall_ns"][row, :n].max())
            self._checkpoint = last, self._began_at(written[-1:])[0] + longest
        flags = planes.arrays.get("flags")
        if flags is None or "memory_growth" not in self._measures:
            return
        for step in fresh[(flags[rows, :n] & FLAG_EPOCH_START).any(axis=1)].tolist():
            self._note_epoch(live, step)

    def _note_epoch(self, live: LiveRun, step: int) -> None:
        planes = live.planes
        self._epochs += 1
        row = int(planes.row_of(np.array([step], np.int64))[0])
        columns = self._columns(RANKS)
        columns = columns[planes.have[row, columns]]
        shown = live.registry.of["shown"][live.ring_of[columns]].tolist()
        if "allocated" in planes.arrays and (planes.arrays["allocated"][row, columns] > 0).any():
            wall_ns = self._began_at(np.array([step], np.int64))[0]
            levels = dict(zip(shown, planes.arrays["allocated"][row, columns].tolist(), strict=True))
        else:
            wall_ns = self._began_at(np.array([step], np.int64))[0]
            newest_ns = max((own[-1].wall_ns for own in self._memory.values() if own), default=0)
            if wall_ns - newest_ns < RSS_APART_NS:
                return
            levels = self._rss_before(wall_ns, newest_ns, set(shown))
        for rank, level in levels.items():
            if level > 0:
                own = self._memory.setdefault(rank, deque(maxlen=EPOCHS_KEPT))
                own.append(MemoryAtEpoch(rank=rank, epoch=self._epochs, step=step, wall_ns=wall_ns, bytes=int(level)))

    def _rss_before(self, wall_ns: int, previous_ns: int, ranks: set[int]) -> dict[int, float]:
        """The memory of processes in the epoch that ends here, without mapped files and what our own server holds.

        It is the median since the previous epoch, of the last ten seconds: memory jumps where epochs meet, and a sample
        next to that may be from either side.  Without any such sample it is the nearest.
        """
        lately: dict[int, list[float]] = {}
        nearest: dict[int, tuple[int, float]] = {}
        for sample in self._live.received.parsed("samples.jsonl", since_wall_ns=wall_ns - RSS_NEAR_NS):
            rank, at_ns, rss = sample.get("rank"), sample.get("wall_ns"), sample.get("rss")
            if sample.get("kind") != "process" or rank not in ranks or type(at_ns) is not int or type(rss) is not int:
                continue
            level = rss - sum(value for name in ("rss_file", "rss_answers") if type(value := sample.get(name)) is int)
            if max(previous_ns, wall_ns - RSS_NEAR_NS) < at_ns <= wall_ns:
                lately.setdefault(rank, []).append(level)
            away_ns = abs(at_ns - wall_ns)
            if away_ns <= RSS_NEAR_NS and (rank not in nearest or away_ns < nearest[rank][0]):
                nearest[rank] = away_ns, level
        return {rank: median(lately[rank]) if rank in lately else level for rank, (_, level) in nearest.items()}

    # -- events, samples, values --------------------------------------------------------------------------------------

    def _doing(self, last_ns: int | None) -> tuple[str, int]:
        """What the job does instead of making steps, and since when; empty if it should be making some."""
        live = self._live
        if last_ns is None:
            of, n = live.registry.of, live.registry.count
            began = of["anchor_wall_ns"][:n]
            return "starts", int(began[began > 0].min()) if (began > 0).any() else self._began_ns
        rings = live.ring_of[self._columns(RANKS)]
        of = live.registry.of
        for ring in rings[of["live_step"][rings] > of["last_step"][rings]].tolist():
            phase = live.registry.phase_names(ring)[int(of["live_phase"][ring])]
            if phase in LONG_PHASES:
                return LONG_PHASES[phase], last_ns
        if self._excuse is not None and self._excuse[0] >= last_ns:
            return self._excuse[1], self._excuse[0]
        return "", 0

    def _read_events(self) -> None:
        received = self._live.received
        if received.events_seen == self._events_seen:
            return
        for event in self._live.events(self._events_seen, limit=MOST_NEW_EVENTS):
            self._events_seen = int(event["number"])
            kind, wall_ns = event.get("event"), event.get("wall_ns")
            at_ns = wall_ns if type(wall_ns) is int else self._now_ns()
            if kind == "not_a_hang":
                self._excuse = at_ns, _after_subject(str(event.get("reason") or "is at work"))
            elif kind == "node_lost":
                self._note_silence(event, at_ns)
            elif kind in ("node_back", "node_joined", "node_replaced", "node_bye"):
                self._silent.pop(str(event.get("host")), None)

    def _note_silence(self, event: Mapping[str, Any], at_ns: int) -> None:
        host, silent_s = str(event.get("host") or ""), event.get("silent_s")
        before_ns = int(silent_s * 1e9) if isinstance(silent_s, int | float) else 0
        ranks = tuple(sorted(rank for rank, own in self._hosts_by_rank().items() if host and own == host))
        self._silent[host] = NodeSilence(host=host, since_wall_ns=at_ns - before_ns, ranks=ranks)

    def _quiet_nodes(self, now_ns: int) -> tuple[NodeSilence, ...]:
        """Nodes with ranks that should be training, and that have not reported while another one did or has ended."""
        live, registry = self._live, self._live.registry
        if len(registry.nodes) < 2:
            return ()
        rings = live.ring_of
        node = registry.of["node"][rings]
        running = (registry.of["state"][rings] < ENDED) & (registry.of["ended_wall_ns"][rings] == 0)
        found = []
        for number in np.unique(node[running]).tolist():
            own, others = running & (node == number), running & (node != number)
            # Nodes whose ranks have all ended report no more; then it counts that the hub itself is running.
            newest_s = 0.0 if not others.any() else live.silent_s(rings[others])
            silent_s = live.silent_s(rings[own]) - newest_s
            if silent_s >= QUIET_S:
                ranks = tuple(sorted(registry.of["shown"][rings[own]].tolist()))
                host = registry.hosts[int(registry.of["host"][rings[own][0]])]
                found.append(NodeSilence(host=host, since_wall_ns=now_ns - int(silent_s * 1e9), ranks=ranks))
        return tuple(found)

    def _lines_by_phase(self, now_ns: int, since: Mapping[str, int]) -> dict[str, str]:
        """Where most of the last stacks in these phases were, in the user's own code; ``since``: the first step."""
        found: dict[str, Counter[str]] = {}
        if not since:
            return {}
        for stack in self._live.received.parsed("stacks.jsonl", since_wall_ns=now_ns - STACKS_NS, limit=MOST_STACKS):
            frames, step = stack.get("frames"), stack.get("step")
            first = since.get(str(stack.get("phase")))
            if first is None or type(step) is not int or step < first:
                continue
            for frame in frames if isinstance(frames, list) else ():
                if isinstance(frame, dict) and is_user_file(str(frame.get("file") or "")):
                    line = f"{str(frame['file']).rpartition('/')[2]}:{frame.get('line')}"
                    found.setdefault(str(stack.get("phase")), Counter())[line] += 1
                    break
        lines = {}
        for phase, counts in found.items():
            line, count = counts.most_common(1)[0]
            if count >= max(judge_thresholds.PLACE_STACKS, judge_thresholds.PLACE_AGREE_SHARE * counts.total()):
                lines[phase] = line
        return lines

    def _lines_by_finding(
        self, now_ns: int, findings: Iterable[FindingEpisode], complete: NDArray[np.int64]
    ) -> dict[int, str]:
        """Where slow ranks are, if the rules had too few stacks when they last ran and the stacks show it now."""
        found = {}
        for episode in findings:
            finding = episode.finding
            ranks, steps, phase = (finding.get(name) for name in ("ranks", "steps", "phase"))
            if finding.get("kind") not in STRETCHES or not ranks or not steps or not phase or code_line(finding):
                continue
            if (finding.get("evidence") or {}).get("clock") != "host":
                continue  # a line of the host does not explain why a device takes longer
            since_ns = now_ns - 2 * STACKS_NS
            stacks = self._live.received.parsed("stacks.jsonl", since_wall_ns=since_ns, limit=MOST_STACKS)
            first = int(steps[0])
            place = seen_lately(
                stacks,
                ranks,
                phase=str(phase),
                steps=range(first, self._live.frontier + 2),  # the one that runs, too
                excess_share=self._excess_share(ranks, str(phase), complete[complete >= first]),
            )
            if line := line_in(place):
                found[episode.number] = line
        return found

    def _excess_share(self, ranks: Collection[int], phase: str, steps: NDArray[np.int64]) -> float:
        """How much of the time that these ranks spent in a phase is more than what the others needed."""
        planes, shown = self._live.planes, self._live.registry.of["shown"][self._live.ring_of]
        mine = np.isin(shown, list(ranks))
        if f"phase:{phase}" not in planes.arrays or not len(steps) or mine.all() or not mine.any():
            return 0.0
        took_ns = planes.arrays[f"phase:{phase}"][planes.row_of(steps[-STEPS_COMPARED:])]
        mine_ns, others_ns = (float(np.median(took_ns[:, np.flatnonzero(of)])) for of in (mine, ~mine))
        return max(1.0 - others_ns / mine_ns, 0.0) if mine_ns > 0 else 0.0

    def _read_gpus(self) -> None:
        ranks = self._ranks_by_gpu()
        since_ns = self._gpu_ns + 1
        for sample in self._live.samples(kinds=("gpu",), since_wall_ns=since_ns, limit=MOST_NEW_EVENTS):
            index, at_ns, used = sample.get("index"), sample.get("wall_ns"), sample.get("util_percent")
            if type(index) is not int or type(at_ns) is not int or not isinstance(used, int | float):
                continue
            key = str(sample.get("node")), index
            before = self._gpus.get(key)
            busy_ns = at_ns if before is None or used > thresholds.IDLE_PERCENT else before.busy_wall_ns
            self._gpus[key] = GpuUse(
                host=key[0], index=index, ranks=ranks.get(key, ()), busy_wall_ns=busy_ns, sample_wall_ns=at_ns
            )
            self._gpu_ns = max(self._gpu_ns, at_ns)

    def _ranks_by_gpu(self) -> dict[tuple[str, int], tuple[int, ...]]:
        registry = self._live.registry
        found: dict[tuple[str, int], list[int]] = {}
        for ring in self._live.ring_of.tolist():
            index = int(registry.of["device_index"][ring])
            if index >= 0:
                host = registry.hosts[int(registry.of["host"][ring])]
                found.setdefault((host, index), []).append(int(registry.of["shown"][ring]))
        return {key: tuple(sorted(own)) for key, own in found.items()}

    def _read_values(self) -> None:
        """Take in the losses and gradient norms that came since the last call."""
        for place, events in enumerate((self._live.noted.health, self._live.noted.seen)):
            fresh = _since(events, self._newest_notes[place])
            for event in fresh:
                rank, step = event.get("rank"), event.get("step")
                if type(rank) is not int or type(step) is not int or rank >= RANKS:
                    continue
                for name, value in noted_health(event).items():
                    own = self._values.setdefault((name, rank), _Values())
                    own.take(step, bool(np.isfinite(value)))
            if events:
                self._newest_notes[place] = events[-1]

    def _not_finite(self) -> tuple[NotFinite, ...]:
        names = {name for (name, _), own in self._values.items() if own.steps}
        found = []
        for name in sorted(names):
            bad = {rank: own for (which, rank), own in self._values.items() if which == name and own.steps}
            latest = min(own.finite_steps for own in bad.values())
            shown = {rank: own for rank, own in bad.items() if own.finite_steps == latest}
            found.append(
                NotFinite(
                    name=name,
                    ranks=tuple(sorted(shown)),
                    first_step=min(own.first_step for own in shown.values()),
                    last_step=max(own.last_step for own in shown.values()),
                    steps=max(own.steps for own in shown.values()),
                    finite_steps=latest,
                )
            )
        return tuple(found)

    def _hosts_by_rank(self) -> dict[int, str]:
        registry, rings = self._live.registry, self._live.ring_of
        key = registry.attempt, len(rings)
        if self._hosts[0] != key:
            shown, hosts = registry.of["shown"][rings].tolist(), registry.of["host"][rings].tolist()
            named = {rank: registry.hosts[host] for rank, host in zip(shown, hosts, strict=True)}
            self._hosts = key, named
        return self._hosts[1]


def _since(events: Iterable[Mapping[str, Any]], last: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Those after ``last``, the oldest first."""
    fresh = []
    for event in reversed(list(events)):
        if event is last:
            break
        fresh.append(event)
    return fresh[::-1]


def _phases_without_line(findings: Iterable[FindingEpisode]) -> dict[str, int]:
    """The phases of findings about all ranks that name no line of code, and since which step."""
    found = {}
    for episode in findings:
        finding = episode.finding
        if finding.get("phase") and not finding.get("ranks") and not code_line(finding):
            steps = finding.get("steps")
            found[str(finding["phase"])] = int(steps[0]) if steps else episode.first_step
    return found


def _after_subject(reason: str) -> str:
    """``Rank 3 writes a checkpoint at train.py:4.`` without its period, as part of a sentence."""
    return f"is not hung: {reason.removesuffix('.')}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
