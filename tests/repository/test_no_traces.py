"""No committed file knows one machine: no private folder, no package registry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from committed_files import committed_files

# Written in pieces, so that this file does not find itself.
FORBIDDEN = re.compile(
    "|".join(
        [
            r"(?<![\w.<>-])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me)/\w",
            r"/tmp/ve" + r"nvs",
            r"/opt/(?:wh" + r"eels|py" + r"pi)",
            r"index-u" + r"rl",
            r"find-l" + r"inks",
            r"trusted-h" + r"ost",
            r"py" + r"pi\.org|pythonh" + r"osted\.org|download\.pyt" + r"orch\.org|npmj" + r"s\.(?:org|com)",
        ]
    )
)


def test_no_trace_of_one_machine(root: Path) -> None:
    found = []
    for path in committed_files(root):
        text = path.read_bytes().decode(errors="ignore")
        found += [f"{path.relative_to(root)}: {match[0]}" for match in FORBIDDEN.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("cd /wo" + "rk/main", True),
        ("pip install --index-u" + "rl x", True),
        ("framework/roots", False),
        ("<run>/ro" + "ot/x", False),
        ("https://py" + "pi.org/simple", True),
    ],
)
def test_the_pattern_itself(line: str, bad: bool) -> None:
    assert bool(FORBIDDEN.search(line)) is bad
