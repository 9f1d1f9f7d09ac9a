"""Why time passes, on the critical path; of the host, for each piece of its threads' lines."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.host.loading import loader_rows
from stepscope.traces.model import intervals
from stepscope.traces.model.categories import Kind
from stepscope.traces.model.naming import named
from stepscope.traces.model.runtime_names import is_synchronising
from stepscope.traces.model.window import Window
from stepscope.traces.path.host_lines import HostLine

__all__ = ["CAUSES", "Cause", "host_causes", "host_communicates"]

HOST_COLLECTIVE: Final = re.compile(r"^(gloo|mpi|ucc|ccl|xccl):")


class Cause(IntEnum):
    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    LAUNCH_DELAY = 3
    KERNEL_GAP = 4
    SYNCHRONISATION = 5
    HOST_OPERATOR = 6
    HOST_RUNTIME = 7
    DATA_LOADING = 8
    HOST_PYTHON = 9
    OTHER = 10


CAUSES: Final = tuple(cause.name.lower() for cause in Cause)
BY_KIND: Final = np.full(256, int(Cause.HOST_PYTHON), np.int8)
BY_KIND[Kind.OP], BY_KIND[Kind.RUNTIME] = Cause.HOST_OPERATOR, Cause.HOST_RUNTIME


def host_communicates(name: str) -> bool:
    return HOST_COLLECTIVE.match(name) is not None


def host_causes(window: Window, lines: dict[int, HostLine]) -> dict[int, NDArray[np.int8]]:
    """By thread: [pieces of its line]; why it takes that time."""
    trace, slices = window.trace, window.trace.slices
    loaders = loader_rows(window)
    out = {}
    for thread, line in lines.items():
        row = line.row
        kind = np.where(row >= 0, slices.kind[row], Kind.OTHER)
        cause = BY_KIND[kind]
        calls = np.flatnonzero(kind == Kind.RUNTIME)
        cause[calls[named(trace, row[calls], is_synchronising)]] = Cause.SYNCHRONISATION
        ranges = np.flatnonzero(kind == Kind.ANNOTATION)
        cause[ranges[named(trace, row[ranges], host_communicates)]] = Cause.COMMUNICATION
        own = loaders[slices.thread[loaders] == thread]
        if len(own):
            loading = intervals.merge(slices.start_ns[own], slices.end_ns[own])
            cause[intervals.holds(loading, line.start_ns)] = Cause.DATA_LOADING
        out[thread] = cause
    return out
