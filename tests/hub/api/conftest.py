"""A folder of runs for the hub to answer for (see ``tests/hub/run_parts.py``), and servers of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster
from fakes.samples import with_samples

from stepscope.hub.api.auth import Readers, ReaderTokens
from stepscope.hub.api.stream import Streams
from stepscope.hub.app import make_app
from stepscope.hub.limits import ServerLimits
from stepscope.hub.runs import Runs
from stepscope.store.create import create_run
from stepscope.store.documents import read_meta, write_meta
from stepscope.store.live.failures import write_hang
from stepscope.store.live.ring_files import write_sidecar
from tests.hub.run_parts import DEMO, HOSTILE, READER, WALL_NS, Hub, append_steps, missing_rank, record, sidecar_of


@pytest.fixture
def record_run() -> Callable[..., Path]:
    return record


@pytest.fixture
def begun(tmp_path: Path) -> Callable[[Cluster], tuple[Path, Any]]:
    """``begun(cluster)``: a run without a step yet, and what appends some: ``append(run_dir, series, first, last)``."""

    def begin(cluster: Cluster, name: str = "growing") -> tuple[Path, Any]:
        made = create_run(tmp_path / "runs", name, ["train.py"], environ={}, sessions=tmp_path / "sessions")
        write_meta(made.run_dir, {**read_meta(made.run_dir), "launcher": None})
        for series in cluster.series():
            write_sidecar(made.run_dir, sidecar_of(series))
        return made.run_dir, append_steps

    return begin


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs that nobody may change: ``demo`` is sealed, ``plain`` is not, the third has a name."""
    root = tmp_path_factory.mktemp("hub") / "runs"
    events = [
        {"schema": 1, "wall_ns": WALL_NS + i, "event": "warning", "message": f"number {i}", "host": "node0"}
        for i in range(5)
    ]
    stack = {"rank": 3, "pid": 1003, "wall_ns": WALL_NS + 5, "step": 7, "phase": "other", "node": "node0"}
    frames = [{"file": "train.py", "line": 3, "function": "main"}]
    demo = record(root, "demo", with_samples(DEMO, every_s=0.5), events=events, stacks=[{**stack, "frames": frames}])
    (demo / "flight").mkdir()
    (demo / "flight" / "rank_3.json").write_text('{"version": "2.9"}')
    write_hang(record(root, "plain", Cluster(ranks=2, steps=40).run(), sealed=False), missing_rank())
    record(root, HOSTILE, Cluster(ranks=1, steps=5).run())
    return root


Serve = Callable[..., Hub]


@pytest.fixture
def start_hub() -> Iterator[Callable[..., Hub]]:
    """``start_hub(make, limits)``: a hub with the application that ``make`` returns; closed after the test."""
    hubs: list[Hub] = []

    def start(make: Callable[[], Any], limits: ServerLimits | None = None) -> Hub:
        hubs.append(Hub(make, limits))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.close()


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A copy of the module's runs, to change."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


@pytest.fixture
def tokens(tmp_path: Path) -> ReaderTokens:
    return ReaderTokens(tmp_path / "tokens.json")


@pytest.fixture
def serve(folder: Path, start_hub: Callable[..., Hub]) -> Serve:
    """``serve()``: a hub of the folder; of other runs, or with other limits, if that is said."""

    def start(
        runs: Callable[[], Runs] | None = None, *, streams: Streams | None = None, limits: ServerLimits | None = None
    ) -> Hub:
        def make() -> Any:
            return make_app(runs() if runs else Runs.of_folder(folder), Readers(READER), streams=streams)

        return start_hub(make, limits)

    return start


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[Hub]:
    """One for all tests of a file that only ask."""

    async def at_once(_seconds: float) -> None:
        """Wrong tokens are slowed down, which these tests have seen enough of."""

    hub = Hub(lambda: make_app(Runs.of_folder(folder), Readers(READER, sleep=at_once)))
    yield hub
    hub.close()
