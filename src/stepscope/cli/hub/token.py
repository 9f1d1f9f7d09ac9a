"""``stepscope token``: tokens of people and programs with a name, a scope, roles and an expiry date."""

from __future__ import annotations

import argparse
import os
import re
import time

from stepscope.cli.output import format_table
from stepscope.errors import UsageError
from stepscope.records.text import say

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "create, list and revoke tokens for other readers of your runs"
EPILOG = """\
examples:
  stepscope token create grafana --metrics --expires 90d   for Prometheus: /metrics and nothing else
  stepscope token create anna --run night                  one run, for 30 days
  stepscope token create ben --role label,capture          all runs; may also label them and request captures
  stepscope token list
  stepscope token revoke anna                              takes effect on the next request, even for signed-in users

All your hubs and `stepscope serve` accept them, as a header (Authorization: Bearer TOKEN) and to sign in to the page.
Without --role a token only views.  label: names, tags and notes; alerts: acknowledge incidents and silence alerts;
capture: profile steps of running jobs; delete: delete runs.
A token is printed once; only its hash is stored.  `stepscope audit` shows who used a token, and for what.
"""
SECONDS = {"h": 3600, "d": 86_400, "w": 604_800}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("create", "list", "revoke"))
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of the token")
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--run", metavar="RUN", dest="only", help="for one run only (default: all runs)")
    scope.add_argument("--metrics", action="store_true", help="for /metrics only")
    parser.add_argument(
        "--role",
        metavar="ROLE,…",
        default="view",
        help="what it allows besides viewing: label, alerts, capture, delete (default: view)",
    )
    parser.add_argument("--expires", metavar="TIME", default="30d", help="12h, 30d, 8w (default: 30d)")


def run(args: argparse.Namespace) -> int:
    from stepscope.hub.api.auth import ALL, METRICS, ROLES, ReaderTokens, checked_roles, run_scope, tokens_path

    tokens = ReaderTokens(tokens_path(os.environ))
    if args.action == "list":
        now_s = time.time()
        rows = [
            (
                token.name,
                token.scope,
                ", ".join(("view", *token.roles)),
                _day(token.created_s),
                "expired" if token.expires_s <= now_s else _day(token.expires_s),
            )
            for token in tokens.all()
        ]
        print(format_table(("name", "for", "may", "created", "expires"), rows) if rows else "No tokens yet.")
        return 0
    if args.name is None or not NAME.fullmatch(args.name):
        raise UsageError("a token needs a name of letters, digits, dots and dashes")
    if args.action == "revoke":
        tokens.revoke(args.name)
        say(f"{args.name} is revoked")
        return 0
    if args.only == "":
        raise UsageError("--run needs the name of a run; leave it out for a token that reads all runs")
    scope = METRICS if args.metrics else run_scope(args.only) if args.only is not None else ALL
    roles = checked_roles(args.role)
    if roles and args.metrics:
        raise UsageError("a token for /metrics has no roles; omit --role")
    token = tokens.create(args.name, scope, now_s=time.time(), seconds=_seconds(args.expires), roles=roles)
    may = f", may {', '.join(role for role in ROLES if role in roles)}" if roles else ""
    say(f"{args.name} is for {scope}{may} and expires in {args.expires}; the token is not shown again")
    print(token)
    return 0


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,4})([hdw])", text)
    if found is None or not int(found[1]):
        raise UsageError(f"--expires {text}: must be a number and h, d or w, such as 30d")
    return float(int(found[1]) * SECONDS[found[2]])


def _day(wall_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(wall_s))
