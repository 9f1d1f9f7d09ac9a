"""Floating-point operations by operator: formulas, and the utilization (MFU).

Only the innermost operators with a formula count: ``aten::linear`` is ``aten::addmm``. The utilization is the time that
the work would take at the device's peak for its data type, divided by the length of the steps. If an operator with a
formula lacks its shapes or settings, or the device is unknown, there is no total and no utilization.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepscope.records.throughput import peak_of
from stepscope.traces.model.columns import Ints, Rows
from stepscope.traces.model.tables import Table, distinct, distinct_rows, table_of
from stepscope.traces.model.window import Window, nest_of, padded, sums

__all__ = ["Flops", "flops_found", "flops_of", "flops_table"]


# -- formulas ---------------------------------------------------------------------------------------------------------
# Floating-point operations from the shapes and settings of an operator's inputs. A multiplication and an addition count
# as two. Attention counts all pairs of positions, masked or not. Its backward counts five products for the forward's
# two, since it recomputes the first, as ``torch.utils.flop_counter`` does. None: not enough is known.

Dims = Sequence[Any]
Settings = Sequence[Any]
Formula = Callable[[Dims, Settings], int | None]


def flops_of(name: str, dims: str, concrete: str) -> int | None:
    """Count the operations from the JSON texts of ``Input Dims`` and ``Concrete Inputs``; empty: missing."""
    formula = FORMULAS.get(name)
    if formula is None or not dims:
        return None
    try:
        return formula(json.loads(dims), [_setting(each) for each in json.loads(concrete or "[]")])
    except (ValueError, IndexError, TypeError):
        # Shapes in another form than the operator has today: lists of tensors, another order, truncated text.
        return None


def _setting(text: Any) -> Any:
    """Parse ``[1, 1]``, ``False``, ``2`` as JSON; return other text unchanged."""
    try:
        return json.loads(str(text).lower())
    except ValueError:
        return text


def prod(sizes: Sequence[Any]) -> int:
    return int(math.prod(sizes))


def _product(first: int, second: int) -> Formula:
    """Build the formula for products of (batches of) matrices; ``first``, ``second``: indices of the inputs."""

    def formula(dims: Dims, _: Settings) -> int:
        left, right = dims[first], dims[second]
        if len(left) == 1 and len(right) == 1:
            return 2 * int(left[0])
        if len(right) == 1:
            return 2 * prod(left)
        if len(left) == 1:
            return 2 * prod(right)
        batch = left[:-2] if prod(left[:-2]) >= prod(right[:-2]) else right[:-2]
        if left[-1] != right[-2]:
            raise ValueError("no product")
        return 2 * prod(batch) * int(left[-2]) * int(left[-1]) * int(right[-1])

    return formula


def _linear(dims: Dims, _: Settings) -> int:
    return 2 * prod(dims[0]) * int(dims[1][0])


def _convolution(*, stride: int, padding: int, dilation: int, transposed: int | bool = False) -> Formula:
    """Build the formula for convolutions; the arguments are indices of the settings."""

    def formula(dims: Dims, settings: Settings) -> int | None:
        image, weight = dims[0], dims[1]
        spatial, kernel = image[2:], weight[2:]
        if len(image) != len(weight) or not kernel:
            return None
        turned = transposed if isinstance(transposed, bool) else settings[transposed] in (True, 1)
        if turned:
            return 2 * prod(image) * prod(weight[1:])
        sizes = [_sizes(settings[at], len(kernel)) for at in (stride, padding, dilation)]
        out = [
            (size + 2 * pad - dilate * (width - 1) - 1) // step + 1
            for size, width, step, pad, dilate in zip(spatial, kernel, *sizes, strict=True)
        ]
        return 2 * int(image[0]) * prod(out) * prod(weight)

    return formula


def _sizes(value: Any, count: int) -> list[int]:
    if not isinstance(value, list) or len(value) not in (1, count):
        raise ValueError("no sizes")
    return [int(each) for each in (value * count if len(value) == 1 else value)]


def _convolution_backward(dims: Dims, settings: Settings) -> int:
    grad, image, weight = dims[0], dims[1], dims[2]
    turned = len(settings) > 7 and settings[7] in (True, 1)
    once = 2 * prod(image) * prod(weight[1:]) if turned else 2 * int(grad[0]) * prod(grad[2:]) * prod(weight)
    wanted = settings[10] if len(settings) > 10 and isinstance(settings[10], list) else [True, True]
    return once * sum(bool(each) for each in wanted[:2])


def _convolution_backward_input(dims: Dims, _: Settings) -> int:
    """Count the input gradient only, as cuDNN's call until 2022: sizes of the input, gradient, weight."""
    return 2 * int(dims[1][0]) * prod(dims[1][2:]) * prod(dims[2])


