"""The runs in a folder, as a list: from their summaries where there are some, else from what is there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import NotARun
from stepscope.store.meta import read_meta
from stepscope.store.paths import META
from stepscope.store.processes import launcher_alive, processes_alive
from stepscope.store.results import load_summary
from stepscope.store.sidecar import read_sidecars

__all__ = ["RunEntry", "list_runs", "newest_run", "run_entry"]


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    name: str
    path: Path
    created_wall_ns: int
    status: str
    """finished, failed, crashed or interrupted; ``running``; ``unfinished``: it ended, nobody said how."""
    ranks: int | None
    steps: int | None
    median_step_ms: float | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": str(self.path),
            "created_wall_ns": self.created_wall_ns,
            "status": self.status,
            "ranks": self.ranks,
            "steps": self.steps,
            "median_step_ms": self.median_step_ms,
            "verdict": self.verdict,
        }


def list_runs(root: Path) -> tuple[list[RunEntry], list[str]]:
    """The runs right under ``root``, newest first, and a line for each that cannot be read."""
    entries: list[RunEntry] = []
    problems: list[str] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if not (path / META).exists():
            continue
        try:
            entries.append(run_entry(path))
        except NotARun as error:
            problems.append(str(error))
    return sorted(entries, key=lambda entry: entry.created_wall_ns, reverse=True), problems


def newest_run(root: Path) -> Path | None:
    """The run right under ``root`` that was begun last; None when there is none that can be read."""
    begun: list[tuple[float, str, Path]] = []
    for path in root.iterdir() if root.is_dir() else ():
        with suppress(NotARun):
            begun.append((_number(read_meta(path).get("created_wall_ns")) or 0, path.name, path))
    return max(begun)[2] if begun else None


def run_entry(path: Path) -> RunEntry:
    meta = read_meta(path)
    summary = load_summary(path) or {}
    sidecars = read_sidecars(path)[0].values()
    step_time, steps = summary.get("step_time"), summary.get("steps")
    median = _number(step_time.get("p50_ms")) if isinstance(step_time, Mapping) else None
    total = steps.get("total") if isinstance(steps, Mapping) else None
    return RunEntry(
        name=meta["name"],
        path=path,
        created_wall_ns=int(_number(meta.get("created_wall_ns")) or 0),
        status=_status(path, meta, summary),
        ranks=_count(summary.get("world_size"), len({about.identity.rank for about in sidecars})),
        steps=_count(total, max((about.live_step for about in sidecars), default=0)),
        median_step_ms=median,
        verdict=_verdict(summary.get("verdict")),
    )


def _status(path: Path, meta: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    end = meta.get("end")
    for said in (summary.get("status"), end.get("status") if isinstance(end, Mapping) else None):
        if isinstance(said, str):
            return said
    return "running" if launcher_alive(dict(meta)) or processes_alive(path) else "unfinished"


def _verdict(verdict: Any) -> str:
    title = verdict.get("title") if isinstance(verdict, Mapping) else None
    return title if isinstance(title, str) else ""


def _count(said: Any, seen: int) -> int | None:
    """What the summary says; else what was seen, if anything."""
    return said if isinstance(said, int) else seen or None


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None
