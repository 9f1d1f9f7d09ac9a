"""How the optimizer updates its parameters: all of them in a few calls, or each for itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from stepscope.traces.model.kernel_names import kernel_class
from stepscope.traces.model.window import Window

__all__ = ["OptimizerUse", "optimizer_use"]

STEP: Final = re.compile(r"^Optimizer\.step#(?P<name>\w+)")
TOGETHER: Final = re.compile(r"^aten::_(foreach|fused)_")


@dataclass(frozen=True, kw_only=True)
class OptimizerUse:
    """Of all steps together."""

    name: str
    """``AdamW.step``; empty: the trace has no optimizer."""
    host_ns: int
    """Of the main thread."""
    operators: int
    """Called directly by the optimizer."""
    kernels: int
    kernel_ns: int
    together: bool
    """Whether some calls update many parameters at once (foreach or fused)."""


def optimizer_use(window: Window) -> OptimizerUse:
    trace, slices = window.trace, window.trace.slices
    rows = window.host.annotations
    rows = rows[trace.names_where(STEP.match)[slices.name[rows]] & (window.step_of[rows] >= 0)]
    rows = rows[slices.thread[rows] == window.host.main_thread]
    if not len(rows):
        return OptimizerUse(name="", host_ns=0, operators=0, kernels=0, kernel_ns=0, together=False)
    around = window.calls.nearest(window.host.mask(rows))
    ops = window.host.ops
    inside = ops[around[ops] >= 0]
    direct = inside[window.host.op_holder[inside] < 0]
    work = window.device_rows
    owner = window.owner[work]
    launch = window.launch[work]
    owned = ((owner >= 0) & (around[owner] >= 0)) | ((launch >= 0) & (around[launch] >= 0))
    work = work[owned]
    multi = trace.names_where(lambda text: kernel_class(text) == "optimizer")[slices.name[work]]
    match = STEP.match(trace.name(int(rows[0])))
    return OptimizerUse(
        name=match["name"] if match else "",
        host_ns=int(slices.dur_ns[rows].sum()),
        operators=len(direct),
        kernels=len(work),
        kernel_ns=int(slices.dur_ns[work].sum()),
        together=bool(trace.names_where(TOGETHER.match)[slices.name[inside]].any() or np.any(multi)),
    )
