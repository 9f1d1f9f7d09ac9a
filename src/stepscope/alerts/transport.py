"""Carries out the requests of receivers: HTTP, commands, apprise.

HTTP is the standard library's, loaded with the first request.  Certificates are verified, a redirect is followed only
to the same host, an answer is read up to ``MOST_ANSWER_BYTES``, and a whole request, whatever the receiver does, takes
at most the receiver's timeout.  Proxies are taken from the environment (``HTTPS_PROXY``, ``NO_PROXY``).

No text of an error contains an address: it may be a secret.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from stepscope.alerts.receivers.exchange import (
    Answer,
    AppriseRequest,
    CommandRequest,
    Destination,
    HttpRequest,
    Request,
)
from stepscope.records.paths import ENV_ALERT, ENV_ALERT_SETTINGS

if TYPE_CHECKING:
    import http.client
    import ssl

__all__ = ["MOST_ANSWER_BYTES", "NeverSent", "NotSent", "Transport", "retry_after_seconds"]

MOST_ANSWER_BYTES = 64 << 10
MOST_REDIRECTS = 3
LONGEST_RETRY_AFTER_S = 3600.0
_REDIRECTS = (307, 308)
"""Those that keep the method and the body."""
_NO_COMMAND = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.E2BIG)
"""Errors of a start that the next try would meet, too."""
_HIDDEN_VARIABLES = (ENV_ALERT, ENV_ALERT_SETTINGS)
"""Not part of a command's environment: they may contain secrets of other receivers."""


class NotSent(Exception):
    """The request failed and may be tried again; it may have arrived nevertheless."""


class NeverSent(Exception):
    """The request cannot be carried out, now or later."""


