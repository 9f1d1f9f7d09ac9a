"""What is wrong with a run, and how it stands: while it goes on by the last look, afterwards by its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.hub.open_run import OpenRun
from stepscope.reports.price import finding_price

__all__ = ["findings_of", "status_of"]

_VERDICT = ("kind", "severity", "title", "ranks", "phase", "advice", "confidence")
_KEPT = ("attempt", "world_size", "ranks", "live_ranks", "still_ranks", "states", "step", "newest_step", "phases")


def findings_of(run: OpenRun) -> dict[str, Any]:
    """``verdict``: the first of them in short, with its price; null while nothing was found yet."""
    if run.document is not None:
        found = run.document.get("findings")
        return {"live": False, "verdict": run.document.get("verdict"), "findings": found or []}
    said = run.live.findings()
    findings = said.pop("findings")
    judged = {} if said["step"] is None else {"judged": said}
    return {"live": True, "verdict": _verdict(findings[0]) if findings else None, "findings": findings, **judged}


def status_of(run: OpenRun) -> dict[str, Any]:
    """``status``: as ``stepscope list`` has it."""
    info = run.live.info()
    standing = {"status": run.status(), "over": run.over, "leaving": run.leaving, "ended_wall_ns": run.ended_wall_ns()}
    return {**standing, **{name: info[name] for name in _KEPT}}


def _verdict(finding: Mapping[str, Any]) -> dict[str, Any]:
    price = finding_price(finding["kind"], finding["cost"], finding["evidence"], over=False)
    return {**{name: finding[name] for name in _VERDICT}, "price": price}
