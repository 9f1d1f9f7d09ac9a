"""The tables of a summary: ranks, steps, phases, communication, memory, hosts and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import Window
from stepscope.diagnosis.engine.communication import DDP_OP, Arrivals, Communication, Flow, Reducer, bus_factor
from stepscope.diagnosis.engine.readings import gpus_in_use, in_steady_steps, spaced
from stepscope.diagnosis.engine.samples import extremes, number, numbers, of_kind
from stepscope.diagnosis.engine.view import step_lengths
from stepscope.diagnosis.engine.window import last_attempt, replicas_of
from stepscope.hangs.report import hang_state_by_rank
from stepscope.judge import thresholds
from stepscope.judge.statistics import mean_rank, medians
from stepscope.records.collectives import OPS
from stepscope.records.series import ALIVE, RankSeries, RunData, noted_names
from stepscope.records.steps import BUILTIN_PHASES, FLAG_SAMPLED
from stepscope.records.throughput import RATES, WORK_KINDS, Work, named_rates, peak_of
from stepscope.step_table import RankSteps

__all__ = [
    "communication_table",
    "finite",
    "host_table",
    "memory_table",
    "phases_table",
    "ranks_table",
    "step_time_table",
    "steps_table",
    "throughput_table",
]


# -- ranks, steps and phases ------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]

PHASE_ORDER = ("input", "h2d", "forward", "backward", "comm", "optimizer", "", "eval", "checkpoint", "other")
"""The order within a step; "" is the place of the user's own phases."""
WARMUP_SHOWN = 32


def ranks_table(run: RunData, window: Window) -> list[dict[str, Any]]:
    """One row per process of the last attempt, by rank."""
    work = window.wall_ns[:, window.steady] if len(window.ranks) else window.wall_ns
    wall_ms = dict(zip(window.ranks, medians(work) / 1e6, strict=True))
    comm_ms: dict[int, float] = {}
    if "comm" in window.phases:
        comm = window.phase_ns[window.phases.index("comm")][:, window.steady]
        comm_ms = dict(zip(window.ranks, medians(comm) / 1e6, strict=True))
    standing = hang_state_by_rank(run.hangs)
    return [
        {
            "rank": series.rank,
            "host": series.identity.host,
            "pid": series.identity.pid,
            "local_rank": series.identity.local_rank,
            "state": series.state,
            "standing": standing.get(series.rank) if series.state in ALIVE else None,
            "device": series.identity.device,
            "device_name": series.identity.device_name,
            "device_index": series.identity.device_index,
            "device_timed": series.identity.device_timed,
            "backend": series.identity.backend,
            "torch": series.identity.torch,
            "steps": len(series.steps),
            "last_step": int(series.steps["step"][-1]) if len(series.steps) else None,
            "step_ms": finite(wall_ms.get(series.rank)),
            "comm_ms": finite(comm_ms.get(series.rank)),
            "lost": series.lost,
            "torn": series.torn,
            "hook_failures": series.hook_failures,
        }
        for series in last_attempt(run.ranks)
    ]


def steps_table(current: Sequence[RankSeries], window: Window) -> dict[str, Any]:
    step_ns = mean_rank(window.wall_ns)
    steady = window.steady
    steady_s = float(step_lengths(window.wall_ns[:, steady]).sum()) / 1e9
    reasons = Counter(apart.reason for apart in window.warmup)
    return {
        "total": max((len(series.steps) for series in current), default=0),
        "compared": len(window.steps),
        "steady": int(steady.sum()),
        "left_out": window.left_out,
        "first": int(window.steps[0]) if len(window.steps) else None,
        "last": int(window.steps[-1]) if len(window.steps) else None,
        "per_second": finite(int(steady.sum()) / steady_s) if steady_s > 0 else None,
        "seconds": finite(float(step_ns.sum()) / 1e9),
        "warmup": {
            "count": len(window.warmup),
            "seconds": finite(float(step_ns[~steady].sum()) / 1e9),
            "reasons": dict(sorted(reasons.items())),
            "steps": [apart.step for apart in window.warmup[:WARMUP_SHOWN]],
        },
    }


def step_time_table(window: Window) -> dict[str, Any]:
    """The mean of the steady steps, with the lengths that the rules use; all else without sampled steps."""
    lengths = step_lengths(window.wall_ns[:, window.steady]) / 1e6
    if not len(lengths):
        return dict.fromkeys(("mean_ms", "min_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms", "max_step"))
    mean, plain = lengths.mean(), window.unsampled
    lengths = lengths[plain[window.steady]]
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99))
    return {
        "mean_ms": finite(mean),
        "min_ms": finite(lengths.min()),
        "p50_ms": finite(p50),
        "p90_ms": finite(p90),
        "p99_ms": finite(p99),
        "max_ms": finite(lengths.max()),
        "max_step": int(window.steps[plain][int(lengths.argmax())]),
    }


