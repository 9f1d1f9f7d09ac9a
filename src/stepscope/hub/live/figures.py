"""The figures of a run that ``/metrics`` shows, made from its live model, and as ``judged.json``.

    copy = copy_figures(live)                               # in the event loop: a few milliseconds for 4,096 ranks
    copy.figures(status="running", wall_ns=…, findings=…)   # in any thread

The run's hub replaces the file every few seconds, so that ``stepscope serve`` shows all active runs to Prometheus
without opening them.  Their number does not depend on the size of the job.  A file of a run directory may come from
anybody: it is read within limits, and a value of another type makes it invalid.

Only the event loop may touch the model.  It therefore adds up what is large there, in the arrays, and copies the rest;
samples are passed on as received and parsed elsewhere, which takes most of the time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.alerts.model import Incident
from stepscope.hub.live.latest_samples import MOST_LINES, SampleColumns, Spread, latest_samples
from stepscope.hub.live.lines import Line
from stepscope.hub.live.live_run import SUMMED_RANKS, Judged, LiveRun
from stepscope.records.capture import CaptureRecord
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.steps import BUILTIN_PHASES, COMM
from stepscope.records.throughput import named_rates
from stepscope.store.file_io import read_document, write_bytes
from stepscope.store.paths import JUDGED, SAMPLES

__all__ = [
    "LAST_STEPS",
    "STATS",
    "WORST",
    "CaptureCount",
    "Durations",
    "FigureCopy",
    "FindingCount",
    "IncidentCount",
    "PhaseRank",
    "RankWork",
    "RunFigures",
    "copy_figures",
    "figures_of",
    "rates_of",
    "read_judged",
    "write_judged",
]

LAST_STEPS = 256
WORST = 8
MOST_PHASES = 24
MOST_FINDINGS = 64
MOST_COUNTS = 64
MOST_NAMES = 64
MOST_BYTES = 256 << 10
STATS = {"p50": 0.5, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Of a step or phase across ranks, over the last steps."""

    name: str
    p50: float
    p95: float
    max: float
    """In seconds."""


@dataclass(frozen=True, kw_only=True)
class RankWork:
    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PhaseRank:
    """The rank that spends most time in a phase, its mean over the last steps."""

    phase: str
    rank: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FindingCount:
    kind: str
    severity: str
    findings: int
    ranks: int
    """How many ranks they name."""
    cost: float = 0.0
    """The largest share of the step time that one of them costs."""


@dataclass(frozen=True, kw_only=True)
class IncidentCount:
    state: str
    severity: str
    incidents: int


@dataclass(frozen=True, kw_only=True)
class CaptureCount:
    state: str
    captures: int


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    wall_ns: int
    """When they were made."""
    status: str
    step: int
    attempt: int
    ranks: int
    live_ranks: int
    still_ranks: int
    world_size: int
    nodes: int
    steps: tuple[Durations, ...] = ()
    """``wall`` and ``work``; empty before the first step."""
    phases: tuple[Durations, ...] = ()
    worst_ranks: tuple[RankWork, ...] = ()
    worst_phases: tuple[PhaseRank, ...] = ()
    """Without ``comm``: who is there longest waits for the others."""
    device_seconds: dict[str, Any] = field(default_factory=dict)
    """By phase, the mean time per step on the devices over the steps that were timed there."""
    device_slowest: float | None = None
    """The longest of these steps on a device, in seconds."""
    memory_bytes: dict[str, Any] = field(default_factory=dict)
    """Of the devices: ``allocated_median``, ``allocated``, ``reserved``, ``peak_allocated``; the last three of the
    fullest rank."""
    spreads: tuple[Spread, ...] = ()
    """From the newest samples of hosts, processes and GPUs."""
    gpus: int = 0
    gpus_throttled: int = 0
    blocking_ranks: int = 0
    """Hung ranks for which the others wait."""
    states: dict[str, Any] = field(default_factory=dict)
    """Ranks by the state of their process."""
    lost: int = 0
    """Records that were overwritten before they could be read."""
    created_wall_ns: int = 0
    last_step_wall_ns: int | None = None
    checkpoint_wall_ns: int | None = None
    noted: dict[str, Any] = field(default_factory=dict)
    """The newest values of what the script noted: loss, gradient norm and the rest."""
    incidents: tuple[IncidentCount, ...] = ()
    captures: tuple[CaptureCount, ...] = ()
    findings: tuple[FindingCount, ...] = ()
    throughput: dict[str, Any] = field(default_factory=dict)
    """Rates by name, as far as they are known."""
    goodput: float | None = None
    goodput_seconds: dict[str, Any] = field(default_factory=dict)
    """By part of the ledger."""


