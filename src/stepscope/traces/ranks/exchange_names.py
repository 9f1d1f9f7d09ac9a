"""What collectives and types of elements are called, in files and names of kernels, and one spelling for each."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import msgspec

from stepscope.flight.spelling import operation_name
from stepscope.records.collectives import OPS

__all__ = ["OPS", "POINT_TO_POINT", "SYNCHRONISING", "bus_factor", "op_of", "own_bytes", "size_of"]

POINT_TO_POINT: Final = tuple(OPS.index(op) for op in ("unknown", "send", "recv"))
"""Not compared over ranks: traces do not say who the other one is."""
SYNCHRONISING: Final = tuple(
    OPS.index(op) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
)
"""Nobody is done before everybody has come, so all end together."""

KERNEL: Final = re.compile(r"(?:nccl|rccl|mscclpp|msccl|ccl)\w*?Kernel\w*?_([A-Za-z]+)", re.IGNORECASE)
"""``ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)``, ``ncclKernel_AllGather_RING_LL_Sum_int8_t``."""
CUSTOM: Final = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast)", re.IGNORECASE)
SAME: Final = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallpivot": "all_to_all",
}

SIZES: Final = {
    1: ("bool", "byte", "char", "unsigned char", "signed char", "int8", "uint8", "float8", "qint8", "quint8"),
    2: ("half", "bfloat16", "short", "float16", "int16", "uint16", "short int"),
    4: ("float", "int", "float32", "int32", "uint32", "unsigned int", "complexhalf"),
    8: ("double", "long", "long int", "float64", "int64", "uint64", "complexfloat", "complex<float>"),
    16: ("complexdouble", "complex<double>"),
}
SIZE_OF: Final = {name: size for size, names in SIZES.items() for name in names}


def op_of(text: str) -> int:
    """Index of ``OPS``, of a collective's name, an annotation's or a kernel's; 0: none of them is in it."""
    kernel = KERNEL.search(text) or CUSTOM.search(text) if "(" in text or "Kernel" in text else None
    word = operation_name(kernel.group(1) if kernel else text)[1]
    word = SAME.get(word, word)
    return OPS.index(word) if word in OPS else 0


def size_of(dtype: str) -> int:
    """Bytes of an element; −1: not known."""
    name = dtype.rpartition("::")[2].lower()
    return 1 if name.startswith("float8") else SIZE_OF.get(name, -1)


def own_bytes(dims: str, types: str) -> int:
    """Of all tensors of an annotation's ``Input Dims`` and ``Input type``; −1: not told."""
    try:
        shapes, names = msgspec.json.decode(dims), msgspec.json.decode(types)
    except msgspec.DecodeError:
        return -1
    if not isinstance(shapes, list) or not isinstance(names, list) or len(shapes) != len(names):
        return -1
    sizes = [_tensor_bytes(shape, name) for shape, name in zip(shapes, names, strict=True)]
    return sum(sizes) if sizes and min(sizes) >= 0 else -1


def _tensor_bytes(shape: Any, name: Any) -> int:
    each = size_of(name) if isinstance(name, str) else -1
    fits = isinstance(shape, list) and all(isinstance(length, int) for length in shape)
    return math.prod(shape) * each if fits and each > 0 else -1


def bus_factor(op: int, members: int) -> float:
    """What the bytes a second are to be multiplied with to tell how busy the wires were, whatever the ranks."""
    if members < 2:
        return 0.0
    name = OPS[op]
    if name == "all_reduce":
        return 2 * (members - 1) / members
    return (
        (members - 1) / members if name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter") else 1.0
    )
