"""The document of a comparison: what changed between one or several baselines and a candidate, and whether it is real.

Its keys are part of the interface (docs/compare-reference.md); every other form is drawn from it.

Limits on a comparison (``gate_inputs``): pass, regression, or not decidable; baselines are kept in a folder by branch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from stepscope.comparison.inputs import Clock, Input, Measured, check_comparable, encode_baseline, read_input
from stepscope.comparison.statistics import (
    ASSUMED_AT_MOST,
    CONFIDENCE,
    MARGIN,
    PRIOR,
    Change,
    Floats,
    Judgment,
    Series,
    Verdict,
    change_between,
    judge,
    needed_to_decide,
    ordinary,
    t_quantile,
    unusual_steps,
)
from stepscope.errors import CompareError
from stepscope.judge import thresholds
from stepscope.records.finding import SEVERITIES
from stepscope.records.steps import BUILTIN_PHASES
from stepscope.records.text import bytes_text, count_text, ms_text, named_ranks
from stepscope.reports.tables import PHASE_ORDER, finite
from stepscope.store import file_io

__all__ = [
    "EXIT_CODES",
    "MEMORY_WORDS",
    "SCHEMA",
    "Limits",
    "alike",
    "compare_inputs",
    "context_changes",
    "differences",
    "differs_in_what_matters",
    "gate_inputs",
    "interval_text",
    "needed_text",
    "percent_text",
    "record_baseline",
    "stored_baselines",
]

SCHEMA = 1
RANKS_LISTED = 64
"""Ranks in the document, those that moved most."""
RANK_CHANCE = 1e-4
"""Chance that any rank of an unchanged job is named."""
OTHERS_PERCENT = 25.0
"""Of a machine's CPUs: from this use by other processes on, its runs differ with what those do."""
PERCENTILES = {50: 1, 90: 20, 99: 100}
"""By percentile: how many steps it takes.  Of fewer than a hundred, p99 says no more than the longest step."""
NOT_PROBLEMS = ("healthy", "insufficient_data")


def compare_inputs(
    baselines: Sequence[Input],
    candidate: Input,
    *,
    margin: float = MARGIN,
    limit: float | None = None,
    unfinished: bool = False,
) -> dict[str, Any]:
    """Compare ``candidate`` with its baselines; CompareError if an input cannot be used.

    ``margin``: a change within it, in either direction, counts as no change.  ``limit``: a slowdown up to it is
    acceptable; None: any counts.  ``unfinished``: accept runs that failed or still run.
    """
    check_comparable([*baselines, candidate], unfinished=unfinished)
    clock = _clock_of([*baselines, candidate])
    before, after = [baseline.on(clock) for baseline in baselines], candidate.on(clock)
    prior = replace(PRIOR, floor=ASSUMED_AT_MOST) if _crowded([*baselines, candidate]) else PRIOR
    judgment = judge([measured.run for measured in before], after.run, margin=margin, prior=prior)
    verdict, change = judgment.verdict, judgment.change
    percentiles = {} if candidate.unit == "throughput" else _percentiles([*before, after])
    if judgment.ordinary:
        *before, after = [_ordinary(measured) for measured in (*before, after)]
    context = _context(baselines, candidate)
    like = not any(row["matters"] for row in context)
    phases = _phases(before, after, change)
    ranks = _ranks(before, after, change)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "comparison",
        "verdict": verdict,
        "title": "",
        "like_for_like": like,
        "change": finite(change.change, 6),
        "interval": [finite(change.low, 6), finite(change.high, 6)],
        "confidence": CONFIDENCE,
        "margin": margin,
        "unit": candidate.unit,
        "step_ms": {"before": finite(change.before / 1e6), "after": finite(change.after / 1e6)},
        "throughput": {"before": finite(1e9 / change.before), "after": finite(1e9 / change.after)}
        if candidate.unit == "throughput"
        else None,
        "percentiles_ms": percentiles,
        "clock": clock,
        "cause": _cause(verdict, change, phases, ranks, len(after.ranks)),
        "phases": [{name: value for name, value in row.items() if name != "common"} for row in phases],
        "ranks": ranks,
        "communication": _communication(baselines, candidate),
        "memory": _memory(baselines, candidate),
        "findings": _findings(baselines, candidate),
        "context": context,
        "noise": {
            "within": finite(change.within, 6),
            "between": finite(change.between, 6),
            "between_from": "baselines" if len(baselines) > 1 else "assumption",
            "visible": finite((change.high - change.low) / 2, 6),
        },
        "needed": _needed(change, verdict, margin, limit),
        "compared": {"steps": change.steps, "by_number": change.paired, "ordinary": judgment.ordinary},
        "all_steps": _all_steps(judgment),
        "baselines": [
            _input_row(baseline, measured, count)
            for baseline, measured, count in zip(baselines, before, judgment.unusual[:-1], strict=True)
        ],
        "candidate": _input_row(candidate, after, judgment.unusual[-1]),
        "notices": _notices([*baselines, candidate], judgment),
    }
    document["title"] = title_of(document)
    return document


