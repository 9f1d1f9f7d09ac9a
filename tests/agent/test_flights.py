"""NCCL's Flight Recorder, read from outside: who waited for whom in real dumps, what was overwritten, foreign bytes."""

from __future__ import annotations

import gzip
import json
import platform
import select
import socket
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.agent.drain import RingDrain
from stepscope.agent.flight_reader import HANDLERS, FlightReader
from stepscope.diagnosis import build_window
from stepscope.diagnosis.view import view_of
from stepscope.records.collectives import kept_by_itself
from stepscope.records.identity import RankIdentity
from stepscope.records.phases import BACKWARD, FORWARD, OTHER
from stepscope.records.series import RunData
from stepscope.ring import RingReader
from stepscope.ring.layout import SERVER_WORD
from stepscope.ring.words import START, data_word
from stepscope.store.create import RunPaths, create_run
from stepscope.store.load import open_run
from stepscope.testing.rings import RingStream

MS = 1_000_000
S = 1000 * MS
DATA = Path(__file__).parent / "data" / "h200_flights"
WALL_NS = 1_794_847_940_000_000_000
"""The wall clock at instant 0 of the rings."""
FIRST = 9
"""Sequence number of the first all-reduce of a step; from there on three make a step."""
STEPS = 40


def recorded(fault: str, rank: int) -> dict[str, Any]:
    with gzip.open(DATA / f"{fault}_{rank}.json.gz") as file:
        dump: dict[str, Any] = json.load(file)
    return dump


