"""NCCL's Flight Recorder, read from outside: who waited for whom in real dumps, what was overwritten, foreign bytes."""

from __future__ import annotations

import gzip
import json
import os
import platform
import select
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rings import RingStream

from stepscope.agent import flight_reader
from stepscope.agent.drain import RingDrain
from stepscope.agent.flight_reader import HANDLERS, FlightReader
from stepscope.agent.flight_records import Dump, FlightRecords, RecordLimits, read_dump
from stepscope.diagnosis import build_window
from stepscope.diagnosis.engine.view import view_of
from stepscope.records.collectives import FLAG_DEVICE, FLAG_MISSED, OPS, PHASE_SHIFT, ProcessGroup, kept_by_itself
from stepscope.records.identity import RankIdentity
from stepscope.records.series import RunData
from stepscope.records.steps import BACKWARD, COMM_ENTRY, COMM_RECORD, ENTRIES_HEAD, FORWARD, OTHER, STEP, STEP_SLOT
from stepscope.ring import RingReader
from stepscope.ring.layout import ALLOCATED, SERVER_WORD, START, data_word
from stepscope.store.create import RunPaths, create_run
from stepscope.store.documents import end_run
from stepscope.store.live.ring_files import parts_from, read_segment
from stepscope.store.load import open_run
from stepscope.store.sealed.seal import seal

MS = 1_000_000
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
        self.handlers: list[str] = []

    def body(self) -> bytes:
        entries = [entry for entry in self.dump["entries"] if entry["time_created_ns"] < self.until_ns]
        return json.dumps({**self.dump, "entries": entries[-self.buffer :]}).encode()

    def __call__(self, connection: socket.socket, request: bytes) -> None:
        handler = request.split()[1].decode().removeprefix("/handler/")
        self.handlers.append(handler)
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

    def new_reader(self, **settings: Any) -> FlightReader:
        return FlightReader(
            clock=lambda: self.now_s, ring_clock=lambda: self.ring_ns, wall_offset_ns=lambda: WALL_NS, **settings
        )

    ring_ns = 1 << 60

    def bounds(self, rank: int) -> list[int]:
        """When its steps begin: a millisecond before the first of their three all-reduces."""
        own = [entry["time_created_ns"] - WALL_NS for entry in self.ranks[rank].server.dump["entries"]]
        return [own[at] - MS for at in range(FIRST - 1, FIRST - 1 + 3 * STEPS, 3)] + [own[-1] + MS]

    def write_steps(self, first: int = 0, last: int = STEPS) -> None:
        for number, rank in enumerate(self.ranks):
            rank.write_steps(self.bounds(number)[first : last + 1])

    def poll_once(self) -> None:
        """Until both were asked and heard."""
        counts = [len(rank.server.handlers) for rank in self.ranks]
        drains = [rank.drain for rank in self.ranks]
        for _ in range(200):
            self.turn(drains)
            if all(len(rank.server.handlers) > before for rank, before in zip(self.ranks, counts, strict=True)):
                return
        raise AssertionError("nobody was asked")

    def turn(self, drains: list[RingDrain], *, watched: bool = False) -> None:
        self.reader.poll(drains, watched=watched)
        while (number := self.reader.fileno()) is not None:
            select.select([number], [], [], 5.0)
            self.reader.receive()
        self.now_s += 0.1

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
    job.poll_once()
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
    steps = [step for step in window.steps[window.steady].tolist() if kept_by_itself(step)]
    arrivals = seen.arrivals
    assert len(arrivals.transfer_ns) == 3 * len(steps)
    assert np.allclose(np.sort(arrivals.transfer_ns / 1e6), np.sort(took[:, steps].min(axis=0).ravel()), atol=1e-5)
    waits = (took - took.min(axis=0))[:, steps]
    assert np.allclose(arrivals.waited_ns / 1e6, waits.sum(axis=(1, 2)), atol=1e-3)
    last = [int(((waits[1 - rank] > 0.05) & (waits[rank] == 0)).sum()) for rank in (0, 1)]
    assert arrivals.last.tolist() == pytest.approx(last, abs=6)
    assert arrivals.last[1] > 2 * arrivals.last[0]  # rank 1 is the late one, in both
    view = view_of(window)
    by_step = view.waited_ns
    assert by_step is not None
    columns = [view.steps.tolist().index(step) for step in steps]
    assert np.allclose(by_step[:, columns] / 1e6, waits.sum(axis=2), atol=1e-4)
    assert np.isnan(by_step[:, view.steps.tolist().index(33)]).all()


