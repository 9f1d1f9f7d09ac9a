"""The load generator against a real entrance: everything arrives once, whatever is lost or sent twice on the way."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import numpy as np
from fakes.load import LoadJob, LoadPlan, LoadReport, run_load
from fakes.load_rows import LoadRanks

from stepscope.hub.ingest.auth import Admission
from stepscope.hub.ingest.endpoints import HubJournal, IngestApp
from stepscope.hub.limits import Refusals
from stepscope.hub.live.live_run import LiveRun
from stepscope.hub.server import Server
from stepscope.store.inbox.receiver import Inbox
from stepscope.store.live.ring_files import RingSidecar
from stepscope.wire.frames import pack_block, read_block, rows_of

KEY = b"k" * 32


async def loaded(run_dir: Path, job: LoadJob, **faults: float) -> tuple[LiveRun, LoadReport]:
    """A hub that took it all."""
    live, refusals, inbox = LiveRun(name="load"), Refusals(), Inbox(run_dir)
    admission = Admission(keys=lambda: (KEY,), certificate=b"", names=["load"], nnodes=job.agents)
    journal = HubJournal(run_dir, live)
    app = IngestApp(admission=admission, inbox=inbox, live=live, journal=journal, refusals=refusals)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(app, listening, refusals=refusals)
        serving = asyncio.create_task(server.run())
        await server.started.wait()
        plan = LoadPlan(
            host="127.0.0.1",
            port=listening.getsockname()[1],
            run="load",
            key=KEY,
            job=job,
            seconds=20.0,
            speed=20.0,
            bye=True,
            **faults,  # type: ignore[arg-type]  # how often each
        )
        report = await run_load(plan)
        server.stop()
        await serving
    inbox.close()
    live.tick()
    return live, report


def test_every_row_arrives_once(tmp_path: Path) -> None:
    job = LoadJob(agents=6, ranks_per_agent=4, slow_rank=17)
    live, report = asyncio.run(loaded(tmp_path, job))
    info = live.info()
    assert report.failed == []
    assert (report.rows, info["rows"], info["rows_repeated"]) == (480, 480, 0)
    assert (info["ranks"], info["step"], info["nodes"]) == (24, 19, 6)
    assert set(report.statuses) == {200}
    assert live.ranks(order="backward", limit=1)["rank"] == [17]


def test_faults_lose_and_double_nothing(tmp_path: Path) -> None:
    job = LoadJob(agents=5, ranks_per_agent=2, seed=3)
    live, report = asyncio.run(loaded(tmp_path, job, drop=0.2, duplicate=0.2))
    info = live.info()
    assert report.failed == []
    assert report.dropped > 0
    assert report.duplicates > 0
    assert (info["rows"], info["rows_repeated"], info["step"]) == (200, 0, 19)
    assert live.steps(bins=100)["ranks"] == [10] * 20


def test_rows_are_a_function_of_rank_and_step() -> None:
    job = LoadJob(agents=3, ranks_per_agent=2, slow_rank=3)
    ranks = LoadRanks(job, 1, job.pool_ns())
    rows = ranks.rows(0, 10)
    assert (rows["phase_ns"].sum(axis=2) == rows["wall_ns"]).all()
    assert (np.diff(rows["start_ns"], axis=1) == rows["wall_ns"][:, 1:]).all()
    assert (ranks.rows(4, 7) == rows[:, 4:7]).all()
    assert rows["phase_ns"][1, :, 4].mean() > 1.05 * rows["phase_ns"][0, :, 4].mean()
    sidecars = [RingSidecar.from_dict(raw) for raw in ranks.sidecars()]
    assert [about.identity.rank for about in sidecars] == [2, 3]
    assert [about.key for about in sidecars] == [ranks.key(0), ranks.key(1)]


def test_blocks_are_those_of_the_wire() -> None:
    job = LoadJob(agents=2, ranks_per_agent=3)
    ranks = LoadRanks(job, 1, job.pool_ns())
    found = rows_of(read_block(ranks.block(5, 9)))
    assert [part.after_seq for part in found] == [5, 5, 5]
    expected = ranks.rows(5, 9)
    assert [b"".join(part.slots) for part in found] == [expected[n].tobytes() for n in range(3)]
    assert rows_of(read_block(pack_block(found))) == found
