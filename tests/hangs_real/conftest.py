"""Runs a case of ``bench/hang_cases.py`` as a user would, and reads what was told of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hang_cases import CalmCase, FaultCase, Told, command, told

from stepscope.store.file_io import read_jsonl


@dataclass(frozen=True, kw_only=True)
class Ran:
    code: int
    stdout: str
    stderr: str
    run_dir: Path
    reported: Told
    summary: dict[str, Any] = field(default_factory=dict)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_jsonl(self.run_dir / "events.jsonl")[0] if event["event"] in kinds]

    def losses(self) -> list[str]:
        return sorted(line for line in self.stdout.splitlines() if line.startswith("rank "))


@pytest.fixture
def run_case(commands: Any, tmp_path: Path) -> Callable[..., Ran]:
    """``run_case(case, "--hang-after", "2")``; by torchrun where that is asked for."""

    def run(case: FaultCase | CalmCase, *options: str, seconds: float | None = None, torchrun: bool = False) -> Ran:
        words = command(case, folder=tmp_path, options=options, seconds=seconds, forked=not torchrun)[1:]
        done = commands.finish(commands.start_python(*words), timeout_s=240.0)
        run_dir = tmp_path / "runs" / case.id
        summary = json.loads((run_dir / "summary.json").read_text())
        return Ran(
            code=done.code,
            stdout=done.stdout,
            stderr=done.stderr,
            run_dir=run_dir,
            reported=told(run_dir),
            summary=summary,
        )

    return run
