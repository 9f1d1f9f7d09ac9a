"""Requests over real sockets and commands: what receivers do wrong, redirects, certificates, proxies, limits."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback_receiver import LoopbackReceiver, Reply, closed_port, loopback_receiver

from stepscope.alerts.receivers.exchange import Answer, CommandRequest, Destination, HttpRequest
from stepscope.alerts.transport import MOST_ANSWER_BYTES, NeverSent, NotSent, Transport, retry_after_seconds
from stepscope.hub.transport import make_certificate
from stepscope.records.paths import ENV_ALERT_SETTINGS

WAIT = 60.0


def post(url: str, *, timeout_s: float = WAIT, environ: dict[str, str] | None = None, **options: str) -> Answer:
    destination = Destination(name="hook", type="webhook", options=options, timeout_s=timeout_s)
    request = HttpRequest(url=url, body=b'{"a":1}', headers={"Content-Type": "application/json"})
    return Transport(environ or {}).carry_out(request, destination)


def why_not(url: str, *, timeout_s: float = WAIT, **options: str) -> str:
    """Why it cannot be sent now; the text has no part of the address."""
    with pytest.raises(NotSent) as raised:
        post(url, timeout_s=timeout_s, **options)
    assert "127.0.0.1" not in str(raised.value)
    assert "hook" not in str(raised.value)
    return str(raised.value)


def test_a_request_and_its_answer(receiver: LoopbackReceiver) -> None:
    receiver.replies = [Reply(status=429, body=b"slow down", headers={"Retry-After": "7"})]
    assert post(f"{receiver.url}/hook?key=1") == Answer(status=429, body=b"slow down", retry_after_s=7.0)
    (request,) = receiver.requests
    assert (request.method, request.path, request.json) == ("POST", "/hook?key=1", {"a": 1})
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["User-Agent"] == "stepscope"


def test_user_and_password_of_an_address_are_a_header(receiver: LoopbackReceiver) -> None:
    post(receiver.url.replace("://", "://me:p%40ss@"))
    assert receiver.requests[0].headers["Authorization"] == "Basic bWU6cEBzcw=="


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 20", b"\x16\x03garbage\r\n\r\n", b"HTTP/1.1 " + b"9" * 100_000])
def test_what_is_not_an_answer_is_tried_again(receiver: LoopbackReceiver, raw: bytes) -> None:
    receiver.replies = [Reply(raw=raw)]
    assert why_not(f"{receiver.url}/hook") in (
        "the connection was closed before the answer was complete, or the answer is not HTTP",
        "connection reset by peer",
    )


def test_an_answer_that_breaks_off_after_its_status_counts(receiver: LoopbackReceiver) -> None:
    receiver.replies = [Reply(raw=b"HTTP/1.1 204 No Content\r\nContent-Length: 10\r\n\r\nok")]
    assert post(receiver.url).status == 204


def test_only_the_beginning_of_an_answer_is_read(receiver: LoopbackReceiver) -> None:
    receiver.replies = [Reply(body=b"x" * (4 * MOST_ANSWER_BYTES))]
    assert post(receiver.url).body == b"x" * MOST_ANSWER_BYTES


def test_no_answer_and_nobody_there(receiver: LoopbackReceiver) -> None:
    receiver.otherwise = lambda _: Reply(never=True)
    assert why_not(f"{receiver.url}/hook", timeout_s=0.2) == "no answer within 0.2 s"
    assert why_not(f"http://127.0.0.1:{closed_port()}/hook") == "connection refused"


def test_an_answer_that_comes_a_byte_at_a_time_has_a_limit_too() -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            peer, _ = listening.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 ")
                while not ended.wait(0.02):
                    try:
                        peer.sendall(b"x")
                    except OSError:
                        return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            port = listening.getsockname()[1]
            assert why_not(f"http://127.0.0.1:{port}/hook", timeout_s=0.5) == "no answer within 0.5 s"
        finally:
            ended.set()
            dripping.join()


@pytest.mark.parametrize(
    "url",
    ["ftp://host/x", "file:///etc/passwd", "http://", "host/x", "http://host:99999/", "http://ho st/", "http://h\n/"],
)
def test_only_web_addresses(url: str) -> None:
    with pytest.raises(NeverSent, match="its address is not a valid http or https URL"):
        post(url)


def test_a_redirect_is_followed_only_to_the_same_host(receiver: LoopbackReceiver) -> None:
    receiver.replies = [Reply(status=307, headers={"Location": "/new"})]
    assert post(f"{receiver.url}/old").status == 200
    assert [request.path for request in receiver.requests] == ["/old", "/new"]
    assert receiver.requests[1].json == {"a": 1}
    receiver.replies = [Reply(status=302, headers={"Location": "/login"})]
    assert post(receiver.url).status == 302
    with loopback_receiver() as other:
        receiver.replies = [Reply(status=308, headers={"Location": f"{other.url}/steal"})]
        with pytest.raises(NeverSent, match="HTTP 308: redirects to another host, which is not followed"):
            post(receiver.url)
        assert other.requests == []
    receiver.otherwise = lambda _: Reply(status=307, headers={"Location": "/again"})
    with pytest.raises(NeverSent, match="redirects too often"):
        post(receiver.url)


def test_certificates_are_verified() -> None:
    files = make_certificate(["localhost", "127.0.0.1"])
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        with loopback_receiver(tls=context) as secure:
            assert post(f"{secure.url}/hook", ca_file=str(files.certificate)).status == 200
            assert why_not(f"{secure.url}/hook").startswith("its certificate is not valid (self")
            assert len(secure.requests) == 1
    finally:
        files.remove()
    with pytest.raises(NeverSent, match="ca_file cannot be used: No such file or directory"):
        post("https://127.0.0.1:1/", ca_file="/no/such/file")


def test_a_proxy_of_the_environment(receiver: LoopbackReceiver) -> None:
    assert post("http://hooks.example/x?y=1", environ={"http_proxy": receiver.url}).status == 200
    assert receiver.requests[0].path == "http://hooks.example/x?y=1"
    assert receiver.requests[0].headers["Host"] == "hooks.example"
    environ = {"http_proxy": f"http://127.0.0.1:{closed_port()}", "no_proxy": "localhost,127.0.0.1"}
    assert post(receiver.url, environ=environ).status == 200


def test_retry_after() -> None:
    assert retry_after_seconds("120", 0.0) == 120.0
    assert retry_after_seconds("Fri, 15 Jan 2027 08:00:30 GMT", 1_800_000_000.0) == 30.0
    assert retry_after_seconds("Fri, 15 Jan 2027 07:00:00 GMT", 1_800_000_000.0) == 0.0
    assert retry_after_seconds("999999999", 0.0) == 3600.0
    assert [retry_after_seconds(text, 0.0) for text in (None, "", "soon", "-5", "1" * 5000)] == [None] * 5


# -- commands ---------------------------------------------------------------------------------------------------------


def run(argv: list[str], *, timeout_s: float = WAIT, environ: dict[str, str] | None = None) -> Answer:
    destination = Destination(name="hook", type="command", timeout_s=timeout_s)
    request = CommandRequest(argv=tuple(argv), stdin=b'{"status":"firing"}\n')
    return Transport({"PATH": os.environ["PATH"], **(environ or {})}).carry_out(request, destination)


def test_a_command_gets_the_message_and_no_secrets(tmp_path: Path) -> None:
    secret = {ENV_ALERT_SETTINGS: "s3cret", "STEPSCOPE_ALERT": "https://s3cret", "KEPT": "1"}
    assert run(["sh", "-c", f"cat > {tmp_path}/in; env > {tmp_path}/env; echo noise"], environ=secret) == Answer()
    assert json.loads((tmp_path / "in").read_text()) == {"status": "firing"}
    environment = (tmp_path / "env").read_text()
    assert "KEPT=1" in environment
    assert "s3cret" not in environment
    assert run(["true"]) == Answer()  # does not read its input


def test_commands_that_fail(tmp_path: Path) -> None:
    with pytest.raises(NotSent, match=r"^the command failed \(exit code 3\)$"):
        run(["sh", "-c", "exit 3"])
    with pytest.raises(NotSent, match=r"^the command failed \(signal 9\)$"):
        run(["sh", "-c", "kill -9 $$"])
    with pytest.raises(NeverSent, match=r"^such cannot be started: No such file or directory$"):
        run(["/no/such"])
    with pytest.raises(NotSent, match=r"^the command did not end within 0.2 s$"):
        run(["sh", "-c", "sleep 1000 & sleep 1000"], timeout_s=0.2)


def test_a_command_that_cannot_be_started_for_now_is_tried_again() -> None:
    """No file descriptor is left for its input."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(NotSent, match=r"^true cannot be started: Too many open files$"):
            run(["true"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert run(["true"]) == Answer()


# -- apprise ----------------------------------------------------------------------------------------------------------


APPRISE = """
import sys
from stepscope.alerts.receivers.exchange import AppriseRequest, Destination
from stepscope.alerts.transport import NeverSent, NotSent, Transport

for url in sys.argv[1:]:
    request = AppriseRequest(url=url, title="[Firing] run-1: slow", body="Rank 2", severity="critical")
    try:
        print(Transport({}).carry_out(request, Destination(name="hook", type="apprise")).status)
    except (NeverSent, NotSent) as error:
        print(type(error).__name__, error)
"""


def test_apprise_delivers_and_prints_nothing(receiver: LoopbackReceiver, run_python: Callable[..., Any]) -> None:
    """In a process of its own: apprise leaves a thread behind, and its log contains addresses."""
    if importlib.util.find_spec("apprise") is None:
        pytest.skip("apprise is not installed")
    receiver.replies = [Reply(), Reply(status=500)]
    url = f"json://{receiver.url.removeprefix('http://')}/hook"
    printed = run_python("-W", "ignore", "-c", APPRISE, url, url, "no-such-service://secret")
    about = {key: receiver.requests[0].json[key] for key in ("title", "message", "type")}
    assert about == {"title": "[Firing] run-1: slow", "message": "Rank 2", "type": "failure"}
    assert printed.stdout.splitlines() == [
        "200",
        "NotSent apprise could not deliver it",
        "NeverSent apprise does not know this kind of address",
    ]
    assert printed.stderr == ""
