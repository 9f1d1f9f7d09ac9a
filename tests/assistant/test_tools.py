"""What the tools answer, how they refuse hostile arguments, and how long an answer may be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import WALL_NS

from stepscope.alerts.incident_file import append_incident
from stepscope.alerts.model import Incident
from stepscope.alerts.requests import RequestDesk, run_silences
from stepscope.assistant.answers import Answer, bounded
from stepscope.assistant.tools import CHANGING_TOOLS, READING_TOOLS
from stepscope.records.finding_history import FindingEpisode, episode_line
from stepscope.store.catalog import read_labels
from stepscope.store.file_io import append_jsonl
from stepscope.store.paths import FINDING_HISTORY
from tests.assistant.conftest import LINE, SECRET, STEP_S, document_of, in_loop

Ask = Callable[..., Any]
PRICE = (
    "43% of the training time (5.89 s); without it a step takes 39.4 ms instead of 69.0 ms on average, 1.75× as fast."
)


def test_the_verdict_with_its_evidence(ask: Ask) -> None:
    result = ask("get_verdict", run="night")
    assert result.content[0].text.splitlines()[:3] == [
        "night: finished, 4 ranks, step 199.",
        "Rank 2 is 29.6 ms slower than its peers in forward every step; all other ranks wait for it.",
        PRICE,
    ]
    verdict = document_of(result)["verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["phase"]) == ("compute_straggler", [2], "forward")
    assert verdict["evidence"]["hosts"] == ["node0"]


def test_lines_around_a_step_and_lines_with_a_word(ask: Ask) -> None:
    def numbers(**arguments: object) -> list[int]:
        return [
            int(line.split()[1]) for line in document_of(ask("read_log", run="night", rank=2, **arguments))["lines"]
        ]

    around = numbers(step=100, lines=40)
    assert len(around) == 40
    assert around[20] == int(7.0 / STEP_S)  # step 100 began 7.1 s after the first; the log was measured at 7.0 s
    assert numbers(lines=3) == [197, 198, 199]
    assert numbers(words=["0007 ", "STEP 0100"]) == [7, 100]
    assert numbers(words=["loss"], step=100, lines=2) == [around[20] - 1, around[20]]
    assert numbers(from_byte=len(LINE.format(0)) * 5, lines=2) == [5, 6]
    follow = document_of(ask("read_log", run="night", rank=2, lines=1, from_byte=0))["next_byte"]
    assert numbers(from_byte=follow, lines=1) == [1]


def test_the_history_of_findings(changed: Callable[..., Any], tmp_path: Path) -> None:
    finding = {"kind": "jitter", "severity": "warning", "title": "Steps vary.", "ranks": [1], "phase": None}
    about = {"number": 1, "finding": finding, "attempt": 0, "first_step": 20, "first_wall_ns": WALL_NS}
    opened = FindingEpisode(**about, change="opened", step=20, wall_ns=WALL_NS)
    over = FindingEpisode(**about, change="resolved", step=90, wall_ns=WALL_NS + 60 * 10**9)
    append_jsonl(tmp_path / "runs" / "night" / FINDING_HISTORY, [episode_line(opened), episode_line(over)])
    result = changed("get_findings", run="night", history=True)
    (row,) = document_of(result)["history"]
    assert (row["kind"], row["open"], row["first_step"], row["last_step"]) == ("jitter", False, 20, 90)
    assert [change["change"] for change in row["changes"]] == ["opened", "resolved"]
    assert result.content[0].text.endswith("History:\nSteps vary. Steps 20 to 90, 1 min: warning.")


def test_an_incident_with_its_sources(ask: Ask) -> None:
    listed = document_of(ask("list_incidents", run="night"))
    assert [(row["number"], row["kind"], row["ranks"]) for row in listed["incidents"]] == [
        (1, "compute_straggler", [2])
    ]
    whole = document_of(ask("get_incident", run="night"))
    assert whole["incident"]["title"].startswith("Rank 2 is 29.6 ms slower")
    assert any("summary.json" in row for row in whole["impact"]["statements"])
    onset = document_of(ask("get_incident", run="night", number=1, section="onset"))
    assert sorted(onset) == ["incident", "onset", "run"]
    assert ask("get_incident", run="night", number=5).content[0].text == "night has no incident 5; its incidents: 1"


def test_without_a_name_the_newest_run_answers(ask: Ask) -> None:
    assert document_of(ask("get_hangs"))["run"] == "hung"


HOSTILE: list[tuple[str, dict[str, object], str]] = [
    ("get_verdict", {"run": "../night"}, "'../night' is not the name of a run; list_runs shows all runs"),
    (
        "get_verdict",
        {"run": "night/../../secret"},
        "'night/../../secret' is not the name of a run; list_runs shows all",
    ),
    ("get_verdict", {"run": "/etc/passwd"}, "'/etc/passwd' is not the name of a run; list_runs shows all runs"),
    ("get_verdict", {"run": "night\n"}, "'night\\n' is not the name of a run; list_runs shows all runs"),
    ("get_verdict", {"run": "n\0"}, "run contains characters that are not allowed"),
    ("get_verdict", {"run": "x" * 300}, "run must be a text of 1 to 256 characters"),
    ("get_verdict", {"run": ""}, "run must be a text of 1 to 256 characters"),
    ("get_verdict", {"run": 7}, "run must be a text of 1 to 256 characters"),
    ("get_verdict", {"run": ["night"]}, "run must be a text of 1 to 256 characters"),
    ("get_verdict", {"run": "nihgt"}, "there is no run named nihgt; the newest are hung, night"),
    ("get_verdict", {"path": "/etc"}, "unknown argument 'path'; get_verdict accepts run"),
    ("list_runs", {"limit": 10**30}, "limit must be an integer from 1 to 100"),
    ("list_runs", {"limit": -1}, "limit must be an integer from 1 to 100"),
    ("list_runs", {"limit": True}, "limit must be an integer from 1 to 100"),
    ("list_runs", {"limit": "5"}, "limit must be an integer from 1 to 100"),
    ("list_runs", {"first": 1.5}, "first must be an integer of at least 0"),
    ("list_runs", {"active": "yes"}, "active must be true or false"),
    ("get_steps", {"run": "night", "bins": 10**6}, "bins must be an integer from 1 to 200"),
    ("get_ranks", {"run": "night", "order": "; drop"}, "order must be one of rank, work, wall"),
    ("get_samples", {"run": "night", "kind": "disk"}, "kind must be one of host, process, gpu, probe"),
    ("get_samples", {"run": "night", "around": "soon"}, "time must be like 2026-11-18T17:05:00Z"),
    ("get_samples", {"run": "night", "around": "1900-01-01"}, "time must be after 1970"),
    ("get_samples", {"run": "night", "fields": []}, "fields must be a list of 1 to 64 texts"),
    ("get_samples", {"run": "night", "fields": ["x"] * 100}, "fields must be a list of 1 to 64 texts"),
    ("get_hangs", {"run": "hung", "number": 9}, "hung has 1 hang; number counts from 1"),
    ("compare_runs", {"baseline": "night"}, "runs is required: names or IDs of the runs to compare"),
    ("compare_runs", {"baseline": "night", "runs": ["../x"]}, "'../x' is not the name of a run"),
    ("read_log", {"run": "night", "rank": 99}, "there is no such rank"),
    ("read_log", {"run": "night", "rank": 2, "step": 10**9}, "step 1000000000 is not known"),
    ("read_log", {"run": "night", "step": 1}, "step needs a rank"),
    ("read_log", {"run": "night", "rank": 2, "step": 1, "from_byte": 0}, "use only one of step, time and from_byte"),
    ("read_log", {"run": "night", "file": "../secret.txt"}, "there is no such file"),
    ("read_log", {"run": "night", "file": "logs/../../../secret.txt"}, "there is no such file"),
    ("read_log", {"run": "night", "file": "/etc/passwd"}, "there is no such file"),
    ("read_log", {"run": "night", "file": "run.json/../labels.json"}, "there is no such file"),
    ("query_sql", {"run": "night", "sql": "drop table steps"}, "SQL: DROP is not allowed: queries can only read"),
    ("query_sql", {"run": "night", "sql": "insert into steps select * from steps"}, "SQL: INSERT is not allowed"),
    ("query_sql", {"run": "night", "sql": "copy steps to '/tmp/x'"}, "SQL: COPY is not allowed"),
    ("query_sql", {"run": "night", "sql": "attach '/tmp/x.db'"}, "SQL: ATTACH is not allowed"),
    ("query_sql", {"run": "night", "sql": "set memory_limit='1TB'"}, "SQL: SET is not allowed"),
    ("query_sql", {"run": "night", "sql": "install httpfs"}, "SQL: LOAD is not allowed"),
    ("query_sql", {"run": "night", "sql": "select * from read_text('/etc/passwd')"}, "SQL: Permission Error"),
    ("query_sql", {"run": "night", "sql": "select * from '../../secret.txt'"}, "SQL: Catalog Error"),
    ("query_sql", {"run": "night", "sql": "select 1; select 2"}, "SQL: only one statement is allowed"),
    ("query_sql", {"run": "night", "sql": "selec"}, "SQL: Parser Error"),
    ("query_sql", {"run": "night", "sql": "select list(range) from range(3000000000)"}, "SQL: Out of Memory Error"),
    ("query_sql", {"run": "night", "sql": "x" * 20_000}, "sql must be a text of 1 to 10000 characters"),
    ("query_sql", {"run": "night", "sql": "select 1", "rows": 10**9}, "rows must be an integer from 1 to 500"),
    ("label_run", {"run": "night", "note": "x"}, "there is no tool 'label_run'; the tools are list_runs, "),
    ("silence_run", {"run": "night", "minutes": 5}, "there is no tool 'silence_run'"),
    ("delete_everything", {}, "there is no tool 'delete_everything'"),
]


def test_hostile_arguments_get_clear_errors(connect: Callable[..., Any], folder: Path) -> None:
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))

    async def work() -> list[tuple[bool, str]]:
        async with connect() as client:
            results = [await client.call_tool(name, arguments) for name, arguments, _ in HOSTILE]
            return [(result.is_error, result.content[0].text) for result in results]

    for (name, arguments, expected), (failed, text) in zip(HOSTILE, in_loop(work), strict=True):
        assert failed, (name, arguments)
        assert text.startswith(expected), (name, arguments, text)
        assert SECRET not in text
        assert "\n" not in text
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("*")) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=examples(200))
@given(data=st.data())
def test_any_arguments_get_an_answer_of_bounded_size(connect: Callable[..., Any], data: st.DataObject) -> None:
    """Three calls each: random tools with random values for their own arguments and for others."""
    calls = []
    for _ in range(3):
        tool = data.draw(st.sampled_from(READING_TOOLS))
        names = st.sampled_from([*(argument.name for argument in tool.arguments), "other"])
        values = JSON | st.sampled_from(["night", "hung", ["night"], "select * from steps", 0, 5, True])
        calls.append((tool.name, data.draw(st.dictionaries(names, values, max_size=4))))

    async def work() -> None:
        async with connect() as client:
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                if not result.is_error:
                    assert len(msgspec.json.encode(result.structured_content)) <= 20_000
                assert 0 < len(result.content[0].text) <= 3000
                assert SECRET not in repr(result)

    in_loop(work)


def test_a_long_answer_says_what_is_left_out_and_how_to_get_it(ask: Ask) -> None:
    result = ask("query_sql", run="night", sql="select * from steps", rows=500)
    document = document_of(result)
    assert len(msgspec.json.encode(document)) <= 20_000
    row = document["truncated"][0]
    assert (row["at"], row["shown"], row["of"]) == ("rows", len(document["rows"]), 500)
    assert document["more"] == "aggregate in SQL, select fewer columns, or use LIMIT and OFFSET"
    assert result.content[0].text.endswith(f"(The answer is truncated: {document['more']}.)")


@given(JSON, st.integers(2_000, 30_000))
def test_every_document_fits(value: Any, most: int) -> None:
    document = json.loads(json.dumps({"a": [value] * 400, "b": {str(at): value for at in range(300)}}, default=str))
    made = bounded(Answer(text="x" * 9000, document=document), most)
    assert len(msgspec.json.encode(made.document)) <= most
    assert len(made.text) <= 2_200


@pytest.fixture
def changed(folder: Path, tmp_path: Path, connect: Callable[..., Any]) -> Callable[..., Any]:
    """``changed("label_run", run=…)``: a call that may change a copy of the runs."""
    from stepscope.assistant.mcp_server import ServerOptions

    copy = tmp_path / "runs"
    shutil.copytree(folder / "night", copy / "night")

    def call(name: str, **arguments: object) -> Any:
        async def work() -> Any:
            async with connect(ServerOptions(changes=True), copy) as client:
                return await client.call_tool(name, arguments)

        return in_loop(work)

    return call


def test_changes_only_if_they_were_allowed(changed: Callable[..., Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "night"
    assert document_of(changed("label_run", run="night", tags=["bad"], note="slow rank"))["tags"] == ["bad"]
    assert (read_labels(run_dir).tags, read_labels(run_dir).note) == (("bad",), "slow rank")
    assert changed("label_run", run="night").content[0].text == "give a name, tags or a note"

    made = document_of(changed("silence_run", run="night", minutes=120, kind="compute_*", why="known"))
    (silence,) = run_silences(run_dir)
    assert (silence.id, silence.kind, silence.why) == (made["silence"], "compute_*", "known")
    assert silence.until_wall_ns - silence.from_wall_ns == 7200 * 10**9

    refused = changed("acknowledge_incident", run="night", incident=7)
    assert (refused.is_error, refused.content[0].text) == (True, "night has no incident 7; its incidents: 1")
    title = "Rank 2 is slow."
    append_incident(
        run_dir,
        Incident(number=1, topic="speed", state="open", kind="compute_straggler", severity="critical", title=title),
    )
    text = changed("acknowledge_incident", run="night", incident=1).content[0].text
    assert text == "Acknowledged incident 1 of night."
    (acknowledged,) = RequestDesk(run_dir, {"XDG_STATE_HOME": str(tmp_path)}).acknowledgments()
    assert (acknowledged.incident, acknowledged.by) == (1, "an assistant, over MCP")


def test_tools_are_declared_for_assistants() -> None:
    for tool in (*READING_TOOLS, *CHANGING_TOOLS):
        assert tool.changes is (tool in CHANGING_TOOLS)
        assert len(tool.about) <= 400
        assert all(argument.about for argument in tool.arguments)
