"""``stepscope serve``: the page and the HTTP API of one run, of a folder of runs, or of all runs of this user."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import pwd
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.archive.location import ArchiveUrl
from stepscope.cli.arguments import port_number, run_or_url, run_path, served_folder
from stepscope.errors import StepscopeError, UsageError
from stepscope.page.assets import explain_unbuilt, is_built, opened_in_browser
from stepscope.page.links import page_link
from stepscope.records.files import private_folder
from stepscope.records.text import count_text, say
from stepscope.store.paths import META
from stepscope.store.user_runs import UserHub, announced, find_user_hub, known_folders

if TYPE_CHECKING:
    from stepscope.archive.cache import Archive
    from stepscope.hub.api.auth import Role, TrustedProxy
    from stepscope.hub.audit import AuditLog
    from stepscope.hub.server import Server
    from stepscope.hub.transport import TlsFiles

__all__ = ["EPILOG", "HELP", "add_arguments", "more_words", "run"]

HELP = "serve a run, a folder of runs or traces, or all your runs over HTTP"
EPILOG = """\
examples:
  stepscope serve                       the runs in runs/, on this machine only
  stepscope serve runs/NAME             one run
  stepscope serve traces/               traces of torch.profiler or Nsight Systems that belong to no run
  stepscope serve s3://bucket/team      archived runs (see `stepscope archive`)
  stepscope serve --open                also open the page in your browser
  stepscope serve --all                 all your runs in all folders, on a fixed port; `stepscope run` links to it
  stepscope serve --host 0.0.0.0        for other machines, too: TLS with a generated certificate
  stepscope serve runs --accept         also accept data from `stepscope send`

On a terminal it prints a link that opens the page and signs you in.  Every request needs the reader's token, which is
in a file that only you can read.  Each start makes a new token, except with --all or a --token-file, which keep it:
  curl -H "Authorization: Bearer $(cat ~/.config/stepscope/serve-7070.token)" http://127.0.0.1:7070/api/v1/runs
"""
DEFAULT_PORT = 7070
ALL_PORT = 7071
"""Of ``--all``: another one, so that a hub that always runs does not get in the way of ``stepscope serve DIR``."""
TOKEN_FILE = "serve-{port}.token"
ALL_TOKEN_FILE = "serve-all.token"
IN_USE = "use --port 0 for any free port, or --port N for another one"
ANYWHERE = ("", "0.0.0.0", "::")
OPENING_S = 2.0
"""How long the file that leads a browser to a running hub is kept for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        metavar="DIR",
        type=run_or_url,
        nargs="?",
        help="a run, a folder of runs, a folder of traces, or an archive such as s3://bucket/prefix (default: runs)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="serve all runs that you record with `stepscope run`, in any folder; new runs appear automatically",
    )
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        metavar="N",
        type=port_number(least=0),
        help="port to listen on (default: 7070, or 7071 with --all; 0 = any free port)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", type=Path, help="certificate in PEM format; needs --tls-key")
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="its private key")
    parser.add_argument("--no-tls", action="store_true", help="plain HTTP, even for other machines")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="file for the reader's token (default: a new one each time, in ~/.config/stepscope/serve-PORT.token; with "
        "--all one that is kept, in ~/.config/stepscope/serve-all.token)",
    )
    parser.add_argument(
        "--trust-header",
        metavar="NAME",
        help="trust a reverse proxy that passes the authenticated user in this header: one on this machine, or one of "
        "--proxy-address",
    )
    parser.add_argument(
        "--proxy-user", metavar="USER", help="user that runs the proxy (default: you or root); needs --trust-header"
    )
    parser.add_argument(
        "--proxy-address",
        metavar="ADDRESS",
        action="append",
        default=[],
        help="IP address of a proxy on another machine; may be repeated; needs --trust-header",
    )
    parser.add_argument(
        "--grant",
        metavar="USER=ROLE,…",
        action="append",
        default=[],
        help="what a user of the proxy may do besides viewing: label, alerts, capture, delete; *: every user; may be "
        "repeated (for tokens: `stepscope token create --role`)",
    )
    parser.add_argument(
        "--audit-log",
        metavar="FILE",
        type=Path,
        help="file that logs who read and sent what (default: ~/.config/stepscope/audit.jsonl); see `stepscope audit`",
    )
    parser.add_argument(
        "--read-only", action="store_true", help="do not let the page rename, tag or delete runs, even with your token"
    )
    parser.add_argument("--accept", action="store_true", help="accept data of these runs from `stepscope send`")
    parser.add_argument(
        "--join",
        action="store_true",
        help="be the hub of a team: also accept new runs of jobs whose settings name this hub (docs/team-hub.md)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in your browser")
    parser.add_argument(
        "--until-eof", action="store_true", help="also stop at the end of standard input, for use by other programs"
    )


def _has_traces(folder: Path) -> bool:
    from stepscope.hub.traces.folders import trace_folders

    return bool(trace_folders(folder))


