"""Pairs of real runs made here: the same script twice, five percent more in one phase, five percent on one rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.comparison import compare_inputs, read_input

__all__ = ["KINDS", "Pair", "record_pairs"]

JOB = Path(__file__).with_name("jobs") / "pair_job.py"
STEP_MS = 155.0
"""About what a step of the job takes; a twentieth of it is added."""
KINDS: dict[str, tuple[str, ...]] = {
    "same": (),
    "phase": ("--forward-ms", str(STEP_MS / 20)),
    "rank": ("--rank-ms", str(STEP_MS / 20)),
}
RUN_S = 300


@dataclass(frozen=True, kw_only=True)
class Pair:
    kind: str
    document: dict[str, Any]

    @property
    def called(self) -> str:
        """The verdict and, of a change, where it is."""
        cause = self.document["cause"]
        if not cause:
            return str(self.document["verdict"])
        ranks = f", rank {cause['ranks'][0]}" if cause["ranks"] else ""
        return f"{self.document['verdict']} ({cause['phase']}{ranks})"

    @property
    def wrong(self) -> bool:
        """A verdict that is certain and not so."""
        verdict, cause = self.document["verdict"], self.document["cause"]
        if self.kind == "same":
            return verdict in ("slower", "faster")
        truth = {"phase": "forward", "ranks": [1] if self.kind == "rank" else []}
        named = cause is not None and any(cause[name] != value for name, value in truth.items())
        return verdict in ("faster", "same") or named


def record_pairs(count: int, steps: int, baselines: int, folder: Path) -> Iterator[Pair]:
    """Make pairs of each kind in turn; each candidate is compared with the runs of the same script before it."""
    earlier: list[Path] = []
    while len(earlier) < baselines:
        earlier.append(_record(folder, f"base-{len(earlier)}", steps, ()))
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        candidate = _record(folder, f"{kind}-{number}", steps, KINDS[kind])
        document = compare_inputs([read_input(path) for path in earlier[-baselines:]], read_input(candidate))
        yield Pair(kind=kind, document=document)
        if kind == "same":
            earlier.append(candidate)


def _record(folder: Path, name: str, steps: int, more: tuple[str, ...]) -> Path:
    command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--no-html", "--dir", str(folder), "--name", name]
    command += ["--nproc-per-node", "2", str(JOB), "--steps", str(steps), *more]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")
    return folder / name
