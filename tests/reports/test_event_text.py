"""Events in words, whoever wrote them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from module_syntax import parsed

from stepscope.reports.event_text import EVENT_KINDS, event_document, exit_text

SOURCES = Path("src/stepscope")


def text_of(event: str, *, over: bool = False, **fields: Any) -> str:
    return str(event_document({"event": event, "node": 2, **fields}, over=over)["text"])


@pytest.mark.parametrize(
    ("event", "fields", "text"),
    [
        ("rank_start", {"rank": 3, "host": "b"}, "Rank 3 started on b."),
        ("rank_end", {"rank": 3, "state": "exited"}, "Rank 3 exited normally."),
        (
            "rank_end",
            {"rank": 3, "state": "vanished", "collective": {"op": "all_reduce"}},
            "Rank 3 vanished; its last call was all_reduce.",
        ),
        (
            "rank_end",
            {"rank": 3, "state": "vanished", "oom_kill": True},
            "Rank 3 was killed by the kernel (out of memory).",
        ),
        (
            "agent_end",
            {"host": "vm", "end": {"exit_code": -9, "status": "crashed"}},
            "Recording ended on vm: crashed, ended by SIGKILL.",
        ),
        (
            "agent_end",
            {"host": "vm", "end": {"exit_code": 1, "status": "failed"}},
            "Recording ended on vm: exit code 1.",
        ),
        ("hang", {"title": "Rank 1 sleeps."}, "The job hangs. Rank 1 sleeps."),
        ("hang", {"title": "Rank 1 sleeps.", "steps": [41, 41]}, "The job hangs in step 41. Rank 1 sleeps."),
        ("hang", {"title": "Rank 1 sleeps.", "steps": ["7", 8]}, "The job hangs. Rank 1 sleeps."),
        ("hang_over", {"seconds": 61}, "The job continues after a hang of 1 min 1 s."),
        ("not_a_hang", {"reason": "compiling."}, "No progress for a while, but no hang: compiling."),
        ("node_lost", {"host": "b", "silent_s": 12.4}, "Node 2 (b) has been silent for 12 s."),
        ("node_absent", {"nodes": [1, 2, 3, 7]}, "Not connected yet: nodes 1–3 and 7."),
        (
            "clock_skew",
            {"host": "b", "offset_ns": -2e9},
            "The clock of node 2 (b) is 2.00 s behind; times are corrected.",
        ),
        ("warning", {"message": "the disk is full"}, "The disk is full."),
        ("note", {"rank": 0, "step": 7, "values": {"loss": 0.25}}, "Rank 0 noted in step 7: loss 0.25"),
        ("finding_opened", {"step": 1234, "title": "Slow."}, "Found in step 1,234: Slow."),
        ("something_new", {"rank": 1, "why": "so"}, "Something new: rank 1, why so"),
        ("constructor", {}, "Constructor."),
    ],
)
def test_events_are_sentences(event: str, fields: dict[str, Any], text: str) -> None:
    assert text_of(event, **fields) == text


def test_once_a_run_is_over_a_hang_is_in_the_past() -> None:
    title = "Rank 1 sleeps; rank 0 waits for it."
    assert text_of("hang", over=True, steps=[7, 8], title=title) == (
        "The job hung in steps 7–8. Rank 1 slept; rank 0 waited for it."
    )


@pytest.mark.parametrize(
    ("event", "fields", "severity"),
    [
        ("rank_end", {"state": "exited"}, "info"),
        ("rank_end", {"state": "exited", "oom_kill": True}, "critical"),
        ("rank_end", {"state": "vanished"}, "critical"),
        ("node_bye", {"end": {"status": "finished"}}, "info"),
        ("node_bye", {"end": {"status": "failed"}}, "warning"),
        ("finding_opened", {"severity": "critical"}, "critical"),
        ("finding_changed", {"severity": "warning"}, "warning"),
        ("finding_resolved", {"severity": "critical"}, "info"),
        ("tomorrow", {}, "info"),
    ],
)
def test_severities(event: str, fields: dict[str, Any], severity: str) -> None:
    assert event_document({"event": event, **fields}, over=False)["severity"] == severity


def test_several_ranks_share_a_sentence() -> None:
    def continued(**fields: Any) -> str:
        return str(event_document({"event": "rank_end", "rank": 1, **fields}, over=False)["text_of_ranks"])

    assert continued(state="vanished") == "vanished."
    assert continued(state="running") == "were still running when last seen."
    assert continued(state="vanished", oom_kill=True) == "were killed by the kernel (out of memory)."
    assert event_document({"event": "rank_start", "rank": 1}, over=False)["text_of_ranks"] == "started."


odd = st.none() | st.integers() | st.text(max_size=9) | st.lists(st.integers(), max_size=2) | st.just({"a": [None, {}]})
FIELDS = (
    *("rank", "end", "nodes", "counts", "values", "git", "message", "host", "seconds", "ignored", "title", "state"),
    *("kind", "steps", "offset_ns", "source", "count", "collective", "exit_code", "step", "reason", "why", "silent_s"),
)


@settings(max_examples=examples(200))
@given(st.sampled_from([*EVENT_KINDS, "tomorrow"]), st.dictionaries(st.sampled_from(FIELDS), odd), st.booleans())
def test_any_event_is_a_sentence(event: str, fields: dict[str, Any], over: bool) -> None:
    found = event_document({"event": event, **fields}, over=over)
    assert len(found["text"]) > 3
    assert found["severity"] in ("info", "warning", "critical")
    assert found["category"]


def test_exit_codes() -> None:
    assert [exit_text(code) for code in (3, -9, -99)] == ["exit code 3", "ended by SIGKILL", "ended by signal 99"]


def events_of(root: Path) -> set[str]:
    """What is written: ``….event("name", …)``, news of the sender, and the notes of the store."""
    found = set()
    for folder in ("agent", "hub", "store", "cli", "records"):
        for path in (root / SOURCES / folder).rglob("*.py"):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    first = node.args[0]
                    if node.func.attr == "append" and "news" in ast.unparse(node.func.value):
                        first = first.elts[0] if isinstance(first, ast.Tuple) else first
                    elif node.func.attr != "event":
                        continue
                    if isinstance(first, ast.Constant) and isinstance(first.value, str):
                        found.add(first.value)
                if isinstance(node, ast.Dict):
                    pairs = zip(node.keys, node.values, strict=True)
                    found |= {
                        value.value
                        for key, value in pairs
                        if isinstance(key, ast.Constant)
                        and key.value == "event"
                        and isinstance(value, ast.Constant)
                        and isinstance(value.value, str)
                    }
    return found - {"VARCHAR"}  # a column of a table


OF_EARLIER_VERSIONS = {"finding_opened", "finding_changed", "finding_resolved"}
"""Since November 2026 they are in ``finding-history.jsonl``."""


def test_every_kind_that_is_written_has_a_sentence(root: Path) -> None:
    written = events_of(root)
    assert {"rank_start", "hub_lost", "node_lost", "hang", "note"} <= written
    assert set(EVENT_KINDS) == written | OF_EARLIER_VERSIONS
