"""``stepscope alerts``: check and try settings; show, acknowledge and silence incidents."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.arguments import RUNS_FOLDER, locate_run, run_path
from stepscope.cli.output import format_table
from stepscope.errors import NotARun, UsageError
from stepscope.records.text import count_text, did_you_mean, duration_text, printable, say

if TYPE_CHECKING:
    from stepscope.alerts.model import Incident, Message
    from stepscope.alerts.receivers.exchange import Destination
    from stepscope.alerts.requests import Silence
    from stepscope.alerts.settings import AlertSettings
    from stepscope.alerts.transport import Transport

__all__ = ["EPILOG", "HELP", "add_arguments", "run"]

HELP = "check and test alerts; list, acknowledge and silence incidents"
EPILOG = """\
examples:
  stepscope alerts check                             are the settings valid, and is every receiver reachable?
  stepscope alerts test --alert slack                send a test message, as a job with --alert slack would
  stepscope alerts list                              incidents and messages of all active runs
  stepscope alerts list night                        those of one run
  stepscope alerts ack night 2                       you know of incident 2 of the run night
  stepscope alerts silence --run night --for 2h --why "new loader"
  stepscope alerts silence --kind "*_straggler" --host node7 --until 18:00
  stepscope alerts silence --remove 3fa9c1d2
  stepscope alerts flush                             send what jobs in runs/ could not deliver before they ended

