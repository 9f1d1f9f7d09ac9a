"""Runs and findings as short texts, the same for all tools."""

from __future__ import annotations

from stepscope.integrations.run_feed import FindingChange, RunAbout

__all__ = ["finding_line", "run_text"]


def finding_line(change: FindingChange) -> str:
    if change.state == "resolved":
        return f"Over since step {change.step:,}: {change.title}"
    return f"{change.severity}, step {change.step:,}: {change.title}"


def run_text(run: RunAbout) -> str:
    """The run as a list in Markdown."""
    rows = {"command": run.command, "ranks": str(run.world_size), **run.settings}
    lines = [f"- {name}: `{value}`" for name, value in rows.items() if value]
    return "\n".join([*lines, *([f"- page: <{run.page}>"] if run.page else [])])
