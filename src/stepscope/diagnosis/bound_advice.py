"""What to do about a bottleneck that all ranks share: sentences chosen by what was seen of the live objects.

Facts come from the recorder (``RankSeries.facts``) and may be missing one by one; then the sentence names the setting
without its present value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.diagnosis import thresholds
from stepscope.diagnosis.advice import for_input
from stepscope.diagnosis.communication_overlap import SHARDED
from stepscope.diagnosis.communication_rules import exchanges_of
from stepscope.diagnosis.ddp_advice import for_unused
from stepscope.diagnosis.framework_advice import (
    accumulation,
    autocast,
    compilation,
    compression,
    frameworks_of,
    fused,
    loader_setting,
)
from stepscope.diagnosis.fsdp_advice import for_fewer_bytes, for_offload, for_prefetch, for_units
from stepscope.diagnosis.placed import host_readings, process_readings
from stepscope.diagnosis.samples import number, numbers, of_kind
from stepscope.diagnosis.shares import epoch_starts, is_even
from stepscope.diagnosis.steady import in_steady_steps
from stepscope.diagnosis.view import View

__all__ = ["for_comm", "for_compute", "for_h2d", "for_input_of", "for_optimizer"]

Floats = NDArray[np.float64]
BUSY_PROCESS_PERCENT = 80.0
"""Of one core: a training process that takes more hardly ever waits for workers."""
BUSY_CPU_PERCENT = 90.0
"""Median over the steady steps at which a host's CPUs are called saturated."""
FEW_BUCKETS = 2
"""With fewer buckets nothing can be sent while the rest of backward runs."""
SMALL_BUCKET_MB = 4.0
"""Below it an all-reduce is latency, not bandwidth."""


def for_input_of(view: View, shared_ns: Floats) -> tuple[str, ...]:
    waits = shared_ns[~np.isnan(shared_ns)]
    starts = epoch_starts(view)[~np.isnan(shared_ns)]
    at_starts = float(waits[starts].sum() / waits.sum()) if waits.sum() else 0.0
    _, hosts = host_readings(view)
    return for_input(
        every_step=is_even(waits),
        epoch_starts=at_starts >= thresholds.EXPLAINS_SHARE,
        main_busy=_main_busy(view),
        cpu_saturated=_saturated(_known(hosts.of("cpu_percent")), _known(hosts.of("own_cpu_percent"))),
        cores=_cores_each(view, numbers(of_kind(view.window.samples, "host"), "cpu_count")),
        on_device=view.clock == "device",
        loader=_facts(view, "loader"),
        frameworks=frameworks_of(view.facts),
    )


def for_h2d(view: View, _: Floats) -> tuple[str, ...]:
    pinned = _facts(view, "loader").get("pin_memory")
    if pinned is False:
        pin = loader_setting(frameworks_of(view.facts), "pin_memory", True)
        first = f"The DataLoader has pin_memory=False: copies from pageable memory block; set {pin} …"
        return (
            first,
            "… and copy with .to(device, non_blocking=True), so that the next batch travels behind the computation.",
        )
    return (
        "Copy with .to(device, non_blocking=True) from pinned memory; a second stream for the next batch hides it.",
        "Send fewer bytes: uint8 pictures converted on the device, lengths instead of masks.",
    )


def for_comm(view: View, _: Floats) -> tuple[str, ...]:
    ddp, model, fsdp = _facts(view, "ddp"), _facts(view, "model"), _waited_for(view)
    lines = [*for_units(fsdp), *for_fewer_bytes(fsdp), *for_offload(fsdp)]
    if fsdp:
        lines += [] if len(lines) > 1 else for_prefetch(fsdp)
    else:
        lines += for_unused(ddp)
    gradient_mb, bucket_mb = number(ddp, "gradient_mb"), number(ddp, "bucket_mb")
    if gradient_mb and bucket_mb and gradient_mb >= SMALL_BUCKET_MB:
        if gradient_mb / bucket_mb < FEW_BUCKETS:
            lines.append(
                f"{gradient_mb:.0f} MB of gradients in buckets of {bucket_mb:.0f} MB leave nothing to send while "
                f"backward still runs: try bucket_cap_mb={max(1, round(gradient_mb / 4))}."
            )
        elif bucket_mb < SMALL_BUCKET_MB:
            lines.append(f"Buckets of {bucket_mb:.1f} MB are all latency: leave bucket_cap_mb at 25 or above.")
    if number(model, "sync_batchnorm"):
        lines.append(
            f"{model['sync_batchnorm']} SyncBatchNorm layers exchange statistics in every forward: plain BatchNorm or "
            "GroupNorm does not."
        )
    lines += [] if fsdp else _exchange_less(view)
    lines.append(
        "All ranks wait alike, so no rank is to blame: look at the links between the hosts."
        if len(set(view.hosts)) > 1
        else "All ranks wait alike and share one host: neither a rank nor a network is to blame."
    )
    return tuple(lines[:3])


