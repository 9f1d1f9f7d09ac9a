"""Sweeps as ``stepscope sweep`` leaves them, without running any job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.comparison.statistics import Level
from stepscope.comparison.sweep import Trial, VariantTrials, sweep_document

__all__ = ["FSDP2", "variant", "write_sweep"]

MIB = 1 << 20


def variant(
    name: str, times_ms: Sequence[float], memory_mib: int | None, *, samples: float | None = None, failed: str = ""
) -> VariantTrials:
    """One trial for each time; ``failed``: how one more ended."""
    trials = [
        Trial(
            round=at,
            run=f"{name}-{at + 1}",
            status="finished",
            ok=True,
            level=Level(mean=ms * 1e6, error=0.001, freedom=30.0, wander=0.0005, noise=0.005, steps=50),
            memory=None if memory_mib is None else memory_mib * MIB,
        )
        for at, ms in enumerate(times_ms)
    ]
    if failed:
        trials.append(Trial(round=len(trials), run=f"{name}-{len(trials) + 1}", status=failed, ok=False))
    settings = {"args": ["--variant", name], "env": {}, "options": []}
    return VariantTrials(name=name, samples=samples, settings=settings, trials=trials)


FSDP2 = (
    variant("fast", [10.0, 10.4, 9.7], 800),
    variant("small", [20.0, 20.5, 19.6], 200),
    variant("between", [14.0, 14.4, 13.7], 400),
    variant("bad", [21.0, 21.3, 20.8], 410),
    variant("close", [10.1, 10.3, 9.9], 802),
    variant("oom", [], None, failed="out of memory"),
)
"""Three on the front, one near it, one that is beaten, and one that failed."""


def write_sweep(folder: Path, variants: Sequence[VariantTrials] = FSDP2, *, rounds: int = 3) -> dict[str, Any]:
    """Write the files of a sweep; return its result."""
    folder.mkdir(parents=True)
    document = sweep_document(folder.name, variants, rounds=rounds)
    (folder / "sweep.json").write_text('{"schema": 1, "trials": []}')
    (folder / "result.json").write_text(json.dumps(document))
    return document