def _attention(first: int, products: int, *, heads: int = 1) -> Formula:
    """Build the formula; query, key and value begin at input ``first``; ``heads``: index of their number in a shape."""

    def formula(dims: Dims, _: Settings) -> int | None:
        query, key, value = dims[first : first + 3]
        if len(query) != 4 or len(key) != 4:
            return None
        rows, columns = (int(query[2]), int(key[2])) if heads == 1 else (int(query[1]), int(key[1]))
        pairs = int(query[0]) * int(query[heads]) * rows * columns
        if products == 2:
            return 2 * pairs * (int(query[3]) + int(value[3]))
        return 2 * pairs * (3 * int(query[3]) + 2 * int(value[3]))

    return formula


_LISTED = _convolution(stride=3, padding=4, dilation=5, transposed=6)
_CALLED = _convolution(stride=3, padding=4, dilation=5)
_WITH_BIAS = _convolution(stride=4, padding=3, dilation=5)

FORMULAS: dict[str, Formula] = {
    "aten::mm": _product(0, 1),
    "aten::bmm": _product(0, 1),
    "aten::matmul": _product(0, 1),
    "aten::mv": _product(0, 1),
    "aten::dot": _product(0, 1),
    "aten::_scaled_mm": _product(0, 1),
    "aten::_int_mm": _product(0, 1),
    "aten::addmm": _product(1, 2),
    "aten::addmm_": _product(1, 2),
    "aten::_addmm_activation": _product(1, 2),
    "aten::addmv": _product(1, 2),
    "aten::baddbmm": _product(1, 2),
    "aten::baddbmm_": _product(1, 2),
    "aten::addbmm": _product(1, 2),
    "aten::linear": _linear,
    "aten::mkldnn_linear": _linear,
    "aten::convolution": _LISTED,
    "aten::_convolution": _LISTED,
    "aten::convolution_overrideable": _LISTED,
    "aten::conv1d": _CALLED,
    "aten::conv2d": _CALLED,
    "aten::conv3d": _CALLED,
    "aten::cudnn_convolution": _convolution(stride=3, padding=2, dilation=4),
    "aten::miopen_convolution": _WITH_BIAS,
    "aten::mkldnn_convolution": _WITH_BIAS,
    "aten::_conv_depthwise2d": _convolution(stride=4, padding=5, dilation=6),
    "aten::cudnn_convolution_transpose": _convolution(stride=4, padding=2, dilation=5, transposed=True),
    "aten::convolution_backward": _convolution_backward,
    "aten::cudnn_convolution_backward_input": _convolution_backward_input,
    "aten::scaled_dot_product_attention": _attention(0, 2),
    "aten::_scaled_dot_product_attention_math": _attention(0, 2),
    "aten::_scaled_dot_product_flash_attention": _attention(0, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(0, 2),
    "aten::_scaled_dot_product_efficient_attention": _attention(0, 2),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, 2),
    "aten::_flash_attention_forward": _attention(0, 2, heads=2),
    "aten::_efficient_attention_forward": _attention(0, 2, heads=2),
    "flash_attn::_flash_attn_forward": _attention(0, 2, heads=2),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(1, 5),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, 5),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(1, 5),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, 5),
    "aten::_flash_attention_backward": _attention(1, 5, heads=2),
    "aten::_efficient_attention_backward": _attention(1, 5, heads=2),
    "flash_attn::_flash_attn_backward": _attention(1, 5, heads=2),
}


# -- counting ---------------------------------------------------------------------------------------------------------

