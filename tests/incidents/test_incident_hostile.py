"""Incidents of runs that come from anyone: a document is still made, of bounded size, and nothing in it is obeyed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_incidents import Made, as_text, hang, slow_rank

from stepscope.incidents.builder import MOST_BYTES
from stepscope.incidents.document import incidents_in
from stepscope.incidents.text import incident_markdown, incident_text, incidents_markdown, incidents_text
from stepscope.reports import summarize
from stepscope.store.paths import FINDING_HISTORY, INCIDENTS, META, OUTBOX, SENT, SUMMARY

ODD: list[Any] = [
    *(None, True, -1, 0, 1 << 70, 1e308, -0.5, "", "x" * 10_000, "\x1b[31m\u202e</script>|`*", "../../etc/passwd"),
    *([], [[]], {}, {"a": {"b": []}}, [None, 3, "x"], {"text": "y"}, "\ud800"),
]
FILES = (INCIDENTS, FINDING_HISTORY, OUTBOX, SENT, META, SUMMARY)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return slow_rank(tmp_path_factory.mktemp("hostile"))


def damaged(value: Any, chance: random.Random) -> Any:
    """The same document with some values replaced."""
    if chance.random() < 0.04:
        return chance.choice(ODD)
    if isinstance(value, dict):
        return {key: damaged(inner, chance) for key, inner in value.items()}
    if isinstance(value, list):
        return [damaged(inner, chance) for inner in value]
    return value


def damaged_lines(text: str, chance: random.Random) -> Iterator[str]:
    for line in text.splitlines():
        yield (
            line[: chance.randrange(len(line) + 1)]
            if chance.random() < 0.1
            else json.dumps(damaged(json.loads(line), chance))
        )


def check(document: dict[str, Any] | None) -> None:
    if document is None:
        return
    text = as_text(document)
    json.loads(json.dumps(document, allow_nan=False))
    assert len(json.dumps(document)) <= MOST_BYTES
    shown = incident_markdown(document) + incident_text(document, width=60)
    assert "\x1b" not in shown and "\u202e" not in shown and "hunter2" not in shown + text


@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_damaged_files_still_give_documents(made: Made, seed: int) -> None:
    chance = random.Random(seed)
    before = {name: (made.run_dir / name).read_text() for name in FILES}
    summary = damaged(summarize(made.run), chance)
    run = replace(
        made.run,
        meta={**made.run.meta, **{key: damaged(made.run.meta[key], chance) for key in ("command", "git", "cwd")}},
        samples=tuple(row for row in (damaged(row, chance) for row in made.run.samples) if isinstance(row, dict)),
        events=({"event": "rank_end", "wall_ns": chance.choice(ODD)}, {"event": "note", "values": chance.choice(ODD)}),
        stacks=({"rank": chance.choice(ODD), "wall_ns": made.run.samples[9]["wall_ns"], "frames": chance.choice(ODD)},),
    )
    try:
        for name in FILES[:4]:
            (made.run_dir / name).write_text("\n".join(damaged_lines(before[name], chance)))
        good = made.runs / "good"
        (good / SUMMARY).write_text(json.dumps(damaged(json.loads((good / SUMMARY).read_text()), chance)))
        found = incidents_in(made.run_dir, run, summary if isinstance(summary, dict) else {}, over=True)
        listed = found.list()
        assert incidents_markdown(listed) and incidents_text(listed, width=60)
        for row in listed["incidents"][:4]:
            check(found.document(row["number"]))
    finally:
        for name, text in before.items():
            (made.run_dir / name).write_text(text)


def test_other_things_in_place_of_files_are_left_out(tmp_path: Path) -> None:
    made = hang(tmp_path)
    (made.run_dir / INCIDENTS).mkdir()
    (made.run_dir / "captures").symlink_to("/etc")
    (made.run_dir / "logs" / "rank-1.log").unlink()
    (made.run_dir / "logs" / "rank-1.log").symlink_to("/etc/passwd")
    (made.runs / "loop").symlink_to(made.runs)
    incidents = made.incidents()
    assert incidents.list()["incidents"] == []
    (made.run_dir / INCIDENTS).rmdir()
    document = made.incidents().document(1)
    assert document is not None
    assert "captures" not in document
    assert document["logs"]["pieces"] == []
    assert "root:" not in as_text(document)
    assert made.incidents().document(2) is None and made.incidents().document(-1) is None


def test_a_huge_document_is_shortened(tmp_path: Path) -> None:
    made = slow_rank(tmp_path)
    (made.run_dir / "logs" / "rank-2.log").write_text(("x" * 299 + "\n") * 500)
    frames = [{"file": "/" + "f" * 250, "line": 1, "function": "g" * 250}] * 50
    wall_ns = made.run.samples[60]["wall_ns"]
    stacks = tuple(
        {"rank": 2, "wall_ns": wall_ns + at, "step": 1, "phase": str(at), "frames": frames} for at in range(40)
    )
    huge = replace(made.run, stacks=stacks)
    summary = summarize(made.run)
    lines = [json.loads(line) for line in (made.run_dir / FINDING_HISTORY).read_text().splitlines()]
    for line in lines:
        line["finding"]["evidence"] = {f"key {at}": "y" * 1000 for at in range(600)}
    (made.run_dir / FINDING_HISTORY).write_text("\n".join(map(json.dumps, lines)) + "\n")
    document = incidents_in(made.run_dir, huge, summary, over=True).document(1)
    assert document is not None and document["shortened"]
    check(document)
