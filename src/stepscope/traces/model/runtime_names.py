"""What a call of the device's runtime or driver does, by its name: CUDA's, HIP's and Intel's."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

__all__ = ["is_asked_to_wait", "is_graph_launch", "is_synchronising"]

SYNCHRONISING: Final = re.compile(
    r"(cuda|cu|hip|mtia|xpu|ze)[A-Za-z]*Synchronize(_\w+)?$"
    r"|(cuda|hip)Memcpy(2D|3D|To(Symbol|Array)|From(Symbol|Array)|Peer|DtoH|HtoD|DtoD|WithStream)?(_ptds|_v\d+)?$"
    r"|cuMemcpy(DtoH|HtoD|DtoD|2D|3D)?(_v2)?$"
    r"|ur(QueueFinish|EventWait)$"
)
"""From the start of the name: calls that come back only when the device has done something.

A copy to the host's pageable memory waits too, whatever its name says.
"""
FREEING: Final = re.compile(r"(cuda|hip)(Free|FreeHost|HostUnregister)$|cuMemFree(_v2)?$")
"""Waits for all that the device has still to do, though nobody asked for it."""
GRAPH_LAUNCH: Final = re.compile(r"(cuda|cu|hip)GraphLaunch")


@lru_cache(maxsize=4096)
def is_synchronising(name: str) -> bool:
    return is_asked_to_wait(name) or FREEING.match(name) is not None


@lru_cache(maxsize=4096)
def is_asked_to_wait(name: str) -> bool:
    """Synchronising, and not only because it frees memory."""
    return SYNCHRONISING.match(name) is not None


@lru_cache(maxsize=4096)
def is_graph_launch(name: str) -> bool:
    return GRAPH_LAUNCH.match(name) is not None