def phases_table(window: Window) -> dict[str, dict[str, Any]]:
    """By phase, in the order of a step: its share, the median rank, the worst rank; host and device time."""
    steady = window.steady
    if not steady.any():
        return {}
    device_ns = window.device_ns
    total_ns = float(np.nansum(window.wall_ns[:, steady]))
    device_total_ns = 0.0 if device_ns is None else float(np.nansum(device_ns[:, :, steady]))
    table = {}
    for name in sorted(window.phases, key=_place):
        row = window.phases.index(name)
        figures = _phase_row(window.ranks, window.phase_ns[row][:, steady], total_ns)
        device = None
        if device_ns is not None and device_total_ns:
            device = _phase_row(window.ranks, device_ns[row][:, steady], device_total_ns)
        table[name] = {**figures, "device": device}
    return table


def _phase_row(ranks: Sequence[int], values: Floats, total_ns: float) -> dict[str, Any]:
    """All figures are means over the steps, so that they agree with the share; of the ranks' means, one is shown."""
    spent_ns, counts = np.nansum(values, axis=1), (~np.isnan(values)).sum(axis=1)
    there = counts > 0
    by_rank = np.where(there, spent_ns / np.maximum(counts, 1), np.nan)
    worst = int(np.nanargmax(by_rank)) if there.any() else None
    return {
        "share": finite(spent_ns.sum() / total_ns) if total_ns else None,
        "mean_ms": finite(spent_ns.sum() / counts.sum() / 1e6) if there.any() else None,
        "median_ms": finite(np.median(by_rank[there]) / 1e6) if there.any() else None,
        "worst_ms": finite(by_rank[worst] / 1e6) if worst is not None else None,
        "worst_rank": ranks[worst] if worst is not None and len(ranks) > 1 else None,
        "steps": int((values > 0).any(axis=0).sum()),
    }


def _place(name: str) -> int:
    return PHASE_ORDER.index(name if name in BUILTIN_PHASES else "")


def finite(value: float | np.floating[Any] | None, digits: int = 4) -> float | None:
    """A number that JSON can hold: rounded, and None instead of nan."""
    if value is None or not np.isfinite(value):
        return None
    return round(float(value), digits)


# -- throughput -------------------------------------------------------------------------------------------------------
# Samples, tokens and floating-point operations per second: the work of sampled steps over the time that steps take.
#
# The time is that of the steps between the samples, which are a little longer, without evaluations and checkpoints.
# What cannot be added up with certainty is left out, and so is what the script reports itself.

CURVE_POINTS = 512
CURVE_STEPS = 8
"""At least so many between two points: in the steps right after a sample, two samples may follow each other."""
UNSAMPLED_STEPS = 8
"""Fewer steps without a sample say too little; then all count."""
LOGGED_RATES = {"tokens_per_second": "tokens_per_second", "tflops": "tflops", "mfu_percent": "mfu"}
"""Figures of the training log, which replace ours."""
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def throughput_table(run: RunData, window: Window, current: Sequence[RankSeries]) -> dict[str, Any] | None:
    """None: no sample says how much a step does, or no step is steady."""
    works = _works(window)
    lengths = _step_lengths(window)
    if not works or not len(lengths.steps):
        return None
    step_s = float(lengths.seconds.mean())
    steps = sorted({step for _, step in works})
    by_kind = {kind: _by_step(works, kind, len(window.ranks), steps) for kind in WORK_KINDS}
    usual = {kind: medians(values)[:, None] for kind, values in by_kind.items()}
    totals = _Totals(window, current, usual["flops"])
    per_step = {kind: _only(totals.of_job(kind, values)) for kind, values in usual.items()}
    figures = {
        "samples_per_second": _digits(per_step["samples"], 1 / step_s),
        "tokens_per_second": _digits(per_step["tokens"], 1 / step_s),
        "tflops": _digits(_only(totals.per_device(usual["flops"])), 1e-12 / step_s),
    }
    peak = totals.peak() if figures["tflops"] is not None else None
    mfu = figures["tflops"] / peak[0] if figures["tflops"] is not None and peak is not None else None
    figures["mfu"] = round(mfu, 4) if mfu is not None and mfu <= 1 else None
    peak = None if figures["mfu"] is None else peak
    declared = _declared_figures(run, current)
    curve = _curve(lengths, steps, works, by_kind, totals, None if peak is None else peak[0])
    return {
        **{name: None if name in declared else value for name, value in figures.items()},
        "per_step": {kind: None if value is None else int(value) for kind, value in per_step.items()},
        "step_ms": finite(step_s * 1e3),
        "samples": len(steps),
        "all_sampled": lengths.sampled,
        "peak_tflops": None if peak is None else peak[0],
        "peak_dtype": None if peak is None else peak[1],
        "logged": declared,
        "curve": {name: column for name, column in curve.items() if name not in declared},
    }


