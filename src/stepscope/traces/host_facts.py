"""What both the tables and the figures of the host's side are made of: found once."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.traces.compiling import Compiling, compiling_of
from stepscope.traces.flops import Flops, flops_found
from stepscope.traces.loading import Loading, loading_of
from stepscope.traces.memory_curve import MemoryCurve, memory_of
from stepscope.traces.syncs import SyncPlace, syncs_of
from stepscope.traces.window import Window

__all__ = ["HostFacts", "host_facts"]


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    syncs: tuple[SyncPlace, ...]
    """The most costly first."""
    loading: Loading
    compiling: Compiling
    flops: Flops
    curve: MemoryCurve | None
    """None: the trace has no memory events."""


def host_facts(window: Window) -> HostFacts:
    return HostFacts(
        syncs=syncs_of(window),
        loading=loading_of(window),
        compiling=compiling_of(window),
        flops=flops_found(window),
        curve=memory_of(window),
    )
