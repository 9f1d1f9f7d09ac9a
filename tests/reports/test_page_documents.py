"""What the page shows of traces: everything that the text has, in bounded size, as plain values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from stepscope.records.text import printable
from stepscope.reports.page.trace_views import MOST_EMBEDDED, difference_parts, rank_parts, trace_page
from stepscope.reports.trace import document_of, render_trace

MS = 1_000_000


def all_parts(page: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of all ranks, then those of the rank that is shown first."""
    return [*page["parts"], *page["of_ranks"][str(page["rank"])]]


def parts_of(page: dict[str, Any], form: str) -> dict[str, dict[str, Any]]:
    """By title."""
    return {part["title"]: part for part in all_parts(page) if part["form"] == form}


def shown_table(title: str, page: dict[str, Any]) -> dict[str, Any]:
    (found,) = (
        t for part in all_parts(page) if part["form"] == "tables" for t in part["tables"] if t["title"] == title
    )
    return found


def titles_by_view(parts: list[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in parts:
        found.setdefault(part["view"], []).append(part["title"])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 8, 512])
def test_parts(ranks: int, trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job(ranks=ranks))
    page = trace_page(document, name="traces")
    text = json.dumps(page, allow_nan=False)
    assert json.loads(text) == page, "plain values only"
    assert len(text) < 400_000
    assert (page["kind"], page["name"], page["notices"]) == ("trace", "traces", [])
    assert page["verdict"]["title"] == document["verdict"]["title"]
    assert [other["title"] for other in page["others"]] == [printable(document["findings"][1]["title"])]
    assert page["verdict"]["left"] == round(1 / 1.26, 4)
    several = ranks > 1
    shown = 1 if several else 0
    assert titles_by_view(page["parts"]) == {
        "overview": [
            *("Phases on the host", "Phases on the device", *([] if several else ["Device time by rank"])),
            *(["Critical path by rank"] if several else []),
            "Critical path by cause",
        ],
        **({"distributed": ["Device time by rank", "Collectives", "Tables of all ranks"]} if several else {}),
        "files": ["Worth knowing", "Files"],
    }
    tables = f"Tables of rank {shown}"
    assert titles_by_view(page["of_ranks"][str(shown)]) == {
        "overview": ["Steps by phase", "Steps", tables],
        "kernels": ["Queue", tables],
        "memory": ["Memory"],
    }
    assert [key for key, *_ in page["views"]] == [
        *("overview", "timeline", "operators", "kernels", "memory", "modules"),
        *(["distributed", "difference"] if several else []),
        "files",
    ]
    assert (page["ranks"], page["rank"]) == (list(range(ranks)), shown)
    assert len(page["of_ranks"]) == min(ranks, MOST_EMBEDDED)
    assert page["pair"] == ([1, 0] if several else None)
    assert list(page["pairs"]) == (["1-0"] if several else [])
    assert parts_of(page, "list")["Worth knowing"]["items"][0].startswith("1 file does not specify a rank")


def test_without_a_finding_the_verdict_stands_alone(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job())
    document["verdict"] = {**document["verdict"], "kind": "healthy", "severity": "info", "price": None}
    page = trace_page(document, name="traces")
    verdict = page["verdict"]
    assert (verdict["look"], verdict["kind"], verdict["price"], verdict["left"]) == ("healthy", "", None, None)
    assert len(page["others"]) == 2


def test_a_comparison_leads(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job())
    rows = [{"figure": "step", "before_ns": MS, "after_ns": 2 * MS}]
    table = {"title": "Summary", "columns": list(rows[0]), "rows": rows, "left_out": 0, "note": ""}
    document["diff"] = {
        "verdict": "Steps take 1.00 ms longer.", "clear": True, "step_change_ns": MS, "notices": ["Ranks differ."],
        "tables": {"diff_summary": table},
    }  # fmt: skip
    page = trace_page(document, name="new")
    assert (page["verdict"]["title"], page["verdict"]["look"]) == ("Steps take 1.00 ms longer.", "warning")
    assert page["verdict"]["sides"] == [{"title": "Note", "ring": [], "items": [["Ranks differ.", ""]], "more": ""}]
    assert [part["title"] for part in page["parts"][:2]] == ["What changed", "Now"]
    assert page["others"] == []
    now = page["parts"][1]
    assert (now["verdict"]["title"], len(now["others"])) == (document["verdict"]["title"], 1)