TF32 = re.compile(r"tf32|_s1688|xmma.*f32f32_f32f32.*tensor", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Columns over the operators that count, within steps."""

    rows: Rows
    flops: Ints
    device_ns: Ints
    host_ns: Ints
    unknown: int
    """Operators with a formula about which too little is known."""
    total: int | None
    mfu: float | None


def flops_found(window: Window) -> Flops:
    trace, slices, host = window.trace, window.trace.slices, window.host
    wanted = host.ops[trace.names_where(FORMULAS.__contains__)[slices.name[host.ops]]]
    wanted = wanted[window.step_of[wanted] >= 0]
    worth = _worth(window, wanted)
    # Only the innermost with a formula: not those that contain another countable one.
    countable = nest_of(window.calls, wanted[worth >= 0])
    holds = np.zeros(len(countable.rows), bool)
    holds[countable.above[countable.above >= 0]] = True
    rows, values = countable.rows[~holds], worth[worth >= 0][~holds]
    nest = nest_of(window.calls, rows)
    work = window.device_rows
    owner = nest.around[window.owner[work]]
    owned = owner >= 0
    device_ns = sums(owner[owned], slices.dur_ns[work[owned]], len(rows))
    missed = wanted[worth < 0]
    covered = (countable.around[missed] >= 0) | _holds_any(window, missed, rows)
    unknown = int((~covered).sum())
    total = int(values.sum()) if len(rows) and not unknown else None
    return Flops(
        rows=rows,
        flops=values,
        device_ns=device_ns,
        host_ns=slices.dur_ns[rows],
        unknown=unknown,
        total=total,
        mfu=_utilization(window, rows, values) if total and len(work) else None,
    )


def _worth(window: Window, wanted: Rows) -> Ints:
    """Count each operator, [wanted]; −1: unknown; each combination of name, shapes and settings is computed once."""
    trace, side = window.trace, window.host.side[wanted]
    columns = (trace.slices.name[wanted], padded(trace.ops.dims)[side], padded(trace.ops.concrete)[side])
    first, number = distinct_rows(*columns)
    keys = zip(*(column[first].tolist() for column in columns), strict=True)
    found = [flops_of(trace.text(name), trace.text(dims), trace.text(more)) for name, dims, more in keys]
    return np.array([-1 if each is None else each for each in found], np.int64)[number]


def _holds_any(window: Window, outer: Rows, inner: Rows) -> np.ndarray:
    """Return whether one of ``inner`` is inside, [outer]."""
    nest = nest_of(window.calls, outer)
    inside = np.zeros(len(outer), bool)
    at: Rows = nest.around[inner]
    while (at >= 0).any():
        inside[at[at >= 0]] = True
        at = padded(nest.above)[at]
    return inside


def _utilization(window: Window, rows: Rows, values: Ints) -> float | None:
    trace = window.trace
    device = np.bincount(np.maximum(trace.slices.device[window.device_rows], 0)).argmax()
    names = [each.get("name") for each in trace.meta.devices if each.get("id", device) == device]
    peak = peak_of(names[0] if names else None)
    steps_ns = sum(step.end_ns - step.start_ns for step in window.steps)
    if peak is None or not steps_ns:
        return None
    used = np.unique(trace.slices.name[window.device_rows])
    tf32 = any(TF32.search(trace.strings[code]) for code in used.tolist())
    types = padded(trace.ops.types)[window.host.side[rows]]
    codes, group = distinct(types)
    needed_ns = 0.0
    for code, count in zip(codes.tolist(), sums(group, values, len(codes)).tolist(), strict=True):
        tflops = peak.tflops(_number(trace.text(code)), tf32=tf32)
        if tflops is None:
            return None
        needed_ns += count / tflops / 1000
    return needed_ns / steps_ns


def _number(types: str) -> str:
    """Return the data type of the product: that of the last tensor among the first three inputs."""
    try:
        known = [each for each in json.loads(types or "[]")[:3] if isinstance(each, str)]
    except ValueError:
        return ""
    return next((each for each in reversed(known) if each == "float" or each.startswith("c10::")), "")


def flops_table(window: Window, found: Flops) -> Table | None:
    """Build the table; None if the trace has no shapes."""
    if not len(found.rows):
        return None
    trace = window.trace
    codes, group = distinct(trace.slices.name[found.rows])
    count = len(codes)
    calls = np.bincount(group, minlength=count)
    work, device_ns = sums(group, found.flops, count), sums(group, found.device_ns, count)
    host_ns = sums(group, found.host_ns, count)
    spent_ns = device_ns if device_ns.any() else host_ns
    rows = [
        (
            trace.strings[codes[at]],
            calls[at],
            work[at],
            spent_ns[at],
            work[at] / spent_ns[at] / 1000 if spent_ns[at] else None,
        )
        for at in np.argsort(-work, kind="stable").tolist()
    ]
    notes = ["Device time." if device_ns.any() else "Host time: the trace has no device work."]
    if found.unknown:
        notes.append(f"{found.unknown} calls to such operators lack shapes or settings and are not counted.")
    columns = ("operator", "calls", "work_flops", "time_ns", "achieved_tflops")
    return table_of("flops", "Floating-point operations", columns, rows, note=" ".join(notes))
