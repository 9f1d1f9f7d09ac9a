"""The budget of ``make cost``: what is above it, and that pages show the figures that are kept."""

from __future__ import annotations

import cost
from cost import Budget, Figure

BUDGET = {
    "hooks": Budget(about="all hooks", unit="µs", goal=20.0, limit=80.0),
    "start": Budget(about="s", unit="ms", goal=1),
}


def test_only_what_is_certainly_above_its_limit_fails() -> None:
    def above(value: float, low: float) -> list[str]:
        return cost.exceeded({"hooks": Figure(value=value, low=low, high=200.0)}, BUDGET)

    assert above(90.0, 85.0) == ["hooks"]
    assert above(90.0, 60.0) == []  # the machine was busy
    assert above(79.0, 70.0) == []
    assert cost.exceeded({"start": Figure(value=1e9, low=1e9, high=1e9)}, BUDGET) == []  # no limit


def test_the_table_has_what_was_measured() -> None:
    rows = cost.table({"hooks": Figure(value=39.4, low=36.0, high=1042.0)}, BUDGET).splitlines()
    assert rows[2:] == ["| all hooks | **39 µs** (36 to 1,042) | 20 µs: missed | 80 µs |"]
    rows = cost.table({"hooks": Figure(value=20.0, low=18.0, high=22.0)}, BUDGET).splitlines()
    assert rows[2:] == ["| all hooks | **20 µs** (18.0 to 22) | 20 µs | 80 µs |"]


def test_only_what_is_between_markers_of_known_parts_is_replaced() -> None:
    page = (
        "a <!-- cost: x -->old<!-- end of cost --> b\n<!-- cost: y -->\nold\nold\n<!-- end of cost -->\n"
        "<!-- cost: z -->kept<!-- end of cost -->"
    )
    new = cost.page_with(page, {"x": "1", "y": "2\n3"})
    assert new == (
        "a <!-- cost: x -->1<!-- end of cost --> b\n<!-- cost: y -->\n2\n3\n<!-- end of cost -->\n"
        "<!-- cost: z -->kept<!-- end of cost -->"
    )
    assert cost.page_with(new, {"x": "1", "y": "2\n3"}) == new


def test_the_budget_is_complete_and_the_pages_are_current() -> None:
    budget = cost.read_budget()
    assert all(each.limit is None or each.limit > each.goal for each in budget.values())
    assert cost.write_pages(budget, check=True) == 0
