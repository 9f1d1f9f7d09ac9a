"""What kind of thing an event is, whatever the version or vendor that wrote it called it.

Categories changed names over the years (``Kernel`` → ``kernel``, ``Operator`` → ``cpu_op``, ``Runtime`` →
``cuda_runtime``), and vendors have their own.  Only the category decides: that an event has a stream does not make it
device work (Triton's host calls carry ``stream: 0``), nor does a stream make a synchronisation a kernel.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["DEVICE_KINDS", "DEVICE_WORK", "HOST_KINDS", "LAUNCHING", "Kind", "kind_of"]


class Kind(IntEnum):
    """The values stand in cached files: add at the end, never renumber."""

    OTHER = 0
    OP = 1
    """An operator on the host (``aten::mm``), autograd's included."""
    ANNOTATION = 2
    """``record_function``, NVTX ranges and profiler steps, on the host."""
    PYTHON = 3
    """A Python function or an ``nn.Module`` call (``with_stack``)."""
    RUNTIME = 4
    """A call of the device's runtime or driver, on the host: launches, copies, synchronisations."""
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7
    SYNC = 8
    """A wait as seen on the device's side (``cuda_sync``): no work."""
    DEVICE_ANNOTATION = 9
    """The shadow of an annotation on the device: no work either."""
    OVERHEAD = 10
    """The profiler's own."""


CATEGORIES: Final = {
    "cpu_op": Kind.OP,
    "operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "nvtx": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
    "python": Kind.PYTHON,
    "runtime": Kind.RUNTIME,
    "driver": Kind.RUNTIME,
    "hpu_op": Kind.RUNTIME,
    "kernel": Kind.KERNEL,
    "concurrent_kernel": Kind.KERNEL,
    "mtia_ccp_events": Kind.KERNEL,
    "memcpy": Kind.MEMCPY,
    "memset": Kind.MEMSET,
    "gpu_user_annotation": Kind.DEVICE_ANNOTATION,
    "overhead": Kind.OVERHEAD,
}
"""In lower case.  What Kineto also writes and is none of these, on purpose: ``Trace`` (the span of it all),
``cuda_profiler_range`` and ``xpu_scope_profiler`` (kernels once more, with counters), ``cuda_event`` (a record, no
wait), ``collective_comm`` (collectives once more), ``mtia_insight``, ``mtia_counters``, ``external_correlation``."""
ENDINGS: Final = {
    "_runtime": Kind.RUNTIME,
    "_driver": Kind.RUNTIME,
    "_memcpy": Kind.MEMCPY,
    "_memset": Kind.MEMSET,
    "_kernel": Kind.KERNEL,
    "_sync": Kind.SYNC,
}
"""Every vendor has its own: ``cuda_``, ``gpu_``, ``hip_``, ``xpu_``, ``mtia_``, ``glow_``, ``privateuse1_`` …"""

HOST_KINDS: Final = (Kind.OP, Kind.ANNOTATION, Kind.PYTHON, Kind.RUNTIME)
DEVICE_WORK: Final = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
"""What keeps a device busy."""
DEVICE_KINDS: Final = (*DEVICE_WORK, Kind.SYNC, Kind.DEVICE_ANNOTATION)
LAUNCHING: Final = (Kind.RUNTIME,)
"""What may cause device work, by its correlation."""


def kind_of(category: str | None) -> Kind:
    name = (category or "").lower()
    known = CATEGORIES.get(name)
    if known is not None:
        return known
    return next((kind for ending, kind in ENDINGS.items() if name.endswith(ending)), Kind.OTHER)
