"""How many floating-point operations an operator does, from the shapes and settings of its inputs.

A multiplication and an addition are two.  Attention counts all pairs of positions, masked or not, and its backward five
products for the forward's two, since it computes the first again: as ``torch.utils.flop_counter`` counts.  None: not
enough is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["FORMULAS", "flops_of"]

Dims = Sequence[Any]
Settings = Sequence[Any]
Formula = Callable[[Dims, Settings], int | None]


def flops_of(name: str, dims: str, concrete: str) -> int | None:
    """``dims`` and ``concrete``: the JSON texts of ``Input Dims`` and ``Concrete Inputs``; empty: not there."""
    formula = FORMULAS.get(name)
    if formula is None or not dims:
        return None
    try:
        return formula(json.loads(dims), [_setting(each) for each in json.loads(concrete or "[]")])
    except (ValueError, IndexError, TypeError):
        # Shapes of another form than the operator has today: lists of tensors, another order, cut text.
        return None


def _setting(text: Any) -> Any:
    """``[1, 1]``, ``False``, ``2``: as JSON, or as it is."""
    try:
        return json.loads(str(text).lower())
    except ValueError:
        return text


def prod(sizes: Sequence[Any]) -> int:
    return int(math.prod(sizes))


def _product(first: int, second: int) -> Formula:
    """Of two matrices, or as many pairs of them as the leading sizes say; ``first``, ``second``: which inputs."""

    def formula(dims: Dims, _: Settings) -> int:
        one, other = dims[first], dims[second]
        if len(one) == 1 and len(other) == 1:
            return 2 * int(one[0])
        if len(other) == 1:
            return 2 * prod(one)
        if len(one) == 1:
            return 2 * prod(other)
        batch = one[:-2] if prod(one[:-2]) >= prod(other[:-2]) else other[:-2]
        if one[-1] != other[-2]:
            raise ValueError("no product")
        return 2 * prod(batch) * int(one[-2]) * int(one[-1]) * int(other[-1])

    return formula


def _linear(dims: Dims, _: Settings) -> int:
    return 2 * prod(dims[0]) * int(dims[1][0])


def _convolution(*, stride: int, padding: int, dilation: int, transposed: int | bool = False) -> Formula:
    """Where in the inputs each setting stands."""

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
    """Of the input only, by cuDNN, as it was called until 2022: sizes of the input, gradient, weight."""
    return 2 * int(dims[1][0]) * prod(dims[1][2:]) * prod(dims[2])


def _attention(first: int, products: int, *, heads: int = 1) -> Formula:
    """Query, key and value are inputs from ``first`` on; ``heads``: where their number stands in a shape."""

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
