"""Questions in Slack: what is understood, what is answered, and the connection against a fake of Slack on loopback."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from fake_slack import APP_TOKEN, BOT_TOKEN, FakeSlack
from hypothesis import given
from hypothesis import strategies as st

from stepscope.alerts.incident_file import append_incident
from stepscope.alerts.model import Incident
from stepscope.alerts.requests import run_silences
from stepscope.assistant.hub_api import HubApi
from stepscope.assistant.slack_questions import (
    HELP_TEXT,
    Question,
    answer_question,
    parse_question,
    slack_message,
)
from stepscope.errors import HubError
from stepscope.hub.runs import Runs


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("<@U1> what is wrong with night?", Question(kind="verdict", run="night")),
        ("What's wrong with Night-2?!", Question(kind="verdict", run="Night-2")),
        ("what\u2019s wrong with `night`", Question(kind="verdict", run="night")),
        ("<@U1|stepscope> what is wrong", Question(kind="verdict")),
        ("why is night so slow?", Question(kind="verdict", run="night")),
        ("why did night crash", Question(kind="verdict", run="night")),
        ("status night", Question(kind="verdict", run="night")),
        ("what is wrong with <http://train.py|train.py>", Question(kind="verdict", run="train.py")),
        ("what is wrong with a&amp;b", Question(kind="verdict", run="a&b")),
        ("Status", Question(kind="status")),
        ("<@U1>   status  ", Question(kind="status")),
        ("incidents", Question(kind="incidents")),
        ("incidents night", Question(kind="incidents", run="night")),
        ("incident night #2", Question(kind="incidents", run="night", number=2)),
        ("incidents 2", Question(kind="incidents", number=2)),
        ("goodput night", Question(kind="goodput", run="night")),
        ("silence night 2h", Question(kind="silence", run="night", seconds=7200)),
        ("mute night for 30 min", Question(kind="silence", run="night", seconds=1800)),
        ("ack night 3", Question(kind="acknowledge", run="night", number=3)),
        ("help", Question(kind="help")),
        ("<@U1>", Question(kind="help")),
        ("silence night", Question(kind="help", problem="I do not understand “silence night”.")),
        ("rm -rf /", Question(kind="help", problem="I do not understand “rm -rf /”.")),
    ],
)
def test_what_is_understood(text: str, question: Question) -> None:
    assert parse_question(text) == question


@given(st.text(max_size=3000))
def test_any_text_is_a_question_and_any_answer_fits(text: str) -> None:
    assert parse_question(text).kind
    message = slack_message(text * 20)
    assert len(message["blocks"]) <= 50
    assert all(0 < len(block["text"]["text"]) <= 3000 for block in message["blocks"])


def answers(folder: Path, *texts: str, may_change: bool = False) -> list[str]:
    async def work() -> list[str]:
        api = HubApi(Runs.of_folder(folder), changes=may_change)
        try:
            questions = [parse_question(text) for text in texts]
            return [await answer_question(api, question, may_change=may_change, by="U1") for question in questions]
        finally:
            await api.close()

    return asyncio.run(work())


def test_answers_are_those_of_the_page(folder: Path) -> None:
    wrong, status, missing, hostile, unclear, goodput = answers(
        folder, "what is wrong with night", "status", "status nihgt", "status <!channel>&amp;", "sing", "goodput night"
    )
    assert wrong == (
        "*night*: finished, 4 ranks, step 199\n"
        "🔴 *Rank 2 is 29.6 ms slower than its peers in forward every step; all other ranks wait for it.*\n"
        "It costs 43% of the training time (5.89 s); without it a step takes 39.4 ms instead of 69.0 ms on average, "
        "1.75× as fast.\n"
        "• Check that rank 2 (host node0) computes the same as the others: batch shape, sequence length, branches.\n"
        "• If all ranks do the same work, check the machine: other processes on its cores or device, clocks, "
        "throttling."
    )
    assert status == (
        "*No run is active.*\n*Newest others*\n• *hung*: finished, 4 ranks, 40 steps\n• *night*: finished, 1 min 45 s"
    )
    assert missing == "there is no run named nihgt; the newest are hung, night"
    assert hostile == "there is no run named &lt;!channel&gt;&amp;; the newest are hung, night"
    assert goodput == (
        "night: 13% of 1 min 45 s was useful training.\n"
        "Most time: shutdown 1 min 26 s, training 13.8 s, start_up 5.00 s, compile 200 ms."
    )
    assert unclear == f"I do not understand “sing”.\n{HELP_TEXT}"


def test_only_allowed_people_silence_and_acknowledge(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder / "night", runs / "night")
    append_incident(
        runs / "night",
        Incident(number=2, topic="speed", state="open", kind="jitter", severity="warning", title="Steps vary <much>."),
    )
    texts = ("silence night 90m", "ack night 2", "ack night 7")
    refusal = "only people that `stepscope slack --allow-changes` was started for may do this"
    assert answers(runs, *texts) == [refusal] * 3
    assert run_silences(runs / "night") == []
    silenced, acknowledged, missing = answers(runs, *texts, may_change=True)
    (silence,) = run_silences(runs / "night")
    assert silence.until_wall_ns - silence.from_wall_ns == 5400 * 10**9
    until = re.fullmatch(r"No messages of night until (20\S+Z). Incidents are still recorded.", silenced)
    assert until is not None
    assert until[1] > datetime.now(timezone.utc).isoformat()  # the run was recorded years ago
    assert acknowledged == "Acknowledged incident 2 of night."
    assert missing == "night has no incident 7; its incidents: 2"
    listed, details = answers(runs, "incidents night", "incident night 2")
    assert listed == "*night*: 1 incident\n🟠 2, open: Steps vary &lt;much&gt;."
    assert details.startswith("Incident 2 of night: Steps vary &lt;much&gt;.")


@pytest.fixture
def slack() -> Iterator[FakeSlack]:
    fake = FakeSlack()
    yield fake
    fake.close()


def mention(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "app_mention", "user": "U1", "channel": "C1", "ts": "1.0", "text": f"<@UBOT> {text}", **more}


def test_questions_over_a_socket_are_answered_once_in_their_thread(folder: Path, slack: FakeSlack) -> None:
    """The command line with slack_sdk's own client, against the fake: answers, repeated events, a new connection."""
    environ = {**os.environ, "SLACK_APP_TOKEN": APP_TOKEN, "SLACK_BOT_TOKEN": BOT_TOKEN}
    words = [sys.executable, "-m", "stepscope", "slack", str(folder), "--api-url", slack.url]
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert slack.connected.acquire(timeout=60)
        slack.send(mention("status", bot_id="B1"), envelope="e0", event_id="E0")
        slack.send({**mention("status"), "type": "message", "channel_type": "channel"}, envelope="e1", event_id="E1")
        slack.send(mention("what is wrong with night?"), envelope="e2", event_id="E2")
        slack.send(mention("what is wrong with night?"), envelope="e3", event_id="E2")
        first = slack.posted.get(timeout=60)
        assert (first["channel"], first["thread_ts"]) == ("C1", "1.0")
        assert "Rank 2 is 29.6 ms slower than its peers" in first["text"]
        slack.disconnect()
        assert slack.connected.acquire(timeout=60)
        direct = {"type": "message", "channel_type": "im", "user": "U1", "channel": "D1", "ts": "3.0", "text": "status"}
        slack.send({**direct, "thread_ts": "2.5"}, envelope="e4", event_id="E4")
        second = slack.posted.get(timeout=60)
        assert (second["channel"], second["thread_ts"], second["text"][:23]) == (
            "D1",
            "2.5",
            "*No run is active.*\n*Ne",
        )
        assert sorted(slack.confirmed.get(timeout=60) for _ in range(5)) == ["e0", "e1", "e2", "e3", "e4"]
        assert slack.posted.empty()
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, "stepscope: connected to Slack; Ctrl-C to stop\n")


def test_refused_and_unreachable(folder: Path, slack: FakeSlack) -> None:
    from stepscope.assistant.slack_socket import SlackBot, SlackOptions

    def connect(**options: str) -> str:
        async def work() -> None:
            api = HubApi(Runs.of_folder(folder))
            given = {"app_token": APP_TOKEN, "bot_token": BOT_TOKEN, "api_url": slack.url, **options}
            try:
                await SlackBot(api, SlackOptions(**given)).run()
            finally:
                await api.close()

        with pytest.raises(HubError) as refused:
            asyncio.run(work())
        return str(refused.value)

    assert connect(bot_token="xoxb-wrong") == "Slack refused the connection: invalid_auth"
    assert connect(app_token="xapp-wrong") == "Slack refused the connection: invalid_auth"
    assert re.fullmatch(
        r"cannot reach Slack at http://127.0.0.1:1/api/: \w+", connect(api_url="http://127.0.0.1:1/api/")
    )
