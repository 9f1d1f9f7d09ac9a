"""The tables of the host's side of one rank, in the order people should read them."""

from __future__ import annotations

from stepscope.traces.annotations import user_annotations
from stepscope.traces.compiling import compiling
from stepscope.traces.flops import flops
from stepscope.traces.host_facts import HostFacts, host_facts
from stepscope.traces.loading import loading
from stepscope.traces.memory_curve import memory, memory_peak
from stepscope.traces.modules import modules, modules_of
from stepscope.traces.operators import operator_times, operators, operators_by_shape, operators_by_source
from stepscope.traces.pauses import holes
from stepscope.traces.syncs import syncs
from stepscope.traces.table import Table
from stepscope.traces.window import Window

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
