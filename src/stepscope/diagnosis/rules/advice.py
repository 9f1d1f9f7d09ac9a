"""Advice that depends on several facts; short advice is next to its rule.

No numbers are judged here, except those of a rank that ran out of memory: they decide only about its advice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stepscope.diagnosis.engine.settings import accumulation_setting, frameworks_of, loader_name, loader_setting
from stepscope.judge import thresholds
from stepscope.records.layers import MEMORY_KINDS, MemoryAccount
from stepscope.records.steps import COMPUTE_PHASES, GRAPH_PHASE
from stepscope.records.text import bytes_text, named_ranks, share_text

__all__ = [
    "FRAGMENTATION_ADVICE",
    "MEMORY_CREEP_ADVICE",
    "MEMORY_IMBALANCE_ADVICE",
    "OutOfMemory",
    "WorkersDo",
    "cpu_advice",
    "crash_advice",
    "data_loader_advice",
    "expert_advice",
    "growth_advice",
    "jitter_advice",
    "memory_pressure_advice",
    "out_of_memory",
    "ram_advice",
    "slow_stretch_advice",
    "stall_advice",
    "straggler_advice",
    "throttling_advice",
    "uneven_groups_advice",
    "utilization_advice",
]


# -- ranks, input and crashes -----------------------------------------------------------------------------------------

ROUTER_ADVICE = (
    "Balance the router: a load-balancing loss or a bias per expert; a capacity factor bounds what one expert gets.",
    "If the same experts are always the busiest, place them on different ranks or give each a copy.",
)
FEWER_COPIES = "Fewer DataLoader workers, a smaller prefetch_factor, or memory-mapped data."


def straggler_advice(
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
    """``place``: a line of code that the ranks' stacks show; ``node``: all ranks of one host.

    ``side``: ``host`` if it is known to launch late, ``device`` if its kernels are known to take longer.
    ``share_samples``: some ranks read the same samples, because they hold parts of one model; ``splits_sequences``: or
    parts of one sequence.
    """
    if node:
        return (
            f"It is host {hosts[0]}, not a rank: compare its clocks, temperature, power limit and load with the rest.",
            (
                "If you find no cause, exclude the host from the next allocation. The cost above is what it costs to "
                "keep it."
            ),
        )
    who = named_ranks(ranks).lower()
    where = f" (host {hosts[0]})" if len(set(hosts)) == 1 and hosts[0] else ""
    several = len(ranks) > 1
    end, does, was, its, it_runs = (
        ("", "do", "were", "their", "they run") if several else ("s", "does", "was", "its", "it runs")
    )
    if phase == "input":
        first = f"Look at what {who}{where} read{end}: larger or remote files, fewer DataLoader workers, a busy disk."
        second = (
            "Ranks that hold parts of one model need the same samples: let one of them read and broadcast the batch."
            if share_samples
            else "Give every rank the same number of samples (DistributedSampler) and shuffle large items across ranks."
        )
    elif phase == "h2d":
        first = f"Check how batches of {who}{where} get to the device: pinned memory, NUMA binding, PCIe width."
        second = "Copy with non_blocking=True from a DataLoader with pin_memory=True."
    elif phase in ("forward", "backward", "optimizer", GRAPH_PHASE) and side == "host":
        first = (
            f"{named_ranks(ranks)}{where} launch{'' if several else 'es'} {its} kernels late: look at the Python code "
            f"that only {it_runs} there."
        )
        second = "If the code is the same, the CPU is not: other processes on its cores, fewer of them, lower clocks."
    elif phase in ("forward", "backward", "optimizer", GRAPH_PHASE) and side == "device":
        first = (
            f"The kernels of {who}{where} take longer, but the host launches on time: compare batch shape, sequence "
            "length and branches with the others."
        )
        second = "If the work is equal, the device is not: clocks, power limit, throttling, another process on it."
    elif phase in ("forward", "backward", GRAPH_PHASE):
        first = f"Check that {who}{where} compute{end} the same as the others: batch shape, sequence length, branches."
        second = (
            f"If all ranks do the same work, check the machine: other processes on {its} cores or device, clocks, "
            "throttling."
        )
    elif phase == "optimizer":
        first = f"See what {who}{where} {does} in optimizer.step() that others do not: hooks, clipping, a logged norm."
        second = "If parameters are sharded by hand, balance the shards."
    elif place:
        first = f"Look at {place}: {who}{where} {was} sampled there, outside all phases."
        second = "Do it less often, after the last step, or in a background thread."
    elif phase in ("other", "eval", "checkpoint"):
        first = f"Look for work that only {who}{where} {does}: logging, metrics, saving, printing."
        second = "Do it less often, after the last step, or in a background thread."
    elif phase is None:
        first = f"{named_ranks(ranks)}{where} lose{'' if several else 's'} time in several phases: suspect the machine."
        second = f"Look for other processes on {its} cores or device, lower clocks, fewer CPU threads."
    else:
        first = f"Compare what the phase {phase!r} does on {who}{where} with the other ranks."
        second = "Give every rank the same share of it, or take it out of the step."
    if splits_sequences and phase in ("forward", "backward", GRAPH_PHASE) and side != "host":
        second = (
            "Ranks hold parts of one sequence: with a causal mask the later parts have more work. Assign them in "
            "pairs, early with late (torch's context_parallel does, unless load balancing is off)."
        )
    if place and phase not in ("other", None):
        first = f"Look at {place}: {who}{where} {was} sampled there in {phase}."
    if tuple(ranks) == (0,) and world_size > 1 and phase in ("other", "eval", "checkpoint", None):
        second = "Rank 0 is the usual place for logging and saving: do it less often or in a background thread."
    return first, second


def expert_advice(*, same_batches: bool) -> tuple[str, ...]:
    """``same_batches``: the ranks are known to have equally many tokens before the router distributes them."""
    if same_batches:
        return ROUTER_ADVICE
    return (
        "If the router sends its experts more tokens: a load-balancing loss, a bias per expert or a capacity factor.",
        "If its batches are longer than those of the others: bucket samples by length, or batch by tokens.",
    )


def uneven_groups_advice(
    ranks: Sequence[int], phase: str | None, *, stages: bool, share_without: float
) -> tuple[str, ...]:
    """``share_without``: share of the time that would be saved if the surplus of these ranks were gone, not shared."""
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


WorkersDo = Literal["compute", "wait for storage"]


def data_loader_advice(
    *,
    every_step: bool,
    epoch_starts: bool,
    main_busy: bool | None,
    cpu_saturated: bool,
    cores: int | None,
    on_device: bool,
    loader: Mapping[str, Any],
    frameworks: Sequence[str] = (),
    workers_do: WorkersDo | None = None,
) -> tuple[str, ...]:
    """``every_step``: each step waits about as long; else some steps wait long and most hardly at all.

    ``main_busy``: whether the training processes computed all the time; ``cores``: for each of them; None: unknown.
    ``loader``: the facts about the live DataLoader; empty if unknown; ``frameworks``: what runs the loop;
    ``workers_do``: what its workers do most of the time, None: unknown.
    """
    workers = loader.get("num_workers")
    in_process = workers == 0 if isinstance(workers, int) else every_step and bool(main_busy)
    lines = []
    if epoch_starts and not (isinstance(workers, int) and (workers == 0 or loader.get("persistent_workers") is True)):
        keep = loader_name(frameworks, "persistent_workers")
        lines.append(f"The waits come when an epoch starts: {keep}=True keeps the DataLoader's workers.")
    elif cpu_saturated and not (in_process and cores and cores > 1):
        lines.append("The CPUs are already busy; more workers will not help: cache decoded data or do less per sample.")
    elif in_process:
        name = loader_name(frameworks, "num_workers")
        how = f"DataLoader workers ({name})"
        if cores is not None:
            how = loader_setting(frameworks, "num_workers", _suggested_workers(cores))
        seen = " (num_workers=0)" if workers == 0 else ""
        lines.append(f"The batch is made in the training process itself{seen}: let {how} do it in parallel.")
    else:
        now = f" from {workers}" if isinstance(workers, int) else ""
        more = loader_name(frameworks, "num_workers")
        if workers_do == "compute":
            lines.append(f"The workers compute all the time: raise {more}{now}{_up_to(cores)}, or do less per sample.")
        elif workers_do == "wait for storage":
            lines.append(f"The workers wait for storage: a local copy, larger files, or more of them ({more}{now}).")
        elif every_step:
            lines.append(
                f"Every step waits: raise {more}{now}{_up_to(cores)}; if that does not help, see what workers wait for."
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


def _suggested_workers(cores: int) -> int:
    """A first try that leaves a core to the training process itself."""
    return max(1, min(thresholds.FIRST_WORKERS, cores - 1))


def _up_to(cores: int | None) -> str:
    return "" if cores is None else f" (a process has about {cores} core{'' if cores == 1 else 's'} here)"


def crash_advice(
    *,
    cause: str,
    signal: str,
    others: bool,
    memory_low: bool,
    alone: bool,
    last_call: Mapping[str, Any] | None = None,
    native: bool = False,
    at_exit: bool = False,
    threads: bool = False,
) -> tuple[str, ...]:
    """``alone``: a job of one process; ``last_call``: the collective that native code ended it in; ``native``: whether
    the run has the last output of native code; ``at_exit``: it died while Python shut down; ``threads``: because a
    native thread was still running."""
    if at_exit:
        return _shutdown_advice(alone=alone, threads=threads)
    log = "its log" if alone else "the rank's log"
    if cause == "oom_cuda":
        return (
            "The device ran out of memory: a smaller batch, gradient accumulation, checkpointing, autocast.",
            "Reserved far above allocated means fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        )
    if cause == "oom_host":
        return (
            "The host, or a limit on the process (ulimit -v, a cgroup), had no memory left.",
            FEWER_COPIES,
        )
    if cause == "oom_kernel":
        return (
            "The memory of the host, or of the job's cgroup, was used up: dmesg lists each process's usage.",
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
        else "its last lines on stderr say which (`stepscope run --native-output` keeps them in the log)."
    )
    by_signal = {
        "SIGKILL": "Nothing in Python sends SIGKILL: look for the out-of-memory killer (dmesg), a limit, or a user.",
        "SIGSEGV": "A crash in native code: run again with PYTHONFAULTHANDLER=1 to see the line.",
        "SIGABRT": "Native code aborted: an assertion, NCCL's watchdog, or gloo, when ranks call a collective with "
        f"different sizes; {said}",
        "SIGBUS": "Usually a full /dev/shm: fewer DataLoader workers, or more shared memory (docker --shm-size).",
        "SIGTERM": "It was asked to stop, by the scheduler (preemption, time limit) or the launcher.",
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
        after = "; the errors of the other ranks came after it" if others else ""
        return (f"Start with the traceback{after}.",)
    if cause == "exit_code":
        return ("It exited on its own, with sys.exit() or in native code: its log has its last output.",)
    return (f"It left no message: check {log} and the kernel log (dmesg) of its host.",)


def _shutdown_advice(*, alone: bool, threads: bool) -> tuple[str, ...]:
    if alone:
        return ("Close what runs native threads before the script ends: process groups, data readers, loggers.",)
    destroy = (
        "Call torch.distributed.destroy_process_group() on every rank before the script ends, and first delete "
        "DeviceMesh objects: they keep their groups alive."
    )
    known = (
        "This is a known problem of torch (pytorch issue 190489): a thread of gloo was still running when Python "
        "destroyed its process group. A torch release that fixes it avoids it too."
    )
    return (destroy, known) if threads else (destroy,)


# -- slow steps -------------------------------------------------------------------------------------------------------

GARBAGE_COLLECTION_ADVICE = (
    "If it is Python's garbage collection: gc.freeze() after the set-up, gc.disable() and gc.collect() at set points.",
    "Or occasional work in the loop: logging, printing, metrics with .item(), saving.",
)
SLOW_STEPS_QUERY = (
    'See what the steps have in common: stepscope sql "select * from steps order by wall_ns desc limit 20".'
)


def jitter_advice(
    *,
    phase: str | None,
    period: int | None,
    num_workers: int | None,
    at_epoch_starts: bool,
    varying_rank: bool,
    nccl: bool,
    more_bytes: bool = False,
    place: str = "",
) -> tuple[str, ...]:
    """``nccl``: whether the ranks exchange by NCCL; ``place``: a line of code that their stacks show.

    ``more_bytes``: the ranks exchange more in these steps than in others.
    """
    if place:
        return (f"Look at {place}: the stacks sampled in these steps were there.",)
    if phase == "input":
        if at_epoch_starts:
            return (
                "The waits come when an epoch starts: persistent_workers=True keeps the DataLoader's workers.",
                "If the epochs are short by accident, a longer one (or an endless sampler) starts fewer iterators.",
            )
        if period is not None and period == num_workers:
            return (
                f"One step in {num_workers} (num_workers) waits: the workers cannot keep up; raise num_workers.",
                "If all cores are busy, do less per sample or cache decoded data.",
            )
        first = (
            f"Something in the dataset happens every {period} steps: opening the next file or shard; read ahead."
            if period
            else "Some batches take much longer to prepare: look at their largest samples and at the storage."
        )
        return first, "A larger prefetch_factor absorbs single slow batches; more workers do not."
    if phase == "comm" and more_bytes:
        return ("The ranks exchange more in these steps than in others (averaged weights, metrics): do it less often.",)
    if phase == "comm":
        return (
            "The exchange itself is sometimes slow: other jobs use the network, or traffic takes a slower route.",
            "NCCL_DEBUG=INFO shows which route it takes." if nccl else SLOW_STEPS_QUERY,
        )
    if phase == "h2d":
        return (
            "Some copies are slow, probably from pageable memory: pin_memory=True keeps batches pinned.",
            SLOW_STEPS_QUERY,
        )
    if phase == "optimizer":
        return ("Look for occasional work in the optimizer: a logged norm, an EMA, a scheduler.", SLOW_STEPS_QUERY)
    if varying_rank and period is None:
        return (
            "A different rank each time: the machine (other processes, interrupts) or batches of varying size.",
            "On a crowded CPU, fewer threads (OMP_NUM_THREADS) and DataLoader workers make steps more even.",
        )
    if phase not in (None, "forward", "backward", GRAPH_PHASE, "other"):
        return (f"Look at what the phase {phase!r} does in these steps only.", SLOW_STEPS_QUERY)
    if period is not None:
        return (f"Look for what the loop does every {period} steps.", *GARBAGE_COLLECTION_ADVICE)
    return GARBAGE_COLLECTION_ADVICE


def stall_advice(*, phase: str | None, alone: bool, host: str, nccl: bool) -> tuple[str, ...]:
    """``alone``: one rank had it and the others waited; ``nccl``: whether the ranks exchange by NCCL."""
    where = f" (host {host})" if alone and host else ""
    retries = "; NCCL_DEBUG=INFO shows retries" if nccl else ""
    look = {
        "input": "One wait for data: a cold or remote file, a worker that died and was replaced, a full page cache.",
        "comm": f"All ranks waited for the exchange: a network hiccup{retries}.",
        "h2d": "One slow copy to the device: memory was being moved or swapped.",
        "optimizer": "The first use of something in the optimizer, or the process was stopped for a while.",
        "checkpoint": "One checkpoint was slow; the storage was probably busy.",
        "eval": "Evaluation took this long once.",
    }.get(phase or "", "A first kernel of a new shape, garbage collection, swapping, or the process was stopped.")
    if phase == "other":
        look = "The loop did other work in that step, such as saving, evaluation or a network request."
    return (
        f"{look[:-1]}{where}." if where else look,
        "It happened once; no action is needed unless it recurs. The log from that time may explain it.",
    )


def growth_advice(*, phase: str | None) -> tuple[str, ...]:
    if phase == "input":
        first = (
            "Batches take longer and longer to get: a list that grows in the dataset, longer samples later, a cache."
        )
    elif phase == "comm":
        first = "The exchange takes longer and longer: other jobs on the network, or a rank that drifts behind."
    elif phase in ("forward", "backward"):
        first = "Look for a graph or a list that grows: losses kept without .detach() or .item(), longer sequences."
    elif phase in ("other", "optimizer"):
        first = "Look for something the loop keeps adding to: a history of losses, hooks added in it, a longer log."
    elif phase is None:
        first = "All phases grow: a machine that gets slower (heat, other jobs), or memory that fills up."
    else:
        first = f"Look at what grows in the phase {phase!r}."
    return first, "Compare a profile of early steps with one of late ones."


def slow_stretch_advice(
    *, phase: str | None, alone: bool, host: str, recovered: bool, in_process: bool = False
) -> tuple[str, ...]:
    """``in_process``: batches are made in the training process itself."""
    where = f" on {host}" if alone and host else ""
    if phase == "input" and in_process:
        first = f"Making the batches took longer{where}: other data, longer samples, or other programs on its cores."
    elif phase == "input":
        first = f"The data came more slowly{where}: other files, longer samples, workers that got less CPU, slow reads."
    elif phase == "comm":
        first = "The exchange was slower: other jobs on the network, a link that fell back to a lower speed."
    elif phase is None or phase in COMPUTE_PHASES:
        first = f"Look for what changed{where}: other jobs on the same cores or device, clocks, batch or model size."
    else:
        first = f"Look for what changed{where} in {phase}: logging or metrics switched on, other data."
    if recovered:
        return first, "It recovered: compare with what else ran at that time."
    return first, "The machine samples in the report show what started at that time."


# -- memory and machines ----------------------------------------------------------------------------------------------

MEMORY_CREEP_ADVICE = {
    "host_rss": (
        "Look for what the loop keeps: losses or outputs in a list hold their graphs; keep loss.item() or .detach().",
        "Then lists, dicts and caches that only grow, in the dataset too; tracemalloc or memray names the line.",
    ),
    "device_allocated": (
        "Something keeps tensors of past steps: total += loss holds every graph (use loss.item() or loss.detach()).",
        "Other causes: outputs collected in a list, retain_graph=True, hooks that store what they see.",
        "While it runs: `stepscope snapshot RUN --rank R --history 10` shows the lines that allocated what is in use.",
    ),
    "device_reserved": (
        "Memory in use does not grow, but reserved memory does: varying shapes leave gaps that cannot be reused.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes the allocator grow blocks instead of adding new ones.",
        "Pad or bucket batches to a few shapes; torch.cuda.empty_cache() costs time and is not a fix.",
    ),
}
FRAGMENTATION_ADVICE = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets the allocator grow its blocks instead of adding new ones.",
    "Pad or bucket batches to a few shapes, the largest first; torch.cuda.empty_cache() costs time and is not a fix.",
)
MEMORY_IMBALANCE_ADVICE = (
    "See what only that rank holds: a second copy of the model, gathered outputs, torch.load without map_location.",
    "If its batches are larger, give every rank the same number of tokens; the fullest device limits all of them.",
)
UTILIZATION_ADVICE = {
    "input": "It waits for data: DataLoader(num_workers=…), pin_memory=True, prefetch_factor; see the time in input.",
    "h2d": "It waits for copies: pin_memory=True and .to(device, non_blocking=True), or fewer, larger copies.",
    "comm": "It waits for other ranks or the network: see whether one of them is late.",
    "eval": "It waits during evaluation: a larger batch there, under torch.no_grad(), or less often.",
    "checkpoint": "It waits for checkpoints: less often, or torch.distributed.checkpoint.async_save.",
    "other": "It waits for Python between the phases: .item(), .cpu(), printing and logging in every step, metrics.",
}
LAUNCHING_ADVICE = (
    "The host cannot launch work fast enough: a larger batch, torch.compile, CUDA graphs, a fused optimizer.",
)


def memory_pressure_advice(*, world_size: int, frameworks: Sequence[str], sharded: bool) -> tuple[str, ...]:
    """``sharded``: whether FSDP or ZeRO already shards the model's state."""
    setting = accumulation_setting(frameworks)
    how = f" ({setting})" if setting else ""
    less = (
        f"To avoid running out of memory, use a smaller batch with gradient accumulation{how}, "
        "activation checkpointing or autocast."
    )
    if world_size > 1 and not sharded:
        return less, "Optimizer state and gradients can be sharded over the ranks (FSDP, ZeroRedundancyOptimizer)."
    return less, "An optimizer with less state (8-bit Adam, Adafactor) also frees memory."


