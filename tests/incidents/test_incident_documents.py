"""Documents of incidents: exact for three of them, with a source for every statement, and bounded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import ANCHOR_WALL_NS, Cluster
from made_incidents import Made, as_text, crash, hang, make_runs, slow_rank, write_log

from stepscope.alerts.incident_file import append_incident
from stepscope.alerts.model import Incident
from stepscope.incidents.builder import MOST_BYTES
from stepscope.incidents.text import incident_markdown, incident_text
from stepscope.records.capture import CaptureOrder, CaptureRecord
from stepscope.records.series import RankError
from stepscope.store.captures import write_capture

DATA = Path(__file__).parent / "data"
SCENARIOS = {"slow": slow_rank, "hang": hang, "crash": crash}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_document_is_exact(tmp_path: Path, name: str, golden: Callable[[Path, str], None]) -> None:
    make: Callable[[Path], Made] = SCENARIOS[name]
    document = make(tmp_path).incidents().document(1)
    assert document is not None
    texts = {f"{name}.json": as_text(document), f"{name}.md": incident_markdown(document)}
    texts[f"{name}.txt"] = incident_text(document, width=100)
    for file, text in texts.items():
        golden(DATA / file, text)
    assert len(as_text(document)) < MOST_BYTES
    assert list(statements_without_source(document)) == []


def test_a_log_is_shown_once_if_the_lowest_rank_failed_and_the_incident_names_no_rank(tmp_path: Path) -> None:
    error = RankError(rank=0, pid=1000, type="ValueError", message="bad", wall_ns=ANCHOR_WALL_NS + 3 * 10**9, step=40)
    made = make_runs(tmp_path, Cluster(ranks=2, steps=60, errors=(error,)).run(), "nan")
    write_log(made, 0, "ValueError: bad\n")
    about: dict[str, Any] = {"title": "The loss is NaN.", "opened_wall_ns": ANCHOR_WALL_NS + 2 * 10**9}
    append_incident(
        made.run_dir,
        Incident(number=1, topic="numbers", state="open", kind="loss_nan", severity="critical", **about),
    )
    document = made.incidents().document(1)
    assert document is not None
    assert [piece["rank"] for piece in document["logs"]["pieces"]] == [0]


def test_an_incident_of_which_there_are_very_many_lines(tmp_path: Path) -> None:
    made = slow_rank(tmp_path)
    before = made.incidents()
    (incident,) = before.known.incidents
    number = incident.number + 1
    other = replace(incident, number=number, state="open", resolved_wall_ns=None, title="Rank 1 is slow.")
    costs = [replace(other, cost={"share": 0.1, "seconds": float(seconds)}) for seconds in range(10)]
    for each in costs:
        append_incident(made.run_dir, each)
    path = made.run_dir / "incidents.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + "".join(lines[-10:]) * (1 + (17 << 20) // len("".join(lines[-10:]))))
    append_incident(made.run_dir, replace(costs[-1], state="acknowledged", acknowledged_by="ada"))
    after = made.incidents()
    assert [(each.number, each.state) for each in after.known.incidents] == [
        (incident.number, incident.state),
        (number, "acknowledged"),
    ]
    document = after.document(number)
    assert document is not None
    texts = [row["text"] for row in document["timeline"] if row["what"] == "incident"]
    assert texts == ["The incident was opened: Rank 1 is slow.", "Acknowledged by ada."]
    assert after.known.changes[: len(before.known.changes)] == before.known.changes


def test_other_runs_and_git_are_read_once_for_all_incidents_of_a_run(tmp_path: Path) -> None:
    made = slow_rank(tmp_path)
    incidents = made.incidents()
    first = incidents.document(1)
    assert first is not None and first["changes"]["run"] == "good" and first["changes"]["git"]["commits"]
    shutil.rmtree(made.runs / "good")
    shutil.rmtree(made.repository)
    assert incidents.document(1) == first


def statements_without_source(value: Any, path: str = "") -> Iterator[str]:
    """Where the document says something without naming where that comes from."""
    if isinstance(value, dict):
        if "text" in value and path.count("/") > 1 and not {"form", "file", "rule", "command", "value"} & set(value):
            source = value.get("source")
            if not isinstance(source, dict) or not source.get("text"):
                yield path
        for key, inner in value.items():
            if key not in ("source", "charts", "evidence"):
                yield from statements_without_source(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from statements_without_source(inner, f"{path}/{at}")


def test_captures_are_listed_with_what_they_say(tmp_path: Path) -> None:
    made = slow_rank(tmp_path)
    began_ns = min(series.anchor_wall_ns for series in made.run.ranks)
    for at, state, verdict, problem in (
        (10, "failed", "", "The profiler of the script is active."),
        (340, "done", "Rank 2 spends 30.1 ms more per step than rank 0 in aten::mm.", ""),
        (900, "profiling", "", ""),
    ):
        record = CaptureRecord(
            order=CaptureOrder(id=f"step-{at}", ranks=(0, 2), at_step=at),
            state=state,
            requested_wall_ns=began_ns + at,
            reason="finding",
            verdict=verdict,
            problem=problem,
        )
        write_capture(made.run_dir, record)
    document = made.incidents().document(1)
    assert document is not None
    rows = document["captures"]["statements"]
    assert [(row["capture"], row["text"], row["source"]["text"]) for row in rows] == [
        (
            "step-10",
            "Steps 10 to 15 of ranks 0 and 2: The profiler of the script is active.",
            "captures/step-10/capture.json",
        ),
        (
            "step-340",
            "Steps 340 to 345 of ranks 0 and 2: Rank 2 spends 30.1 ms more per step than rank 0 in aten::mm.",
            "captures/step-340/capture.json",
        ),
        (
            "step-900",
            "Steps 900 to 905 of ranks 0 and 2: the capture is being taken",
            "captures/step-900/capture.json",
        ),
    ]
    assert "Steps 340 to 345 of ranks 0 and 2" in incident_markdown(document)