def _crowded(inputs: Sequence[Input]) -> list[str]:
    """The runs whose machine other processes used: their pace depends on those, which no step shows."""
    found = []
    for source in inputs:
        machine = [row["evidence"] for row in source.findings or () if row.get("kind") == "cpu_saturated"]
        used = [(row.get("cpu_percent"), row.get("own_cpu_percent")) for row in machine if isinstance(row, Mapping)]
        if any(_number(whole) - _number(own) >= OTHERS_PERCENT for whole, own in used):
            found.append(source.name)
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _clock_of(inputs: Sequence[Input]) -> Clock:
    """The clock of the candidate's findings, if all have it; else the next that they share."""
    for clock in inputs[-1].clocks:
        if all(clock in source.clocks for source in inputs):
            return clock
    return "host" if any("host" in source.clocks for source in inputs) else "given"


def _ordinary(run: Measured) -> Measured:
    """A run whose unusual steps are replaced by those around them, in each phase."""
    if not isinstance(run.run, Series):
        return run
    unusual = unusual_steps(run.run.values)
    return replace(
        run,
        run=replace(run.run, values=ordinary(run.run.values, unusual)),
        mean_ns=np.array([ordinary(plane, unusual) for plane in run.mean_ns]),
        common_ns=np.array([ordinary(plane, unusual) for plane in run.common_ns]),
    )


def _all_steps(judgment: Judgment) -> dict[str, Any] | None:
    """The change with unusual steps, where they recur and hide it."""
    whole = judgment.all_steps
    if whole is None:
        return None
    return {"change": finite(whole.change, 6), "interval": [finite(whole.low, 6), finite(whole.high, 6)]}


