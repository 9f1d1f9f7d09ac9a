"""The connection: who answers must have the key, and the certificate that it proved it over; nothing waits for ever."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPSConnection
from typing import Any

import pytest

from stepscope.agent.shipping.client import HubClient
from stepscope.errors import HubError, UsageError
from stepscope.wire.frames import FrameHead, pack_frame
from stepscope.wire.handshake import PROOF_HEADER, Join, sign

KEY = b"k" * 32
SPOOL = "ab" * 16
FRAME = pack_frame(FrameHead(node=1, spool=SPOOL, sent_wall_ns=0), [])


def who() -> Join:
    return Join(run="a job/1", node=1, nnodes=2, host="b", spool=SPOOL, nonce="cd" * 16)


@contextmanager
def client(url: str, key: bytes = KEY) -> Iterator[HubClient]:
    made = HubClient(url, key)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def listening(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Somebody who is no hub: each connection is given to ``behave`` in a thread."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                connection, _ = server.accept()
                with connection:
                    if over.is_set():
                        return
                    try:
                        behave(connection)
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            socket.create_connection(server.getsockname()).close()
            thread.join()


@pytest.mark.parametrize("tls", [False, True])
def test_one_connection_carries_everything(new_hub: Any, certificates: Any, tls: bool) -> None:
    hub = new_hub(tls=certificates() if tls else None).start()
    with client(hub.url) as ours:
        welcome = ours.join(who(), patience_s=5)
        for _ in range(3):
            answer = ours.send(welcome.run, FRAME, patience_s=5)
            assert (answer.status, answer.document["next_s"]) == (200, 0.05)
            assert answer.sent_mono_ns < answer.heard_mono_ns
        assert len(hub._open) == 1
    assert hub.paths[:2] == ["/api/v1/runs/a%20job%2F1/join", "/api/v1/runs/a%20job%2F1-2/frames"]


def test_an_idle_connection_that_was_closed_is_opened_again(hub: Any) -> None:
    with client(hub.url) as ours:
        welcome = ours.join(who(), patience_s=5)
        tokens = dict(hub.tokens)
        for _ in range(2):
            hub.stop()
            hub.start()
            hub.tokens.update(tokens)
            assert ours.send(welcome.run, FRAME, patience_s=5).status == 200


@pytest.mark.faults
def test_another_key_is_refused_by_either_side(new_hub: Any, certificates: Any) -> None:
    hub = new_hub(tls=certificates(), key=b"x" * 32).start()
    with client(hub.url) as ours, pytest.raises(HubError, match=r"rejected this node: another key$"):
        ours.join(who(), patience_s=5)
    assert hub.joins == []
    with client(hub.url) as ours:
        hub.key = KEY
        body = ours.join(who(), patience_s=5)
        assert body.token in hub.tokens

    def say_yes(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        text = b'{"version":1,"run":"r","token":"t","positions":{"rings":{},"files":{}}}'
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nX-Stepscope-Proof: 00\r\n\r\n" % len(text) + text)

    with listening(say_yes) as url, client(url) as ours, pytest.raises(HubError, match="does not have this node's key"):
        ours.join(who(), patience_s=5)


@pytest.mark.faults
@pytest.mark.parametrize("careless", [False, True])
def test_one_in_the_middle_is_found_out(new_hub: Any, certificates: Any, careless: bool) -> None:
    """It passes the handshake on to the real hub, word by word, but its certificate is not the hub's.

    Either side would notice alone: a careless hub takes any proof.
    """
    hub, middle = new_hub(tls=certificates()).start(), new_hub(tls=certificates())

    def pass_on(request: Any, body: bytes) -> tuple[int, Any, str]:
        proof = request.headers[PROOF_HEADER]
        if careless:
            proof = sign(KEY, "join", body, hub.certificate)
        with closing(HTTPSConnection("127.0.0.1", hub.port, context=ssl._create_unverified_context())) as there:
            there.request("POST", request.path, body, {PROOF_HEADER: proof})
            answer = there.getresponse()
            return answer.status, answer.read(), answer.headers[PROOF_HEADER]

    middle._join = pass_on
    middle.start()
    why = "does not have this node's key" if careless else "another key"
    with client(middle.url) as ours, pytest.raises(HubError, match=why):
        ours.join(who(), patience_s=5)
    assert len(hub.joins) == careless


@pytest.mark.faults
def test_the_token_goes_to_nobody_with_another_certificate(new_hub: Any, certificates: Any) -> None:
    hub = new_hub(tls=certificates()).start()
    seen: list[str] = []
    with client(hub.url) as ours:
        welcome = ours.join(who(), patience_s=5)
        hub.stop()
        other = new_hub(tls=certificates())
        other.port = hub.port
        other._frame = lambda request, *_: (seen.append(request.headers["Authorization"]), (401, {}, ""))[1]
        other.start()
        with pytest.raises(HubError, match="different certificate than before") as caught:
            ours.send(welcome.run, FRAME, patience_s=5)
        assert seen == []
        assert welcome.token not in str(caught.value)
        ours.join(who(), patience_s=5)  # it has the key: then it is a hub, started anew
        ours.send(welcome.run, FRAME, patience_s=5)
        assert len(seen) == 1


@pytest.mark.faults
@pytest.mark.parametrize("tls", [False, True])
def test_one_that_accepts_and_never_answers(tls: bool) -> None:
    over = threading.Event()
    with (
        listening(lambda _: (over.wait(30), None)[1]) as url,
        client(url.replace("http", "https" if tls else "http")) as c,
    ):
        with pytest.raises(HubError, match="does not answer"):
            c.join(who(), patience_s=0.2)
        over.set()


@pytest.mark.faults
def test_one_that_answers_a_byte_at_a_time() -> None:
    """Each byte comes in time, all of them together do not."""
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for byte in b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 1000:
            connection.sendall(bytes([byte]))
            if over.wait(0.02):
                return

    with listening(drip) as url, client(url) as ours:
        with pytest.raises(HubError, match="does not answer"):
            ours.join(who(), patience_s=0.3)
        over.set()


@pytest.mark.faults
def test_whatever_comes_back_is_an_error_of_ours(new_hub: Any) -> None:
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\nX-Stepscope-Proof: abc\r\n\r\n" + b'{"version":1,"a": 2}'
    chance = random.Random(3)
    answers = [b"", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 999999 x\r\n\r\n", b"\xff" * 70_000]
    answers += [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    ]
    answers += [b"HTTP/1.1 100 Continue\r\n\r\n" * 3, b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n"]
    for _ in range(150):
        broken = bytearray(good[: chance.randrange(1, len(good) + 1)])
        for _ in range(chance.randrange(4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        answers.append(bytes(broken))
    waiting = iter(answers)

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(next(waiting))

    with listening(answer) as url, client(url) as ours:
        for _ in answers:
            with pytest.raises(HubError) as caught:
                ours.join(who(), patience_s=5)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 300


def test_an_answer_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.agent.shipping import client as module

    monkeypatch.setattr(module, "WELCOME_BYTES", 1 << 16)

    def pour(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(bytes(1 << 16))

    with listening(pour) as url, client(url) as ours, pytest.raises(HubError, match="did not answer with valid HTTP"):
        ours.join(who(), patience_s=5)


def test_what_a_stranger_says_is_cleaned(new_hub: Any) -> None:
    text = b'{"why": "no\\u001b[31m\\n' + b"x" * 500 + b'"}'

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 403 No\r\nContent-Length: %d\r\n\r\n" % len(text) + text)

    with listening(answer) as url, client(url) as ours, pytest.raises(HubError) as caught:
        ours.join(who(), patience_s=5)
    assert str(caught.value).endswith(f"rejected this node: no\\x1b[31m\\n{'x' * 192}")


@pytest.mark.parametrize(
    "url",
    ["", "host:1", "ftp://a", "http://", "http://a:b", "http://u:p@a", "https://a:99999", "http://a/?q", "http://[a"],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="is not the URL of a hub"):
        HubClient(url, KEY)


def test_a_host_that_is_none_and_a_port_that_is_closed() -> None:
    with client("http://a-host-that-is.invalid:1") as ours, pytest.raises(HubError, match="cannot be reached"):
        ours.join(who(), patience_s=5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with client(f"http://localhost:{port}/behind/") as ours, pytest.raises(HubError, match="Connection refused"):
        ours.join(who(), patience_s=5)
    with client(f"http://127.0.0.1:{port}") as ours, pytest.raises(HubError, match="does not answer"):
        ours.join(who(), patience_s=0)


@pytest.mark.parametrize("status", [b"200 OK", b"401 Unauthorized", b"404 Not Found"])
def test_nothing_of_the_run_is_said_before_the_hub_has_proved_itself(status: bytes) -> None:
    """To one who listens in its place, or to a hub of an older version, which knows no hello."""
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        heard.append(connection.recv(1 << 16))
        text = b'{"version": 2, "challenge": "00000000000000000000", "error": "token required"}'
        connection.sendall(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)
        heard.append(connection.recv(1 << 16))

    join = replace(who(), run="secret-run", host="secret-host", meta={"command": ["secret"], "user": "secret"})
    with listening(answer) as url, client(url) as ours, pytest.raises(HubError, match=r"ha(s|ve) this node's key"):
        ours.join(join, patience_s=5)
    assert b"POST /api/v1/hello HTTP/1.1\r\n" in heard[0]
    assert not any(b"secret" in said for said in heard)