check exits with 1 if a receiver is not reachable, test if a message was not delivered; both with 2 if the settings have
a mistake.  docs/alerts.md explains settings, rules and receivers.
"""
ACTIONS = ("check", "test", "list", "silence", "ack", "flush")
_UNIT_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)")
MARKS = {True: "✓", False: "✗"}
TEST_TITLE = "This is a test of Stepscope's alerts. Nothing is wrong."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument(
        "words",
        metavar="RUN [N]",
        nargs="*",
        help="a run, and for ack the number of an incident; for flush a folder of runs",
    )
    parser.add_argument(
        "--alert",
        action="append",
        default=[],
        metavar="WORD",
        help="for check, test and flush: a word as of `stepscope run --alert`; may be repeated",
    )
    silences = parser.add_argument_group("silence")
    silences.add_argument("--run", dest="silenced_run", metavar="RUN", help="only this run, or runs by name (night-*)")
    silences.add_argument("--kind", metavar="KIND", help="only this kind of finding or measure, or a pattern")
    silences.add_argument("--host", metavar="HOST", help="only incidents on this host, or a pattern")
    silences.add_argument("--for", dest="duration", metavar="TIME", help="how long: 30m, 2h, 3d")
    silences.add_argument("--until", metavar="TIME", help='or until when: 18:00, 2026-11-20, "2026-11-20 08:00"')
    silences.add_argument("--why", metavar="TEXT", default="", help="the reason, for your colleagues")
    silences.add_argument("--remove", metavar="ID", help="end a silence; `stepscope alerts list` shows their IDs")
    parser.add_argument("--by", metavar="NAME", help="who acknowledges or silences (default: your user name)")
    parser.add_argument("--json", action="store_true", help="for list: print JSON")


def more_words(args: argparse.Namespace, words: list[str]) -> None:
    """The run and the number may also follow the options."""
    args.words += words


def run(args: argparse.Namespace) -> int:
    most = {"list": 1, "ack": 2, "flush": 1}.get(args.action, 0)
    if len(args.words) > most:
        raise UsageError(f"unknown argument: {args.words[most]} (see `stepscope alerts --help`)")
    actions = {"check": _check, "test": _test, "list": _list, "silence": _silence, "ack": _acknowledge, "flush": _flush}
    return actions[args.action](args)


# -- check and test ---------------------------------------------------------------------------------------------------


def _settings(args: argparse.Namespace) -> AlertSettings:
    from stepscope.alerts.settings_files import load_settings

    return load_settings(Path.cwd(), args.alert, os.environ)


def _check(args: argparse.Namespace) -> int:
    from stepscope.alerts.delivery import destination_of
    from stepscope.alerts.settings import describe
    from stepscope.alerts.transport import Transport

    settings = _settings(args)
    rows = describe(settings)
    for notice in settings.notices:
        print(printable(notice))
    print(printable(f"settings: {', '.join(settings.sources) or 'none; these are the defaults'}"))
    transport = Transport(os.environ)
    failed = False
    print("\nreceivers")
    if not settings.receivers:
        print("  none: nothing is sent; incidents are shown on the page.  Try --alert slack")
    for row, receiver in zip(rows["receivers"], settings.receivers.values(), strict=True):
        reachable, text = _reach(destination_of(receiver, os.environ), transport)
        failed = failed or not reachable
        print(printable(f"  {MARKS[reachable]} {row['name']}: {text}"))
        print(printable(f"      {row['what']} ({row['source']})"))
    print("\nrules")
    table = [[f"  {row['name']}", row["when"], row["to"] or "the page", row["source"]] for row in rows["rules"]]
    print(format_table(["  name", "when", "to", "from"], table))
    return 1 if failed else 0


def _reach(destination: Destination, transport: Transport) -> tuple[bool, str]:
    """Whether a receiver can be reached, without sending anything that anybody sees."""
    from stepscope.alerts.receivers import receiver_functions
    from stepscope.alerts.receivers.exchange import Delivered
    from stepscope.alerts.transport import NeverSent, NotSent

    if destination.type == "command":
        program = destination.options["command"][0]
        found = shutil.which(program) is not None
        return found, "the program exists" if found else f"{program} is not an executable program"
    if destination.type == "apprise":
        return _reach_apprise(destination.secrets["url"])
    functions = receiver_functions(destination.type)
    try:
        if functions.probe is None:
            transport.connect(functions.address(destination), destination)
            return True, "reachable; `stepscope alerts test` shows whether it accepts messages"
        exchange = functions.probe(destination)
        exchange.send(transport.carry_out(next(exchange), destination))
    except StopIteration as finished:
        if isinstance(finished.value, Delivered):
            return True, "reachable, and accepts us"
        return False, destination.without_secrets(finished.value.why)
    except (NotSent, NeverSent) as error:
        return False, f"not reachable: {error}"
    return False, "no answer"


def _reach_apprise(url: str) -> tuple[bool, str]:
    try:
        import apprise
    except ImportError:
        return False, "apprise is not installed; pip install 'stepscope[apprise]'"
    known = bool(apprise.Apprise().add(url))
    return known, "apprise knows this address" if known else "apprise does not know this kind of address"


def _test(args: argparse.Namespace) -> int:
    """Send a message and its end to every receiver, by the outbox and queue that a sender uses."""
    from stepscope.alerts.delivery import deliver_once, destinations_of
    from stepscope.alerts.outbox import append_messages, read_deliveries

    settings = _settings(args)
    if not settings.receivers:
        raise UsageError("no receiver is set; add one, such as --alert slack (docs/alerts.md)")
    destinations, _ = destinations_of(settings, os.environ)
    with tempfile.TemporaryDirectory(prefix="stepscope-test-") as folder:
        run_dir = Path(folder)
        append_messages(run_dir, [message for name in settings.receivers for message in _test_messages(name)])
        deliver_once(run_dir, destinations)
        answers: dict[str, list[tuple[str, str, str]]] = {}
        for message, delivery in read_deliveries(run_dir):
            answers.setdefault(message.receiver, []).append((message.status, delivery.state, delivery.why))
    failed = False
    for name, states in answers.items():
        problem = next((why for _, state, why in states if state != "sent" and why), "")
        delivered = all(state == "sent" for _, state, _ in states)
        failed = failed or not delivered
        text = "delivered a test message and its end" if delivered else f"not delivered: {problem or 'no answer'}"
        print(printable(f"{MARKS[delivered]} {name}: {text}"))
    return 1 if failed else 0


def _flush(args: argparse.Namespace) -> int:
    """Send what the senders of runs that are over left in their outboxes."""
    from stepscope.alerts.delivery import deliver_leftovers, destinations_of

    settings = _settings(args)
    if not settings.receivers:
        raise UsageError("no receiver is set; add the one that the job had, such as --alert slack (docs/alerts.md)")
    folder = Path(args.words[0]) if args.words else RUNS_FOLDER
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of runs")
    destinations, problems = destinations_of(settings, os.environ)
    for name, problem in problems.items():
        say(f"nothing is sent to {name}: {problem}")
    usable = [destination for destination in destinations if destination.name not in problems]
    counts = deliver_leftovers(folder.absolute(), usable, left_after_s=0.0)
    waiting = "; some could not be sent (see `stepscope alerts list RUN`)" if counts.waiting else ""
    if counts.with_sender:
        waiting += f"; left {count_text(counts.with_sender, 'run')} to their own senders, which still run"
    print(f"sent {count_text(counts.sent, 'message')}, gave up {counts.given_up}{waiting}")
    return 1 if counts.waiting or problems else 0


def _test_messages(receiver: str) -> Iterator[Message]:
    from stepscope.alerts.model import Incident, Message

    now_ns = time.time_ns()
    key = f"stepscope-test-{now_ns:x}"
    incident = Incident(
        number=1,
        topic="run",
        state="open",
        kind="test",
        severity="warning",
        title=TEST_TITLE,
        rules=("test",),
        since_wall_ns=now_ns,
        opened_wall_ns=now_ns,
        changed_wall_ns=now_ns,
        advice=("Nothing to do: someone ran `stepscope alerts test`.",),
        messages=1,
    )
    over = replace(incident, state="resolved", resolved_wall_ns=now_ns, resolved_why="the test is complete", messages=2)
    for number, (status, state) in enumerate((("firing", incident), ("resolved", over)), 1):
        yield Message(
            id=f"{key}/1/{number}/{receiver}",
            receiver=receiver,
            status="firing" if status == "firing" else "resolved",
            run="test",
            dedup_key=key,
            created_wall_ns=now_ns,
            incident=state,
        )


# -- list -------------------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    from stepscope.alerts.requests import user_silences

    runs = [locate_run(Path(args.words[0]))] if args.words else _active_runs()
    now_ns = time.time_ns()
    own = [silence for silence in user_silences(os.environ) if silence.until_wall_ns > now_ns]
    documents = [_run_document(run_dir) for run_dir in runs]
    if args.json:
        print(json.dumps({"runs": documents, "silences": [_silence_document(silence) for silence in own]}, indent=2))
        return 0
    if not runs:
        print(f"No active runs in {RUNS_FOLDER} or other folders of yours; name a run to see its incidents.")
    for document in documents:
        _print_run(document)
    if own:
        print("Silences for your runs:")
        for silence in own:
            print(f"  {_silence_text(silence)}")
    return 0


def _active_runs() -> list[Path]:
    """The active runs of this folder, and of all folders that the user records runs in."""
    from stepscope.store.catalog import is_active
    from stepscope.store.paths import META
    from stepscope.store.user_runs import known_folders

    folders = dict.fromkeys(folder.absolute() for folder in (RUNS_FOLDER, *known_folders(os.environ).values()))
    found: list[Path] = []
    for folder in folders:
        try:
            paths = sorted(path for path in folder.iterdir() if (path / META).is_file())
        except OSError:
            continue
        found += [path for path in paths if is_active(path)]
    return found


def _run_document(run_dir: Path) -> dict[str, Any]:
    from stepscope.alerts.incident_file import read_incidents
    from stepscope.alerts.outbox import read_deliveries
    from stepscope.alerts.requests import run_silences
    from stepscope.records.dataclass_json import encoded
    from stepscope.store.catalog import is_active
    from stepscope.store.paths import META

    if not (run_dir / META).is_file():
        raise NotARun(f"{run_dir} is not a run")
    messages: dict[int, list[dict[str, Any]]] = {}
    for message, delivery in read_deliveries(run_dir):
        row: dict[str, Any] = {"receiver": message.receiver, "status": message.status, "state": delivery.state}
        row |= {"tries": delivery.tries, "wall_ns": delivery.wall_ns, "why": delivery.why}
        messages.setdefault(message.incident.number, []).append(row)
    rows = [{**encoded(incident), "sent": messages.get(incident.number, [])} for incident in read_incidents(run_dir)]
    ahead_ns = _ahead_ns(run_dir)
    now_ns = time.time_ns() + ahead_ns
    silences = [silence for silence in run_silences(run_dir) if silence.until_wall_ns > now_ns]
    return {
        "run": run_dir.name,
        "path": str(run_dir),
        "active": is_active(run_dir),
        "incidents": rows,
        "silences": [_silence_document(silence) for silence in silences],
        "silence_texts": [_silence_text(silence, ahead_ns) for silence in silences],
    }


def _print_run(document: Mapping[str, Any]) -> None:
    from stepscope.incidents.builder import incident_state_text

    rows = document["incidents"]
    print(printable(f"{document['run']}: {count_text(len(rows), 'incident') if rows else 'no incidents'}"))
    for row in rows:
        state = incident_state_text(row["state"], row["acknowledged_by"], over=not document["active"])
        print(printable(f"  {row['number']}  {state}, {row['severity']}, since {_time_text(row['since_wall_ns'])}"))
        print(printable(f"     {row['title']}"))
        for sent in row["sent"]:
            print(printable(f"     {_delivery_text(sent)}"))
        if not row["sent"]:
            print("     nothing was sent: no receiver, or silenced")
    for text in document["silence_texts"]:
        print(f"  silence {text}")


def _delivery_text(sent: Mapping[str, Any]) -> str:
    """``slack: firing, sent 14:03:22``."""
    tries = f"{sent['tries']} {'try' if sent['tries'] == 1 else 'tries'}"
    states = {
        "waiting": "waiting",
        "sending": "being sent",
        "sent": f"sent {_time_text(sent['wall_ns'])}",
        "failed": f"failed after {tries} and will be tried again: {sent['why']}",
        "given_up": f"given up: {sent['why']}",
    }
    return f"{sent['receiver']}: {sent['status']}, {states[sent['state']]}"


def _silence_document(silence: Silence) -> dict[str, Any]:
    from stepscope.records.dataclass_json import encoded

    document: dict[str, Any] = encoded(silence)
    return document


def _silence_text(silence: Silence, ahead_ns: int = 0) -> str:
    """``ahead_ns``: how far the clock of its times is ahead of the time of day."""
    parts = [f"{name} {value}" for name in ("run", "kind", "host") if (value := getattr(silence, name))]
    of = " and ".join(parts) or "everything"
    by = f" (by {silence.by})" if silence.by else ""
    why = f": {silence.why}" if silence.why else ""
    return printable(f"{silence.id}  {of}, until {_time_text(silence.until_wall_ns - ahead_ns)}{by}{why}")


def _time_text(wall_ns: int) -> str:
    """Today only the time of day."""
    if not 0 < wall_ns < 1 << 62:
        return "?"
    when = time.localtime(wall_ns / 1e9)
    today = when[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", when)


# -- silence and ack --------------------------------------------------------------------------------------------------


def _silence(args: argparse.Namespace) -> int:
    from stepscope.alerts.requests import Silence, add_silence, add_user_silence

    if args.remove:
        return _remove_silence(args)
    now_ns = time.time_ns()
    silence = Silence(
        id="",
        until_wall_ns=_until_ns(args.duration, args.until, now_ns),
        kind=_checked_kind(args.kind) if args.kind else "",
        host=args.host or "",
        why=args.why,
        by=_user(args),
    )
    run_dir = _silenced_run(args.silenced_run)
    if run_dir is not None:
        ahead_ns = _ahead_ns(run_dir)
        until_ns = silence.until_wall_ns + ahead_ns
        silence = add_silence(run_dir, replace(silence, until_wall_ns=until_ns), wall_ns=now_ns + ahead_ns)
        print(f"silenced in {run_dir.name}: {_silence_text(silence, ahead_ns)}")
        return 0
    silence = add_user_silence(os.environ, replace(silence, run=args.silenced_run or ""), wall_ns=now_ns)
    print(f"silenced: {_silence_text(silence)}")
    return 0


def _silenced_run(text: str | None) -> Path | None:
    """The run directory; None for all runs, or for a pattern of names."""
    if not text or any(sign in text for sign in "*?["):
        return None
    return run_path(Path(text))


def _ahead_ns(run_dir: Path) -> int:
    """How far a run's clock is ahead of the time of day, which was set since the run began."""
    from stepscope.records.run_clock import now_of
    from stepscope.store.documents import read_meta

    return now_of(read_meta(run_dir)) - time.time_ns()


