"""Settings of alerts: what files and words mean, the exact line of each mistake, and that secrets stay hidden."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.alerts.settings import (
    DEFAULT_RULES,
    MEASURES,
    AlertSettings,
    Secret,
    describe,
    settings_from,
    settings_variables,
)
from stepscope.alerts.settings_files import holds_address, load_settings
from stepscope.alerts.settings_places import are_there_settings, find_project_file, user_file
from stepscope.alerts.toml_lines import TomlError, key_lines, parse_toml
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.dataclass_json import encoded

HOOK = "https://hooks.slack.com/services/T0/B0/s3cr3tS3cr3tS3cr3t"
DEFAULTS = [rule.name for rule in DEFAULT_RULES]

Load = Callable[..., AlertSettings]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def load(project: Path, home: Path) -> Load:
    """``load("[alerts] …", "slack", SLACK_WEBHOOK_URL=…)``: the text of the project's file, words, the environment."""

    def loaded(text: str = "", *words: str, own: str = "", own_mode: int = 0o600, **environ: str) -> AlertSettings:
        variables = {"HOME": str(home), **environ}
        if text:
            (project / "stepscope.toml").write_text(text)
        if own:
            path = user_file(variables)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(own)
            path.chmod(own_mode)
        return load_settings(project, words, variables)

    return loaded


# -- words ------------------------------------------------------------------------------------------------------------


def test_without_settings_nothing_is_sent(load: Load) -> None:
    assert load() == AlertSettings()


def test_slack_alone_is_enough(load: Load) -> None:
    found = load("", "slack", SLACK_WEBHOOK_URL=HOOK)
    assert [rule.name for rule in found.rules] == DEFAULTS
    assert {rule.receivers for rule in found.rules} == {("slack",)}
    assert found.receivers["slack"].type == "slack"
    assert found.receivers["slack"].secrets == {"url": Secret("env", "SLACK_WEBHOOK_URL")}
    assert found.sources == ("--alert",)


@pytest.mark.parametrize(
    ("word", "name", "kind", "options"),
    [
        ("https://host/hook", "webhook", "webhook", {}),
        (HOOK, "slack", "slack", {}),
        ("discord://id/token", "apprise", "apprise", {}),
        ("alertmanager=http://host:9093", "alertmanager", "alertmanager", {}),
        ("command=./page-me.sh 'two words'", "command", "command", {"command": ["./page-me.sh", "two words"]}),
        ("slack_bot=#training", "slack_bot", "slack_bot", {"channel": "#training"}),
    ],
)
def test_a_word_names_a_receiver(load: Load, word: str, name: str, kind: str, options: dict[str, object]) -> None:
    (receiver,) = load("", word, SLACK_BOT_TOKEN="xoxb-1").receivers.values()
    assert (receiver.name, receiver.type, receiver.options) == (name, kind, options)


def test_two_addresses_are_two_receivers(load: Load) -> None:
    assert list(load("", "https://a/x", "https://b/x").receivers) == ["webhook", "webhook-2"]


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("no_step>300", ("no_step", "measure", {"seconds": 300.0}, 0.0, (), 0.0, "critical")),
        ("no_step=5m", ("no_step", "measure", {"seconds": 300.0}, 0.0, (), 0.0, "critical")),
        ("step_time>3", ("step_time", "measure", {"factor": 3.0, "steps": 20.0}, 0.0, (), 0.0, "warning")),
        ("mfu<30%", ("mfu_below", "measure", {"level": 0.3}, 60.0, (), 0.0, "warning")),
        ("mfu_below=0.3", ("mfu_below", "measure", {"level": 0.3}, 60.0, (), 0.0, "warning")),
        ("throughput<1e3", ("throughput_below", "measure", {"samples_per_second": 1e3}, 60.0, (), 0.0, "warning")),
        ("checkpoint_age>1h", ("checkpoint_age", "measure", {"minutes": 60.0}, 0.0, (), 0.0, "warning")),
        ("run_finished", ("run_finished", "measure", {}, 0.0, (), 0.0, "info")),
        ("stall", ("stall", "findings", {}, 0.0, ("stall",), 0.0, None)),
        ("drift>10%", ("drift", "findings", {}, 0.0, ("drift",), 0.1, None)),
    ],
)
def test_a_word_is_a_rule(load: Load, word: str, rule: tuple[object, ...]) -> None:
    found = load("", "command=true", word).rules[-1]
    shown = (found.name, found.on, found.parameters, found.for_seconds, found.kinds, found.cost_share, found.send_as)
    assert shown == rule
    assert found.receivers == ("command",)


