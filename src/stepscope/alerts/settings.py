"""What the user set about alerts: rules, receivers, and where their secrets are.

The launcher reads and checks it (``alerts/settings_files.py``) and hands it to the run's hub and sender in their
environment (``settings_variables``, ``settings_from``): a process list shows command lines to every user, but
environments only to their owner.

Standard library only: the sender's process loads this.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, get_args
from urllib.parse import urlsplit

from stepscope.errors import UsageError
from stepscope.records.dataclass_json import decoded, encoded
from stepscope.records.files import open_file
from stepscope.records.finding import Severity
from stepscope.records.hang import HangKind
from stepscope.records.paths import ENV_ALERT_SETTINGS
from stepscope.records.text import duration_text, share_text

__all__ = [
    "DEFAULT_RULES",
    "MEASURES",
    "RECEIVERS",
    "AlertSettings",
    "Measure",
    "Parameter",
    "Receiver",
    "ReceiverKind",
    "ReceiverType",
    "Rule",
    "Secret",
    "describe",
    "host_of_address",
    "plain_number",
    "receiver_text",
    "rule_text",
    "settings_from",
    "settings_variables",
]

# -- secrets ----------------------------------------------------------------------------------------------------------


LONGEST_SECRET = 4096


class Secret:
    """Where a secret is, not what it is: ``reveal`` reads it when a message is to be sent.

    Neither ``repr`` nor ``str`` shows it, and it is not a value that ``json`` or ``dataclass_json`` would write.
    """

    __slots__ = ("_text", "_where")

    def __init__(self, where: Literal["env", "file", "value"], text: str) -> None:
        self._where = where
        self._text = text

    @property
    def place(self) -> str:
        """Where it is, for people: ``environment variable NAME``, ``file PATH``, ``given directly``."""
        if self._where == "value":
            return "given directly"
        return f"environment variable {self._text}" if self._where == "env" else f"file {self._text}"

    @property
    def given(self) -> bool:
        """Whether the settings contain it themselves, instead of a variable or file that does."""
        return self._where == "value"

    def reveal(self, environ: Mapping[str, str]) -> str:
        """Return the secret; UsageError if its variable is not set, or its file is missing or readable by others."""
        if self._where == "value":
            return self._text
        if self._where == "env":
            found = environ.get(self._text, "").strip()
            if not found:
                raise UsageError(f"the environment variable {self._text} is not set")
            return found
        return _private_text(Path(self._text))

    def handed_over(self, *, with_given: bool) -> dict[str, str]:
        """The JSON form for the environment of our own processes; ``with_given``: also a secret given directly."""
        if self.given and not with_given:
            return {"value": ""}
        return {self._where: self._text}

    def __repr__(self) -> str:
        return f"<Secret: {self.place}>"

    __str__ = __repr__

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and (self._where, self._text) == (other._where, other._text)

    def __hash__(self) -> int:
        return hash((self._where, self._text))


def _private_text(path: Path) -> str:
    """The content of a file that only its owner can read; UsageError otherwise."""
    try:
        with open_file(path, links=True) as file:
            about = os.fstat(file.fileno())
            if about.st_uid not in (os.getuid(), 0):
                raise UsageError(f"{path} belongs to another user")
            if about.st_mode & 0o077:
                raise UsageError(f"{path} can be read by others; run `chmod 600 {shlex.quote(str(path))}`")
            text = file.read(LONGEST_SECRET + 1).decode("utf-8", "replace").strip()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None
    if not text or len(text) > LONGEST_SECRET or "\n" in text:
        raise UsageError(f"{path} must contain the secret and nothing else, on one line")
    return text


# -- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A number that a measure is compared with."""

    meaning: str
    default: float | None
    """None: the user has to set it."""
    least: float = 0.0
    most: float = math.inf
    share: bool = False
    """Between 0 and 1, and may be written as a percentage."""
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Something about a run that a rule can watch (``alerts/conditions.py`` decides when it holds)."""

    meaning: str
    severity: Severity
    """Of its alerts, unless the rule sets ``send_as``."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    for_seconds: float = 0.0
    """Default of ``for``."""
    below: bool = False
    """Written with ``<`` in a word of ``--alert``."""


