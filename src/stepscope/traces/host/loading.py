"""How long the main thread waits for data: inside a loader's ``__next__``."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from stepscope.traces.model import intervals
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Rows
from stepscope.traces.model.naming import named
from stepscope.traces.model.table import Table, table_of
from stepscope.traces.model.window import Window

__all__ = ["Loading", "loader_rows", "loading", "loading_of"]

LOADER = re.compile(
    r"^enumerate\(\w*(DataLoader|DataPipe|Loader)\w*\)#"
    r"|^\[pl\].*(dataloader_next|_FetcherIter|__next__)|^(get_train_batch|train_dataloader_next)$"
    r"|^DALI\w*(Iterator|_next|\.__next__)|(DataLoader|DataPipe|NodeIterator|DALI\w*Iterator)\w*(\.|::)__next__"
)
"""Annotations of torch, Lightning, torchdata, DALI."""
PYTHON_LOADER = re.compile(r"(^|/)torch/utils/data/dataloader\.py\(\d+\): __next__$")


@dataclass(frozen=True, kw_only=True)
class Loading:
    total_ns: int
    """Within steps."""
    by_step: tuple[int, ...]
    """Nanoseconds, as ``Window.steps``."""
    workers: bool | None
    """Whether worker processes load, as the loader's name says; None: it does not."""


def loader_rows(window: Window) -> Rows:
    """What loads data, on any thread: annotations, or where there are none Python's functions."""
    annotations = window.host.annotations
    rows = annotations[named(window.trace, annotations, LOADER.search)]
    if not len(rows):
        pythons = window.rows_of((Kind.PYTHON,))
        rows = pythons[named(window.trace, pythons, PYTHON_LOADER.search)]
    return rows


def loading_of(window: Window) -> Loading:
    slices = window.trace.slices
    rows = loader_rows(window)
    rows = rows[slices.thread[rows] == window.host.main_thread]
    spans = intervals.merge(slices.start_ns[rows], slices.end_ns[rows])
    starts = np.array([step.start_ns for step in window.steps], np.int64)
    ends = np.array([step.end_ns for step in window.steps], np.int64)
    by_step = intervals.covered(starts, ends, spans).tolist()
    names = {window.trace.name(row) for row in rows[:1].tolist()}
    single = any("_SingleProcess" in name for name in names)
    workers = True if any("_MultiProcessing" in name for name in names) else False if single else None
    return Loading(total_ns=sum(by_step), by_step=tuple(by_step), workers=workers)


def loading(window: Window, found: Loading) -> Table | None:
    """None: nothing is known to load data."""
    if not found.total_ns:
        return None
    rows = [
        (step.number, spent_ns, step.end_ns - step.start_ns, spent_ns / max(step.end_ns - step.start_ns, 1))
        for step, spent_ns in zip(window.steps, found.by_step, strict=True)
    ]
    columns = ("step", "loading_ns", "step_ns", "loading_share")
    return table_of("loading", "Waiting for data", columns, rows)