def test_many_ranks_and_steps_are_columns(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job(ranks=2, steps=500))
    (row, _) = document["distributed"]["rows"]
    document["distributed"]["rows"] = [{**row, "rank": rank} for rank in range(5000)]
    page = trace_page(document, name="traces")
    found = parts_of(page, "columns")
    steps, ranks = found["Steps"], found["Device time by rank"]
    assert (steps["axis"], steps["numbers"][0], steps["numbers"][-1]) == ("step", [10, 10], [509, 509])
    assert (ranks["axis"], ranks["numbers"][0], ranks["numbers"][-1]) == ("rank", [0, 4], [4995, 4999])
    assert len(ranks["numbers"]) == 1000
    assert [style for style, _ in ranks["legend"]] == list(ranks["values"])
    assert ranks["values"]["idle"] == [12 * MS] * 1000
    assert len(json.dumps(page)) < 400_000


def test_bars_add_up(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job(ranks=2))
    rows = parts_of(trace_page(document, name="traces"), "bars")["Device time by rank"]["rows"]
    for row, of_rank in zip(rows, document["distributed"]["rows"], strict=True):
        assert sum(value for _, value, _ in row["parts"]) == of_rank["span_ns"]
    assert rows[0]["label"] == "rank 0"
    assert rows[0]["figure"] == "89.0 ms"
    assert (
        parts_of(trace_page(document, name="traces"), "bars")["Device time by rank"]["about"]
        == "where it goes in 6 steps"
    )
    assert rows[0]["parts"][0] == ["compute", 51 * MS, "computing: 51.0 ms, 57%"]


