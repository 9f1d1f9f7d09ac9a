"""Write the tables of rules into the docs: which rules there are, in which order, what they may claim, and who wins.

    make rule-table             # or: PYTHONPATH=src python bench/rule_table.py
    python bench/rule_table.py --check    # exit code 1 if a page is not current

Each page has a pair of markers, between which the tables of its chain are written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from stepscope.diagnosis import rulebook
from stepscope.judge import thresholds
from stepscope.judge.chain import Rule, Scope
from stepscope.records.text import bytes_text, ns_text, share_text
from stepscope.traces import rulebook as trace_rulebook
from stepscope.traces.rules import thresholds as trace_thresholds

__all__ = ["PAGES", "current_page", "tables"]

BEGIN, END = "<!-- rules: written by make rule-table -->", "<!-- end of rules -->"
ROOT = Path(__file__).parent.parent

PAGES: dict[str, tuple[Sequence[Rule[Any]], Sequence[ModuleType]]] = {
    "docs/diagnosis.md": (rulebook.RULES, [thresholds]),
    "docs/trace-findings.md": (trace_rulebook.RULES, [trace_thresholds, thresholds]),
}
"""The rules of each page, and the modules with their thresholds."""

WHOLE_PERCENT = 0.01
UNITS: dict[str, Callable[[float], str]] = {
    "_SHARE": lambda value: share_text(value) if value >= WHOLE_PERCENT else f"{value:g}",
    "_NS": ns_text,
    "_BYTES": bytes_text,
    "_STEPS": lambda value: f"{value:g} steps",
    "_PERCENT": lambda value: f"{value:g}%",
}


def tables(rules: Sequence[Rule[Any]], numbers: Sequence[ModuleType]) -> str:
    """Both tables, in Markdown."""
    lines = ["| | rule | findings | needs | may claim | main thresholds |", "|---|---|---|---|---|---|"]
    for place, rule in enumerate(rules, 1):
        needs = ", ".join(sorted(need.value for need in rule.needs)) or "nothing"
        numbers_text = ", ".join(f"`{name}` {_value(name, numbers)}" for name in rule.thresholds)
        lines.append(
            f"| {place} | {rule.name} | {_kinds(rule.kinds)} | {needs} | {_scope_text(rule)} | {numbers_text} |"
        )
    lines += ["", "| a finding of | does this | to | because |", "|---|---|---|---|"]
    declared_by: dict[int, list[str]] = {}
    relations = {id(relation): relation for rule in rules for relation in rule.relations}
    for rule in rules:
        for relation in rule.relations:
            declared_by.setdefault(id(relation), []).append(rule.name)
    for identity, names in declared_by.items():
        relation = relations[identity]
        whose = f" of {' and '.join(relation.rules)}" if relation.rules else ""
        lines.append(
            f"| {', '.join(names)} | {relation.effect} | {_kinds(relation.kinds)}{whose} | {relation.reason} |"
        )
    return "\n".join(lines)


def current_page(page: str) -> str:
    """The whole text of a page with its tables as they should be."""
    text = (ROOT / page).read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no markers for its tables of rules")
    return f"{before}{BEGIN}\n\n{tables(*PAGES[page])}\n\n{END}{after}"


def _kinds(kinds: Sequence[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _scope_text(rule: Rule[Any]) -> str:
    scope: Scope = rule.scope
    if scope.phases == ():
        return "no time"
    phases = "any phase" if scope.phases is None else ", ".join(f"`{phase}`" for phase in scope.phases)
    ranks = {"late": "what some ranks have more", "all": "what all ranks have", "any": ""}[scope.ranks]
    steps = {"some": "what some steps have more", "all": "what steps have all along", "any": ""}[scope.steps]
    later = "" if rule.takes else "later rules see it too"
    return "; ".join(filter(None, (phases, ranks, steps, later)))


def _value(name: str, numbers: Sequence[ModuleType]) -> str:
    value = next(getattr(module, name) for module in numbers if hasattr(module, name))
    unit = next((words for suffix, words in UNITS.items() if name.endswith(suffix)), None)
    return unit(value) if unit else f"{value:g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not current")
    check = parser.parse_args().check
    stale = [page for page in PAGES if (ROOT / page).read_text() != current_page(page)]
    for page in stale:
        print(f"{page}: {'not current, run make rule-table' if check else 'written'}")
        if not check:
            (ROOT / page).write_text(current_page(page))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
