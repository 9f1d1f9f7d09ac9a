"""Settings of DDP, FSDP, DataLoader and frameworks that cost time: remarks on them, and advice.

A remark is one sentence about a setting of the live objects that costs something whatever else is found; it is not a
finding.  It is made only where it matters and where the facts leave no doubt.  FSDP's settings matter to a job that
waits for its exchange or runs out of memory, so they are part of the advice of those findings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis.engine.samples import number
from stepscope.diagnosis.engine.window import Window
from stepscope.judge import thresholds
from stepscope.records.collectives import group_kind
from stepscope.records.steps import FLAG_COMPILED, FLAG_EPOCH_START
from stepscope.records.text import bytes_text, count_text, duration_text, ms_text, named_ranks, number_text, share_text

__all__ = [
    "accumulation_setting",
    "autocast_setting",
    "batch_size_of",
    "compile_setting",
    "compression_setting",
    "copy_setting",
    "ddp_setting",
    "facts_about",
    "frameworks_of",
    "fsdp_bytes_advice",
    "fsdp_memory_advice",
    "fsdp_offload_advice",
    "fsdp_prefetch_advice",
    "fsdp_units_advice",
    "fused_setting",
    "is_data_parallel",
    "loader_name",
    "loader_setting",
    "phase_advice",
    "remarks_on",
    "runs_own_loop",
    "unused_parameters_advice",
]


# -- framework settings -----------------------------------------------------------------------------------------------
# Settings by the names that the framework in use gives them.
#
# ``frameworks`` is a fact (``recorder/facts.py``): what runs the loop, the outermost first.  The outermost framework
# that has its own setting for something decides; without any, the setting is torch's.

ACCUMULATION = {
    "transformers": "TrainingArguments(gradient_accumulation_steps=…)",
    "lightning": "Trainer(accumulate_grad_batches=…)",
    "fabric": "fabric.no_backward_sync(model) around all but the last batch",
    "deepspeed": '"gradient_accumulation_steps" in the DeepSpeed config',
    "accelerate": "Accelerator(gradient_accumulation_steps=…) with accelerator.accumulate(model)",
    "torchtitan": "a larger training.global_batch_size",
    "megatron": "a larger --global-batch-size",
}
AUTOCAST = {
    "transformers": "TrainingArguments(bf16=True)",
    "lightning": 'Trainer(precision="bf16-mixed")',
    "fabric": 'Fabric(precision="bf16-mixed")',
    "deepspeed": '"bf16": {"enabled": true} in the DeepSpeed config',
    "accelerate": 'Accelerator(mixed_precision="bf16")',
    "megatron": "--bf16",
}
COMPILATION = {
    "transformers": "TrainingArguments(torch_compile=True)",
    "torchtitan": "compile.enable",
}
OWN_LOOPS = {
    "transformers": ("The Trainer", "callbacks, compute_loss, compute_metrics"),
    "lightning": ("Lightning's Trainer", "training_step, callbacks, hooks"),
}
"""Frameworks whose loop is not the user's to change, and what in it is."""
COPIES = {
    "transformers": 'TrainingArguments(accelerator_config={"non_blocking": True})',
    "accelerate": "Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))",
    "lightning": "",
}
"""Copies that do not block; empty: the framework already makes them so."""
FUSED = {"transformers": 'TrainingArguments(optim="adamw_torch_fused")'}


def frameworks_of(facts: Mapping[str, Any]) -> tuple[str, ...]:
    names = facts.get("frameworks")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def accumulation_setting(frameworks: Sequence[str]) -> str | None:
    return _first_setting(frameworks, ACCUMULATION)


def autocast_setting(frameworks: Sequence[str]) -> str:
    return _first_setting(frameworks, AUTOCAST) or "torch.autocast(dtype=torch.bfloat16)"


def compile_setting(frameworks: Sequence[str]) -> str:
    return _first_setting(frameworks, COMPILATION) or "torch.compile"


def compression_setting(frameworks: Sequence[str]) -> str:
    """DDP's hook that sends gradients in bfloat16."""
    if "lightning" in frameworks:
        return "DDPStrategy(ddp_comm_hook=bf16_compress_hook)"
    if "accelerate" in frameworks and "transformers" not in frameworks:
        return "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)"
    return "bf16_compress_hook"


