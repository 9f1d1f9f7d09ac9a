"""What to do about steps that are slow at times, in words; as ``advice``, no numbers are judged here."""

from __future__ import annotations

from stepscope.records.phases import COMPUTE_PHASES, GRAPH_PHASE

__all__ = ["for_growth", "for_jitter", "for_slow_stretch", "for_stall"]

COLLECT = (
    "If it is Python's garbage collection: gc.freeze() after the set-up, gc.disable() and gc.collect() at set points.",
    "Or work of the loop that is done now and then: logging, printing, metrics with .item(), saving.",
)
LOOK_FOR = 'See what the steps have in common: stepscope sql "select * from steps order by wall_ns desc limit 20".'


def for_jitter(
    *,
    phase: str | None,
    period: int | None,
    num_workers: int | None,
    at_epoch_starts: bool,
    varying_rank: bool,
    nccl: bool,
    place: str = "",
) -> tuple[str, ...]:
    """``nccl``: whether that is what the ranks exchange with; ``place``: a line of code in which they were seen."""
    if place:
        return (f"Look at {place}: that is where the ranks were seen in these steps.",)
    if phase == "input":
        if at_epoch_starts:
            return (
                "The waits come when an epoch starts: persistent_workers=True keeps the DataLoader's workers.",
                "If the epochs are short by accident, a longer one (or an endless sampler) starts fewer iterators.",
            )
        if period is not None and period == num_workers:
            return (
                f"Every num_workers-th step waits ({num_workers}): the workers fall behind; raise num_workers.",
                "If the cores are used up, do less per sample or keep decoded data.",
            )
        first = (
            f"Something in the dataset comes every {period} steps: opening the next file or shard; read ahead."
            if period
            else "Some batches take much longer to make: look at their largest samples and at the storage."
        )
        return first, "A larger prefetch_factor rides out single slow batches, more workers do not."
    if phase == "comm":
        return (
            "The exchange itself is slow at times: other jobs on the network, or a slower way taken now and then.",
            "NCCL_DEBUG=INFO shows which way it takes." if nccl else LOOK_FOR,
        )
    if phase == "h2d":
        return ("Copies that are slow at times: pageable memory; pin_memory=True keeps batches pinned.", LOOK_FOR)
    if phase == "optimizer":
        return ("Look for what the optimizer does now and then: a logged norm, an EMA, a scheduler.", LOOK_FOR)
    if varying_rank and period is None:
        return (
            "Another rank each time: the machine (other processes, interrupts) or batches of varying size.",
            "On a crowded CPU fewer threads (OMP_NUM_THREADS) and fewer DataLoader workers steady the steps.",
        )
    if phase not in (None, "forward", "backward", GRAPH_PHASE, "other"):
        return (f"Look at what the phase {phase!r} does in these steps only.", LOOK_FOR)
    if period is not None:
        return (f"Look for what the loop does every {period} steps.", *COLLECT)
    return COLLECT


def for_stall(*, phase: str | None, alone: bool, host: str, nccl: bool) -> tuple[str, ...]:
    """``alone``: one rank had it and the others waited; ``nccl``: whether that is what they exchange with."""
    where = f" (host {host})" if alone and host else ""
    retries = "; NCCL_DEBUG=INFO shows retries" if nccl else ""
    look = {
        "input": "One wait for data: a cold or remote file, a worker that died and was replaced, a full page cache.",
        "comm": f"All ranks waited for the exchange: a network hiccup{retries}.",
        "h2d": "One slow copy to the device: memory was being moved or swapped.",
        "optimizer": "The first use of something in the optimizer, or the process was stopped for a while.",
        "checkpoint": "Saving took this long once: the storage was busy.",
        "eval": "Evaluation took this long once.",
    }.get(phase or "", "A first kernel of a new shape, garbage collection, swapping, or the process was stopped.")
    if phase == "other":
        look = "The loop did something of its own there: saving, an evaluation, a request over the network."
    return (
        f"{look[:-1]}{where}." if where else look,
        "It happened once and needs nothing, unless it comes again: look at the log of that time.",
    )


def for_growth(*, phase: str | None) -> tuple[str, ...]:
    if phase == "input":
        first = (
            "Batches take longer and longer to get: a list that grows in the dataset, longer samples later, a cache."
        )
    elif phase == "comm":
        first = "The exchange takes longer and longer: other jobs on the network, or a rank that wanders away."
    elif phase in ("forward", "backward"):
        first = "Look for a graph or a list that grows: losses kept without .detach() or .item(), longer sequences."
    elif phase in ("other", "optimizer"):
        first = "Look for something the loop keeps adding to: a history of losses, hooks added in it, a longer log."
    elif phase is None:
        first = "All phases grow: a machine that gets slower (heat, other jobs), or memory that fills up."
    else:
        first = f"Look at what grows in the phase {phase!r}."
    return first, "Compare a profile of early steps with one of late ones."


def for_slow_stretch(*, phase: str | None, alone: bool, host: str, recovered: bool) -> tuple[str, ...]:
    where = f" on {host}" if alone and host else ""
    if phase == "input":
        first = f"The data came more slowly{where}: another directory or file, the page cache full, busy storage."
    elif phase == "comm":
        first = "The exchange was slower: other jobs on the network, a link that fell back to a lower speed."
    elif phase is None or phase in COMPUTE_PHASES:
        first = f"Look for what changed{where}: other jobs on the same cores or device, clocks, batch or model size."
    else:
        first = f"Look for what changed{where} in {phase}: logging or metrics switched on, other data."
    if recovered:
        return first, "It recovered: compare with what else ran at that time."
    return first, "The samples of the machine in the report show what began at that time."
