"""What can be compared: a run, a ``summary.json``, a stored baseline, or one number per step from any logger.

Each becomes an ``Input``: its steady steps on each clock, and what is known about the job around them.  Files of other
tools are not trusted: they are read up to a size, and every value is checked.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepscope.comparison.statistics import STRETCHES, Floats, Level, Series
from stepscope.diagnosis.engine.view import View, lower_median_rank, view_of
from stepscope.diagnosis.engine.window import Window, build_window, set_apart
from stepscope.errors import CompareError, CompareTooShort
from stepscope.judge import thresholds
from stepscope.judge.statistics import mean_rank
from stepscope.records.finding import with_current_kinds
from stepscope.records.series import RunData
from stepscope.records.text import Progress, count_text, no_progress
from stepscope.reports.summary import summarize
from stepscope.store.catalog import is_active
from stepscope.store.documents import load_summary, log_names
from stepscope.store.file_io import read_document
from stepscope.store.load import load_run
from stepscope.store.paths import META, SUMMARY

__all__ = [
    "UNITS",
    "Clock",
    "Input",
    "Measured",
    "check_comparable",
    "context_of",
    "decode_baseline",
    "encode_baseline",
    "input_of_run",
    "read_input",
    "summary_input",
    "without_warmup",
]

Clock = Literal["host", "device", "given"]
"""``given``: another tool measured it."""
Kind = Literal["run", "summary", "baseline", "numbers"]
UNITS = ("ms", "s", "throughput")
IN_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
LARGEST_BYTES = 64 << 20
"""Of a file of another tool: a number per step of the longest training is far less."""
LARGEST_COUNT = 2_000_000
FEWEST_NUMBERS = 5
"""Loggers often write one number for many steps, so fewer of them suffice."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The steady steps of one run, on one clock."""

    clock: Clock
    run: Series | Level
    """The length of each step in nanoseconds; of a summary only their mean and spread."""
    phases: tuple[str, ...] = ()
    mean_ns: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """[P, S]; mean over the ranks.  The phases add up to the step."""
    common_ns: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    """[P, S]; what all ranks spend in a phase: the median rank's time and, of ``comm``, the shortest wait of any rank,
    because longer ones are waits for slower ranks."""
    ranks: tuple[int, ...] = ()
    rank_ns: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))
    """[P, R, stretches]; means over long stretches of the run."""
    comm_measured: bool = False
    """Whether waiting is known, and with it each rank's own work."""
    unsampled_ns: Floats | None = None
    """The length of each step in which no rank looked at its layers; None: not known which those are."""


@dataclass(frozen=True, kw_only=True)
class Input:
    name: str
    """As people know it: the name of a run or a file."""
    path: str
    kind: Kind
    unit: Literal["time", "throughput"] = "time"
    status: str | None = None
    """Of a run: as in ``summary.json``; None: not known."""
    status_text: str | None = None
    bad: bool = False
    """Whether the run failed, hung or still runs."""
    measured: Mapping[Clock, Measured]
    """By clock; the one that its findings use comes first, the host's last."""
    steady: int
    warmup: int = 0
    created_wall_ns: int | None = None
    context: Mapping[str, Any] = field(default_factory=dict)
    """By dotted name, such as ``world_size`` or ``loader.num_workers``; unknown values are missing."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """The largest rank's bytes: ``device_peak``, ``own_peak``, ``rss_peak``."""
    communication: Sequence[Mapping[str, Any]] = ()
    """One row per kind of group and operation."""
    findings: Sequence[Mapping[str, Any]] | None = None
    """None: not known."""
    notices: tuple[str, ...] = ()

    @property
    def clocks(self) -> tuple[Clock, ...]:
        return tuple(self.measured)

    def on(self, clock: Clock) -> Measured:
        """The steps on one clock; what another tool measured is the same on each."""
        return self.measured.get(clock) or list(self.measured.values())[-1]


