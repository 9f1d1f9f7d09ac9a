"""An agent's HTTP client for the hub, over TCP or TLS: one connection kept open, and a deadline for every call.

A hub's certificate is self-signed. It is trusted because the hub proves, over that very certificate, that it has the
user's key (``wire/handshake.py``); from then on only a connection with the same certificate gets the token. Without TLS
the proof is the same with an empty certificate, and anyone on the network path can read the traffic.

Every failure is a HubError that says what happened without revealing a secret. Only host name resolution is not subject
to the deadlines.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import re
import socket
import time
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlsplit

from stepscope.errors import FrameError, HubError, HubRefused, KeyRefused, UsageError
from stepscope.records.text import printable
from stepscope.wire.frames import HELLO_BYTES
from stepscope.wire.handshake import (
    HELLO_PATH,
    PROOF_HEADER,
    Join,
    Welcome,
    read_challenge,
    read_welcome,
    write_hello,
    write_join,
)

__all__ = ["Answer", "HubClient", "connected", "encrypted", "plain", "split_url"]

WELCOME_BYTES = 64 << 20
ANSWER_BYTES = 8 << 20
_TOKEN = re.compile(r"[!-~]{1,1024}")
_WHY_CHARS = 200
UNPROVED = (
    "it did not prove that it has this node's key, so nothing was sent; check that it is a hub of the same version"
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a frame, with the times when we sent the frame and had received the whole answer."""

    status: int
    document: dict[str, Any]
    sent_mono_ns: int
    heard_mono_ns: int

    @property
    def why(self) -> str:
        """The hub's error text. It is untrusted, so it is shortened and cleaned."""
        return plain(self.document.get("why"))


class HubClient:
    """A connection to one hub. Not thread-safe. Call ``close`` when done."""

    def __init__(self, url: str, key: bytes) -> None:
        """Raise UsageError if the URL is not a valid hub address."""
        self._tls, self._host, self._port, self._prefix = split_url(url)
        self._key = key
        self._connection: http.client.HTTPConnection | None = None
        self._stream: _Stream | None = None
        self._certificate = b""
        self._pinned: bytes | None = None
        self._token = ""

    def join(self, join: Join, *, patience_s: float) -> Welcome:
        """Let the hub prove itself, then say who we are. Raise HubError if it is unreachable, refuses or differs."""
        deadline_s = time.monotonic() + patience_s
        try:
            self.close()
            self._open(deadline_s)
            challenge = self._hello(join.nonce, deadline_s)
            if not self._is_open():
                self._pinned = self._certificate
                self._open(deadline_s)
                self._check_certificate()
            join = replace(join, challenge=challenge)
            body, proof = write_join(join, self._key, self._certificate)
            headers = {
                PROOF_HEADER: proof,
                "Authorization": f"Bearer {challenge}",
                "Content-Type": "application/json",
            }
            path = _run_path(join.run, "join")
            status, proof, text, _ = self._ask(path, body, headers, deadline_s, WELCOME_BYTES)
            if status != 200:
                why = plain(_object(text).get("why")) or f"HTTP status {status}"
                raise HubRefused(f"{self._where} rejected this node: {why}")
            welcome = read_welcome(text, proof, join.nonce, self._key, self._certificate)
            if not _TOKEN.fullmatch(welcome.token):
                raise HubError(f"{self._where} sent no valid token")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._trouble(error) from None
        except FrameError as error:
            self.close()
            raise HubError(f"{self._where}: {error}") from None
        except HubError:
            self.close()
            raise
        self._pinned, self._token = self._certificate, welcome.token
        return welcome

    def _hello(self, nonce: str, deadline_s: float) -> str:
        """Return the challenge of a hub that has proved that it has the key. Sends nothing about the run."""
        body, proof = write_hello(nonce, self._key, self._certificate)
        headers = {PROOF_HEADER: proof, "Content-Type": "application/json"}
        status, proof, text, _ = self._ask(HELLO_PATH, body, headers, deadline_s, HELLO_BYTES)
        if status != 200:
            reason = plain(_object(text).get("why"))
            raise (KeyRefused if status == 403 else HubRefused)(
                f"{self._where} rejected this node: {reason or f'{UNPROVED} (HTTP status {status})'}"
            )
        return read_challenge(text, proof, nonce, self._key, self._certificate)

    def send(self, run: str, frame: bytes, *, patience_s: float) -> Answer:
        """Send one frame after a ``join``. Raise HubError if the hub is unreachable; it may have received the frame.

        If the hub closed the idle connection, reopen it once and send the same bytes again.
        """
        deadline_s = time.monotonic() + patience_s
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/octet-stream"}
        try:
            reused = self._is_open()
            while True:
                try:
                    if not self._is_open():
                        self._open(deadline_s)
                        self._check_certificate()
                    path = _run_path(run, "frames")
                    status, _, text, sent_ns = self._ask(path, frame, headers, deadline_s, ANSWER_BYTES)
                    break
                except TimeoutError:
                    raise
                except OSError:
                    self.close()
                    if not reused:
                        raise
                    reused = False
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._trouble(error) from None
        return Answer(status=status, document=_object(text), sent_mono_ns=sent_ns, heard_mono_ns=time.monotonic_ns())

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._stream is not None:
            self._stream.shut()
            self._stream = None

    @property
    def _where(self) -> str:
        return f"the hub at {self._host}:{self._port}"

    def _is_open(self) -> bool:
        # http.client drops the connection after an answer that ends it.
        return self._connection is not None and self._connection.sock is not None

    def _open(self, deadline_s: float) -> None:
        self.close()
        sock = connected(self._host, self._port, deadline_s)
        self._certificate = b""
        if self._tls:
            sock = encrypted(sock, self._host, deadline_s)
            self._certificate = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()
        self._stream = _Stream(sock)
        self._connection = http.client.HTTPConnection(self._host, self._port)
        self._connection.sock = self._stream  # http.client uses only these methods of a socket

    def _check_certificate(self) -> None:
        if self._certificate != self._pinned:
            self.close()
            raise HubError(f"{self._where} has a different certificate than before")

    def _ask(
        self,
        path: str,
        body: bytes,
        headers: dict[str, str],
        deadline_s: float,
        most: int,
    ) -> tuple[int, str, bytes, int]:
        """Return status, proof and body of the answer, and when the request was sent."""
        connection, stream = self._connection, self._stream
        if connection is None or stream is None:
            raise ConnectionError("not connected")
        stream.deadline_s = deadline_s
        sent_ns = time.monotonic_ns()
        connection.request("POST", f"{self._prefix}{path}", body, headers)
        with connection.getresponse() as response:
            text = response.read(most + 1)
            if len(text) > most:
                raise http.client.HTTPException("the answer is too long")
            return response.status, response.headers.get(PROOF_HEADER, ""), text, sent_ns

    def _trouble(self, error: Exception) -> HubError:
        if isinstance(error, TimeoutError):
            return HubError(f"{self._where} does not answer")
        if isinstance(error, OSError):
            return HubError(f"{self._where} cannot be reached: {error.strerror or type(error).__name__}")
        return HubError(f"{self._where} did not answer with valid HTTP")


