"""``stepscope serve``: the HTTP API of one run, or of a folder of finished and live runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import pwd
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.cli.arguments import port_number, run_path
from stepscope.cli.links import opened_in_browser, page_link
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.text import say
from stepscope.store.paths import META

if TYPE_CHECKING:
    from stepscope.hub.api.auth import TrustedProxy
    from stepscope.hub.audit import AuditLog
    from stepscope.hub.server import Server
    from stepscope.hub.transport import TlsFiles

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "serve a run, or a folder of runs, over HTTP"
EPILOG = """\
examples:
  stepscope serve                       the runs in runs/, on this machine only
  stepscope serve runs/NAME             one run
  stepscope serve --open                also open the page in your browser
  stepscope serve --host 0.0.0.0        for other machines, too: TLS with a generated certificate
  stepscope serve runs --accept         also accept data from `stepscope send`

On a terminal it prints a link that opens the page and signs you in.  Every request needs the reader's token, which is
in a file that only you can read.  Each start makes a new token, unless --token-file names a file that keeps it:
  curl -H "Authorization: Bearer $(cat ~/.config/stepscope/serve-7070.token)" http://127.0.0.1:7070/api/v1/runs
"""
DEFAULT = Path("runs")
DEFAULT_PORT = 7070
TOKEN_FILE = "serve-{port}.token"
IN_USE = "use --port 0 for any free port, or --port N for another one"
ANYWHERE = ("", "0.0.0.0", "::")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", default=DEFAULT, help="a run, or a folder of runs")
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        metavar="N",
        type=port_number(least=0),
        default=DEFAULT_PORT,
        help="port to listen on (default: 7070; 0 = any free port)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", type=Path, help="certificate in PEM format; needs --tls-key")
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="its private key")
    parser.add_argument("--no-tls", action="store_true", help="plain HTTP, even for other machines")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="file for the reader's token (default: a new one each time, in ~/.config/stepscope/serve-PORT.token)",
    )
    parser.add_argument(
        "--trust-header",
        metavar="NAME",
        help="trust a reverse proxy on this machine that passes the authenticated user in this header",
    )
    parser.add_argument(
        "--proxy-user", metavar="USER", help="user that runs the proxy (default: you or root); needs --trust-header"
    )
    parser.add_argument(
        "--audit-log",
        metavar="FILE",
        type=Path,
        help="file that logs who read and sent what (default: ~/.config/stepscope/audit.jsonl); see `stepscope audit`",
    )
    parser.add_argument("--accept", action="store_true", help="accept data of these runs from `stepscope send`")
    parser.add_argument("--open", action="store_true", help="open the page in your browser")
    parser.add_argument(
        "--until-eof", action="store_true", help="also stop at the end of standard input, for use by other programs"
    )


def run(args: argparse.Namespace) -> int:
    from stepscope.cli.launch.hub import HubOptions, certificate_of, listen, url_of
    from stepscope.hub.limits import is_local
    from stepscope.hub.server import run_loop

    host, port, outside = args.host, args.port, args.host != "localhost" and not is_local(args.host)
    options = HubOptions(host=host, port=port, tls=not args.no_tls, certificate=args.tls_cert, key=args.tls_key)
    trusted = _trusted(args.trust_header, args.proxy_user, outside=outside)
    args.dir = _served(args.dir)
    if not any(
        (args.dir / name).exists() for name in (META, *(f"{child.name}/{META}" for child in args.dir.iterdir()))
    ):
        say(f"no runs in {args.dir} yet; specify a run or a folder of runs")
    with (
        listen(host, port, in_use=IN_USE) as listening,
        _token(args.token_file, listening.getsockname()[1]) as (place, token),
    ):
        shown = socket.gethostname() if host in ANYWHERE else host
        secured = options.tls and (outside or options.certificate is not None)
        tls = certificate_of(options, [socket.gethostname(), host]) if secured else None
        url, one = url_of(shown, listening.getsockname()[1], tls=secured), _name_of(args.dir)
        _tell(args.dir, url, one, place, token)
        if tls is not None:
            _tell_certificate(tls, own=options.certificate is not None)
        try:
            with _shown(page_link(url, one, token)) if args.open else nullcontext():
                run_loop(_serve(args, listening, token, tls, trusted))
        finally:
            if tls is not None:
                tls.remove()
    return 0


def _served(path: Path) -> Path:
    """The folder, or the run of that name in runs/."""
    if path == DEFAULT and not path.exists():
        raise UsageError(f"there is no folder {path.absolute()}; specify a run or a folder of runs")
    path = run_path(path)
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder")
    return path


def _trusted(header: str | None, user: str | None, *, outside: bool) -> TrustedProxy | None:
    """The proxy to trust; UsageError if anything but a proxy on this machine could set that header."""
    from stepscope.hub.api.auth import TrustedProxy

    if header is None:
        if user is not None:
            raise UsageError("--proxy-user needs --trust-header")
        return None
    if outside:
        raise UsageError("--trust-header works on loopback only; omit --host and let the proxy listen on the network")
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", header) or header.lower() in ("authorization", "cookie", "host"):
        raise UsageError(f"--trust-header {header}: not a usable header name; use one such as X-Forwarded-User")
    if user is None:
        return TrustedProxy(header=header, uids=frozenset((0, os.getuid())))
    try:
        return TrustedProxy(header=header, uids=frozenset((pwd.getpwnam(user).pw_uid,)))
    except KeyError:
        raise UsageError(f"--proxy-user {user}: no such user on this machine") from None


@contextmanager
def _token(fixed: Path | None, port: int) -> Iterator[tuple[Path, str]]:
    """A file with the reader's token: the user's own, which is kept, or a new one that is removed at the end."""
    from stepscope.wire.keys import kept_secret, key_path

    if fixed is not None:
        yield fixed, kept_secret(fixed, "token", "name another file with --token-file")
        return
    place = key_path(os.environ).with_name(TOKEN_FILE.format(port=port))
    place.unlink(missing_ok=True)  # left by a server that was killed: the port is ours now
    token = kept_secret(place, "token", "name another file with --token-file")
    try:
        yield place, token
    finally:
        place.unlink(missing_ok=True)


def _name_of(folder: Path) -> str:
    """Name of a run; empty for a folder of runs."""
    return folder.resolve().name if (folder / META).is_file() else ""


def _tell(folder: Path, url: str, run: str, place: Path, token: str) -> None:
    """Print the URL to standard output, also for programs; on a terminal, print the link that signs in."""
    say(f"serving {folder}; Ctrl-C to stop")
    say(f"the token is in {place}")
    print(page_link(url, run, token) if sys.stdout.isatty() else url, flush=True)


def _tell_certificate(tls: TlsFiles, *, own: bool) -> None:
    made = "" if own else "; it is self-signed, so a browser will ask whether you trust it"
    say(f"the certificate's SHA-256 is {tls.fingerprint.hex()}{made}")


@contextmanager
def _shown(link: str) -> Iterator[None]:
    with opened_in_browser(link) as found:
        if not found:
            say("no browser was found to open the page")
        yield


def _audit(folder: Path, fixed: Path | None) -> AuditLog:
    """The audit log, outside the served folder, which may belong to another user or to a run on another host."""
    from stepscope.hub.audit import AuditLog, audit_path

    path = fixed if fixed is not None else audit_path(os.environ)
    if fixed is None:
        with suppress(OSError):  # the log reports that it cannot be written
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return AuditLog(path=path, about={"served": str(folder.resolve())})


async def _serve(
    args: argparse.Namespace,
    listening: socket.socket,
    token: str,
    tls: TlsFiles | None,
    trusted: TrustedProxy | None,
) -> None:
    """Serve until SIGINT or SIGTERM, or until the end of standard input."""
    from stepscope.hub.api.auth import Readers
    from stepscope.hub.api.tokens import ReaderTokens, tokens_path
    from stepscope.hub.app import make_app
    from stepscope.hub.ingest.folder_ingest import FolderIngest
    from stepscope.hub.limits import Refusals
    from stepscope.hub.runs import Runs, open_ahead
    from stepscope.hub.server import Server

    folder: Path = args.dir
    refusals, runs, audit = Refusals(), Runs.of_folder(folder), _audit(folder, args.audit_log)
    fingerprint = tls.fingerprint if tls is not None else b""
    agents = None
    if args.accept:
        agents = FolderIngest(runs, refusals, fingerprint=fingerprint, done=_finish, audit=audit)
    port = listening.getsockname()[1]
    readers = Readers(
        token,
        secure=tls is not None,
        port=port,
        named=ReaderTokens(tokens_path(os.environ)),
        trusted=trusted,
        audit=audit,
    )
    app = make_app(runs, readers, agents, refusals=refusals)
    server = Server(app, listening, tls=tls, refusals=refusals)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    if args.until_eof:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else _end(loop, server))
    beside = [asyncio.create_task(open_ahead(runs, folder)), asyncio.create_task(audit.keep())]
    try:
        await server.run()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        if agents is not None:
            await agents.close()
        audit.close()


def _end(loop: asyncio.AbstractEventLoop, server: Server) -> None:
    loop.remove_reader(0)
    server.stop()


def _finish(run_dir: Path) -> None:
    """Add what nodes delivered to the run and its summary."""
    from stepscope.cli.finalize import finalize_run

    try:
        finalize_run(run_dir)
    except StepscopeError as error:
        say(str(error))
