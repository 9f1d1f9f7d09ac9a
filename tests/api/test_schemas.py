"""The JSON schemas of public documents: real documents fit them, the pages list their keys, and changes are visible.

docs/schemas has them as files; after a change on purpose: ``pytest tests/api --update-golden``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from alert_messages import message
from fakes.dumps import FlightJob, steps
from jsonschema import Draft202012Validator
from made_incidents import slow_rank
from made_sweeps import write_sweep
from trace_jobs import MadeJob

from stepscope.alerts.message_text import message_document
from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from stepscope.records.capture import CaptureOrder, CaptureRecord
from stepscope.records.finding_history import FindingEpisode, episode_line
from stepscope.records.hang import Culprit, HangRecord
from stepscope.schemas import SCHEMAS, json_schema
from stepscope.store.captures import write_capture
from stepscope.store.documents import save_summary

Printed = Callable[..., Any]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Printed:
    """What a command prints as JSON."""

    def run(*words: str | Path) -> Any:
        capsys.readouterr()
        run_command([str(word) for word in words])
        return json.loads(capsys.readouterr().out)

    return run


def of_runs(printed: Printed, folder: Path) -> Iterator[tuple[str, Any]]:
    summary = printed("report", "runs/night", "--json")
    yield "summary", summary
    yield "run", json.loads(Path("runs/night/run.json").read_text())
    yield "goodput", printed("goodput", "runs/night", "--json")
    yield "layers", printed("memory", "runs/night", "--json")
    yield "comparison", printed("compare", "before", "after", "--json")
    yield "comparison", printed("compare", "base2", "base3", "--json")
    yield "gate", printed("gate", "before", "after", "--json")
    yield "history", printed("history", "runs", "--json")
    save_summary(folder, summary, "")
    yield "findings", json.loads((folder / "findings.json").read_text())


def of_incidents(printed: Printed, folder: Path) -> Iterator[tuple[str, Any]]:
    made = slow_rank(folder)
    yield "incident", made.incidents().document(1)
    for status in ("firing", "resolved"):
        yield "alert", message_document(message(1, status))  # type: ignore[arg-type]


def of_traces(printed: Printed, folder: Path) -> Iterator[tuple[str, Any]]:
    job = MadeJob(world=2, layers=4, slower=lambda rank, step, layer: 50.0 if rank == 1 else 0.0)
    (folder / "traces").mkdir()
    for rank, made in enumerate(job.ranks()):
        made.write(folder / "traces" / f"{rank}.json")
    yield "trace", printed("trace", folder / "traces", "--json")
    yield "trace", printed("trace", folder / "traces" / "0.json", "--json")
    yield "trace-gate", printed("gate", "--trace", folder / "traces", "--max-step", "1ms", "--json")


def of_dumps(printed: Printed, folder: Path) -> Iterator[tuple[str, Any]]:
    for name, until in (("hung", {2: 4}), ("healthy", None)):
        job = FlightJob(4)
        job.run({rank: steps(3) for rank in range(4)}, until=until)
        job.write(folder / name)
        yield "flight", printed("flight", folder / name, "--json")


def of_experiments(printed: Printed, folder: Path) -> Iterator[tuple[str, Any]]:
    yield "sweep", write_sweep(folder / "sweep")
    (folder / "meta.yaml").write_text("trial_name: small\ndp_size: 2\npp_size: 1\nworld_size: 2\n")
    rows = """
        SELECT lane AS dp_rank, 0 AS stage, lane AS rank, step, optype, first::DOUBLE AS start_ts,
               (last - first)::DOUBLE AS duration, 0 AS seq_id
        FROM (VALUES (0, 'forward-compute', 0, 2), (0, 'backward-compute', 2, 6), (0, 'grads-reduce-scatter', 6, 13),
                     (0, 'optimizer', 13, 14), (1, 'forward-compute', 0, 4), (1, 'backward-compute', 4, 12),
                     (1, 'grads-reduce-scatter', 12, 13), (1, 'optimizer', 13, 14)) o(lane, optype, first, last),
             range(3) steps(step)
    """
    with duckdb.connect() as con:
        con.execute(f"COPY ({rows}) TO '{folder / 'job.parquet'}' (FORMAT parquet)")
    yield "whatif", printed("whatif", folder / "job.parquet", "--meta", folder / "meta.yaml", "--json")


def of_records(printed: Printed, folder: Path) -> Iterator[tuple[str, Any]]:
    order = CaptureOrder(id="step-1", ranks=(0, 1), at_step=1)
    write_capture(folder, CaptureRecord(order=order, state="done", requested_wall_ns=1, reason="request", verdict="x"))
    yield "capture", json.loads(next((folder / "captures").rglob("*.json")).read_text())
    hang = HangRecord(
        number=1,
        host="node",
        kind="hang_host",
        title="Rank 1 is stopped.",
        declared_wall_ns=2,
        stopped_wall_ns=1,
        threshold_s=10.0,
        culprits=(Culprit(rank=1, reason="is stopped"),),
    )
    yield "hang", hang.to_dict()
    episode = FindingEpisode(
        number=1, change="opened", finding={}, attempt=0, first_step=1, first_wall_ns=1, step=1, wall_ns=1
    )
    yield "finding-history", episode_line(episode)


SOURCES = (of_runs, of_incidents, of_traces, of_dumps, of_experiments, of_records)


def unlisted(document: Any, schema: dict[str, Any], parts: dict[str, Any], where: str = "") -> Iterator[str]:
    """Keys that a schema does not list, in objects whose keys it lists."""
    schema = parts[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for choice in schema.get("anyOf", ()):
        found = list(unlisted(document, choice, parts, where))
        if Draft202012Validator({**choice, "$defs": parts}).is_valid(document):
            yield from found
            return
    if isinstance(document, list):
        for element in document:
            yield from unlisted(element, schema.get("items", {}), parts, f"{where}[]")
    if isinstance(document, dict):
        listed, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, value in document.items():
            if listed and key not in listed:
                yield f"{where}.{key}"
            else:
                yield from unlisted(
                    value, listed.get(key, rest if isinstance(rest, dict) else {}), parts, f"{where}.{key}"
                )


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_real_documents_fit(
    source: Callable[[Printed, Path], Iterator[tuple[str, Any]]], printed: Printed, here: Path, tmp_path: Path
) -> None:
    for name, document in source(printed, tmp_path):
        schema = json_schema(name)
        problems = [
            f"{error.json_path}: {error.message[:200]}" for error in Draft202012Validator(schema).iter_errors(document)
        ]
        assert (name, problems) == (name, [])
        assert (name, sorted(set(unlisted(document, schema, schema.get("$defs", {}))))) == (name, [])


def test_every_schema_was_tried(printed: Printed, root: Path) -> None:
    text = Path(__file__).read_text()
    assert [name for name in SCHEMAS if f'yield "{name}", ' not in text] == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_valid_recorded_and_explained(name: str, root: Path, golden: Callable[[Path, str], None]) -> None:
    schema = json_schema(name)
    Draft202012Validator.check_schema(schema)
    golden(root / "docs" / "schemas" / f"{name}.json", json.dumps(schema, indent=1) + "\n")
    page = (root / "docs" / SCHEMAS[name].page).read_text()
    assert [key for key in schema["properties"] if key != "schema" and f"`{key}`" not in page] == []


def test_a_wrong_document_does_not_fit(printed: Printed, here: Path) -> None:
    summary = printed("report", "runs/night", "--json")
    valid = Draft202012Validator(json_schema("summary")).is_valid
    assert valid(summary)
    assert valid({**summary, "from_the_future": 1})
    assert not valid({**summary, "status": "sleeping"})
    assert not valid({**summary, "schema": 2})
    assert not valid({key: value for key, value in summary.items() if key != "verdict"})


def test_the_command(printed: Printed, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("schema", "summary") == json_schema("summary")
    assert run_command(["schema"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()[2:] if not line.startswith("(")] == sorted(SCHEMAS)
    with pytest.raises(UsageError, match=r"^no schema named sumary; did you mean summary\?$"):
        run_command(["schema", "sumary"])
