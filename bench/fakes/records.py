"""The records of a rank's steps, and back: tests change single fields, feeds send them as an agent does.

steps, device = records_of(series)          # dtypes STEP_FIELDS and DEVICE_FIELDS
series = with_records(series, steps, device[::8])
run = edited(run, lambda series, steps: steps.__setitem__("micro_batches", 4))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.series import RankSeries, RunData
from stepscope.records.steps import DEVICE, STEP
from stepscope.step_table import (
    DEVICE_DTYPE,
    STEP_DTYPE,
    RankSteps,
    TableBuilder,
    phase_labels,
    phases_in_order,
    slots_in_use,
)

__all__ = ["Records", "edited", "records_of", "steps_of", "timed_at", "with_records"]

Records = tuple[NDArray[Any], NDArray[Any]]


def steps_of(records: Sequence[Records], names: Sequence[Sequence[str]]) -> list[RankSteps]:
    """The rows of each rank in one table; ``names``: the phase names of each."""
    used = [
        slots_in_use(np.concatenate([steps["phase_ns"], device["phase_ns"]]), own)
        for (steps, device), own in zip(records, names, strict=True)
    ]
    in_use = {label for labels in used for label in labels}
    ordered = phases_in_order(label for own in names for label in phase_labels(own) if label in in_use)
    builder = TableBuilder(sum(len(steps) for steps, _ in records), ordered)
    for (steps, device), own in zip(records, names, strict=True):
        builder.add(steps, device, own)
    table = builder.table()
    return [table.rank(place) for place in range(len(records))]


def records_of(series: RankSeries) -> Records:
    """STEP and DEVICE records."""
    own = series.steps
    steps = np.zeros(len(own), STEP_DTYPE)
    steps["kind"], steps["seq"] = STEP, own["step"] + 1
    device = np.zeros(int(own.timed.sum()), DEVICE_DTYPE)
    device["kind"], device["step"] = DEVICE, own["step"][own.timed]
    for name in ("step", *own.table.plain):
        if name.startswith("device_"):
            device[name.removeprefix("device_")] = own[name][own.timed]
        else:
            steps[name] = own[name]
    for slot, label in enumerate(phase_labels(series.phase_names)):
        steps["phase_ns"][:, slot] = own.phase(label)
        device["phase_ns"][:, slot] = own.device(label)[own.timed]
    return steps, device


def with_records(series: RankSeries, steps: NDArray[Any], device: NDArray[Any]) -> RankSeries:
    device = device[np.isin(device["step"], steps["step"])]
    return replace(series, steps=steps_of([(steps, device)], [series.phase_names])[0])


def edited(run: RunData, change: Callable[[RankSeries, NDArray[Any]], object]) -> RunData:
    """The run with the STEP records of each rank as ``change`` leaves them."""
    ranks = []
    for series in run.ranks:
        steps, device = records_of(series)
        change(series, steps)
        ranks.append(with_records(series, steps, device))
    return replace(run, ranks=tuple(ranks))


def timed_at(series: RankSeries, chosen: Any) -> RankSeries:
    """The series with only these of its device times."""
    steps, device = records_of(series)
    return with_records(series, steps, device[chosen])
