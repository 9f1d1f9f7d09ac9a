"""What to do, in words: sentences chosen by what was seen.  No numbers are judged here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.diagnosis.framework_advice import loader_name, loader_setting
from stepscope.records.phases import GRAPH_PHASE
from stepscope.records.units import bytes_text, named_ranks, share_text

__all__ = ["for_crash", "for_experts", "for_input", "for_straggler", "for_uneven_groups"]


ROUTER_ADVICE = (
    "Balance the router: a load-balancing loss or a bias per expert; a capacity factor bounds what one expert gets.",
    "If the same experts are always the busiest, place them on different ranks or give each a copy.",
)
FEWER_COPIES = "Fewer DataLoader workers, a smaller prefetch_factor, or memory-mapped data."
FIRST_WORKERS = 4
"""DataLoader workers to begin with, where there are cores for them."""


def for_straggler(
    ranks: Sequence[int],
    hosts: Sequence[str],
    phase: str | None,
    *,
    world_size: int,
    place: str = "",
    node: bool = False,
    side: str | None = None,
    share_samples: bool = False,
    splits_sequences: bool = False,
) -> tuple[str, ...]:
    """``place``: a line of code in which the ranks were seen; ``node``: all ranks of one host.

    ``side``: ``host`` where it is known to launch late, ``device`` where its kernels are known to take longer.
    ``share_samples``: some ranks read the same samples, because they hold parts of one model; ``splits_sequences``: or
    parts of one sequence.
    """
    if node:
        return (
            f"It is host {hosts[0]}, not a rank: compare its clocks, temperature, power limit and load with the rest.",
            "Leave it out of the next allocation if nothing explains it; the price above is what it costs to keep it.",
        )
    who = named_ranks(ranks).lower()
    where = f" (host {hosts[0]})" if len(set(hosts)) == 1 and hosts[0] else ""
    if phase == "input":
        first = f"Look at what {who}{where} reads: larger or remote files, fewer DataLoader workers, a busy disk."
        second = (
            "Ranks that hold parts of one model need the same samples: let one of them read and broadcast the batch."
            if share_samples
            else "Give every rank the same number of samples (DistributedSampler) and shuffle large items across ranks."
        )
    elif phase == "h2d":
        first = f"Check how {who}{where} reaches its device: pinned memory, NUMA binding, PCIe width."
        second = "Copy with non_blocking=True from a DataLoader with pin_memory=True."
    elif phase in ("forward", "backward", "optimizer", GRAPH_PHASE) and side == "host":
        first = f"The host of {who}{where} launches its kernels late: look at the Python code that only it runs there."
        second = "If the code is the same, its CPU is not: other processes on its cores, fewer of them, lower clocks."
    elif phase in ("forward", "backward", "optimizer", GRAPH_PHASE) and side == "device":
        first = (
            f"The kernels of {who}{where} take longer, its host launches them in time: compare batch shape, sequence "
            "length and branches with the others."
        )
        second = "If the work is equal, the device is not: clocks, power limit, throttling, another process on it."
    elif phase in ("forward", "backward", GRAPH_PHASE):
        first = f"Check that {who}{where} computes the same as the others: batch shape, sequence length, branches."
        second = "If the work is equal, the machine is not: other processes on its cores or device, clocks, throttling."
    elif phase == "optimizer":
        first = f"See what {who}{where} does in optimizer.step() that others do not: hooks, clipping, a logged norm."
        second = "If parameters are sharded by hand, balance the shards."
    elif place:
        first = f"Look at {place}: {who}{where} was seen there outside all phases."
        second = "Do it less often, after the last step, or in a background thread."
    elif phase in ("other", "eval", "checkpoint"):
        first = f"Look for work that only {who}{where} does: logging, metrics, saving, printing."
        second = "Do it less often, after the last step, or in a background thread."
    elif phase is None:
        first = f"{named_ranks(ranks)}{where} is late in several phases: suspect the machine, not the code."
        second = "Look for other processes on its cores or device, lower clocks, fewer CPU threads."
    else:
        first = f"Compare what the phase {phase!r} does on {who}{where} with the other ranks."
        second = "Give every rank the same share of it, or take it out of the step."
    if splits_sequences and phase in ("forward", "backward", GRAPH_PHASE) and side != "host":
        second = (
            "Ranks hold parts of one sequence: with a causal mask the later parts have more work. Deal them out in "
            "pairs, early with late (torch's context_parallel does, unless load balancing is off)."
        )
    if place and phase not in ("other", None):
        first = f"Look at {place}: {who}{where} was seen there in {phase}."
    if tuple(ranks) == (0,) and world_size > 1 and phase in ("other", "eval", "checkpoint", None):
        second = "Rank 0 is the usual place for logging and saving: do it less often or in a background thread."
    return first, second


def for_experts(*, same_batches: bool) -> tuple[str, ...]:
    """``same_batches``: the ranks are known to have as many tokens each before the router deals them out."""
    if same_batches:
        return ROUTER_ADVICE
    return (
        "If the router sends its experts more tokens: a load-balancing loss, a bias per expert or a capacity factor.",
        "If its batches are longer than those of the others: bucket samples by length, or batch by tokens.",
    )


def for_uneven_groups(
    ranks: Sequence[int], phase: str | None, *, stages: bool, share_without: float
) -> tuple[str, ...]:
    """``share_without``: what of the time the surplus of these ranks costs, were it not shared but gone."""
    who, where = named_ranks(ranks).lower(), f" in {phase}" if phase else ""
    if not stages:
        return (
            "Share the work evenly between the groups of ranks, or give more ranks to the group that has more of it.",
            f"If they should have equal work, find out what slows {who} down{where}.",
        )
    return (
        "Move layers from the slowest stage to the others: embedding and loss count as layers too.",
        (
            f"If its layers are no heavier than those of the other stages, find out what slows {who} down{where}: "
            f"without that, steps would be {share_text(share_without)} shorter."
        ),
    )


def for_input(
    *,
    every_step: bool,
    epoch_starts: bool,
    main_busy: bool | None,
    cpu_saturated: bool,
    cores: int | None,
    on_device: bool,
    loader: Mapping[str, Any],
    frameworks: Sequence[str] = (),
) -> tuple[str, ...]:
    """``every_step``: each step waits about as long; else some steps wait long and most hardly at all.

    ``main_busy``: whether the training processes computed all the time; ``cores``: for each of them; None: unknown.
    ``loader``: the facts of the live DataLoader; empty when it was not seen; ``frameworks``: what runs the loop.
    """
    workers = loader.get("num_workers")
    in_process = workers == 0 if isinstance(workers, int) else every_step and bool(main_busy)
    lines = []
    if epoch_starts and not (isinstance(workers, int) and (workers == 0 or loader.get("persistent_workers") is True)):
        keep = loader_name(frameworks, "persistent_workers")
        lines.append(f"The waits come when an epoch starts: {keep}=True keeps the DataLoader's workers.")
    elif cpu_saturated and not (in_process and cores and cores > 1):
        lines.append("The CPUs are busy already, more workers will not help: cache decoded data or do less per sample.")
    elif in_process:
        name = loader_name(frameworks, "num_workers")
        how = f"DataLoader workers ({name})"
        if cores is not None:
            how = loader_setting(frameworks, "num_workers", _workers(cores))
        seen = " (num_workers=0)" if workers == 0 else ""
        lines.append(f"The batch is made in the training process itself{seen}: let {how} do it beside.")
    else:
        now = f" from {workers}" if isinstance(workers, int) else ""
        more = loader_name(frameworks, "num_workers")
        if every_step:
            lines.append(
                f"Every step waits: raise {more}{now}{_up_to(cores)}; if that does not help, storage is too slow."
            )
        else:
            ahead = loader_name(frameworks, "prefetch_factor")
            lines.append(f"Workers fall behind in bursts: raise {more}{now}{_up_to(cores)}, then {ahead}.")
    if on_device and loader.get("pin_memory") is not True:
        pin = loader_name(frameworks, "pin_memory")
        lines.append(f"{pin}=True and .to(device, non_blocking=True) hide the copy behind the computation.")
    else:
        lines.append("Find the slow part of the dataset's __getitem__: decoding, augmentation, opening files.")
    return tuple(lines)


def _workers(cores: int) -> int:
    """A first try that leaves a core to the training process itself."""
    return max(1, min(FIRST_WORKERS, cores - 1))


def _up_to(cores: int | None) -> str:
    return "" if cores is None else f" (a process has about {cores} core{'' if cores == 1 else 's'} here)"


def for_crash(
    *,
    cause: str,
    signal: str,
    others: bool,
    memory_low: bool,
    alone: bool,
    last_call: Mapping[str, Any] | None = None,
    native: bool = False,
) -> tuple[str, ...]:
    """``alone``: a job of one process; ``last_call``: the collective that native code ended it in; ``native``: whether
    the run has what native code printed last."""
    log = "its log" if alone else "the rank's log"
    if cause == "oom_cuda":
        return (
            "The device ran out of memory: a smaller batch, gradient accumulation, checkpointing, autocast.",
            "Reserved far above allocated means fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        )
    if cause == "oom_host":
        return (
            "The host, or a limit on the process (ulimit -v, a cgroup), had no more memory to give.",
            FEWER_COPIES,
        )
    if cause == "oom_kernel":
        return (
            "The memory of the host, or of the job's cgroup, was used up: dmesg lists who had how much.",
            FEWER_COPIES,
        )
    if signal == "SIGKILL" and memory_low:
        return (
            "The host had hardly any memory left: the kernel's out-of-memory killer is the likely sender (see dmesg).",
            FEWER_COPIES,
        )
    said = (
        "its last lines, shown below, say which."
        if native
        else "its last lines on the error output say which (`stepscope run --native-output` keeps them in the log)."
    )
    by_signal = {
        "SIGKILL": "Nothing in Python sends SIGKILL: look for the out-of-memory killer (dmesg), a limit, or a person.",
        "SIGSEGV": "A crash in native code: run again with PYTHONFAULTHANDLER=1 to see the line.",
        "SIGABRT": "Native code gave up: an assertion, NCCL's watchdog, or gloo, where ranks call a collective with "
        f"different sizes; {said}",
        "SIGBUS": "Usually a full /dev/shm: fewer DataLoader workers, or a larger shared memory (docker --shm-size).",
        "SIGTERM": "Somebody asked it to stop: the scheduler (preemption, time limit) or the launcher.",
    }
    if last_call is not None and signal in by_signal:
        call = f"{last_call['op']} of {last_call['group']} with {bytes_text(last_call['bytes'])}"
        compare = f"Its last call was {call}: look for a branch that only some ranks take, there or just before."
        return by_signal[signal], compare
    if signal in by_signal:
        return (by_signal[signal],)
    if cause == "exception" and alone:
        return ("The whole traceback is in its log and in summary.json.",)
    if cause == "exception":
        after = "; whatever the other ranks said came after it" if others else ""
        return (f"The traceback is where to look{after}.",)
    if cause == "exit_code":
        return ("It ended itself, by sys.exit() or in native code: its log has its last words.",)
    return (f"Nothing was left behind: look into {log} and the kernel's messages (dmesg) of its host.",)
