"""Read and check what the user set about alerts, before a job starts.

    ~/.config/stepscope/config.toml    the user's own file
    stepscope.toml                     the project's: the nearest one up to the root of the git repository
    STEPSCOPE_ALERT                    words, separated by blanks
    run --alert WORD                   more words

A rule or receiver of a later source replaces one of the same name.  A mistake is a ``UsageError`` of one line,
``stepscope.toml:12: …``, without any value that could be a secret.

The files have more tables than ``[alerts]``: ``load_tables`` reads the others.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import stat
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn, get_args
from urllib.parse import urlsplit

from stepscope.alerts.settings import (
    DEFAULT_RULES,
    MEASURES,
    RECEIVERS,
    AlertSettings,
    Parameter,
    Receiver,
    ReceiverKind,
    ReceiverType,
    Rule,
    Secret,
    plain_number,
)
from stepscope.alerts.settings_places import HOME_S, PROJECT_FILE, find_project_file, user_file
from stepscope.alerts.toml_lines import KeyPath, TomlError, key_lines, parse_toml
from stepscope.errors import UsageError
from stepscope.records.files import open_file
from stepscope.records.finding import SEVERITIES, Severity
from stepscope.records.paths import ENV_ALERT
from stepscope.records.redaction import redact_command, redact_text
from stepscope.records.text import did_you_mean, duration_text, numbered, printable
from stepscope.reports.finding_text import KINDS

__all__ = ["SettingsTable", "holds_address", "load_settings", "load_tables"]

LARGEST_BYTES = 64 << 10
"""Of a settings file: all of it must fit into one variable of an environment (128 KiB)."""
OTHER_TABLES = ("export", "archive", "hub")
"""Which other packages read."""
MOST_RULES = 100
MOST_RECEIVERS = 30


# -- where settings are -----------------------------------------------------------------------------------------------


def load_settings(project_dir: Path, alert_words: Sequence[str], environ: Mapping[str, str]) -> AlertSettings:
    """Read and check all settings of a run that starts in ``project_dir``; UsageError for the first mistake."""
    loader = _Loader(environ)
    files, notices = _settings_files(project_dir, environ, "alerts")
    loader.notices += notices
    for file in files:
        loader.read(file)
    loader.read_words(_split_words(environ.get(ENV_ALERT, "")), ENV_ALERT)
    loader.read_words(alert_words, "--alert")
    return loader.settings()


def load_tables(name: str, project_dir: Path, environ: Mapping[str, str]) -> tuple[list[SettingsTable], list[str]]:
    """Return a table of the settings files, the user's own first, and notices; UsageError if a file is damaged."""
    files, notices = _settings_files(project_dir, environ, f"[{name}]")
    return [SettingsTable(file, (name,), file.document[name]) for file in files if name in file.document], notices


def _settings_files(project_dir: Path, environ: Mapping[str, str], what: str) -> tuple[list[_File], list[str]]:
    """Return the user's own file and the project's, and notices; ``what`` is read from them."""
    files, notices = [], []
    own = user_file(environ)
    if (text := _text_in_time(own)) is None:
        notices.append(f"{_shown(own, project_dir, environ)} cannot be read in time; its {what} are not used")
    elif text:
        files.append(_File(own, text, private=True, shown=_shown(own, project_dir, environ)))
    if (project := find_project_file(project_dir)) is not None and not _same(project, own):
        shown = _shown(project, project_dir, environ)
        if _is_foreign(project):
            notices.append(f"{shown} belongs to another user; its {what} are not used")
        else:
            files.append(_File(project, _text_of(project, shown), private=False, shown=shown))
    return files, notices


def _text_in_time(path: Path) -> str | None:
    """The text of the user's file; empty without a file; None if its file system does not respond."""
    found: list[str] = []
    mistakes: list[UsageError] = []

    def read() -> None:
        try:
            found.append(_text_of(path, str(path)) if path.exists() else "")
        except UsageError as error:
            mistakes.append(error)
        except OSError:  # a home directory that may not be entered
            found.append("")

    thread = threading.Thread(target=read, name="user-settings", daemon=True)
    thread.start()
    thread.join(HOME_S)
    if mistakes:
        raise mistakes[0]
    return found[0] if found else None


