"""``flight/``: what the ranks' Flight Recorders and stacks said when it mattered; ``stepscope flight`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stepscope.store import atomic
from stepscope.store.paths import FLIGHT

__all__ = ["keep_flights", "keep_stacks"]


def keep_flights(run_dir: Path, answers: Mapping[int, bytes]) -> None:
    """The answers (JSON) by rank, in place of earlier ones; OSError when there is no room."""
    _keep(run_dir, {f"rank_{rank}.json": answer for rank, answer in answers.items()})


def keep_stacks(run_dir: Path, texts: Mapping[int, str]) -> None:
    """The stacks of all threads by rank, as faulthandler wrote them; likewise."""
    _keep(run_dir, {f"stacks_{rank}.txt": text.encode() for rank, text in texts.items()})


def _keep(run_dir: Path, files: Mapping[str, bytes]) -> None:
    folder = run_dir / FLIGHT
    if files:
        folder.mkdir(exist_ok=True)
    for name, data in files.items():
        atomic.write_bytes(folder / name, data)
