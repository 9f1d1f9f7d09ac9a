"""``stepscope slack``: answer questions about runs in Slack."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.alerts.settings import Secret
from stepscope.cli.arguments import served_folder
from stepscope.errors import UsageError
from stepscope.records.text import say
from stepscope.store.user_runs import known_folders

if TYPE_CHECKING:
    from stepscope.assistant.slack_socket import SlackOptions

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "answer questions about runs in Slack (socket mode)"
EPILOG = """\
examples:
  export SLACK_APP_TOKEN=xapp-… SLACK_BOT_TOKEN=xoxb-…
  stepscope slack --all                 then, in Slack: @stepscope what is wrong with night?
  stepscope slack runs --allow-changes --user U012AB3CD

The connection is opened from here; no port listens.  docs/assistants.md says how to create the Slack app.  It needs the
package slack_sdk: pip install 'stepscope[slack]'
"""
API_URL = "https://slack.com/api/"
_TOKENS = {"app": ("SLACK_APP_TOKEN", "xapp-"), "bot": ("SLACK_BOT_TOKEN", "xoxb-")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", help="a run, or a folder of runs (default: runs)")
    parser.add_argument(
        "--all", action="store_true", help="all runs that you record with `stepscope run`, in any folder"
    )
    for name, (variable, begin) in _TOKENS.items():
        parser.add_argument(
            f"--{name}-token-file",
            metavar="FILE",
            type=Path,
            help=f"private file with the {name} token, {begin}… (default: the environment variable {variable})",
        )
    parser.add_argument(
        "--allow-changes", action="store_true", help="people in Slack may silence and acknowledge incidents"
    )
    parser.add_argument(
        "--user",
        metavar="ID",
        action="append",
        default=[],
        help="with --allow-changes: only this Slack user may, such as U012AB3CD; can be repeated",
    )
    parser.add_argument(
        "--api-url", metavar="URL", default=API_URL, help=f"address of Slack's Web API (default: {API_URL})"
    )


def run(args: argparse.Namespace) -> int:
    if args.all and args.dir is not None:
        raise UsageError(f"--all is about all your runs; omit {args.dir}, or omit --all")
    if args.user and not args.allow_changes:
        raise UsageError("--user needs --allow-changes")
    if find_spec("slack_sdk") is None:
        raise UsageError("`stepscope slack` needs the package slack_sdk; install it: pip install 'stepscope[slack]'")
    from stepscope.assistant.slack_socket import SlackOptions

    folder = None if args.all else served_folder(args.dir)
    options = SlackOptions(
        app_token=_token("app", args.app_token_file),
        bot_token=_token("bot", args.bot_token_file),
        api_url=args.api_url if args.api_url.endswith("/") else f"{args.api_url}/",
        changes=args.allow_changes,
        users=frozenset(args.user),
    )
    asyncio.run(_serve(folder, options))
    return 0


def _token(name: str, file: Path | None) -> str:
    """The token from a private file or the environment; errors do not show it."""
    variable, begin = _TOKENS[name]
    secret = Secret("env", variable) if file is None else Secret("file", str(file.absolute()))
    token = secret.reveal(os.environ)
    if not token.startswith(begin) or not token.isascii() or not token.isprintable():
        raise UsageError(f"the {name} token in {secret.place} is not one: it must begin with {begin}")
    return token


async def _serve(folder: Path | None, options: SlackOptions) -> None:
    from stepscope.assistant.hub_api import HubApi
    from stepscope.assistant.slack_socket import SlackBot
    from stepscope.hub.runs import Runs

    runs = Runs.of_user(lambda: known_folders(os.environ)) if folder is None else Runs.of_folder(folder)
    api = HubApi(runs, changes=options.changes)
    bot = SlackBot(api, options)
    answering = asyncio.create_task(bot.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, answering.cancel)
    connecting = asyncio.create_task(bot.connected.wait())
    try:
        await asyncio.wait((answering, connecting), return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            say("connected to Slack; Ctrl-C to stop")
        await asyncio.wait((answering,))
        if not answering.cancelled():
            answering.result()
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await api.close()
