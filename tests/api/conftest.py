"""Runs made of a synthetic cluster in ``runs/`` of the current folder: ``night``; ``before`` and ``after`` a change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster, slow_at
from fakes.samples import with_samples
from gpt_layers import write_layer_samples
from made_runs import WALL_NS, record

from stepscope.store.sealed.seal import seal

STEPS = 120


def noted(rank: int, step: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "wall_ns": WALL_NS + step, "event": "note", "rank": rank, "step": step, "values": values}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    night = with_samples(Cluster(ranks=4, steps=STEPS, device_timed=True, faults=(slow_at(1, "input", 30.0),)))
    loss = [noted(rank, step, {"loss": 2.0 - step / STEPS}) for step in range(STEPS) for rank in (0, 1)]
    run_dir = record(
        folder / "runs", "night", night, events=[*loss, noted(0, STEPS, {"saved": "last.pt"})], sealed=False
    )
    write_layer_samples(run_dir, ranks=4, samples=3, layers=2)
    seal(run_dir)
    every = tuple(slow_at(rank, "forward", 4.0) for rank in range(4))
    for name, seed, faults in (("before", 1, ()), ("base2", 2, ()), ("base3", 3, ()), ("after", 4, every)):
        cluster = Cluster(ranks=4, steps=200, seed=seed, faults=faults).run()
        record(folder / "runs", name, replace(cluster, name=name))
    return folder


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made