def _works(window: Window) -> dict[tuple[int, int], Work]:
    """By row and step.  Several models (a GAN) add up their operations, and must agree on samples and tokens."""
    row_of = {rank: row for row, rank in enumerate(window.ranks)}
    found: dict[tuple[int, int], list[Work]] = {}
    for sample in window.layers.samples:
        if sample.work is not None and sample.rank in row_of:
            found.setdefault((row_of[sample.rank], sample.step), []).append(sample.work)
    return {key: works[0] if len(works) == 1 else _together(works) for key, works in found.items()}


def _together(works: Sequence[Work]) -> Work:
    flops = [work.flops for work in works if work.flops is not None]
    samples, tokens = ({work.samples for work in works}, {work.tokens for work in works})
    return Work(
        flops=sum(flops) if len(flops) == len(works) else None,
        samples=samples.pop() if len(samples) == 1 else None,
        tokens=tokens.pop() if len(tokens) == 1 else None,
    )


def _by_step(works: Mapping[tuple[int, int], Work], kind: str, rows: int, steps: Sequence[int]) -> Floats:
    """[R, sampled steps]; nan where it is not known."""
    place = {step: at for at, step in enumerate(steps)}
    found = np.full((rows, len(steps)), np.nan)
    for (row, step), work in works.items():
        value = getattr(work, kind)
        if value is not None:
            found[row, place[step]] = value
    return found


@dataclass(frozen=True, kw_only=True)
class _StepLengths:
    """Steady steps without evaluations and checkpoints: the time that all throughput is based on."""

    steps: NDArray[np.int64]
    seconds: Floats
    """Of the steps above."""
    sampled: bool
    """Whether they contain sampled steps, because there are hardly any others."""


def _step_lengths(window: Window) -> _StepLengths:
    plain = window.steady & ~((window.flags & FLAG_SAMPLED) > 0).any(axis=0)
    sampled = int(plain.sum()) < min(UNSAMPLED_STEPS, int(window.steady.sum()))
    used = window.steady if sampled else plain
    wall_ns = window.wall_ns[:, used]
    for name in ("eval", "checkpoint"):
        if name in window.phases:
            wall_ns = wall_ns - window.phase_ns[window.phases.index(name)][:, used]
    seconds = step_lengths(wall_ns) / 1e9 if used.any() else np.zeros(0)
    return _StepLengths(steps=window.steps[used], seconds=seconds, sampled=sampled)


class _Totals:
    """Adds up the work of ranks, [R, any number of steps]; nan where a sum is not known."""

    def __init__(self, window: Window, current: Sequence[RankSeries], usual_flops: Floats) -> None:
        self._window = window
        row_of = {rank: row for row, rank in enumerate(window.ranks)}
        replicas = replicas_of(current) or [[-1]]
        known = all(rank in row_of for ranks in replicas for rank in ranks)
        self._replicas = [[row_of[rank] for rank in ranks] for ranks in replicas] if known else []
        computing = np.flatnonzero(~np.isnan(usual_flops[:, 0]))
        self._all = len(computing) == max((series.identity.world_size for series in current), default=0)
        # Stages of a pipeline differ; elsewhere half of the ranks is enough for a mean.
        enough = len(window.ranks) if window.stages else (len(window.ranks) + 1) // 2
        self._computing = computing if len(computing) >= enough else computing[:0]

    def of_job(self, kind: str, values: Floats) -> Floats:
        """[steps]; samples and tokens of all replicas, each as all its ranks say that know them."""
        nothing = np.full(values.shape[1], np.nan)
        if kind == "flops":
            return values.sum(axis=0) if self._all else nothing
        if not self._replicas or (kind == "tokens" and self._window.splits_sequences):
            return nothing  # in the latter case, of a whole sequence or of a part of it
        ordered = values[[row for rows in self._replicas for row in rows]]
        starts = np.cumsum([0, *map(len, self._replicas[:-1])])
        low, high = (ufunc.reduceat(ordered, starts, axis=0) for ufunc in (np.fmin, np.fmax))
        return np.where((low == high).all(axis=0), low.sum(axis=0), np.nan)

    def per_device(self, flops: Floats) -> Floats:
        return flops[self._computing].mean(axis=0) if len(self._computing) else np.full(flops.shape[1], np.nan)

    def peak(self) -> tuple[float, str] | None:
        """The mean of the devices' peaks in TFLOP/s, and for which dtype; None if one is not known."""
        window = self._window
        convolves = any("Conv" in module.type for model in window.layers.models.values() for module in model.modules)
        peaks, dtypes = [], set()
        for row in self._computing.tolist():
            dtype = _dtype(window.facts[row], convolves=convolves)
            peak = peak_of(window.identities[row].device_name)
            known = {"bf16": peak.half, "fp16": peak.half, "tf32": peak.tf32, "fp32": peak.fp32} if peak else {}
            tflops = known.get(dtype)
            if tflops is None:
                return None
            peaks.append(tflops)
            dtypes.add(dtype)
        return (round(sum(peaks) / len(peaks), 1), dtypes.pop()) if len(dtypes) == 1 else None