def test_the_environment_has_words_too(load: Load) -> None:
    found = load("", "no_step=60", STEPSCOPE_ALERT="command='./page me' slack", SLACK_WEBHOOK_URL=HOOK)
    assert list(found.receivers) == ["command", "slack"]
    assert found.sources == ("STEPSCOPE_ALERT", "--alert")


def test_off_sends_nothing(load: Load) -> None:
    found = load('[alerts.receivers.slack]\nurl = { env = "NOT_SET" }\n', "off")
    assert (found.receivers, {rule.receivers for rule in found.rules}) == ({}, {()})


# -- files ------------------------------------------------------------------------------------------------------------

BOTH = """\
[alerts]
send_to = ["team"]
group = "20s"
messages_per_hour = 5

[alerts.receivers.team]
type = "slack"
url = { env = "TEAM_URL" }

[alerts.receivers.ops]
type = "webhook"
url = "https://ops.example/hook"
severity = "critical"
updates = false
timeout = "5s"

[[alerts.rules]]
findings = "*_straggler"
cost = "10%"
for = "1m"
send_to = "ops"
send_as = "critical"

[[alerts.rules]]
measure = "no_step"
seconds = 300
"""


def test_a_project_file(load: Load) -> None:
    found = load(BOTH, TEAM_URL=HOOK)
    assert (found.group_seconds, found.messages_per_hour) == (20.0, 5)
    ops, team = found.receivers["ops"], found.receivers["team"]
    assert (ops.severity, ops.updates, ops.resolved, ops.timeout_seconds) == ("critical", False, True, 5.0)
    assert (ops.source, team.source) == ("stepscope.toml:10", "stepscope.toml:6")
    rules = {rule.name: rule for rule in found.rules}
    assert list(rules) == [*(name for name in DEFAULTS if name != "no_step"), "*_straggler", "no_step"]
    straggler = rules["*_straggler"]
    assert (straggler.cost_share, straggler.for_seconds, straggler.send_as) == (0.1, 60.0, "critical")
    assert straggler.receivers == ("ops",)
    assert "compute_straggler" in straggler.kinds
    assert rules["no_step"].parameters == {"seconds": 300.0}
    assert (rules["no_step"].receivers, rules["no_step"].source) == (("team",), "stepscope.toml:24")
    assert rules["critical"].receivers == ("team",)


def test_a_rule_of_another_name_on_a_measure_replaces_the_default_rule_on_it(load: Load) -> None:
    stuck = '\n[[alerts.rules]]\nname = "stuck"\nmeasure = "no_step"\nseconds = 60\n'
    assert [each.name for each in load(stuck, HOOK).rules if each.measure == "no_step"] == ["stuck"]
    both = load(BOTH + stuck, TEAM_URL=HOOK).rules
    assert [each.name for each in both if each.measure == "no_step"] == ["no_step", "stuck"]


def test_the_project_replaces_what_the_user_set_under_the_same_name(load: Load) -> None:
    own = f"""
[alerts]
update_every = "10m"
[alerts.receivers.team]
type = "slack"
url = "{HOOK}"
[[alerts.rules]]
name = "stuck"
measure = "no_step"
"""
    text = """
[alerts.receivers.team]
type = "webhook"
url = "https://ops.example/hook"
[[alerts.rules]]
name = "stuck"
measure = "gpu_idle"
"""
    found = load(text, own=own)
    assert (found.receivers["team"].type, found.update_seconds) == ("webhook", 600.0)
    assert [(rule.measure, rule.source) for rule in found.rules if rule.name == "stuck"] == [
        ("gpu_idle", "stepscope.toml:5")
    ]
    assert found.sources == ("~/.config/stepscope/config.toml", "stepscope.toml")