def test_real_agent(stage: Any, serve: Callable[..., Any]) -> None:
    """The whole way: a real agent, a ring on the real clock, and a recorder that times collectives a little later."""
    began_ns = time.time_ns() - time.perf_counter_ns()
    path = stage.paths.session / f"{os.getpid()}.ring"
    who = RankIdentity(host=platform.node(), pid=os.getpid(), world_size=1, backend="nccl", device="cuda")
    stream = RingStream(path, who)
    server = FlightServer({"pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0]"}}, "entries": []})
    serve(server, path.with_suffix(".sock"))
    stream.ring.header[SERVER_WORD] = 1
    agent = stage.agent()
    stage.until_event("rank_start")
    for step in range(61):
        if step == 60:
            time.sleep(1.0)  # what is known by then is written with the next step
        begin_ns = time.perf_counter_ns()
        stream.clock.now_ns = begin_ns
        if not step:
            stream.ledger.put(data_word(START, 0), begin_ns << 5)
        outer = stream.ledger.enter(BACKWARD)
        time.sleep(0.05)
        server.dump["entries"].append(
            entry(step, begin_ns + 10 * MS + began_ns, op="all_reduce", duration_ms=1.0 + step / 100)
        )
        stream.clock.now_ns = time.perf_counter_ns()
        stream.ledger.leave(outer)
        stream.ledger.end_step(OTHER, step, 0, ())
    agent.end()
    stream.close()
    (series,) = stage.data().ranks
    assert series.comm is not None and series.collectives is not None
    assert series.comm["step"].tolist() == list(range(60))
    assert series.comm["span_ns"].tolist() == [round((1.0 + step / 100) * MS) for step in range(60)]
    assert (series.comm["flags"] == FLAG_DEVICE).all()
    assert series.collectives["step"].tolist() == [*range(33), 48]
    assert (series.collectives["flags"] == FLAG_DEVICE | BACKWARD << PHASE_SHIFT).all()
    assert [(group.name, group.kind) for group in series.groups] == [("0", "world")]


class Records:
    """What becomes of dumps of one rank whose steps last ten milliseconds each."""

    def __init__(
        self, *, known_groups: tuple[ProcessGroup, ...] = (), world_size: int = 2, limits: RecordLimits | None = None
    ) -> None:
        self.flights = FlightRecords(known=lambda: known_groups, world_size=world_size, limits=limits)

    def steps(self, *numbers: int) -> None:
        slots = [
            STEP_SLOT.pack(STEP, 0, 1, step, step * 10 * MS, 10 * MS, *[0] * 16, *[0] * 3, 1, 1, 0, 0, 1, 0, 0, 0)
            for step in numbers
        ]
        self.flights.see_steps(slots)

    def take(self, *entries: Any, requested_ms: float = 1e6, config: Any = None, ahead_ms: int = 0) -> int:
        dump = read_dump(json.dumps({"pg_config": config or {}, "entries": entries}).encode())
        assert dump is not None
        return self.flights.take(dump, sent_ns=round(requested_ms * MS), wall_offset_ns=ahead_ms * MS)

    def rows(self) -> list[tuple[Any, ...]]:
        """Of sums: step, slot, operation, flags, count, bytes and span; taken away."""
        found: list[tuple[Any, ...]] = []
        slots, count = self.flights.records(7, 10_000)
        self.flights.taken(count)
        for slot in slots:
            kind, _, seq, step, entries = ENTRIES_HEAD.unpack_from(slot)
            assert seq == 7
            for at in range(entries if kind == COMM_RECORD else 0):
                op, group, flags, number, size, exposed, span = COMM_ENTRY.unpack_from(
                    slot, ENTRIES_HEAD.size + at * COMM_ENTRY.size
                )
                assert exposed == 0
                found.append((step, group, OPS[op], flags, number, size, span))
        return found