def _remove_silence(args: argparse.Namespace) -> int:
    from stepscope.alerts.requests import end_silence, end_user_silence

    if not re.fullmatch(r"[0-9a-f]{1,32}", args.remove):
        raise UsageError("--remove takes the ID of a silence, such as 3fa9c1d2; `stepscope alerts list` shows them")
    named = _silenced_run(args.silenced_run)
    runs = [named] if named is not None else _active_runs()
    if end_user_silence(os.environ, args.remove):
        print(f"removed the silence {args.remove}")
        return 0
    for run_dir in runs:
        if end_silence(run_dir, args.remove, by=_user(args), wall_ns=time.time_ns() + _ahead_ns(run_dir)):
            print(f"removed the silence {args.remove} of {run_dir.name}")
            return 0
    raise UsageError(f"there is no silence {args.remove}; name the run with --run if it is over")


def _acknowledge(args: argparse.Namespace) -> int:
    from stepscope.alerts.incident_file import read_incidents
    from stepscope.alerts.requests import acknowledge
    from stepscope.store.catalog import is_active

    run_dir = locate_run(Path(args.words[0]) if args.words else None, prefer_live=True)
    incidents = {incident.number: incident for incident in read_incidents(run_dir)}
    if len(args.words) > 1:
        wanted = _number_in(args.words[1], incidents, run_dir)
    else:
        wanted = [number for number, incident in incidents.items() if incident.state == "open"]
        if not wanted:
            print(printable(f"{run_dir.name} has no open incident to acknowledge"))
            return 0
    if not is_active(run_dir):
        print(printable(f"{run_dir.name} is over: nothing more is sent about its incidents, and they stay as they are"))
        return 0
    acknowledge(run_dir, wanted, by=_user(args), wall_ns=time.time_ns() + _ahead_ns(run_dir))
    for number in wanted:
        print(printable(f"acknowledged incident {number} of {run_dir.name}: {incidents[number].title}"))
    return 0