def _dtype(facts: Mapping[str, Any], *, convolves: bool) -> str:
    """In which the products are computed, ``bf16`` if nothing is known; empty: another, or not clear."""
    dtypes = [facts.get("autocast")]
    dtypes += [about.get(key) for name, key in _DTYPE_FACTS if isinstance(about := facts.get(name), Mapping)]
    name = next((dtype for dtype in dtypes if isinstance(dtype, str)), "bfloat16")
    dtype = SHORT_DTYPES.get(name, "")
    if dtype != "fp32":
        return dtype
    # Convolutions use TF32 unless the script forbids it, which is not known.
    return "tf32" if facts.get("tf32") is True else "" if convolves else "fp32"


_DTYPE_FACTS = (("fsdp", "param_dtype"), ("model", "dtype"))


def _declared_figures(run: RunData, current: Sequence[RankSeries]) -> dict[str, str]:
    """What the script reports itself, and where: the name of a note, or the framework."""
    pids = {series.identity.pid for series in current}
    names = sorted(noted_names(event for event in run.events if event.get("pid") in pids))
    found = {rate: name for name in reversed(names) for rate in named_rates(name)}
    figures = run.training_log.get("figures", {})
    found |= {rate: str(run.training_log["framework"]) for name, rate in LOGGED_RATES.items() if name in figures}
    return {name: found[name] for name in RATES if name in found}


def _curve(
    lengths: _StepLengths,
    steps: Sequence[int],
    works: Mapping[tuple[int, int], Work],
    by_kind: Mapping[str, Floats],
    totals: _Totals,
    peak: float | None,
) -> dict[str, list[Any]]:
    """Columns over the sampled steps of the first rank that has any: the rate of the steps from one to the next."""
    first = min(row for row, _ in works)
    at, rates, last = [], [], None
    for place, step in enumerate(steps):
        if (first, step) not in works or (last is not None and step - last < CURVE_STEPS):
            continue
        if last is not None:
            between = lengths.seconds[(lengths.steps > last) & (lengths.steps <= step)]
            if len(between) and between.sum() > 0:
                at.append(place)
                rates.append(len(between) / float(between.sum()))
        last = step
    if len(at) > CURVE_POINTS:
        places = np.linspace(0, len(at) - 1, CURVE_POINTS).astype(int).tolist()
        at, rates = [at[place] for place in places], [rates[place] for place in places]
    # A rank that was not sampled in a step did there what it usually does.
    here = {
        kind: np.where(np.isnan(values[:, at]), medians(values)[:, None], values[:, at])
        for kind, values in by_kind.items()
    }
    rows = {
        "samples_per_second": totals.of_job("samples", here["samples"]) * rates,
        "tokens_per_second": totals.of_job("tokens", here["tokens"]) * rates,
        "tflops": totals.per_device(here["flops"]) * rates / 1e12,
    }
    rows["mfu"] = rows["tflops"] / (np.nan if peak is None else peak)
    rows["mfu"][rows["mfu"] > 1] = np.nan
    columns = {name: [_digits(value, 1.0) for value in row.tolist()] for name, row in rows.items()}
    shown = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    return {"step": [steps[place] for place in at], **shown}


