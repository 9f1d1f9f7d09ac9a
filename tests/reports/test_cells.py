"""Cells by the ending of their column's name."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.records.text import ns_text
from stepscope.reports.layout import cell_text, headings


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("total_ns", 0, "0"),
        ("total_ns", 850, "850 ns"),
        ("total_ns", 12_345_678, "12.3 ms"),
        ("change_ns", -1_500, "-1.50 µs"),
        ("change_ns", 1_500, "+1.50 µs"),
        ("change_share", 0.5, "+50.0%"),
        ("by_count_ns", 0, "0"),
        ("peak_bytes", 3 << 30, "3.0 GiB"),
        ("bytes", 64_448, "63 KiB"),
        ("change_bytes", -(3 << 20), "-3.0 MiB"),
        ("busy_share", 0.1234, "12.3%"),
        ("busy_share", 0.0001, "<0.1%"),
        ("busy_share", 0.0, "0.0%"),
        ("busy_share", 1.0, "100%"),
        ("bus_gbps", 41.234, "41.2 GB/s"),
        ("achieved_tflops", 512.0, "512 TFLOP/s"),
        ("flops", 2_150_000_000_000, "2.15 T"),
        ("flops", 999, "999"),
        ("count", 4200, "4,200"),
        ("mean_length", 3.14159, "3.14"),
        ("slope", -0.5, "-0.5"),
        ("tensor_cores", True, "yes"),
        ("operator", None, ""),
        ("operator", "aten::mm", "aten::mm"),
    ],
)
def test_cells(column: str, value: Any, text: str) -> None:
    assert cell_text(column, value) == text


def test_headings() -> None:
    assert list(headings(("host_self_ns", "time_ns", "time_share", "flops", "name", "occupancy_percent")).values()) == [
        "host self", "time", "share", "flops", "name", "occupancy",
    ]  # fmt: skip


def test_nanoseconds() -> None:
    shown = [ns_text(ns) for ns in (None, 0, 1, 999, 1_000, 9_994, 9_996, 99_951, 999_499, 999_500, 2_040_000)]
    assert shown == [
        "–", "0", "1 ns", "999 ns", "1.00 µs", "9.99 µs", "10.0 µs", "100 µs", "999 µs", "1.00 ms", "2.04 ms",
    ]  # fmt: skip
