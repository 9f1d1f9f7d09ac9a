"""``stepscope mcp``: let an assistant ask about runs, over the Model Context Protocol."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.arguments import count, served_folder
from stepscope.errors import UsageError
from stepscope.records.text import say
from stepscope.store.user_runs import known_folders

if TYPE_CHECKING:
    from stepscope.assistant.mcp_server import ServerOptions
    from stepscope.hub.runs import Runs
    from stepscope.hub.transport import TlsFiles

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "let an assistant ask about runs (Model Context Protocol)"
EPILOG = """\
examples:
  stepscope mcp                         over standard input and output, as assistants start it: the runs in runs/
  stepscope mcp --all                   all your runs in all folders
  stepscope mcp --config --all          the snippet for the configuration of a client
  stepscope mcp --skill                 a text that teaches an assistant to use the tools
  stepscope mcp --http 7080             over HTTP on this machine, with the token in ~/.config/stepscope/mcp.token

It only reads, unless --allow-changes is given.  It needs the package mcp: pip install 'stepscope[mcp]'
"""
TOKEN_FILE = "mcp.token"
IN_USE = "choose another port, or 0 for any free one"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANYWHERE = ("0.0.0.0", "::")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", help="a run, or a folder of runs (default: runs)")
    parser.add_argument(
        "--all", action="store_true", help="all runs that you record with `stepscope run`, in any folder"
    )
    parser.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        type=_address,
        help="serve over HTTP instead of standard input and output (default host: 127.0.0.1)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="file for the token of --http, created if it does not exist (default: ~/.config/stepscope/mcp.token)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", type=Path, help="certificate in PEM format; needs --tls-key")
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="its private key")
    parser.add_argument("--no-tls", action="store_true", help="plain HTTP, even for other machines")
    parser.add_argument(
        "--allow-changes", action="store_true", help="also offer tools that change something, such as labels of runs"
    )
    parser.add_argument(
        "--answer-kb", metavar="N", type=count("kilobytes"), default=20, help="limit of an answer (default: 20)"
    )
    parser.add_argument(
        "--skill", action="store_true", help="print the text that teaches an assistant to use the tools"
    )
    parser.add_argument("--config", action="store_true", help="print the snippet for the configuration of a client")


def run(args: argparse.Namespace) -> int:
    if args.http is None and (args.token_file or args.tls_cert or args.tls_key or args.no_tls):
        raise UsageError("--token-file, --tls-cert, --tls-key and --no-tls need --http")
    if args.all and args.dir is not None:
        raise UsageError(f"--all is about all your runs; omit {args.dir}, or omit --all")
    if find_spec("mcp") is None:
        raise UsageError("`stepscope mcp` needs the package mcp; install it with: pip install 'stepscope[mcp]'")
    if args.skill:
        from stepscope.assistant.mcp_server import skill_text

        print(skill_text(), end="")
        return 0
    folder = None if args.all else served_folder(args.dir)
    if args.config:
        print(json.dumps(_config(args, folder), indent=2))
        return 0
    from stepscope.assistant.mcp_server import ServerOptions
    from stepscope.hub.runs import Runs

    options = ServerOptions(changes=args.allow_changes, most_bytes=args.answer_kb * 1000)
    runs = Runs.of_user(lambda: known_folders(os.environ)) if folder is None else Runs.of_folder(folder)
    if args.http is None:
        asyncio.run(_serve_stdio(runs, options))
    else:
        _serve_http(args, runs, options)
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"must be [HOST:]PORT, not {text!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def _config(args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """The form that most clients share; no secret is in it."""
    if args.http is not None:
        host, port = args.http
        scheme = "http" if host in LOOPBACK or args.no_tls else "https"
        shown = f"[{host}]" if ":" in host else host
        server: dict[str, Any] = {
            "type": "http",
            "url": f"{scheme}://{shown}:{port}/mcp",
            "headers": {"Authorization": "Bearer ${STEPSCOPE_MCP_TOKEN}"},
        }
    else:
        program = shutil.which(sys.argv[0]) or shutil.which("stepscope") or "stepscope"
        what = ["--all"] if folder is None else [str(folder.resolve())]
        changes = ["--allow-changes"] if args.allow_changes else []
        server = {"command": str(Path(program).absolute()), "args": ["mcp", *what, *changes]}
    return {"mcpServers": {"stepscope": server}}


async def _serve_stdio(runs: Runs, options: ServerOptions) -> None:
    from stepscope.assistant.hub_api import HubApi
    from stepscope.assistant.mcp_server import serve_stdio

    api = HubApi(runs, changes=options.changes)
    serving = asyncio.create_task(serve_stdio(api, options))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # The thread that reads standard input cannot be stopped; nothing is left to lose.
        loop.add_signal_handler(number, os._exit, 128 + number)
    try:
        await serving
    finally:
        await api.close()


def _serve_http(args: argparse.Namespace, runs: Runs, options: ServerOptions) -> None:
    import uvloop

    from stepscope.cli.launch.helpers import HubOptions, certificate_of, listen, url_of
    from stepscope.hub.limits import is_local
    from stepscope.records.files import key_path
    from stepscope.wire.handshake import kept_secret

    host, port = args.http
    place = args.token_file or key_path(os.environ).with_name(TOKEN_FILE)
    token = kept_secret(place, "token", "name another file with --token-file")
    outside = host != "localhost" and not is_local(host)
    hub_options = HubOptions(host=host, port=port, tls=not args.no_tls, certificate=args.tls_cert, key=args.tls_key)
    with listen(host, port, in_use=IN_USE) as listening:
        bound = listening.getsockname()[1]
        secured = hub_options.tls and (outside or hub_options.certificate is not None)
        names = sorted({socket.gethostname(), socket.getfqdn(), host} - set(ANYWHERE)) if outside else list(LOOPBACK)
        with _certificate(certificate_of(hub_options, names) if secured else None) as tls:
            shown = socket.gethostname() if host in ANYWHERE else host
            say(f"the token is in {place}; Ctrl-C to stop")
            if tls is not None:
                say(f"the certificate's SHA-256 is {tls.fingerprint.hex()}")
            print(f"{url_of(shown, bound, tls=secured)}/mcp", flush=True)
            hosts = [f"[{name}]:{bound}" if ":" in name else f"{name}:{bound}" for name in {*names, *LOOPBACK}]
            uvloop.run(_serve(runs, options, listening, token, tls, hosts))


@contextmanager
def _certificate(tls: TlsFiles | None) -> Iterator[TlsFiles | None]:
    try:
        yield tls
    finally:
        if tls is not None:
            tls.remove()


async def _serve(
    runs: Runs, options: ServerOptions, listening: socket.socket, token: str, tls: TlsFiles | None, hosts: list[str]
) -> None:
    from stepscope.assistant.hub_api import HubApi
    from stepscope.assistant.mcp_server import http_app
    from stepscope.hub.api.auth import Readers, ReaderTokens, tokens_path
    from stepscope.hub.server import Server

    api = HubApi(runs, changes=options.changes)
    port = listening.getsockname()[1]
    readers = Readers(token, secure=tls is not None, port=port, named=ReaderTokens(tokens_path(os.environ)))
    server = Server(http_app(api, options, readers, hosts=hosts), listening, tls=tls)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    try:
        await server.run()
    finally:
        await api.close()