def _only(values: Floats) -> float | None:
    return None if np.isnan(values[0]) else float(values[0])


def _digits(value: float | None, times: float) -> float | None:
    """Five digits of a product."""
    return None if value is None or not np.isfinite(value * times) else float(f"{value * times:.5g}")


# -- communication ----------------------------------------------------------------------------------------------------
# What the ranks exchanged, by process group.

GROUPS_SHOWN = 64
"""Maximum number of groups, those that block longest; a job of a thousand ranks has hundreds."""
TRANSFERS = ("transfer_ms", "wait_ms", "skew_ms", "algorithm_bytes_per_s", "bus_bytes_per_s")
ALONE = 0.9
"""An operation with this share of all transfers is responsible for the time that the computation waits."""
RANKS_SHOWN = 64
"""Maximum number of members of a group: those that the others waited for longest."""


def communication_table(window: Window) -> dict[str, Any] | None:
    """None for a single rank, and without data."""
    seen = window.communication
    if seen is None:
        return None
    flows: dict[int, list[Flow]] = {}
    places = {id(group): place for place, group in enumerate(seen.groups)}
    for flow in seen.flows:
        flows.setdefault(places[id(flow.group)], []).append(flow)
    rows = [_group_row(window, seen, place, flows[place]) for place in sorted(flows)]
    rows += [_reducer_row(window, reducer) for reducer in seen.reducers]
    rows.sort(key=lambda row: -sum(op["exposed_ms"] or op["transfer_ms"] or 0.0 for op in row["ops"]))
    return {
        "measured": _measured(window, seen),
        "groups": rows[:GROUPS_SHOWN],
        "groups_left_out": max(len(rows) - GROUPS_SHOWN, 0),
    }


def _measured(window: Window, seen: Communication) -> dict[str, Any] | None:
    """Steps measured on the device, and the total time that the computation waited; None: host times are used."""
    if seen.measured is None:
        return None
    return {
        "clock": "device",
        "steps": int(seen.measured.places.sum()),
        "of": len(window.steps),
        "missed": seen.measured.missed,
        "last_unread": seen.measured.last_unread,
        "exposed_ms": finite(_exposed_ns(window) / 1e6),
    }


def _exposed_ns(window: Window) -> float:
    """Mean over the steady steps of the wait on the rank whose device waited least; nan: unknown."""
    if window.device_ns is None or "comm" not in window.phases:
        return float("nan")
    waited = window.device_ns[window.phases.index("comm")][:, window.steady]
    known = waited[:, ~np.isnan(waited).any(axis=0)]
    if not known.size or float((known > 0).any(axis=0).mean()) < thresholds.COMM_STEPS_SHARE:
        return float("nan")
    return float(known.min(axis=0).mean())


def _group_row(window: Window, seen: Communication, place: int, flows: Sequence[Flow]) -> dict[str, Any]:
    group = seen.groups[place]
    return {
        "name": group.name,
        "kind": group.kind,
        "description": group.description,
        "backend": group.backend,
        "size": group.size,
        "ranks": list(group.ranks[:RANKS_SHOWN]),
        "timed": group.timed,
        "ops": [
            _op_row(window, seen, place, flow)
            for flow in sorted(flows, key=lambda flow: (-flow.exposed_ns, -flow.transfer_ns))
        ],
        "arrivals": _arrivals(window, seen.arrivals, place),
    }


def _op_row(window: Window, seen: Communication, place: int, flow: Flow) -> dict[str, Any]:
    blocking = flow.group.blocking and not flow.device
    exposed_ns, hidden_ns = (flow.exposed_ns, flow.overlapped_ns) if blocking else _on_device(window, seen, flow)
    rare = flow.count < 1  # an occasional scalar is less than a byte per step: both need enough digits to divide
    return {
        "op": flow.op,
        "count": finite(flow.count, 4 if rare else 2),
        "bytes": finite(flow.bytes, 4) if rare else round(flow.bytes),
        "exposed_ms": finite(exposed_ns / 1e6),
        "overlapped_ms": finite(hidden_ns / 1e6),
        "device": flow.device,
        **_transfers(seen, place, flow),
    }


def _on_device(window: Window, seen: Communication, flow: Flow) -> tuple[float, float]:
    """Time that it blocked the computation, and time that it did not; known if it is almost the only transfer."""
    total_ns = sum(other.transfer_ns for other in seen.flows if {*other.rows.tolist()} & {*flow.rows.tolist()})
    exposed_ns = _exposed_ns(window)
    if not flow.device or flow.transfer_ns < ALONE * total_ns or np.isnan(exposed_ns):
        return float("nan"), float("nan")
    exposed_ns = min(exposed_ns, flow.transfer_ns)
    return exposed_ns, flow.transfer_ns - exposed_ns


