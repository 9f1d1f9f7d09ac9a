"""American spelling in code, keys, text and docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from committed_files import committed_files

# Written in pieces, so that this file does not find itself.
BRITISH = re.compile(
    "|".join(
        [
            "(?:util|synchron|normal|token|serial|initial|recogn|summar|optim|minim|maxim|organ)is" + "(?:e|ing|ation)",
            "(?:col|behavi|neighb|fav|hon)o" + "ur",
            "(?:label|journal|level|model|travel)" + "led(?!by)",
            "cent" + "re",
            "analy" + "se(?!s)",
            "judge" + "ment",
            "licen" + "ce",
        ]
    ),
    re.IGNORECASE,
)
ACCEPTED = {
    "src/stepscope/records/finding.py": {"utilisa" + "tion"},
    "tests/store/test_old_names.py": {"utilisa" + "tion"},
}
"""Names in files of earlier versions, which are still read."""


def test_one_spelling(root: Path) -> None:
    found = []
    for path in committed_files(root):
        name = str(path.relative_to(root))
        if path.suffix in (".png", ".gz", ".parquet", ".lock") or name in ("CHANGELOG.md", "web/package-lock.json"):
            continue
        if "/data/" in name:
            continue
        words = {match[0].lower() for match in BRITISH.finditer(path.read_bytes().decode(errors="ignore"))}
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
    ],
)
def test_the_pattern_itself(line: str, bad: bool) -> None:
    assert bool(BRITISH.search(line)) is bad
