"""A device that waits for the host: because the host had waited for it, because launching takes longer than the
kernels, or for something else.

Without a wait of the host for the device all that comes after would be launched earlier by as much, so a synchronising
call costs what it waits, and no more than the device idles for the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepscope.records.units import count_text, ms_text, share_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import Claim, View, claim_of, halved, holes_of

if TYPE_CHECKING:
    from stepscope.traces.host.syncs import SyncPlace

__all__ = ["find_host"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
PLACES_SHOWN = 8
ON_ITEM = (
    "Keep the value on the device and read it every N steps (.item(), .cpu(), print() and bool() of a tensor wait)."
)
UNKNOWN_PLACE = "Trace with with_stack=True to see the lines: torch.cuda.set_sync_debug_mode(1) warns of them, too."


def find_host(view: View, idle_ns: Ints) -> list[Claim]:
    """``host_sync``, ``gpu_idle_sync``, ``launch_bound``, ``gpu_idle_host``; ``idle_ns`` [R] as in ``loading.py``."""
    idle_ns = np.where(view.on_device, idle_ns, 0)
    claims: list[Claim] = []
    for rule in (_syncs, _idle_in_syncs, _launches, _rest):
        left_ns = idle_ns - sum((claim.idle_ns for claim in claims), np.zeros_like(idle_ns))
        claims += rule(view, np.maximum(left_ns, 0))
    return claims


def _syncs(view: View, idle_ns: Ints) -> list[Claim]:
    wait_ns = view.each(lambda one: sum(place.wait_ns for place in one.host.syncs))
    saved_ns = np.minimum(wait_ns, idle_ns)
    where = (view.share(saved_ns) > thresholds.SYNC_SHARE) & (view.per_step(saved_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    row = int(np.where(where, view.share(wait_ns), -1.0).argmax())
    places = view.analyses[row].host.syncs
    first = max(places, key=lambda place: place.wait_ns)
    count = sum(place.count for place in places) / int(view.steps[row])
    saved_each_ns = view.typical(view.per_step(saved_ns), where)
    return [
        claim_of(
            view,
            "host_sync",
            f"The host waits for the device{view.of_whom(where)} {_times(count)} {view.in_what}, "
            f"mostly in {_named(first)}, and the device then runs dry: {view.each_step(saved_each_ns)}, "
            f"{share_text(view.typical(view.share(saved_ns), where))} of the time.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={
                "waits_per_step": round(count, 1),
                "wait_ms_per_step": round(view.typical(view.per_step(wait_ns), where) / 1e6, 3),
                "device_idle_ms_per_step": round(saved_each_ns / 1e6, 3),
                "places": [_place(place) for place in places[:PLACES_SHOWN]],
            },
            advice=_for_sync(first),
            confidence=0.85,
        )
    ]


def _idle_in_syncs(view: View, idle_ns: Ints) -> list[Claim]:
    """A device that idles while the host is inside a synchronising call waits for another stream or device."""
    saved_ns = np.minimum(view.idle.sync_ns, idle_ns)
    where = (view.share(saved_ns) > thresholds.SYNC_SHARE) & (view.per_step(saved_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    each_ns = view.typical(view.per_step(saved_ns), where)
    return [
        claim_of(
            view,
            "gpu_idle_sync",
            f"The device idles while the host is still inside a synchronising call{view.of_whom(where)}: "
            f"{view.each_step(each_ns)}, {share_text(view.typical(view.share(saved_ns), where))} of the time.",
            where=where,
            saved_ns=saved_ns,
            explained_ns=saved_ns,
            evidence={"sync_idle_ms_per_step": round(each_ns / 1e6, 3)},
            advice=(
                "Wait on the stream (Stream.wait_event, record_stream) and not on the host (synchronize()).",
                UNKNOWN_PLACE,
            ),
            confidence=0.8,
        )
    ]


def _launches(view: View, idle_ns: Ints) -> list[Claim]:
    kernels = view.each(lambda one: one.pace.device.kernel_count)
    # Without communication: its kernels are as long as ranks wait for each other.
    mean_ns = view.times.compute_ns / np.maximum(kernels, 1)
    where = (view.share(idle_ns) >= thresholds.HOST_IDLE_SHARE) & (view.per_step(idle_ns) >= thresholds.FLOOR_NS)
    where &= (
        (view.per_step(kernels) >= thresholds.KERNELS_MANY)
        & (mean_ns < thresholds.SMALL_KERNEL_NS)
        & _queues_empty(view)
    )
    holes_ns = view.each(lambda one: sum(hole_ns for _, hole_ns in holes_of(one)))
    # One long stop of the host, unless it is explained already, is something else than many small ones.
    where &= holes_ns - (view.idle.host_ns - idle_ns) < thresholds.EXPLAINS_SHARE * idle_ns
    if not where.any():
        return []
    count = round(view.typical(view.per_step(kernels), where))
    mean, share = view.typical(mean_ns, where), view.typical(view.share(idle_ns), where)
    row = int(np.where(where, view.share(idle_ns), -1.0).argmax())
    device, host = view.analyses[row].pace.device, view.analyses[row].host
    return [
        claim_of(
            view,
            "launch_bound",
            f"The device waits for launches{view.of_whom(where)} {share_text(share)} of the time: "
            f"{count_text(count, 'kernel')} {view.in_what} of {ms_text(mean / 1e6)} on average "
            "are over before the host has launched the next.",
            where=where,
            saved_ns=halved(idle_ns),
            most_ns=idle_ns,
            explained_ns=idle_ns,
            evidence={
                "idle_ms_per_step": round(view.typical(view.per_step(idle_ns), where) / 1e6, 3),
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


def _queues_empty(view: View) -> Bools:
    """[R]; whether kernels begin as soon as they are launched, mostly; True where it is not known."""

    def empty(queue: float | None, delay_ns: int | None) -> bool:
        if delay_ns is not None:
            return delay_ns < thresholds.DELAY_SMALL_NS
        return queue is None or queue < thresholds.QUEUED_FEW

    return np.array(
        [empty(one.pace.device.mean_queue, one.pace.device.launch_delay_ns_median) for one in view.analyses], np.bool_
    )


def _rest(view: View, idle_ns: Ints) -> list[Claim]:
    where = (view.share(idle_ns) >= thresholds.HOST_IDLE_SHARE) & (view.per_step(idle_ns) >= thresholds.FLOOR_NS)
    if not where.any():
        return []
    each_ns, share = view.typical(view.per_step(idle_ns), where), view.typical(view.share(idle_ns), where)
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
            f"The device waits for the host{view.of_whom(where)}: {view.each_step(each_ns)}, "
            f"{share_text(share)} of the time{mostly}.",
            where=where,
            saved_ns=halved(idle_ns),
            most_ns=idle_ns,
            explained_ns=idle_ns,
            evidence={
                "idle_ms_per_step": round(each_ns / 1e6, 3),
                "idle_share": round(share, 4),
                "before": [{"operator": name, "wait_ms": round(each / 1e6, 3)} for name, each in late[:PLACES_SHOWN]],
                "holes": [{"place": name, "hole_ms": round(each / 1e6, 3)} for name, each in holes[:PLACES_SHOWN]],
            },
            advice=(
                "See under operators and modules what the host does meanwhile: Python loops, preprocessing, logging.",
                "torch.compile, or larger batches, give the device more to do for each thing the host does.",
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
        "wait_ms": round(place.wait_ns / 1e6, 3),
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
        first = (
            "Mend the graph breaks first (TORCH_LOGS=graph_breaks): between the pieces each kernel is launched by hand."
        )
    elif compiled:
        first = 'torch.compile(mode="reduce-overhead") replays the step as a CUDA graph: one launch for all kernels.'
    else:
        first = 'torch.compile(mode="reduce-overhead"), or torch.cuda.graph(), launches many kernels at once.'
    return (first, "Larger batches and fused optimizers (fused=True, foreach=True) make fewer and longer kernels.")
