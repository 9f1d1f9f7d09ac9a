"""The tables of the host's side of one rank, in the order people should read them."""

from __future__ import annotations

from stepscope.traces.host.annotations import user_annotations
from stepscope.traces.host.compiling import compiling
from stepscope.traces.host.facts import HostFacts, host_facts
from stepscope.traces.host.flops import flops
from stepscope.traces.host.loading import loading
from stepscope.traces.host.memory_curve import memory, memory_peak
from stepscope.traces.host.modules import modules, modules_of
from stepscope.traces.host.operators import operator_times, operators, operators_by_shape, operators_by_source
from stepscope.traces.host.pauses import holes
from stepscope.traces.host.syncs import syncs
from stepscope.traces.model.table import Table
from stepscope.traces.model.window import Window

__all__ = ["host_tables"]


def host_tables(window: Window, facts: HostFacts | None = None) -> list[Table]:
    """Those of which the trace has anything; ``facts``: where they are known already."""
    facts = facts or host_facts(window)
    times = operator_times(window)
    tree, curve = modules_of(window, times), facts.curve
    found = [
        user_annotations(window),
        operators(window, times) if len(times.rows) else None,
        operators_by_source(window, times),
        operators_by_shape(window, times),
        modules(window, times, tree) if tree is not None else None,
        syncs(window, facts.syncs),
        loading(window, facts.loading),
        holes(window),
        compiling(facts.compiling),
        flops(window, facts.flops),
        memory_peak(window, curve, tree) if curve is not None else None,
        memory(window, curve) if curve is not None else None,
    ]
    return [table for table in found if table is not None and table.rows]
