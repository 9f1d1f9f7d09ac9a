"""What both the tables and the figures of the host's side are made of: found once."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.traces.host.compiling import Compiling, compiling_of
from stepscope.traces.host.flops import Flops, flops_found
from stepscope.traces.host.loading import Loading, loading_of
from stepscope.traces.host.memory_curve import MemoryCurve, memory_of
from stepscope.traces.host.syncs import SyncPlace, syncs_of
from stepscope.traces.model.window import Window

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
