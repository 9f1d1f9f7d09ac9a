"""The server by itself: TLS with certificates of both kinds, deadlines of handshakes, and how it stops."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from stepscope.errors import UsageError
from stepscope.hub.limits import Entrance, Refusals, ServerLimits, plain_address
from stepscope.hub.server import Server, _Faults
from stepscope.hub.transport import TlsFiles, make_certificate, user_certificate
from tests.hub.gate_parts import Agent, HubProcess, everything


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_certificate(["node0.example.org", "10.1.2.3"], folder=tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, made: TlsFiles) -> Iterator[HubProcess]:
    limits = {"handshake_s": 1.0, "head_s": 1.0, "connections": 64}
    hub = HubProcess(tmp_path_factory.mktemp("tls-hub") / "run", limits=limits, tls=made)
    yield hub
    # Nodes of earlier tests are silent for longer than 15 seconds if the tests run on a busy machine.
    printed = hub.stop().splitlines()
    assert [line for line in printed if not line.endswith("has sent nothing for 15 s")] == []


def test_agents_over_tls(hub: HubProcess) -> None:
    with Agent(hub, 1) as agent, Agent(hub, 2) as other:
        assert [agent.send()[0], other.send()[0], agent.send()[0]] == [200, 200, 200]
        agent.token = "another"
        assert agent.send(bytes(8 << 20))[0] == 401, "also to one who still sends"


def test_what_is_no_handshake(hub: HubProcess) -> None:
    before = hub.refused("tls")
    for sent in (b"GET / HTTP/1.1\r\n\r\n", bytes(500), os.urandom(500)):
        with hub.connect(plain=True) as sock:
            sock.sendall(sent)
            assert b"HTTP" not in everything(sock)
    with hub.many(20, plain=True) as silent, Agent(hub, 3) as agent:
        assert agent.send()[0] == 200
        assert [everything(sock) for sock in silent] == [b""] * 20
        assert agent.send()[0] == 200
    assert hub.refused("tls") == before + 23


def test_old_tls_is_refused(hub: HubProcess) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with context.wrap_socket(hub.connect(plain=True)) as sock:
        assert sock.version() == "TLSv1.2"
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with hub.connect(plain=True) as plain, pytest.raises(OSError, match=r"(?i)ssl|reset"):
        context.wrap_socket(plain)


def test_a_flood_of_handshakes_does_not_keep_agents_out(hub: HubProcess) -> None:
    with hub.many(100, plain=True), Agent(hub, 4) as agent:
        assert agent.send()[0] == 200


def test_a_certificate_for_the_run(made: TlsFiles) -> None:
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.key.parent.stat().st_mode) == 0o700
    assert user_certificate(made.certificate, made.key) == made
    found = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    assert hashlib.sha256(found.public_bytes(serialization.Encoding.DER)).digest() == made.fingerprint
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "node0.example.org"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "10.1.2.3"]


def test_only_what_was_made_for_a_run_is_removed(tmp_path: Path, made: TlsFiles) -> None:
    own = make_certificate(folder=tmp_path)
    own.remove()
    assert list(tmp_path.iterdir()) == []
    copy = TlsFiles(certificate=tmp_path / "a.crt", key=tmp_path / "a.key", fingerprint=b"")
    copy.certificate.write_bytes(made.certificate.read_bytes())
    copy.remove()
    assert copy.certificate.exists()


def test_certificates_that_cannot_be_used(tmp_path: Path, made: TlsFiles) -> None:
    other = make_certificate(folder=tmp_path)
    text, locked, open_to_all = tmp_path / "text", tmp_path / "locked", tmp_path / "open"
    text.write_text("hello")
    text.chmod(0o600)
    key = serialization.load_pem_private_key(made.key.read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    locked.chmod(0o600)
    open_to_all.write_bytes(made.key.read_bytes())
    open_to_all.chmod(0o644)
    tried = [
        (tmp_path / "missing", made.key, "No such file"),
        (made.certificate, tmp_path / "missing", "No such file"),
        (text, made.key, "not a PEM certificate"),
        (made.certificate, text, "not a PEM private key"),
        (made.certificate, other.key, "the key does not match the certificate"),
        (made.certificate, locked, "encrypted with a password"),
        (made.certificate, open_to_all, "other users can read it"),
    ]
    for certificate, secret, words in tried:
        with pytest.raises(UsageError, match=words):
            user_certificate(certificate, secret)


# ── stopping ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_under_way_is_finished_and_idle_ones_are_closed(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "run", limits={})
    hub.counters()
    with hub.connect() as busy, hub.connect() as idle:
        busy.sendall(b"GET /slow HTTP/1.1\r\nhost: h\r\n\r\n")
        while hub.counters()["connections"] < 3:
            time.sleep(0.01)
        time.sleep(0.05)
        stopping = threading.Thread(target=hub.stop)
        stopping.start()
        assert everything(busy).startswith(b"HTTP/1.1 200 OK\r\n")
        assert everything(idle) == b""
        stopping.join()
    assert hub.process.returncode == 0


def test_as_many_connections_as_there_can_be_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as sock:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            server = Server(None, sock, limits=ServerLimits(connections=1000))  # type: ignore[arg-type]
            assert server.limits.connections == 1000
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1128
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_there_is_room_for_all_agents() -> None:
    assert [ServerLimits.for_nodes(nnodes).connections for nnodes in (1, 768, 12_500)] == [2048, 2048, 25_512]


def test_addresses() -> None:
    assert [plain_address(host) for host in ("::ffff:10.0.0.1", "10.0.0.1", "fe80::1%eth0")] == [
        "10.0.0.1",
        "10.0.0.1",
        "fe80::1%eth0",
    ]


class Guest:
    def __init__(self, address: str) -> None:
        self.address = address
        self.gone = False

    def send_away(self) -> None:
        self.gone = True

    def sweep(self, now_s: float) -> None:
        raise AssertionError(now_s)


def test_the_longest_waiting_goes_first_and_the_busy_never() -> None:
    refusals = Refusals()
    entrance = Entrance(ServerLimits(connections=4, per_address=3), refusals)
    here = [Guest("10.0.0.1") for _ in range(3)]
    for guest in here:
        assert entrance.turned_away(guest.address, 0.0) is None
        entrance.enter(guest)
    entrance.known(here[0])
    entrance.enter(late := Guest("10.0.0.1"))
    assert entrance.turned_away("10.0.0.1", 0.0) is None
    assert [guest.gone for guest in (*here, late)] == [False, True, False, False], "a stranger, and the oldest"
    for guest in (here[2], late):
        entrance.known(guest)
    entrance.enter(last := Guest("10.0.0.2"))
    entrance.known(last)
    assert entrance.turned_away("10.0.0.3", 0.0) == "connections", "all are known, and ask for something"
    entrance.waits(late)
    assert entrance.turned_away("10.0.0.3", 0.0) is None
    assert late.gone, "it asked for nothing"
    for guest in (*here, late, last, last):
        entrance.leave(guest)
    assert (entrance.open, entrance.turned_away("10.0.0.1", 0.0)) == (0, None)
    assert refusals.by_reason()["connections"] == 2


# ── strangers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_slow_bodies_of_strangers_lock_nobody_out(tmp_path: Path) -> None:
    """As many as there may be, each with a request that never ends: agents come in, and those inside stay."""
    hub = HubProcess(tmp_path / "run", limits={"connections": 64, "body_s": 60.0, "head_s": 60.0})
    slow = b"POST /api/v1/runs/night/frames HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\nx"
    asking = b"POST /api/v1/hello HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\nx"
    with Agent(hub, 1) as inside, hub.many(70, first=slow), hub.many(70, first=asking), Agent(hub, 2) as late:
        assert [inside.send()[0], late.send()[0], inside.send()[0]] == [200, 200, 200]
        assert hub.counters()["connections"] <= 64
    hub.stop()


def test_of_ipv6_a_64_is_one_source() -> None:
    class One:
        def __init__(self, address: str) -> None:
            self.address = address
            self.gone = False

        def send_away(self) -> None:
            self.gone = True

        def sweep(self, now_s: float) -> None:
            pass

    entrance = Entrance(ServerLimits(per_address=2, connections=100), Refusals())
    found = [One(f"2001:db8:0:1::{n:x}") for n in range(12)]
    for caller in found:
        assert entrance.turned_away(caller.address, 1.0) is None
        entrance.enter(caller)
    assert [one.gone for one in found] == [True] * 4 + [False] * 8, "four times per_address; the oldest go"
    entrance.known(found[5])
    other = One("2001:db8:0:2::1")
    assert entrance.turned_away(other.address, 1.0) is None
    entrance.enter(other)
    assert entrance.open == 9
    tight = Entrance(ServerLimits(arrivals=1, arrivals_per_s=0.01), Refusals())
    assert [tight.turned_away(f"2001:db8::{n:x}", 1.0) for n in range(6)] == [None] * 4 + ["connection_rate"] * 2


def test_a_connection_that_is_gone_is_no_fault_of_the_hub(capfd: pytest.CaptureFixture[str]) -> None:
    refusals = Refusals()
    faults = _Faults(refusals)
    gone = RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
    loop = asyncio.new_event_loop()
    loop.close()
    for error in (gone, ConnectionResetError("reset by peer")):
        faults.in_loop(loop, {"exception": error})
    assert capfd.readouterr().err == ""
    faults.in_loop(loop, {"exception": RuntimeError("something else")})
    assert "internal error in the hub: RuntimeError: something else" in capfd.readouterr().err