def at(step: float) -> int:
    return round((step * 10 + 5) * MS)


def test_a_step_waits_until_all_of_it_is_over_and_was_read() -> None:
    records = Records()
    records.steps(0, 1)
    assert records.take(entry(0, at(0), duration_ms=2.0), requested_ms=8.0) == 1
    assert records.rows() == []  # the dump is older than the end of the step
    assert records.take(entry(0, at(0), duration_ms=2.0), entry(1, at(1)), requested_ms=21.0) == 1
    assert records.rows() == [(0, 62, "all_reduce", FLAG_DEVICE, 1, 4000, 2 * MS)]
    assert records.take(entry(1, at(1), duration_ms=3.0), requested_ms=22.0) == 0
    assert records.rows() == [(1, 62, "all_reduce", FLAG_DEVICE, 1, 4000, 3 * MS)]
    assert not records.flights.waiting


def test_what_was_overwritten_is_counted_and_not_guessed() -> None:
    records = Records()
    records.steps(*range(6))
    records.take(*(entry(number, at(number), duration_ms=1.0) for number in range(2)), requested_ms=20.0)
    records.take(*(entry(number, at(number), duration_ms=1.0) for number in range(4, 6)))
    assert [(row[0], row[3], row[4]) for row in records.rows()] == [
        (0, FLAG_DEVICE, 1),
        (1, FLAG_DEVICE, 1),
        (2, FLAG_MISSED, 0),
        (3, FLAG_MISSED, 0),
        (4, FLAG_MISSED, 0),  # something of it may have come before the first entry that is left
        (5, FLAG_DEVICE, 1),
    ]


def test_one_that_was_overwritten_before_it_was_over_spoils_its_step_alone() -> None:
    records = Records()
    records.steps(0, 1)
    records.take(entry(0, at(0)), requested_ms=10.0)
    records.take(entry(1, at(1), duration_ms=1.0))
    assert [(row[0], row[3]) for row in records.rows()] == [(0, FLAG_MISSED), (1, FLAG_DEVICE)]


def test_a_recorder_that_was_reset_counts_anew() -> None:
    records = Records()
    records.steps(0, 1, 2, 3)
    records.take(entry(70, at(0), duration_ms=1.0), entry(71, at(1), duration_ms=1.0), requested_ms=20.0)
    records.take(entry(0, at(3), duration_ms=1.0))
    assert [(row[0], row[3]) for row in records.rows()] == [
        (0, FLAG_MISSED),  # it may have begun before the first entry
        (1, FLAG_DEVICE),
        (2, FLAG_MISSED),
        (3, FLAG_MISSED),  # likewise
    ]


def test_a_reset_is_noticed_though_the_recorder_is_past_where_it_was() -> None:
    records = Records()
    records.steps(*range(6))
    records.take(*(entry(number, at(number), duration_ms=1.0) for number in range(2)), requested_ms=20.0)
    assert (
        records.take(*(entry(number, at(2 + number), duration_ms=2.0) for number in range(4)), requested_ms=60.0) == 4
    )
    assert [(row[0], row[3], row[6]) for row in records.rows()] == [
        (0, FLAG_DEVICE, MS),
        (1, FLAG_DEVICE, MS),
        (2, FLAG_MISSED, 0),  # something of it may have come before the reset
        *[(step, FLAG_DEVICE, 2 * MS) for step in (3, 4, 5)],
    ]