MEASURES: Final[dict[str, Measure]] = {
    "step_time": Measure(
        meaning="the step time is above its recent level",
        severity="warning",
        parameters={
            "factor": Parameter(meaning="by more than this many robust σ", default=1.5, least=0.1, most=1000),
            "steps": Parameter(meaning="over this many steps", default=20, least=1, most=1000, whole=True),
        },
    ),
    "memory_growth": Measure(
        meaning="the memory of a rank grows",
        severity="warning",
        parameters={"mb": Parameter(meaning="by more than this many MB an epoch", default=100, least=1, most=1e9)},
    ),
    "gpu_idle": Measure(
        meaning="a GPU is idle",
        severity="warning",
        parameters={"seconds": Parameter(meaning="for this many seconds", default=300, least=1, most=1e7)},
    ),
    "no_step": Measure(
        meaning="no step is completed",
        severity="critical",
        parameters={"seconds": Parameter(meaning="for this many seconds", default=600, least=1, most=1e7)},
    ),
    "not_finite": Measure(
        meaning="the loss or a gradient is NaN or infinite",
        severity="critical",
        parameters={
            "steps": Parameter(meaning="in this many steps in a row", default=3, least=1, most=1000, whole=True)
        },
    ),
    "throughput_below": Measure(
        meaning="the throughput is low",
        severity="warning",
        parameters={
            "samples_per_second": Parameter(meaning="below this many samples/s", default=None, least=1e-9),
            "tokens_per_second": Parameter(meaning="below this many tokens/s", default=None, least=1e-9),
        },
        for_seconds=60.0,
        below=True,
    ),
    "mfu_below": Measure(
        meaning="the model FLOPs utilization is low",
        severity="warning",
        parameters={"level": Parameter(meaning="below this", default=None, least=1e-6, most=1, share=True)},
        for_seconds=60.0,
        below=True,
    ),
    "checkpoint_age": Measure(
        meaning="the last checkpoint is old",
        severity="warning",
        parameters={"minutes": Parameter(meaning="by more than this many minutes", default=120, least=0.1, most=1e6)},
    ),
    "run_finished": Measure(meaning="the run finished", severity="info"),
    "run_failed": Measure(meaning="the run failed or crashed", severity="critical"),
}
"""By name.  In ``parameters`` of a rule every one has a value; of ``throughput_below`` one of the two."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When to send something, and to whom."""

    name: str
    """Unique; of a default or an inline rule the kind or measure."""
    on: Literal["findings", "measure"]
    kinds: tuple[str, ...] = ()
    """On findings: these kinds; empty: all."""
    rank_kinds: tuple[str, ...] = ()
    """On findings: further kinds, where the finding names the ranks that the others wait for."""
    severity: Severity = "warning"
    """On findings: of this severity or a higher one."""
    cost_share: float = 0.0
    """On findings: that cost at least this share of the step time."""
    for_seconds: float = 0.0
    """It must hold this long before it is reported."""
    measure: str = ""
    """On a measure: its name in ``MEASURES``."""
    parameters: dict[str, float] = field(default_factory=dict)
    receivers: tuple[str, ...] = ()
    """Names of the receivers; those of ``[alerts]`` where the rule names none."""
    send_as: Severity | None = None
    """The severity to send; None: that of the finding.  Of a measure it is always set."""
    source: str = "default"
    """Where it is from: ``default``, ``--alert``, ``STEPSCOPE_ALERT``, ``stepscope.toml:12``."""


STOPPED_KINDS: Final = get_args(HangKind)
"""The job hangs, or lost a rank."""
RUINED_KINDS: Final = ("loss_nan", "nan_gradients", "replica_desync", "no_gradient_exchange")
"""Training continues, but its result is of no use."""
ENDING_KINDS: Final = ("memory_creep", "ram_pressure")
"""The job will end before it is done."""
SLOWED_KINDS: Final = (
    *("input_straggler", "compute_straggler", "h2d_straggler", "comm_straggler", "straggler", "node_straggler"),
    *("input_bound", "slow_network", "slow_collective", "change_point", "drift"),
)
"""Something became slow, or a rank is.  What a job is by design (bound by communication, uneven stages, evaluation
between steps), what is over (a stall), and a crowded machine alert nobody: they are in the summary and on the page."""
SLOWED_RANK_KINDS: Final = ("between_steps",)
"""Time between steps is by design if all ranks spend it, and a slow rank if one does."""
DEFAULT_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        name="critical",
        on="findings",
        kinds=(*STOPPED_KINDS, *RUINED_KINDS, *ENDING_KINDS),
        severity="critical",
    ),
    Rule(
        name="costly",
        on="findings",
        kinds=SLOWED_KINDS,
        rank_kinds=SLOWED_RANK_KINDS,
        severity="warning",
        cost_share=0.15,
    ),
    *(
        Rule(
            name=name,
            on="measure",
            measure=name,
            parameters={key: about.default for key, about in MEASURES[name].parameters.items() if about.default},
            for_seconds=MEASURES[name].for_seconds,
            send_as=MEASURES[name].severity,
        )
        for name in ("no_step", "memory_growth", "run_failed")
    ),
)
"""What is reported if the user names a receiver and nothing else.  A loss that is not finite is a finding, which knows
of steps that a gradient scaler skips: the measure is not among them, nor is the step time, which a busy machine
moves."""


