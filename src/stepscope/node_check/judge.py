"""Whether a node is fit: its figures compared with its past and its peers, robustly; no I/O.

A figure is too low if it is below the median of what it is compared with by a share that depends on what it measures,
and by several times their spread (median absolute deviation). A node with a quota or that was stopped while it was
measured is unfit whatever the others have. While other programs use the machine a low figure is not the node's fault:
then the check says that it cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from stepscope.records.text import count_text, cpus_text, share_text

__all__ = ["Verdict", "judge"]

State = Literal["fit", "unfit", "busy"]
LEAST_RESULTS = {"past": 5, "peers": 3}
"""Fewer do not show how much healthy results scatter."""
NEWEST = 30
"""Past results that count."""
SPREADS = 5.0
MAD_TO_SIGMA = 1.4826
KEPT_SHARE = 0.10
"""Share of the time for which the processes were throttled or stopped: a healthy node has a few thousandths."""
BUSY_WAITED = 0.05
"""Share of the time that the processes waited for a core, from which on others are at work …"""
BUSY_OTHERS = 0.10
"""… or share of the machine that other programs used: they share caches and memory with the test."""
TITLES = {
    "processor": ("speed of a core", "GB/s"),
    "slowest_core": ("speed of the slowest core", "GB/s"),
    "all_cores": ("all cores together", "GB/s"),
    "memory": ("copies in memory", "GB/s"),
    "disk_write": ("writing to disk", "GB/s"),
    "disk_read": ("reading from disk", "GB/s"),
    "slowest_link": ("slowest link between ranks", "GB/s"),
}
LEAST_BELOW = {"disk_write": 0.5, "disk_read": 0.5, "slowest_link": 0.3, "memory": 0.3}
OTHERWISE_BELOW = 0.2


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure and what it was compared with."""

    name: str
    title: str
    unit: str
    value: float
    usual: float | None = None
    against: str = ""
    """``its past (12 checks)`` or ``7 peers``; empty: there is too little to compare it with."""
    low: bool = False

    @property
    def text(self) -> str:
        text = f"{self.title}: {self.value:.3g} {self.unit}"
        if self.usual is None:
            return text
        difference = self.value / self.usual - 1
        where = (
            f"{share_text(-difference)} below" if difference < -0.005 else f"{share_text(max(difference, 0.0))} above"
        )
        return f"{text}, {where} {self.against} ({self.usual:.3g} {self.unit})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    state: State
    title: str
    rows: tuple[Row, ...]
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "title": self.title,
            "reasons": list(self.reasons),
            "compared": [
                {"name": row.name, "value": row.value, "usual": row.usual, "against": row.against, "low": row.low}
                for row in self.rows
            ],
        }


def judge(result: Mapping[str, Any], past: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]]) -> Verdict:
    """``past``: earlier results of any node; ``peers``: those of other nodes, of any kind."""
    own = [each for each in past if each.get("host") == result["host"] and each.get("kind") == result["kind"]]
    fit = [each for each in own if each.get("state") == "fit"][-NEWEST:]
    alike = [each for each in peers if each.get("kind") == result["kind"]]
    compared = {"past": fit, "peers": alike}
    rows = tuple(_row(name, value, compared) for name, value in result["figures"].items())
    reasons = [*_kept_from_running(result)]
    low = [row.text for row in rows if row.low]
    busy = _is_busy(result)
    if low and not busy:
        reasons += low
    host = result["host"]
    if reasons:
        return Verdict(state="unfit", title=f"{host} is unfit: {reasons[0]}.", rows=rows, reasons=tuple(reasons))
    if busy:
        what = f"{host} is busy with other programs ({_busy_text(result)})"
        then = "; whether it is fit cannot be decided." if low else "; no fault was found."
        return Verdict(state="busy", title=what + then, rows=rows, reasons=tuple(low))
    known = sum(row.usual is not None for row in rows)
    unknown = "" if known else " so far; there is too little to compare it with"
    if skipped := result.get("skipped"):
        without = ", ".join(f"{name} ({reason})" for name, reason in skipped.items())
        unknown = f" as far as it was measured, without {without}"
    return Verdict(state="fit", title=f"{host} is fit{unknown}.", rows=rows)


def _row(name: str, value: float, compared: Mapping[str, Sequence[Mapping[str, Any]]]) -> Row:
    title, unit = TITLES.get(name, ("", ""))
    if not title:  # gpu0_matmul, gpu0_memory
        device, _, what = name.partition("_")
        title, unit = f"GPU {device.removeprefix('gpu')} {what}", "TFLOP/s" if what == "matmul" else "GB/s"
    rows = [Row(name=name, title=title, unit=unit, value=value)]
    for source, results in compared.items():
        values = [float(each["figures"][name]) for each in results if name in each["figures"]]
        if len(values) < LEAST_RESULTS[source]:
            continue
        usual = median(values)
        spread = MAD_TO_SIGMA * median(abs(each - usual) for each in values)
        below = usual - value
        low = below >= LEAST_BELOW.get(name, OTHERWISE_BELOW) * usual and below >= SPREADS * spread
        against = f"its past ({count_text(len(values), 'check')})" if source == "past" else f"{len(values)} peers"
        rows.append(Row(name=name, title=title, unit=unit, value=value, usual=usual, against=against, low=low))
    # The comparison that accuses, or else the first there is.
    return max(rows, key=lambda row: (row.low, row.usual is not None))


def _kept_from_running(result: Mapping[str, Any]) -> list[str]:
    reasons = []
    if result.get("throttled", 0.0) >= KEPT_SHARE:
        quota = result.get("cpu_quota")
        of = f" of {cpus_text(quota)}" if quota else ""
        reasons.append(f"its CPU quota{of} is used up {share_text(result['throttled'])} of the time")
    if result.get("stolen", 0.0) >= KEPT_SHARE:
        reasons.append(f"the hypervisor takes {share_text(result['stolen'])} of the processors' time")
    elif result.get("stopped", 0.0) >= KEPT_SHARE:
        reasons.append(f"processes are stopped {share_text(result['stopped'])} of the time")
    return reasons


def _is_busy(result: Mapping[str, Any]) -> bool:
    return bool(result.get("waited", 0.0) >= BUSY_WAITED or result.get("others", 0.0) >= BUSY_OTHERS)


def _busy_text(result: Mapping[str, Any]) -> str:
    if result.get("others", 0.0) >= BUSY_OTHERS:
        return f"they use {share_text(result['others'])} of its processors"
    return f"the test waited {share_text(result['waited'])} of its time for a core"
