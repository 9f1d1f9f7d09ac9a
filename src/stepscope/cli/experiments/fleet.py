"""``stepscope fleet``: what the GPU hours of many runs were spent on, and which hosts made jobs slow."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.arguments import age, run_or_url
from stepscope.cli.catalog import catalog_folders, updated_catalog
from stepscope.cli.output import format_table
from stepscope.errors import UsageError
from stepscope.records.text import confidence_text, count_text, hours_text, percent_text, printable, say
from stepscope.reports.layout import MARKS, bar

if TYPE_CHECKING:
    from stepscope.alerts.settings import AlertSettings
    from stepscope.alerts.suspects import Suspect

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "show what GPU hours were spent on over all runs, and which hosts, links and changes made jobs slow"
EPILOG = """\
examples:
  stepscope fleet                                all your runs in all folders
  stepscope fleet --since 30d --by host          the last 30 days, by host
  stepscope fleet /shared/runs s3://bucket/team  the runs of these folders and archives
  stepscope fleet exclude-list                   hosts that jobs should avoid, one per line
  sbatch --exclude="$(stepscope fleet exclude-list --format slurm)" job.sh
  stepscope fleet --alert slack                  one message per suspect, and one when it is cleared: for cron
  stepscope sql --fleet "select team, sum(gpu_hours) from runs group by team"

A host is a suspect if it was the slow one of its runs more often than by chance; the probability that a cluster without
faults has any suspect is at most 1%.  The first time, all runs are read; then only those that changed.
"""
EXCLUDE = "exclude-list"
FORMATS = ("plain", "slurm", "kubernetes")
BY = {"cause": "", "time": "", "job": "by_job", "team": "by_team", "user": "by_user", "host": "by_host"}
EXCLUDED_SINCE_S = 90 * 86_400.0
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
BAR_CELLS = 24
WIDEST = 120
ROWS = 15
CAUSES_SHOWN = 3
LEAST_SHOWN = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        metavar="FOLDER",
        type=run_or_url,
        nargs="*",
        help="folders of runs and archives such as s3://bucket/prefix (default: all folders that you recorded in); "
        f"or {EXCLUDE!r}, and then these",
    )
    parser.add_argument(
        "--since", type=age, metavar="TIME", help=f"only runs that started since then: 24h, 30d, 8w ({EXCLUDE}: 90d)"
    )
    parser.add_argument(
        "--by", choices=tuple(BY), default="cause", metavar="WHAT", help=f"what the hours are split by: {', '.join(BY)}"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="plain", help=f"of the {EXCLUDE}: plain (default), slurm or kubernetes"
    )
    parser.add_argument("--json", action="store_true", help="print the document (docs/fleet-reference.md)")
    parser.add_argument(
        "--alert",
        action="append",
        default=[],
        metavar="WORD",
        help="report suspects of the last 90 days (--since), each once, to this receiver; a word as of `run --alert`",
    )


def run(args: argparse.Namespace) -> int:
    from stepscope.fleet.document import fleet_document, suspect_hosts

    paths = list(args.paths)
    excluding = bool(paths) and paths[0] == Path(EXCLUDE)
    settings = _alert_settings(args.alert) if args.alert else None
    recent = excluding or settings is not None
    since_s = args.since if args.since is not None or not recent else EXCLUDED_SINCE_S
    now_ns = time.time_ns()
    since_ns = None if since_s is None else now_ns - round(since_s * 1e9)
    folders, archives = catalog_folders(paths[1:] if excluding else paths)
    catalog, problems = updated_catalog(folders, archives)
    keys = [*folders, *map(str, archives)]
    fleet = catalog.fleet(keys, since_wall_ns=since_ns)
    document = fleet_document(fleet, generated_wall_ns=now_ns, since_wall_ns=since_ns, problems=problems)
    if excluding:
        return _exclude(suspect_hosts(document), args.format)
    if settings is not None:
        return _report(document, settings, [f"{since_s:g}", *sorted(keys)], now_ns)
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
        return 0
    for problem in problems[:ROWS]:
        say(problem)
    print(printable("\n\n".join(map(_wrapped, _sections(document, args.by))), keep="\n"))
    return 0


# -- exclude list -----------------------------------------------------------------------------------------------------


def _exclude(hosts: Sequence[str], form: str) -> int:
    """Names come from run folders: what is no host name must not reach a shell or a manifest."""
    valid = [host for host in hosts if HOST_NAME.fullmatch(host)]
    for host in hosts:
        if host not in valid:
            say(f"{host!r} is not a host name and was left out")
    if form == "slurm":
        print(",".join(valid))
    elif form == "plain":
        print("\n".join(valid), end="\n" if valid else "")
    elif valid:
        print(KUBERNETES + "\n".join(f"                - {host}" for host in valid))
    if not valid:
        say("no host is suspect")
    return 0


KUBERNETES = """\
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - key: kubernetes.io/hostname
              operator: NotIn
              values:
"""


# -- alerts -----------------------------------------------------------------------------------------------------------


def _alert_settings(words: Sequence[str]) -> AlertSettings:
    from stepscope.alerts.settings_files import load_settings

    settings = load_settings(Path.cwd(), words, os.environ)
    if not settings.receivers:
        raise UsageError("no receiver is set; name one, such as --alert slack (docs/alerts.md)")
    return settings


def _report(document: Mapping[str, Any], settings: AlertSettings, scope: Sequence[str], now_ns: int) -> int:
    """Send what is new since the last time; exit code 1 if a receiver could not be reached.

    ``scope``: the period and the folders.  Each is tracked separately: in a shorter period a suspect may be missing
    without being over.
    """
    from stepscope.alerts.delivery import Counts, deliver_once, destinations_of
    from stepscope.alerts.suspects import report_suspects
    from stepscope.store.paths import OUTBOX
    from stepscope.store.user_runs import state_path

    folder = state_path(os.environ) / "fleet" / f"alerts-{sha256(' '.join(scope).encode()).hexdigest()[:12]}"
    begun, over = report_suspects(folder, _suspects(document), list(settings.receivers), now_wall_ns=now_ns)
    destinations, problems = destinations_of(settings, os.environ)
    # A fleet that never had a suspect has no outbox.
    counts = deliver_once(folder, destinations) if (folder / OUTBOX).exists() else Counts()
    for problem in problems.values():
        say(problem)
    print(f"{count_text(begun, 'new suspect')}, {over:,} cleared; {count_text(counts.sent, 'message')} sent")
    if counts.waiting:
        say(f"{count_text(counts.waiting, 'receiver')} did not answer; the next `stepscope fleet --alert` tries again")
    return 1 if counts.waiting or counts.given_up else 0


def _suspects(document: Mapping[str, Any]) -> Iterator[Suspect]:
    from stepscope.alerts.suspects import Suspect

    hosts = [{**row, "hosts": [row["host"]]} for row in document["hosts"] if row["suspect"]]
    for row in (*hosts, *document["links"]):
        node = row["kind"] != "slow_link"
        yield Suspect(
            kind=row["kind"],
            hosts=tuple(row["hosts"]),
            title=row["title"],
            phase=row.get("phase"),
            since_wall_ns=row.get("first_slow_wall_ns", 0),
            advice=SUSPECT_HOST if node else SUSPECT_LINK,
            cost=f"It cost {hours_text(row['gpu_hours_lost'])} GPU hours in these runs.",
        )


SUSPECT_HOST = (
    "Read the reports of its slow runs (`stepscope fleet --json` lists them), and check it with `stepscope probe`.",
    "Until then, `stepscope fleet exclude-list` keeps jobs away from it.",
)
SUSPECT_LINK = ("Check cables, ports and switches between the two hosts; neither is on the exclude list.",)


# -- text -------------------------------------------------------------------------------------------------------------


def _wrapped(section: str) -> str:
    """Sentences, not tables, are broken where the terminal ends."""
    width = _width()
    if width is None:
        return section
    lines = [
        textwrap.wrap(line, min(width, WIDEST), subsequent_indent="  ") if line[:1] in MARKS.values() else [line]
        for line in section.split("\n")
    ]
    return "\n".join(line for own in lines for line in own)


def _sections(document: Mapping[str, Any], by: str) -> list[str]:
    totals = document["totals"]
    counts = [count_text(totals["runs"], "run"), count_text(totals["jobs"], "job"), count_text(totals["hosts"], "host")]
    if totals["active_runs"]:
        counts.append(f"{totals['active_runs']:,} active")
    if totals["unread_runs"]:
        counts.append(f"{totals['unread_runs']:,} without hours")
    head = f"{totals['headline']}\n{' · '.join(counts)}{_period(document)}"
    hours = _causes(document) if by == "cause" else _over_time(document) if by == "time" else _groups(document, by)
    return [head, hours, *filter(None, (_hosts(document), _links(document), _changes(document), _events(document)))]


def _period(document: Mapping[str, Any]) -> str:
    if document["first_wall_ns"] is None:
        return ""
    return f" · {_day(document['first_wall_ns'])} to {_day(document['last_wall_ns'])}"


def _day(wall_ns: int) -> str:
    """In UTC, as the bars of the document and on the page."""
    return time.strftime("%Y-%m-%d", time.gmtime(wall_ns / 1e9))


def _width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _causes(document: Mapping[str, Any]) -> str:
    rows = [row for row in document["causes"] if row["gpu_hours"] >= LEAST_SHOWN]
    most = max((row["gpu_hours"] for row in rows), default=0.0)
    cells = [
        (row["name"], hours_text(row["gpu_hours"]), percent_text(row["share"]), bar(row["gpu_hours"] / most, BAR_CELLS))
        for row in rows
    ]
    return format_table(("cause", "GPU hours", "share", ""), cells, numeric=(1, 2), width=_width())


def _over_time(document: Mapping[str, Any]) -> str:
    table = document["over_time"]
    most = max((row["gpu_hours"] for row in table["rows"]), default=0.0) or 1.0
    cells = [(_day(row["begin_wall_ns"]), *_hours_cells(document, row, most)) for row in table["rows"]]
    heads = (table["unit"], "runs", "GPU hours", "useful", "", "most lost to")
    return format_table(heads, cells, numeric=(1, 2, 3), width=_width(), left_out=(4,), least=24)


def _groups(document: Mapping[str, Any], by: str) -> str:
    rows = document[BY[by]]
    most = max((row["gpu_hours"] for row in rows), default=0.0) or 1.0
    cells = [(row["name"], *_hours_cells(document, row, most)) for row in rows[:ROWS]]
    heads = (by, "runs", "GPU hours", "useful", "", "most lost to")
    table = format_table(heads, cells, numeric=(1, 2, 3), width=_width(), left_out=(4,), least=24)
    left = len(rows) - ROWS
    return f"{table}\n({left} more with --json)" if left > 0 else table


def _hours_cells(document: Mapping[str, Any], row: Mapping[str, Any], most: float) -> tuple[str, ...]:
    total, parts = row["gpu_hours"], row["by_cause"]
    names = {each["cause"]: each["name"] for each in document["causes"]}
    lost = sorted((cause for cause in parts if cause != "useful"), key=lambda cause: -parts[cause])
    causes = ", ".join(
        f"{names[cause]} {percent_text(parts[cause] / total)}" for cause in lost[:CAUSES_SHOWN] if parts[cause]
    )
    useful = percent_text(row["useful_share"])
    return f"{row['run_count']:,}", hours_text(total), useful, bar(total / most, BAR_CELLS // 2), causes


def _hosts(document: Mapping[str, Any]) -> str:
    suspects = [row for row in document["hosts"] if row["suspect"]]
    repaired = [row for row in document["hosts"] if row["repaired_wall_ns"]]
    if not suspects and not repaired:
        return "No host was the slow one more often than by chance."
    lines = []
    if suspects:
        heads = ("suspect", "slow runs", "by chance", "slower", "phase", "GPU hours", "confidence", "last")
        cells = [
            (
                row["host"],
                f"{row['slow_runs']:,} of {row['compared_runs']:,}",
                f"{row['expected_slow_runs']:,.1f}",
                percent_text(row["slowdown_share"]),
                row["phase"] or "–",
                hours_text(row["gpu_hours_lost"]),
                confidence_text(row["confidence"]),
                _day(row["last_slow_wall_ns"]),
            )
            for row in suspects
        ]
        lines = [format_table(heads, cells, numeric=(1, 2, 3, 5, 6), width=_width(), left_out=(6, 2), least=10), ""]
    lines += [f"▲ {row['title']}" for row in suspects[:5]]
    lines += [f"✔ Not slow any more since {_day(row['repaired_wall_ns'])}: {row['title']}" for row in repaired[:5]]
    return "\n".join(lines)


def _links(document: Mapping[str, Any]) -> str:
    return "\n".join(f"▲ {row['title']} Confidence {confidence_text(row['confidence'])}." for row in document["links"])


def _changes(document: Mapping[str, Any]) -> str:
    return "\n".join(f"{'▲' if row['direction'] == 'slower' else '✔'} {row['title']}" for row in document["changes"])


def _events(document: Mapping[str, Any]) -> str:
    lines = [f"▲ {row['title']} Last: {_day(row['last_wall_ns'])}." for row in document["gpu_events"][:ROWS]]
    left = len(document["gpu_events"]) - ROWS
    return "\n".join([*lines, *([f"({left} more with --json)"] if left > 0 else [])])