def test_receivers_of_a_file_get_everything_unless_it_names_some(load: Load) -> None:
    two = (
        '[alerts.receivers.a]\ntype = "command"\ncommand = "a"\n[alerts.receivers.b]\ntype = "command"\ncommand = "b"\n'
    )
    assert load(two).rules[0].receivers == ("a", "b")
    assert load(f'[alerts]\nsend_to = "b"\n{two}').rules[0].receivers == ("b",)
    assert load(f"[alerts]\nsend_to = []\n{two}").receivers == {}
    assert load(f"[alerts]\nsend_to = []\n{two}", "a").rules[0].receivers == ("a",)


@pytest.mark.parametrize(("text", "names"), [("false", []), ('["run_failed"]', ["run_failed"]), ("true", DEFAULTS)])
def test_default_rules_can_be_chosen(load: Load, text: str, names: list[str]) -> None:
    assert [rule.name for rule in load(f"[alerts]\ndefaults = {text}\n").rules] == names


def test_the_nearest_file_up_to_the_root_of_the_repository(tmp_path: Path) -> None:
    deep = tmp_path / "repository" / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "stepscope.toml").touch()
    assert find_project_file(deep) is None
    (tmp_path / "repository" / ".git").mkdir()
    assert find_project_file(deep) is None
    (tmp_path / "repository" / "stepscope.toml").touch()
    assert find_project_file(deep) == tmp_path / "repository" / "stepscope.toml"
    (deep / "stepscope.toml").touch()
    assert find_project_file(deep) == deep / "stepscope.toml"
    with pytest.raises(UsageError, match=r"^\.\./\.\./stepscope\.toml:1: unknown key"):
        (tmp_path / "repository" / "stepscope.toml").write_text("x = 1")
        (deep / "stepscope.toml").unlink()
        load_settings(deep, (), {"HOME": str(tmp_path)})


def test_a_file_that_everybody_can_write_is_not_used(load: Load, project: Path) -> None:
    (project / "stepscope.toml").write_text('[alerts.receivers.x]\ntype = "command"\ncommand = "true"\n')
    (project / "stepscope.toml").chmod(0o666)
    found = load()
    assert (found.receivers, found.notices) == (
        {},
        ("stepscope.toml belongs to another user; its alerts are not used",),
    )


def test_nothing_is_loaded_without_settings(project: Path, home: Path) -> None:
    variables = {"HOME": str(home)}
    assert not are_there_settings(project, (), variables)
    assert are_there_settings(project, ("slack",), variables)
    assert are_there_settings(project, (), {**variables, "STEPSCOPE_ALERT": "slack"})
    user_file(variables).parent.mkdir(parents=True)
    user_file(variables).touch()
    assert are_there_settings(project, (), variables)


# -- mistakes ---------------------------------------------------------------------------------------------------------

RULE = "[[alerts.rules]]\n"
RECEIVER = "[alerts.receivers.r]\n"
INSTEAD = 'write {key} = {{ env = "{name}" }}, or {key} = {{ file = "PATH" }} with mode 0600'
SECRET_HERE = "{key} is a secret, which does not belong into the file of a project; " + INSTEAD