def read_input(
    path: Path, *, column: str | None = None, unit: str | None = None, progress: Progress = no_progress
) -> Input:
    """Read a run or a file; CompareError (or NotARun) if it is neither.

    ``column`` and ``unit`` (one of ``UNITS``) describe files of other tools; without them the names of the columns do.
    """
    if path.is_dir():
        return _read_run(path, progress)
    if path.name == META and path.is_file():
        return _read_run(path.parent, progress)
    if path.name == SUMMARY and (path.parent / META).is_file():
        return _read_run(path.parent, progress)  # the run itself says more than its summary
    try:
        data = read_document(path, most=LARGEST_BYTES, links=True)
    except OSError as error:
        raise CompareError(f"{path} cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CompareError(f"{path} is not a text file: it must be a run, a summary.json, CSV or JSON") from None
    if not text.strip():
        raise CompareError(f"{path} is empty")
    if text.lstrip()[0] not in "[{":
        return _of_table(path, *_csv_columns(path, text), column, unit)
    document = _json(path, text)
    if isinstance(document, dict):
        with_current_kinds(document)
    if isinstance(document, dict) and "step_time" in document and "phases" in document:
        return summary_input(path, document)
    if isinstance(document, dict) and document.get("kind") == BASELINE:
        return decode_baseline(path, document)
    return _of_table(path, *_json_columns(path, document), column, unit)


def check_comparable(inputs: Sequence[Input], *, unfinished: bool = False) -> None:
    """Raise CompareError if an input cannot be judged; ``unfinished``: accept runs that did not end well."""
    *baselines, candidate = inputs
    if any(Path(baseline.path).resolve() == Path(candidate.path).resolve() for baseline in baselines):
        raise CompareError(f"{candidate.name} is both the baseline and the run to compare with it")
    for source in inputs:
        if source.bad and not unfinished:
            how = {"running": "still runs"}.get(
                str(source.status), f"did not finish: {source.status_text or source.status}"
            )
            raise CompareError(f"{source.name} {how}; only `stepscope compare --unfinished` compares such a run")
        fewest = FEWEST_NUMBERS if source.kind == "numbers" else thresholds.MIN_STEPS
        if source.steady < fewest:
            what = "number" if source.kind == "numbers" else "steady step"
            raise CompareTooShort(
                f"cannot tell: {source.name} has {count_text(source.steady, what)}; at least {fewest} are needed"
            )
    if len({source.unit for source in inputs}) > 1:
        odd = next(source for source in inputs if source.unit == "throughput")
        raise CompareError(f"{odd.name} contains throughput and the others contain times; they cannot be compared")


# -- runs -------------------------------------------------------------------------------------------------------------


def _read_run(path: Path, progress: Progress) -> Input:
    summary = load_summary(path)
    run = load_run(path, samples=summary is None, progress=progress).data
    if summary is None or summary.get("schema") != 1:
        summary = summarize(run, alive=run.meta.get("sealed") is not True and is_active(path), logs=log_names(path))
    return input_of_run(run, summary)


def input_of_run(run: RunData, summary: Mapping[str, Any]) -> Input:
    """A run that was read, with its summary."""
    window = build_window(run)
    view = view_of(window)
    views = [view] if view.clock == "host" else [view, view_of(replace(window, device_ns=None))]
    return Input(
        name=run.name,
        path=run.path,
        kind="run",
        measured={view.clock: measured_of(view) for view in views},
        steady=len(view.steps),
        **_about_run(summary, run.meta, window),
    )


def summary_input(path: Path, summary: Mapping[str, Any]) -> Input:
    """A ``summary.json`` without its run: the mean, the spread by percentiles, and everything around the steps."""
    if summary.get("schema") != 1:
        raise CompareError(f"{path} has schema {summary.get('schema')}; this Stepscope reads schema 1")
    times = {name: _positive(_inside(summary, "step_time", name)) for name in ("mean_ms", "p50_ms", "p90_ms")}
    count = _inside(summary, "steps", "steady")
    mean, median, high = times.values()
    if mean is None or median is None or high is None or not isinstance(count, int):
        raise CompareTooShort(f"cannot tell: {path} contains no step times")
    # Nothing is known about the order of the steps: their dependence and wander are assumed to be large.
    noise = max(high - median, 0.0) / P90_SPREADS / mean
    level = Level(
        mean=mean * 1e6,
        error=noise * ASSUMED_WIDENING / math.sqrt(max(count, 1)),
        freedom=max(count / ASSUMED_WIDENING**2 - 1, 2.0),
        wander=noise * ASSUMED_WANDER,
        noise=noise,
        steps=count,
    )
    rows = summary.get("phases")
    known = {
        str(name): found * 1e6
        for name, row in (rows.items() if isinstance(rows, dict) else ())
        if (found := _number(_inside(row, "mean_ms"))) is not None
    }
    phase_ns = np.array(list(known.values()), np.float64).reshape(-1, 1)
    measured = Measured(clock="host", run=level, phases=tuple(known), mean_ns=phase_ns, common_ns=phase_ns)
    name = _inside(summary, "run", "name")
    return Input(
        name=name if isinstance(name, str) else path.name,
        path=str(path),
        kind="summary",
        measured={"host": measured},
        steady=count,
        **_about_run(summary, {}, None),
    )


P90_SPREADS = 1.2816
"""Standard deviations from the median to the 90th percentile."""
ASSUMED_WIDENING = 2.0
"""By how much dependent steps widen the error of a mean; most jobs show less."""
ASSUMED_WANDER = 0.5
"""Of the scatter of single steps."""


def measured_of(view: View) -> Measured:
    steps = Series(numbers=view.steps, values=view.step_ns)
    if not view.phases or not view.ranks:
        return Measured(clock=view.clock, run=steps)  # it ended before its first step
    plain = view.window.unsampled[view.columns]
    phase_ns = view.phase_ns
    whole = not np.isnan(phase_ns).any()
    mean = phase_ns.mean(axis=1) if whole else np.stack([mean_rank(plane) for plane in phase_ns])
    common = np.stack([_common_ns(name, plane, view) for name, plane in zip(view.phases, phase_ns, strict=True)])
    cuts = np.linspace(0, len(view.steps), STRETCHES + 1).astype(int)
    stretches = [_step_mean(phase_ns[:, :, begin:end]) for begin, end in pairwise(cuts.tolist()) if end > begin]
    return Measured(
        clock=view.clock,
        run=steps,
        phases=view.phases,
        mean_ns=mean,
        common_ns=common,
        ranks=view.ranks,
        rank_ns=np.stack(stretches, axis=2),
        comm_measured=view.comm_measured,
        unsampled_ns=view.step_ns[plain] if plain.any() else view.step_ns,
    )


def _step_mean(times_ns: Floats) -> Floats:
    """[P, R]; mean over steps; nan for a rank that had ended."""
    counts = (~np.isnan(times_ns)).sum(axis=2)
    return np.where(counts > 0, np.nansum(times_ns, axis=2) / np.maximum(counts, 1), np.nan)


def _common_ns(name: str, plane: Floats, view: View) -> Floats:
    if name == "comm":
        return np.asarray(np.fmin.reduce(plane, axis=0), np.float64)
    # Where waiting is hidden in a phase, most ranks wait for a slow one there: only what every rank has is common.
    return lower_median_rank(plane) if view.comm_measured else np.asarray(np.fmin.reduce(plane, axis=0), np.float64)


# -- the job around the steps -----------------------------------------------------------------------------------------

FACTS = ("model", "loader", "optimizer", "ddp", "fsdp")
FACTS_ALONE = ("autocast", "threads", "cudnn_benchmark", "tf32", "pipeline", "frameworks", "mesh", "gc")
NOT_SETTINGS = (
    *("epochs", "set_epoch_missing", "length", "last_batch", "iterations", "unused", "bucket_sizes_mb", "group"),
    *("largest_share", "tensors"),
)
"""Facts that follow from how long a run was, or from other facts."""
NOT_ENVIRONMENT = re.compile(r".*(_ID|_PORT|_ADDR|NODELIST|NODENAME|PROCID|LOCALID|NODEID|RANK|JOB_NAME|RESTART_COUNT)")
"""Variables that differ from run to run by their nature."""


def _about_run(summary: Mapping[str, Any], meta: Mapping[str, Any], window: Window | None) -> dict[str, Any]:
    """Everything about a run but its steps, from its summary and ``run.json``; both may come from anyone."""
    status, words = summary.get("status"), summary.get("status_text")
    notices = []
    world, there = summary.get("world_size"), summary.get("ranks")
    recorded = len(there) if isinstance(there, list) else 0
    if isinstance(world, int) and 0 < recorded < world:
        notices.append(f"only {recorded} of {count_text(world, 'rank')} left a recording")
    if status == "interrupted":
        notices.append("the run was interrupted; its steps up to then are compared")
    findings = summary.get("findings")
    warmup = _inside(summary, "steps", "warmup", "count")
    created = _inside(summary, "run", "created_wall_ns")
    return {
        "status": status if isinstance(status, str) else None,
        "status_text": words if isinstance(words, str) else None,
        "bad": status not in ("finished", "interrupted") or summary.get("status_severity") == "critical",
        "warmup": warmup if isinstance(warmup, int) else 0,
        "created_wall_ns": created if isinstance(created, int) else None,
        "context": context_of(summary, meta, window),
        "memory": _memory(summary),
        "communication": _communication(summary),
        "findings": [finding for finding in findings if _is_finding(finding)] if isinstance(findings, list) else None,
        "notices": tuple(notices),
    }


def context_of(summary: Mapping[str, Any], meta: Mapping[str, Any], window: Window | None = None) -> dict[str, Any]:
    """What a run was started with and ran on, by dotted name; unknown values are missing."""
    raw = summary.get("facts")
    facts: Mapping[str, Any] = raw if isinstance(raw, dict) else {}
    found: dict[str, Any] = {"world_size": summary.get("world_size")}
    if window is not None and len(window.batches):
        found["batches_per_step"] = round(float(np.median(window.batches)), 2) or None
    for name in ("device_name", "torch", "backend"):
        found[name] = _of_ranks(summary, name)
    hosts = _inside(summary, "run", "hosts")
    if isinstance(hosts, list):
        found["host_count"] = len(hosts)
        found["hosts"] = ", ".join(sorted(str(host) for host in hosts)[:8])
    for name in ("python", "platform", "stepscope", "cwd"):
        found[name] = _inside(summary, "run", name)
    command = _inside(summary, "run", "command")
    if isinstance(command, list):
        found["command"] = shlex.join(str(word) for word in command)
    git = _inside(summary, "run", "git")
    if isinstance(git, dict):
        found.update({f"git.{name}": git.get(name) for name in ("commit", "branch", "dirty", "diff_stat")})
    for family in FACTS:
        group = facts.get(family)
        for name, value in group.items() if isinstance(group, dict) else ():
            if name not in NOT_SETTINGS:
                found[f"{family}.{name}"] = value
    found.update({name: facts[name] for name in FACTS_ALONE if name in facts})
    environment = meta.get("environment")
    for name, value in environment.items() if isinstance(environment, dict) else ():
        if not NOT_ENVIRONMENT.fullmatch(str(name)):
            found[f"environment.{name}"] = value
    return {name: _plain(value) for name, value in found.items() if value is not None and value != ""}


def _plain(value: Any) -> Any:
    """A value that can be compared and shown; what has parts becomes text."""
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def _of_ranks(summary: Mapping[str, Any], name: str) -> str | None:
    """The values of all ranks, each once."""
    rows = summary.get("ranks")
    values = [row.get(name) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return ", ".join(sorted({value for value in values if isinstance(value, str) and value})) or None


def _memory(summary: Mapping[str, Any]) -> dict[str, int]:
    found = {name: _inside(summary, "memory", name, "bytes") for name in ("device_peak", "own_peak", "rss_peak")}
    return {name: value for name, value in found.items() if isinstance(value, int) and value > 0}


def _communication(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the ranks exchange, sibling groups together."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    groups = _inside(summary, "communication", "groups")
    for group in groups if isinstance(groups, list) else ():
        ops = group.get("ops") if isinstance(group, dict) else None
        for op in ops if isinstance(ops, list) else ():
            if isinstance(op, dict):
                alike.setdefault((str(group.get("kind")), str(op.get("op"))), []).append(op)
    names = ("count", "bytes", "exposed_ms", "overlapped_ms", "transfer_ms")
    return [
        {"group": kind, "op": op, **{name: _mean([_number(row.get(name)) for row in rows]) for name in names}}
        for (kind, op), rows in alike.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _is_finding(raw: object) -> bool:
    return isinstance(raw, dict) and all(isinstance(raw.get(name), str) for name in ("kind", "severity", "title"))


def _inside(document: Any, *names: str) -> Any:
    """A value inside nested objects; None if it is not there."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _number(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if good else None


def _positive(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and number > 0 else None


# -- numbers of other tools -------------------------------------------------------------------------------------------

Columns = dict[str, list[Any]]
STEP_NAMES = (
    "step",
    "steps",
    "iteration",
    "iterations",
    "iter",
    "global_step",
    "_step",
    "trainer/global_step",
    "batch",
)
TIME_NAMES = re.compile(
    r"(step|iter|iteration|batch|train_step|train_batch)[\W_]*(time|duration|latency|s|ms|seconds)?.*"
)
RATE_NAMES = re.compile(
    r".*(throughput|per[\W_]?sec|per_second|/s(ec)?|_ps|samples_s|tokens_s|it_s|ips|tps|tgs|wps)\b.*"
)
UNIT_NAMES = (("ns", r".*(_ns|\bns|nanosec\w*)\W*"), ("us", r".*(_us|\bus|µs|microsec\w*)\W*"),
              ("ms", r".*(_ms|\bms|millisec\w*)\W*"), ("s", r".*(_s|\bs|_sec|seconds?)\W*"))  # fmt: skip


def _json(path: Path, text: str) -> Any:
    """One document, or one per line."""
    try:
        return json.loads(text)
    except RecursionError:
        raise CompareError(f"{path} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        problem = str(error)
    rows = []
    for line in text.splitlines():
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                raise CompareError(f"{path} is not valid JSON: {problem}") from None
    return rows


def _json_columns(path: Path, document: Any) -> tuple[Columns, list[str]]:
    """A list of numbers, a list of objects, or an object that holds lists of either."""
    if isinstance(document, dict):
        lists = {str(name): value for name, value in document.items() if isinstance(value, list) and value}
        tables = [value for value in lists.values() if isinstance(value[0], dict)]
        if len(tables) == 1:
            document = tables[0]
        else:
            return {name: value for name, value in lists.items() if not isinstance(value[0], dict | list)}, []
    if not isinstance(document, list) or not document:
        raise CompareError(f"{path} contains no list of numbers")
    if isinstance(document[0], dict):
        names = dict.fromkeys(str(name) for row in document if isinstance(row, dict) for name in row)
        return {name: [row.get(name) if isinstance(row, dict) else None for row in document] for name in names}, []
    return {"": document}, []


def _csv_columns(path: Path, text: str) -> tuple[Columns, list[str]]:
    """A table with or without a line of names; separated by commas, semicolons, tabs or spaces."""
    first = text.lstrip().splitlines()[0]
    separator = next((character for character in ",;\t" if character in first), " ")
    lines = text.splitlines()
    if len(lines) > LARGEST_COUNT:
        raise CompareError(f"{path} is too large for a table of steps")
    try:
        rows = list(csv.reader(lines, delimiter=separator, skipinitialspace=True))
    except csv.Error as error:
        raise CompareError(f"{path} is not CSV: {error}") from None
    rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    if not rows or len(rows) * len(rows[0]) > LARGEST_COUNT:
        raise CompareError(f"{path} is empty" if not rows else f"{path} is too large for a table of steps")
    named = not any(_parsed(cell) is not None for cell in rows[0])
    names = rows[0] if named else ([""] if len(rows[0]) == 1 else [f"column {at + 1}" for at in range(len(rows[0]))])
    body = rows[1:] if named else rows
    return {name: [row[at] if at < len(row) else "" for row in body] for at, name in enumerate(names)}, names


def _of_table(path: Path, columns: Columns, order: list[str], column: str | None, unit: str | None) -> Input:
    chosen = _chosen(path, columns, column)
    known_unit = unit or _unit_of(chosen)
    throughput = known_unit == "throughput"
    values, numbers = _values(path, chosen, columns, throughput=throughput)
    scale = 1e9 if throughput else IN_NS[known_unit or "s"]
    took = scale / values if throughput else values * scale
    series, apart = without_warmup(numbers, took)
    measured = Measured(clock="given", run=series)
    notices = (
        () if known_unit or not chosen else (f"the numbers in {path.name} are taken as seconds (--unit changes that)",)
    )
    return Input(
        name=path.name,
        path=str(path),
        kind="numbers",
        unit="throughput" if throughput else "time",
        measured={"given": measured},
        steady=len(series.values),
        warmup=apart,
        notices=notices,
    )


def without_warmup(numbers: NDArray[np.int64], values: Floats) -> tuple[Series, int]:
    """The steady steps, by the same rule as for recorded runs, and how many were set apart."""
    apart = {step.step for step in set_apart(numbers, values[None, :], np.zeros((1, len(values)), np.uint16))}
    steady = ~np.isin(numbers, list(apart))
    return Series(numbers=numbers[steady], values=values[steady]), len(apart)


def _chosen(path: Path, columns: Columns, column: str | None) -> str:
    """The column with the step times or the throughput."""
    if column is not None:
        if column not in columns:
            names = ", ".join(name for name in columns if name) or "none"
            raise CompareError(f"{path} has no column {column!r}; it has: {names}")
        return column
    numeric = [name for name, cells in columns.items() if _mostly_numbers(cells) and name.lower() not in STEP_NAMES]
    if len(numeric) == 1:
        return numeric[0]
    known = [name for name in numeric if TIME_NAMES.fullmatch(name.lower()) or RATE_NAMES.fullmatch(name.lower())]
    if len(known) == 1:
        return known[0]
    if not numeric:
        raise CompareError(f"{path} contains no column of numbers")
    names = ", ".join(numeric[:12])
    raise CompareError(f"{path} has several columns of numbers; name one with --column: {names}")


def _mostly_numbers(cells: Sequence[Any]) -> bool:
    filled = [cell for cell in cells if cell is not None and cell != ""]
    return bool(filled) and sum(_parsed(cell) is not None for cell in filled) > len(filled) / 2


def _unit_of(name: str) -> str | None:
    low = name.lower()
    if RATE_NAMES.fullmatch(low):
        return "throughput"
    return next((unit for unit, form in UNIT_NAMES if re.fullmatch(form, low)), None)


def _values(path: Path, chosen: str, columns: Columns, *, throughput: bool) -> tuple[Floats, NDArray[np.int64]]:
    """The numbers and their steps; rows without a number are passed over, because many loggers write several tables."""
    cells = columns[chosen]
    steps_in = next((columns[name] for name in columns if name.lower() in STEP_NAMES), None)
    values: list[float] = []
    steps: list[float] = []
    what = "throughput" if throughput else "step time"
    for at, cell in enumerate(cells):
        if cell is None or cell == "" or (isinstance(cell, str) and cell.lower() in ("nan", "null", "none")):
            continue
        value = _parsed(cell)
        if value is None:
            raise CompareError(f"{path}: value {at + 1} is not a number: {str(cell)[:40]!r}")
        if math.isnan(value):
            continue
        if not SMALLEST <= value <= LARGEST:
            raise CompareError(f"{path}: value {at + 1} is not a valid {what}: {str(cell)[:40]}")
        values.append(value)
        number = _parsed(steps_in[at]) if steps_in is not None and at < len(steps_in) else None
        steps.append(at if number is None else number)
    if not values:
        raise CompareError(f"{path} contains no numbers")
    if len(values) > LARGEST_COUNT:
        raise CompareError(f"{path} contains more than {LARGEST_COUNT:,} numbers")
    at_steps = np.array(steps, np.float64)
    good = bool((np.diff(at_steps) > 0).all() and (np.abs(at_steps) < 1 << 53).all())
    numbers = at_steps.astype(np.int64) if good and (at_steps == np.floor(at_steps)).all() else np.arange(len(values))
    return np.array(values, np.float64), numbers


SMALLEST, LARGEST = 1e-12, 1e15
"""No step time or throughput, in any unit, is outside of this; their ratios can be computed without overflow."""


def _parsed(cell: Any) -> float | None:
    if isinstance(cell, bool):
        return None
    try:
        return float(cell) if isinstance(cell, int | float | str) else None
    except (ValueError, OverflowError):
        return None


# -- stored baselines -------------------------------------------------------------------------------------------------
# What a comparison needs of a run, in one small file that can outlive it (``stepscope gate --record``).

BASELINE = "stepscope-baseline"
STORED_STEPS = 5_000
"""The last steps of a longer run are kept."""
STORED_RANKS = 1_024


def encode_baseline(source: Input) -> dict[str, Any]:
    """The document of a run that can be read again as an input; CompareError if there are no steps to keep."""
    clocks = list(source.measured.values())
    if not all(isinstance(measured.run, Series) for measured in clocks):
        raise CompareError(f"{source.name} has no steps to keep as a baseline; record the run itself")
    return {
        "kind": BASELINE,
        "schema": 1,
        "name": source.name,
        "unit": source.unit,
        "status": source.status,
        "warmup": source.warmup,
        "created_wall_ns": source.created_wall_ns,
        "numbers": source.kind == "numbers",
        "clocks": [_encode_clock(measured) for measured in clocks],
        "context": dict(source.context),
        "memory": dict(source.memory),
        "communication": list(source.communication),
        "findings": None if source.findings is None else [_short_finding(found) for found in source.findings],
    }


def decode_baseline(path: Path, document: Mapping[str, Any]) -> Input:
    """Read what ``encode_baseline`` made; CompareError if it is damaged."""
    if document.get("schema") != 1:
        raise CompareError(f"{path} has schema {document.get('schema')}; this Stepscope reads schema 1")
    try:
        clocks = [_decode_clock(raw) for raw in document["clocks"]]
        findings = document["findings"]
        known = {measured.clock: measured for measured in clocks}
        first = clocks[0].run
        return Input(
            name=str(document["name"]),
            path=str(path),
            kind="numbers" if document["numbers"] is True else "baseline",
            unit="throughput" if document["unit"] == "throughput" else "time",
            status=None if document["status"] is None else str(document["status"]),
            measured=known,
            steady=len(first.values) if isinstance(first, Series) else 0,
            warmup=int(document["warmup"]),
            created_wall_ns=None if document["created_wall_ns"] is None else int(document["created_wall_ns"]),
            context={str(name): _plain(value) for name, value in dict(document["context"]).items()},
            memory={str(name): int(value) for name, value in dict(document["memory"]).items() if int(value) > 0},
            communication=[_communication_row(row) for row in document["communication"]],
            findings=None if findings is None else [dict(found) for found in findings if _is_finding(found)],
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CompareError(f"{path} is damaged: it is not a baseline of Stepscope") from error


def _encode_clock(measured: Measured) -> dict[str, Any]:
    assert isinstance(measured.run, Series)
    recent = slice(-STORED_STEPS, None)
    ranks = len(measured.ranks) <= STORED_RANKS
    return {
        "clock": measured.clock,
        "steps": measured.run.numbers[recent].tolist(),
        "step_ns": np.round(measured.run.values[recent], 3).tolist(),
        "phases": list(measured.phases),
        "mean_ns": np.round(measured.mean_ns[:, recent]).tolist(),
        "common_ns": np.round(measured.common_ns[:, recent]).tolist(),
        "ranks": list(measured.ranks) if ranks else [],
        "rank_ns": np.round(measured.rank_ns).tolist() if ranks else [],
        "comm_measured": measured.comm_measured,
    }


def _decode_clock(raw: Mapping[str, Any]) -> Measured:
    clock = raw["clock"]
    if clock not in ("host", "device", "given"):
        raise ValueError("unknown clock")
    values = _array(raw["step_ns"], 1)
    numbers = np.array(raw["steps"], np.int64)
    phases, ranks = tuple(str(name) for name in raw["phases"]), tuple(int(rank) for rank in raw["ranks"])
    if numbers.shape != values.shape or not (values > 0).all() or not (np.diff(numbers) > 0).all():
        raise ValueError("steps that do not fit their times")
    shape = (len(phases), len(values))
    mean, common = (_array(raw[name], 2).reshape(shape) for name in ("mean_ns", "common_ns"))
    by_rank = _array(raw["rank_ns"], 3)
    by_rank = by_rank.reshape(len(phases), len(ranks), -1) if by_rank.size else np.zeros((len(phases), 0, 0))
    return Measured(
        clock=clock,
        run=Series(numbers=numbers, values=values),
        phases=phases,
        mean_ns=mean,
        common_ns=common,
        ranks=ranks if by_rank.size else (),
        rank_ns=by_rank,
        comm_measured=raw["comm_measured"] is True,
    )


def _array(raw: Any, dimensions: int) -> Floats:
    found = np.array(raw, np.float64)
    if found.size and (
        found.ndim != dimensions or not np.isfinite(found).all() or (np.abs(found) > LARGEST * 1e9).any()
    ):
        raise ValueError("not an array of numbers")
    return found


def _communication_row(raw: Mapping[str, Any]) -> dict[str, Any]:
    names = ("count", "bytes", "exposed_ms", "overlapped_ms", "transfer_ms")
    return {"group": str(raw["group"]), "op": str(raw["op"]), **{name: _number(raw.get(name)) for name in names}}


def _short_finding(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found.get(name) for name in ("kind", "severity", "title", "phase", "ranks")}
