from __future__ import annotations

from stepscope.traces.model.tables import table_of


def test_sums_of_what_is_left_out() -> None:
    made = table_of(
        "some", "Some", ("name", "count", "total_ns", "share", "known"),
        [("a", 3, 50, 0.5, 1), ("b", 2, 30, 0.3, None), ("c", 1, 20, 0.2, 4)], limit=1,
    )  # fmt: skip
    assert made.left_out == 2
    assert made.left_out_sums == {"count": 3, "total_ns": 50}
    assert table_of("some", "Some", ("name", "count"), [("a", 3)]).left_out_sums == {}
    assert table_of("some", "Some", ("name", "count"), []).left_out_sums == {}
