"""What is known of a slice beside its times, as the ``args`` of a Kineto event."""

from __future__ import annotations

import json
from typing import Final

import numpy as np

from stepscope.traces.model.categories import Kind
from stepscope.traces.model.columns import Trace, side_columns

__all__ = ["CATEGORIES", "Values", "args_of"]

CATEGORIES: Final = {
    int(kind): name
    for kind, name in {
        Kind.OTHER: "other",
        Kind.OP: "cpu_op",
        Kind.ANNOTATION: "user_annotation",
        Kind.PYTHON: "python_function",
        Kind.RUNTIME: "cuda_runtime",
        Kind.KERNEL: "kernel",
        Kind.MEMCPY: "gpu_memcpy",
        Kind.MEMSET: "gpu_memset",
        Kind.SYNC: "cuda_sync",
        Kind.DEVICE_ANNOTATION: "gpu_user_annotation",
        Kind.OVERHEAD: "overhead",
    }.items()
}
"""As Kineto calls them now, so that what is written can be read again."""

NUMBER, TEXT, JSON = "number", "text", "json"
SIDES: Final = {
    # table: column: (key in the file, what it is)
    "ops": {
        "dims": ("Input Dims", JSON),
        "types": ("Input type", JSON),
        "concrete": ("Concrete Inputs", JSON),
        "stack": ("Call stack", TEXT),
        "module": ("Module Hierarchy", TEXT),
        "sequence": ("Sequence number", NUMBER),
        "forward_thread": ("Fwd thread id", NUMBER),
    },
    "kernels": {
        "occupancy": ("est. achieved occupancy %", NUMBER),
        "blocks_per_sm": ("blocks per SM", NUMBER),
        "warps_per_sm": ("warps per SM", NUMBER),
        "graph": ("graph id", NUMBER),
    },
    "copies": {"bytes": ("bytes", NUMBER)},
    "collectives": {
        "op": ("Collective name", TEXT),
        "group": ("Process Group Name", TEXT),
        "description": ("Process Group Description", TEXT),
        "ranks": ("Process Group Ranks", JSON),
        "size": ("Group size", NUMBER),
        "sequence": ("Seq", NUMBER),
        "in_elements": ("In msg nelems", NUMBER),
        "out_elements": ("Out msg nelems", NUMBER),
        "dtype": ("dtype", TEXT),
    },
    "syncs": {
        "on_stream": ("wait_on_stream", NUMBER),
        "record_correlation": ("wait_on_cuda_event_record_corr_id", NUMBER),
    },
    "pythons": {
        "id": ("Python id", NUMBER),
        "parent": ("Python parent id", NUMBER),
        "module": ("Python module id", NUMBER),
    },
}
NO_STREAM: Final = 2**32 - 1
"""How CUPTI writes that a synchronisation is of no stream in particular."""
SLICES: Final = {"correlation": "correlation", "external": "External id", "device": "device", "stream": "stream"}


class Values(dict[tuple[str, int], str]):
    """Texts of the trace by form and code, as JSON."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __missing__(self, key: tuple[str, int]) -> str:
        form, code = key
        text = self.trace.text(code)
        out = self[key] = text if form == JSON and _is_json(text) else json.dumps(text)
        return out


def args_of(trace: Trace, part: slice, values: Values) -> list[str]:
    """Of some rows, one after another: the inside of their ``args`` objects."""
    out: list[list[str]] = [[] for _ in range(*part.indices(len(trace)))]
    for name, key in SLICES.items():
        column = getattr(trace.slices, name)[part]
        for at in np.flatnonzero(column >= 0).tolist():
            out[at].append(f'"{key}":{column[at]}')
    for at in np.flatnonzero((trace.slices.device[part] >= 0) & (trace.slices.stream[part] < 0)).tolist():
        out[at].append(f'"stream":{NO_STREAM}')
    for side, keys in SIDES.items():
        table = side_columns(getattr(trace, side))
        begin, end = np.searchsorted(table["row"], [part.start, part.start + len(out)])
        places = (table["row"][begin:end] - part.start).tolist()
        for name, (key, form) in keys.items():
            for at, value in zip(places, table[name][begin:end].tolist(), strict=True):
                if value >= 0:  # neither −1 nor NaN
                    out[at].append(f'"{key}":{value if form == NUMBER else values[form, value]}')
    return [",".join(each) for each in out]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