def more_words(args: argparse.Namespace, words: Sequence[str]) -> None:
    raise UsageError(
        f"serve takes one folder, not also {' '.join(words)}; serve the folder that contains them, "
        "or each with a --port of its own"
    )


def run(args: argparse.Namespace) -> int:
    import uvloop

    from stepscope.cli.launch.helpers import HubOptions, certificate_of, listen, url_of
    from stepscope.hub.limits import is_local

    if args.all:
        _check_all(args)
        if (already := find_user_hub(os.environ)) is not None:
            return _tell_already(already, open_it=args.open)
    host, port, outside = args.host, args.port, args.host != "localhost" and not is_local(args.host)
    if port is None:
        port = ALL_PORT if args.all else DEFAULT_PORT
    options = HubOptions(host=host, port=port, tls=not args.no_tls, certificate=args.tls_cert, key=args.tls_key)
    trusted = _trusted(args, outside=outside)
    archive = None
    if isinstance(args.dir, ArchiveUrl):
        archive = _archive(args)
        folder = run_path(args.dir) if archive is None else None
    else:
        folder = None if args.all else served_folder(args.dir, other_content=_has_traces)
    if args.join and folder is not None and _name_of(folder):
        raise UsageError(f"--join needs a folder of runs; {folder} is one run")
    with (
        listen(host, port, in_use=IN_USE) as listening,
        _token(args.token_file, listening.getsockname()[1], persistent=args.all) as (place, token),
    ):
        shown = socket.gethostname() if host in ANYWHERE else host
        secured = options.tls and (outside or options.certificate is not None)
        tls = certificate_of(options, [socket.gethostname(), host]) if secured else None
        url = url_of(shown, listening.getsockname()[1], tls=secured)
        run_name = _name_of(folder) if folder is not None else ""
        try:
            with _announced(url, place, token, tls) if args.all else nullcontext():
                _tell(_what(folder) if archive is None else str(archive.url), url, run_name, place, token)
                if tls is not None:
                    _tell_certificate(tls, own=options.certificate is not None)
                with _shown(page_link(url, run_name, token)) if args.open else nullcontext():
                    uvloop.run(_serve(args, folder, archive, listening, token, tls, trusted))
        finally:
            if tls is not None:
                tls.remove()
    return 0


def _archive(args: argparse.Namespace) -> Archive | None:
    """The archive to serve; None if it is a run.  An error now rather than on the page if it cannot be read."""
    from stepscope.archive.cache import Archive

    if args.accept or args.join:
        raise UsageError("--accept and --join need a folder on disk to receive into; an archive is only read")
    archive = Archive(args.dir, os.environ)
    return None if archive.is_run() else archive


def _check_all(args: argparse.Namespace) -> None:
    if args.dir is not None:
        raise UsageError(f"--all serves all your runs; omit {args.dir}, or omit --all to serve only that folder")
    if args.accept or args.join:
        raise UsageError("--accept and --join need one folder to receive into: `stepscope serve DIR --accept`")


def _tell_already(hub: UserHub, *, open_it: bool) -> int:
    """All runs are already served: say where."""
    say("your hub is already running; it shows all your runs")
    print(page_link(hub.url, token=hub.token) if sys.stdout.isatty() else hub.url, flush=True)
    if open_it:
        with opened_in_browser(page_link(hub.url, token=hub.token)) as found:
            if found:
                time.sleep(OPENING_S)
            else:
                say("no browser was found to open the page")
    return 0


@contextmanager
def _announced(url: str, place: Path, token: str, tls: TlsFiles | None) -> Iterator[None]:
    """Let ``stepscope run`` link to this hub; if that fails, only those links are missing."""
    fingerprint = "" if tls is None else tls.fingerprint.hex()
    about = UserHub(url=url, token=token, token_file=str(place.absolute()), fingerprint=fingerprint)
    with ExitStack() as stack:
        try:
            stack.enter_context(announced(about, os.environ))
        except OSError as error:
            say(f"`stepscope run` will not link to this hub: {error}")
        yield


def _what(folder: Path | None) -> str:
    if folder is not None:
        return str(folder)
    folders = known_folders(os.environ)
    return f"all your runs ({count_text(len(folders), 'folder')} so far)"


def _trusted(args: argparse.Namespace, *, outside: bool) -> TrustedProxy | None:
    """The proxy to trust; UsageError if anything but that proxy could set its header."""
    from stepscope.hub.api.auth import TrustedProxy

    header, user = args.trust_header, args.proxy_user
    if header is None:
        for option, given in (("--proxy-user", user), ("--proxy-address", args.proxy_address), ("--grant", args.grant)):
            if given:
                raise UsageError(f"{option} needs --trust-header")
        return None
    if outside and not args.proxy_address and user is None:
        raise UsageError(
            "--trust-header works on loopback only; omit --host and let the proxy listen on the network, or name the "
            "proxy: its user on this machine with --proxy-user, or its address with --proxy-address"
        )
    if args.proxy_address and args.no_tls:
        raise UsageError("--proxy-address needs TLS: without it anyone on the way could write the header")
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", header) or header.lower() in ("authorization", "cookie", "host"):
        raise UsageError(f"--trust-header {header}: not a usable header name; use one such as X-Forwarded-User")
    return TrustedProxy(
        header=header,
        uids=_proxy_uids(user, outside=outside),
        addresses=frozenset(map(_address, args.proxy_address)),
        roles=_grants(args.grant),
    )


