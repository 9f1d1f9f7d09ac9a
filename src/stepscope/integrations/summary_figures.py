"""The figures of ``summary.json`` that a tool shows for a run as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.integrations.run_feed import PREFIX

__all__ = ["summary_figures"]

BYTES_PER_GIB = 1 << 30


def summary_figures(status: str, summary: Mapping[str, Any]) -> dict[str, float | str]:
    """By name: numbers and the verdict, as in ``summary.json``; what is not known is left out."""
    figures = {
        "status": status,
        "verdict": _part(summary, "verdict", "title"),
        "verdict_kind": _part(summary, "verdict", "kind"),
        "steps": _part(summary, "steps", "total"),
        "step_p50_ms": _part(summary, "step_time", "p50_ms"),
        "step_p99_ms": _part(summary, "step_time", "p99_ms"),
        "samples_per_s": _part(summary, "throughput", "samples_per_second"),
        "tokens_per_s": _part(summary, "throughput", "tokens_per_second"),
        "mfu": _part(summary, "throughput", "mfu"),
        "goodput": _part(summary, "goodput", "goodput"),
        "memory_peak_gib": _gib(_part(summary, "memory", "device_peak")),
        "findings": sum(finding["severity"] != "info" for finding in summary.get("findings") or ()),
        **_phases(summary.get("phases")),
    }
    return {PREFIX + name: value for name, value in figures.items() if isinstance(value, int | float | str)}


def _phases(phases: object) -> dict[str, Any]:
    """The median and the worst rank's time in each phase."""
    if not isinstance(phases, Mapping):
        return {}
    named = {name: row for name, row in phases.items() if isinstance(row, Mapping)}
    return {
        f"{name}_{to}": row.get(key)
        for name, row in named.items()
        for key, to in (("median_ms", "ms"), ("worst_ms", "worst_ms"))
    }


def _gib(peak: object) -> float | None:
    size = peak.get("bytes") if isinstance(peak, Mapping) else None
    return size / BYTES_PER_GIB if isinstance(size, int) else None


def _part(summary: Mapping[str, Any], name: str, key: str) -> Any:
    part = summary.get(name)
    return part.get(key) if isinstance(part, Mapping) else None