# -- receivers --------------------------------------------------------------------------------------------------------

ReceiverType = Literal["slack", "slack_bot", "pagerduty", "alertmanager", "webhook", "command", "apprise"]


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """Where messages go.  ``options`` and ``secrets`` by type: see ``RECEIVERS``."""

    name: str
    type: ReceiverType
    options: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, Secret] = field(default_factory=dict)
    """Every address is here, since it may contain a token or password: ``secrets["url"]``."""
    severity: Severity = "info"
    """The least severity that it gets."""
    updates: bool = True
    """Whether it gets ``updated`` messages."""
    resolved: bool = True
    """Whether it gets ``resolved`` messages."""
    timeout_seconds: float = 10.0
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ReceiverKind:
    """What a receiver of a type has: options and secrets, each with the environment variable that is its default."""

    options: Mapping[str, type] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """By name: the variable that has it if the settings do not say where it is."""
    needed: tuple[str, ...] = ()
    """Options and secrets without which nothing can be sent."""
    hint: str = ""
    """How to get what is needed."""


_HTTP: Final[dict[str, type]] = {"ca_file": str}
RECEIVERS: Final[dict[ReceiverType, ReceiverKind]] = {
    "slack": ReceiverKind(
        options={**_HTTP, "mention": str},
        secrets={"url": "SLACK_WEBHOOK_URL"},
        needed=("url",),
        hint="create an incoming webhook at https://api.slack.com/apps",
    ),
    "slack_bot": ReceiverKind(
        options={**_HTTP, "channel": str, "mention": str, "api": str},
        secrets={"token": "SLACK_BOT_TOKEN"},
        needed=("token", "channel"),
        hint="a bot token with the scope chat:write, from https://api.slack.com/apps",
    ),
    "pagerduty": ReceiverKind(
        options={**_HTTP, "api": str},
        secrets={"routing_key": "PAGERDUTY_ROUTING_KEY"},
        needed=("routing_key",),
        hint="the integration key of an Events API v2 integration of your PagerDuty service",
    ),
    "alertmanager": ReceiverKind(
        options={**_HTTP, "labels": dict, "username": str},
        secrets={"url": "ALERTMANAGER_URL", "password": "ALERTMANAGER_PASSWORD", "token": "ALERTMANAGER_TOKEN"},
        needed=("url",),
        hint="the address of your Alertmanager, such as http://host:9093",
    ),
    "webhook": ReceiverKind(
        options=_HTTP,
        secrets={
            "url": "STEPSCOPE_WEBHOOK_URL",
            "secret": "STEPSCOPE_WEBHOOK_SECRET",
            "token": "STEPSCOPE_WEBHOOK_TOKEN",
        },
        needed=("url",),
        hint="the address that messages are posted to",
    ),
    "command": ReceiverKind(options={"command": list}, needed=("command",), hint="a program, and its arguments"),
    "apprise": ReceiverKind(
        secrets={"url": "APPRISE_URL"},
        needed=("url",),
        hint="an address of https://github.com/caronc/apprise, such as mailtos://user:password@host",
    ),
}
"""By type.  ``secret`` of a webhook is the key that its messages are signed with."""


# -- all settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AlertSettings:
    """What applies to one run."""

    rules: tuple[Rule, ...] = DEFAULT_RULES
    receivers: dict[str, Receiver] = field(default_factory=dict)
    """By name: those that a rule sends to.  Empty: incidents are kept for the page, and nothing is sent."""
    group_seconds: float = 5.0
    """How long the first message about an incident waits for further signals of the same cause."""
    resolve_seconds: float = 15.0
    """How long the cause must be gone before the incident is over."""
    update_seconds: float = 300.0
    """Least time between two updates of one incident."""
    repeat_seconds: float = 0.0
    """An incident that nobody acknowledged is sent again after this time; 0: never."""
    messages_per_hour: int = 30
    """Limit of each receiver; a message that says that an incident is over is always sent."""
    link: str = ""
    """Address of the page to link to, instead of the run's hub on loopback: ``https://hub.example``."""
    sources: tuple[str, ...] = ()
    """Files and options that settings are from, in the order in which they were read."""
    notices: tuple[str, ...] = ()
    """What the user should know although it is not a mistake; without secrets."""

    @property
    def sends(self) -> bool:
        return bool(self.receivers)


_HANDED_OVER = ("group_seconds", "resolve_seconds", "update_seconds", "repeat_seconds", "messages_per_hour", "link")