def phase_advice(frameworks: Sequence[str], where: str) -> str:
    """How to find out which part of some time it is; ``where``: the code in which it passes."""
    own = next((OWN_LOOPS[name] for name in frameworks if name in OWN_LOOPS), None)
    if own is None:
        return f'Put "with stepscope.phase(name):" around parts of {where} to see which it is.'
    who, parts = own
    return (
        f'{who} runs the loop: put "with stepscope.phase(name):" around parts of your own code in it ({parts}) to see '
        "which it is."
    )


def runs_own_loop(frameworks: Sequence[str]) -> bool:
    """Whether a framework runs the training loop, so that the user cannot change it."""
    return any(name in OWN_LOOPS for name in frameworks)


def copy_setting(frameworks: Sequence[str]) -> str:
    """How to copy a batch without blocking; empty if the framework already does that."""
    return next((COPIES[name] for name in frameworks if name in COPIES), ".to(device, non_blocking=True)")


def ddp_setting(frameworks: Sequence[str], name: str, value: object) -> str:
    """``bucket_cap_mb=25``, or the framework's own setting."""
    if "transformers" in frameworks:
        return f"TrainingArguments(ddp_{name}={value})"
    return f"DDPStrategy({name}={value})" if "lightning" in frameworks else f"{name}={value}"


def fused_setting(frameworks: Sequence[str]) -> str:
    return _first_setting(frameworks, FUSED) or "fused=True (or foreach=True)"


def loader_name(frameworks: Sequence[str], name: str) -> str:
    """An argument of a DataLoader, by the framework's name for it."""
    if "transformers" in frameworks:
        return f"dataloader_{name}"
    return "--num-workers" if "megatron" in frameworks and name == "num_workers" else name


def loader_setting(frameworks: Sequence[str], name: str, value: object) -> str:
    """``DataLoader(num_workers=4)``, or the framework's own setting."""
    own = loader_name(frameworks, name)
    if own == name:
        return f"DataLoader({name}={value})"
    return f"{own} {value}" if own.startswith("--") else f"TrainingArguments({own}={value})"


def _first_setting(frameworks: Sequence[str], settings: Mapping[str, str]) -> str | None:
    return next((settings[name] for name in frameworks if name in settings), None)


# -- unused parameters ------------------------------------------------------------------------------------------------
# What to do about find_unused_parameters=True, depending on the unused parameters that DDP itself has found.


def unused_parameters_advice(ddp: Mapping[str, Any]) -> Iterator[str]:
    """For a job that waits for DDP's exchange; nothing if parameters are sometimes unused: then it is needed."""
    if ddp.get("find_unused_parameters") is not True or ddp.get("unused") == "varying":
        return
    costs = "find_unused_parameters=True walks the graph before each backward and delays the buckets"
    iterations = all_were_used(ddp)
    if iterations:
        yield f"{costs}; all parameters took part in each of {iterations:,} backward passes, so drop it."
    elif ddp.get("unused") == "same" and ddp.get("static_graph") is not True:
        yield f"{costs}; the unused parameters never change, so static_graph=True avoids the walk."
    else:
        fixed = "" if ddp.get("static_graph") is True else " (if the unused ones never change: static_graph=True)"
        yield f"{costs}: drop it if all parameters are used{fixed}."


def all_were_used(ddp: Mapping[str, Any]) -> int:
    """Number of backward passes in which all parameters took part, if that is enough to judge; else 0."""
    iterations = int(number(ddp, "iterations") or 0)
    return iterations if ddp.get("unused") == "none" and iterations >= thresholds.UNUSED_PASSES else 0


# -- remarks ----------------------------------------------------------------------------------------------------------

PLAIN_SAMPLERS = ("RandomSampler", "SequentialSampler")
"""A DataLoader's defaults."""


def remarks_on(window: Window) -> list[str]:
    """Remarks on the ranks' objects, the first rank's where all should be alike; any fact may be missing."""
    facts = next((facts for facts in window.facts if facts), {})
    world_size = max((identity.world_size for identity in window.identities), default=1)
    loader = facts_about(facts, "loader")
    return [
        *_sampling(loader, _replicas(window, facts)),
        *_last_batch(window, facts, loader),
        *_unequal_epochs(window),
        *_normalizing(facts, loader, world_size),
        *_searching(window),
        *_left_open(window),
    ]


# -- data -------------------------------------------------------------------------------------------------------------