class Transport:
    """Used by several threads at once; keeps no connection."""

    def __init__(self, environ: Mapping[str, str] = os.environ, *, wall_s: Callable[[], float] = time.time) -> None:
        self._environ = environ
        self._wall_s = wall_s
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._lock = threading.Lock()

    def carry_out(self, request: Request, destination: Destination) -> Answer:
        """Return the receiver's answer; raises NotSent or NeverSent."""
        if isinstance(request, HttpRequest):
            return self._http(request, destination)
        if isinstance(request, CommandRequest):
            return self._command(request, destination)
        return self._apprise(request)

    def connect(self, url: str, destination: Destination) -> None:
        """Connect to the host of an address, with TLS if it has that, and send nothing; raises NotSent or NeverSent."""
        import http.client

        connection = self._connection(_checked(url), destination, time.monotonic() + destination.timeout_s)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotSent(_why(error)) from None
        finally:
            connection.close()

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def _http(self, request: HttpRequest, destination: Destination) -> Answer:
        deadline_s = time.monotonic() + destination.timeout_s
        url = request.url
        for _ in range(MOST_REDIRECTS + 1):
            answer, location = self._exchange(url, request, destination, deadline_s)
            if answer.status not in _REDIRECTS or not location:
                return answer
            further = urljoin(url, location)
            if _origin(_checked(further)) != _origin(_checked(url)):
                raise NeverSent(f"HTTP {answer.status}: redirects to another host, which is not followed")
            url = further
        raise NeverSent("redirects too often")

    def _exchange(
        self, url: str, request: HttpRequest, destination: Destination, deadline_s: float
    ) -> tuple[Answer, str]:
        """One request to one address: the answer, and where it redirects to."""
        import http.client

        parts = _checked(url)
        connection = self._connection(parts, destination, deadline_s)
        expired = threading.Event()

        def expire() -> None:
            """A timeout of the socket is for each read; this one is for the whole request."""
            expired.set()
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(max(deadline_s - time.monotonic(), 0.0), expire)
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            if isinstance(self._proxy(parts), SplitResult) and parts.scheme == "http":
                path = f"http://{parts.netloc.rpartition('@')[2]}{path}"
            headers = {"User-Agent": "stepscope", "Accept": "*/*", "Connection": "close", **request.headers}
            if parts.username is not None:
                headers.setdefault("Authorization", _basic(parts))
            connection.request(request.method, path, body=request.body or None, headers=headers)
            response = connection.getresponse()
            try:
                body = response.read(MOST_ANSWER_BYTES)
            except (OSError, http.client.HTTPException):
                body = b""  # the status says what became of it; a bot's answer without a body is tried again
            after_s = retry_after_seconds(response.getheader("Retry-After"), self._wall_s())
            return Answer(status=response.status, body=body, retry_after_s=after_s), response.getheader(
                "Location"
            ) or ""
        except (OSError, http.client.HTTPException, ValueError) as error:
            if expired.is_set() or isinstance(error, TimeoutError):  # whichever of two clocks is first
                raise NotSent(f"no answer within {destination.timeout_s:g} s") from None
            raise NotSent(_why(error)) from None
        finally:
            timer.cancel()
            connection.close()

    def _connection(
        self, parts: SplitResult, destination: Destination, deadline_s: float
    ) -> http.client.HTTPConnection:
        import http.client

        timeout_s = max(deadline_s - time.monotonic(), 0.1)
        host, port = parts.hostname or "", parts.port
        proxy = self._proxy(parts)
        if parts.scheme == "http":
            where = (proxy.hostname, proxy.port) if proxy is not None else (host, port)
            return http.client.HTTPConnection(where[0] or "", where[1], timeout=timeout_s)
        context = self._context(destination.option("ca_file"))
        if proxy is None:
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
        tunneled = http.client.HTTPSConnection(proxy.hostname or "", proxy.port, timeout=timeout_s, context=context)
        tunneled.set_tunnel(host, port or 443, {"Proxy-Authorization": _basic(proxy)} if proxy.username else {})
        return tunneled

    def _proxy(self, parts: SplitResult) -> SplitResult | None:
        """The proxy for an address, from the environment."""
        named = self._environ.get(f"{parts.scheme}_proxy") or self._environ.get(f"{parts.scheme.upper()}_PROXY")
        if not named or _without_proxy(parts.hostname or "", self._environ):
            return None
        proxy = urlsplit(named if "://" in named else f"http://{named}")
        return proxy if proxy.hostname else None

    def _context(self, ca_file: str) -> ssl.SSLContext:
        import ssl

        with self._lock:
            if ca_file not in self._contexts:
                try:
                    self._contexts[ca_file] = ssl.create_default_context(cafile=ca_file or None)
                except (OSError, ssl.SSLError) as error:
                    raise NeverSent(f"ca_file cannot be used: {getattr(error, 'strerror', '') or error}") from None
            return self._contexts[ca_file]

    # -- commands -----------------------------------------------------------------------------------------------------

    def _command(self, request: CommandRequest, destination: Destination) -> Answer:
        """Run a program without a shell; its exit code decides.  It and its children are ended at the timeout."""
        import subprocess

        environment = {name: value for name, value in self._environ.items() if name not in _HIDDEN_VARIABLES}
        try:
            process = subprocess.Popen(
                request.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "not a valid command"
            text = f"{os.path.basename(request.argv[0])} cannot be started: {why}"  # noqa: PTH119
            if isinstance(error, OSError) and error.errno not in _NO_COMMAND:
                raise NotSent(text) from None  # memory, processes or descriptors are scarce
            raise NeverSent(text) from None
        try:
            process.communicate(request.stdin, timeout=destination.timeout_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise NotSent(f"the command did not end within {destination.timeout_s:g} s") from None
        code = process.returncode
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            raise NotSent(f"the command failed ({how})")
        return Answer()

    # -- apprise ------------------------------------------------------------------------------------------------------

    def _apprise(self, request: AppriseRequest) -> Answer:
        import logging

        try:
            import apprise
        except ImportError:
            raise NeverSent("apprise is not installed; pip install 'stepscope[apprise]'") from None
        logging.getLogger("apprise").disabled = True  # its messages contain addresses
        types: dict[str, Any] = {
            "critical": apprise.NotifyType.FAILURE,
            "warning": apprise.NotifyType.WARNING,
            "info": apprise.NotifyType.INFO,
            "resolved": apprise.NotifyType.SUCCESS,
        }
        service = apprise.Apprise()
        if not service.add(request.url):
            raise NeverSent("apprise does not know this kind of address")
        notify_type = types[request.severity]
        if not service.notify(
            title=request.title, body=request.body, notify_type=notify_type, body_format=apprise.NotifyFormat.TEXT
        ):
            raise NotSent("apprise could not deliver it")
        return Answer()


def retry_after_seconds(text: str | None, now_s: float) -> float | None:
    """``Retry-After`` as seconds or as a date; at most ``LONGEST_RETRY_AFTER_S``; None if it is neither."""
    if not text:
        return None
    if re.fullmatch(r"\d{1,9}", text.strip()):
        seconds = float(text)
    else:
        from email.utils import parsedate_to_datetime

        try:
            seconds = parsedate_to_datetime(text).timestamp() - now_s
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or not url.isprintable() or " " in url:
        raise NeverSent("its address is not a valid http or https URL")
    return parts


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


def _basic(parts: SplitResult) -> str:
    import base64

    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _without_proxy(host: str, environ: Mapping[str, str]) -> bool:
    names = [
        name.strip().lstrip(".").lower()
        for name in (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")
    ]
    return host in ("localhost", "127.0.0.1", "::1") or any(
        name in ("*", host) or host.endswith(f".{name}") for name in names if name
    )


def _why(error: Exception) -> str:
    """What went wrong, without the address."""
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or 'unknown reason'})"
    if isinstance(error, socket.gaierror):
        return "its host name cannot be resolved"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    if isinstance(error, UnicodeError):
        return "its address is not a valid host name"
    return "the connection was closed before the answer was complete, or the answer is not HTTP"