TYPES = "type must be one of slack, slack_bot, pagerduty, alertmanager, webhook, command, apprise"
IN_COMMAND = "command contains a secret, which a process list would show; pass it by the environment"
NO_HOOK = "needs the environment variable SLACK_WEBHOOK_URL (create an incoming webhook at https://api.slack.com/apps)"
NO_KEY = "a key on the command line can be read by every user of this machine; set PAGERDUTY_ROUTING_KEY, and write"
USE_BOT = "needs the environment variable SLACK_WEBHOOK_URL; with SLACK_BOT_TOKEN, use slack_bot instead"
NO_ADDRESS = "the address (environment variable SLACK_WEBHOOK_URL) must begin with http:// or https://"
MISTAKES = [
    ("alert = 1", 'stepscope.toml:1: unknown key "alert"; did you mean alerts?'),
    ("\n\nalerts = 3", "stepscope.toml:3: alerts must be a table, not a number"),
    ("[alerts]\n\nsendto = 1", 'stepscope.toml:3: unknown key "sendto"; did you mean send_to?'),
    ("[alerts\n", "stepscope.toml:1: Expected ']' at the end of a table declaration"),
    ("[alerts]\na = 1\na = 2\n", "stepscope.toml:3: Cannot overwrite a value"),
    ("[alerts]\nsend_to = [1]", "stepscope.toml:2: send_to must be a name or an array of names, not an array"),
    ("[alerts]\nsend_to = 'slak'", 'stepscope.toml:2: there is no receiver "slak"; did you mean slack?'),
    (
        "[alerts]\ngroup = 'soon'",
        'stepscope.toml:2: group must be a time such as 30 (seconds), "5m" or "2h", not "soon"',
    ),
    (
        "[alerts]\nrepeat_every = 5",
        'stepscope.toml:2: repeat_every must be a time of 1 min or more such as 30 (seconds), "5m" or "2h", not 5',
    ),
    ("[alerts]\nmessages_per_hour = 0", "stepscope.toml:2: messages_per_hour must be a whole number from 1 to 10000"),
    ("[alerts]\ndefaults = 'critcal'", 'stepscope.toml:2: there is no default rule "critcal"; did you mean critical?'),
    (
        "[alerts]\nlink = 'https://hub?token=abc'",
        "stepscope.toml:2: link must be an address such as https://hub.example, without a token",
    ),
    ("[alerts]\nrules = 1", "stepscope.toml:2: rules must be written as [[alerts.rules]], not as a number"),
    (RULE + "name = 'x'", "stepscope.toml:1: a rule needs either findings or measure"),
    (RULE + "findings = 'any'\nmeasure = 'no_step'", "stepscope.toml:1: a rule needs either findings or measure"),
    (
        RULE + "\nfindings = ['drift', 'compute_stragler']",
        'stepscope.toml:3: there is no kind of finding "compute_stragler"; did you mean compute_straggler?',
    ),
    (
        RULE + "findings = 'xyzzy'",
        'stepscope.toml:2: there is no kind of finding "xyzzy"; docs/diagnosis.md lists them',
    ),
    (RULE + "measure = 'nostep'", 'stepscope.toml:2: there is no measure "nostep"; did you mean no_step?'),
    (
        RULE + "measure = 'no_step'\nseconds = -3",
        "stepscope.toml:3: seconds must be a number from 1 to 10,000,000, not -3",
    ),
    (
        RULE + "measure = 'step_time'\nsteps = 2.5",
        "stepscope.toml:3: steps must be a whole number from 1 to 1,000, not 2.5",
    ),
    (RULE + "measure = 'mfu_below'", "stepscope.toml:1: mfu_below needs level"),
    (
        RULE + "measure = 'throughput_below'\nsamples_per_second = 1\ntokens_per_second = 1",
        "stepscope.toml:1: throughput_below needs samples_per_second or tokens_per_second",
    ),
    (
        RULE + "measure = 'mfu_below'\nlevel = 40",
        'stepscope.toml:3: level must be a share such as "30%" or 0.3, not 40',
    ),
    (
        RULE + "measure = 'no_step'\nseverity = 'info'",
        "stepscope.toml:3: severity belongs to a rule on findings; the severity of what is sent is send_as",
    ),
    (
        RULE + "findings = 'any'\nseconds = 3",
        "stepscope.toml:3: seconds belongs to a rule on a measure, not to one on findings",
    ),
    (
        RULE + "findings = 'any'\nseverity = 'critcal'",
        'stepscope.toml:3: severity must be info, warning or critical, not "critcal"; did you mean critical?',
    ),
    (RULE + "findings = 'any'\ncost = 15", 'stepscope.toml:3: cost must be a share such as "10%" or 0.1, not 15'),
    (
        RULE + "findings = 'any'\nfor = true",
        'stepscope.toml:3: for must be a time such as 30 (seconds), "5m" or "2h", not True',
    ),
    (RULE + "measure = 'no_step'\nsend_to = 'x'", 'stepscope.toml:3: there is no receiver "x"'),
    (RULE + "measure = 'no_step'\nname = 'a b'", 'stepscope.toml:3: "a b" is not a name: letters, digits, _ . -'),
    (
        (RULE + "measure = 'no_step'\nname = 'a'\n") * 2,
        'stepscope.toml:6: there are two rules with the name "a"',
    ),
    (
        RECEIVER + "url = 1",
        f"stepscope.toml:1: {TYPES}",
    ),
    (
        RECEIVER + "type = 'slac'",
        f'stepscope.toml:2: {TYPES}, not "slac"; did you mean slack?',
    ),
    ("[alerts.receivers]\nno_step = {}", 'stepscope.toml:2: a receiver cannot have the name "no_step"'),
    (RECEIVER + "type = 'webhook'\nurl = 'ftp://x'", "stepscope.toml:3: url must begin with http:// or https://"),
    (
        RECEIVER + "type = 'webhook'\nurl = { env = 'A B' }",
        'stepscope.toml:3: url must be { env = "NAME" } or { file = "PATH" }',
    ),
    (
        RECEIVER + "type = 'slack'\nurl = { env = 'A', file = 'b' }",
        'stepscope.toml:3: url must be { env = "NAME" } or { file = "PATH" }, such as env = "SLACK_WEBHOOK_URL"',
    ),
    (
        RECEIVER + "type = 'slack'\nurl = { env = 'NOT_SET' }",
        "stepscope.toml:1: receiver r: the environment variable NOT_SET is not set (--alert off runs without alerts)",
    ),
    (
        RECEIVER + "type = 'slack'",
        f"stepscope.toml:1: receiver r: {NO_HOOK}",
    ),
    (
        RECEIVER + "type = 'slack_bot'\ntoken = { env = 'HOME' }",
        "stepscope.toml:1: receiver r: needs the channel: set SLACK_CHANNEL, or write --alert slack_bot=#CHANNEL",
    ),
    (
        RECEIVER + f"type = 'slack'\nurl = '{HOOK}'",
        "stepscope.toml:3: " + SECRET_HERE.format(key="url", name="SLACK_WEBHOOK_URL"),
    ),
    (
        RECEIVER + "type = 'pagerduty'\nrouting_key = 's3cret'",
        "stepscope.toml:3: " + SECRET_HERE.format(key="routing_key", name="PAGERDUTY_ROUTING_KEY"),
    ),
    (
        RECEIVER + "type = 'alertmanager'\nurl = 'http://u:s3cret@host'",
        "stepscope.toml:3: " + SECRET_HERE.format(key="url", name="ALERTMANAGER_URL"),
    ),
    (
        RECEIVER + "type = 'command'\ncommand = ['./page', '--token', 's3cret']",
        f"stepscope.toml:3: {IN_COMMAND}",
    ),
    (
        RECEIVER + "type = 'command'\ncommand = []",
        "stepscope.toml:3: command must be a program and its arguments, as a text or an array of texts",
    ),
    (
        RECEIVER + "type = 'alertmanager'\nlabels = { 'a b' = 'x' }",
        'stepscope.toml:3: "a b" is not the name of a label',
    ),
]


