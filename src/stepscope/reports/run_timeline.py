"""A recorded run as a timeline: its steps, phases, collectives, hangs and findings, a process per rank, as bars.

A record of a step has its start and its length, and how much of it each phase took, not when. The phases are therefore
drawn one after the other in the order of a step, with their exact lengths. Collectives have their own times, in those
steps in which the recorder stores them one by one. All times are on the run's clock, those of other nodes shifted by
the measured offset (``store/load.py``).

A timeline is bounded: without a range it has the steps around the onset of the leading finding, or the last ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.rules.spikes import spike_series
from stepscope.judge import thresholds
from stepscope.records.collectives import FLAG_DEVICE, OPS
from stepscope.records.hang import HangRecord
from stepscope.records.series import NOTED, RankSeries, RunData
from stepscope.records.steps import BUILTIN_PHASES, COMM
from stepscope.records.text import count_text, ns_text
from stepscope.traces.exports import Bar, Track, apart

__all__ = ["MOST_CELLS", "USUAL_STEPS", "RunTimeline", "chosen_steps", "run_timeline"]

USUAL_STEPS: Final = 200
BEFORE: Final = 50
"""Of these, steps before the onset of a finding."""
MOST_CELLS: Final = 100_000
"""Steps times ranks: some ten events each, and a viewer in a browser holds a few million."""
MOST_EVENTS: Final = 5_000
RUN: Final = -1
"""Stands for the rank of the process that has what belongs to the whole run."""
SECOND: Final = 10**9
HOUR: Final = 3600 * SECOND

Document = Mapping[str, Any]
Chosen = tuple[RankSeries, NDArray[np.intp]]
"""A rank, and the rows of the steps that are drawn."""


@dataclass(frozen=True, kw_only=True)
class RunTimeline:
    first: int
    last: int
    """Steps, both included."""
    start_ns: int
    end_ns: int
    """Of these steps on the run's clock."""
    note: str
    """Which steps, and why these."""
    zero_ns: int
    """The start of the run, or of what is drawn if that is earlier; captures have warm-up steps before the first."""
    tracks: tuple[Track, ...]
    """Of the run (rank −1), then by rank."""
    hosts: Mapping[int, str]


