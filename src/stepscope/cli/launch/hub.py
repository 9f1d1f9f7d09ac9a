"""The hub, as a child of the first node's launcher: where it listens, when it starts, how it ends.

The launcher owns the listening socket. For a job on one node the socket listens on loopback, and the hub starts only
when this user or root connects; until then it costs nothing. The kernel reports the owner of a connection
(``hub/transport.py``); connections of other users are closed and start no process next to the training. For a job on
several nodes the hub runs from the start. A hub that dies is restarted on the same socket, so that clients that
connected in between only wait; its data is on disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.launch.helpers import PASSED_FD, Helper, JobEnd, Mask, forget_signals
from stepscope.errors import HubError, RunError, UsageError
from stepscope.hub.transport import peer_uid
from stepscope.records.text import say
from stepscope.store.documents import HubFile, end_run, remove_hub_file, write_hub_file

if TYPE_CHECKING:
    from stepscope.hub.transport import TlsFiles

__all__ = ["DEFAULT_PORT", "HubChild", "HubOptions", "certificate_of", "listen", "may_start", "open_hub", "url_of"]

DEFAULT_PORT = 29_555
HUB_STARTS = 5
FORGIVEN_S = 600.0
"""A hub that lived this long does not count as one that keeps dying."""
HUB_END_S = 75.0
"""Time that the hub gets to wait for the last data of other nodes and write it; the hub limits itself as well."""
ALONE_END_S = 16.0
"""The same without other nodes."""
HUB_GRACE_S = 5.0
_BACKLOG = 4096
_AT_ONCE = 256
"""Maximum number of refused connections per check."""
_ANYWHERE = ("", "0.0.0.0", "::")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HIGH_FD = 10
"""Above the descriptor's number in the hub, so that the two do not collide."""


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    off: bool = False
    host: str = ""
    """Empty: loopback for one node, every interface for several."""
    port: int | None = None
    """None: any free port for one node, ``DEFAULT_PORT`` for several."""
    tls: bool = True
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise UsageError("--tls-cert and --tls-key must be used together")
        if self.certificate is not None and not self.tls:
            raise UsageError("--no-tls and --tls-cert cannot be used together")
        for option, path in (("--tls-cert", self.certificate), ("--tls-key", self.key)):
            if path is not None and not path.is_file():
                raise UsageError(f"{option} {path}: no such file")