@pytest.mark.parametrize(("text", "line"), MISTAKES, ids=[line.partition(": ")[2][:40] for _, line in MISTAKES])
def test_a_mistake_is_one_line_with_its_place(load: Load, text: str, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(text)
    assert str(caught.value) == line
    assert caught.value.exit_code == 2
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "environ", "line"),
    [
        (
            ["slak"],
            {},
            '--alert: "slak" is not a receiver, an address, a measure or a kind of finding; did you mean slack?',
        ),
        (["no_step=x", "command=a"], {}, '--alert: no_step: seconds must be a number from 1 to 10,000,000, not "x"'),
        (["no_step<3"], {}, "--alert: no_step is compared with >"),
        (["mfu"], {}, "--alert: mfu needs a level, such as mfu<30%"),
        (["run_failed=3"], {}, "--alert: run_failed has no level"),
        (["drift<3%"], {}, "--alert: drift can have a least cost, such as drift>10%"),
        (["no_step"], {}, "--alert: no_step has no receiver; add one, such as --alert slack (docs/alerts.md)"),
        (["alertmanager="], {}, "--alert: alertmanager= needs a value"),
        (["alertmanager=host:9093"], {}, "--alert: the address of alertmanager must begin with http:// or https://"),
        (["https://"], {}, "--alert: the address of webhook is not a valid address"),
        (
            ["pagerduty=s3cret"],
            {},
            f"--alert: {NO_KEY} --alert pagerduty",
        ),
        (
            ["slack"],
            {"SLACK_BOT_TOKEN": "xoxb-s3cret"},
            f"--alert: receiver slack: {USE_BOT}",
        ),
        (
            ["slack"],
            {"SLACK_WEBHOOK_URL": "s3cret"},
            f"--alert: receiver slack: {NO_ADDRESS}",
        ),
        ([], {"STEPSCOPE_ALERT": "'s3cret"}, "STEPSCOPE_ALERT: a quotation mark is not closed"),
        (
            ["command=./p --password s3cret"],
            {},
            f"--alert: {IN_COMMAND}",
        ),
    ],
)
def test_a_mistake_in_a_word(load: Load, words: list[str], environ: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        load("", *words, **environ)
    assert str(caught.value) == line
    assert "s3cr" not in str(caught.value)


def test_the_users_own_file_may_contain_a_secret_if_only_they_can_read_it(load: Load) -> None:
    own = f'[alerts.receivers.slack]\nurl = "{HOOK}"\n'
    assert load(own=own).receivers["slack"].secrets["url"].reveal({}) == HOOK
    with pytest.raises(UsageError) as caught:
        load(own=own, own_mode=0o644)
    place = "~/.config/stepscope/config.toml"
    assert str(caught.value) == (
        f"{place}:2: url is a secret, but others can read this file; run `chmod 600 {place}`, or "
        + INSTEAD.format(key="url", name="SLACK_WEBHOOK_URL")
    )


def test_a_file_with_a_secret_must_be_private(load: Load, project: Path) -> None:
    text = '[alerts.receivers.slack]\nurl = { file = "hook" }\n'
    path = project / "hook"
    where = "stepscope.toml:1: receiver slack: "
    off = " (--alert off runs without alerts)"
    with pytest.raises(UsageError) as caught:
        load(text)
    assert str(caught.value) == f"{where}{path} cannot be read: No such file or directory{off}"
    path.write_text(HOOK + "\n")
    path.chmod(0o640)
    with pytest.raises(UsageError) as caught:
        load(text)
    assert str(caught.value) == f"{where}{path} can be read by others; run `chmod 600 {path}`{off}"
    path.chmod(0o600)
    assert load(text).receivers["slack"].secrets["url"].reveal({}) == HOOK
    path.write_text(f"{HOOK}\nmore\n")
    with pytest.raises(UsageError) as caught:
        load(text)
    assert str(caught.value) == f"{where}{path} must contain the secret and nothing else, on one line{off}"


def test_unreadable_files(load: Load, project: Path) -> None:
    path = project / "stepscope.toml"
    path.write_bytes(b"a = 1\n\xff")
    with pytest.raises(UsageError, match=r"^stepscope\.toml:2: not UTF-8$"):
        load()
    path.write_bytes(b"#" * 70_000)
    with pytest.raises(UsageError, match=r"^stepscope\.toml is larger than 64 KiB$"):
        load()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match=r"^stepscope\.toml cannot be read: not a regular file$"):
        load()