def _text_of(path: Path, shown: str) -> str:
    try:
        with open_file(path, links=True) as file:
            data = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror or type(error).__name__}") from None
    if len(data) > LARGEST_BYTES:
        raise UsageError(f"{shown} is larger than {LARGEST_BYTES >> 10} KiB")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{shown}:{line}: not UTF-8") from None


def _is_foreign(path: Path) -> bool:
    """Whether the file is from, or could be changed by, a user who owns neither this folder nor this process."""
    try:
        about, folder = path.stat(), path.parent.stat()
    except OSError:
        return False
    return about.st_uid not in (os.getuid(), 0, folder.st_uid) or bool(about.st_mode & stat.S_IWOTH)


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _shown(path: Path, folder: Path, environ: Mapping[str, str]) -> str:
    """The path as the user would write it."""
    if path.name == PROJECT_FILE:
        return os.path.relpath(path, folder)
    home = environ.get("HOME")
    return f"~/{path.relative_to(home)}" if home and path.is_relative_to(home) else str(path)


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise UsageError(f"{ENV_ALERT}: a quotation mark is not closed") from None


# -- reading ----------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min|h|d)?")
_UNIT_SECONDS = {"ms": 1e-3, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_INLINE = re.compile(r"([A-Za-z_*?]+)\s*(?:(<|>|=|>=|<=)\s*(.+))?")
_LONGEST_SECONDS = 365 * 86_400.0
_IMPLIED = ("slack", "slack_bot", "pagerduty", "alertmanager", "webhook", "apprise")
"""Types that are receivers without being defined: what they need is in the environment."""
_BELOW = {name.removesuffix("_below"): name for name, about in MEASURES.items() if about.below}


class _File:
    """A settings file, and how mistakes in it are reported."""

    def __init__(self, path: Path, text: str, *, private: bool, shown: str) -> None:
        self.path = path
        self.private = private
        """The user's own: may contain secrets if nobody else can read it."""
        self.shown = shown
        try:
            self.document = parse_toml(text)
        except TomlError as error:
            raise UsageError(f"{shown}:{error.line}: {error}") from None
        self._lines = key_lines(text)

    def source(self, path: KeyPath) -> str:
        while path and path not in self._lines:
            path = path[:-1]
        return f"{self.shown}:{self._lines.get(path, 1)}"

    def fail(self, path: KeyPath, text: str) -> NoReturn:
        raise UsageError(f"{self.source(path)}: {printable(text)}")


class SettingsTable:
    """A table of a settings file: values by key with their types checked; ``close`` reports keys that are not known."""

    def __init__(self, file: _File, path: KeyPath, values: Any) -> None:
        if not isinstance(values, dict):
            file.fail(path, f"{path[-1]} must be a table, not {_type_text(values)}")
        self.file = file
        self.path = path
        self.values: dict[str, Any] = values
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self.values

    @property
    def source(self) -> str:
        return self.file.source(self.path)

    def fail(self, key: str, text: str) -> NoReturn:
        self.file.fail((*self.path, key) if key else self.path, text)

    def take(self, key: str) -> Any:
        """The value, or None; the key is known from now on."""
        self._known.append(key)
        return self.values.get(key)

    def close(self) -> None:
        for key in self.values:
            if key not in self._known:
                known = did_you_mean(key, self._known) or f"; known: {', '.join(sorted(self._known))}"
                self.fail(key, f"unknown key {_shown_value(key)}{known}")

    def text(self, key: str, default: str = "") -> str:
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value.strip():
            self.fail(key, f"{key} must be a text, not {_type_text(value)}")
        return value.strip()

    def address(self, key: str) -> str:
        """An address of HTTP without a secret; empty if it is missing."""
        address = self.text(key)
        if address and (_address_problem(address) or _has_secret(address)):
            self.fail(key, f"{key} must be an address such as https://hub.example, without a token")
        return address.rstrip("/")

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            self.fail(key, f"{key} must be true or false, not {_type_text(value)}")
        return default if value is None else value

    def severity(self, key: str) -> Severity | None:
        value = self.take(key)
        if value is None:
            return None
        if value not in SEVERITIES:
            known = f"{key} must be {', '.join(SEVERITIES[:-1])} or {SEVERITIES[-1]}, not {_shown_value(value)}"
            self.fail(key, known + (did_you_mean(value, SEVERITIES) if isinstance(value, str) else ""))
        return value  # type: ignore[no-any-return]

    def seconds(self, key: str, default: float, *, least: float = 0.0) -> float:
        value = self.take(key)
        if value is None:
            return default
        seconds = _seconds(value)
        if seconds is None or not least <= seconds <= _LONGEST_SECONDS:
            more = "" if not least else f" of {duration_text(least)} or more"
            self.fail(key, f'{key} must be a time{more} such as 30 (seconds), "5m" or "2h", not {_shown_value(value)}')
        return seconds

    def share(self, key: str) -> float:
        value = self.take(key)
        if value is None:
            return 0.0
        share = _share(value)
        if share is None:
            self.fail(key, f'{key} must be a share such as "10%" or 0.1, not {_shown_value(value)}')
        return share

    def names(self, key: str) -> tuple[str, ...] | None:
        """A text, or an array of texts."""
        value = self.take(key)
        if value is None:
            return None
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            self.fail(key, f"{key} must be a name or an array of names, not {_type_text(value)}")
        return tuple(dict.fromkeys(texts))


class _Loader:
    """Gathers rules and receivers in the order of their sources; later ones replace earlier ones of the same name."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._rules: dict[str, Rule] = {rule.name: rule for rule in DEFAULT_RULES}
        self._places: list[tuple[str, str]] = []
        """Mentions of receivers, which are checked when all of them are defined: the name, and where it is written."""
        self._receivers: dict[str, Receiver] = {}
        self._everywhere: list[str] = []
        """Names of the receivers of rules that name none."""
        self._values: dict[str, Any] = {}
        self._sources: list[str] = []
        self._off = False
        self.notices: list[str] = []

    # -- files --

    def read(self, file: _File) -> None:
        self._sources.append(file.shown)
        top = SettingsTable(file, (), file.document)
        for other in OTHER_TABLES:
            top.take(other)
        if (alerts := top.take("alerts")) is not None:
            self._read_alerts(SettingsTable(file, ("alerts",), alerts))
        top.close()

    def _read_alerts(self, table: SettingsTable) -> None:
        defined = self._read_receivers(table)
        names = table.names("send_to")
        self._everywhere += defined if names is None else names
        self._mention(names or (), table, "send_to")
        self._read_defaults(table)
        for key, (name, least) in _TIMES.items():
            seconds = table.seconds(key, -1.0, least=least)
            if seconds >= 0:
                self._values[name] = seconds
        if (limit := table.take("messages_per_hour")) is not None:
            if type(limit) is not int or not 1 <= limit <= 10_000:
                table.fail("messages_per_hour", "messages_per_hour must be a whole number from 1 to 10000")
            self._values["messages_per_hour"] = limit
        if link := table.address("link"):
            self._values["link"] = link
        rules = table.take("rules")
        if rules is not None and not isinstance(rules, list):
            table.fail("rules", f"rules must be written as [[alerts.rules]], not as {_type_text(rules)}")
        if len(rules or ()) > MOST_RULES:
            table.fail("rules", f"more than {MOST_RULES} rules")
        names_here: set[str] = set()
        for place, values in enumerate(rules or ()):
            self._read_rule(SettingsTable(table.file, (*table.path, "rules", place), values), names_here)
        table.close()

    def _read_defaults(self, table: SettingsTable) -> None:
        """``defaults = false``: none of our own rules; an array: only these."""
        wanted: tuple[str, ...] | None
        value = table.values.get("defaults")
        if value is None or isinstance(value, bool):
            wanted = () if not table.flag("defaults", default=True) else None
        else:
            wanted = table.names("defaults") or ()
            known = [rule.name for rule in DEFAULT_RULES]
            for name in wanted:
                if name not in known:
                    hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
                    table.fail("defaults", f"there is no default rule {_shown_value(name)}{hint}")
        if wanted is not None:
            self._rules = {
                name: rule for name, rule in self._rules.items() if rule.source != "default" or name in wanted
            }

    def _mention(self, names: Iterable[str], table: SettingsTable, key: str) -> None:
        self._places += [(name, table.file.source((*table.path, key))) for name in names]

    # -- rules --

    def _read_rule(self, table: SettingsTable, names_here: set[str]) -> None:
        findings, measure = table.names("findings"), table.text("measure")
        if (findings is None) == (not measure):
            table.fail("", "a rule needs either findings or measure")
        rule = self._measure_rule(table, measure) if findings is None else self._finding_rule(table, findings)
        receivers = table.names("send_to") or ()
        self._mention(receivers, table, "send_to")
        name = table.text("name")
        if name and not _NAME.fullmatch(name):
            table.fail("name", f"{_shown_value(name)} is not a name: letters, digits, _ . -")
        if name and name in names_here:
            table.fail("name", f"there are two rules with the name {_shown_value(name)}")
        name = name or next(free for free in numbered(rule.name) if free not in names_here)
        names_here.add(name)
        defaults = {key: each.measure for key, each in self._rules.items() if each.source == "default"}
        same = [key for key, measure in defaults.items() if measure and measure == rule.measure]
        for key in (name, *same):
            self._rules.pop(key, None)  # what replaces a rule also takes the later place
        self._rules[name] = replace(rule, name=name, receivers=receivers, source=table.source)
        table.close()

    def _finding_rule(self, table: SettingsTable, findings: tuple[str, ...]) -> Rule:
        kinds: list[str] = []
        for pattern in findings:
            matched = _kinds_like(pattern)
            if not matched:
                table.fail("findings", _unknown_kind(pattern))
            kinds += matched
        every = len(set(kinds)) == len(_ALL_KINDS)
        for key in MEASURE_KEYS:
            if key in table:
                table.fail(key, f"{key} belongs to a rule on a measure, not to one on findings")
        return Rule(
            name="findings" if every else "+".join(findings)[:64],
            on="findings",
            kinds=() if every else tuple(dict.fromkeys(kinds)),
            severity=table.severity("severity") or "warning",
            cost_share=table.share("cost"),
            for_seconds=table.seconds("for", 0.0),
            send_as=table.severity("send_as"),
        )

    def _measure_rule(self, table: SettingsTable, measure: str) -> Rule:
        about = MEASURES.get(measure)
        if about is None:
            hint = did_you_mean(measure, MEASURES) or f"; known: {', '.join(MEASURES)}"
            table.fail("measure", f"there is no measure {_shown_value(measure)}{hint}")
        for key in ("severity", "cost"):
            if key in table:
                other = "; the severity of what is sent is send_as" if key == "severity" else ""
                table.fail(key, f"{key} belongs to a rule on findings{other}")
        found: dict[str, float] = {}
        for key, parameter in about.parameters.items():
            value = table.take(key)
            if value is not None:
                try:
                    found[key] = _parameter(key, parameter, value)
                except ValueError as error:
                    table.fail(key, str(error))
        try:
            parameters = _with_defaults(measure, found)
        except ValueError as error:
            table.fail("", str(error))
        return Rule(
            name=measure,
            on="measure",
            measure=measure,
            parameters=parameters,
            for_seconds=table.seconds("for", about.for_seconds),
            send_as=table.severity("send_as") or about.severity,
        )

    # -- receivers --

    def _read_receivers(self, alerts: SettingsTable) -> list[str]:
        """Define the receivers of a file; return their names."""
        values = alerts.take("receivers")
        if values is None:
            return []
        table = SettingsTable(alerts.file, (*alerts.path, "receivers"), values)
        if len(table.values) > MOST_RECEIVERS:
            alerts.fail("receivers", f"more than {MOST_RECEIVERS} receivers")
        for name, inner in table.values.items():
            if not _NAME.fullmatch(name) or name in MEASURES or name in KINDS or name == OFF:
                table.fail(name, f"a receiver cannot have the name {_shown_value(name)}")
            self._receivers[name] = self._receiver(name, SettingsTable(table.file, (*table.path, name), inner))
        return list(table.values)

    def _receiver(self, name: str, table: SettingsTable) -> Receiver:
        kind = table.text("type") or (name if name in RECEIVERS else "")
        if kind not in RECEIVERS:
            known = f"type must be one of {', '.join(RECEIVERS)}"
            table.fail("type", f"{known}, not {_shown_value(kind)}{did_you_mean(kind, RECEIVERS)}" if kind else known)
        about = RECEIVERS[kind]
        options: dict[str, Any] = {}
        for key, value_type in about.options.items():
            value = _option(table, key, value_type)
            if value is not None:
                options[key] = value
        secrets = {key: secret for key in about.secrets if (secret := self._secret(table, key, about)) is not None}
        receiver = Receiver(
            name=name,
            type=kind,
            options=options,
            secrets=secrets,
            severity=table.severity("severity") or "info",
            updates=table.flag("updates", default=True),
            resolved=table.flag("resolved", default=True),
            timeout_seconds=table.seconds("timeout", 10.0, least=0.1),
            source=table.source,
        )
        table.close()
        return receiver

    def _secret(self, table: SettingsTable, key: str, about: ReceiverKind) -> Secret | None:
        """``{ env = "NAME" }``, ``{ file = "PATH" }``, or the secret itself, where only the user can read it."""
        value = table.take(key)
        if value is None:
            return None
        variable = about.secrets[key]
        if isinstance(value, str):
            self._check_given(table, key, value, variable)
            return Secret("value", value.strip())
        if not isinstance(value, dict) or len(value) != 1 or not isinstance(next(iter(value.values())), str):
            table.fail(key, f'{key} must be {{ env = "NAME" }} or {{ file = "PATH" }}, such as env = "{variable}"')
        ((where, text),) = value.items()
        if where == "env" and _VARIABLE.fullmatch(text):
            return Secret("env", text)
        if where != "file" or not text:
            table.file.fail((*table.path, key, where), f'{key} must be {{ env = "NAME" }} or {{ file = "PATH" }}')
        home = self._environ.get("HOME") or "~"
        place = Path(home + text[1:]) if text.startswith("~/") else Path(text)
        return Secret("file", str(table.file.path.parent.absolute() / place))

    def _check_given(self, table: SettingsTable, key: str, value: str, variable: str) -> None:
        """A secret may only be in the user's own file, if nobody else can read it."""
        if key == "url" and table.values.get("type", table.path[-1]) in ("webhook", "alertmanager"):
            if problem := _address_problem(value):
                table.fail(key, f"{key} {problem}")
            if not _has_secret(value):
                return
        instead = f'write {key} = {{ env = "{variable}" }}, or {key} = {{ file = "PATH" }} with mode 0600'
        if not table.file.private:
            table.fail(key, f"{key} is a secret, which does not belong into the file of a project; {instead}")
        try:
            about = table.file.path.stat()
        except OSError:
            return
        if about.st_mode & 0o077:
            fix = f"run `chmod 600 {table.file.shown}`"
            table.fail(key, f"{key} is a secret, but others can read this file; {fix}, or {instead}")

    # -- words of --alert --

    def read_words(self, words: Sequence[str], source: str) -> None:
        if words:
            self._sources.append(source)
        for word in words:
            self._read_word(word.strip(), source)

    def _read_word(self, word: str, source: str) -> None:
        name, equals, value = word.partition("=")
        if word == OFF:
            self._off = True
        elif word in self._receivers or word in _IMPLIED:
            self._everywhere.append(word)
            self._places.append((word, source))
        elif "://" in name:
            self._add_address(word, source)
        elif equals and name in RECEIVERS:
            self._add_receiver(name, value, source)
        elif (rule := _inline_rule(word, source)) is not None:
            self._rules.pop(rule.name, None)
            self._rules[rule.name] = rule
        else:
            known = [*self._receivers, *_IMPLIED, *MEASURES, *KINDS]
            what = "a receiver, an address, a measure or a kind of finding"
            raise UsageError(f"{source}: {_shown_value(name)} is not {what}{did_you_mean(name, known)}")

    def _add_address(self, address: str, source: str) -> None:
        scheme, _, rest = address.partition("://")
        kind: ReceiverType = "webhook" if scheme in ("http", "https") else "apprise"
        if kind == "webhook" and rest.partition("/")[0] == "hooks.slack.com":
            kind = "slack"
        self._add_receiver(kind, address, source)

    def _add_receiver(self, kind: str, value: str, source: str) -> None:
        """``TYPE=VALUE``."""
        options: dict[str, Any] = {}
        secrets: dict[str, Secret] = {}
        if not value:
            raise UsageError(f"{source}: {kind}= needs a value")
        if kind == "command":
            options["command"] = _command_words(value, f"{source}: command")
        elif kind == "slack_bot":
            options["channel"] = value
        elif kind == "pagerduty":
            if source != ENV_ALERT:
                variable = RECEIVERS["pagerduty"].secrets["routing_key"]
                raise UsageError(
                    f"{source}: a key on the command line can be read by every user of this machine; "
                    f"set {variable}, and write {source} pagerduty"
                )
            secrets["routing_key"] = Secret("value", value)
        else:
            if problem := _address_problem(value, web=kind != "apprise"):
                raise UsageError(f"{source}: the address of {kind} {problem}")
            secrets["url"] = Secret("value", value)
        name = next(free for free in numbered(kind) if free not in self._receivers)
        self._receivers[name] = Receiver(
            name=name, type=_receiver_type(kind), options=options, secrets=secrets, source=source
        )
        self._everywhere.append(name)

    # -- the result --

    def settings(self) -> AlertSettings:
        everywhere = tuple(dict.fromkeys(self._everywhere))
        for name, place in self._places:
            self._define(name, place)
        rules = [rule if rule.receivers else replace(rule, receivers=everywhere) for rule in self._rules.values()]
        if self._off:
            rules = [replace(rule, receivers=()) for rule in rules]
        used = dict.fromkeys(name for rule in rules for name in rule.receivers)
        receivers = {name: self._complete(self._receivers[name]) for name in used}
        if not receivers and not self._off:
            self._refuse_unsent(rules)
        return AlertSettings(
            rules=tuple(rules),
            receivers=receivers,
            sources=tuple(self._sources),
            notices=tuple(self.notices),
            **self._values,
        )

    def _refuse_unsent(self, rules: Iterable[Rule]) -> None:
        """Refuse a rule on the command line that has no receiver; for one in a file, the page shows that."""
        for rule in rules:
            if rule.source in ("--alert", ENV_ALERT):
                raise UsageError(
                    f"{rule.source}: {rule.name} has no receiver; add one, such as --alert slack (docs/alerts.md)"
                )

    def _define(self, name: str, place: str) -> None:
        if name in self._receivers:
            return
        if name not in _IMPLIED:
            known = [*self._receivers, *_IMPLIED]
            hint = did_you_mean(name, known) or (f"; known: {', '.join(self._receivers)}" if self._receivers else "")
            raise UsageError(f"{place}: there is no receiver {_shown_value(name)}{hint}")
        self._receivers[name] = Receiver(name=name, type=_receiver_type(name), source=place)

    def _complete(self, receiver: Receiver) -> Receiver:
        """Add what the environment has; UsageError if something is missing or cannot be right."""
        about = RECEIVERS[receiver.type]
        secrets, options = dict(receiver.secrets), dict(receiver.options)
        for key, variable in about.secrets.items():
            if key not in secrets and self._environ.get(variable, "").strip():
                secrets[key] = Secret("env", variable)
        if "channel" in about.options and (channel := self._environ.get("SLACK_CHANNEL")):
            options.setdefault("channel", channel)
        where = f"{receiver.source}: receiver {receiver.name}"
        for key in about.needed:
            if key in secrets or key in options:
                continue
            raise UsageError(f"{where}: {self._how_to_set(receiver, key)}")
        for key, secret in secrets.items():
            try:
                text = secret.reveal(self._environ)
            except UsageError as error:
                raise UsageError(f"{where}: {error} (--alert {OFF} runs without alerts)") from None
            if key == "url" and (problem := _address_problem(text, web=receiver.type != "apprise")):
                raise UsageError(f"{where}: the address ({secret.place}) {problem}")
            if not text.isprintable() or " " in text:
                raise UsageError(f"{where}: {key} ({secret.place}) contains blanks or control characters")
        return replace(receiver, secrets=secrets, options=options)

    def _how_to_set(self, receiver: Receiver, key: str) -> str:
        about = RECEIVERS[receiver.type]
        if key == "channel":
            return "needs the channel: set SLACK_CHANNEL, or write --alert slack_bot=#CHANNEL"
        if key not in about.secrets:
            return f"needs {key}: {about.hint}"
        if receiver.type == "slack" and self._environ.get("SLACK_BOT_TOKEN"):
            return f"needs the environment variable {about.secrets[key]}; with SLACK_BOT_TOKEN, use slack_bot instead"
        return f"needs the environment variable {about.secrets[key]} ({about.hint})"


# -- values -----------------------------------------------------------------------------------------------------------

OFF = "off"
"""The word of ``--alert`` that sends nothing, whatever the files say."""
_TIMES = {
    "group": ("group_seconds", 0.0),
    "resolve_after": ("resolve_seconds", 0.0),
    "update_every": ("update_seconds", 1.0),
    "repeat_every": ("repeat_seconds", 60.0),
}
"""By key of ``[alerts]``: the field, and its least value."""
MEASURE_KEYS = tuple(dict.fromkeys(key for about in MEASURES.values() for key in about.parameters))
_ALL_KINDS = tuple(kind for kind in KINDS if kind not in ("healthy", "insufficient_data", "compute_bound"))
"""Kinds that can be a problem."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_HOSTS = re.compile(
    r"hooks\.slack\.com|(?:.*\.)?discord(?:app)?\.com|(?:.*\.)?webhook\.office\.com|(?:.*\.)?logic\.azure\.com"
    r"|(?:.*\.)?powerplatform\.com|chat\.googleapis\.com|hooks\.zapier\.com|(?:.*\.)?ifttt\.com|api\.telegram\.org"
)
"""Services whose addresses contain a token."""
_TOKEN_PART = re.compile(r"(?=[^/]*\d)(?=[^/]*[A-Za-z])[\w-]{20,}")


def _has_secret(address: str) -> bool:
    """Whether an address seems to contain a password or token."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return True
    hidden = "@" in parts.netloc or bool(parts.query) or bool(parts.fragment)
    known = _SECRET_HOSTS.fullmatch((parts.hostname or "").lower()) is not None
    return hidden or known or any(map(_TOKEN_PART.fullmatch, parts.path.split("/"))) or redact_text(address) != address


def holds_address(word: str) -> bool:
    """Whether a word of ``--alert`` contains an address that others should not see."""
    name, _, address = word.partition("=")
    return "://" in word and not (name == "alertmanager" and not _has_secret(address))


def _address_problem(address: str, *, web: bool = True) -> str:
    """What is wrong with an address, without showing it; empty if nothing is."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is not a valid address"
    if not web:
        return "" if "://" in address else "must begin like apprise's addresses, such as discord://"
    if parts.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if not host or not address.isprintable() or " " in address:
        return "is not a valid address"
    return ""


def _receiver_type(word: str) -> ReceiverType:
    return next(kind for kind in get_args(ReceiverType) if kind == word)


def _option(table: SettingsTable, key: str, value_type: type) -> Any:
    value = table.take(key)
    if value is None:
        return None
    if value_type is list:
        words = _command_words(value, "") if isinstance(value, str) else value
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            table.fail(key, f"{key} must be a program and its arguments, as a text or an array of texts")
        if _without_p(redact_command(words)) != _without_p(words):
            table.fail(key, f"{key} contains a secret, which a process list would show; pass it by the environment")
        return list(words)
    if value_type is dict:
        if not isinstance(value, dict) or not all(isinstance(inner, str) for inner in value.values()):
            table.fail(key, f"{key} must be a table of texts")
        for name in value:
            if not _VARIABLE.fullmatch(name):
                table.file.fail((*table.path, key, name), f"{_shown_value(name)} is not the name of a label")
        return dict(value)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        table.fail(key, f"{key} must be a text, not {_type_text(value)}")
    if key == "api" and (problem := _address_problem(value)):
        table.fail(key, f"{key} {problem}")
    return value.strip()


def _without_p(words: Sequence[str]) -> list[str]:
    """Without the value of ``-p``, which is hidden in case it is a password but is rarely one."""
    return [word for place, word in enumerate(words) if not place or words[place - 1] != "-p"]


def _command_words(text: str, what: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words:
        raise UsageError(f"{what} must be a program and its arguments")
    if _without_p(redact_command(words)) != _without_p(words):
        raise UsageError(f"{what} contains a secret, which a process list would show; pass it by the environment")
    return words


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < _LARGEST and math.isfinite(value) else None
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(found[1]) * _UNIT_SECONDS[found[2] or "s"] if found is not None and len(found[1]) < 20 else None


def _share(value: Any) -> float | None:
    if isinstance(value, str) and (found := _PERCENT.fullmatch(value.strip())) is not None and len(found[1]) < 20:
        value = float(found[1]) / 100
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        return None
    return float(value)


_LARGEST = 1e15


def _parameter(key: str, about: Parameter, value: Any) -> float:
    """A parameter's value; ValueError says what it must be."""
    number: float | None = None
    if about.share:
        number = _share(value)
    elif key in ("seconds", "minutes") and isinstance(value, str):
        seconds = _seconds(value)
        number = None if seconds is None else seconds / (60 if key == "minutes" else 1)
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST:
        number = float(value)
    if number is None or not about.least <= number <= about.most or (about.whole and number != int(number)):
        raise ValueError(f"{key} must be {_range_text(about)}, not {_shown_value(value)}")
    return number


def _range_text(about: Parameter) -> str:
    if about.share:
        return 'a share such as "30%" or 0.3'
    what = "a whole number" if about.whole else "a number"
    if math.isinf(about.most):
        return f"{what} above 0"
    return f"{what} from {plain_number(about.least)} to {plain_number(about.most)}"


def _with_defaults(measure: str, found: dict[str, float]) -> dict[str, float]:
    about = MEASURES[measure]
    needed = [key for key, parameter in about.parameters.items() if parameter.default is None]
    if needed and len([key for key in needed if key in found]) != 1:
        raise ValueError(f"{measure} needs {' or '.join(needed)}")
    defaults = {key: value.default for key, value in about.parameters.items() if value.default is not None}
    return {**defaults, **found}


def _kinds_like(pattern: str) -> list[str]:
    if pattern in ("any", "*"):
        return list(_ALL_KINDS)
    return [kind for kind in KINDS if fnmatchcase(kind, pattern)]


def _unknown_kind(pattern: str) -> str:
    hint = did_you_mean(pattern, KINDS) or "; docs/diagnosis.md lists them"
    return f"there is no kind of finding {_shown_value(pattern)}{hint}"


def _inline_rule(word: str, source: str) -> Rule | None:
    """A rule in one word, such as ``no_step>300``, ``mfu<30%``, ``run_finished``, ``compute_straggler>10%``.

    None if its name is neither a measure nor a kind of finding.
    """
    found = _INLINE.fullmatch(word)
    if found is None:
        return None
    name, sign, value = found[1], (found[2] or "").rstrip("="), found[3]
    measure = _BELOW.get(name, name)
    if measure in MEASURES:
        return _inline_measure(measure, sign, value, f"{source}: {name}", source)
    kinds = _kinds_like(name)
    if not kinds:
        return None
    cost = 0.0 if value is None else _share(value)
    if cost is None or sign == "<":
        raise UsageError(f"{source}: {name} can have a least cost, such as {name}>10%")
    return Rule(name=name, on="findings", kinds=tuple(kinds), severity="info", cost_share=cost, source=source)


def _inline_measure(measure: str, sign: str, value: str | None, where: str, source: str) -> Rule:
    about = MEASURES[measure]
    found: dict[str, float] = {}
    if value is not None:
        if not about.parameters:
            raise UsageError(f"{where} has no level")
        if sign and (sign == "<") != about.below:
            raise UsageError(f"{where} is compared with {'<' if about.below else '>'}")
        key, parameter = next(iter(about.parameters.items()))
        try:
            found[key] = _parameter(key, parameter, _number(value))
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
    try:
        parameters = _with_defaults(measure, found)
    except ValueError:
        example = f"{measure.removesuffix('_below')}<{'30%' if about.parameters.get('level') else '1000'}"
        raise UsageError(f"{where} needs a level, such as {example}") from None
    return Rule(
        name=measure,
        on="measure",
        measure=measure,
        parameters=parameters,
        for_seconds=about.for_seconds,
        send_as=about.severity,
        source=source,
    )


def _number(text: str) -> Any:
    """A number if it is one, else the text: ``5m`` and ``30%`` are read like those of a file."""
    try:
        return float(text)
    except ValueError:
        return text.strip()


def _shown_value(value: Any) -> str:
    """A value that the user wrote, shortened, for a message."""
    text = redact_text(value) if isinstance(value, str) else "a table" if isinstance(value, dict) else str(value)[:100]
    text = text if len(text) <= 40 else f"{text[:39]}…"
    return f'"{printable(text)}"' if isinstance(value, str) else printable(text)


def _type_text(value: Any) -> str:
    if isinstance(value, str):
        return "a text" if value.strip() else "an empty text"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return "a number"
    return "an array" if isinstance(value, list) else "a table" if isinstance(value, dict) else "a date"