def test_entries_out_of_order_groups_and_sends() -> None:
    """Two groups, one of them the rank's own; sends and recvs, which are summed and never hold a step up in vain."""
    known_groups = (
        ProcessGroup(slot=3, name="7", description="mesh_tp", kind="tensor", backend="nccl", ranks=(0, 1), size=2),
    )
    records = Records(known_groups=known_groups, world_size=4)
    records.steps(0)
    pipe = {"process_group": ["9", "mesh_pp"], "is_p2p": True, "collective_seq_id": 0}
    entries = [
        entry(0, at(0), duration_ms=1.0, process_group=["7", "mesh_tp"]),
        entry(1, at(0), op="_all_gather_base", duration_ms=2.0, output_sizes=[[4000]]),
        entry(2, at(0), op="send 0->1", duration_ms=3.0, p2p_seq_id=1, **pipe),
        entry(3, at(0), op="recv 0<-1", duration_ms=4.0, p2p_seq_id=2, **pipe),
        entry(4, at(0), op="all_reduce_barrier", duration_ms=0.5),
    ]
    records.take(*reversed(entries), config={"0": {"ranks": "[0, 1, 2, 3]"}, "9": {"ranks": "[0, 2]"}})
    assert sorted(records.rows()) == [
        (0, 3, "all_reduce", FLAG_DEVICE, 1, 4000, 1 * MS),
        (0, 61, "recv", FLAG_DEVICE, 1, 4000, 4 * MS),
        (0, 61, "send", FLAG_DEVICE, 1, 4000, 3 * MS),
        (0, 62, "all_gather", FLAG_DEVICE, 1, 16000, 2 * MS),
        (0, 62, "barrier", FLAG_DEVICE, 1, 0, MS // 2),
    ]
    assert [(g.slot, g.name, g.kind, g.ranks, g.size) for g in records.flights.found] == [
        (62, "0", "world", (0, 1, 2, 3), 4),
        (61, "9", "pipeline", (0, 2), 2),
    ]


def test_names_without_end_are_not_kept() -> None:
    requests: list[int] = []

    def known_groups() -> tuple[ProcessGroup, ...]:
        requests.append(1)
        return ()

    flights = FlightRecords(known=known_groups, world_size=2)
    for first in range(0, 1000, 100):
        entries = [
            entry(number, at(number), process_group=[f"{number:05}" + "x" * 2000, ""])
            for number in range(first, first + 100)
        ]
        dump = read_dump(json.dumps({"entries": entries}).encode())
        assert dump is not None
        assert flights.take(dump, sent_ns=10_000 * MS, wall_offset_ns=0) == 100
    assert len(flights._slots) == len(flights.found) == 31
    assert max(map(len, flights._slots)) == max(len(key[0]) for key in flights._by_key) == 80
    assert len(requests) == 10  # the header of the ring, once for each dump
    assert [call.slot for call in flights._calls] == [*range(62, 31, -1), *[63] * 969]


def test_a_coalesced_call_is_one_collective_with_the_time_of_its_last_entry() -> None:
    records = Records()
    records.steps(0)
    inner = [entry(number, at(0), seq=5) for number in range(3)]
    records.take(
        *inner, entry(3, at(0), op="coalesced", seq=5, input_sizes=[]), entry(4, at(0), seq=6), requested_ms=10.0
    )
    assert records.rows() == []
    done = entry(3, at(0), op="coalesced", seq=5, input_sizes=[], duration_ms=6.0)
    records.take(*inner, done, entry(4, at(0), seq=6, duration_ms=1.0))
    assert records.rows() == [(0, 62, "all_reduce", FLAG_DEVICE, 2, 4 * 4000, 7 * MS)]


def test_a_kind_of_which_only_some_have_a_duration_spoils_its_step() -> None:
    """Captured into a CUDA graph, say: nothing is ever heard of them, but what comes later in their group is over."""
    records = Records()
    records.steps(0, 1, 2)
    records.take(
        *(entry(0, at(0)), entry(1, at(0), duration_ms=1.0)),
        entry(2, at(1), retired=True),
        *(entry(3, at(2), op="broadcast", retired=True), entry(4, at(2), duration_ms=2.0)),
    )
    assert records.rows() == [
        (0, 63, OPS[0], FLAG_MISSED, 0, 0, 0),
        (2, 62, "all_reduce", FLAG_DEVICE, 1, 4000, 2 * MS),  # of step 1, and of broadcasts, nothing has a time
    ]
    assert not records.flights.waiting


def test_one_that_is_never_over_spoils_its_step() -> None:
    records = Records()
    records.steps(0)
    records.take(entry(0, at(0), op="broadcast", duration_ms=1.0), entry(1, at(0)), requested_ms=60_000.0)
    assert records.rows() == []
    records.take(entry(1, at(0)), requested_ms=60_011.0)
    assert [(row[0], row[3]) for row in records.rows()] == [(0, FLAG_MISSED)]


@pytest.mark.parametrize("ahead_ms", [5000, -5000, 60])
def test_a_wall_clock_that_is_set_costs_what_was_called_since_the_last_read(ahead_ms: int) -> None:
    records = Records()
    records.steps(*range(600, 607))
    calls = [entry(number, at(600 + number), duration_ms=1.0) for number in range(4)]
    records.take(entry(0, at(600), duration_ms=1.0), entry(1, at(601)), requested_ms=6015.5)
    assert [(row[0], row[3]) for row in records.rows()] == [(600, FLAG_DEVICE)]
    later = [entry(number, at(600 + number) + ahead_ms * MS, duration_ms=1.0) for number in range(4, 7)]
    assert records.take(*calls, later[0], requested_ms=6046.0, ahead_ms=ahead_ms) == 3
    assert records.take(*calls, *later, requested_ms=6100.0, ahead_ms=ahead_ms) == 2
    assert [(row[0], row[3]) for row in records.rows()] == [
        *[(step, FLAG_MISSED) for step in (601, 602, 603, 604)],
        *[(step, FLAG_DEVICE) for step in (605, 606)],
    ]
    assert not records.flights.waiting and not records.flights._gaps


@pytest.mark.parametrize("wrong", [1 << 62, 0])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_time_that_cannot_be_right_costs_the_steps_around_it(wrong: int, place: int) -> None:
    """Of an entry whose time is nonsense it is known between which two others it came, wherever it stands."""
    records = Records()
    records.steps(*range(600, 608))
    calls = [entry(number, at(600 + number) + WALL_NS, duration_ms=1.0) for number in range(8)]
    calls[place]["time_created_ns"] = wrong
    records.take(*calls[:6], requested_ms=6060.0, ahead_ms=WALL_NS // MS)
    records.take(*calls, requested_ms=6080.0, ahead_ms=WALL_NS // MS)
    spoiled = {0: (600, 601), 2: (601, 602, 603), 5: (604, 605, 606)}[place]
    assert [(row[0], row[3]) for row in records.rows()] == [
        (step, FLAG_MISSED if step in spoiled else FLAG_DEVICE) for step in range(600, 608)
    ]


def test_without_steps_nothing_grows() -> None:
    """As in an evaluation: what nobody claims goes, and what is gone is one gap."""
    records = Records(limits=RecordLimits(calls=20, changes=10))
    for first in range(0, 100, 10):
        records.take(
            *(entry(n, at(n), duration_ms=1.0) for n in range(first, first + 10)), requested_ms=10 * first + 100
        )
        records.flights.see_phases([(at(n), FORWARD) for n in range(first, first + 10)])
    flights = records.flights
    assert len(flights._calls) == 20 and len(flights._by_key) == 20
    assert flights._gaps == [(at(0), at(80))]
    assert len(flights._changes_at) == len(flights._changes_to) <= 10
    assert flights._changes_at[-1] == at(99)
    records.steps(79, 80, 81)
    flights.settle()
    assert [(row[0], row[3]) for row in records.rows()] == [
        (79, FLAG_MISSED),
        (80, FLAG_MISSED),  # it began before the first call that is left
        (81, FLAG_DEVICE),
    ]


def test_many_gaps_become_few() -> None:
    records = Records(limits=RecordLimits(gaps=10))
    for step in range(0, 400, 4):  # of every four two were overwritten
        seen = (entry(number, at(number), duration_ms=1.0) for number in (step, step + 1))
        records.take(*seen, requested_ms=10 * step + 20)
    gaps = records.flights._gaps
    assert 5 <= len(gaps) <= 10 and gaps[0][0] == at(1) and gaps[-1] == (at(393), at(396))
    records.steps(*range(393, 398))
    records.flights.settle()
    assert [row[3] for row in records.rows()] == [*[FLAG_MISSED] * 4, FLAG_DEVICE]


def test_steps_that_waited_in_vain_are_missed() -> None:
    records = Records(limits=RecordLimits(steps=3))
    records.steps(*range(4))
    assert records.rows() == []  # nobody knows whether there is a recorder
    records.take(entry(0, at(3), duration_ms=1.0), requested_ms=40.0)
    assert [(row[0], row[3]) for row in records.rows()] == [(3, FLAG_DEVICE)]
    records.steps(*range(4, 9))
    assert [(row[0], row[3]) for row in records.rows()] == [(4, FLAG_MISSED), (5, FLAG_MISSED)]


def test_the_recorder_of_another_backend_is_none() -> None:
    body = json.dumps({"entries": [{**entry(0, 5), "profiling_name": "gloo:all_reduce"}]}).encode()
    assert read_dump(body) == Dump()


HOSTILE = [
    b"",
    b"null",
    b"[]",
    b"{",
    b'{"entries": {}}',
    b'{"entries": [null]}',
    b'{"entries": [{"record_id": -1}]}',
    b'{"entries": [{"record_id": 1e400, "profiling_name": "", "time_created_ns": 0}]}',
    b'{"entries": [{"record_id": 99999999999999999999999, "profiling_name": "", "time_created_ns": 0}]}',
    b'{"entries": [{"record_id": 1, "profiling_name": "x", "time_created_ns": 1, "process_group": []}]}',
    b'{"entries": [{"record_id": 1, "profiling_name": "x", "time_created_ns": 1, "input_sizes": [["a"]]}]}',
    b'{"entries": ' + b"[" * 100_000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("body", HOSTILE)
def test_what_is_no_dump_is_none(body: bytes) -> None:
    assert read_dump(body) is None


HUGE = {"record_id": 0, "profiling_name": "nccl:all_reduce", "time_created_ns": 5 * MS, "input_sizes": [[1 << 40] * 5]}
words = st.integers(-(1 << 70), 1 << 70) | st.integers(0, 50)
texts = st.sampled_from(["nccl:all_reduce", "nccl:coalesced", "nccl:send 0->1", "x", "", "nccl2:_all_gather_base"])
hostile_entries = st.fixed_dictionaries(
    {
        "record_id": st.integers(0, 50) | words,
        "profiling_name": texts,
        "time_created_ns": st.integers(0, 200 * MS) | words,
    },
    optional={
        "process_group": st.tuples(st.text(max_size=100), st.text(max_size=3)),
        "collective_seq_id": st.integers(0, 9) | words,
        "p2p_seq_id": st.integers(0, 9),
        "is_p2p": st.booleans(),
        "retired": st.booleans(),
        "duration_ms": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "input_sizes": st.lists(st.lists(st.integers(-5, 1 << 40), max_size=5), max_size=3),
        "input_dtypes": st.lists(st.sampled_from(["Float", "Bool", "?"]), max_size=3),
    },
)


@example(dumps=[[{**HUGE, "duration_ms": 1.7e308}, {**HUGE, "record_id": 1, "duration_ms": 1e300}]], ranks="")
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.too_slow])
@given(dumps=st.lists(st.lists(hostile_entries, max_size=12), max_size=4), ranks=st.text(max_size=20))
def test_fuzz_dumps(dumps: list[list[Any]], ranks: str) -> None:
    """Whatever comes, what is made of it are records that hold what records can hold, each step once."""
    records = Records()
    records.steps(*range(12))
    for entries in dumps:
        dump = read_dump(json.dumps({"pg_config": {"0": {"ranks": ranks}}, "entries": entries}).encode())
        if dump is not None:
            records.flights.take(dump, sent_ns=120 * MS, wall_offset_ns=0)
    rows = records.rows()
    assert len({row[:3] for row in rows}) == len(rows)
    assert all(0 <= row[6] < 1 << 62 and row[3] in (FLAG_DEVICE, FLAG_MISSED) for row in rows)


def test_a_second_agent_goes_on_where_the_first_one_was(node: Callable[[str], Node]) -> None:
    job = node("backward")
    job.write_steps(0, 20)
    job.drain()
    job.poll_once()
    job.write_steps(20, 30)
    job.drain()  # with it the collectives of the first twenty
    job.write_steps(30, STEPS)
    for rank in job.ranks:
        rank.drain.close()
        rank.drain = RingDrain(RingReader(rank.stream.ring.path), job.paths.run_dir)
    job.reader = job.new_reader()
    job.poll_once()
    job.drain()
    window = build_window(job.end())
    assert window.communication is not None and window.communication.measured is not None
    assert window.communication.measured.places.all()
    assert [len(group.ranks) for group in window.communication.groups] == [2]
    (flow,) = window.communication.flows
    assert np.allclose(flow.least_ns / 1e6, durations_ms("backward").sum(axis=2).min(axis=0), rtol=1e-5)


def test_a_buffer_that_is_too_small_is_a_sample(node: Callable[[str], Node]) -> None:
    job = node("backward")
    for rank in job.ranks:
        rank.server.buffer = 30
    for first in range(0, STEPS, 20):
        job.write_steps(first, first + 20)
        job.drain()
        for number, rank in enumerate(job.ranks):
            rank.server.until_ns = job.bounds(number)[first + 20] + WALL_NS
        job.ring_ns = max(job.bounds(number)[first + 20] for number in (0, 1))
        job.poll_once()
    window = build_window(job.end())
    seen = window.communication
    assert seen is not None and seen.measured is not None
    # Ten steps fill it; the first of them may have begun before its first entry.
    assert np.flatnonzero(seen.measured.places).tolist() == [*range(11, 20), *range(31, 40)]
    assert seen.measured.missed == 11  # of the first twenty nobody says so: they were there before we looked


def test_readers_of_the_segment_get_all_of_it_frame_by_frame_and_sealed(node: Callable[[str], Node]) -> None:
    """As the hub's own reader and an agent that ships to a hub read it: what comes after the last seq they had."""
    job = node("forward")
    path = job.ranks[0].drain.segment.path
    parts, offset = [], 0
    for first in range(0, STEPS, 10):
        job.write_steps(first, first + 10)
        job.drain()
        job.poll_once()
        after_seq = parts[-1].last_seq if parts else 0
        found, offset = parts_from(path, offset, after_seq=after_seq, most_slots=1 << 20)
        parts += found
    run = job.end()
    found, offset = parts_from(path, offset, after_seq=parts[-1].last_seq, most_slots=1 << 20)
    slots = b"".join(part.slots for part in [*parts, *found])
    assert slots == read_segment(path).slots
    before = [(series.comm, series.collectives, series.groups) for series in run.ranks]
    end_run(job.paths.run_dir, exit_code=0, status="finished")
    seal(job.paths.run_dir)
    for (comm, collectives, groups), series in zip(before, open_run(job.paths.run_dir).ranks, strict=True):
        assert comm is not None and collectives is not None
        assert series.comm is not None and series.collectives is not None
        assert np.array_equal(comm, series.comm) and len(comm) == STEPS
        assert np.array_equal(collectives, series.collectives) and groups == series.groups


def test_how_often_a_rank_is_asked(node: Callable[[str], Node]) -> None:
    """Every second for eight answers, every five for five minutes, twice a minute later; never for nothing."""
    job = node("backward")
    drains, (first, _) = [rank.drain for rank in job.ranks], job.ranks
    assert 10 <= asked_in(job, 20, per_turn=1) <= 11
    assert 3 <= asked_in(job, 20, per_turn=1) <= 5
    first.server.buffer = 10  # it fills within a second: then the steps in between are not known
    assert 3 <= asked_in(job, 20, per_turn=1) <= 5
    job.now_s += 300
    assert 2 <= asked_in(job, 61, per_turn=1) <= 3
    before = len(first.server.handlers)
    for _ in range(200):
        first.stream.ledger.put(data_word(ALLOCATED, 1))
        job.turn(drains, watched=True)
    assert 3 <= len(first.server.handlers) - before <= 5
    assert len(job.ranks[1].server.handlers) == 1


def asked_in(job: Node, seconds: int, *, per_turn: int) -> int:
    """How often the first rank is asked while it lives, with so many collectives in a tenth of a second."""
    first = job.ranks[0]
    before = len(first.server.handlers)
    for _ in range(10 * seconds):
        first.stream.ledger.put(data_word(ALLOCATED, 1))  # a sign of life
        last = first.server.dump["entries"][-1]
        first.server.dump["entries"] += [
            {**last, "record_id": last["record_id"] + 1 + more} for more in range(per_turn)
        ]
        job.turn([rank.drain for rank in job.ranks])
    return len(first.server.handlers) - before


def test_one_that_is_quiet_for_longer_than_ever_is_asked_soon(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be its end; steps of two seconds are none."""
    monkeypatch.setattr(flight_reader, "EARLY_FOR_S", 0.0)
    job = node("backward")
    drains, (first, _) = [rank.drain for rank in job.ranks], job.ranks
    asked_in(job, 20, per_turn=1)

    def asked_with_a_word_every(seconds: float, times: int) -> int:
        before = len(first.server.handlers)
        for _ in range(times):
            first.stream.ledger.put(data_word(ALLOCATED, 1))
            for _ in range(int(10 * seconds)):
                job.turn(drains)
        return len(first.server.handlers) - before

    asked_with_a_word_every(2.0, 2)
    assert asked_with_a_word_every(2.0, 15) <= 2
    assert asked_with_a_word_every(6.0, 1) == 1


def test_a_large_buffer_is_read_more_rarely(node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as large, a fourth as often: every 4 s at first, then every 20 s."""
    monkeypatch.setattr(flight_reader, "BUFFER", 200)
    job = node("backward")
    first = job.ranks[0]
    last = first.server.dump["entries"][-1]
    first.server.buffer = 800
    first.server.dump["entries"] += [{**last, "record_id": last["record_id"] + 1 + more} for more in range(790)]
    assert 8 <= asked_in(job, 32, per_turn=0) <= 9
    assert 2 <= asked_in(job, 60, per_turn=0) <= 3


def test_a_server_may_keep_a_share_of_the_memory_and_what_it_keeps_is_told(node: Callable[[str], Node]) -> None:
    """Each of its threads keeps what it took to build an answer; when all have, more answers cost nothing."""
    job = node("backward")
    first = job.ranks[0]
    size = len(first.server.body())
    kept = int(flight_reader.KEPT_PER_BYTE * size)
    # Both ranks share a hundredth: there is room for five answers of this one.
    job.reader = job.new_reader(memory=lambda pid: 100 * 2 * int(5.5 * kept), threads=8)
    assert job.reader.kept_bytes(first.drain) is None
    assert asked_in(job, 60, per_turn=0) == 5
    assert job.reader.kept_bytes(first.drain) == 5 * kept
    job.reader = job.new_reader(memory=lambda pid: 100 * 2 * int(5.5 * kept), threads=5)
    assert asked_in(job, 60, per_turn=0) > 10
    assert job.reader.kept_bytes(first.drain) == 5 * kept


def test_the_right_recorder_is_found_and_a_silent_server_left_alone(node: Callable[[str], Node]) -> None:
    job = node("backward")
    job.ranks[0].server.handler = HANDLERS[1]  # torch 2.15
    job.ranks[1].server.handler = "none"
    job.write_steps()
    job.drain()
    for _ in range(200):  # twenty seconds
        job.turn([rank.drain for rank in job.ranks])
    assert job.ranks[0].server.handlers[:2] == list(HANDLERS[:2])
    assert set(job.ranks[0].server.handlers[2:]) <= {HANDLERS[1]}
    assert job.ranks[1].server.handlers[:5] == [*HANDLERS, HANDLERS[0]]
    assert 8 <= len(job.ranks[1].server.handlers) <= 24  # ever more rarely


def entry(record_id: int, created_ns: int, *, op: str = "all_reduce", seq: int | None = None, **more: Any) -> Any:
    seq = record_id + 1 if seq is None else seq
    return {
        "record_id": record_id,
        "collective_seq_id": seq,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"nccl:{op}",
        "time_created_ns": created_ns,
        "input_sizes": [[1000]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1000]],
        "output_dtypes": ["Float"],
        "retired": "duration_ms" in more,
        "state": "completed" if "duration_ms" in more else "scheduled",
        **more,
    }