def durations_ms(fault: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[rank, step, bucket]."""
    own = [[entry["duration_ms"] for entry in recorded(fault, rank)["entries"]] for rank in (0, 1)]
    return np.array(own)[:, FIRST - 1 : FIRST - 1 + 3 * STEPS].reshape(2, STEPS, 3)


class FlightServer:
    """Answers as torch's worker server does, with the entries that were recorded by now and still are there."""

    def __init__(self, dump: dict[str, Any], handler: str = HANDLERS[0]) -> None:
        self.dump, self.handler = dump, handler
        self.until_ns = 1 << 62
        self.buffer = 2000
        self.asked: list[str] = []

    def body(self) -> bytes:
        entries = [entry for entry in self.dump["entries"] if entry["time_created_ns"] < self.until_ns]
        return json.dumps({**self.dump, "entries": entries[-self.buffer :]}).encode()

    def __call__(self, connection: socket.socket, request: bytes) -> None:
        handler = request.split()[1].decode().removeprefix("/handler/")
        self.asked.append(handler)
        if handler != self.handler:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        body = self.body()
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


class NcclRank:
    """A ring with steps at given instants, its server, and the agent's end of both."""

    def __init__(self, paths: RunPaths, rank: int, server: FlightServer, serve: Callable[..., Any]) -> None:
        path = paths.session / f"{rank}.ring"
        who = RankIdentity(host=platform.node(), pid=10_000_000 + rank, rank=rank, world_size=2, backend="nccl")
        self.stream = RingStream(path, replace(who, device="cuda"))
        self.stream.ring.header[SERVER_WORD] = 1
        self.server = server
        serve(server, path.with_suffix(".sock"))
        self.drain = RingDrain(RingReader(path), paths.run_dir)
        self.steps = 0

    def write_steps(self, bounds: list[int]) -> None:
        """Steps from one instant to the next: forward for a tenth of a millisecond, then backward."""
        clock, ledger = self.stream.clock, self.stream.ledger
        for begin, end in pairwise(bounds):
            clock.now_ns = begin
            if not self.steps:
                ledger.put(data_word(START, 0), begin << 5)
            for phase, until in ((FORWARD, begin + MS // 10), (BACKWARD, end - MS // 10)):
                outer = ledger.enter(phase)
                clock.now_ns = until
                ledger.leave(outer)
            clock.now_ns = end
            ledger.end_step(OTHER, self.steps, 0, ())
            self.steps += 1


class Node:
    """Two ranks of a recorded job and an agent that looks when it is told to."""

    def __init__(self, tmp_path: Path, serve: Callable[..., Any], fault: str) -> None:
        self.paths = create_run(tmp_path / "runs", "test", ["python", "train.py"], environ={}, sessions=tmp_path / "s")
        self.ranks = [NcclRank(self.paths, rank, FlightServer(recorded(fault, rank)), serve) for rank in (0, 1)]
        self.now_s = 0.0
        self.reader = self.new_reader()

    def new_reader(self) -> FlightReader:
        return FlightReader(clock=lambda: self.now_s, ring_clock=lambda: self.ring_ns, wall_offset_ns=lambda: WALL_NS)

    ring_ns = 1 << 60

    def bounds(self, rank: int) -> list[int]:
        """When its steps begin: a millisecond before the first of their three all-reduces."""
        own = [entry["time_created_ns"] - WALL_NS for entry in self.ranks[rank].server.dump["entries"]]
        return [own[at] - MS for at in range(FIRST - 1, FIRST - 1 + 3 * STEPS, 3)] + [own[-1] + MS]

    def write_steps(self, first: int = 0, last: int = STEPS) -> None:
        for number, rank in enumerate(self.ranks):
            rank.write_steps(self.bounds(number)[first : last + 1])

    def look(self) -> None:
        """Until both were asked and heard."""
        asked = [len(rank.server.asked) for rank in self.ranks]
        drains = [rank.drain for rank in self.ranks]
        for _ in range(2000):
            self.reader.look(drains, watched=False)
            while (number := self.reader.fileno()) is not None:
                select.select([number], [], [], 5.0)
                self.reader.receive()
            self.now_s += 0.1
            if all(len(rank.server.asked) > before for rank, before in zip(self.ranks, asked, strict=True)):
                return
        raise AssertionError("nobody was asked")

    def drain(self) -> None:
        for rank in self.ranks:
            rank.drain.drain()
            rank.drain.save_last_sidecar()

    def end(self) -> RunData:
        for rank in self.ranks:
            rank.drain.drain_to_end()
            rank.drain.save_last_sidecar()
            rank.drain.remove()
        return open_run(self.paths.run_dir)


@pytest.fixture
def node(tmp_path: Path, serve: Callable[..., Any]) -> Callable[[str], Node]:
    return lambda fault: Node(tmp_path, serve, fault)


@pytest.mark.parametrize("fault", ["backward", "forward"])
def test_who_waited_for_whom_in_real_dumps(node: Callable[[str], Node], fault: str) -> None:
    job = node(fault)
    job.write_steps()
    job.drain()
    job.look()
    window = build_window(job.end())
    seen = window.communication
    assert seen is not None and seen.measured is not None
    assert [(g.name, g.description, g.kind, g.backend, g.ranks, g.timed, g.device) for g in seen.groups] == [
        ("0", "default_pg", "world", "nccl", (0, 1), True, True)
    ]
    took = durations_ms(fault)
    (flow,) = seen.flows
    assert (flow.op, flow.device, flow.count, flow.bytes) == ("all_reduce", True, 3.0, 3 * 2_099_200 * 4)
    assert np.allclose(flow.least_ns / 1e6, took.sum(axis=2).min(axis=0), rtol=1e-5)
    assert seen.measured.places.all() and seen.measured.missed == 0
    # One by one, the transfer is what the last rank took, and the rest is waiting.
    kept = [step for step in window.steps[window.steady].tolist() if kept_by_itself(step)]
    arrivals = seen.arrivals
    assert len(arrivals.transfer_ns) == 3 * len(kept)
    assert np.allclose(np.sort(arrivals.transfer_ns / 1e6), np.sort(took[:, kept].min(axis=0).ravel()), atol=1e-5)
    waits = (took - took.min(axis=0))[:, kept]
    assert np.allclose(arrivals.waited_ns / 1e6, waits.sum(axis=(1, 2)), atol=1e-3)
    last = [int(((waits[1 - rank] > 0.05) & (waits[rank] == 0)).sum()) for rank in (0, 1)]
    assert arrivals.last.tolist() == pytest.approx(last, abs=6)
    assert arrivals.last[1] > 2 * arrivals.last[0]  # rank 1 is the late one, in both
    view = view_of(window)
    by_step = seen.waited_by_step(view)
    assert by_step is not None
    columns = [view.steps.tolist().index(step) for step in kept]
    assert np.allclose(by_step[:, columns] / 1e6, waits.sum(axis=2), atol=1e-4)
    assert np.isnan(by_step[:, view.steps.tolist().index(33)]).all()
