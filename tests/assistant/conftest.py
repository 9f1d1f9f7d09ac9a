"""Runs for an assistant to ask about: one with a slow rank and printed lines, one that hung."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import pytest
from fakes.cluster import Cluster, slow_at
from fakes.samples import with_samples
from made_runs import WALL_NS, record

from stepscope.assistant.hub_api import HubApi
from stepscope.hub.runs import Runs
from stepscope.store.documents import read_meta, write_meta
from stepscope.store.live.failures import write_hang
from tests.hub.run_parts import missing_rank

if TYPE_CHECKING:
    from stepscope.assistant.mcp_server import ServerOptions

T = TypeVar("T")
STEP_S = 0.069
"""Of the run ``night``."""
LINE = "step {:04d} loss 0.5\n"
SECRET = "a secret outside of the runs"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs that nobody may change: ``night`` is sealed, ``hung`` is not."""
    root = tmp_path_factory.mktemp("assistant") / "runs"
    slow = Cluster(ranks=4, steps=200, faults=(slow_at(2, "forward", 30.0),), allocated_mb=100.0, tail=0.0)
    events = [{"schema": 1, "wall_ns": WALL_NS, "event": "warning", "message": "cache is cold", "host": "node0"}]
    frames = [{"file": "train.py", "line": 3, "function": "main"}]
    stack = {"rank": 2, "pid": 1002, "wall_ns": WALL_NS + 5, "step": 7, "phase": "forward", "node": "node0"}
    printed = {"log_bytes": lambda _rank, seconds: (seconds / STEP_S).astype(int) * len(LINE.format(0))}
    sampled = with_samples(slow, every_s=0.5, process=printed)
    run_dir = record(root, "night", sampled, events=events, stacks=[{**stack, "frames": frames}])
    (run_dir / "logs" / "rank-2.log").write_text("".join(map(LINE.format, range(200))))
    write_meta(run_dir, {**read_meta(run_dir), "created_wall_ns": WALL_NS - 5 * 10**9})
    write_hang(record(root, "hung", Cluster(ranks=4, steps=40).run(), sealed=False), missing_rank())
    (root.parent / "secret.txt").write_text(SECRET)
    return root


@pytest.fixture(scope="session")
def connect(folder: Path) -> Callable[..., Any]:
    """``async with connect() as client``: the package's own client of a server in this process.

    Every worker imports these files, and loading ``mcp`` takes two seconds: those that run these tests do.
    """
    from mcp import Client

    from stepscope.assistant.mcp_server import ServerOptions, make_server

    @asynccontextmanager
    async def connected(options: ServerOptions | None = None, runs: Path = folder) -> Any:
        options = ServerOptions() if options is None else options
        api = HubApi(Runs.of_folder(runs), changes=options.changes)
        try:
            async with Client(make_server(api, options)) as client:
                yield client
        finally:
            await api.close()

    return connected


def in_loop(work: Callable[[], Awaitable[T]]) -> T:
    return anyio.run(work)


def document_of(result: Any) -> dict[str, Any]:
    """The document, after a check that both forms of it are equal."""
    assert not result.is_error, result.content[0].text
    assert json.loads(result.content[1].text) == result.structured_content
    found: dict[str, Any] = result.structured_content
    return found


@pytest.fixture
def ask(connect: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """``ask("get_verdict", run="night")``: the result of one call."""

    def call(name: str, options: ServerOptions | None = None, **arguments: object) -> Any:
        async def work() -> Any:
            async with connect(options) as client:
                return await client.call_tool(name, arguments)

        return in_loop(work)

    yield call