class _Stream:
    """The part of a socket that ``http.client`` uses. All operations together must end by ``deadline_s``."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.deadline_s = 0.0

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._sock.settimeout(_left(self.deadline_s))
            view = view[self._sock.send(view) :]

    def receive_into(self, buffer: Any) -> int:
        self._sock.settimeout(_left(self.deadline_s))
        return self._sock.recv_into(buffer)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reading(self))

    def close(self) -> None:
        """Do nothing: ``http.client`` closes its socket before it has read the last answer on it."""

    def shut(self) -> None:
        self._sock.close()


class _Reading(io.RawIOBase):
    def __init__(self, stream: _Stream) -> None:
        self._from = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._from.receive_into(buffer)


def _run_path(run: str, what: str) -> str:
    return f"/api/v1/runs/{quote(run, safe='')}/{what}"


def split_url(url: str) -> tuple[bool, str, int, str]:
    """Return whether it is TLS, host, port, and the path prefix. Raise UsageError if the address is invalid."""
    wrong = UsageError(f"{url!r} is not the URL of a hub; use the form https://HOST:29555")
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise wrong from None
    odd = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or odd:
        raise wrong
    return parts.scheme == "https", parts.hostname, port, quote(parts.path.rstrip("/"), safe="/")


def connected(host: str, port: int, deadline_s: float) -> socket.socket:
    """Connect to the first address that works; raise the OSError of the last one otherwise."""
    trouble: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(deadline_s))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            trouble = error
        else:
            return sock
    raise trouble


def encrypted(sock: socket.socket, host: str, deadline_s: float, *, trusted: bool = False) -> Any:
    """Start TLS; raise OSError if that fails.

    ``trusted``: an authority that this machine trusts must have signed the certificate. Otherwise any certificate is
    accepted, and the caller checks it.
    """
    import ssl  # a few megabytes, so load it only where it is used

    context = ssl.create_default_context() if trusted else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not trusted:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        sock.settimeout(_left(deadline_s))
        return context.wrap_socket(sock, server_hostname=host)
    except (OSError, ValueError) as error:
        sock.close()
        if isinstance(error, OSError):
            raise
        raise ConnectionError(f"cannot establish TLS with {host}") from error


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; return an empty one if the text is not one."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def plain(text: object) -> str:
    """Shorten untrusted text and remove terminal control characters."""
    return printable(text[:_WHY_CHARS]) if isinstance(text, str) else ""
