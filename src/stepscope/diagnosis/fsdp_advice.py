"""What to do about FSDP's settings, in words; each sentence says what the present setting costs.

Only for findings that show that it matters: an exchange that is exposed, or a device that is nearly full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.diagnosis.samples import number
from stepscope.records.units import bytes_text, number_text, share_text

__all__ = ["for_fewer_bytes", "for_full_device", "for_offload", "for_prefetch", "for_units"]

LARGEST_SHARE = 0.5
"""Of all parameters in one unit: little is left to compute while it is gathered."""
HELD_SHARE = 0.05
"""Of a device's memory: gathered parameters that take less are not what fills it."""
WIDE = "float32"
NARROW = ("bfloat16", "float16")
ITEM_BYTES = {"float64": 8, WIDE: 4, "bfloat16": 2, "float16": 2}


def for_units(fsdp: Mapping[str, Any]) -> Iterator[str]:
    """How it is wrapped: where one unit has nearly everything, nothing computes while that is gathered."""
    count, share = number(fsdp, "units"), number(fsdp, "largest_share")
    if not _shards(fsdp) or not count or share is None or share < LARGEST_SHARE:
        return
    how = _wrap(fsdp)
    if count == 1:
        yield (
            f"FSDP has a single unit of all {_parameters(fsdp)}: nothing can compute while they are gathered"
            f"{_bytes(fsdp, share)}. {how}"
        )
    else:
        yield (
            f"One of {count:.0f} FSDP units has {share_text(share)} of the parameters{_bytes(fsdp, share)}: hardly "
            f"anything can compute while it is gathered. {how}"
        )


def for_prefetch(fsdp: Mapping[str, Any]) -> Iterator[str]:
    """The next unit, gathered while one computes; of FSDP2 also where nothing is known of the settings."""
    if number(fsdp, "units") == 1:
        return
    if fsdp.get("version") == 1:
        if "backward_prefetch" in fsdp and fsdp["backward_prefetch"] is None:
            yield "backward_prefetch=None: BackwardPrefetch.BACKWARD_PRE gathers the next unit while one computes."
        if fsdp.get("forward_prefetch") is False:
            yield "forward_prefetch=False: with True the next unit is gathered while one computes."
    elif fsdp.get("forward_prefetch") is not True or fsdp.get("backward_prefetch") != "explicit":
        yield "set_modules_to_forward_prefetch() and …_backward_prefetch() fetch the next layers while one computes."


def for_fewer_bytes(fsdp: Mapping[str, Any]) -> Iterator[str]:
    """What is exchanged that need not be."""
    policy = "MixedPrecision" if fsdp.get("version") == 1 else "MixedPrecisionPolicy"
    param, reduce = fsdp.get("param_dtype"), fsdp.get("reduce_dtype")
    if param == WIDE and _shards(fsdp):
        yield (
            f"Parameters are gathered in float32{_bytes(fsdp)}: {policy}(param_dtype=torch.bfloat16) halves the bytes."
        )
    elif param in NARROW and reduce == WIDE:
        yield (
            f"Gradients are reduced in float32{_bytes(fsdp, dtype=WIDE)}: {policy}(reduce_dtype=torch.bfloat16) halves "
            "the bytes, but sums are less exact."
        )
    if (number(fsdp, "units") or 0) > 1 and number(fsdp, "resharded_units"):
        keep = "ShardingStrategy.SHARD_GRAD_OP" if fsdp.get("version") == 1 else "reshard_after_forward=False"
        yield (
            f"Parameters are freed after forward and gathered again for backward{_bytes(fsdp)}: {keep} saves the "
            "second gather, if they fit into memory."
        )


def for_offload(fsdp: Mapping[str, Any]) -> Iterator[str]:
    if fsdp.get("cpu_offload") is True:
        yield (
            f"FSDP keeps parameters on the CPU{_bytes(fsdp)}: they are copied to the device in every step, gradients "
            "back, and the optimizer runs on the CPU. Without the offload none of that happens, if memory allows."
        )


def for_full_device(fsdp: Mapping[str, Any], total_bytes: float) -> Iterator[str]:
    """What FSDP itself holds on a device that is nearly full, where that is a part worth mentioning."""
    count, share, whole = number(fsdp, "units"), number(fsdp, "largest_share"), _whole_bytes(fsdp)
    if not _shards(fsdp) or not count or share is None or whole is None:
        return
    if share >= LARGEST_SHARE and whole * share >= HELD_SHARE * total_bytes:
        which = "a single unit" if count == 1 else f"one of {count:.0f} units"
        yield (
            f"FSDP gathers {share_text(share)} of the parameters at once{_bytes(fsdp, share)}, since {which} has them. "
            f"{_wrap(fsdp)}"
        )
    elif count > 1 and fsdp.get("resharded_units") == 0 and whole >= HELD_SHARE * total_bytes:
        free = "ShardingStrategy.FULL_SHARD" if fsdp.get("version") == 1 else "reshard_after_forward=True"
        yield f"FSDP keeps all parameters gathered from forward to backward{_bytes(fsdp)}: {free} frees them."


def _wrap(fsdp: Mapping[str, Any]) -> str:
    if fsdp.get("version") == 1:
        return "Pass an auto_wrap_policy that wraps each block (ModuleWrapPolicy)."
    return "Call fully_shard() on each block, then on the model."


def _shards(fsdp: Mapping[str, Any]) -> bool:
    return bool(fsdp) and fsdp.get("strategy") != "no_shard"


def _parameters(fsdp: Mapping[str, Any]) -> str:
    count = number(fsdp, "parameters")
    return f"{number_text(count)} parameters" if count else "parameters"


def _whole_bytes(fsdp: Mapping[str, Any], dtype: str | None = None) -> float | None:
    """All parameters, or gradients, in the dtype that is exchanged; None: not known."""
    count, each = number(fsdp, "parameters"), ITEM_BYTES.get(str(dtype or fsdp.get("param_dtype")))
    return count * each if count and each else None


def _bytes(fsdp: Mapping[str, Any], share: float = 1.0, dtype: str | None = None) -> str:
    whole = _whole_bytes(fsdp, dtype)
    return f" ({bytes_text(whole * share)})" if whole else ""
