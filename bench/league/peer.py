"""TraceML's final summary as claims, read generously.

Its verdicts are those of ``final_summary.json``: the diagnosis and the issues of all four sections (step time, step
memory, system, process).  ``crit`` is critical, ``warn`` a warning.  Where its word may stand for several of ours any
of them counts:

- STRAGGLER (cause not measured): any kind of straggler of that rank, and work between the steps of that rank
- RESIDUAL_HEAVY: ``wait_heavy``, ``between_steps`` or ``comm_bound``
- HIGH_PROCESS_RSS, HIGH_HOST_MEMORY: ``ram_pressure`` or ``memory_creep``
- HIGH_CPU, HIGH_PROCESS_CPU: ``cpu_saturated``

The rank it gives with a bound or a residual is an example, not a culprit, and is not held against it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from league.truth import Claim

__all__ = ["claims_in", "read_summary"]

SECTIONS = ("step_time", "step_memory", "system", "process")
SEVERITY = {"crit": "critical", "warn": "warning"}
KINDS: dict[str, tuple[str, ...]] = {
    "INPUT_BOUND": ("input_bound",),
    "H2D_BOUND": ("h2d_bound",),
    "COMPUTE_BOUND": ("compute_bound",),
    "RESIDUAL_HEAVY": ("wait_heavy", "between_steps", "comm_bound"),
    "INPUT_STRAGGLER": ("input_straggler",),
    "COMPUTE_STRAGGLER": ("compute_straggler",),
    "H2D_STRAGGLER": ("h2d_straggler",),
    "STRAGGLER": ("straggler", "input_straggler", "compute_straggler", "h2d_straggler", "between_steps"),
    "CREEP_EARLY": ("memory_creep",),
    "CREEP_CONFIRMED": ("memory_creep",),
    "HIGH_PRESSURE": ("memory_pressure",),
    "IMBALANCE": ("memory_imbalance",),
    "RANK_GPU_MEMORY_IMBALANCE": ("memory_imbalance",),
    "GPU_MEMORY_RESERVED_OVERHANG": ("fragmentation",),
    "HIGH_GPU_MEMORY": ("memory_pressure",),
    "VERY_HIGH_GPU_MEMORY": ("memory_pressure",),
    "HIGH_PROCESS_GPU_MEMORY": ("memory_pressure",),
    "VERY_HIGH_PROCESS_GPU_MEMORY": ("memory_pressure",),
    "HIGH_HOST_MEMORY": ("ram_pressure", "memory_creep"),
    "HIGH_PROCESS_RSS": ("ram_pressure", "memory_creep"),
    "HIGH_CPU": ("cpu_saturated",),
    "HIGH_PROCESS_CPU": ("cpu_saturated",),
    "LOW_GPU_UTILIZATION": ("low_gpu_utilization",),
    "MODERATE_GPU_UTILIZATION": ("low_gpu_utilization",),
    "HIGH_GPU_TEMPERATURE": ("gpu_throttled",),
    "HIGH_GPU_POWER": ("gpu_throttled",),
}


def read_summary(folder: Path) -> list[Claim]:
    """All claims of the one summary under ``folder``; none when it left none."""
    found = sorted(folder.rglob("final_summary.json"))
    return list(claims_in(json.loads(found[0].read_text()))) if found else []


def claims_in(summary: Mapping[str, Any]) -> Iterator[Claim]:
    seen = set()
    for section in SECTIONS:
        table = summary.get(section) or {}
        for issue in [table.get("diagnosis"), *(table.get("issues") or ())]:
            if not issue:
                continue
            claim = _claim(issue)
            if (claim.kinds, claim.ranks) not in seen:
                seen.add((claim.kinds, claim.ranks))
                yield claim


def _claim(issue: Mapping[str, Any]) -> Claim:
    kind = str(issue["kind"])
    ranks: list[int] = []
    if kind.endswith("STRAGGLER") or "IMBALANCE" in kind:
        culprit = (issue.get("evidence") or {}).get("culprit_rank")
        ranks = list(issue.get("ranks") or ([] if culprit is None else [culprit]))
    return Claim(
        kinds=KINDS.get(kind, (kind.lower(),)),
        severity=SEVERITY.get(issue.get("severity", ""), "info"),
        ranks=tuple(ranks),
        phase=issue.get("phase") or (issue.get("metric") if kind in KINDS else None),
        title=f"{issue.get('status', kind)}: {issue.get('summary', '')}",
    )
