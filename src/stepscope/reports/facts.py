"""What the script has set up, as one table for the run: the facts of a rank, and where other ranks differ from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.records.series import RankSeries
from stepscope.records.units import count_text, share_text

__all__ = ["differing_facts", "facts_of_run", "global_steps_text", "settings_of"]

COMPARED = ("loader", "ddp", "fsdp", "optimizer", "threads")
"""What should be the same everywhere …"""
OWN = (
    *("length", "last_batch", "epochs", "set_epoch_missing", "gradient_mb", "group", "buckets", "bucket_sizes_mb"),
    *("tensors", "batchnorm", "iterations", "unused", "parameters", "units", "largest_share", "resharded_units"),
)
"""… but for what follows from a rank's share of the data or of the model."""

COUNTED_BY = {
    "transformers": " of Hugging Face Trainer",
    "lightning": " of Lightning's Trainer",
    "deepspeed": " of the DeepSpeed engine",
    "optimizer": " by the optimizer's own count",
}

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
OWN_WAY = "explicit"


def facts_of_run(current: Sequence[RankSeries]) -> dict[str, Any]:
    """Those of the lowest rank that has any; {}: nothing is known."""
    known = [series for series in current if series.facts]
    return dict(min(known, key=lambda series: series.rank).facts) if known else {}


def differing_facts(current: Sequence[RankSeries]) -> list[str]:
    """``loader.num_workers`` and the like: settings in which the ranks that know them disagree."""
    seen: dict[str, list[Any]] = {}
    for series in current:
        for key in (key for key in COMPARED if key in series.facts):
            value = series.facts[key]
            named = {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
            for name, one in named.items():
                if one not in seen.setdefault(name, []):
                    seen[name].append(one)
    return sorted(name for name, values in seen.items() if len(values) > 1 and name.rpartition(".")[2] not in OWN)


def global_steps_text(facts: Mapping[str, Any], first: int | None, last: int | None) -> str:
    """Which of the training's own steps those of this run are, where they are not the same.

    That is after a resume, and where a step here is another thing than one there.
    """
    counted = facts.get("global_step")
    if not isinstance(counted, dict) or "first" not in counted or first is None or last is None:
        return ""
    behind = counted["first"]
    by = COUNTED_BY.get(str(counted.get("by")), "")
    if "last" in counted and "at" in counted:
        return _counts_text(counted, by)
    if not behind:
        return ""
    which = f"steps {first:,}–{last:,} here are" if last > first else f"step {first:,} here is"
    theirs = f"steps {first + behind:,}–{last + behind:,}" if last > first else f"step {first + behind:,}"
    return f"{which} global {theirs}{by}"


def _counts_text(counted: Mapping[str, Any], by: str) -> str:
    """Of one who counts otherwise; an optimizer may be one of several, or have skipped some."""
    behind, last, at = counted["first"], counted["last"], counted["at"]
    if counted.get("by") == "optimizer" and not behind:
        return ""
    why = (
        ", which counts the steps of each optimizer" if counted.get("by") == "lightning" and last > behind + at else ""
    )
    begin = f"step 0 here is global step {behind:,} and " if behind else ""
    return f"{begin}step {at:,} {'' if behind else 'here '}is global step {last:,}{by}{why}"


def settings_of(facts: Mapping[str, Any]) -> list[str]:
    """How the model is sharded, in one sentence: ``FSDP2: 25 units, largest 12% of the parameters, …``."""
    fsdp = facts.get("fsdp")
    if not isinstance(fsdp, dict) or not fsdp.get("units"):
        return []
    about = [count_text(fsdp["units"], "unit")]
    if fsdp.get("largest_share") is not None and fsdp["units"] > 1:
        about.append(f"largest {share_text(fsdp['largest_share'])} of the parameters")
    about += [*_sharding(fsdp), *_precision(fsdp), *_prefetch(fsdp)]
    if "cpu_offload" in fsdp:
        about.append("offloaded to the CPU" if fsdp["cpu_offload"] else "no offload")
    return [f"FSDP{fsdp.get('version', '')}: {', '.join(about)}"]


def _sharding(fsdp: Mapping[str, Any]) -> list[str]:
    if fsdp.get("strategy") == "no_shard":
        return ["not sharded"]
    hybrid = ["replicated across shards (hybrid)"] if str(fsdp.get("strategy")).startswith("hybrid") else []
    units, resharded = fsdp["units"], fsdp.get("resharded_units")
    if resharded is None:
        return hybrid
    if not resharded:
        return [*hybrid, "kept after forward"]
    # The root of FSDP2 is kept by itself: backward needs it at once.
    some = f"{resharded} of them " if resharded < units - 1 else ""
    return [*hybrid, f"{some}resharded after forward"]


def _precision(fsdp: Mapping[str, Any]) -> list[str]:
    names = {"param_dtype": "parameters", "reduce_dtype": "reduction"}
    return [f"{SHORT.get(fsdp[key], fsdp[key])} {name}" for key, name in names.items() if key in fsdp]


def _prefetch(fsdp: Mapping[str, Any]) -> list[str]:
    """What differs from torch's own way."""
    if fsdp.get("version") == 1:
        lacks = "backward_prefetch" in fsdp and fsdp["backward_prefetch"] is None
        return [*(["no backward prefetch"] if lacks else []), *(["forward prefetch"] if _forward(fsdp) else [])]
    ways = {"forward": _forward(fsdp), "backward": fsdp.get("backward_prefetch") == OWN_WAY}
    said = [way for way, explicit in ways.items() if explicit]
    return [f"explicit {' and '.join(said)} prefetch"] if said else []


def _forward(fsdp: Mapping[str, Any]) -> bool:
    return fsdp.get("forward_prefetch") is True