def _transfers(seen: Communication, place: int, flow: Flow) -> dict[str, Any]:
    """Time of the transfer itself per step, and its speed; from the collectives that were compared."""
    arrivals = seen.arrivals
    own = (arrivals.group == place) & (arrivals.op == OPS.index(flow.op))
    took_ns, steps = float(arrivals.transfer_ns[own].sum()), len(np.unique(arrivals.place[own]))
    per_s = float(arrivals.bytes[own].sum()) / took_ns * 1e9 if took_ns else float("nan")
    return {
        "transfer_ms": finite((flow.transfer_ns if flow.device else took_ns / steps if steps else float("nan")) / 1e6),
        "wait_ms": finite(flow.waited_by_row.mean() / 1e6) if flow.device else None,
        "skew_ms": finite(float(np.median(arrivals.skew_ns[own])) / 1e6) if steps else None,
        "algorithm_bytes_per_s": finite(per_s, 0) if per_s else None,
        "bus_bytes_per_s": finite(per_s * bus_factor(flow.op, flow.group.size), 0) or None,
    }


def _arrivals(window: Window, arrivals: Arrivals, place: int) -> dict[str, Any] | None:
    own = arrivals.group == place
    if not own.any():
        return None
    members = np.flatnonzero(arrivals.member_group == place)
    steps = len(np.unique(arrivals.place[own]))
    order = members[np.argsort(-arrivals.late_ns[members], kind="stable")][:RANKS_SHOWN]
    return {
        "steps": steps,
        "collectives": int(own.sum()),
        "transfer_ms": finite(arrivals.transfer_ns[own].sum() / steps / 1e6),
        "skew_ms": finite(float(np.median(arrivals.skew_ns[own])) / 1e6),
        "ranks": [
            {
                "rank": window.ranks[int(arrivals.member_row[member])],
                "wait_ms": finite(arrivals.waited_ns[member] / steps / 1e6),
                "last": int(arrivals.last[member]),
                "late_ms": finite(arrivals.late_ns[member] / max(int(arrivals.last[member]), 1) / 1e6),
            }
            for member in order
        ],
    }


def _reducer_row(window: Window, reducer: Reducer) -> dict[str, Any]:
    """DDP's own exchange, listed under the name of its group; several groups may have the same ranks."""
    ranks = tuple(window.ranks[int(row)] for row in reducer.rows)
    exposed = reducer.exposed_by_row
    return {
        "name": "",
        "kind": "data",
        "description": reducer.group,
        "backend": window.identities[int(reducer.rows[0])].backend,
        "size": len(ranks),
        "ranks": list(ranks[:RANKS_SHOWN]),
        "timed": True,
        "ops": [
            {
                "op": DDP_OP,
                "count": float(reducer.buckets) or None,
                "bytes": reducer.bytes or None,
                "exposed_ms": finite(exposed.mean() / 1e6),
                "overlapped_ms": finite(np.maximum(reducer.span_by_row - exposed, 0.0).mean() / 1e6),
                "device": False,
                **dict.fromkeys(TRANSFERS),
            }
        ],
        "arrivals": None,
    }


# -- memory and machines ----------------------------------------------------------------------------------------------
# Memory of the ranks, and the load of hosts and GPUs, from records and samples.
#
# Figures of hosts and GPUs are statistics over the steady steps. Without a sample of those they are None, never taken
# from imports, start-up or warm-up. What a host or a GPU *has* (cores, memory, name) is taken from any sample, and so
# are the extremes of a host's memory: running out of memory while a model loads ends the run as well. Round trips also
# cover the whole run: they are few, and start-up does not change them.

Lines = Sequence[Mapping[str, Any]]

HOST_RATES = ("net_rx_bps", "net_tx_bps", "net_errors_ps", "net_drops_ps", "disk_read_bps", "disk_write_bps")
DEVICE_LEVELS = ("device_allocated", "device_reserved", "device_reserved_max", "device_peak", "device_peak_steps")
ENOUGH_SAMPLES = 10
"""Samples about a second apart; with this many, a median needs no more."""
GPU_LEVELS = ("util_percent", "mem_util_percent", "temperature_c", "power_w", "sm_clock_mhz", "mem_clock_mhz")


