"""Rules about the host: loading, garbage collection, compiling, Python, synchronizing calls, launches.

A device waits for the host because the host had waited for it, because launching takes longer than the kernels, or for
another reason. If the host did not wait for the device, everything after the wait would be launched earlier by that
time. A synchronizing call therefore costs what it waits, but no more than the device idles for the host.

``idle_ns`` [R] is the waiting for the host that no earlier rule has explained (``rulebook.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.judge.chain import Claim
from stepscope.records.text import count_text, ms_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import JobView, claim_of, halved, holes_of, in_ms

if TYPE_CHECKING:
    from stepscope.traces.host.stalls import SyncPlace
    from stepscope.traces.rank_analysis import RankAnalysis

__all__ = [
    "find_compiling",
    "find_contention",
    "find_garbage",
    "find_host_copies",
    "find_idle",
    "find_idle_in_syncs",
    "find_launches",
    "find_loading",
    "find_python",
    "find_syncs",
    "find_unfused",
]


# -- waits for the host -----------------------------------------------------------------------------------------------

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
PLACES_SHOWN = 8
ON_ITEM = (
    "Keep the value on the device and read it every N steps (.item(), .cpu(), print() and bool() of a tensor wait)."
)
UNKNOWN_PLACE = (
    "Record the trace with with_stack=True to see the lines. torch.cuda.set_sync_debug_mode(1) also warns about them."
)


def find_syncs(view: JobView, idle_ns: Ints) -> list[Claim]:
    """Find ``host_sync``."""
    wait_ns = view.each(lambda analysis: sum(place.wait_ns for place in analysis.host.syncs))
    saved_ns = np.minimum(wait_ns, idle_ns)
    where = (view.share(saved_ns) > thresholds.SYNC_SHARE) & (view.per_step(saved_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, view.share(wait_ns), -1.0).argmax())
    places = view.analyses[row].host.syncs
    first = max(places, key=lambda place: place.wait_ns)
    count = sum(place.count for place in places) / int(view.steps[row])
    saved_each_ns = view.each_ns(saved_ns, where)
    return [
        claim_of(
            view,
            "host_sync",
            f"The host waits for the device {_times(count)} {view.in_what}{view.of_whom(where)}, "
            f"mostly in {_named(first)}, and the device then runs dry: {view.each_step(saved_each_ns)}.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={
                "waits_per_step": round(count, 1),
                "wait_ms_per_step": in_ms(view.each_ns(wait_ns, where)),
                "device_idle_ms_per_step": in_ms(saved_each_ns),
                "places": [_place(place) for place in places[:PLACES_SHOWN]],
            },
            advice=_for_sync(first),
            confidence=0.85,
        )
    ]


def find_idle_in_syncs(view: JobView, idle_ns: Ints) -> list[Claim]:
    """Find devices that idle while the host is in a synchronizing call: they wait for another stream or device."""
    saved_ns = np.minimum(view.idle.sync_ns, idle_ns)
    where = (view.share(saved_ns) > thresholds.SYNC_SHARE) & (view.per_step(saved_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    each_ns = view.each_ns(saved_ns, where)
    return [
        claim_of(
            view,
            "gpu_idle_sync",
            f"The device idles while the host is still inside a synchronizing call{view.of_whom(where)}: "
            f"{view.each_step(each_ns)}.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={"sync_idle_ms_per_step": in_ms(each_ns)},
            advice=(
                "Wait on the stream (Stream.wait_event, record_stream) and not on the host (synchronize()).",
                UNKNOWN_PLACE,
            ),
            confidence=0.8,
        )
    ]


def find_launches(view: JobView, idle_ns: Ints) -> list[Claim]:
    """Find ``launch_bound``."""
    kernels = view.each(lambda analysis: analysis.pace.device.kernel_count)
    # Leave out communication: its kernels include the wait for other ranks.
    mean_ns = view.times.compute_ns / np.maximum(kernels, 1)
    where = (view.share(idle_ns) >= thresholds.HOST_IDLE_SHARE) & (view.per_step(idle_ns) >= thresholds.FLOOR_NS)
    where &= (
        (view.per_step(kernels) >= thresholds.KERNELS_MANY)
        & (mean_ns < thresholds.SMALL_KERNEL_NS)
        & _queues_empty(view)
    )
    holes_ns = view.each(lambda analysis: sum(hole_ns for _, hole_ns in holes_of(analysis)))
    # One long stop of the host, unless already explained, is a different problem from many small ones.
    where &= holes_ns - (view.idle.host_ns - idle_ns) < thresholds.EXPLAINS_SHARE * idle_ns
    if not where.any():
        return []
    count = round(view.each_ns(kernels, where))
    mean, each_ns = view.typical(mean_ns, where), view.each_ns(idle_ns, where)
    row = int(np.where(where, view.share(idle_ns), -1.0).argmax())
    device, host = view.analyses[row].pace.device, view.analyses[row].host
    return [
        claim_of(
            view,
            "launch_bound",
            f"The device waits for launches {view.each_step(each_ns)}{view.of_whom(where)}: "
            f"{count_text(count, 'kernel')} {view.in_what} of {ms_text(mean / 1e6)} on average "
            "are over before the host has launched the next.",
            where=where,
            saved_ns=halved(idle_ns),
            most_ns=idle_ns,
            explained_ns=idle_ns,
            evidence={
                "idle_ms_per_step": in_ms(each_ns),
                "kernels_per_step": count,
                "kernel_us": round(mean / 1e3, 3),
                "short_kernel_share": round(device.short_kernel_count / max(device.kernel_count, 1), 4),
                "mean_queue": None if device.mean_queue is None else round(device.mean_queue, 2),
                "launch_delay_ns": device.launch_delay_ns_median,
                "graph_launches": device.graph_launches,
            },
            advice=_for_launches(compiled=host.compiled_regions > 0, breaks=host.graph_breaks),
            confidence=0.85,
        )
    ]


def _queues_empty(view: JobView) -> Bools:
    """Return whether kernels mostly start as soon as they are launched, [R]; True where unknown."""

    def empty(queue: float | None, delay_ns: int | None) -> bool:
        if delay_ns is not None:
            return delay_ns < thresholds.DELAY_SMALL_NS
        return queue is None or queue < thresholds.QUEUED_FEW

    return np.array(
        [
            empty(analysis.pace.device.mean_queue, analysis.pace.device.launch_delay_ns_median)
            for analysis in view.analyses
        ],
        np.bool_,
    )


def find_idle(view: JobView, idle_ns: Ints) -> list[Claim]:
    """Find ``gpu_idle_host``."""
    where = (view.share(idle_ns) >= thresholds.HOST_IDLE_SHARE) & (view.per_step(idle_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    each_ns, share = view.each_ns(idle_ns, where), view.typical(view.share(idle_ns), where)
    row = int(np.where(where, view.share(idle_ns), -1.0).argmax())
    late, holes = view.analyses[row].pace.device.idle_before, holes_of(view.analyses[row])
    enough_ns = thresholds.EXPLAINS_SHARE * int(idle_ns[row])
    explained_ns = int(view.idle.host_ns[row] - idle_ns[row])
    if holes and holes[0][1] - explained_ns >= enough_ns:
        mostly = f", mostly in {holes[0][0]}"
    else:
        mostly = f", mostly before {late[0][0]}" if late and late[0][1] >= enough_ns else ""
    return [
        claim_of(
            view,
            "gpu_idle_host",
            f"The device waits for the host{view.of_whom(where)}: {view.each_step(each_ns)}{mostly}.",
            where=where,
            saved_ns=halved(idle_ns),
            most_ns=idle_ns,
            explained_ns=idle_ns,
            evidence={
                "idle_ms_per_step": in_ms(each_ns),
                "idle_share": round(share, 4),
                "before": [{"operator": name, "wait_ms": in_ms(each)} for name, each in late[:PLACES_SHOWN]],
                "holes": [{"place": name, "hole_ms": in_ms(each)} for name, each in holes[:PLACES_SHOWN]],
            },
            advice=(
                "The operator and module tables show what the host does: Python loops, preprocessing, logging.",
                f"{'Larger' if view.compiled(where) else 'torch.compile, or larger'} batches give it more to do.",
            ),
            confidence=0.8,
        )
    ]


def _times(count: float) -> str:
    return "once" if round(count) <= 1 else f"{round(count):,} times"


def _named(place: SyncPlace) -> str:
    return f"{place.call} at {place.source}" if place.source else place.call


def _place(place: SyncPlace) -> dict[str, Any]:
    return {
        "call": place.call,
        "source": place.source,
        "count": place.count,
        "wait_ms": in_ms(place.wait_ns),
    }


def _for_sync(first: SyncPlace) -> tuple[str, ...]:
    if "DeviceSynchronize" in first.call:
        return (
            "Take torch.cuda.synchronize() out of the step: time with events, or every hundredth step.",
            ON_ITEM if first.source else UNKNOWN_PLACE,
        )
    return (ON_ITEM, f"Begin at {first.source}." if first.source else UNKNOWN_PLACE)


def _for_launches(*, compiled: bool, breaks: int) -> tuple[str, ...]:
    if compiled and breaks:
        first = "Fix the graph breaks first (TORCH_LOGS=graph_breaks): kernels between graphs are launched one by one."
    elif compiled:
        first = 'torch.compile(mode="reduce-overhead") replays the step as a CUDA graph: one launch for all kernels.'
    else:
        first = 'torch.compile(mode="reduce-overhead"), or torch.cuda.graph(), launches many kernels at once.'
    return (first, "Larger batches and fused optimizers (fused=True, foreach=True) make fewer and longer kernels.")


# -- loading, garbage collection, compiling ---------------------------------------------------------------------------
# What the host does instead of launching. Each costs at most what the device waits for it: a slow DataLoader costs
# nothing while the device still has queued work.

WORKERS = {
    None: "Raise num_workers (with 0, the training process prepares each batch itself), then prefetch_factor.",
    False: "Set num_workers: it is 0, so the training process prepares each batch itself.",
    True: "Use more workers if cores are free, a larger prefetch_factor, persistent_workers=True between epochs.",
}
"""Keyed by whether worker processes already load the data."""


def find_loading(view: JobView, idle_ns: Ints) -> list[Claim]:
    """Find ``loader_bound``."""
    loading_ns = view.each(lambda analysis: analysis.host.loading_ns)
    saved_ns = np.minimum(loading_ns, idle_ns)
    where = view.share(saved_ns) > thresholds.LOADER_SHARE
    where &= view.per_step(loading_ns) >= thresholds.LOADER_FLOOR_NS
    if not where.any():
        return []
    each_ns = view.each_ns(loading_ns, where)
    share = view.typical(view.share(loading_ns), where)
    lost_ns = view.each_ns(saved_ns, where)
    on_device = bool(view.on_device[where].any())
    hidden = f", {ms_text(lost_ns / 1e6)} of it with the device idle"
    row = int(np.where(where, view.share(saved_ns), -1.0).argmax())
    enough = float(view.share(saved_ns)[row]) >= thresholds.LOADER_WARNING_SHARE
    return [
        claim_of(
            view,
            "loader_bound",
            f"Training waits for the DataLoader{view.of_whom(where)}: {view.each_step(each_ns)}"
            f"{hidden if lost_ns < thresholds.LOADER_EXPOSED_SHARE * each_ns else ''}.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            phase="input",
            evidence={
                "loading_share": round(share, 4),
                "loading_ms_per_step": in_ms(each_ns),
                "device_waits_ms_per_step": in_ms(lost_ns),
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


def find_garbage(view: JobView, idle_ns: Ints) -> list[Claim]:
    """Find ``gc_pauses``."""
    paused_ns = view.each(lambda analysis: sum(pause.dur_ns for pause in analysis.host.pauses if pause.kind == "gc"))
    saved_ns = np.minimum(paused_ns, idle_ns)
    where = view.share(saved_ns) > thresholds.GC_SHARE
    where &= view.per_step(saved_ns) >= thresholds.FLOOR_NS
    if not where.any():
        return []
    lengths = [pause.dur_ns for analysis in view.analyses for pause in analysis.host.pauses if pause.kind == "gc"]
    count, each_ns = len(lengths), view.each_ns(paused_ns, where)
    return [
        claim_of(
            view,
            "gc_pauses",
            f"Python's garbage collector stops training{view.of_whom(where)}: {count_text(count, 'collection')}, "
            f"the longest {ms_text(max(lengths) / 1e6)}; {view.each_step(each_ns)}.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={
                "collections": count,
                "longest_ms": in_ms(max(lengths)),
                "paused_ms_per_step": in_ms(each_ns),
            },
            advice=(
                "Call gc.freeze() after setup; or gc.disable(), and gc.collect() at the same step on all ranks.",
                "Find what creates so many objects: lists that keep tensors, reference cycles in callbacks.",
            ),
        )
    ]


def find_compiling(view: JobView, idle_ns: Ints) -> list[Claim]:
    """Find ``recompiles``, and ``graph_breaks``, which is reported without a price."""
    return [*_recompiles(view, idle_ns), *_breaks(view)]


def _recompiles(view: JobView, idle_ns: Ints) -> list[Claim]:
    compiling_ns = view.each(lambda analysis: analysis.host.compile_ns)
    recompiled = view.each(lambda analysis: analysis.host.recompiles)
    saved_ns = np.minimum(compiling_ns, idle_ns)
    where = (view.share(saved_ns) > thresholds.COMPILE_SHARE) & (view.per_step(saved_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    recompiles, total_ns = int(recompiled[where].max()), view.typical(compiling_ns, where)
    when = f"{count_text(recompiles, 'recompilation')}, " if recompiles else ""
    return [
        claim_of(
            view,
            "recompiles",
            f"torch.compile still compiles in the traced steps{view.of_whom(where)}: {when}"
            f"{view.each_step(view.each_ns(compiling_ns, where))}.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={"recompiles": recompiles, "compile_ms": in_ms(total_ns)},
            advice=(
                "TORCH_LOGS=recompiles shows which guard failed; use mark_dynamic() where sizes vary.",
                "If these are the first steps of the job, it is the warm-up: trace later ones.",
            ),
        )
    ]


def _breaks(view: JobView) -> list[Claim]:
    """Find compiled regions inside others, or several in a row, which may be intended."""
    breaks = view.each(lambda analysis: analysis.host.graph_breaks)
    entered = view.per_step(view.each(_entered))
    where = (breaks >= thresholds.BREAKS_AT_LEAST) | (entered >= thresholds.PIECES_AT_LEAST)
    if not where.any():
        return []
    most, times = int(breaks.max()), round(float(entered.max()))
    regions = int(view.each(lambda analysis: analysis.host.compiled_regions)[where].max())
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
                "torch.compile(fullgraph=True) turns them into errors while you fix them.",
            ),
            confidence=0.8 if most else 0.5,
        )
    ]


def _entered(analysis: RankAnalysis) -> int:
    """Count the entries into compiled regions over all steps."""
    table = analysis.tables.get("compiling")
    return sum(row["entered"] for row in table.to_rows()) if table else 0


# -- Python -----------------------------------------------------------------------------------------------------------
# Python that keeps a process without a device from computing: loops, preprocessing, sleeps, files. For a process with a
# device, its wait for the host covers this and is reported instead.


def find_python(view: JobView, idle_ns: Ints) -> list[Claim]:
    """Find ``host_python``."""
    stopped_ns = view.each(lambda analysis: sum(stop.total_ns for stop in analysis.host.stops))
    saved_ns = np.where(view.on_device, 0, np.minimum(stopped_ns, idle_ns))
    where = (view.share(saved_ns) >= thresholds.PYTHON_SHARE) & (view.per_step(saved_ns) >= thresholds.PYTHON_FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, view.share(saved_ns), -1.0).argmax())
    stops = view.analyses[row].host.stops
    each_ns, share = view.each_ns(saved_ns, where), view.typical(view.share(saved_ns), where)
    named = stops[0].named
    enough = stops[0].total_ns >= thresholds.EXPLAINS_SHARE * int(stopped_ns[row])
    mostly = f", mostly in {named}" if named and enough else ""
    return [
        claim_of(
            view,
            "host_python",
            f"The main thread runs no operator{view.of_whom(where)} for {view.each_step(each_ns)}{mostly}: "
            "Python code, or a wait.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={
                "python_ms_per_step": in_ms(each_ns),
                "python_share": round(share, 4),
                "stops": [
                    {"place": stop.named, "count": stop.count, "stop_ms": in_ms(stop.total_ns)}
                    for stop in stops[:PLACES_SHOWN]
                ],
            },
            advice=(
                f"Begin at {stops[0].place}."
                if stops[0].place
                else "Record the trace with with_stack=True to see the lines.",
                "Replace loops over elements by tensor operations; move logging and file access to another thread.",
            ),
            confidence=0.85,
        )
    ]


def find_contention(view: JobView) -> list[Claim]:
    """Find ``gil_contention``: while two threads run Python, one waits for the interpreter's lock."""
    shared_ns = view.each(lambda analysis: analysis.host.contention.shared_ns)
    lost_ns = np.minimum(shared_ns, view.idle.host_ns)
    where = (view.share(lost_ns) >= thresholds.GIL_SHARE) & (view.per_step(lost_ns) >= thresholds.PYTHON_FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, view.share(lost_ns), -1.0).argmax())
    found = view.analyses[row].host.contention
    each_ns = view.each_ns(shared_ns, where)
    others = count_text(found.threads, "other thread")
    run = "runs" if found.threads == 1 else "run"
    return [
        claim_of(
            view,
            "gil_contention",
            f"{others[0].upper()}{others[1:]} {run} Python while the training thread does{view.of_whom(where)}: "
            f"{view.each_step(each_ns)}{f', mostly in {found.place}' if found.place else ''}. Only one of them can "
            "hold the GIL.",
            where=where,
            saved_ns=halved(lost_ns),
            most_ns=lost_ns,
            evidence={"shared_ms_per_step": in_ms(each_ns), "threads": found.threads, "place": found.place},
            advice=(
                f"Move the work of {found.place or 'that thread'} to a process (DataLoader workers, multiprocessing).",
                "Threads that only wait (locks, files, sockets) do not hold the GIL; loops over Python objects do.",
            ),
            at_most="warning",
            confidence=0.6,
        )
    ]


