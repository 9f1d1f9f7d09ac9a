"""What to do about a hang, by its kind and what is known of its culprits."""

from __future__ import annotations

from stepscope.flight.wording import ranks_text
from stepscope.hangs.words import file_name, place_text
from stepscope.records.collectives import group_name
from stepscope.records.hang import HangRecord

__all__ = ["advice_for"]

FETCHING = "torch/utils/data/_utils/fetch.py"

BY_KIND = {
    "hang_missing_collective": (
        "All ranks of a group have to make the same calls in the same order.",
        "Look for a branch, an early return or an exception handler that only some ranks take.",
    ),
    "hang_mismatch": (
        "Compare what decides on this call (shapes, dtypes, a condition) on a culprit and on another rank.",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL checks each call against the other ranks', at a price.",
    ),
    "hang_deadlock": (
        "The ranks enter their groups in different orders: make all of them take the groups in the same one.",
        "Or a rank left out a call: look for a branch, an early return or an exception handler that only some take.",
    ),
    "hang_device": (
        "dmesg shows the Xid errors of a GPU that failed; CUDA_LAUNCH_BLOCKING=1 shows which kernel does not end.",
    ),
    "rank_crashed": ("The others wait for a rank that is gone: end the job, and look into its log for the reason.",),
    "rank_lost": ("Look at the hosts of those ranks: what their own watchdog found is in hangs/ if it got through.",),
    "hang_unknown": ("py-spy dump --native --pid PID shows where the ranks are in C, if it may be used here.",),
}


def advice_for(record: HangRecord) -> tuple[str, ...]:
    if record.over == "recovered":
        return (*_where(record), "If that is to be expected, a longer threshold keeps it from being reported.")
    if record.kind == "hang_input":
        return (*_where(record), *_of_input(record))
    if record.kind == "hang_host":
        return (*_where(record), *_of_host(record))
    if record.kind == "hang_deadlock" and (left_out := _left_out(record)):
        return left_out
    if record.kind == "rank_crashed" and record.over is not None:
        return (*_where(record), "Look into its log for the reason.")
    if record.kind == "rank_lost" and record.culprits:
        return (*_where(record), "Look at that host and at the way to it: power, kernel log, network.")
    return (*_where(record), *BY_KIND.get(record.kind, ()))


def _where(record: HangRecord) -> tuple[str, ...]:
    at = next((culprit.at for culprit in record.culprits if culprit.at is not None), None)
    if at is None or not at.line:
        return ()
    return (f"Begin at {file_name(at.file)}:{at.line} in {at.function}.",)


def _left_out(record: HangRecord) -> tuple[str, ...]:
    """Of ranks that are in a later step than those that wait for them in a call: they went past it."""
    there = {rank.rank: rank for rank in record.ranks}
    for row in record.flight.get("wait_for", ()):
        waiters, waited = ([there[rank] for rank in row[side] if rank in there] for side in ("waiters", "waited"))
        early, late = ([one.step for one in side if one.step is not None] for side in (waiters, waited))
        if not early or len(early) < len(waiters) or len(late) < len(row["waited"]) or max(early) >= min(late):
            continue
        at = next((place_text(one.at, {}) for one in waiters if one.at is not None), "")
        call = f"{row['op']} number {row['sequence']} of {group_name(row['group'], row['description'])}"
        wait = "waited" if record.over is not None else "waits" if len(waiters) == 1 else "wait"
        told = (
            f"{ranks_text(row['waited'], start=True)} went on to step {min(late):,} without {call}, in which "
            f"{ranks_text(row['waiters'])} {wait} in step {max(early):,}"
            f"{f', at {at}' if at else ''}: look for a branch that only some ranks take."
        )
        return told, "If it was to come later there, make all ranks take the groups in the same order."
    return ()


def _of_input(record: HangRecord) -> tuple[str, ...]:
    reasons = " ".join(culprit.reason for culprit in record.culprits)
    if "SIGSTOP" in reasons:
        lets = "lets" if record.over is None else "would have let"
        return (f"Somebody stopped the worker process: kill -CONT its pid {lets} it go on.",)
    if "died" in reasons or "are gone" in reasons or "were gone" in reasons:
        return ("A worker that died silently was often killed for want of memory (dmesg) or by a full /dev/shm.",)
    if _makes_batches_itself(record):
        return (
            "The training process makes its batches itself (num_workers=0): look at what that line waits for.",
            "DataLoader(num_workers=1, timeout=…) turns a batch that never comes into an exception.",
        )
    return ("DataLoader(timeout=…) turns a worker that never answers into an exception; look at what it reads from.",)


def _makes_batches_itself(record: HangRecord) -> bool:
    """Whether a culprit stands in the fetching of samples, which is in its workers where it has any: without them a
    DataLoader refuses a timeout."""
    culprits = {culprit.rank for culprit in record.culprits}
    return any(
        frame.file.endswith(FETCHING)
        for group in record.stacks
        if not group.workers_of and culprits.intersection(group.ranks)
        for thread in group.threads
        if thread.main
        for frame in thread.frames
    )


def _of_host(record: HangRecord) -> tuple[str, ...]:
    pids = {rank.rank: rank.pid for rank in record.ranks}
    first = record.culprits[0] if record.culprits else None
    reason = first.reason if first is not None else ""
    if first is not None and "stopped" in reason:
        if record.over is not None:
            return ("SIGSTOP comes from a person or a debugger; kill -CONT would have let it go on.",)
        return (f"kill -CONT {pids.get(first.rank, 'PID')} lets it go on; SIGSTOP comes from a person or a debugger.",)
    if "GIL" in reason:
        return ("The C call at that line never gives the GIL back: it stops all threads of the process.",)
    if "disk" in reason:
        return ("The disk or network file system does not answer: look at dmesg and at its server.",)
    return ()
