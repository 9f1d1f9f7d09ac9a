"""The document of a trace analysis: what it holds of any trace, and that docs/traces.md tells all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_counts import examples
from fakes.traces import MadeTrace
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.reports.page.trace_views import trace_page
from stepscope.reports.trace import document_of, plain, render_trace
from stepscope.traces.device.figures import DeviceFigures
from stepscope.traces.findings import analyze_job
from stepscope.traces.job import JobAnalysis
from stepscope.traces.rank_analysis import HostFigures, RankAnalysis, analyze_rank

KEYS = {
    "schema", "verdict", "findings", "files", "steps", "ranks", "collectives", "clocks", "phases", "distributed",
    "path", "what_if", "diff", "notices", "mixed",
}  # fmt: skip
OF_RANK = {"steps", "left_out", "pace", "temporal", "idle", "device", "host", "path", "tables"}
TEMPORAL = {"span_ns", "idle_ns", "compute_ns", "comm_ns", "memory_ns", "overlap_ns"}
IDLE = {"host_wait_ns", "kernel_wait_ns", "other_ns"}
WORK = (
    ("gemm", "kernel"),
    ("void at::native::(anonymous namespace)::f<float, 4>(int) <&>", "kernel"),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel"),
    ("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy"),
    ("Memset (Device)", "gpu_memset"),
)


@st.composite
def random_ranks(draw: st.DrawFn) -> list[MadeTrace]:
    """Overlaps, zero lengths, work without a launch, no device work at all, nothing at all."""
    time, length = st.integers(0, 60), st.integers(0, 25)
    out = []
    for rank in range(draw(st.integers(1, 3))):
        made = MadeTrace(rank=rank, world_size=3)
        for number in range(draw(st.integers(0, 3))):
            made.step(number, 20 * number, draw(st.sampled_from([20, 19, 0])))
        for _ in range(draw(st.integers(0, 5))):
            made.op(draw(st.sampled_from(["aten::mm", "aten::item", "record_param_comms"])), draw(time), draw(length))
        for _ in range(draw(st.integers(0, 6))):
            name, category = draw(st.sampled_from(WORK))
            at, start, dur, stream = draw(time), draw(time), draw(length), draw(st.sampled_from([7, 20]))
            made.launched(name, at=at, start=start, dur=dur, stream=stream, category=category)
        for _ in range(draw(st.integers(0, 3))):
            made.kernel("alone", draw(time), draw(length), device=draw(st.sampled_from([0, 1])))
        for _ in range(draw(st.integers(0, 3))):
            made.memory(draw(time), draw(st.integers(-9, 9)), draw(st.integers(0, 99)), 100)
        out.append(made)
    return out


def analyzed(ranks: list[MadeTrace]) -> JobAnalysis:
    return analyze_job([analyze_rank(made.trace(), rank) for rank, made in enumerate(ranks)])


@given(random_ranks())
@settings(max_examples=examples(60))
def test_any_trace(ranks: list[MadeTrace]) -> None:
    document = document_of(analyzed(ranks))
    assert json.loads(json.dumps(document, allow_nan=False)) == document, "plain values only"
    assert document.keys() == KEYS
    everyone = {str(rank) for rank in range(len(ranks))}
    assert document["ranks"].keys() == everyone
    for row in (*document["phases"]["rows"], *document["phases"]["means"]):
        assert sum(row[f"{phase}_ns"] for phase in document["phases"]["names"]) == row["wall_ns"]
    for rank in document["ranks"].values():
        assert rank.keys() == OF_RANK
        temporal = rank["temporal"]
        assert temporal.keys() >= TEMPORAL
        parts = ("compute_ns", "exposed_comm_ns", "exposed_memory_ns", "idle_ns")
        assert sum(temporal[part] for part in parts) == temporal["span_ns"]
        assert all(idle.keys() >= IDLE and min(idle.values()) >= 0 for idle in rank["idle"].values())
        for table in rank["tables"].values():
            assert all(list(row) == table["columns"] for row in table["rows"])
        assert rank["path"]["length_ns"] == sum(step["dur_ns"] for step in rank["steps"])
    collectives = document["collectives"]
    for figure in ("last_counts", "wait_ns", "own_transfer_ns"):
        assert collectives[figure].keys() == everyone
    assert sum(collectives["last_counts"].values()) == collectives["count"]
    for width in (60, 80, 120):
        assert max(map(len, render_trace(document, width=width, top=3).splitlines())) <= width
    page = trace_page(document, name="traces")
    assert json.loads(json.dumps(page, allow_nan=False)) == page


def test_plain() -> None:
    assert plain({1: (np.int64(2), float("nan"), float("inf")), "a": np.array([1.5, np.nan])}) == {
        "1": [2, None, None],
        "a": [1.5, None],
    }


def test_made_up_jobs_have_the_keys_of_real_ones(trace_job: Callable[..., Any]) -> None:
    real = document_of(analyzed([MadeTrace(rank=0), MadeTrace(rank=1)]))
    made = document_of(trace_job(ranks=2))
    for key in ("verdict", "steps", "collectives", "path"):
        assert made[key].keys() == real[key].keys()
    assert made["files"][0].keys() == real["files"][0].keys()
    assert made["ranks"]["0"].keys() == real["ranks"]["0"].keys()


# ── docs/traces.md ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "traces.md").read_text(encoding="utf-8")


def documented(page: str, first: str) -> dict[str, set[str]]:
    """Rows of the table whose heading begins so: by each name in the first cell, all names in the row."""
    rows: dict[str, set[str]] = {}
    for line in re.split(rf"^\| {first} \|.*\n", page, flags=re.MULTILINE)[1:]:
        for row in line.split("\n\n")[0].splitlines()[1:]:
            name, rest = row.strip("| ").split(" | ", 1)
            for each in re.findall(r"`(\w+)`", name):
                rows.setdefault(each, set()).update(re.findall(r"`(\w+)", rest))
    return rows


def test_every_key_is_documented(page: str) -> None:
    documented_keys = documented(page, "key")
    assert documented_keys.keys() == KEYS | OF_RANK
    document = document_of(analyzed([MadeTrace(rank=0), MadeTrace(rank=1)]))
    for key in ("verdict", "steps"):
        assert document[key].keys() <= documented_keys[key], key
    assert document["files"][0].keys() <= documented_keys["files"]
    assert document["clocks"]["0"].keys() <= documented_keys["clocks"]
    assert document["path"].keys() <= documented_keys["path"]
    assert {each.name for each in fields(DeviceFigures)} <= documented_keys["device"]
    assert {each.name for each in fields(HostFigures)} <= documented_keys["host"]
    assert document["ranks"]["0"]["temporal"].keys() <= documented_keys["temporal"]
    for figure in document["collectives"]:
        assert f"`{figure}`" in page


def tables_in(document: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for rank in document["ranks"].values():
        yield from ((name, table["columns"]) for name, table in rank["tables"].items())
    yield from ((name, table["columns"]) for name, table in document["collectives"]["tables"].items())
    yield "distributed", document["distributed"]["columns"]
    yield "job_path", document["path"]["table"]["columns"]


def test_every_table_of_real_traces_is_documented(
    page: str, shared_data: Path, real_analysis: Callable[[Path, int], RankAnalysis]
) -> None:
    documented_tables = documented(page, "table")
    seen = set()
    for name in ("hta_nccl_data_1of2", "kineto_resnet50_w0", "param_dlrm_8rank"):
        paths = sorted((shared_data / "traces" / name).iterdir())
        analyses = [real_analysis(path, rank) for rank, path in enumerate(paths)]
        for table, columns in tables_in(document_of(analyze_job(analyses))):
            seen.add(table)
            as_above = {"temporal_steps": TEMPORAL | {"exposed_comm_ns", "exposed_memory_ns"}}
            as_above["operators_by_shape"] = documented_tables["operators"]
            assert set(columns) <= documented_tables[table] | as_above.get(table, set()), table
    assert len(seen) > 25


def test_sections_are_linked(page: str) -> None:
    """Every link inside the page leads somewhere."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= anchors
    levels = [len(marks) for marks in re.findall(r"^(#+) ", page, re.MULTILINE)]
    assert all(deeper - level <= 1 for level, deeper in pairwise(levels))