def _number_in(text: str, incidents: Mapping[int, Incident], run_dir: Path) -> list[int]:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if number not in incidents:
        known = ", ".join(map(str, list(incidents)[:20])) or "none"
        raise UsageError(f"{run_dir.name} has no incident {text}; there are: {known}")
    if incidents[number].state == "resolved":
        say(f"incident {number} is over")
    return [number]


def _checked_kind(kind: str) -> str:
    from fnmatch import fnmatchcase

    from stepscope.alerts.settings import MEASURES
    from stepscope.reports.finding_text import KINDS

    known: Sequence[str] = [*KINDS, *MEASURES]
    if not any(fnmatchcase(name, kind) for name in known):
        raise UsageError(f"--kind: there is no kind of finding or measure {kind!r}{did_you_mean(kind, known)}")
    return kind


def _until_ns(duration: str | None, until: str | None, now_ns: int) -> int:
    if (duration is None) == (until is None):
        raise UsageError("a silence needs --for or --until")
    if duration is not None:
        found = _TIME.fullmatch(duration.strip())
        if found is None or len(found[1]) > 9:
            raise UsageError(f"--for: must be a time such as 30m, 2h or 3d, not {duration!r}")
        return now_ns + int(float(found[1]) * _UNIT_SECONDS[found[2]] * 1e9)
    now = datetime.fromtimestamp(now_ns / 1e9)
    for form in ("%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d"):
        try:
            when = datetime.strptime((until or "").strip(), form)
        except ValueError:
            continue
        if form == "%H:%M":
            when = when.replace(year=now.year, month=now.month, day=now.day)
        if when.timestamp() * 1e9 <= now_ns:
            ago = duration_text(now_ns / 1e9 - when.timestamp(), whole=True)
            raise UsageError(f"--until: {until} was {ago} ago")
        return int(when.timestamp() * 1e9)
    raise UsageError(f'--until: must be a time such as 18:00 or "2026-11-20 08:00", not {until!r}')


def _user(args: argparse.Namespace) -> str:
    from stepscope.alerts.requests import user_name

    return args.by or user_name(os.environ)