def test_a_curve_keeps_its_peak(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job())
    rows = [{"time_ns": at, "allocated_bytes": 1, "reserved_bytes": None} for at in range(50_000)]
    rows[777]["allocated_bytes"] = 9
    document["ranks"]["0"]["tables"]["memory"]["rows"] = rows
    curve = parts_of(trace_page(document, name="traces"), "curves")["Memory"]
    assert curve["about"] == "of rank 0; peak: 9 B allocated"
    assert (curve["times_ns"][0], len(curve["times_ns"])) == (0, 2000)
    ((name, values),) = curve["lines"]
    assert (name, max(values), values[777 // 25]) == ("allocated", 9, 9)


def test_rows_of_tables(trace_job: Callable[..., Any]) -> None:
    table = shown_table("Kernels by name", trace_page(document_of(trace_job()), name="traces", top=2))
    assert [row[0][0] if isinstance(row[0], list) else row[0] for row in table["rows"]] == [
        "vectorized_elementwise_kernel<CUDAFunctor_add>",
        "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn",
    ]
    assert table["more"] == "… and 2 more."
    assert table["note"] == "Times are of all steps."


def test_table_cells(trace_job: Callable[..., Any]) -> None:
    """Important columns first, empty ones not at all; numbers can be sorted, names are short."""
    document = document_of(trace_job())
    evil = "</script>\x1b[31m"
    columns = ["class", "name", "count", "total_ns", "occupancy_share", "mixed"]
    rows = [
        {"class": "gemm", "name": "void f<g>(int)", "count": 3, "total_ns": 1_500, "occupancy_share": None, "mixed": 1},
        {"class": "", "name": evil, "count": None, "total_ns": 2, "occupancy_share": None, "mixed": "a"},
    ]
    note = "total_ns: of all; occupancy_share: not shown; aten::index_put_: as it is."
    table = {"title": "Kernels", "columns": columns, "rows": rows, "left_out": 0, "note": note}
    document["ranks"]["0"]["tables"] = {"kernels": table}
    found = shown_table("Kernels", trace_page(document, name="traces"))
    assert found["heads"] == ["name", "count", "total", "class", "mixed"]
    assert found["note"] == "total: of all; occupancy_share: not shown; aten::index_put_: as it is."
    assert found["numeric"] == [False, True, True, False, False]
    assert found["rows"] == [
        [["f<g>", "void f<g>(int)"], ["3", 3], ["1.50 µs", 1_500], "gemm", "1"],
        ["</script>\\x1b[31m", ["", None], ["2 ns", 2], "", "a"],
    ]
    assert (found["main"], found["open"]) == (5, True)


def test_columns_that_fit(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job())
    columns = ["name", *(f"figure_{at}_ns" for at in range(30))]
    row = dict.fromkeys(columns, 1234567) | {"name": "n" * 60}
    table = {"title": "Wide", "columns": columns, "rows": [row], "left_out": 0, "note": ""}
    document["ranks"]["0"]["tables"] = {"wide": table}
    found = shown_table("Wide", trace_page(document, name="traces"))
    assert (len(found["heads"]), found["main"]) == (31, 12)


def test_doubt(trace_job: Callable[..., Any]) -> None:
    """Where the text has a line on its certainty, the page has it, too."""
    document = document_of(trace_job())
    for confidence, shown in ((0.6, True), (0.75, False)):
        document["verdict"]["confidence"] = confidence
        certainty = trace_page(document, name="traces")["verdict"]["certainty"]
        assert (certainty == "Certainty: 60%: few steps, or none that the profiler marked.") == shown
        assert ("\n  certainty 60%: few steps, or none" in render_trace(document)) == shown


def test_two_ranks_are_compared_by_step(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job(ranks=2))
    steps = len(document["ranks"]["0"]["steps"])
    rows = document["ranks"]["1"]["tables"]["kernels"]["rows"]
    first = rows[0]["total_ns"]
    document["ranks"]["1"]["tables"]["kernels"]["rows"] = [{**rows[0], "total_ns": first + steps * 5 * MS}, *rows[1:]]
    sentences, tables = difference_parts(document, 1, 0)
    name = "vectorized_elementwise_kernel<CUDAFunctor_add>"
    assert sentences["items"] == [f"5.00 ms more in {name} on the device."]
    kernels = next(table for table in tables["tables"] if table["title"] == "Kernels")
    assert kernels["heads"] == ["name", "extra", "rank 1", "rank 0", "rank 1 count", "rank 0 count"]
    assert kernels["rows"][0][1] == ["5.00 ms", 5 * MS]
    assert kernels["rows"][0][2][1] - kernels["rows"][0][3][1] == 5 * MS
    assert {row[1][1] for row in kernels["rows"][1:]} == {0}
    assert {part["view"] for part in (sentences, tables)} == {"difference"}


def test_python_of_two_ranks_is_compared(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job(ranks=2))
    steps = len(document["ranks"]["0"]["steps"])
    document["ranks"]["1"]["host"]["stops"] = [
        {"place": "train.py (<module>)", "call": "sleep", "count": steps, "total_ns": steps * 69 * MS}
    ]
    sentences, tables = difference_parts(document, 1, 0)
    assert sentences["items"][0] == "69.0 ms more in sleep at train.py between operators."
    python = next(table for table in tables["tables"] if table["title"].startswith("Python on the main thread"))
    assert python["rows"] == [["sleep at train.py", ["69.0 ms", 69 * MS], ["69.0 ms", 69 * MS], ["0", 0]]]


COMM, OTHER, INFO = (
    {"phase": phase, "severity": severity}
    for phase, severity in (("comm", "critical"), (None, "warning"), (None, "info"))
)


@pytest.mark.parametrize(
    ("findings", "subject"), [([COMM], 1), ([OTHER], 0), ([INFO], 1), ([COMM, OTHER], 1), ([OTHER, COMM], 0)]
)
def test_two_ranks_open_with_the_one_that_has_more_work(
    trace_job: Callable[..., Any], findings: list[dict[str, Any]], subject: int
) -> None:
    """A finding about communication names the rank that waits, and a remark any; only others name the slow one."""
    document = document_of(trace_job(ranks=2))
    document["findings"] = [{**document["findings"][0], "ranks": [0], **about} for about in findings]
    for row in document["distributed"]["rows"]:
        row["exposed_comm_ns"] = 0 if row["rank"] == 1 else 50 * MS
        document["ranks"][str(row["rank"])]["pace"]["work"]["exposed_comm_ns"] = row["exposed_comm_ns"]
    page = trace_page(document, name="traces")
    assert (page["pair"][0], page["rank"]) == (subject, subject)


def test_memory_that_no_allocator_reserves_is_not_drawn(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job())
    rows = document["ranks"]["0"]["tables"]["memory"]["rows"]
    (curve,) = (part for part in rank_parts(document, "0") if part["title"] == "Memory")
    assert [name for name, _ in curve["lines"]] == ["allocated", "reserved"]
    for row in rows:
        row["reserved_bytes"] = 0
    (curve,) = (part for part in rank_parts(document, "0") if part["title"] == "Memory")
    assert [name for name, _ in curve["lines"]] == ["allocated"]


def test_the_parts_of_a_rank_are_those_inside_the_page(trace_job: Callable[..., Any]) -> None:
    """Whether a hub sends them or a file has them."""
    document = document_of(trace_job(ranks=40))
    page = trace_page(document, name="traces")
    assert len(page["of_ranks"]) == MOST_EMBEDDED
    for rank, parts in page["of_ranks"].items():
        assert parts == rank_parts(document, rank)
    alone = trace_page(document, name="traces", embedded=1)
    assert list(alone["of_ranks"]) == [str(alone["rank"])]
    assert {**alone, "of_ranks": None} == {**page, "of_ranks": None}


def phase_row(rank: int, device_ns: int, **more: int) -> dict[str, int]:
    names = ("input", "forward", "backward", "optimizer", "communication", "other")
    host = dict(zip((f"{name}_ns" for name in names), (1 * MS, 2 * MS, 4 * MS, 0, 3 * MS, 0), strict=True))
    device = {f"device_{name}": ns if device_ns else 0 for name, ns in host.items()}
    return {
        "rank": rank,
        "wall_ns": 10 * MS,
        **host,
        "device_span_ns": device_ns,
        **device,
        "device_idle_ns": 2 * MS,
        **more,
    }


def test_phases_lead_the_overview(trace_job: Callable[..., Any]) -> None:
    document = document_of(trace_job(ranks=2))
    document["phases"] = {
        "names": ["input", "forward", "backward", "optimizer", "communication", "other"],
        "sources": {},
        "rows": [phase_row(rank, 0, step=step) for rank in range(2) for step in (10, 11)],
        "means": [phase_row(rank, 12 * MS, steps=2) for rank in range(2)],
    }
    page = trace_page(document, name="traces")
    overview = titles_by_view(page["parts"])["overview"]
    assert overview[:2] == ["Phases on the host", "Phases on the device"]
    assert "Device time by rank" not in overview, "Distributed has it"
    host, device = (parts_of(page, "bars")[title] for title in overview[:2])
    assert (host["about"], [row["label"] for row in host["rows"]]) == ("mean step", ["rank 0", "rank 1"])
    assert [value for _, value, _ in host["rows"][0]["parts"]] == [1 * MS, 2 * MS, 4 * MS, 3 * MS]
    assert host["legend"] == [
        ["input", "input"],
        ["forward", "forward"],
        ["backward", "backward"],
        ["comm", "communication"],
    ]
    assert device["rows"][0]["parts"][-1] == ["idle", 2 * MS, "idle: 2.00 ms, 17%"]
    steps = parts_of(page, "bars")["Steps by phase"]
    assert (steps["about"], [row["number"] for row in steps["rows"]]) == ("of rank 1, on the host", [10, 11])
