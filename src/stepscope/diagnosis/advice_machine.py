"""What to do about memory and machines, in words: sentences chosen by what was seen.  No numbers are judged here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CREEP", "FRAGMENTED", "IMBALANCED", "PRESSED", "for_cpu", "for_ram", "for_throttling", "for_utilisation"]

CREEP = {
    "host_rss": (
        "Look for what the loop keeps: losses or outputs in a list hold their graphs; keep loss.item() or .detach().",
        "Then lists, dicts and caches that only grow, in the dataset too; tracemalloc or memray names the line.",
    ),
    "device_allocated": (
        "Something keeps tensors of past steps: total += loss holds every graph (use loss.item() or loss.detach()).",
        "Others that do: outputs collected in a list, retain_graph=True, hooks that store what they see.",
        "torch.cuda.memory._record_memory_history(), then _dump_snapshot() after some steps: it names the lines.",
    ),
    "device_reserved": (
        "What is in use does not grow, only what the allocator holds: varying shapes leave gaps that fit nothing.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets it grow its blocks instead of adding new ones.",
        "Pad or bucket batches to a few shapes; torch.cuda.empty_cache() costs time and is no fix.",
    ),
}
FRAGMENTED = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets the allocator grow its blocks instead of adding new ones.",
    "Pad or bucket batches to a few shapes, the largest first; torch.cuda.empty_cache() costs time and is no fix.",
)
PRESSED = (
    "Before it runs out: a smaller batch with gradient accumulation, activation checkpointing, autocast.",
    "Optimizer state and gradients can be sharded (FSDP, ZeroRedundancyOptimizer); set_to_none=True frees gradients.",
)
IMBALANCED = (
    "See what only that rank holds: a second copy of the model, gathered outputs, torch.load without map_location.",
    "If its batches are larger, give every rank the same number of tokens; the fullest device limits all of them.",
)
UTILISATION = {
    "input": "It waits for data: DataLoader(num_workers=…), pin_memory=True, prefetch_factor; see the time in input.",
    "h2d": "It waits for copies: pin_memory=True and .to(device, non_blocking=True), or larger copies, fewer of them.",
    "comm": "It waits for other ranks or the network: see whether one of them is late.",
    "eval": "It waits through evaluation: a larger batch there, under torch.no_grad(), or less often.",
    "checkpoint": "It waits for checkpoints: less often, or torch.distributed.checkpoint.async_save.",
    "other": "It waits for Python between the phases: .item(), .cpu(), printing and logging in every step, metrics.",
}
LAUNCHING = (
    "The host cannot hand out work fast enough: a larger batch, torch.compile, CUDA graphs, a fused optimizer.",
)


def for_utilisation(waited_for: str | None) -> tuple[str, ...]:
    """``waited_for``: the phase of the host in which the GPU has nothing to do; None: launching work is too slow."""
    if waited_for is None:
        return LAUNCHING
    return (UTILISATION.get(waited_for, f"It waits for the phase {waited_for!r}: take it out of the step."),)


def for_throttling(*, thermal: bool, power_brake: bool, power_cap: bool) -> tuple[str, ...]:
    if thermal:
        return (
            "It is too hot: airflow, fans, dust, neighbours in its chassis; nvidia-smi -q -d TEMPERATURE,PERFORMANCE.",
            "Until then leave the GPU out of the job: in a synchronous job all ranks go at its pace.",
        )
    if power_brake:
        return ("The machine's power supply held it back (hardware brake): power cables, supply, rack limits.",)
    if power_cap:
        return ("It runs at its power limit: compare power_limit_w between the GPUs (nvidia-smi -pl sets it).",)
    return (
        "Compare it with its peers: nvidia-smi -q -d CLOCK,PERFORMANCE (locked clocks, power limit, ECC, another job).",
    )


def for_cpu(*, others: bool, heavy: bool, ranks: int, cores: int | None, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """``others``: processes that are not the job's take the CPU; ``ranks``: on the host; ``facts``: of a rank of it."""
    if others:
        return ("Something else runs there: top shows it; give the job its own cores (taskset, cgroups, --exclusive).",)
    lines = []
    threads, workers = _count(facts.get("threads")), _workers(facts)
    if threads > 1 and cores is not None and threads * ranks > cores:
        fit = max(1, cores // ranks)
        lines.append(
            f"{ranks} ranks with {threads} threads each on {cores} cores: OMP_NUM_THREADS={fit} "
            f"or torch.set_num_threads({fit})."
        )
    if workers > 0 and cores is not None and (workers + 1) * ranks > cores:
        fit = max(0, cores // ranks - 1)
        lines.append(f"{workers} DataLoader workers for each rank are more than the cores carry: num_workers={fit}.")
    if not lines and cores is not None and ranks > cores:
        lines.append(f"{ranks} ranks share {cores} cores: more of them will not be faster here.")
    if not lines:
        lines.append("Fewer threads (OMP_NUM_THREADS) or DataLoader workers, or less work per sample.")
    if heavy and len(lines) == 1:
        lines.append("More runnable threads than cores also make every step uneven.")
    return tuple(lines)


def for_ram(facts: Mapping[str, Any]) -> tuple[str, ...]:
    workers = _workers(facts)
    if workers > 0:
        return (
            f"Each of {workers} DataLoader workers copies the Python objects it touches: keep indices in numpy arrays.",
            "Fewer workers, a smaller prefetch_factor, memory-mapped data.",
        )
    return ("Memory-map the data or read it in pieces; fewer ranks or workers on this host.",)


def _workers(facts: Mapping[str, Any]) -> int:
    loader = facts.get("loader")
    return _count(loader.get("num_workers")) if isinstance(loader, dict) else 0


def _count(value: object) -> int:
    """0 for what is not a count."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