# -- operators --------------------------------------------------------------------------------------------------------


def find_host_copies(view: JobView) -> list[Claim]:
    """Find ``host_copies``: a rank without a device that copies tensors for much of its step."""
    copied_ns = np.where(view.on_device, 0, view.each(lambda analysis: _copies_of(analysis)[0]))
    where = (view.share(copied_ns) >= thresholds.HOST_COPIES_SHARE) & (view.per_step(copied_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, view.share(copied_ns), -1.0).argmax())
    _, calls, source = _copies_of(view.analyses[row])
    each_ns = view.each_ns(copied_ns, where)
    return [
        claim_of(
            view,
            "host_copies",
            f"Copying tensors on the host (aten::copy_) takes {view.each_step(each_ns)}{view.of_whom(where)}"
            f"{f', mostly from {source}' if source else ''}.",
            where=where,
            saved_ns=halved(copied_ns),
            most_ns=copied_ns,
            evidence={
                "copy_ms_per_step": in_ms(each_ns),
                "copies_per_step": round(calls / int(view.steps[row]), 1),
                "place": source,
            },
            advice=(
                "Create tensors with their final dtype and layout; look for .to(), .contiguous() and .clone().",
                "Mixed data types and channels_last next to contiguous tensors copy in every layer.",
            ),
            at_most="warning",
            confidence=0.7,
        )
    ]


