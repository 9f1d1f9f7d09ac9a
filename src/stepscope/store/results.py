"""What was concluded from a run: ``summary.json``, ``summary.txt``, ``findings.json``, each written as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.errors import RunUnwritable
from stepscope.store import atomic
from stepscope.store.paths import FINDINGS, SUMMARY, SUMMARY_TEXT
from stepscope.store.reading import read_document

__all__ = ["load_findings", "load_summary", "printed", "save_findings", "save_summary"]

SCHEMA = 1


def save_summary(run_dir: Path, summary: Mapping[str, Any], text: str) -> None:
    """The summary in both its forms, and its findings once more on their own."""
    try:
        save_findings(run_dir, summary.get("findings", []))
        atomic.write_bytes(run_dir / SUMMARY_TEXT, (text.rstrip("\n") + "\n").encode(errors="replace"))
        atomic.write_json(run_dir / SUMMARY, dict(summary))
    except OSError as error:
        raise RunUnwritable(f"cannot write the summary to {run_dir}: {error.strerror}") from error


def save_findings(run_dir: Path, findings: Sequence[Mapping[str, Any]]) -> None:
    """While the run goes on the watchdog's, then all of them.  OSError when there is no room."""
    atomic.write_json(run_dir / FINDINGS, {"schema": SCHEMA, "findings": list(findings)})


def load_summary(run_dir: Path) -> dict[str, Any] | None:
    """``summary.json``; None when there is none yet or it cannot be read (it can be made again)."""
    return _load(run_dir / SUMMARY)


def load_findings(run_dir: Path) -> list[dict[str, Any]]:
    """Those of ``findings.json``; none when it is not there or cannot be read."""
    said = (_load(run_dir / FINDINGS) or {}).get("findings")
    return [finding for finding in said if isinstance(finding, dict)] if isinstance(said, list) else []


def printed(run_dir: Path) -> list[str]:
    """What the ranks printed, as paths inside the run."""
    return sorted((str(path.relative_to(run_dir)) for path in (run_dir / "logs").glob("*.log")), key=_natural)


def _natural(name: str) -> tuple[int, str]:
    return len(name), name


def _load(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(read_document(path))
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
