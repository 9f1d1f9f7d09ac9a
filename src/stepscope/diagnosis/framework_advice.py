"""Settings by the names that the framework in use gives them.

``frameworks`` is a fact (``recorder/callers.py``): what runs the loop, the outermost first.  The outermost that has a
setting of its own for something is the one whose setting counts; without any, the setting is torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "accumulation",
    "autocast",
    "compilation",
    "compression",
    "frameworks_of",
    "fused",
    "loader_name",
    "loader_setting",
]

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
FUSED = {"transformers": 'TrainingArguments(optim="adamw_torch_fused")'}


def frameworks_of(facts: Mapping[str, Any]) -> tuple[str, ...]:
    said = facts.get("frameworks")
    return tuple(name for name in said if isinstance(name, str)) if isinstance(said, list) else ()


def accumulation(frameworks: Sequence[str]) -> str | None:
    return _first(frameworks, ACCUMULATION)


def autocast(frameworks: Sequence[str]) -> str:
    return _first(frameworks, AUTOCAST) or "torch.autocast(dtype=torch.bfloat16)"


def compilation(frameworks: Sequence[str]) -> str:
    return _first(frameworks, COMPILATION) or "torch.compile"


def compression(frameworks: Sequence[str]) -> str:
    """DDP's hook that sends gradients in bfloat16."""
    if "lightning" in frameworks:
        return "DDPStrategy(ddp_comm_hook=bf16_compress_hook)"
    if "accelerate" in frameworks and "transformers" not in frameworks:
        return "DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)"
    return "bf16_compress_hook"


def fused(frameworks: Sequence[str]) -> str:
    return _first(frameworks, FUSED) or "fused=True (or foreach=True)"


def loader_name(frameworks: Sequence[str], name: str) -> str:
    """An argument of a DataLoader, by the name that the framework gives it."""
    if "transformers" in frameworks:
        return f"dataloader_{name}"
    return "--num-workers" if "megatron" in frameworks and name == "num_workers" else name


def loader_setting(frameworks: Sequence[str], name: str, value: object) -> str:
    """``DataLoader(num_workers=4)``, or the framework's own setting."""
    own = loader_name(frameworks, name)
    if own == name:
        return f"DataLoader({name}={value})"
    return f"{own} {value}" if own.startswith("--") else f"TrainingArguments({own}={value})"


def _first(frameworks: Sequence[str], settings: Mapping[str, str]) -> str | None:
    return next((settings[name] for name in frameworks if name in settings), None)