# -- secrets ----------------------------------------------------------------------------------------------------------


def test_a_secret_does_not_show(load: Load) -> None:
    found = load("", HOOK, own=f'[alerts.receivers.pd]\ntype = "pagerduty"\nrouting_key = "{"k" * 32}"\n')
    shown = f"{found!r} {found} {describe(found)}"
    assert "s3cr" not in shown
    assert "kkkk" not in shown
    secret = found.receivers["slack"].secrets["url"]
    assert (repr(secret), str(secret)) == ("<Secret: given directly>", "<Secret: given directly>")
    for write in (pickle.dumps, json.dumps, lambda value: json.dumps(encoded(value))):
        with pytest.raises(TypeError):
            write(secret)


def test_settings_are_handed_over(load: Load) -> None:
    found = load(BOTH, HOOK, "command=true", "mfu<30%", TEAM_URL=HOOK)
    variables = settings_variables(found, secrets=True)
    restored = settings_from(variables)
    assert (restored.rules, restored.receivers) == (found.rules, found.receivers)
    assert (restored.group_seconds, restored.messages_per_hour) == (20.0, 5)
    for_hub = settings_variables(found, secrets=False)
    assert "s3cr" not in str(for_hub)
    assert list(settings_from(for_hub).receivers) == list(found.receivers)
    assert settings_from({}) == AlertSettings()
    with pytest.raises(UsageError):
        settings_from({"STEPSCOPE_ALERT_SETTINGS": "{}"})


