"""What a rank held when memory ran out (``recorder/layers/memory_dump.py``), and what would have made room.

torch's message has the figures of the very moment; when the error reaches the recorder, some of that is free again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.diagnosis.engine.settings import accumulation_setting, frameworks_of
from stepscope.judge import thresholds
from stepscope.records.layers import MEMORY_KINDS, MemoryAccount
from stepscope.records.text import bytes_text, share_text

__all__ = ["FEWER_COPIES", "OutOfMemory", "out_of_memory"]

FEWER_COPIES = "Fewer DataLoader workers, a smaller prefetch_factor, or memory-mapped data."
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
    reported = {name: _size_told(found) for name, pattern in _TOLD.items() if (found := pattern.search(message))}
    others = sum(_size_told(found) for found in _OTHERS.finditer(message))
    if others:
        reported["others_bytes"] = others
    if account is None:
        return OutOfMemory(evidence={**reported}, advice=tuple(_told_advice(reported, host=host)))
    usage = _Held(account, reported, host=host)
    frameworks = frameworks_of(facts)
    sharded = bool(facts.get("fsdp")) or "deepspeed" in frameworks
    if host and "MemTotal" in account.process:
        reported["total_bytes"] = account.process["MemTotal"]
    advice = [usage.sentence, *_told_advice(reported, host=host), *_limit_advice(account)]
    advice += usage.advice(world_size=world_size, sharded=sharded, facts=facts)
    if host and len(advice) == 1:
        advice.append(FEWER_COPIES)
    del advice[MOST_ADVICE:]
    if account.snapshot is not None:
        advice.append(f"Every block of the allocator: drop {account.snapshot} of the run on pytorch.org/memory_viz.")
    return OutOfMemory(evidence={**reported, **usage.evidence}, advice=tuple(advice))


def _limit_advice(account: MemoryAccount) -> Iterator[str]:
    limit = account.process.get("limit")
    if account.device == "cpu" and limit:
        most = account.process.get("VmPeak", 0)
        yield f"The process may use {bytes_text(limit)} of address space (ulimit -v); it had up to {bytes_text(most)}."


def _size_told(found: re.Match[str]) -> int:
    return round(float(found[1]) * UNITS[found[2].lower()])


def _told_advice(reported: Mapping[str, int], *, host: bool) -> Iterator[str]:
    """What the message alone shows."""
    requested, total = reported.get("requested_bytes", 0), reported.get("total_bytes", 0)
    if total and requested >= total:
        yield (
            f"One call asked for {bytes_text(requested)}, more than the {bytes_text(total)} of the "
            f"{'host' if host else 'device'}: look at the shapes in the line that the traceback names."
        )
    unused = reported.get("reserved_unused_bytes", 0)
    if unused and requested <= unused + reported.get("free_bytes", 0):
        yield (
            f"{bytes_text(unused)} are reserved but in pieces that are too small for the {bytes_text(requested)} asked "
            "for: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids that."
        )
    others = reported.get("others_bytes", 0)
    if others >= thresholds.OOM_SHARE * max(total, 1):
        yield f"Other processes hold {bytes_text(others)} of the same GPU: give the job its own GPU."


class _Held:
    """The bytes by kind at that moment, and where most of each kind is."""

    def __init__(self, account: MemoryAccount, reported: Mapping[str, int], *, host: bool) -> None:
        self._account = account
        self._host = host
        known = {kind: size for kind, size in account.kinds.items() if size}
        sampled = known.pop("activations", None)
        static = sum(known.values())
        # Activations are of an earlier step: only as many can be there as there is room for.
        in_use = (
            account.process.get("VmRSS", 0) if host else reported.get("allocated_bytes") or account.allocated_peak or 0
        )
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
        return sorted(self.kinds.items(), key=lambda part: -part[1])

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
        return [text for saved, text in sorted(found, key=lambda part: -part[0]) if saved >= least]

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