class HubChild:
    """A listening socket, and the hub process behind it if one runs."""

    def __init__(
        self, run_dir: Path, listening: socket.socket, *, name: str, nnodes: int, tls: TlsFiles | None, shown: str
    ) -> None:
        """``name`` is the requested name of the run; ``shown`` is the URL for users and other nodes."""
        self._run_dir = run_dir
        self._fd = fcntl.fcntl(listening, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
        self._several = nnodes > 1
        self._tls = tls
        self._mask: Mask = set()
        self._lost = False
        words = ["stepscope.hub", "--run-dir", str(run_dir), "--fd", str(PASSED_FD), "--nnodes", str(nnodes)]
        words += [f"--name={name}"]
        if tls is not None:
            words += ["--tls-cert", str(tls.certificate), "--tls-key", str(tls.key)]
        without = "the other nodes keep their data" if self._several else "the run is still recorded"
        self._helper = Helper("hub", words, starts=HUB_STARTS, without=without, forgiven_s=FORGIVEN_S, passed=self._fd)
        self.url = shown

    def start(self, mask: Mask) -> None:
        self._mask = mask
        if self._several:
            self._start()

    def keep_alive(self) -> None:
        """Start the hub if a client connects, or restart it if it died; called about once a second."""
        if self._lost:
            return
        if self._helper.running:
            if self._helper.over():
                self._gone()
        elif (caller := self._caller()) is not None:
            self._start(caller)

    def finish(self, end: JobEnd, *, quiet: bool = False) -> None:
        """Tell the hub that this node's job is over, and wait until it has received the rest from the other nodes."""
        if self._helper.running:
            self.keep_alive()
        if self._helper.running:
            if not self._several:
                # Lets the hub conclude for its viewers; if the run is not writable, the error is reported when we
                # conclude.
                with suppress(RunError):
                    end_run(self._run_dir, exit_code=end.exit_code, status=end.status)
            self._helper.tell({"end": end.to_dict()})
            self._await_end(quiet=quiet)
        self.close()

    def close(self) -> None:
        """Stop listening."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            remove_hub_file(self._run_dir)
            if self._tls is not None:
                self._tls.remove()

    def _await_end(self, *, quiet: bool) -> None:
        until_s = time.monotonic() + (HUB_END_S if self._several else ALONE_END_S)
        told: list[Any] = []
        forget_signals()
        while not self._helper.over() and time.monotonic() < until_s:
            for word in self._helper.said():
                waiting = word.get("waiting")
                if isinstance(waiting, list) and waiting and not told and not quiet:
                    told = waiting
                    say(f"waiting for the last data of {_nodes(waiting)} … (Ctrl-C: stop waiting)")
            step_s = min(time.monotonic() + 0.5, until_s)
            if not self._helper.wait(step_s, patient=False) and time.monotonic() < step_s:
                break  # the user lost patience
        if not self._helper.over():
            self._helper.end(HUB_GRACE_S)

    def _start(self, caller: socket.socket | None = None) -> None:
        """Start the hub. ``caller``: a connection already accepted here, which the hub answers."""
        fd = -1 if caller is None else fcntl.fcntl(caller, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
        try:
            self._helper.start(self._mask, caller=fd)
        finally:
            if caller is not None:
                os.close(fd)
                caller.close()
        self._lost = not self._helper.running

    def _gone(self) -> None:
        """Handle a hub that ended: normally, after a long time without requests, or by dying."""
        if self._helper.exit_code == 0 and not self._several:
            self._helper.started = 0
            return
        say(f"the hub died ({_how(self._helper.exit_code or 0)}); restarting it")
        self._lost = not self._helper.restart()

    def _caller(self) -> socket.socket | None:
        """The first connection that may start the hub; earlier ones that may not are closed."""
        with socket.socket(fileno=os.dup(self._fd)) as listening:
            listening.setblocking(False)
            port = listening.getsockname()[1]
            for _ in range(_AT_ONCE):
                try:
                    caller, peer = listening.accept()
                except OSError:
                    return None
                if may_start(peer_uid(peer[0], peer[1], port), loopback=_is_loopback(listening)):
                    return caller
                caller.close()
        return None


def may_start(uid: int | None, *, loopback: bool) -> bool:
    """Whether a connection of that user (see ``peer_uid``) may start the hub.

    Any connection from another machine may, if the user had the hub listen there; also if the owner is unknown.
    """
    return uid in (None, 0, os.getuid()) or (uid == -1 and not loopback)


def _is_loopback(listening: socket.socket) -> bool:
    return ip_address(listening.getsockname()[0]).is_loopback


def open_hub(run_dir: Path, options: HubOptions, *, name: str, nnodes: int, address: str) -> HubChild:
    """Listen, make a certificate if needed, write ``hub.json``; raises HubError or UsageError.

    ``address`` is this node's address, for clients on other machines.
    """
    several = nnodes > 1
    host = options.host or ("" if several else _LOOPBACK[0])
    in_use = "choose another --hub-port, the same on every node" if several else "omit --hub-port to use any free port"
    listening = listen(host, (DEFAULT_PORT if several else 0) if options.port is None else options.port, in_use=in_use)
    tls: TlsFiles | None = None
    try:
        port = listening.getsockname()[1]
        outside = host not in _LOOPBACK
        if options.tls and (outside or options.certificate is not None):
            tls = certificate_of(options, [name for name in (address, host, socket.gethostname()) if name])
        local = url_of(_LOOPBACK[0] if host in _ANYWHERE else host, port, tls=tls is not None)
        shown = url_of(address or socket.gethostname(), port, tls=tls is not None) if outside else local
        fingerprint = tls.fingerprint.hex() if tls is not None else ""
        write_hub_file(run_dir, HubFile(url=local, token=secrets.token_urlsafe(32), fingerprint=fingerprint))
        return HubChild(run_dir, listening, name=name, nnodes=nnodes, tls=tls, shown=shown)
    except OSError as error:
        if tls is not None:
            tls.remove()
        raise HubError(f"cannot write hub.json: {error.strerror}") from error
    finally:
        listening.close()


def listen(host: str, port: int, *, in_use: str = "") -> socket.socket:
    """Listen on one address, or on all if ``host`` is empty; raises HubError, with ``in_use`` if the port is taken."""
    tries: list[tuple[str, socket.AddressFamily, bool]] = []
    if host in _ANYWHERE:
        if host != "0.0.0.0" and socket.has_dualstack_ipv6():
            tries.append(("::", socket.AF_INET6, True))
        if host != "::":
            tries.append(("0.0.0.0", socket.AF_INET, False))
    else:
        tries.append((host, socket.AF_INET6 if ":" in host else socket.AF_INET, False))
    why = ""
    for address, family, dual in tries:
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        except socket.gaierror as error:
            why = str(error.strerror)
        except OSError as error:
            why = os.strerror(error.errno or 0)  # the error's own text contains an address that the user did not type
            if error.errno == errno.EADDRINUSE and in_use:
                why += f"; {in_use}"
    raise HubError(f"the hub cannot listen on port {port}{f' of {host}' if host else ''}: {why}")


def url_of(host: str, port: int, *, tls: bool) -> str:
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def certificate_of(options: HubOptions, names: list[str]) -> TlsFiles:
    """The user's certificate, or a new one for these names."""
    from stepscope.hub.transport import make_certificate, user_certificate

    if options.certificate is not None and options.key is not None:
        return user_certificate(options.certificate, options.key)
    return make_certificate(names)


def _nodes(numbers: list[Any]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"node{'s' if len(numbers) > 1 else ''} {shown}{' …' if len(numbers) > 8 else ''}"


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