def _sampling(loader: Mapping[str, Any], replicas: int) -> Iterator[str]:
    """``replicas``: of the model, meant to train on different samples; 1 if unknown."""
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
            "Call it with the epoch number before each epoch."
        )


def _replicas(window: Window, facts: Mapping[str, Any]) -> int:
    """Number of replicas; ranks of one tensor-, context- or pipeline-parallel group get the same samples and are one.

    If it is unknown which ranks those are, say nothing: samples that differ within such a group spoil the model.
    """
    mesh = facts_about(facts, "mesh")
    names, shape = mesh.get("names"), mesh.get("shape")
    if isinstance(names, list) and isinstance(shape, list) and names and len(names) == len(shape):
        sizes = [size for name, size in zip(names, shape, strict=True) if group_kind(str(name)) in ("data", "expert")]
        return math.prod(size for size in sizes if isinstance(size, int))
    exchanges = window.communication
    sizes_by_kind = {group.kind: group.size for group in exchanges.groups} if exchanges is not None else {}
    if "data" in sizes_by_kind:
        return sizes_by_kind["data"]
    shared = sizes_by_kind.get("tensor", 1) * sizes_by_kind.get("context", 1)
    return (_peer_count(facts) if is_data_parallel(facts) else 1) // shared


def _last_batch(window: Window, facts: Mapping[str, Any], loader: Mapping[str, Any]) -> Iterator[str]:
    """A short batch at the end of each epoch: what compiling for it costs, or else what its steps cost."""
    size, last, length = (number(loader, name) for name in ("batch_size", "last_batch", "length"))
    if loader.get("drop_last") is not False or not size or not last or not length or last >= size:
        return
    starts = np.flatnonzero((window.flags & FLAG_EPOCH_START).any(axis=0))
    ends = starts[1:] - 1
    if not len(ends) or (np.diff(window.steps[starts]) != length).any():
        return  # a step is not a batch here, or other iterators are created in between
    wall_ns, usual_ns = np.nanmean(window.wall_ns, axis=0), _median_step_ns(window)
    if usual_ns is None:
        return
    instead = f"{count_text(int(last), 'sample')} instead of {size:.0f}"
    compiled = ends[(window.flags[:, ends] & FLAG_COMPILED).any(axis=0)]
    extra_ns = float(np.clip(wall_ns[compiled] - usual_ns, 0.0, None).sum())
    share = extra_ns / float(wall_ns.sum())
    if facts_about(facts, "model").get("compiled") is True and (
        extra_ns >= thresholds.LAST_BATCH_COMPILE_NS or (len(compiled) and share >= thresholds.LAST_BATCH_SHARE)
    ):
        yield (
            f"The last batch of an epoch has {instead}: compiling for that shape took "
            f"{duration_text(extra_ns / 1e9)}, in step {window.steps[compiled[0]]}. drop_last=True skips it."
        )
        return
    waste = (float(np.median(wall_ns[ends])) / usual_ns - last / size) / length
    if len(ends) >= thresholds.LAST_BATCH_EPOCHS and waste >= thresholds.LAST_BATCH_SHARE and is_data_parallel(facts):
        yield (
            f"Every epoch of {length:.0f} batches ends with a batch of {instead}, whose step takes "
            f"{ms_text(float(np.median(wall_ns[ends])) / 1e6)} ({ms_text(usual_ns / 1e6)} for a full batch). "
            f"drop_last=True or longer epochs save up to {share_text(waste)} of the time."
        )


def _unequal_epochs(window: Window) -> Iterator[str]:
    """Ranks that run out of data at different times, unless a rank has shown that it can handle that."""
    loaders = [facts_about(facts, "loader") for facts in window.facts]
    lengths = [number(loader, "length") for loader in loaders]
    parallel = all(is_data_parallel(facts) for facts in window.facts)
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


