"""The form of every public JSON document, as types; ``json_schema`` makes a JSON schema (draft 2020-12) of each.

One description serves all readers: editors and ``mypy`` (typed dictionaries), ``stepscope schema NAME`` and
docs/schemas/ (JSON schemas), and the tests, which hold real documents against it.  Documents that are written from
dataclasses (hangs, captures, the history of findings) are described by these.

A document may have more keys than its schema: new ones come with new versions.  What the keys mean is in
docs/schema.md and the pages it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["SCHEMAS", "PublicDocument", "document_type", "json_schema"]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, kw_only=True)
class PublicDocument:
    title: str
    """What it is, and where it is written or printed."""
    page: str
    """Which page of docs/ explains its keys."""
    type: str
    """Module and name of its type."""
    version: int | None = 1
    """The value of its key ``schema``; None: it has no such key, since it is a part of another document."""


SCHEMAS: Mapping[str, PublicDocument] = {
    "alert": PublicDocument(
        title="The message that a webhook or a command of alerts receives",
        page="alert-settings.md",
        type="stepscope.schemas.operations:AlertMessage",
    ),
    "capture": PublicDocument(
        title="The record of a capture: captures/ID/capture.json and `stepscope capture --json`",
        page="capture-reference.md",
        type="stepscope.records.capture:CaptureRecord",
    ),
    "comparison": PublicDocument(
        title="Runs compared: `stepscope compare --json`",
        page="compare-reference.md",
        type="stepscope.schemas.comparisons:Comparison",
    ),
    "finding-history": PublicDocument(
        title="A line of finding-history.jsonl",
        page="schema.md",
        type="stepscope.records.finding_history:FindingEpisode",
    ),
    "findings": PublicDocument(
        title="The findings of a run: findings.json",
        page="schema.md",
        type="stepscope.schemas.runs:Findings",
    ),
    "flight": PublicDocument(
        title="Flight Recorder dumps judged: `stepscope flight --json`",
        page="flight.md",
        type="stepscope.schemas.operations:FlightReport",
    ),
    "gate": PublicDocument(
        title="A comparison with limits: `stepscope gate --json`",
        page="compare-reference.md",
        type="stepscope.schemas.comparisons:GatedComparison",
    ),
    "goodput": PublicDocument(
        title="The ledger of a run: `stepscope goodput --json`, and `goodput` of the summary",
        page="goodput.md",
        type="stepscope.schemas.runs:Goodput",
        version=None,
    ),
    "hang": PublicDocument(
        title="A hang: hangs/HOST-N.json",
        page="schema.md",
        type="stepscope.records.hang:HangRecord",
    ),
    "history": PublicDocument(
        title="Runs of a job over time: `stepscope history --json`",
        page="history.md",
        type="stepscope.schemas.comparisons:History",
    ),
    "incident": PublicDocument(
        title="Everything around one incident: `stepscope incident --json`",
        page="incidents.md",
        type="stepscope.schemas.operations:IncidentReport",
    ),
    "layers": PublicDocument(
        title="The layers of the model in a sampled step: `stepscope memory --json`",
        page="schema.md",
        type="stepscope.schemas.runs:Layers",
    ),
    "run": PublicDocument(
        title="What was started, where and when: run.json",
        page="schema.md",
        type="stepscope.schemas.runs:RunMeta",
    ),
    "summary": PublicDocument(
        title="The summary of a run: summary.json and `stepscope report --json`",
        page="schema.md",
        type="stepscope.schemas.runs:Summary",
    ),
    "sweep": PublicDocument(
        title="The best settings of a job: `stepscope sweep --json`",
        page="sweep.md",
        type="stepscope.schemas.comparisons:Sweep",
    ),
    "trace": PublicDocument(
        title="Traces of one or all ranks: `stepscope trace --json`",
        page="traces.md",
        type="stepscope.schemas.traces:TraceReport",
    ),
    "trace-gate": PublicDocument(
        title="Traces held against limits: `stepscope gate --json` on traces",
        page="compare-reference.md",
        type="stepscope.schemas.traces:TraceGate",
    ),
    "whatif": PublicDocument(
        title="A job without its stragglers: `stepscope whatif --json`",
        page="whatif.md",
        type="stepscope.schemas.operations:WhatIf",
    ),
}
"""By name, in the order of the alphabet."""


def document_type(name: str) -> Any:
    """Return the type that describes a document; KeyError if the name is unknown."""
    module, _, own = SCHEMAS[name].type.partition(":")
    return getattr(import_module(module), own)


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of a document; KeyError if the name is unknown."""
    import msgspec  # only readers of schemas need it

    document = SCHEMAS[name]
    (own,), parts = msgspec.json.schema_components([document_type(name)], ref_template="#/$defs/{name}")
    root = str(own["$ref"]).rpartition("/")[2]
    body = dict(parts.pop(root))
    properties, required = body["properties"], list(body.get("required", ()))
    if document.version is not None:
        properties = {"schema": {"const": document.version}, **{k: v for k, v in properties.items() if k != "schema"}}
        required = ["schema", *(key for key in required if key != "schema")]
    return {
        "$schema": DIALECT,
        "$id": f"urn:stepscope:{name}:{document.version or 1}",
        "title": document.title,
        "description": f"Keys are explained in docs/{document.page}. New keys may appear in any version.",
        "type": "object",
        "properties": properties,
        "required": required,
        **({"$defs": parts} if parts else {}),
    }
