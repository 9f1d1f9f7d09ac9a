"""The tutorials, followed to the letter: their scripts, and every command that they show with its output.

Of the README, .ci/run runs ``make demo``; its launchers are in tests/launch and tests/frameworks.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.alone]  # a busy machine changes verdicts about time


class Tutorial:
    """A page, and the folder in which it is followed."""

    def __init__(self, page: Path, folder: Path, stepscope: Callable[..., Any]) -> None:
        self.text = page.read_text()
        self.folder = folder
        self.stepscope = stepscope
        self.left = self._commands()

    def script(self, number: int = 0) -> str:
        return re.findall(r"^```python\n(.*?)^```", self.text, flags=re.DOTALL | re.MULTILINE)[number]

    def save(self, script: str) -> None:
        (self.folder / "train.py").write_text(script)

    def _commands(self) -> list[list[str]]:
        """What follows ``$ stepscope``, to the end of the line or of a quotation."""
        found = re.findall(r'^\$ stepscope ((?:[^"\n]|"[^"]*")*)$', self.text, flags=re.MULTILINE)
        return [shlex.split(" ".join(command.split())) for command in found]

    def follow(self, *expected: str) -> Any:
        """Run the next command of the page, which has to be this."""
        words = self.left.pop(0)
        assert tuple(words[: len(expected)]) == expected
        return self.stepscope(*words, cwd=self.folder)


@pytest.fixture
def tutorial(root: Path, tmp_path: Path, run_stepscope: Callable[..., Any]) -> Callable[[str], Tutorial]:
    return lambda name: Tutorial(root / "docs" / f"{name}.md", tmp_path, run_stepscope)


def findings(folder: Path, run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "runs" / run / "summary.json").read_text())["findings"]
    return found


def test_getting_started(
    tutorial: Callable[[str], Tutorial], run_stepscope: Callable[..., Any], tmp_path: Path
) -> None:
    page = tutorial("getting-started")
    page.save(page.script())
    assert page.follow("run", "--name", "first").code == 0
    first = findings(tmp_path, "first")[0]
    assert first["kind"] == "input_bound"
    assert "Photos.__getitem__, train.py:13" in first["title"]
    advised = "DataLoader(Photos(), batch_size=32, num_workers=2)"
    assert advised in page.text
    page.save(page.script().replace("DataLoader(Photos(), batch_size=32)", advised))
    assert page.follow("run", "--name", "workers").code == 0
    assert page.left == []
    facts = json.loads((tmp_path / "runs/workers/summary.json").read_text())["facts"]
    assert facts["loader"]["num_workers"] == 2
    # What the page lists under "Look closer".
    for command in ("report first", re.search(r"`stepscope (sql first [^`]*)`", page.text)[1]):  # type: ignore[index]
        assert run_stepscope(*shlex.split(command), cwd=tmp_path).code == 0
    listing = run_stepscope("list", cwd=tmp_path)
    assert re.findall(r"^ *(?:\S+ +)?(first|workers)\b", listing.stdout, flags=re.MULTILINE) == ["workers", "first"]


def test_find_a_slow_rank(tutorial: Callable[[str], Tutorial], tmp_path: Path) -> None:
    page = tutorial("find-a-slow-rank")
    page.save(page.script())
    assert page.follow("run", "--name", "slow").code == 0
    late = [found for found in findings(tmp_path, "slow") if found["ranks"] == [0]]
    assert "log_samples, train.py:13" in late[0]["title"]
    table = page.follow("sql", "slow").stdout.splitlines()
    assert table[0].split() == ["rank", "step_ms", "work_ms", "wait_ms"]
    assert table[2].split()[0] == "0"  # most work first
    assert page.left == []


def test_debug_a_hang(tutorial: Callable[[str], Tutorial], tmp_path: Path) -> None:
    page = tutorial("debug-a-hang")
    page.save(page.script())
    done = page.follow("run", "--name", "hang")
    assert done.code != 0
    hang = findings(tmp_path, "hang")[0]
    assert (hang["kind"], hang["ranks"]) == ("hang_missing_collective", [2])
    assert "train.py:27" in hang["title"]
    assert (
        "ConnectionError: the metrics server closed the connection"
        in (tmp_path / "runs/hang/logs/rank-2.log").read_text()
    )
    text = page.follow("flight", "runs/hang").stdout
    assert "Rank 2 never called all_reduce" in text
    assert page.left == []


def test_read_traces(
    tutorial: Callable[[str], Tutorial],
    run_stepscope: Callable[..., Any],
    run_python: Callable[..., Any],
    tmp_path: Path,
) -> None:
    script = tutorial("getting-started").script()
    page = tutorial("read-traces")
    head, _, _ = script.partition("for images, labels in")
    page.save(head + page.script())
    assert run_python(tmp_path / "train.py", timeout_s=250).code == 0
    done = page.follow("trace", "traces/")
    assert done.code == 0
    assert "Training waits for the DataLoader" in done.stdout