def memory_table(current: Sequence[RankSeries], samples: Lines, gpus: Lines) -> dict[str, Any]:
    """Memory of each rank.

    Device memory at the last step, at its peak and what is left of it; resident memory of the process: first, last,
    peak, and peak without mapped files. ``gpus``: the rows of the host table.
    """
    by_pid: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for line in of_kind(samples, "process"):
        if number(line, "rss"):  # an exiting process has none
            by_pid.setdefault((line.get("node"), line.get("pid")), []).append(line)
    gpu_of_rank = {rank: gpu for gpu in gpus for rank in gpu["ranks"]}
    rows = []
    for series in current:
        lines = by_pid.get((series.identity.host, series.identity.pid), [])
        device = _device_memory(series)
        room = _device_room(series, device["device_reserved_max"], gpu_of_rank.get(series.rank))
        rows.append({"rank": series.rank, **device, **room, **_resident(lines)})
    return {
        "device_peak": _largest(rows, "device_peak", steps="device_peak_steps"),
        "rss_peak": _largest(rows, "rss_peak"),
        "own_peak": _largest(rows, "own_peak"),
        "ranks": rows,
    }


def host_table(window: Window, samples: Lines) -> dict[str, Any]:
    hosts = _grouped(of_kind(samples, "host"), "node")
    probes = _grouped(of_kind(samples, "probe"), "node")
    return {
        "nodes": [_node_row(window, key, hosts[key], probes.get(key, [])) for key in sorted(hosts, key=_order)],
        "gpus": _gpu_rows(window, samples),
        "samples": len(samples),
    }


def _device_memory(series: RankSeries) -> dict[str, Any]:
    """From the steps at whose end the allocator was read."""
    read = series.steps.part(series.steps["reserved"] > 0)
    if not len(read):
        return dict.fromkeys(DEVICE_LEVELS)
    return {
        "device_allocated": int(read["allocated"][-1]),
        "device_reserved": int(read["reserved"][-1]),
        "device_reserved_max": int(read["reserved"].max()),
        "device_peak": int(read["peak_allocated"].max()),
        "device_peak_steps": _peak_steps(read),
    }


def _peak_steps(read: RankSteps) -> list[int | None]:
    """First and last of the steps in which the highest peak was reached.

    The allocator reports its peak since the process began. If a read shows a higher peak than the previous read, the
    peak was reached in the steps between them; any other step is only known not to be higher. The first is None if the
    first read already shows the peak, which may then date from before the first step.
    """
    at = int(read["peak_allocated"].argmax())
    return [int(read["step"][at - 1]) + 1 if at else None, int(read["step"][at])]


def _device_room(series: RankSeries, reserved: int | None, gpu: Mapping[str, Any] | None) -> dict[str, Any]:
    """Free memory of the rank's device at its fullest; without samples, what its own allocator does not hold.

    Samples are infrequent: memory that the allocator held between them was in use as well.
    """
    total = (gpu or {}).get("mem_total") or series.identity.device_bytes or None
    used = (gpu or {}).get("mem_used_max")
    taken = reserved if used is None else max(used, reserved or 0)
    if total is None or taken is None:
        return {"device_total": total, "device_free": None, "device_free_from": None}
    source = "allocator" if used is None else "nvml"
    return {"device_total": total, "device_free": max(total - taken, 0), "device_free_from": source}


def _resident(lines: Lines) -> dict[str, int | None]:
    if not lines:
        return {"rss_first": None, "rss_last": None, "rss_peak": None, "own_peak": None}
    whole = numbers(lines, "rss")
    levels = [(number(line, "rss") or 0.0, number(line, "rss_file")) for line in lines]
    own = [max(rss - of_files, 0.0) for rss, of_files in levels if of_files is not None]
    own += extremes(lines, "own", "max")
    return {
        "rss_first": int(whole[0]),
        "rss_last": int(whole[-1]),
        "rss_peak": int(max(extremes(lines, "rss", "max"))),
        "own_peak": int(max(own)) if own else None,
    }


def _largest(rows: Iterable[Mapping[str, Any]], key: str, *, steps: str | None = None) -> dict[str, Any] | None:
    """The rank with the highest value."""
    known = [row for row in rows if row[key] is not None]
    if not known:
        return None
    row = max(known, key=lambda row: (row[key], -row["rank"]))
    return {"bytes": row[key], "rank": row["rank"], **({"steps": row[steps]} if steps else {})}