def _proxy_uids(user: str | None, *, outside: bool) -> frozenset[int]:
    if user is None:
        return frozenset() if outside else frozenset((0, os.getuid()))
    try:
        return frozenset((pwd.getpwnam(user).pw_uid,))
    except KeyError:
        raise UsageError(f"--proxy-user {user}: no such user on this machine") from None


def _address(text: str) -> str:
    try:
        address = ip_address(text)
    except ValueError:
        raise UsageError(f"--proxy-address {text}: must be an IP address") from None
    if address.is_loopback:
        raise UsageError("--proxy-address is for other machines; on this one use --proxy-user")
    return str(address)


def _grants(words: Sequence[str]) -> dict[str, frozenset[Role]]:
    from stepscope.hub.api.auth import checked_roles

    found: dict[str, frozenset[Role]] = {}
    for word in words:
        user, equals, roles = word.rpartition("=")
        if not equals or not user:
            raise UsageError(f"--grant {word}: must be USER=ROLE,…, such as anna=label,capture")
        found[user] = found.get(user, frozenset()) | checked_roles(roles)
    return found


@contextmanager
def _token(fixed: Path | None, port: int, *, persistent: bool = False) -> Iterator[tuple[Path, str]]:
    """A file with the reader's token: the user's own, which is kept, or a new one that is removed at the end.

    ``kept``: keep ours, too, so that links and sessions stay valid after a restart.
    """
    from stepscope.records.files import key_path
    from stepscope.wire.handshake import kept_secret

    if fixed is None and persistent:
        fixed = key_path(os.environ).with_name(ALL_TOKEN_FILE)
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


def _tell(what: str, url: str, run: str, place: Path, token: str) -> None:
    """Print the URL to standard output, also for programs; on a terminal, print the link that signs in."""
    say(f"serving {what}; Ctrl-C to stop")
    if not is_built():
        say(f"only the HTTP API: {explain_unbuilt()}")
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


def _audit(served: str, fixed: Path | None) -> AuditLog:
    """The audit log, outside the served folder, which may belong to another user or to a run on another host."""
    from stepscope.hub.audit import AuditLog, audit_path

    path = fixed if fixed is not None else audit_path(os.environ)
    if fixed is None:
        with suppress(OSError):  # the log reports that it cannot be written
            private_folder(path.parent)
    return AuditLog(path=path, about={"served": served})


async def _serve(
    args: argparse.Namespace,
    folder: Path | None,
    archive: Archive | None,
    listening: socket.socket,
    token: str,
    tls: TlsFiles | None,
    trusted: TrustedProxy | None,
) -> None:
    """Serve until SIGINT or SIGTERM, or until the end of standard input."""
    gc.disable()  # nothing of what is imported is garbage
    from stepscope.hub.api.auth import Readers, ReaderTokens, tokens_path
    from stepscope.hub.app import make_app
    from stepscope.hub.limits import Refusals
    from stepscope.hub.runs import Runs, open_ahead
    from stepscope.hub.server import Server

    gc.freeze()
    gc.enable()
    if archive is not None:
        from stepscope.hub.archived_runs import ArchivedRuns

        runs: Runs = ArchivedRuns(archive)
    else:
        runs = Runs.of_user(lambda: known_folders(os.environ)) if folder is None else Runs.of_folder(folder)
    served = "all runs" if folder is None else str(folder.resolve())
    refusals, audit = Refusals(), _audit(served if archive is None else str(archive.url), args.audit_log)
    fingerprint = tls.fingerprint if tls is not None else b""
    agents = None
    if args.accept or args.join:
        from stepscope.hub.ingest.run_ingest import FolderIngest

        agents = FolderIngest(
            runs.path_of,
            refusals,
            fingerprint=fingerprint,
            done=_finish,
            audit=audit,
            team_folder=folder if args.join else None,
        )
    port = listening.getsockname()[1]
    readers = Readers(
        token,
        secure=tls is not None,
        port=port,
        named=ReaderTokens(tokens_path(os.environ)),
        trusted=trusted,
        audit=audit,
    )
    app = make_app(runs, readers, agents, refusals=refusals, changes=not args.read_only and archive is None)
    server = Server(app, listening, tls=tls, refusals=refusals)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    if args.until_eof:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else _end(loop, server))
    tasks = [asyncio.create_task(audit.keep())]
    if folder is not None:
        tasks.append(asyncio.create_task(open_ahead(runs, folder)))
    try:
        await server.run()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
