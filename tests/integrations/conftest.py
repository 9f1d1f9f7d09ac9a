"""A finished run with a slow rank, and its figures as the hub's API serves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from fakes.cluster import Cluster, slow_at
from made_runs import record

from stepscope.assistant.hub_api import HubApi
from stepscope.hub.runs import Runs
from stepscope.integrations.exporter import Outcome, export, parse_destination
from stepscope.integrations.run_feed import News, RunFeed

STEPS = 200


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody may change it: rank 2 of 4 is 30 ms slower in forward."""
    slow = Cluster(ranks=4, steps=STEPS, faults=(slow_at(2, "forward", 30.0),), allocated_mb=100.0, tail=0.0)
    path = record(tmp_path_factory.mktemp("integrations") / "runs", "night", slow.run())
    (path / "summary.txt").write_text("Rank 2 is slow.\n")
    return path


@pytest.fixture(scope="session")
def news(run_dir: Path) -> News:
    """Everything that there is to export, a row per step."""

    async def read() -> News:
        api = HubApi(Runs.of_folder(run_dir))
        try:
            return await RunFeed(api, run_dir.name).news(most_rows=STEPS)
        finally:
            await api.close()

    return anyio.run(read)


@pytest.fixture(scope="session")
def run_summary(run_dir: Path) -> dict[str, Any]:
    """The document of ``summary.json``, as the hub makes it for a run without that file."""

    async def read() -> dict[str, Any]:
        api = HubApi(Runs.of_folder(run_dir))
        try:
            return dict(await RunFeed(api, run_dir.name).summary())
        finally:
            await api.close()

    return anyio.run(read)


@pytest.fixture
def export_run(run_dir: Path) -> Callable[..., tuple[Outcome, ...]]:
    """Write the run to tools, in this process."""

    def exported(words: Sequence[str], **options: object) -> tuple[Outcome, ...]:
        async def work() -> tuple[Outcome, ...]:
            api = HubApi(Runs.of_folder(run_dir))
            try:
                destinations = [parse_destination(word, installed=lambda _: True) for word in words]
                return await export(RunFeed(api, run_dir.name), destinations, run_dir=run_dir, **options)  # type: ignore[arg-type]
            finally:
                await api.close()

        return anyio.run(work)

    return exported