@dataclass(frozen=True, kw_only=True)
class FigureCopy:
    """What the figures are made from, without the model."""

    info: Mapping[str, Any]
    steps: Mapping[str, Any]
    """The last steps as one bin, as the API has them."""
    phases: Sequence[str]
    ranks: NDArray[np.int64]
    """[rank]: their numbers."""
    mean_ns: Mapping[str, NDArray[np.float32]]
    """[rank] by ``work`` and phase: over the last steps."""
    lines: Sequence[tuple[str, Sequence[tuple[Line, int]]]]
    """The newest samples of each node, as received."""
    noted: Mapping[str, float]
    judged: Judged
    created_wall_ns: int
    last_step_wall_ns: int | None
    checkpoint_wall_ns: int | None

    @cached_property
    def samples(self) -> SampleColumns:
        """The newest samples of all nodes; parsed at the first use."""
        return SampleColumns(latest_samples(self.lines))

    def figures(
        self,
        *,
        status: str,
        wall_ns: int,
        findings: Iterable[Mapping[str, Any]],
        throughput: Mapping[str, Any] | None,
        incidents: Iterable[Incident] = (),
        captures: Iterable[CaptureRecord] = (),
    ) -> RunFigures:
        """``findings``: in the form of ``summary.json``."""
        info, steps, judged = self.info, self.steps, self.judged
        durations: dict[str, Durations] = {}
        if steps["first"]:
            places = {stat: steps["quantiles"].index(share) for stat, share in STATS.items()}
            for name in ("wall", "work", *self.phases[:MOST_PHASES]):
                row = steps["ns"][name][0]
                durations[name] = Durations(name=name, **{stat: row[place] / 1e9 for stat, place in places.items()})
        samples = self.samples
        return RunFigures(
            wall_ns=wall_ns,
            status=status,
            step=max(0, info["step"]),
            attempt=info["attempt"],
            ranks=info["ranks"],
            live_ranks=info["live_ranks"],
            still_ranks=info["still_ranks"],
            world_size=info["world_size"],
            nodes=info["nodes"],
            steps=tuple(durations[name] for name in ("wall", "work") if name in durations),
            phases=tuple(own for name, own in durations.items() if name not in ("wall", "work")),
            worst_ranks=self._worst_ranks() if durations else (),
            worst_phases=self._worst_phases() if durations else (),
            device_seconds=_first_in_seconds(steps["device_mean_ns"]),
            device_slowest=_first_in_seconds({"": steps["device_slowest_ns"]}).get(""),
            memory_bytes={name: own[0] for name, own in steps["memory_bytes"].items() if own and own[0]},
            spreads=samples.spreads(),
            gpus=len(samples.gpus.sources),
            gpus_throttled=int(samples.throttled.sum()),
            blocking_ranks=sum(how == "hung" for how in judged.standing.values()) if info["still_ranks"] else 0,
            states=dict(info["states"]),
            lost=info["lost"],
            created_wall_ns=self.created_wall_ns,
            last_step_wall_ns=self.last_step_wall_ns,
            checkpoint_wall_ns=self.checkpoint_wall_ns,
            noted={name: value for name, value in self.noted.items() if np.isfinite(value)},
            incidents=tuple(
                IncidentCount(state=state, severity=severity, incidents=count)
                for (state, severity), count in Counter((own.state, own.severity) for own in incidents).items()
            ),
            captures=tuple(
                CaptureCount(state=state, captures=count)
                for state, count in Counter(record.state for record in captures).items()
            ),
            findings=_counted(findings),
            goodput=(judged.goodput or {}).get("goodput"),
            goodput_seconds=dict((judged.goodput or {}).get("parts", {})),
            throughput={name: value for name, value in (throughput or {}).items() if type(value) in (int, float)},
        )

    def _worst_ranks(self) -> tuple[RankWork, ...]:
        work_ns = self.mean_ns["work"]
        order = np.lexsort((self.ranks, -work_ns))[:WORST]
        return tuple(RankWork(rank=int(self.ranks[at]), seconds=float(work_ns[at]) / 1e9) for at in order.tolist())

    def _worst_phases(self) -> tuple[PhaseRank, ...]:
        found = []
        for phase in self.phases[:MOST_PHASES]:
            spent_ns = self.mean_ns[phase]
            if phase != BUILTIN_PHASES[COMM] and len(spent_ns):
                most = int(spent_ns.argmax())
                found.append(PhaseRank(phase=phase, rank=int(self.ranks[most]), seconds=float(spent_ns[most]) / 1e9))
        return tuple(found)


def copy_figures(live: LiveRun) -> FigureCopy:
    """Copy what the figures need; only in the event loop."""
    info = live.info()
    step = max(0, info["step"])
    steps = live.steps(max(0, step - LAST_STEPS + 1), step, bins=1)
    created = live.meta.get("created_wall_ns")
    return FigureCopy(
        info=info,
        steps=steps,
        phases=live.used_phases(),
        ranks=live.registry.of["shown"][live.ring_of],
        mean_ns=_means(live),
        lines=live.received.newest(SAMPLES, MOST_LINES),
        noted=live.noted.latest(),
        judged=live.judged,
        created_wall_ns=created if type(created) is int else 0,
        last_step_wall_ns=live.newest_step_end_ns(),
        checkpoint_wall_ns=_checkpoint_wall_ns(live),
    )