def _copies_of(analysis: RankAnalysis) -> tuple[int, int, str | None]:
    """The time in ``aten::copy_``, its calls, and the line that spends most of it."""
    table = analysis.tables.get("operators")
    rows = [row for row in table.to_rows() if row["operator"] == "aten::copy_"] if table else []
    lines = analysis.tables.get("operators_by_source")
    places = [
        (row["host_self_ns"], row["source"])
        for row in (lines.to_rows() if lines else ())
        if row.get("operator") == "aten::copy_" and row.get("source")
    ]
    time_ns, calls = sum(row["host_self_ns"] for row in rows), sum(row["calls"] for row in rows)
    return time_ns, calls, max(places, default=(0, None))[1]


def find_unfused(view: JobView, idle_ns: Ints) -> list[Claim]:
    """Find ``unfused_optimizer``: it updates each parameter with separate calls."""

    def calls(analysis: RankAnalysis) -> int:
        use = analysis.host.optimizer
        return 0 if use.together else max(use.operators, use.kernels)

    host_ns = np.minimum(view.each(lambda analysis: analysis.host.optimizer.host_ns), idle_ns)
    spent_ns = np.maximum(host_ns, view.each(lambda analysis: analysis.host.optimizer.kernel_ns))
    count = view.per_step(view.each(calls))
    where = (count >= thresholds.OPTIMIZER_CALLS) & (view.share(spent_ns) >= thresholds.OPTIMIZER_SHARE)
    where &= view.per_step(spent_ns) >= thresholds.FLOOR_NS
    if not where.all() and len(np.unique(count)) == 1:
        # All ranks make the same calls: a rank that takes longer for them is slow, its optimizer is like the others'.
        where = np.full(len(where), int(where.sum()) > len(where) // 2)
    if not where.any():
        return []
    row = int(np.where(where, view.share(spent_ns), -1.0).argmax())
    each_ns = view.each_ns(spent_ns, where)
    return [
        claim_of(
            view,
            "unfused_optimizer",
            f"{view.analyses[row].host.optimizer.name} updates each parameter for itself{view.of_whom(where)}, with "
            f"{count_text(round(count[row]), 'call')} {view.in_what}: {view.each_step(each_ns)}.",
            where=where,
            saved_ns=halved(spent_ns),
            most_ns=spent_ns,
            phase="optimizer",
            evidence={"optimizer_ms_per_step": in_ms(each_ns), "calls_per_step": round(float(count[row]), 1)},
            advice=(
                "fused=True (Adam, AdamW, SGD, Adagrad; on GPUs and CPUs) updates all parameters in a few calls.",
                "foreach=True does nearly the same where fused is not available; so does torch.compile of the step.",
            ),
            at_most="warning",
            confidence=0.8,
        )
    ]