def _exchange_less(view: View) -> Iterator[str]:
    """How to exchange less, by what is exchanged; FSDP's settings are told elsewhere."""
    rows, frameworks = exchanges_of(view), frameworks_of(view.facts)
    kind = rows[0]["kind"] if rows else "data"
    if kind == "tensor":
        yield (
            "Tensor parallelism exchanges in every layer: keep its groups within a host, or make them smaller and use "
            "more data parallelism."
        )
    elif rows and rows[0]["op"] == "all_to_all":
        yield (
            "An all_to_all is part of each layer that has one: keep its group within a host, or smaller, and start it "
            "before work that does not need its result."
        )
    elif kind in ("context", "expert"):
        yield f"Ranks of a {kind}-parallel group exchange in every layer: keep the group within a host, or smaller."
    elif "deepspeed" in frameworks:
        yield (
            'DeepSpeed config: "overlap_comm": true hides the exchange behind backward, a larger "reduce_bucket_size" '
            "needs fewer calls, and a lower ZeRO stage gathers less."
        )
        yield from _accumulate(view)
    elif _facts(view, "ddp"):
        yield from _accumulate(view)
        yield f"Send bfloat16 ({compression(frameworks)}), or take larger batches."
    else:
        yield from _accumulate(view)
        yield "Send fewer bytes (bfloat16 gradients), or take larger batches."


def _accumulate(view: View) -> Iterator[str]:
    """That gradients can be accumulated; nothing where they are."""
    frameworks = frameworks_of(view.facts)
    if view.accumulates:
        return
    setting = accumulation(frameworks)
    if setting is None:
        setting = "all but the last backward under model.no_sync()" if _facts(view, "ddp") else ""
    how = f": {setting}" if setting else ""
    yield f"Accumulate gradients over several batches, so that they are exchanged less often{how}."


def for_optimizer(view: View, _: Floats) -> tuple[str, ...]:
    optimizer = _facts(view, "optimizer")
    name = optimizer.get("class") or "the optimizer"
    frameworks = frameworks_of(view.facts)
    lines = [*for_offload(_facts(view, "fsdp"))]
    if optimizer.get("fused") is not True:
        lines.append(f"{name} does not run fused: {fused(frameworks)} updates all tensors in a few kernels.")
    if optimizer.get("foreach") is False:
        lines.append("foreach=False updates one tensor after the other: leave it out.")
    if not view.accumulates:
        setting = accumulation(frameworks)
        how = f": {setting}" if setting else ""
        lines.append(f"Accumulate gradients over several batches, so that it runs less often{how}.")
    if _facts(view, "ddp") and len(view.ranks) > 1:
        lines.append("Every rank updates all parameters: ZeroRedundancyOptimizer shares that among them.")
    return tuple(lines) or ("Larger batches need fewer updates.",)


def for_compute(view: View) -> tuple[str, ...]:
    """What is not yet used of what makes compute faster."""
    model, optimizer, facts = _facts(view, "model"), _facts(view, "optimizer"), view.facts
    on_device, frameworks = view.clock == "device", frameworks_of(facts)
    lines = []
    if on_device and facts and facts.get("autocast") is None and model.get("dtype") in (None, "float32"):
        lines.append(f"The model computes in float32: {autocast(frameworks)} uses the tensor cores.")
    if model and model.get("compiled") is False:
        lines.append(f"The model is not compiled: {compilation(frameworks)} fuses its small kernels.")
    if on_device and optimizer and optimizer.get("fused") is not True:
        lines.append(f"{optimizer.get('class') or 'The optimizer'}(fused=True) takes fewer kernels.")
    if on_device and facts.get("tf32") is False:
        lines.append('torch.set_float32_matmul_precision("high") lets float32 products use TF32.')
    lines.append("Faster from here means less compute per sample: autocast, torch.compile, a larger batch.")
    return tuple(lines[:2])


def _waited_for(view: View) -> Mapping[str, Any]:
    """The facts about FSDP; {} where the ranks wait for something else: tensor parallelism, say."""
    rows = exchanges_of(view)
    if rows and rows[0]["op"] not in SHARDED and rows[0]["kind"] != "data":
        return {}
    return _facts(view, "fsdp")


def _facts(view: View, name: str) -> Mapping[str, Any]:
    facts = view.facts.get(name)
    return facts if isinstance(facts, dict) else {}


def _saturated(percent: Floats, own_percent: Floats) -> bool:
    """Whether the job has used up the CPUs itself; unknown whose the load is, it is taken for the job's."""
    if not len(percent) or np.median(percent) < BUSY_CPU_PERCENT:
        return False
    return not len(own_percent) or bool(np.median(own_percent) >= thresholds.CPU_OTHERS_SHARE * np.median(percent))


def _main_busy(view: View) -> bool | None:
    """Whether the training processes themselves were busy all the time; None without samples of them."""
    readings = process_readings(view)
    used, wall_ns = readings.of("cpu_percent"), readings.of("wall_ns")
    steady = [in_steady_steps(view.window, (int(row),), wall_ns[at]) for at, row in enumerate(view.rows)]
    known = _known(used[np.array(steady, np.bool_).reshape(used.shape)])
    return float(np.median(known)) >= BUSY_PROCESS_PERCENT if len(known) else None


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _cores_each(view: View, counts: list[float]) -> int | None:
    """Cores of the smallest host by the ranks on the fullest one."""
    ranks = Counter(view.window.hosts)
    return max(1, int(min(counts)) // max(ranks.values())) if counts and ranks else None
