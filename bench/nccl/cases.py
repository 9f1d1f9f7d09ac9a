"""The matrix, as data: strategy, ranks, and which rank is slow where.

How long a fault lasts is a share of the configuration's own healthy step, which is measured first: the same fault is
plain in a step of 9 ms and hidden in one of 40.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["CASES", "CPU", "CUDA", "Case", "Lengths", "fault_ms", "fault_text"]

HOST, DEVICE, SMALL = 0.9, 0.5, 0.1
"""Of a healthy step.  The host runs ahead of the device, so a host loses part of its fault in that lead."""
LEAST_MS, MOST_MS = 2.0, 40.0
"""Of every fault but the small ones: less is lost in the machine's noise, more takes the machine's time."""

KINDS = {
    "input": frozenset({"input_straggler"}),
    "forward": frozenset({"compute_straggler"}),
    "backward": frozenset({"compute_straggler"}),
    "optimizer": frozenset({"compute_straggler"}),
    "between": frozenset({"between_steps", "straggler"}),
}
PHASES: dict[str, frozenset[str | None]] = {
    **{where: frozenset({where}) for where in ("input", "forward", "backward", "optimizer")},
    "between": frozenset({"other", "between", "between_steps", None}),
}


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How many steps, by device: see job.py."""

    warm: int
    steps: int
    clean: int
    """Without the fault, after it; a healthy job has none."""
    late_from: int
    late_steps: int


CUDA = Lengths(warm=30, steps=220, clean=110, late_from=300, late_steps=400)
CPU = Lengths(warm=10, steps=60, clean=40, late_from=60, late_steps=100)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    """STRATEGY/RANKS/FAULT."""
    strategy: str
    ranks: int
    where: str = ""
    """Empty: healthy."""
    side: str = ""
    culprit: int = -1
    size: float = 0.0
    """Of the configuration's healthy step."""
    late: bool = False

    @property
    def configuration(self) -> str:
        return f"{self.strategy}/{self.ranks}"

    @property
    def healthy(self) -> bool:
        return not self.where

    @property
    def kinds(self) -> frozenset[str]:
        return KINDS.get(self.where, frozenset())

    @property
    def phases(self) -> frozenset[str | None]:
        return PHASES.get(self.where, frozenset())


def fault_ms(case: Case, healthy_step_ms: float) -> float:
    """How long the fault lasts, in a configuration whose healthy step takes so long."""
    ms = case.size * healthy_step_ms
    return round(ms if case.size <= SMALL else min(max(ms, LEAST_MS), MOST_MS), 3)


def fault_text(case: Case, ms: float, lengths: Lengths) -> str:
    """As job.py takes it."""
    if case.healthy:
        return "none"
    start = f":{lengths.late_from}" if case.late else ""
    return f"{case.where}:{case.side}:{case.culprit}:{ms:g}{start}"


FAULTS = (
    ("input", "host"),
    ("forward", "host"),
    ("forward", "device"),
    ("backward", "host"),
    ("backward", "device"),
    ("optimizer", "host"),
    ("optimizer", "device"),
    ("between", "host"),
    ("between", "device"),
)
SMALL_FAULTS = (("backward", "device"), ("forward", "device"))
CONFIGURATIONS = (
    ("ddp", 2, FAULTS, ("backward", "device"), SMALL_FAULTS),
    ("fsdp2", 2, FAULTS, ("forward", "device"), SMALL_FAULTS),
    ("ddp", 4, FAULTS, ("input", "host"), SMALL_FAULTS),
    ("fsdp2", 4, FAULTS, ("backward", "host"), SMALL_FAULTS),
    ("tp", 2, (FAULTS[0], FAULTS[2], *FAULTS[3:5], FAULTS[6], FAULTS[7]), ("forward", "device"), SMALL_FAULTS[:1]),
)
"""With the faults that last all the time, the one that starts late, and the small ones."""
HEALTHY = 2
"""Runs of each configuration."""


def _cases() -> Iterator[Case]:
    for strategy, ranks, *_ in CONFIGURATIONS:
        for number in range(HEALTHY):
            yield Case(name=f"{strategy}/{ranks}/healthy-{number + 1}", strategy=strategy, ranks=ranks)
    for strategy, ranks, faults, late, small in CONFIGURATIONS:
        made = [(f"{where}-{side}", where, side, HOST if side == "host" else DEVICE, False) for where, side in faults]
        where, side = late
        made.append((f"late-{where}-{side}", where, side, HOST if side == "host" else DEVICE, True))
        made += [(f"small-{where}-{side}", where, side, SMALL, False) for where, side in small]
        for number, (name, where, side, size, is_late) in enumerate(made):
            yield Case(
                name=f"{strategy}/{ranks}/{name}",
                strategy=strategy,
                ranks=ranks,
                where=where,
                side=side,
                # Another rank in every case, and not in step with host and device.
                culprit=(number + number // 2 + 1) % ranks,
                size=size,
                late=is_late,
            )


CASES = tuple(_cases())
