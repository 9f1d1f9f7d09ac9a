"""Tests use the front door: how much they import, touch of private names and patch is counted and may not creep up.

``front_door.json`` has the recorded counts for each folder of tests.  After lowering one, record it:
``pytest tests/repository/test_front_door.py --update-golden``.  That never raises a count of private names or patches;
new tests may need new imports, and a review sees that in the recorded numbers.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_name("front_door.json")
IMPORTS = ("modules", "symbols")
"""Counted once each, however many files import them."""
# As text: parsing all tests takes seconds.
IMPORT = re.compile(r"^ *from (stepscope[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
PRIVATE = re.compile(r"([A-Za-z_][\w.]*)?[)\]]*\._[a-z]\w*\b(?!__)")
PATCHED = re.compile(r"\bmonkeypatch\.setattr\(")
NOT_OURS = re.compile(r"(?:self|cls|torch|dist|nn|modules?|os|sys|threading|ssl)\b")
"""Of what a test may use private names: its own classes, and libraries that have no public name for it."""


def count(text: str) -> Iterator[tuple[str, str]]:
    """What of each sort a test file does, with the name of what counts only once."""
    for module, names in IMPORT.findall(text):
        yield "modules", module
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            yield "symbols", f"{module}.{name}"
            if name.startswith("_"):
                yield "private", ""
    for owner in PRIVATE.findall(text):
        if not NOT_OURS.match(owner):
            yield "private", ""
    for _ in PATCHED.findall(text):
        yield "patched", ""


def counts(tests: Path) -> dict[str, dict[str, int]]:
    """By folder of ``tests``, and for all of them together."""
    found: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(tests.rglob("*.py")):
        parts = path.relative_to(tests).parts
        folder = parts[0] if len(parts) > 1 else "."
        for what, name in count(path.read_text()):
            for place in (folder, "all"):
                found[place][what].append(name)
    return {
        place: {
            what: len(set(names)) if what in IMPORTS else len(names) for what, names in sorted(found[place].items())
        }
        for place in sorted(found)
    }


def test_counts_do_not_rise(root: Path, request: pytest.FixtureRequest) -> None:
    now, recorded = counts(root / "tests"), json.loads(RECORDED.read_text())
    if request.config.getoption("--update-golden"):
        recorded = {
            place: {
                what: number if what in IMPORTS else min(number, recorded.get(place, {}).get(what, number))
                for what, number in sorts.items()
            }
            for place, sorts in now.items()
        }
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    rose = {
        f"{place}: {what}": f"{number}, recorded {recorded.get(place, {}).get(what, 0)}"
        for place, sorts in now.items()
        for what, number in sorts.items()
        if number > recorded.get(place, {}).get(what, 0)
    }
    assert rose == {}, "use the package's public functions, or pass a value instead of patching it"


def test_the_count_itself() -> None:
    code = (
        "from stepscope.store.load import load_run, _rows\n"
        "class A:\n"
        "    def f(self, monkeypatch):\n"
        "        self._own = torch._C.a\n"
        "        offer._fd = load_run(1)._fd\n"
        "        monkeypatch.setattr(store, 'LIMIT', 1)\n"
    )
    found = list(count(code))
    sorts = [what for what, _ in found]
    assert {what: sorts.count(what) for what in sorts} == {"modules": 1, "symbols": 2, "private": 3, "patched": 1}
