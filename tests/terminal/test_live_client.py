"""The reader of a hub: certificates, hubs that are none, and that closing ends any wait."""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope.errors import HubError, HubMissing, HubRefused
from stepscope.hub.transport import TlsFiles, make_certificate
from stepscope.terminal.documents import Message, Run, Runs, Status
from stepscope.terminal.feed import Feed, HubReader, RunAddress
from tests.hub.run_parts import ServedFolder

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 44\r\nConnection: close\r\n\r\n{"total": 1, "runs": [{"id": "a"}, {"id":1}'


class Stranger:
    """Somebody who listens and says one thing to everybody."""

    def __init__(self, says: bytes, tls: TlsFiles | None = None) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._says, self._tls = says, tls
        self.port: int = self._listening.getsockname()[1]
        self.heard = b""
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        context = None
        if self._tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return  # it was closed
            try:
                sock = context.wrap_socket(sock, server_side=True) if context is not None else sock
                self.heard += sock.recv(1 << 16)
                sock.sendall(self._says)
            except OSError:
                sock.close()  # somebody who did not trust us
                continue
            if self._says:
                sock.close()
            else:
                self._kept.append(sock)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for sock in (*self._kept, self._listening):
            sock.close()


@pytest.fixture
def stranger() -> Iterator[Callable[[bytes], Stranger]]:
    found: list[Stranger] = []

    def start(says: bytes) -> Stranger:
        found.append(Stranger(says))
        return found[-1]

    yield start
    for one in found:
        one.close()


def reader_of(port: int, *, scheme: str = "http", fingerprint: str = "", run: str = "a") -> HubReader:
    return HubReader(RunAddress(url=f"{scheme}://127.0.0.1:{port}", token="secret", run=run, fingerprint=fingerprint))


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (b"SSH-2.0-nothing\r\n", "is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "does not understand"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]", "does not understand"),
        (OK, "does not understand"),
        (b'HTTP/1.1 500 X\r\nContent-Length: 15\r\n\r\n{"error": "a\\n"', "HTTP status 500"),
        (b'HTTP/1.1 400 X\r\nContent-Length: 23\r\n\r\n{"error": "a\\u001b[1m"}', r"127.0.0.1:[0-9]+: a\\x1b\[1m"),
    ],
)
def test_whoever_answers_something_else_is_no_hub(stranger: Callable[[bytes], Stranger], says: bytes, why: str) -> None:
    reader = reader_of(stranger(says).port)
    with pytest.raises(HubError, match=why) as raised:
        reader.get("runs", {}, Runs, of_run=False)
    reader.forget()
    assert "\x1b" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_closing_ends_a_wait(stranger: Callable[[bytes], Stranger]) -> None:
    silent = stranger(b"")
    reader = reader_of(silent.port)
    found: list[Exception] = []

    def ask() -> None:
        try:
            list(reader.stream(""))
        except HubError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while b"Authorization: Bearer secret" not in silent.heard:
        pass
    reader.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(found) == 1
    with pytest.raises(HubError):
        list(reader.stream(""))


def test_questions_and_a_stream_at_once(served: ServedFolder) -> None:
    reader = HubReader(RunAddress(url=served.url, token=served.token, run=""))
    assert reader.find_run() in {path.name for path in served.folder.iterdir()}
    reader.run = "demo"
    stream = reader.stream("")
    assert b"event: reset" in next(stream) + next(stream)
    assert reader.get("", {}, Run).step == 99
    piece = reader.file("logs/rank-0.log", tail=16)
    assert (piece.data, piece.size) == (b"line 99\n", 790)
    with pytest.raises(HubMissing):
        reader.file("run.py", tail=1)
    stream.close()
    reader.forget()


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsFiles]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    files = make_certificate(["127.0.0.1"])
    yield files
    files.remove()


def test_a_certificate_that_nobody_signed_is_known_by_its_fingerprint(certificate: TlsFiles) -> None:
    hub = Stranger(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\nConnection: close\r\n\r\n{"total":7}', certificate)
    try:
        known = reader_of(hub.port, scheme="https", fingerprint=certificate.fingerprint.hex())
        assert known.get("runs", {}, Runs, of_run=False).total == 7
        known.forget()
        requests = len(hub.heard)
        other = reader_of(hub.port, scheme="https", fingerprint=hashlib.sha256(b"x").hexdigest())
        with pytest.raises(HubRefused, match="does not match --fingerprint"):
            other.get("runs", {}, Runs, of_run=False)
        unknown = reader_of(hub.port, scheme="https")
        with pytest.raises(HubRefused, match=r"is not trusted .*--fingerprint"):
            unknown.get("runs", {}, Runs, of_run=False)
        assert len(hub.heard) == requests  # the token was sent to nobody
    finally:
        hub.close()


def test_ranks_that_went_are_asked_for_at_once() -> None:
    place = RunAddress(url="http://127.0.0.1:1", run="r", token="t")
    reader, feed = HubReader(place), Feed(lambda: place)
    for live, due in ((2, False), (2, False), (1, True)):
        status = {"status": "running", "ranks": 2, "live_ranks": live}
        feed._take(reader, Message(event="status", data=json.dumps(status).encode()))
        assert feed._poke.is_set() is due
    assert feed.now.status == Status(status="running", ranks=2, live_ranks=1)