@pytest.mark.parametrize(
    ("word", "hidden"),
    [
        ("https://host/hook", True),
        ("discord://a/b", True),
        ("alertmanager=http://host:9093", False),
        ("alertmanager=http://u:p@host:9093", True),
        ("slack", False),
        ("command=./x", False),
    ],
)
def test_which_words_do_not_stay_on_the_command_line(word: str, hidden: bool) -> None:
    assert holds_address(word) is hidden


def test_the_complete_file_of_the_documentation_is_valid(load: Load) -> None:
    page = (Path(__file__).parents[2] / "docs" / "alert-settings.md").read_text()
    (text,) = [block.partition("```")[0] for block in page.split("```toml\n")[1:] if block.startswith("[alerts]")]
    text = text.replace('{ file = "~/.config/stepscope/slack-token" }', '{ env = "TOKEN" }')
    names = ("TEAM_SLACK_URL", "PAGERDUTY_ROUTING_KEY", "STEPSCOPE_WEBHOOK_SECRET", "APPRISE_URL", "TOKEN")
    found = load(
        text, "team", "threads", "oncall", "prometheus", "ours", "script", "mail", **dict.fromkeys(names, HOOK)
    )
    assert sorted(found.receivers) == ["mail", "oncall", "ours", "prometheus", "script", "team", "threads"]
    assert [rule.name for rule in found.rules][-3:] == ["slow", "stuck", "run_finished"]


def test_measures_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "alert-settings.md").read_text()
    for name, about in MEASURES.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert all(f"`{key}`" in row for key in about.parameters)
        defaults = [parameter.default for parameter in about.parameters.values() if parameter.default is not None]
        assert all(f"({default:g})" in row for default in defaults)


# -- any text ---------------------------------------------------------------------------------------------------------

_PARTS = st.sampled_from(
    [
        *("[alerts]\n", "[[alerts.rules]]\n", "[alerts.receivers.a]\n", '[alerts."re ceivers"]\n', "\n", "# c\n"),
        *('measure = "no_step"\n', "seconds = 1\n", 'findings = ["any"]\n', 'type = "webhook"\n', "url = "),
        *(
            '{ env = "A" }\n',
            "'''\nx''''\n",
            '"""a\\"\n"""\n',
            '"https://h/x"\n',
            "[1, {a = 2},\n 3]\n",
            "1979-05-27\n",
        ),
        *(
            "1979-05-27\n",
            "send_to = ",
            "a.b.'c' = 1\n",
            "defaults = ",
            "inf\n",
            "true\n",
            "[]\n",
            "{}\n",
            '"é"\n',
            "=",
            "]",
            '"',
        ),
    ]
)


@settings(max_examples=examples(1500), deadline=None)
@given(st.one_of(st.lists(_PARTS, max_size=25).map("".join), st.text(max_size=60)))
def test_any_text_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-text"
    folder.mkdir(exist_ok=True)
    (folder / "stepscope.toml").write_text(text, encoding="utf-8", errors="replace", newline="")
    try:
        load_settings(folder, (), {"HOME": str(folder)})
    except StepscopeError as error:
        assert str(error).startswith("stepscope.toml")
        assert str(error).isprintable()


@settings(max_examples=examples(800), deadline=None)
@given(st.lists(_PARTS, max_size=25).map("".join))
def test_every_key_has_a_line(text: str) -> None:
    try:
        document = parse_toml(text)
    except TomlError as error:
        assert 1 <= error.line <= text.count("\n") + 1
        return
    lines = key_lines(text)

    def check(value: object, path: tuple[str | int, ...]) -> None:
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in children:
            place = (*path, key)
            implied = any(known[: len(place)] == place for known in lines)
            assert place in lines or implied
            if place in lines and isinstance(key, str) and key.isalnum():
                assert key in text.split("\n")[lines[place] - 1]
            check(inner, place)

    check(document, ())
