"""Trace analyses as a page: whole, bounded, nothing fetched, and names stay names."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from stepscope.reports.html import TABLE_SCRIPT, Bar, Curve, Part, curves, sortable_table, stacked_bars, stacked_columns
from stepscope.reports.trace_document import document_of
from stepscope.reports.trace_html import render_trace_html
from stepscope.reports.trace_text import render_trace


@pytest.mark.parametrize("ranks", [1, 2, 8, 512])
def test_page(ranks: int, trace_job: Callable[..., Any], read_page: Callable[[str], Any]) -> None:
    text = render_trace_html(document_of(trace_job(ranks=ranks)))
    reader = read_page(text)
    assert {"h1", "h2", "svg", "table", "details"} <= reader.seen
    assert reader.inside["script"] == TABLE_SCRIPT, "ours and no other"
    assert "prefers-color-scheme: dark" in reader.inside["style"]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;�[31m&amp;" in text
    assert len(text) < 300_000
    headings = reader.inside["h2"]
    assert ("Collectives" in headings) == (ranks > 1)
    assert "Memory of rank" in headings


def test_only_our_own_style_and_script_count(trace_job: Callable[..., Any], read_page: Callable[[str], Any]) -> None:
    reader = read_page(render_trace_html(document_of(trace_job())))
    (policy,) = (value for value in reader.attributes["content"] if "default-src" in value)

    def allowed(tag: str) -> str:
        return b64encode(sha256(reader.inside[tag].encode()).digest()).decode()

    assert (
        policy == f"default-src 'none'; style-src 'sha256-{allowed('style')}'; script-src 'sha256-{allowed('script')}'"
    )


def test_many_steps_are_columns(trace_job: Callable[..., Any], read_page: Callable[[str], Any]) -> None:
    text = render_trace_html(document_of(trace_job(steps=1000)))
    read_page(text)
    assert len(text) < 300_000
    assert "step 1009" in text


def test_rows_of_tables(trace_job: Callable[..., Any]) -> None:
    text = render_trace_html(document_of(trace_job()), top=2)
    assert "ampere_fp16" in text
    assert "ncclDevKernel" not in text
    assert "… and 2 more" in text


def test_bars_add_up() -> None:
    """The longest bar takes all the room; parts follow each other without gap or overlap."""
    parts = tuple(Part(look=look, value=value) for look, value in (("c1", 30.0), ("c2", 0.0), ("c3", 10.0)))
    drawn = stacked_bars([Bar(label="a", parts=parts), Bar(label="b", parts=parts[:1])])
    rects = [
        (look, float(x), float(width))
        for look, x, width in re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn)
    ]
    (first, x, width), (second, then, last), (third, again, alone) = rects
    assert (first, second, third) == ("c1", "c3", "c1")
    assert (x + width, again, alone) == (then, x, width)
    assert last == pytest.approx(width / 3, abs=0.1)


def test_columns_are_few_and_whole() -> None:
    bars = [Bar(label=f"rank {at}", parts=(Part(look="c1", value=at),)) for at in range(5000)]
    drawn = stacked_columns(bars, str)
    assert drawn.count("M") - drawn.count('class="axis"') <= 1024
    assert "rank 0<" in drawn
    assert "rank 4999<" in drawn
    assert "nan" not in drawn


def test_a_curve_keeps_its_peak() -> None:
    points = [(float(at), 1.0) for at in range(50_000)]
    points[777] = (777.0, 9.0)
    drawn = curves([Curve(look="c1", name="queue", points=points)], str, "0", "1 s")
    assert len(drawn) < 100_000
    assert "V12.0" in drawn, "the top of the chart"
    assert ">9.0<" in drawn
    assert curves([Curve(look="c1", name="queue", points=[])], str, "", "") == ""


def test_a_peak_is_marked() -> None:
    points = [(0.0, 1.0), (1.0, 8.0), (4.0, 2.0)]
    drawn = curves([Curve(look="c1", name="memory", points=points, peak="peak: 8 GiB")], str, "0", "4 s")
    (x, y) = re.findall(r'<circle class="c1" cx="([\d.]+)" cy="([\d.]+)"', drawn)[0]
    assert (float(x), float(y)) == (66 + (960 - 66) / 4, 12.0)
    assert "peak: 8 GiB" in drawn


def test_table_cells() -> None:
    rows = [
        {"name": "void f<g>(int)", "count": 3, "total_ns": 1_500, "empty": None, "mixed": "a"},
        {"name": "aten::mm", "count": None, "total_ns": 2, "empty": None, "mixed": 1},
    ]
    head, first, second, end = sortable_table(("name", "count", "total_ns", "empty", "mixed"), rows).splitlines()
    assert re.findall(r"<th([^>]*)><button type=\"button\">(\w+)</button></th>", head) == [
        ("", "name"), (' class="number"', "count"), (' class="number"', "total"), ("", "mixed"),
    ]  # fmt: skip
    assert first == (
        '<tr><td title="void f&lt;g&gt;(int)">f&lt;g&gt;</td><td class="number" data-value="3">3</td>'
        '<td class="number" data-value="1500">1.50 µs</td><td>a</td></tr>'
    )
    assert second == (
        '<tr><td>aten::mm</td><td class="number" data-value=""></td>'
        '<td class="number" data-value="2">2 ns</td><td>1</td></tr>'
    )
    assert end == "</tbody></table></div>"


def test_doubt(trace_job: Callable[..., Any]) -> None:
    """Where the text has a line on its certainty, the page has it, too."""
    document = document_of(trace_job())
    for confidence, shown in ((0.6, True), (0.75, False)):
        document["verdict"]["confidence"] = confidence
        text = render_trace_html(document)
        assert ("<dt>certainty</dt><dd>60%: few steps, or none" in text) == shown
        assert ("\n  certainty 60%: few steps, or none" in render_trace(document)) == shown
