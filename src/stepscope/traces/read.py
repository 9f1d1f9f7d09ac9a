"""Paths in, traces out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stepscope.errors import TraceError
from stepscope.traces.columns import Trace
from stepscope.traces.inflate import blocks_of
from stepscope.traces.kineto import read_kineto

__all__ = ["read_trace"]


def read_trace(path: Path) -> Trace:
    cut: list[str] = []
    try:
        trace = read_kineto(blocks_of(path, cut), str(path))
    except TraceError as error:
        raise TraceError(f"{path} {error}" if str(path) not in str(error) else str(error)) from None
    if cut:
        problem = f"the packed data end early ({cut[0]}); everything before is used"
        meta = replace(trace.meta, truncated=trace.meta.truncated or problem, problems=(problem, *trace.meta.problems))
        return replace(trace, meta=meta)
    return trace