def settings_variables(settings: AlertSettings, *, secrets: bool) -> dict[str, str]:
    """Return the variables by which the hub or the sender gets checked settings.

    ``secrets``: with those that were given directly (``--alert https://…``), which only the sender needs.
    """
    document = {
        **{name: getattr(settings, name) for name in _HANDED_OVER},
        "rules": [encoded(rule) for rule in settings.rules],
        "receivers": [_receiver_document(receiver, secrets=secrets) for receiver in settings.receivers.values()],
    }
    return {ENV_ALERT_SETTINGS: json.dumps(document, separators=(",", ":"))}


def settings_from(environ: Mapping[str, str]) -> AlertSettings:
    """Return the settings that the launcher handed over; otherwise the defaults, without receivers."""
    text = environ.get(ENV_ALERT_SETTINGS, "")
    if not text:
        return AlertSettings()
    try:
        document = json.loads(text)
        receivers = [_receiver_from(row) for row in document["receivers"]]
        return AlertSettings(
            rules=tuple(decoded(Rule, row) for row in document["rules"]),
            receivers={receiver.name: receiver for receiver in receivers},
            **{name: document[name] for name in _HANDED_OVER},
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{ENV_ALERT_SETTINGS} is set by Stepscope for its own processes; unset it") from None


def _receiver_document(receiver: Receiver, *, secrets: bool) -> dict[str, Any]:
    plain = replace(receiver, secrets={})
    places = {name: secret.handed_over(with_given=secrets) for name, secret in receiver.secrets.items()}
    return {**encoded(plain), "secrets": places}


def _receiver_from(row: Any) -> Receiver:
    plain = decoded(_PlainReceiver, {**row, "options": row["options"]})
    places = {name: Secret(*next(iter(place.items()))) for name, place in row["secrets"].items()}
    return Receiver(**{**vars(plain), "secrets": places})


@dataclass(frozen=True, kw_only=True)
class _PlainReceiver:
    """A receiver without its secrets, to check the fields of one that was handed over."""

    name: str
    type: ReceiverType
    options: dict[str, Any]
    severity: Severity
    updates: bool
    resolved: bool
    timeout_seconds: float
    source: str


# -- in words ---------------------------------------------------------------------------------------------------------


def describe(settings: AlertSettings) -> dict[str, list[dict[str, str]]]:
    """Return receivers and rules as rows of text, with where each comes from; no secret is in them."""
    return {
        "receivers": [
            {"name": receiver.name, "what": receiver_text(receiver), "source": receiver.source}
            for receiver in settings.receivers.values()
        ],
        "rules": [
            {"name": rule.name, "when": rule_text(rule), "to": ", ".join(rule.receivers), "source": rule.source}
            for rule in settings.rules
        ],
    }


def rule_text(rule: Rule) -> str:
    """When a rule holds: ``no step is completed for 300 seconds``."""
    if rule.on == "measure":
        about = MEASURES[rule.measure]
        levels = [
            about.parameters[key].meaning.replace("this many", plain_number(value)).replace("this", share_text(value))
            for key, value in rule.parameters.items()
        ]
        text = " ".join([about.meaning, *levels])
    else:
        kinds = f"finding {' or '.join(rule.kinds)}" if 0 < len(rule.kinds) <= 3 else "a finding"
        count = len(rule.kinds) + len(rule.rank_kinds)
        kinds = f"one of {count} kinds of findings" if count > 3 else kinds
        severe = {"info": "", "warning": ", a warning or worse", "critical": ", critical"}[rule.severity]
        text = kinds + severe + (f", that costs {share_text(rule.cost_share)} or more" if rule.cost_share else "")
    return text + (f", for {duration_text(rule.for_seconds, whole=True)}" if rule.for_seconds else "")


def plain_number(value: float) -> str:
    """A number as the user would write it: 300, 1.5."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,g}"


def receiver_text(receiver: Receiver) -> str:
    """What a receiver is and where its secrets are: ``slack, url: environment variable SLACK_WEBHOOK_URL``."""
    parts = [f"{key}: {secret.place}" for key, secret in receiver.secrets.items()]
    shown: dict[str, Callable[[Any], str]] = {
        "command": shlex.join,
        "channel": str,
        "username": str,
        "api": host_of_address,
    }
    parts += [f"{key}: {show(receiver.options[key])}" for key, show in shown.items() if key in receiver.options]
    return ", ".join([receiver.type, *parts])


def host_of_address(address: str) -> str:
    """Only the host: everything after it may be a token."""
    try:
        return urlsplit(address).hostname or "?"
    except ValueError:
        return "?"
