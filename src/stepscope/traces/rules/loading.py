"""What the host does instead of launching: loading data, collecting garbage, compiling.

Each costs what the device waits for it at the most: a DataLoader that is slow while the device still has work queued
costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepscope.records.units import count_text, ms_text, share_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import Claim, View, claim_of

if TYPE_CHECKING:
    from stepscope.traces.rank import RankAnalysis

__all__ = ["find_compiling", "find_garbage", "find_loading"]

Ints = NDArray[np.int64]
ALL_OF_IT = 0.95
WORKERS = {
    None: "Raise num_workers (from 0: the batch is made in the training process itself), then prefetch_factor.",
    False: "Set num_workers: it is 0, so that the training process makes each batch itself, and waits for it.",
    True: "More workers if there are cores for them, a larger prefetch_factor, persistent_workers=True between epochs.",
}
"""By whether worker processes load already."""


def find_loading(view: View, idle_ns: Ints) -> list[Claim]:
    """``loader_bound``; ``idle_ns`` [R]: waiting for the host that nothing has explained yet, here and below."""
    loading_ns = view.each(lambda one: one.host.loading_ns)
    saved_ns = np.minimum(loading_ns, idle_ns)
    where = view.share(saved_ns) > thresholds.LOADER_SHARE
    where &= view.per_step(loading_ns) >= thresholds.LOADER_FLOOR_NS
    if not where.any():
        return []
    each_ns = view.typical(view.per_step(loading_ns), where)
    share = view.typical(view.share(loading_ns), where)
    lost_ns = view.typical(view.per_step(saved_ns), where)
    on_device = bool(view.on_device[where].any())
    hidden = f", {ms_text(lost_ns / 1e6)} of it with nothing else to do for the device"
    row = int(np.where(where, view.share(saved_ns), -1.0).argmax())
    enough = float(view.share(saved_ns)[row]) >= thresholds.LOADER_WARNING_SHARE
    return [
        claim_of(
            view,
            "loader_bound",
            f"Training waits for the DataLoader{view.of_whom(where)}: {view.each_step(each_ns)}, "
            f"{share_text(share)} of the time{hidden if lost_ns < ALL_OF_IT * each_ns else ''}.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            phase="input",
            evidence={
                "loading_share": round(share, 4),
                "loading_ms_per_step": round(each_ns / 1e6, 3),
                "device_waits_ms_per_step": round(lost_ns / 1e6, 3),
                "worker_processes": view.analyses[row].host.loading_workers,
            },
            at_most="critical" if enough else "info",
            advice=(
                WORKERS[view.analyses[row].host.loading_workers],
                "pin_memory=True and .to(device, non_blocking=True) hide the copy behind the computation."
                if on_device
                else "Find the slow part of the dataset's __getitem__: decoding, augmentation, opening files.",
            ),
        )
    ]


def find_garbage(view: View, idle_ns: Ints) -> list[Claim]:
    """``gc_pauses``."""
    paused_ns = view.each(lambda one: sum(pause.dur_ns for pause in one.host.pauses if pause.kind == "gc"))
    saved_ns = np.minimum(paused_ns, idle_ns)
    where = view.share(saved_ns) > thresholds.GC_SHARE
    where &= view.per_step(saved_ns) >= thresholds.FLOOR_NS
    if not where.any():
        return []
    lengths = [pause.dur_ns for one in view.analyses for pause in one.host.pauses if pause.kind == "gc"]
    count = len(lengths)
    return [
        claim_of(
            view,
            "gc_pauses",
            f"Python's garbage collector stops training{view.of_whom(where)}: {count_text(count, 'collection')}, "
            f"the longest {ms_text(max(lengths) / 1e6)}; {share_text(view.typical(view.share(paused_ns), where))} of "
            "the time.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={
                "collections": count,
                "longest_ms": round(max(lengths) / 1e6, 3),
                "paused_ms_per_step": round(view.typical(view.per_step(paused_ns), where) / 1e6, 3),
            },
            advice=(
                "gc.freeze() after setting up; gc.disable(), and gc.collect() at the same step of all ranks.",
                "Find what makes so many objects: lists of tensors that are kept, reference cycles in callbacks.",
            ),
        )
    ]


def find_compiling(view: View, idle_ns: Ints) -> list[Claim]:
    """``recompiles``, and ``graph_breaks``, which is told where it cannot be priced."""
    return [*_recompiles(view, idle_ns), *_breaks(view)]


def _recompiles(view: View, idle_ns: Ints) -> list[Claim]:
    compiling_ns = view.each(lambda one: one.host.compile_ns)
    again = view.each(lambda one: one.host.recompiles)
    saved_ns = np.minimum(compiling_ns, idle_ns)
    where = (view.share(saved_ns) > thresholds.COMPILE_SHARE) & (view.per_step(saved_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    recompiles, total_ns = int(again[where].max()), view.typical(compiling_ns, where)
    when = f"{count_text(recompiles, 'recompilation')}, " if recompiles else ""
    return [
        claim_of(
            view,
            "recompiles",
            f"torch.compile still compiles in the steps traced{view.of_whom(where)}: {when}{ms_text(total_ns / 1e6)}, "
            f"{share_text(view.typical(view.share(compiling_ns), where))} of the time.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={"recompiles": recompiles, "compile_ms": round(total_ns / 1e6, 3)},
            advice=(
                "TORCH_LOGS=recompiles names the guard that failed; mark_dynamic() where sizes vary.",
                "If these are the first steps of the job, it is the warm-up: trace later ones.",
            ),
        )
    ]


def _breaks(view: View) -> list[Claim]:
    """Regions inside of others, or several one after the other, which may be how somebody wanted it."""
    breaks = view.each(lambda one: one.host.graph_breaks)
    entered = view.per_step(view.each(_entered))
    where = (breaks >= thresholds.BREAKS_AT_LEAST) | (entered >= thresholds.PIECES_AT_LEAST)
    if not where.any():
        return []
    most, times = int(breaks.max()), round(float(entered.max()))
    regions = int(view.each(lambda one: one.host.compiled_regions)[where].max())
    what = (
        f"{count_text(most, 'graph break')} in a step, after each of which"
        if most
        else f"entered {times:,} times a step, between which"
    )
    return [
        claim_of(
            view,
            "graph_breaks",
            f"The compiled model is cut into pieces{view.of_whom(where)}: {what} Python runs again.",
            where=where,
            saved_ns=np.zeros(len(view.ranks), np.int64),
            evidence={
                "graph_breaks": most,
                "entered_per_step": round(float(entered.max()), 2),
                "compiled_regions": regions,
            },
            advice=(
                "TORCH_LOGS=graph_breaks names the lines: print(), .item(), data-dependent branches, unknown calls.",
                "torch.compile(fullgraph=True) turns them into errors while you mend them.",
            ),
            confidence=0.8 if most else 0.5,
        )
    ]


def _entered(one: RankAnalysis) -> int:
    """Compiled regions, in all steps."""
    table = one.tables.get("compiling")
    return sum(row["entered"] for row in table.to_rows()) if table else 0