def _normalizing(facts: Mapping[str, Any], loader: Mapping[str, Any], world_size: int) -> Iterator[str]:
    count = facts_about(facts, "model").get("sync_batchnorm")
    if isinstance(count, int) and count > 0 and world_size == 1:
        yield f"{count} SyncBatchNorm layers in a single-rank job only cost time: BatchNorm computes the same."
    own, samples = number(facts_about(facts, "ddp"), "batchnorm"), number(loader, "batch_size")
    ranks = _peer_count(facts) or world_size
    if own and samples and samples < thresholds.FEW_SAMPLES and ranks > 1:
        layer, verb = ("layer", "takes its") if own == 1 else ("layers", "take their")
        yield (
            f"{own:.0f} BatchNorm {layer} under DDP {verb} statistics from {count_text(int(samples), 'sample')} each "
            f"step, those of one rank. It costs no time, but so few make training noisier: "
            f"SyncBatchNorm.convert_sync_batchnorm() (on GPUs) takes all {samples * ranks:.0f}, GroupNorm needs none."
        )


def _searching(window: Window) -> Iterator[str]:
    """find_unused_parameters=True that no rank needed, if the walk takes a noticeable part of the step."""
    ddps = [facts_about(facts, "ddp") for facts in window.facts]
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


# -- process groups at exit -------------------------------------------------------------------------------------------


def _left_open(window: Window) -> Iterator[str]:
    """NCCL only: it does no harm to gloo's process groups, and torch does not warn about those."""
    left = [
        identity.rank
        for identity, facts in zip(window.identities, window.facts, strict=True)
        if facts.get("process_group_open") is True and "nccl" in identity.backend
    ]
    if left:
        who = named_ranks(left) if len(left) < len(window.ranks) else "All ranks" if len(left) > 1 else "The process"
        yield (
            f"{who} exited without torch.distributed.destroy_process_group(): torch warns about it, and NCCL may hang "
            "or abort at exit. Call it at the end of the script."
        )


def _median_step_ns(window: Window) -> float | None:
    steady: NDArray[np.float64] = window.wall_ns[:, window.steady]
    return float(np.nanmedian(steady)) if steady.size and not np.isnan(steady).all() else None


def batch_size_of(facts: Mapping[str, Any]) -> int | None:
    """Samples in a batch of a data-parallel rank's training loader; None: not known, or not data-parallel."""
    size = number(facts_about(facts, "loader"), "batch_size") if is_data_parallel(facts) else None
    return int(size) if size else None


def is_data_parallel(facts: Mapping[str, Any]) -> bool:
    return bool(facts_about(facts, "ddp") or facts_about(facts, "fsdp"))


def _peer_count(facts: Mapping[str, Any]) -> int:
    """How many ranks do the same on other data; 0: unknown."""
    runs = facts.get("peers")
    rows: Sequence[Any] = runs if isinstance(runs, list) else ()
    return sum(row[1] for row in rows if isinstance(row, list) and len(row) == 3 and isinstance(row[1], int))