def _percentiles(runs: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Of all steady steps that were not sampled, also unusual ones; of several baselines the mean.  Empty: unknown."""
    known = [
        run.run.values if run.unsampled_ns is None else run.unsampled_ns for run in runs if isinstance(run.run, Series)
    ]
    if len(known) < len(runs):
        return {}
    found = {}
    for percent, fewest in PERCENTILES.items():
        if min(map(len, known)) >= fewest:
            *first, last = [float(np.percentile(values, percent)) / 1e6 for values in known]
            found[f"p{percent}"] = {"before": finite(sum(first) / len(first)), "after": finite(last)}
    return found


def _input_row(source: Input, measured: Measured, unusual: int) -> dict[str, Any]:
    run = measured.run
    mean = float(run.values.mean()) if isinstance(run, Series) else run.mean
    return {
        "name": source.name,
        "path": source.path,
        "kind": source.kind,
        "status": source.status,
        "steps": source.steady,
        "warmup": source.warmup,
        "unusual": unusual,
        "mean_ms": finite(mean / 1e6),
        "created_wall_ns": source.created_wall_ns,
    }


def _notices(inputs: Sequence[Input], judgment: Judgment) -> list[str]:
    found = [f"{source.name}: {notice}." for source in inputs for notice in source.notices]
    if crowded := _crowded(inputs):
        found.append(
            f"Other processes used much of the machine of {' and '.join(crowded)}, so equal runs are assumed to differ "
            f"by {percent_text(ASSUMED_AT_MOST, signed=False)} at least, unless several baselines show otherwise."
        )
    if judgment.ordinary and any(judgment.unusual):
        parts = [
            f"{count_text(count, 'step')} of {source.name}"
            for source, count in zip(inputs, judgment.unusual, strict=True)
            if count
        ]
        were = "is" if sum(judgment.unusual) == 1 else "are"
        why = ", because they vary too much" if judgment.all_steps else ""
        found.append(f"{' and '.join(parts)} {were} far from the steps around and not compared{why}.")
    return found


def _needed(change: Change, verdict: Verdict, margin: float, limit: float | None) -> dict[str, Any] | None:
    """What would settle an undecided comparison, if the estimate stays where it is."""
    if limit is not None:
        if change.high <= limit or change.low > limit:
            return None
        half = abs(change.change - limit)
    elif verdict != "cannot_tell":
        return None
    else:
        half = max(abs(change.change), margin - abs(change.change))
    needed = needed_to_decide(change, half)
    return {"steps": needed.steps, "runs": needed.runs, "both": needed.both}


# -- phases -----------------------------------------------------------------------------------------------------------


def _phases(before: Sequence[Measured], after: Measured, change: Change) -> list[dict[str, Any]]:
    """One row per phase: the mean over ranks, by how much it changed, and whether that is real.

    ``common``: by how much all ranks changed alike; None: not known.
    """
    runs = [*before, after]
    names = dict.fromkeys(name for run in runs for name in run.phases)
    rows = []
    for name in sorted(names, key=lambda name: PHASE_ORDER.index(name if name in BUILTIN_PHASES else "")):
        known = [_plane(run, name) for run in runs]
        means = [mean for mean, _ in known]
        moved = common = None
        first, last = sum(float(mean.mean()) for mean in means[:-1]) / len(before), float(means[-1].mean())
        if all(isinstance(run.run, Series) for run in runs):
            moved = _part(runs, means, change)
            common = _part(runs, [plane for _, plane in known], change)
            first, last = moved.before, moved.after
        real = moved is not None and (moved.low > 0 or moved.high < 0)
        interval = None
        if moved is not None:
            interval = [finite(share * change.before / 1e6) for share in (moved.low, moved.high)]
        rows.append(
            {
                "phase": name,
                "before_ms": finite(first / 1e6),
                "after_ms": finite(last / 1e6),
                "change_ms": finite((last - first) / 1e6),
                "change": finite((last - first) / first, 6) if first > 0 else None,
                "interval_ms": interval,
                "real": real,
                "common": common,
            }
        )
    return rows


def _plane(run: Measured, name: str) -> tuple[Floats, Floats]:
    """[S] each; a phase's mean over ranks and what is common to all; zeros if the run has no such phase."""
    if name in run.phases:
        at = run.phases.index(name)
        return run.mean_ns[at], run.common_ns[at]
    nothing = np.zeros(max(run.mean_ns.shape[1] if run.mean_ns.size else 0, 1))
    if isinstance(run.run, Series):
        nothing = np.zeros(len(run.run.values))
    return nothing, nothing


def _part(runs: Sequence[Measured], planes: Sequence[Floats], change: Change) -> Change:
    parts = [Series(numbers=_numbers(run), values=plane) for run, plane in zip(runs, planes, strict=True)]
    return change_between(parts[:-1], parts[-1], part_of=change.before)


def _numbers(run: Measured) -> NDArray[np.int64]:
    return run.run.numbers if isinstance(run.run, Series) else np.zeros(0, np.int64)


# -- ranks ------------------------------------------------------------------------------------------------------------


def _ranks(before: Sequence[Measured], after: Measured, change: Change) -> dict[str, Any]:
    """By how much each rank's own work moved against that of its peers; empty where waiting was not measured.

    The reference is the median rank: if all ranks become slower alike, none is named.
    """
    runs = [*before, after]
    found: dict[str, Any] = {"compared": False, "skew_ms": None, "rows": [], "moved": []}
    comparable = len(after.ranks) > 1 and all(run.comm_measured and run.ranks == after.ranks for run in runs)
    if not comparable or not all(np.isfinite(run.rank_ns).all() for run in runs):
        return found
    ahead = [_ahead(run) for run in runs]  # [R, K] each
    means = np.stack([phases.mean(axis=1) for phases in ahead])
    errors = np.stack([phases.var(axis=1, ddof=1) / phases.shape[1] for phases in ahead])
    moved_ns = means[-1] - means[:-1].mean(axis=0)
    count = len(before)
    error_ns = np.sqrt(errors[-1] + errors[:-1].sum(axis=0) / count**2 + (change.between * change.before) ** 2)
    freedom = sum(phases.shape[1] - 1 for phases in ahead)
    needed = t_quantile(freedom, 1 - RANK_CHANCE / len(after.ranks))
    real = np.abs(moved_ns) > needed * np.maximum(error_ns, 1.0)
    skew = [float(mean.max() - mean.min()) for mean in means]
    order = np.argsort(-np.abs(moved_ns), kind="stable")
    rows = [
        {
            "rank": after.ranks[at],
            "change_ms": finite(float(moved_ns[at]) / 1e6),
            "real": bool(real[at]),
            "phase": _phase_of(runs, int(at), float(moved_ns[at])) if real[at] else None,
        }
        for at in order[:RANKS_LISTED].tolist()
    ]
    return {
        "compared": True,
        "skew_ms": {"before": finite(float(np.mean(skew[:-1])) / 1e6), "after": finite(skew[-1] / 1e6)},
        "rows": rows,
        "moved": [row["rank"] for row in rows if row["real"]],
    }


def _ahead(run: Measured) -> Floats:
    """[R, stretches]; a rank's own work beyond that of the median rank."""
    own = [at for at, name in enumerate(run.phases) if name != "comm"]
    work = run.rank_ns[own].sum(axis=0)
    return np.asarray(work - _lower_median(work), np.float64)


def _lower_median(values: Floats) -> Floats:
    """Over the first axis."""
    middle = (values.shape[0] - 1) // 2
    return np.asarray(np.partition(values, middle, axis=0)[middle], np.float64)


def _phase_of(runs: Sequence[Measured], row: int, moved_ns: float) -> str | None:
    """The phase in which a rank moved against the median rank, if one explains most of it."""
    shares: dict[str, float] = {}
    for name in dict.fromkeys(name for run in runs for name in run.phases if name != "comm"):
        own = []
        for run in runs:
            plane = run.rank_ns[run.phases.index(name)] if name in run.phases else np.zeros((len(run.ranks), 1))
            own.append(float((plane - _lower_median(plane))[row].mean()))
        shares[name] = (own[-1] - float(np.mean(own[:-1]))) / moved_ns
    best = max(shares, key=lambda name: shares[name], default=None)
    return best if best is not None and shares[best] >= thresholds.EXPLAINS_SHARE else None


# -- cause ------------------------------------------------------------------------------------------------------------


def _cause(
    verdict: Verdict, change: Change, phases: Sequence[Mapping[str, Any]], ranks: Mapping[str, Any], count: int
) -> dict[str, Any] | None:
    """The phase or the ranks that explain most of a change of the step; None: it did not change, or none does."""
    if verdict not in ("slower", "faster"):
        return None
    total_ns = change.after - change.before
    candidates: list[tuple[float, dict[str, Any]]] = []
    for row in phases:
        common: Change | None = row["common"]
        if common is not None and (common.low > 0 or common.high < 0):
            moved_ns = common.after - common.before
            candidates.append((moved_ns, {"phase": row["phase"], "ranks": []}))
    led = [row for row in ranks["rows"] if row["real"] and row["change_ms"] * total_ns > 0]
    if led:
        most = led[0]["change_ms"]
        named = [row for row in led if row["change_ms"] / most >= thresholds.EXPLAINS_SHARE]
        alike = {row["phase"] for row in named}
        who = sorted(row["rank"] for row in named)
        candidates.append((most * 1e6, {"phase": alike.pop() if len(alike) == 1 else None, "ranks": who}))
    good = [candidate for candidate in candidates if candidate[0] / total_ns >= thresholds.EXPLAINS_SHARE]
    if not good:
        return None
    moved_ns, cause = max(good, key=lambda candidate: candidate[0] / total_ns)
    share = finite(min(moved_ns / total_ns, 1.0))
    cause |= {"change_ms": finite(moved_ns / 1e6), "share": share}
    return {**cause, "text": cause_text(cause, count)}


# -- memory, communication, findings ----------------------------------------------------------------------------------

MEMORY_WORDS = {"device_peak": "device memory", "own_peak": "process memory", "rss_peak": "resident memory"}


def _memory(baselines: Sequence[Input], candidate: Input) -> dict[str, Any]:
    """The peak of the largest rank; of several baselines the highest."""
    found = {}
    for name in MEMORY_WORDS:
        before = [baseline.memory[name] for baseline in baselines if name in baseline.memory]
        after = candidate.memory.get(name)
        if len(before) == len(baselines) and after is not None:
            most = max(before)
            found[name] = {"before": most, "after": after, "change": finite(after / most - 1, 6)}
    return found


def _communication(baselines: Sequence[Input], candidate: Input) -> list[dict[str, Any]]:
    """By kind of group and operation, per step; the last baseline represents all, because exchanges do not vary."""
    first = {(row["group"], row["op"]): row for row in baselines[-1].communication}
    last = {(row["group"], row["op"]): row for row in candidate.communication}
    names = ("count", "bytes", "exposed_ms", "overlapped_ms", "transfer_ms")
    return [
        {
            "group": key[0],
            "op": key[1],
            **{
                name: {"before": first.get(key, {}).get(name), "after": last.get(key, {}).get(name)}
                for name in names
                if first.get(key, {}).get(name) is not None or last.get(key, {}).get(name) is not None
            },
        }
        for key in dict.fromkeys([*first, *last])
    ]


def _findings(baselines: Sequence[Input], candidate: Input) -> dict[str, Any] | None:
    """Warnings that only the candidate has, and those that it no longer has; None: an input does not know."""
    if candidate.findings is None or any(baseline.findings is None for baseline in baselines):
        return None
    before = {_finding_key(problem): problem for each in baselines for problem in _problems(each)}
    after = {_finding_key(problem): problem for problem in _problems(candidate)}
    # What every baseline has is gone; what some have comes and goes.
    always = [key for key in before if all(key in map(_finding_key, _problems(each)) for each in baselines)]
    return {
        "new": [_finding_row(None, after[key]) for key in after if key not in before],
        "gone": [_finding_row(before[key], None) for key in always if key not in after],
        "kept": [_finding_row(before[key], after[key]) for key in after if key in before],
    }


def _problems(source: Input) -> list[Mapping[str, Any]]:
    return [
        found
        for found in source.findings or ()
        if found["severity"] in SEVERITIES[1:] and found["kind"] not in NOT_PROBLEMS
    ]


def _finding_key(found: Mapping[str, Any]) -> tuple[str, str]:
    return str(found["kind"]), str(found.get("phase"))


def _finding_row(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any]:
    """The later form of a finding, and its share of the time before and after."""
    found = after or before or {}
    share = {"before": _share_of(before), "after": _share_of(after)}
    return {**{name: found.get(name) for name in ("kind", "severity", "title", "phase", "ranks")}, "share": share}


def _share_of(found: Mapping[str, Any] | None) -> float | None:
    cost = (found or {}).get("cost")
    share = cost.get("share") if isinstance(cost, Mapping) else None
    return finite(share, 6) if isinstance(share, int | float) else None


# -- context ----------------------------------------------------------------------------------------------------------

WORKLOAD = {
    "world_size": "world size",
    "model.class": "model",
    "model.parameters": "parameters",
    "loader.batch_size": "batch size",
    "batches_per_step": "batches per step",
}
"""A run that differs in one of these does other work in a step …"""
HARDWARE = {"device_name": "device", "host_count": "number of hosts"}
"""… and one that differs in these does it on another machine: neither is a comparison of like with like."""
SOFTWARE = {
    "torch": "torch",
    "backend": "backend",
    "python": "Python",
    "platform": "platform",
    "stepscope": "Stepscope",
    "hosts": "hosts",
}
CODE = {
    "git.commit": "git commit",
    "git.branch": "git branch",
    "git.dirty": "uncommitted changes",
    "git.diff_stat": "uncommitted files",
    "command": "command",
    "cwd": "folder",
}
KINDS = {"workload": WORKLOAD, "hardware": HARDWARE, "software": SOFTWARE, "code": CODE}


def _context(baselines: Sequence[Input], candidate: Input) -> list[dict[str, Any]]:
    """Everything in which the candidate differs from a baseline, what matters most first."""
    rows = context_changes([baseline.context for baseline in baselines], candidate.context)
    kinds = {source.kind in ("run", "summary", "baseline") for source in (*baselines, candidate)}
    if len(kinds) > 1:
        known = {"before": baselines[-1].kind, "after": candidate.kind}
        rows.insert(0, {"name": "kind", "label": "kind of input", "kind": "workload", "matters": True, **known})
    return rows


def context_changes(baselines: Sequence[Mapping[str, Any]], candidate: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same for the contexts of runs alone (``context_of`` in ``inputs.py``)."""
    rows = []
    names = dict.fromkeys([*candidate, *(name for baseline in baselines for name in baseline)])
    for name in sorted(names, key=_context_order):
        kind = _context_kind(name)
        values = [baseline.get(name) for baseline in baselines]
        after = candidate.get(name)
        # A value that was not recorded is not a difference, except among settings, where it means that it is not set.
        if kind not in ("settings", "environment"):
            values = [value for value in values if value is not None]
            if after is None:
                continue
        differing = [value for value in values if value != after]
        if not differing:
            continue
        known = {"before": differing[-1], "after": after}
        rows.append(
            {
                "name": name,
                "label": KINDS.get(kind, {}).get(name) or name.removeprefix("environment."),
                "kind": kind,
                "matters": kind in ("workload", "hardware"),
                **known,
            }
        )
    return rows


def differences(source: Input, other: Input) -> list[str]:
    """The names of everything recorded in which two runs differ, except their folder and the version of Stepscope."""
    return [row["name"] for row in _context([source], other) if row["name"] not in ("cwd", "stepscope")]


def differs_in_what_matters(source: Input, candidate: Input) -> bool:
    """Whether two runs did different work or ran on different machines."""
    return any(row["matters"] for row in _context([source], candidate))


def _context_kind(name: str) -> str:
    for kind, names in KINDS.items():
        if name in names:
            return kind
    return "environment" if name.startswith("environment.") else "settings"


def _context_order(name: str) -> tuple[int, int, str]:
    kinds = (*KINDS, "settings", "environment")
    kind = _context_kind(name)
    names = list(KINDS.get(kind, {}))
    return kinds.index(kind), names.index(name) if name in names else 0, name


# -- sentences --------------------------------------------------------------------------------------------------------


def percent_text(share: float, *, signed: bool = True) -> str:
    """``+5.1%``, ``-0.23%``, ``12%``: more digits for smaller numbers."""
    percent = abs(share) * 100
    digits = 2 if percent < 0.995 else 1 if percent < 99.5 else 0
    text = f"{percent:.{digits}f}".removesuffix(".0") + "%"
    if not signed or float(text[:-1]) == 0:
        return text
    return f"{'+' if share > 0 else '-'}{text}"


def interval_text(interval: Sequence[float]) -> str:
    """``3.9% to 6.2% slower``, ``between 1.0% faster and 0.4% slower``."""
    low, high = interval
    if low >= 0:
        return f"{percent_text(low, signed=False)} to {percent_text(high, signed=False)} slower"
    if high <= 0:
        return f"{percent_text(high, signed=False)} to {percent_text(low, signed=False)} faster"
    return f"between {percent_text(low, signed=False)} faster and {percent_text(high, signed=False)} slower"


def title_of(document: Mapping[str, Any]) -> str:
    """The sentence that people read first."""
    name = document["candidate"]["name"]
    change = percent_text(document["change"], signed=False)
    baselines = document["baselines"]
    than = baselines[0]["name"] if len(baselines) == 1 else f"{len(baselines)} baselines"
    verdict = document["verdict"]
    if verdict == "same":
        within = percent_text(document["margin"], signed=False)
        text = f"{name} is as fast as {than}, within {within}"
    elif verdict == "cannot_tell":
        text = f"Cannot tell whether {name} is slower or faster than {than}"
    else:
        text = f"{name} is {change} {verdict} than {than}"
    like = "" if document["like_for_like"] else ", but this does not compare like with like"
    return f"{text}{like}."


def cause_text(cause: Mapping[str, Any], count: int) -> str:
    """Where the change is; ``count``: how many ranks there are."""
    took = ms_text(abs(cause["change_ms"]))
    way = "longer" if cause["change_ms"] > 0 else "less"
    phase, ranks = cause["phase"], cause["ranks"]
    if ranks:
        who, verb = named_ranks(ranks), "takes" if len(ranks) == 1 else "take"
        inside = f" in {phase}" if phase else ", in no single phase"
        wait = "; the other ranks wait" if cause["change_ms"] > 0 else ""
        return f"{who} {verb} {took} {way}{inside}{wait}."
    if phase == "comm":
        return f"Communication takes {took} {way}, beyond the wait for slower ranks."
    everywhere = " on all ranks" if count > 1 else ""
    return f"{phase} takes {took} {way}{everywhere}."


def needed_text(document: Mapping[str, Any]) -> str:
    """What would settle an undecided comparison."""
    needed, visible = document["needed"], percent_text(document["noise"]["visible"], signed=False)
    if needed is None:
        return ""
    ways = []
    if needed["steps"] is not None:
        ways.append(f"{needed['steps']:,} more steps in each run")
    if needed["runs"] is not None:
        ways.append(count_text(needed["runs"], "more baseline run"))
    if ways:
        return f"{(' and ' if needed['both'] else ' or ').join(ways)} would settle it."
    return f"These runs are too uneven to see a change below {visible}; use a quieter machine or longer runs."


# -- limits -----------------------------------------------------------------------------------------------------------

Result = Literal["pass", "regression", "cannot_tell"]
EXIT_CODES: dict[Result, int] = {"pass": 0, "regression": 1, "cannot_tell": 2}
WORDS: dict[Result, str] = {"pass": "Pass", "regression": "Regression", "cannot_tell": "Cannot tell"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """All but the last relative: 0.02 is two percent.  None: not checked."""

    slowdown: float
    memory: float | None = None
    new_findings: bool = True
    """Whether new findings are accepted."""


def gate_inputs(baselines: Sequence[Input], candidate: Input, limits: Limits) -> dict[str, Any]:
    """The document of a comparison with ``gate``: the result, its exit code, and one row per check."""
    document = compare_inputs(baselines, candidate, limit=limits.slowdown)
    checks = list(_checks(document, limits))
    results = [check["result"] for check in checks]
    result: Result = "regression" if "regression" in results else "cannot_tell" if "cannot_tell" in results else "pass"
    decisive = [check["text"] for check in checks if check["result"] == result]
    text = f"{WORDS[result]}: {decisive[0] if result != 'pass' else _passed(document, limits)}"
    document["gate"] = {"result": result, "exit_code": EXIT_CODES[result], "text": text, "checks": checks}
    return document


def _passed(document: dict[str, Any], limits: Limits) -> str:
    limit = percent_text(limits.slowdown, signed=False)
    return f"{document['candidate']['name']} is not more than {limit} slower."


def _checks(document: dict[str, Any], limits: Limits) -> Iterator[dict[str, Any]]:
    yield _slowdown(document, limits.slowdown)
    if limits.memory is not None:
        yield _memory_check(document, limits.memory)
    if not limits.new_findings:
        yield _findings_check(document)


def _slowdown(document: dict[str, Any], limit: float) -> dict[str, Any]:
    low, high = document["interval"]
    if document["all_steps"]:
        # Ordinary steps may show a regression; a pass needs all of them.
        high = max(high, document["all_steps"]["interval"][1])
    most = percent_text(limit, signed=False)
    name = document["candidate"]["name"]
    slower = f"{name} is {interval_text([low, high])}; the limit is {most}"
    if not document["like_for_like"]:
        changed = [row["label"] for row in document["context"] if row["matters"]]
        return _check(
            "slowdown", "cannot_tell", limit, f"{' and '.join(changed)} changed, so steps cannot be compared."
        )
    if high <= limit:
        return _check("slowdown", "pass", limit, f"{slower}.")
    if low > limit:
        return _check("slowdown", "regression", limit, f"{slower}.")
    return _check("slowdown", "cannot_tell", limit, f"{slower}. {needed_text(document)}".strip())


def _memory_check(document: dict[str, Any], limit: float) -> dict[str, Any]:
    name, row = next(iter(document["memory"].items()), (None, None))
    if name is None or row is None:
        return _check("memory", "cannot_tell", limit, "the peak memory of these runs is not known.")
    most = percent_text(limit, signed=False)
    sizes = f"{bytes_text(row['before'])} → {bytes_text(row['after'])} ({percent_text(row['change'])})"
    result: Result = "pass" if row["change"] <= limit else "regression"
    return _check("memory", result, limit, f"{MEMORY_WORDS[name]} {sizes}; the limit is {most} more.")


def _findings_check(document: dict[str, Any]) -> dict[str, Any]:
    found = document["findings"]
    if found is None:
        raise CompareError("--no-new-findings needs runs of Stepscope: numbers of other tools contain no findings")
    if found["new"]:
        text = f"{count_text(len(found['new']), 'new finding')}: {found['new'][0]['title']}"
        return _check("findings", "regression", None, text)
    return _check("findings", "pass", None, "no new findings.")


def _check(name: str, result: Result, limit: float | None, text: str) -> dict[str, Any]:
    return {"name": name, "result": result, "limit": limit, "text": text}


# -- baselines by branch ----------------------------------------------------------------------------------------------
# ``FOLDER/BRANCH/TIME-NAME.json``: small files, so that a CI cache or an artifact can hold them.

NAME_CHARACTERS = 80


def stored_baselines(folder: Path, branch: str, candidate: Input) -> list[Input]:
    """The baselines of a branch, oldest first, without the candidate itself; CompareError if one cannot be read."""
    paths = sorted(_branch_folder(folder, branch).glob("*.json"))
    found = [read_input(path) for path in paths]
    return [
        source
        for source in found
        if (source.name, source.created_wall_ns) != (candidate.name, candidate.created_wall_ns)
    ]


def alike(baselines: Sequence[Input], candidate: Input) -> list[Input]:
    """Those that did the same work on the same kind of machine as the candidate."""
    return [baseline for baseline in baselines if not differs_in_what_matters(baseline, candidate)]


def record_baseline(folder: Path, branch: str, source: Input, *, keep: int) -> Path:
    """Keep a run as a baseline of a branch and remove all but its newest ``keep``; CompareError if that fails."""
    check_comparable([source])
    document = json.dumps(encode_baseline(source), separators=(",", ":"), allow_nan=False)
    into = _branch_folder(folder, branch)
    when = source.created_wall_ns if source.created_wall_ns is not None else time.time_ns()
    path = into / f"{when:020d}-{quote(source.name, safe='')[:NAME_CHARACTERS]}.json"
    try:
        into.mkdir(parents=True, exist_ok=True)
        file_io.write_bytes(path, document.encode())
        for old in sorted(into.glob("*.json"))[:-keep]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise CompareError(f"cannot keep a baseline in {into}: {error.strerror}") from None
    return path


def _branch_folder(folder: Path, branch: str) -> Path:
    """A branch may contain slashes; a folder name may not, and must not leave the folder."""
    return folder / (quote(branch, safe="").replace(".", "%2E") if branch.strip(".") == "" else quote(branch, safe=""))