def chosen_steps(run: RunData, findings: Sequence[Document], wanted: tuple[int, int] | None) -> tuple[int, int, str]:
    """Return the first and last step to draw, and a sentence about the choice; ValueError without steps."""
    numbers = [
        (int(series.steps["step"][0]), int(series.steps["step"][-1])) for series in run.ranks if len(series.steps)
    ]
    if not numbers:
        raise ValueError("the run has no steps")
    first, last = min(low for low, _ in numbers), max(high for _, high in numbers)
    most = max(MOST_CELLS // max(len({series.rank for series in run.ranks}), 1), 1)
    if wanted is not None:
        low, high = max(wanted[0], first), min(wanted[1], last)
        if low > high:
            raise ValueError(f"the run has steps {first} to {last}, none of them in {wanted[0]} to {wanted[1]}")
        if high - low >= most:
            raise ValueError(f"a timeline of this run has at most {most:,} steps; choose a shorter range")
        return low, high, f"Steps {low} to {high}."
    count = min(USUAL_STEPS, most)
    if last - first < count:
        return first, last, f"All steps, {first} to {last}."
    leading = next((finding for finding in findings if finding.get("steps") and finding["severity"] != "info"), None)
    if leading is None:
        return last - count + 1, last, f"The last {count} of steps {first} to {last} (--steps chooses others)."
    onset = int(leading["steps"][0])
    low = min(max(onset - min(BEFORE, count // 4), first), last - count + 1)
    why = f"{count} of steps {first} to {last}, around the onset of the leading finding (--steps chooses others)."
    return low, low + count - 1, why


def run_timeline(run: RunData, findings: Sequence[Document], wanted: tuple[int, int] | None = None) -> RunTimeline:
    """Build the timeline; ``findings`` as in ``summary.json``; ValueError: why there is no timeline."""
    first, last, note = chosen_steps(run, findings, wanted)
    chosen = [(series, _rows(series, first, last)) for series in sorted(run.ranks, key=_order)]
    chosen = [(series, rows) for series, rows in chosen if len(rows)]
    spans = {step: span for series, rows in chosen for step, span in _spans(series, rows)}
    for series, rows in chosen:
        for step, (start_ns, end_ns) in _spans(series, rows):
            low, high = spans[step]
            spans[step] = min(low, start_ns), max(high, end_ns)
    start_ns, end_ns = min(low for low, _ in spans.values()), max(high for _, high in spans.values())
    tracks = [*_of_run(run, findings, chosen, spans, start_ns, end_ns)]
    for series, rows in chosen:
        attempt = series.identity.attempt
        suffix = f" (attempt {attempt})" if attempt else ""
        tracks += (
            Track(rank=series.rank, name=f"{track.name}{suffix}", bars=track.bars) for track in _of_rank(series, rows)
        )
    return RunTimeline(
        first=first,
        last=last,
        start_ns=start_ns,
        end_ns=end_ns,
        zero_ns=_zero_ns(run, [start_ns, *(bar.start_ns for track in tracks for bar in track.bars)]),
        note=f"{note} Phases are drawn in the order of a step: their lengths are exact, their places in it are not.",
        tracks=tuple(tracks),
        hosts={series.rank: series.identity.host for series, _ in chosen},
    )


def _zero_ns(run: RunData, starts_ns: Sequence[int]) -> int:
    created = run.meta.get("created_wall_ns")
    earliest = min(starts_ns)
    known = isinstance(created, int) and earliest - HOUR < created < earliest
    return created if known and isinstance(created, int) else earliest - HOUR


def _order(series: RankSeries) -> tuple[int, int]:
    return series.rank, series.identity.attempt


def _rows(series: RankSeries, first: int, last: int) -> NDArray[np.intp]:
    step = series.steps["step"]
    return np.flatnonzero((step >= first) & (step <= last))


def _spans(series: RankSeries, rows: NDArray[np.intp]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each step with its start and end, which is never after the start of the next."""
    steps = series.steps
    shift_ns = series.anchor_wall_ns - series.anchor_mono_ns
    start_ns = steps["start_ns"][rows].astype(np.int64)
    end_ns = start_ns + np.rint(steps["wall_ns"][rows]).astype(np.int64)
    end_ns[:-1] = np.maximum(np.minimum(end_ns[:-1], start_ns[1:]), start_ns[:-1])
    columns = (steps["step"][rows], start_ns + shift_ns, end_ns + shift_ns)
    for step, start, end in zip(*(column.tolist() for column in columns), strict=True):
        yield int(step), (start, end)


# -- tracks of a rank -------------------------------------------------------------------------------------------------


def _of_rank(series: RankSeries, rows: NDArray[np.intp]) -> Iterator[Track]:
    steps, table = series.steps, series.steps.table
    spans = list(_spans(series, rows))
    allocated = steps["peak_allocated"][rows].tolist()
    bars = [
        Bar(
            name=f"step {step}",
            start_ns=start_ns,
            end_ns=end_ns,
            args={"step": step} | ({"peak_allocated_bytes": int(peak)} if peak else {}),
        )
        for (step, (start_ns, end_ns)), peak in zip(spans, allocated, strict=True)
    ]
    yield Track(rank=series.rank, name="steps", bars=bars)
    host = [(name, steps.phase(name)[rows].tolist()) for name in table.phases]
    device = {name: steps.device(name)[rows].tolist() for name, _ in host} if steps.timed[rows].any() else {}
    phases = [("other", times) for name, times in host if name == "other"]
    ordered = [*((name, times) for name, times in host if name != "other"), *phases]
    parts: list[Bar] = []
    for at, (step, (start_ns, end_ns)) in enumerate(spans):
        at_ns = start_ns
        for name, times in ordered:
            until_ns = min(at_ns + round(times[at]), end_ns)
            if until_ns > at_ns:
                on_device = device[name][at] if name in device else float("nan")
                args = {"step": step} | ({"device_ms": round(on_device / 1e6, 6)} if on_device == on_device else {})
                parts.append(Bar(name=name, start_ns=at_ns, end_ns=until_ns, args=args))
                at_ns = until_ns
    yield Track(rank=series.rank, name="phases", bars=parts)
    yield from _collectives(series, {step for step, _ in spans})


def _collectives(series: RankSeries, steps: set[int]) -> Iterator[Track]:
    """The collectives of those steps in which they were stored one by one, without any two at once on a track."""
    found = series.collectives
    if found is None:
        return
    found = found[np.isin(found["step"], np.array(sorted(steps), np.uint64)) & (found["end_ns"] > found["start_ns"])]
    found = found[np.argsort(found["start_ns"], kind="stable")]
    if not len(found):
        return
    names = {group.slot: group.description or group.name for group in series.groups}
    shift_ns = series.anchor_wall_ns - series.anchor_mono_ns
    bars = [
        Bar(
            name=OPS[op] if op < len(OPS) else "collective",
            start_ns=start_ns + shift_ns,
            end_ns=end_ns + shift_ns,
            args={
                "step": step,
                "group": names.get(group, str(group)),
                "bytes": size,
                "exposed_ms": round(exposed / 1e6, 6),
            }
            | ({"times": "of the call, for as long as it took on the device"} if flags & FLAG_DEVICE else {}),
        )
        for step, group, op, flags, _nth, size, start_ns, exposed, end_ns in found.tolist()
    ]
    yield from _lanes(series.rank, "collectives", bars)


def _lanes(rank: int, name: str, bars: Sequence[Bar]) -> Iterator[Track]:
    """Distribute bars, sorted by start, over as few tracks as possible."""
    for lane, own in enumerate(apart([bar.start_ns for bar in bars], [bar.end_ns for bar in bars])):
        yield Track(rank=rank, name=name + (f" ({lane + 1})" if lane else ""), bars=[bars[at] for at in own])


# -- tracks of the run ------------------------------------------------------------------------------------------------


def _of_run(
    run: RunData,
    findings: Sequence[Document],
    chosen: Sequence[Chosen],
    spans: Mapping[int, tuple[int, int]],
    start_ns: int,
    end_ns: int,
) -> Iterator[Track]:
    """Findings over the steps that they cover, hangs and stalls, and events."""
    numbers = sorted(spans)
    bars = []
    for finding in findings:
        steps = finding.get("steps")
        if not steps:
            continue
        own = [step for step in numbers if steps[0] <= step <= steps[1]]
        if own:
            bars.append(
                Bar(
                    name=str(finding["title"]),
                    start_ns=spans[own[0]][0],
                    end_ns=max(spans[step][1] for step in own),
                    args={"kind": finding["kind"], "severity": finding["severity"], "steps": list(steps)},
                )
            )
    yield from _lanes(RUN, "findings", sorted(bars, key=lambda bar: bar.start_ns))
    # A job that stopped for good did so after its last step.
    hangs = [bar for bar in map(_hang, run.hangs) if bar.end_ns > start_ns]
    stops = sorted([*hangs, *_stalls(chosen, spans)], key=lambda bar: bar.start_ns)
    yield from _lanes(RUN, "hangs and stalls", stops)
    events = [
        Bar(name=str(event.get("event")), start_ns=at, end_ns=at, args={"rank": event.get("rank")})
        for event in run.events
        if isinstance(at := event.get("wall_ns"), int)
        and start_ns <= at <= end_ns
        and event.get("event") not in (None, "", *NOTED)
    ]
    if events:
        yield Track(rank=RUN, name="events", bars=sorted(events, key=lambda bar: bar.start_ns)[:MOST_EVENTS])


def _stalls(chosen: Sequence[Chosen], spans: Mapping[int, tuple[int, int]]) -> Iterator[Bar]:
    """Single steps that take much longer than their neighbors, with the rank and phase that lost most."""
    numbers = sorted(spans)
    place = {step: at for at, step in enumerate(numbers)}
    wall_ns = np.zeros(len(numbers))
    lost: list[list[tuple[float, int, str]]] = [[] for _ in numbers]
    for series, rows in chosen:
        at = np.array([place[step] for step in series.steps["step"][rows].tolist()], np.intp)
        wall_ns[at] = np.maximum(wall_ns[at], series.steps["wall_ns"][rows])
    slow = spike_series(wall_ns)
    stalled = slow.spiky & (slow.rest_ns >= thresholds.STALL_FLOOR_NS)
    if not stalled.any():
        return
    for series, rows in chosen:
        for name in series.steps.table.phases:
            if name == BUILTIN_PHASES[COMM]:
                continue  # waiting for the rank that lost the time
            own_ns = series.steps.phase(name)[rows]
            extra_ns = own_ns - np.median(own_ns)
            for step, extra in zip(series.steps["step"][rows].tolist(), extra_ns.tolist(), strict=True):
                if stalled[place[step]]:
                    lost[place[step]].append((extra, series.rank, name))
    for at in np.flatnonzero(stalled).tolist():
        extra, rank, phase = max(lost[at], default=(0.0, -1, ""))
        where = {"rank": rank, "phase": phase} if extra >= thresholds.EXPLAINS_SHARE * slow.rest_ns[at] else {}
        start_ns, end_ns = spans[numbers[at]]
        yield Bar(
            name=f"Step {numbers[at]} takes {ns_text(wall_ns[at])} instead of {ns_text(slow.local_ns[at])}",
            start_ns=start_ns,
            end_ns=end_ns,
            args={"step": numbers[at], "lost_ms": round(float(slow.rest_ns[at]) / 1e6, 3), **where},
        )


def _hang(hang: HangRecord) -> Bar:
    end_ns = max(hang.over_wall_ns or hang.declared_wall_ns, hang.stopped_wall_ns)
    args = {"kind": hang.kind, "ranks": [each.rank for each in hang.culprits], "over": hang.over}
    lasted = count_text(max((end_ns - hang.stopped_wall_ns) // SECOND, 0), "second")
    return Bar(name=hang.title, start_ns=hang.stopped_wall_ns, end_ns=end_ns, args={**args, "lasted": lasted})
