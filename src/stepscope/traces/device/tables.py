"""All tables of a device's work, in the order in which people should read them."""

from __future__ import annotations

from stepscope.traces.device.copies import bandwidth_table, bytes_of, copies_table
from stepscope.traces.device.idle import gaps_of, idle_by_operator, idle_table
from stepscope.traces.device.kernels import kernel_classes, kernel_types, kernels_table
from stepscope.traces.device.launches import (
    launches_in,
    launches_table,
    queue_curve,
    queue_table,
    queues_of,
    short_kernels_table,
)
from stepscope.traces.device.sequences import sequences_table
from stepscope.traces.device.temporal import temporal_steps
from stepscope.traces.device.work import Work, work_of
from stepscope.traces.model.table import Table
from stepscope.traces.model.window import Window

__all__ = ["device_tables"]


def device_tables(window: Window, work: Work | None = None) -> list[Table]:
    """Without device work all but the steps' are empty; ``work``: where it is known already."""
    work = work_of(window) if work is None else work
    gaps = gaps_of(work)
    launches = launches_in(work)
    queues = queues_of(work, launches)
    sizes = bytes_of(work)
    return [
        temporal_steps(window),
        kernel_types(work),
        idle_table(work, gaps),
        idle_by_operator(work, gaps),
        kernel_classes(work),
        kernels_table(work),
        launches_table(work, launches),
        short_kernels_table(work),
        queue_table(work, queues),
        queue_curve(work, queues),
        copies_table(work, sizes),
        bandwidth_table(work, sizes),
        sequences_table(work),
    ]
