"""Asking worker servers: whole answers within their bounds count, whatever else comes does not, and nothing blocks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hang_jobs import entry, flight, nccl, nccl_entry
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from worker_server_stand_in import EMPTY, Behave, replaying

from stepscope.agent import flight_reader
from stepscope.agent.flight_reader import FLIGHT, Questions, ask_active, ask_flights, ask_servers

Serve = Callable[[Behave], Any]


def answer(body: bytes, *, status: str = "200 OK", head: str = "") -> Behave:
    text = f"HTTP/1.1 {status}\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return lambda connection, _: connection.sendall(text)


def raw(text: bytes) -> Behave:
    return lambda connection, _: connection.sendall(text)


def test_all_are_asked_and_answer(serve: Serve, tmp_path: Path) -> None:
    servers = {rank: serve(answer(b"x" * rank * 100_000, head="Content-Type: text/plain\r\n")) for rank in range(5)}
    places = {rank: server.path for rank, server in servers.items()} | {7: tmp_path / "nobody.sock"}
    answers = ask_servers(places, FLIGHT, patience_s=30)
    assert answers == {rank: b"x" * rank * 100_000 for rank in range(5)}
    request = servers[3].requests[0]
    assert request.startswith(b"POST /handler/fr_trace_json HTTP/1.1\r\n")
    assert request.endswith(b"\r\n\r\n")


NCCL = nccl(nccl_entry(1, state="started"))["flight"].replace(b": ", b":")
GLOO = flight(entry(1, "gloo:barrier")).replace(b": ", b":")
ON_CUDA = {"fr_trace_json": EMPTY, "dump_nccl_trace_json": EMPTY}
"""A build with NCCL in which nothing was recorded."""


def test_every_recorder_of_a_rank_is_asked(serve: Serve) -> None:
    unused_gloo = b'{"pg_config":{"":{"desc":"","name":"","ranks":"[0]"}},"pg_status":{},"version":"2.10"}'
    servers = {
        "nccl": serve(replaying({**ON_CUDA, "dump_nccl_trace_json": NCCL, "fr_trace_json": unused_gloo})),
        "gloo": serve(replaying({**ON_CUDA, "fr_trace_json": GLOO})),
        "both": serve(replaying({"fr_trace_json": GLOO, "dump_nccl_trace_json": NCCL})),
        "cpu build": serve(replaying({"fr_trace_json": GLOO})),
        "unused": serve(replaying(ON_CUDA)),
    }
    answers = ask_flights({key: server.path for key, server in servers.items()}, patience_s=30)
    both = b'{"recorders":[%b,%b]}' % (NCCL, GLOO)
    assert answers == {"nccl": NCCL, "gloo": GLOO, "both": both, "cpu build": GLOO, "unused": EMPTY}
    assert servers["nccl"].handlers() == ["fr_trace_json", "dump_nccl_trace_json"]
    assert servers["cpu build"].handlers() == ["fr_trace_json", "dump_nccl_trace_json"]


def test_torch_2_15_has_a_recorder_for_each_backend(serve: Serve) -> None:
    """ProcessGroupNCCL2 records where one has to ask by name; older versions answer that as gloo."""
    nccl2 = NCCL.replace(b"nccl:", b"nccl2:")
    newer = serve(replaying({**ON_CUDA, "fr_trace_json?backend=nccl2": nccl2}))
    beside = serve(replaying({**ON_CUDA, "fr_trace_json?backend=nccl2": nccl2, "fr_trace_json": GLOO}))
    older = serve(replaying({**ON_CUDA, "fr_trace_json": GLOO}))
    places = {"newer": newer.path, "beside": beside.path, "older": older.path}
    both = b'{"recorders":[%b,%b]}' % (nccl2, GLOO)
    assert ask_flights(places, patience_s=30) == {"newer": nccl2, "beside": both, "older": GLOO}
    assert ask_active(places, patience_s=30) == {"newer": nccl2, "beside": nccl2, "older": EMPTY}


def test_the_second_look_asks_for_what_has_not_ended(serve: Serve) -> None:
    whole = nccl(nccl_entry(1), nccl_entry(2, state="started"))["flight"]
    server = serve(replaying({"dump_nccl_trace_json": whole}))
    answers = ask_active({0: server.path}, patience_s=30)
    assert [row["collective_seq_id"] for row in json.loads(answers[0])["entries"]] == [2]
    assert server.handlers() == ["dump_nccl_trace_json?includecollectives=true&onlyactive=true"]


def test_an_answer_may_come_in_pieces(serve: Serve) -> None:
    def dribble(connection: socket.socket, _: bytes) -> None:
        for byte in b"HTTP/1.1 200 OK\r\ncontent-length:  4\r\n\r\npong":
            connection.sendall(bytes([byte]))

    assert ask_servers({0: serve(dribble).path}, "ping", patience_s=30) == {0: b"pong"}


@pytest.mark.parametrize(
    "behave",
    [
        pytest.param(answer(b"no", status="404 Not Found"), id="not found"),
        pytest.param(answer(b"no", status="500 Internal Server Error"), id="failed"),
        pytest.param(raw(b""), id="nothing"),
        pytest.param(raw(b"hello\n"), id="no http"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\n\r\nno length"), id="no length"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc"), id="negative"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999\r\n\r\nabc"), id="absurd"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"), id="cut off"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000), id="endless head"),
        pytest.param(answer(b"z" * 5000), id="too long"),
    ],
)
def test_anything_else_is_no_answer(serve: Serve, behave: Behave) -> None:
    places = {"odd": serve(behave).path, "good": serve(answer(b"fine")).path}
    assert ask_servers(places, FLIGHT, patience_s=30, max_body=4999) == {"good": b"fine"}


def test_who_is_silent_is_not_waited_for(serve: Serve) -> None:
    release = threading.Event()

    def hold(connection: socket.socket, request: bytes) -> None:
        release.wait(60)
        answer(b"late")(connection, request)

    places = {"held": serve(hold).path, "good": serve(answer(b"fine")).path}
    try:
        assert ask_servers(places, FLIGHT, patience_s=0.2) == {"good": b"fine"}
    finally:
        release.set()


def test_until_when_a_question_is_unanswered(serve: Serve, tmp_path: Path) -> None:
    release, answered = threading.Event(), threading.Event()

    def hold(connection: socket.socket, request: bytes) -> None:
        release.wait(60)
        answer(b"late")(connection, request)
        answered.set()

    places = {"held": serve(hold).path, "good": serve(answer(b"fine")).path, "none": tmp_path / "nobody.sock"}
    with Questions(places, FLIGHT) as questions:
        questions.wait(0.2)
        assert questions.answers == {"good": b"fine"}
        assert [key for key in (*places, "stranger") if questions.unanswered(key)] == ["held"]
        release.set()
        assert answered.wait(60)
        assert not questions.unanswered("held")
        assert questions.answers == {"good": b"fine", "held": b"late"}


def test_a_stream_without_end_ends_with_the_patience(serve: Serve) -> None:
    over = threading.Event()

    def pour(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 900000000\r\n\r\n")
        while not over.is_set():
            connection.sendall(bytes(1 << 16))

    try:
        assert ask_servers({0: serve(pour).path}, FLIGHT, patience_s=0.2, max_body=1 << 30) == {}
    finally:
        over.set()


def test_a_socket_that_is_none_and_a_path_too_long(tmp_path: Path) -> None:
    (tmp_path / "file.sock").write_text("no socket")
    places = {0: tmp_path / "file.sock", 1: tmp_path / ("x" * 200), 2: tmp_path / "nul\0"}
    assert ask_servers(places, FLIGHT, patience_s=5) == {}
    assert ask_servers({}, FLIGHT, patience_s=5) == {}


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
@example(b"HTTP/1.1 200\r\nContent-Length: 3\r\n\r\nabcdef")
@example(b"\r\n\r\n")
@example(b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\nab")
def test_fuzz_answers(text: bytes) -> None:
    """Fed to a call directly: what it takes for an answer has the length that was promised."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        call = flight_reader._Call.__new__(flight_reader._Call)
        call.socket, call.answer = ours, None
        call._received, call._max_body = bytearray(), 100
        theirs.sendall(text)
        theirs.shutdown(socket.SHUT_WR)
        while not call.receive():
            pass
    if call.answer is not None:
        head, _, body = text.partition(b"\r\n\r\n")
        assert b"200" in head
        assert body.startswith(call.answer)
