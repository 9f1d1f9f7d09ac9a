"""Every block of Python in docs/python-api.md runs, in order, as in a session."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from loopback_receiver import loopback_receiver


def stand_in(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """In place of matplotlib, where it is not installed."""
    drawn = MagicMock()
    package = ModuleType("matplotlib")
    package.pyplot = drawn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", drawn)
    return drawn


def test_every_block_runs(
    here: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (root / "docs" / "python-api.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 7
    (tmp_path / "runs").symlink_to(here / "runs")
    monkeypatch.chdir(tmp_path)
    drawn = stand_in(monkeypatch) if importlib.util.find_spec("matplotlib") is None else None
    session: dict[str, Any] = {}
    with loopback_receiver() as slack:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", slack.url)
        for block in blocks:
            exec(compile(block, "docs/python-api.md", "exec"), session)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Rank 1 is ")
    assert printed[1].startswith("rank ")
    assert printed[2].startswith("{'wall_ns': ")
    assert printed[3].startswith("slower: +")
    assert printed[4].startswith("forward: +")
    assert float(printed[5]) > 0
    assert len(printed) == 6
    if drawn is not None:
        (steps, times), how = drawn.stackplot.call_args
        assert len(steps) == len(times[0]) == 119
        assert how["labels"][0] == "input_ns"
    assert slack.requests[0].json["text"].startswith("*Rank 1 is ")
    assert (tmp_path / "findings.csv").read_text().startswith("kind,severity,title,")


def test_it_is_short(root: Path) -> None:
    assert len((root / "docs" / "python-api.md").read_text().split()) <= 1500
