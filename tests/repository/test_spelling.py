"""American spelling in code, keys, text and docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from committed_files import committed_files

# Written in pieces, so that this file does not find itself.
VERBS = [
    "util",
    "synchron",
    "normal",
    "token",
    "serial",
    "initial",
    "recogn",
    "summar",
    "optim",
    "minim",
    "maxim",
    "organ",
]
NOUNS = ["col", "behavi", "neighb", "fav", "hon"]
DOUBLED = ["label", "journal", "level", "model", "travel"]
OTHERS = ("cent" + "re", "analy" + "se", "judge" + "ment", "licen" + "ce")
STEMS = (
    *(verb + "is" for verb in VERBS),
    *(noun + "o" + "ur" for noun in NOUNS),
    *(verb + "led" for verb in DOUBLED),
    *OTHERS,
)
"""A text without any of these needs no search with the expression, which takes ten times as long."""
BRITISH = re.compile(
    "|".join(
        [
            f"(?:{'|'.join(VERBS)})is(?:e|ing|ation)",
            f"(?:{'|'.join(NOUNS)})o" + "ur",
            f"(?:{'|'.join(DOUBLED)})led(?!by)",
            *(other + "(?!s)" * other.startswith("analy") for other in OTHERS),
        ]
    )
)
ACCEPTED = {
    "src/stepscope/records/finding.py": {"utilisa" + "tion"},
    "tests/store/test_old_names.py": {"utilisa" + "tion"},
}
"""Names in files of earlier versions, which are still read."""


def british_words(text: str) -> set[str]:
    lower = text.lower()
    return {match[0] for match in BRITISH.finditer(lower)} if any(stem in lower for stem in STEMS) else set()


def test_one_spelling(root: Path) -> None:
    found = []
    for path in committed_files(root):
        name = str(path.relative_to(root))
        if path.suffix in (".png", ".gz", ".parquet", ".lock") or name in ("CHANGELOG.md", "web/package-lock.json"):
            continue
        if "/data/" in name:
            continue
        words = british_words(path.read_bytes().decode(errors="ignore"))
        found += [f"{name}: {word}" for word in sorted(words - ACCEPTED.get(name, set()))]
    assert found == []


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("low_gpu_utilisa" + "tion", True),
        ("aria-labelledby", False),
        ("three analyses", False),
        ("analy" + "sed", True),
        ("optimized, minimal, centered", False),
        ("Label" + "led", True),
    ],
)
def test_the_pattern_itself(line: str, bad: bool) -> None:
    assert bool(british_words(line)) is bad
