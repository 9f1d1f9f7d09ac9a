"""Names that say nothing (``told``, ``one``, ``look``): each package may have fewer of them than before, never more.

The counts of today are in ``names.txt``, so that code from before the list may stay while new lines obey it.  When a
count has fallen, lower it: ``pytest tests/repository/test_names.py --update-golden``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from committed_files import committed_files

IN_A_NAME = ("said", "told", "asked", "look", "looks", "looked", "looking")
"""What is it: text, reported, requested?  And ``look``: sample, inspect, evaluate, poll?"""
ALONE = ("one", "less", "again", "still", "held", "kept")
"""An element has a name of its own; and kept by whom, for what?"""
RECORDED = Path("tests/repository/names.txt")
FOLDERS = ("src/stepscope/", "tests/", "bench/")

# A parser would take ten times as long.  What is in an f-string does not count.
PROSE = re.compile(r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*')
EMPTY = re.compile(
    rf"(?<![^\W_])(?:{'|'.join(IN_A_NAME)})(?![^\W_])|(?<!\w)_*(?:{'|'.join(ALONE)})(?!\w)", re.IGNORECASE
)
SENTENCE = re.compile(r"def test_\w+")


def empty_names(source: str) -> Iterator[tuple[int, str]]:
    """Where in a file such a name is used, by line."""
    code = PROSE.sub(lambda match: "\n" * match[0].count("\n"), source)
    for number, line in enumerate(SENTENCE.sub("def", code).split("\n"), 1):
        yield from ((number, match[0]) for match in EMPTY.finditer(line))


def package_of(name: str) -> str:
    """``src/stepscope/hub`` or ``tests``."""
    return "/".join(name.split("/")[: 3 if name.startswith("src/") else 1])


@pytest.fixture(scope="module")
def places(root: Path) -> dict[str, list[str]]:
    """By package: where such names are."""
    found: dict[str, list[str]] = {}
    for path in committed_files(root):
        name = str(path.relative_to(root))
        if path.suffix == ".py" and name.startswith(FOLDERS):
            here = [f"{name}:{line}: {word}" for line, word in empty_names(path.read_text())]
            found.setdefault(package_of(name), []).extend(here)
    return found


def test_no_package_has_more_of_them_than_before(
    root: Path, places: dict[str, list[str]], request: pytest.FixtureRequest
) -> None:
    counts = {package: len(here) for package, here in places.items()}
    if request.config.getoption("--update-golden"):
        lines = [f"{count:5} {package}" for package, count in sorted(counts.items())]
        (root / RECORDED).write_text("\n".join(lines) + "\n")
    allowed = {package: int(count) for count, package in map(str.split, (root / RECORDED).read_text().splitlines())}
    more = [package for package, count in counts.items() if count > allowed.get(package, 0)]
    for package in more:
        print(f"{package}: {counts[package]}, and {allowed.get(package, 0)} before", *places[package], sep="\n")
    assert more == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def look_at(one, *, held=1): ...", ["look", "one", "held"]),
        ("self._told = [x.said for x in asked_ns]", ["told", "said", "asked"]),
        ("everyone, outlook, lookup, unless, on_one_gpu = kept_bytes  # one that is told", []),
        ('"""One that\nsaid so."""\ncall(again="still")', ["again"]),
        ("def test_what_is_told(): ...", []),
    ],
)
def test_what_counts(source: str, found: list[str]) -> None:
    assert [word for _, word in empty_names(source)] == found