def utilization_advice(waited_for: str | None) -> tuple[str, ...]:
    """``waited_for``: the host's phase in which the GPU is idle; None: launching work is too slow."""
    if waited_for is None:
        return LAUNCHING_ADVICE
    return (UTILIZATION_ADVICE.get(waited_for, f"It waits for the phase {waited_for!r}: take it out of the step."),)


def throttling_advice(*, thermal: bool, power_brake: bool, power_cap: bool) -> tuple[str, ...]:
    if thermal:
        return (
            "It is too hot: airflow, fans, dust, neighbors in its chassis; nvidia-smi -q -d TEMPERATURE,PERFORMANCE.",
            "Until then, exclude the GPU: in a synchronous job all ranks run at its pace.",
        )
    if power_brake:
        return ("The machine's power supply held it back (hardware brake): power cables, supply, rack limits.",)
    if power_cap:
        return ("It runs at its power limit: compare power_limit_w between the GPUs (nvidia-smi -pl sets it).",)
    return (
        "Compare it with its peers: nvidia-smi -q -d CLOCK,PERFORMANCE (locked clocks, power limit, ECC, another job).",
    )


def cpu_advice(
    *, others: bool, busy: Sequence[str], heavy: bool, ranks: int, cores: int | None, facts: Mapping[str, Any]
) -> tuple[str, ...]:
    """``others``: other programs take the CPU; ``busy``: which; ``ranks``: number on the host; ``facts``: of one."""
    if others:
        own_cores = "give the job its own cores (taskset, cgroups, --exclusive)"
        if not busy:
            return (f"Find the process with top (the samples name none), or {own_cores}.",)
        return (f"Stop or move {', '.join(busy)}; or {own_cores}.",)
    lines = []
    threads, workers = _count(facts.get("threads")), _loader_workers(facts)
    if threads > 1 and cores is not None and threads * ranks > cores:
        fit = max(1, cores // ranks)
        lines.append(
            f"{ranks} ranks with {threads} threads each on {cores} cores: OMP_NUM_THREADS={fit} "
            f"or torch.set_num_threads({fit})."
        )
    if workers > 0 and cores is not None and (workers + 1) * ranks > cores:
        fit = max(0, cores // ranks - 1)
        lines.append(f"{workers} DataLoader workers for each rank are too many for the cores: num_workers={fit}.")
    if not lines and cores is not None and ranks > cores:
        lines.append(f"{ranks} ranks share {cores} cores: more ranks will not be faster here.")
    if not lines:
        lines.append("Use fewer threads (OMP_NUM_THREADS) or DataLoader workers, or do less work per sample.")
    if heavy and len(lines) == 1:
        lines.append("With more runnable threads than cores, step times also vary more.")
    return tuple(lines)


def shared_core_advice(rank: int, busy: Sequence[str]) -> tuple[str, ...]:
    """``busy``: which processes use the CPU of its host."""
    bind = "give each rank its own cores (taskset, cgroups, --exclusive)"
    if busy:
        return (f"Stop or move {', '.join(busy)}; or {bind}.",)
    return (f"Find what else runs on the core of rank {rank} (top, with its column P), or {bind}.",)


def ram_advice(facts: Mapping[str, Any]) -> tuple[str, ...]:
    workers = _loader_workers(facts)
    if workers > 0:
        return (
            f"Each of {workers} DataLoader workers copies the Python objects it touches: keep indices in numpy arrays.",
            "Fewer workers, a smaller prefetch_factor, memory-mapped data.",
        )
    return ("Memory-map the data or read it in pieces; fewer ranks or workers on this host.",)


def _loader_workers(facts: Mapping[str, Any]) -> int:
    loader = facts.get("loader")
    return _count(loader.get("num_workers")) if isinstance(loader, dict) else 0


def _count(value: object) -> int:
    """0 for anything that is not a count."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


# -- out of memory ----------------------------------------------------------------------------------------------------
# What a rank held when memory ran out (``recorder/layers/memory_dump.py``), and what would have made room.  torch's
# message has the figures of the very moment; when the error reaches the recorder, some of that is free again.

KIND_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "activations": "activations",
    "tensors": "other tensors",
}
UNITS = {"byte": 1, "bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE = r"([\d.]+) (bytes?|[KMG]iB)"
_TOLD = {
    "requested_bytes": re.compile(rf"ried to allocate {_SIZE}", re.IGNORECASE),
    "total_bytes": re.compile(rf"total capacity of {_SIZE}", re.IGNORECASE),
    "free_bytes": re.compile(rf"of which {_SIZE} is free", re.IGNORECASE),
    "allocated_bytes": re.compile(rf"{_SIZE} is allocated by PyTorch", re.IGNORECASE),
    "reserved_unused_bytes": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated", re.IGNORECASE),
}
_OTHERS = re.compile(rf"Process \d+ has {_SIZE} memory in use", re.IGNORECASE)
PARTS_TOLD = 4
MOST_ADVICE = 4
MOST_TENSORS = 8


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """What is known about the memory of a rank that ran out of it."""

    evidence: dict[str, Any]
    advice: tuple[str, ...]
    """The best first; empty if nothing is known."""


def out_of_memory(
    message: str, account: MemoryAccount | None, *, host: bool, world_size: int, facts: Mapping[str, Any]
) -> OutOfMemory:
    """``host``: the host's memory ran out; ``facts``: of the rank."""
    told = {name: _size_told(found) for name, pattern in _TOLD.items() if (found := pattern.search(message))}
    others = sum(_size_told(found) for found in _OTHERS.finditer(message))
    if others:
        told["others_bytes"] = others
    if account is None:
        return OutOfMemory(evidence={**told}, advice=tuple(_told_advice(told, host=host)))
    held = _Held(account, told, host=host)
    frameworks = frameworks_of(facts)
    sharded = bool(facts.get("fsdp")) or "deepspeed" in frameworks
    if host and "MemTotal" in account.process:
        told["total_bytes"] = account.process["MemTotal"]
    advice = [held.sentence, *_told_advice(told, host=host), *_limit_advice(account)]
    advice += held.advice(world_size=world_size, sharded=sharded, facts=facts)
    if host and len(advice) == 1:
        advice.append(FEWER_COPIES)
    del advice[MOST_ADVICE:]
    if account.snapshot is not None:
        advice.append(f"Every block of the allocator: drop {account.snapshot} of the run on pytorch.org/memory_viz.")
    return OutOfMemory(evidence={**told, **held.evidence}, advice=tuple(advice))


def _limit_advice(account: MemoryAccount) -> Iterator[str]:
    limit = account.process.get("limit")
    if account.device == "cpu" and limit:
        most = account.process.get("VmPeak", 0)
        yield f"The process may use {bytes_text(limit)} of address space (ulimit -v); it had up to {bytes_text(most)}."


def _size_told(found: re.Match[str]) -> int:
    return round(float(found[1]) * UNITS[found[2].lower()])


def _told_advice(told: Mapping[str, int], *, host: bool) -> Iterator[str]:
    """What the message alone shows."""
    requested, total = told.get("requested_bytes", 0), told.get("total_bytes", 0)
    if total and requested >= total:
        yield (
            f"One call asked for {bytes_text(requested)}, more than the {bytes_text(total)} of the "
            f"{'host' if host else 'device'}: look at the shapes in the line that the traceback names."
        )
    unused = told.get("reserved_unused_bytes", 0)
    if unused and requested <= unused + told.get("free_bytes", 0):
        yield (
            f"{bytes_text(unused)} are reserved but in pieces that are too small for the {bytes_text(requested)} asked "
            "for: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids that."
        )
    others = told.get("others_bytes", 0)
    if others >= thresholds.OOM_SHARE * max(total, 1):
        yield f"Other processes hold {bytes_text(others)} of the same GPU: give the job a GPU of its own."


class _Held:
    """The bytes by kind at that moment, and where most of each kind is."""

    def __init__(self, account: MemoryAccount, told: Mapping[str, int], *, host: bool) -> None:
        self._account = account
        self._host = host
        known = {kind: size for kind, size in account.kinds.items() if size}
        sampled = known.pop("activations", None)
        static = sum(known.values())
        # Activations are of an earlier step: only as many can be there as there is room for.
        in_use = account.process.get("VmRSS", 0) if host else told.get("allocated_bytes") or account.allocated_peak or 0
        room = max(in_use - static, 0) if in_use else sampled or 0
        if sampled:
            known["activations"] = min(sampled, room)
        self._measured = bool(sampled)
        loose = sum(group.bytes for group in account.tensors if group.kind == "other")
        known["tensors"] = min(loose, max(in_use - sum(known.values()), 0)) if in_use else loose
        self.total = max(in_use, sum(known.values()))
        known["other"] = self.total - sum(known.values())
        self.kinds = {kind: size for kind, size in known.items() if size > 0}
        self._places = {kind: self._place(kind) for kind in self.kinds if kind in MEMORY_KINDS}

    def _place(self, kind: str) -> tuple[str, float]:
        """The modules that hold most of a kind, as a name with ``*`` for numbers, and their share of it."""
        column = MEMORY_KINDS.index(kind)
        sizes: Counter[str] = Counter()
        for name, _, own in self._account.modules:
            if own[column]:
                parts = ["*" if part.isdigit() else part for part in name.split(".")]
                for depth in range(1, len(parts) + 1):
                    sizes[".".join(parts[:depth])] += own[column]
        whole = self._account.kinds.get(kind, 0)
        best = ("", 1.0)
        for name, size in sizes.most_common():
            # As deep as most of it is together: ``layers.*.mlp`` rather than ``layers``.
            if size < thresholds.OOM_PLACE_SHARE * whole:
                break
            if name.count(".") >= best[0].count(".") or not best[0]:
                best = (name, size / whole)
        return best

    def _name(self, kind: str) -> str:
        if kind in KIND_NAMES:
            return KIND_NAMES[kind]
        if self._host:
            return "Python, libraries and data"
        return "the rest" if self._measured else "activations and temporary tensors"

    def _mostly(self, kind: str) -> str:
        where = self._places.get(kind, ("", 1.0))[0]
        return f" (mostly {where})" if "." in where else ""

    @property
    def _ordered(self) -> list[tuple[str, int]]:
        return sorted(self.kinds.items(), key=lambda one: -one[1])

    @property
    def sentence(self) -> str:
        parts: list[str] = []
        before = ""
        for kind, size in self._ordered[:PARTS_TOLD]:
            if size >= thresholds.OOM_PART_SHARE * self.total:
                mostly = self._mostly(kind)
                parts.append(f"{self._name(kind)} {share_text(size / self.total)}{mostly if mostly != before else ''}")
                before = mostly or before
        return f"{bytes_text(self.total)} were in use: {', '.join(parts)}."

    @property
    def evidence(self) -> dict[str, Any]:
        account = self._account
        places = {kind: where for kind, (where, _) in self._places.items() if where}
        return {
            "device": account.device,
            "in_use_bytes": self.total,
            "kinds": dict(self._ordered),
            "places": places,
            "activations_step": account.activations_step,
            "tensors": [
                {
                    "count": group.count,
                    "dtype": group.dtype,
                    "shape": list(group.shape),
                    "bytes": group.bytes,
                    "kind": group.kind,
                    "where": group.where,
                }
                for group in account.tensors[:MOST_TENSORS]
            ],
            "snapshot": account.snapshot,
        }

    def advice(self, *, world_size: int, sharded: bool, facts: Mapping[str, Any]) -> Sequence[str]:
        """What would make room, the most first; only what takes a share that matters."""
        found: list[tuple[float, str]] = [*self._kept(), *self._of_activations(facts)]
        split = world_size > 1 and not sharded
        state = self.kinds.get("optimizer", 0)
        if split:
            saved = state * (1 - 1 / world_size)
            text = (
                f"Optimizer state: ZeroRedundancyOptimizer or FSDP keeps a part of it on each of {world_size} ranks, "
                f"{bytes_text(saved)} less on this one."
            )
        else:
            saved = state * 0.75
            text = f"Optimizer state: one with less of it (8-bit Adam, Adafactor) would free about {bytes_text(saved)}."
        found.append((saved, text))
        weights = self.kinds.get("parameters", 0) + self.kinds.get("gradients", 0)
        if split:
            saved = weights * (1 - 1 / world_size)
            text = (
                f"Parameters and gradients: FSDP over {world_size} ranks keeps {bytes_text(saved)} of them elsewhere."
            )
            found.append((saved, text))
        elif self._wide:
            saved = weights * 0.5
            found.append((saved, f"Parameters and gradients are float32: bfloat16 would free {bytes_text(saved)}."))
        least = thresholds.OOM_SHARE * self.total
        return [text for saved, text in sorted(found, key=lambda one: -one[0]) if saved >= least]

    @property
    def _wide(self) -> bool:
        """Whether most parameters are in float32."""
        sizes = Counter[str]()
        for group in self._account.tensors:
            if group.kind == "parameters":
                sizes[group.dtype] += group.bytes
        return sizes["float32"] > sizes.total() / 2

    def _kept(self) -> Iterator[tuple[float, str]]:
        """Tensors that a container of the script keeps."""
        for group in self._account.tensors:
            if group.kind == "other" and "," in group.where and group.count > 1:
                shape = ", ".join(map(str, group.shape))
                text = (
                    f"{group.where}, keeps {group.count:,} {group.dtype} tensors of shape [{shape}], "
                    f"{bytes_text(group.bytes)}: keep numbers (.item()) or fewer of them."
                )
                yield group.bytes, text
                return

    def _of_activations(self, facts: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
        size = self.kinds.get("activations", 0)
        where = self._places.get("activations", ("", 1.0))[0]
        if not self._measured and not self._host:
            size, where = self.kinds.get("other", 0), ""
        if size:
            saved = size * (1 - thresholds.CHECKPOINTS_KEEP_SHARE)
            of = f" of {where}" if where and "*" in where else ""
            setting = accumulation_setting(frameworks_of(facts))
            how = f" ({setting})" if setting else ""
            text = (
                f"Activations: checkpointing{of} (torch.utils.checkpoint) would free about {bytes_text(saved)} for "
                f"about one more forward; a smaller batch with gradient accumulation{how} shrinks them in proportion."
            )
            yield saved, text