def facts_about(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = facts.get(name)
    return part if isinstance(part, dict) else {}


# -- FSDP -------------------------------------------------------------------------------------------------------------
# Advice on FSDP's settings; each sentence says what the present setting costs.  Only for findings that show that it
# matters: an exposed exchange, or a device that is nearly full.

WIDE = "float32"
NARROW = ("bfloat16", "float16")
ITEM_BYTES = {"float64": 8, WIDE: 4, "bfloat16": 2, "float16": 2}


def fsdp_units_advice(fsdp: Mapping[str, Any]) -> Iterator[str]:
    """Wrapping: if one unit has nearly everything, nothing computes while it is gathered."""
    count, share = number(fsdp, "units"), number(fsdp, "largest_share")
    if not _fsdp_shards(fsdp) or not count or share is None or share < thresholds.FSDP_LARGEST_SHARE:
        return
    how = _fsdp_wrap_advice(fsdp)
    if count == 1:
        yield (
            f"FSDP has a single unit of all {_fsdp_parameters(fsdp)}: nothing can compute while they are gathered"
            f"{_size(fsdp, share)}. {how}"
        )
    else:
        yield (
            f"One of {count:.0f} FSDP units has {share_text(share)} of the parameters{_size(fsdp, share)}: hardly "
            f"anything can compute while it is gathered. {how}"
        )


def fsdp_prefetch_advice(fsdp: Mapping[str, Any]) -> Iterator[str]:
    """Gather the next unit while one computes; for FSDP2 also if the settings are unknown."""
    if number(fsdp, "units") == 1:
        return
    if fsdp.get("version") == 1:
        if "backward_prefetch" in fsdp and fsdp["backward_prefetch"] is None:
            yield "backward_prefetch=None: BackwardPrefetch.BACKWARD_PRE gathers the next unit while one computes."
        if fsdp.get("forward_prefetch") is False:
            yield "forward_prefetch=False: with True the next unit is gathered while one computes."
    elif fsdp.get("forward_prefetch") is not True or fsdp.get("backward_prefetch") != "explicit":
        yield "set_modules_to_forward_prefetch() and …_backward_prefetch() fetch the next layers while one computes."


def fsdp_bytes_advice(fsdp: Mapping[str, Any]) -> Iterator[str]:
    """Bytes that need not be exchanged."""
    policy = "MixedPrecision" if fsdp.get("version") == 1 else "MixedPrecisionPolicy"
    param, reduce = fsdp.get("param_dtype"), fsdp.get("reduce_dtype")
    if param == WIDE and _fsdp_shards(fsdp):
        yield (
            f"Parameters are gathered in float32{_size(fsdp)}: {policy}(param_dtype=torch.bfloat16) halves the bytes."
        )
    elif param in NARROW and reduce == WIDE:
        yield (
            f"Gradients are reduced in float32{_size(fsdp, dtype=WIDE)}: {policy}(reduce_dtype=torch.bfloat16) halves "
            "the bytes, but sums are less exact."
        )
    if (number(fsdp, "units") or 0) > 1 and number(fsdp, "resharded_units"):
        keep = "ShardingStrategy.SHARD_GRAD_OP" if fsdp.get("version") == 1 else "reshard_after_forward=False"
        yield (
            f"Parameters are freed after forward and gathered again for backward{_size(fsdp)}: {keep} saves the "
            "second gather, if they fit into memory."
        )


def fsdp_offload_advice(fsdp: Mapping[str, Any]) -> Iterator[str]:
    if fsdp.get("cpu_offload") is True:
        yield (
            f"FSDP keeps parameters on the CPU{_size(fsdp)}: they are copied to the device in every step, gradients "
            "back, and the optimizer runs on the CPU. If memory allows, turn the offload off."
        )


def fsdp_memory_advice(fsdp: Mapping[str, Any], total_bytes: float) -> Iterator[str]:
    """What FSDP itself holds on a device that is nearly full, if that is a noticeable part."""
    count, share, whole = number(fsdp, "units"), number(fsdp, "largest_share"), _fsdp_whole_bytes(fsdp)
    if not _fsdp_shards(fsdp) or not count or share is None or whole is None:
        return
    if share >= thresholds.FSDP_LARGEST_SHARE and whole * share >= thresholds.FSDP_GATHERED_SHARE * total_bytes:
        which = "a single unit" if count == 1 else f"one of {count:.0f} units"
        yield (
            f"FSDP gathers {share_text(share)} of the parameters at once{_size(fsdp, share)}, since {which} has them. "
            f"{_fsdp_wrap_advice(fsdp)}"
        )
    elif count > 1 and fsdp.get("resharded_units") == 0 and whole >= thresholds.FSDP_GATHERED_SHARE * total_bytes:
        free = "ShardingStrategy.FULL_SHARD" if fsdp.get("version") == 1 else "reshard_after_forward=True"
        yield f"FSDP keeps all parameters gathered from forward to backward{_size(fsdp)}: {free} frees them."


def _fsdp_wrap_advice(fsdp: Mapping[str, Any]) -> str:
    if fsdp.get("version") == 1:
        return "Pass an auto_wrap_policy that wraps each block (ModuleWrapPolicy)."
    return "Call fully_shard() on each block, then on the model."


def _fsdp_shards(fsdp: Mapping[str, Any]) -> bool:
    return bool(fsdp) and fsdp.get("strategy") != "no_shard"


def _fsdp_parameters(fsdp: Mapping[str, Any]) -> str:
    count = number(fsdp, "parameters")
    return f"{number_text(count)} parameters" if count else "parameters"


def _fsdp_whole_bytes(fsdp: Mapping[str, Any], dtype: str | None = None) -> float | None:
    """Size of all parameters, or gradients, in the dtype that is exchanged; None: unknown."""
    count, each = number(fsdp, "parameters"), ITEM_BYTES.get(str(dtype or fsdp.get("param_dtype")))
    return count * each if count and each else None


def _size(fsdp: Mapping[str, Any], share: float = 1.0, dtype: str | None = None) -> str:
    whole = _fsdp_whole_bytes(fsdp, dtype)
    return f" ({bytes_text(whole * share)})" if whole else ""
