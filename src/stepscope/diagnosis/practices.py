"""Settings of the live objects that cost something whatever else is found: told in a sentence each, not as findings.

A remark is made only where it matters and where the facts leave no doubt.  Settings of FSDP matter to a job that waits
for its exchange or runs out of memory: they are in the advice of those findings (``fsdp_advice.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.ddp_advice import all_were_used
from stepscope.diagnosis.samples import number
from stepscope.diagnosis.window import Window
from stepscope.records.group_kinds import kind_of
from stepscope.records.slot import FLAG_COMPILED, FLAG_EPOCH_START
from stepscope.records.units import count_text, duration_text, ms_text, named_ranks, share_text

__all__ = ["remarks_on"]

PLAIN_SAMPLERS = ("RandomSampler", "SequentialSampler")
"""What a DataLoader makes by itself."""


def remarks_on(window: Window) -> list[str]:
    """What the ranks' objects show, the first rank's where all should be alike; facts may be missing one by one."""
    facts = next((facts for facts in window.facts if facts), {})
    world_size = max((identity.world_size for identity in window.identities), default=1)
    loader = _part(facts, "loader")
    return [
        *_sampling(loader, _replicas(window, facts)),
        *_last_batch(window, facts, loader),
        *_unequal_epochs(window),
        *_normalising(facts, loader, world_size),
        *_searching(window),
        *_left_open(window),
    ]


# -- data -------------------------------------------------------------------------------------------------------------


def _sampling(loader: Mapping[str, Any], replicas: int) -> Iterator[str]:
    """``replicas``: of the model, which are to train on different samples; 1 where that is not known."""
    sampler = loader.get("sampler")
    if replicas > 1 and loader.get("distributed_sampler") is False and sampler in PLAIN_SAMPLERS:
        whose = f"Each of the {replicas} replicas of the model"
        yield (
            f"{whose} draws from the whole dataset ({sampler}): without a DistributedSampler they train on the same "
            "samples, unless the dataset itself is split."
        )
    if loader.get("set_epoch_missing") is True:
        yield (
            "DistributedSampler.set_epoch() is not called: every epoch has the same order. "
            "Call it with the number of the epoch before each."
        )


def _replicas(window: Window, facts: Mapping[str, Any]) -> int:
    """Ranks of one tensor-, context- or pipeline-parallel group are to get the same samples, and are one replica.

    Where nothing says which ranks those are, nothing is said: samples that differ within such a group spoil the model.
    """
    mesh = _part(facts, "mesh")
    names, shape = mesh.get("names"), mesh.get("shape")
    if isinstance(names, list) and isinstance(shape, list) and names and len(names) == len(shape):
        sizes = [size for name, size in zip(names, shape, strict=True) if kind_of(str(name)) in ("data", "expert")]
        return math.prod(size for size in sizes if isinstance(size, int))
    exchanges = window.communication
    sizes_by_kind = {group.kind: group.size for group in exchanges.groups} if exchanges is not None else {}
    if "data" in sizes_by_kind:
        return sizes_by_kind["data"]
    shared = sizes_by_kind.get("tensor", 1) * sizes_by_kind.get("context", 1)
    return (_peers(facts) if _is_parallel(facts) else 1) // shared


def _last_batch(window: Window, facts: Mapping[str, Any], loader: Mapping[str, Any]) -> Iterator[str]:
    """A short batch at the end of each epoch: what compiling for it costs, or else what its steps cost."""
    size, last, length = (number(loader, name) for name in ("batch_size", "last_batch", "length"))
    if loader.get("drop_last") is not False or not size or not last or not length or last >= size:
        return
    starts = np.flatnonzero((window.flags & FLAG_EPOCH_START).any(axis=0))
    ends = starts[1:] - 1
    if not len(ends) or (np.diff(window.steps[starts]) != length).any():
        return  # a step is not a batch here, or iterators are taken in between
    wall_ns, usual_ns = np.nanmean(window.wall_ns, axis=0), _median_step_ns(window)
    if usual_ns is None:
        return
    instead = f"{count_text(int(last), 'sample')} instead of {size:.0f}"
    compiled = ends[(window.flags[:, ends] & FLAG_COMPILED).any(axis=0)]
    extra_ns = float(np.clip(wall_ns[compiled] - usual_ns, 0.0, None).sum())
    share = extra_ns / float(wall_ns.sum())
    if _part(facts, "model").get("compiled") is True and (
        extra_ns >= thresholds.LAST_BATCH_COMPILE_NS or (len(compiled) and share >= thresholds.LAST_BATCH_SHARE)
    ):
        yield (
            f"The last batch of an epoch has {instead}: compiling for that shape took "
            f"{duration_text(extra_ns / 1e9)}, in step {window.steps[compiled[0]]}. drop_last=True leaves it out."
        )
        return
    waste = (float(np.median(wall_ns[ends])) / usual_ns - last / size) / length
    if len(ends) >= thresholds.LAST_BATCH_EPOCHS and waste >= thresholds.LAST_BATCH_SHARE and _is_parallel(facts):
        yield (
            f"Every epoch of {length:.0f} batches ends with a batch of {instead}, whose step takes "
            f"{ms_text(float(np.median(wall_ns[ends])) / 1e6)} (a full one: {ms_text(usual_ns / 1e6)}). drop_last=True "
            f"or longer epochs save up to {share_text(waste)} of the time."
        )


def _unequal_epochs(window: Window) -> Iterator[str]:
    """Ranks that run out of data at different times, as long as none has shown that it can handle that."""
    loaders = [_part(facts, "loader") for facts in window.facts]
    lengths = [number(loader, "length") for loader in loaders]
    parallel = all(_is_parallel(facts) for facts in window.facts)
    known = [length for length in lengths if length]
    if len(known) < 2 or len(known) < len(lengths) or not parallel or min(known) == max(known):
        return
    if len({number(loader, "batch_size") for loader in loaders}) > 1 or any(number(one, "epochs") for one in loaders):
        return
    if len(window.steps) and int(window.steps[-1]) + 1 >= min(known):
        return
    short = [rank for rank, length in zip(window.ranks, known, strict=True) if length == min(known)]
    has = "has" if len(short) == 1 else "have"
    yield (
        f"{named_ranks(short)} {has} {min(known):,.0f} batches per epoch, others up to {max(known):,.0f}: the others "
        "will wait for a collective that never comes, unless all stop together. Give every rank the same number "
        "(DistributedSampler does), or use torch.distributed.algorithms.Join."
    )


# -- model ------------------------------------------------------------------------------------------------------------


def _normalising(facts: Mapping[str, Any], loader: Mapping[str, Any], world_size: int) -> Iterator[str]:
    count = _part(facts, "model").get("sync_batchnorm")
    if isinstance(count, int) and count > 0 and world_size == 1:
        yield f"{count} SyncBatchNorm layers in a job of one rank only cost time: BatchNorm computes the same."
    own, samples = number(_part(facts, "ddp"), "batchnorm"), number(loader, "batch_size")
    ranks = _peers(facts) or world_size
    if own and samples and samples < thresholds.FEW_SAMPLES and ranks > 1:
        layer, verb = ("layer", "takes its") if own == 1 else ("layers", "take their")
        yield (
            f"{own:.0f} BatchNorm {layer} under DDP {verb} statistics from {count_text(int(samples), 'sample')} each "
            f"step, those of the own rank. It costs no time, but so few make training noisier: "
            f"SyncBatchNorm.convert_sync_batchnorm() (on GPUs) takes all {samples * ranks:.0f}, GroupNorm needs none."
        )


def _searching(window: Window) -> Iterator[str]:
    """find_unused_parameters=True that no rank needed, where the walk takes a part of the step worth mentioning."""
    ddps = [_part(facts, "ddp") for facts in window.facts]
    if not ddps or any(ddp.get("find_unused_parameters") is not True for ddp in ddps):
        return
    iterations, usual_ns = min(all_were_used(ddp) for ddp in ddps), _median_step_ns(window)
    walk_ns = max(number(ddp, "tensors") or 0.0 for ddp in ddps) * thresholds.WALK_NS_PER_TENSOR
    if iterations and usual_ns and walk_ns >= thresholds.WALK_SHARE * usual_ns:
        yield (
            f"find_unused_parameters=True is not needed: all parameters took part in each of the first "
            f"{iterations:,} backward passes. It costs a walk over the graph (up to {ms_text(walk_ns / 1e6)}, "
            f"{share_text(min(walk_ns / usual_ns, 1.0))} of the step) and one more all-reduce in every step: drop it."
        )


# -- the end ----------------------------------------------------------------------------------------------------------


def _left_open(window: Window) -> Iterator[str]:
    """Gloo's process groups are none the worse for it, and torch warns of NCCL's only."""
    left = [
        identity.rank
        for identity, facts in zip(window.identities, window.facts, strict=True)
        if facts.get("process_group_open") is True and "nccl" in identity.backend
    ]
    if left:
        who = named_ranks(left) if len(left) < len(window.ranks) else "All ranks" if len(left) > 1 else "The process"
        yield (
            f"{who} exited without torch.distributed.destroy_process_group(): torch warns of it, and NCCL may hang or "
            "abort while the process ends. Call it at the end of the script."
        )


def _median_step_ns(window: Window) -> float | None:
    steady: NDArray[np.float64] = window.wall_ns[:, window.steady]
    return float(np.nanmedian(steady)) if steady.size and not np.isnan(steady).all() else None


def _is_parallel(facts: Mapping[str, Any]) -> bool:
    return bool(_part(facts, "ddp") or _part(facts, "fsdp"))


def _peers(facts: Mapping[str, Any]) -> int:
    """How many ranks do the same on other data; 0: not known."""
    runs = facts.get("peers")
    rows: Sequence[Any] = runs if isinstance(runs, list) else ()
    return sum(row[1] for row in rows if isinstance(row, list) and len(row) == 3 and isinstance(row[1], int))


def _part(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = facts.get(name)
    return part if isinstance(part, dict) else {}