def figures_of(
    live: LiveRun,
    *,
    status: str,
    wall_ns: int,
    findings: Iterable[Mapping[str, Any]],
    throughput: Mapping[str, Any] | None,
    incidents: Iterable[Incident] = (),
    captures: Iterable[CaptureRecord] = (),
) -> RunFigures:
    """The same at once, in the event loop."""
    return copy_figures(live).figures(
        status=status,
        wall_ns=wall_ns,
        findings=findings,
        throughput=throughput,
        incidents=incidents,
        captures=captures,
    )


def _means(live: LiveRun) -> dict[str, NDArray[np.float32]]:
    """[column] by ``work`` and phase: the mean over the last complete steps, added up where the arrays are."""
    planes, phases = live.planes, live.used_phases()[:MOST_PHASES]
    kept = planes.complete()
    rows = planes.row_of(kept[kept <= live.frontier][-LAST_STEPS:])
    count, totals = planes.sums(rows, ["wall_ns", *(f"phase:{phase}" for phase in phases)])
    means = {name: (total / np.maximum(count, 1)).astype(np.float32) for name, total in totals.items()}
    waited = means.get(f"phase:{BUILTIN_PHASES[COMM]}")
    return {
        "work": means["wall_ns"] - (0 if waited is None else waited),
        **{phase: means[f"phase:{phase}"] for phase in phases},
    }


def _checkpoint_wall_ns(live: LiveRun) -> int | None:
    """When the last step in which one of the first ranks wrote a checkpoint ended."""
    of, newest = live.registry.of, None
    for ring in live.ring_of[of["rank"][live.ring_of] < SUMMED_RANKS].tolist():
        saved_ns = live.sums.saved_ns(ring)
        if saved_ns is not None:
            offset_ns = live.offsets_ns.get(live.registry.nodes[int(of["node"][ring])], 0)
            wall_ns = saved_ns - int(of["anchor_mono_ns"][ring]) + int(of["anchor_wall_ns"][ring]) - offset_ns
            newest = wall_ns if newest is None else max(newest, wall_ns)
    return newest


def _first_in_seconds(columns: Mapping[str, Sequence[int | None]]) -> dict[str, float]:
    """By name, the value of the only bin."""
    return {name: own[0] / 1e9 for name, own in columns.items() if own and own[0]}


def rates_of(live: LiveRun, table: object) -> dict[str, Any]:
    """Return the table of throughput in a summary, without what the script notes itself; {} if nothing is known."""
    noted = {rate for name in live.noted.names() for rate in named_rates(name)}
    return {name: value for name, value in table.items() if name not in noted} if isinstance(table, Mapping) else {}


def _counted(findings: Iterable[Mapping[str, Any]]) -> tuple[FindingCount, ...]:
    counts: dict[tuple[str, str], list[float]] = {}
    for finding in findings:
        own = counts.setdefault((str(finding.get("kind")), str(finding.get("severity"))), [0, 0, 0.0])
        named, cost = finding.get("ranks"), finding.get("cost")
        share = cost.get("share") if isinstance(cost, Mapping) else None
        own[0] += 1
        own[1] += len(named) if isinstance(named, list) else 0
        own[2] = max(own[2], share if isinstance(share, int | float) else 0.0)
    return tuple(
        FindingCount(kind=kind, severity=severity, findings=int(count), ranks=int(ranks), cost=cost)
        for (kind, severity), (count, ranks, cost) in list(counts.items())[:MOST_FINDINGS]
    )


def write_judged(run_dir: Path, figures: RunFigures) -> None:
    """Replace ``judged.json``; OSError if the disk refuses."""
    document = {"schema": 1, **encoded(figures)}
    write_bytes(run_dir / JUDGED, json.dumps(document, separators=(",", ":")).encode() + b"\n")


def read_judged(run_dir: Path) -> RunFigures | None:
    """Read ``judged.json``; None if it does not exist or is not valid."""
    try:
        figures = decoded(RunFigures, json.loads(read_document(run_dir / JUDGED, most=MOST_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    many = max(len(figures.phases), len(figures.worst_phases)) > MOST_PHASES or len(figures.worst_ranks) > WORST
    many = many or len(figures.steps) > len(STATS) or len(figures.findings) > MOST_FINDINGS
    many = many or max(len(figures.spreads), len(figures.incidents), len(figures.captures)) > MOST_COUNTS
    named = (figures.device_seconds, figures.memory_bytes, figures.states, figures.noted)
    return None if many or max(map(len, named)) > MOST_NAMES else figures