def _node_row(window: Window, key: tuple[Any, ...], lines: Lines, probes: Lines) -> dict[str, Any]:
    available = extremes(lines, "mem_available", "min")
    own = window.rows_of_host.get(key[0], [])
    steady = _of_steady_steps(window, own, lines)
    return {
        "node": str(key[0]),
        "samples": len(steady),
        "cpu_count": _last_int(lines, "cpu_count"),
        "cpu_percent": _levels(steady, "cpu_percent"),
        "load1": _levels(steady, "load1"),
        "mem_total": _last_int(lines, "mem_total"),
        "mem_available_min": int(min(available)) if available else None,
        "swap_used_max": _max_int(lines, "swap_used"),
        **{key: _levels(steady, key) for key in HOST_RATES},
        "net_speed_bps": _last_int(lines, "net_speed_bps"),
        "retransmit_share": _share(numbers(steady, "tcp_retrans_ps"), numbers(steady, "tcp_out_ps")),
        "rtt_us": _levels(probes, "rtt_us_p50"),
        "probe_loss_share": _share(numbers(probes, "lost"), numbers(probes, "sent")),
    }


def _of_steady_steps(window: Window, rows: Sequence[int], lines: Lines) -> Lines:
    """Samples in steady steps of these ranks, or of any rank if ``rows`` is empty."""
    known = [number(line, "wall_ns") for line in lines]
    wall_ns = np.array([np.nan if at is None else at for at in known], np.float64)
    there = np.flatnonzero(in_steady_steps(window, rows or range(len(window.ranks)), wall_ns))
    spans_s = np.array([number(lines[at], "span_s") or 0.0 for at in there.tolist()], np.float64)
    far_apart = there[spaced(wall_ns[there], spans_s)]
    # In a short run every sample counts; in a longer one those of its first seconds must not outweigh the rest.
    return [lines[at] for at in (far_apart if len(far_apart) >= ENOUGH_SAMPLES else there)]


def _share(part: Sequence[float], whole: Sequence[float]) -> float | None:
    return finite(sum(part) / sum(whole)) if sum(whole) > 0 else None


def _gpu_rows(window: Window, samples: Lines) -> list[dict[str, Any]]:
    groups = _grouped(of_kind(samples, "gpu"), "node", "index", "uuid")
    ordered = [groups[key] for key in sorted(groups, key=_order)]
    whose = [tuple(_name(lines[-1].get(key)) for key in ("node", "uuid", "index", "name")) for lines in ordered]
    used = gpus_in_use(window.identities, whose)
    on_host: dict[Any, list[int]] = {}
    for row, host in enumerate(window.hosts):
        on_host.setdefault(host, []).append(row)
    return [
        _gpu_row(window, lines, used.get(key), on_host.get(key[0], []))
        for lines, key in zip(ordered, whose, strict=True)
    ]


def _gpu_row(window: Window, lines: Lines, rows: Sequence[int] | None, on_host: Sequence[int]) -> dict[str, Any]:
    """The row of one GPU. ``rows``: window rows of the ranks on it; None: no rank of the job is known to use it."""
    last = lines[-1]
    steady = _of_steady_steps(window, rows or on_host, lines)
    reasons = [line.get("throttle_reasons") for line in steady]
    throttled = [reason for reason in reasons if isinstance(reason, list) and reason]
    return {
        "node": last.get("node"),
        "index": last.get("index"),
        "uuid": last.get("uuid"),
        "name": last.get("name"),
        "in_use": rows is not None,
        "ranks": [window.ranks[row] for row in rows or ()],
        "samples": len(steady),
        **{key: _levels(steady, key) for key in GPU_LEVELS},
        "power_limit_w": finite(number(last, "power_limit_w")),
        "mem_used_max": _max_int(steady, "mem_used"),
        "mem_total": _last_int(lines, "mem_total"),
        "throttle_reasons": sorted({str(name) for reason in throttled for name in reason}),
        "throttled_share": finite(len(throttled) / len(steady)) if steady else None,
    }


def _levels(lines: Lines, key: str) -> dict[str, float | None] | None:
    values = numbers(lines, key)
    if not values:
        return None
    return {"median": finite(float(np.median(values)), 2), "max": finite(max(extremes(lines, key, "max")), 2)}


def _last_int(lines: Lines, key: str) -> int | None:
    values = numbers(lines, key)
    return int(values[-1]) if values else None


def _max_int(lines: Lines, key: str) -> int | None:
    values = extremes(lines, key, "max")
    return int(max(values)) if values else None


def _grouped(lines: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(str(line.get(key)) for key in keys), []).append(line)
    return groups


def _order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((len(part), part) for part in key)


def _name(value: Any) -> str | int | None:
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None
