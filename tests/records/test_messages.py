"""What others wrote does nothing to a terminal, wherever it is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.records.text import (
    confidence_text,
    duration_text,
    hours_text,
    ns_text,
    percent_text,
    printable,
    printable_document,
    say,
    without_colors,
)
from stepscope.reports.summary_text import render_text
from stepscope.store.create import create_run
from stepscope.store.documents import end_run, read_meta, write_meta
from stepscope.terminal.drawing import finding_line

HOSTILE = "a\x1b]0;owned\x07\x9b31mb\u202ec\u2066d\x7f\u200be\ud800"
ESCAPED = r"a\x1b]0;owned\x07\x9b31mb\u202ec\u2066d\x7f\u200be\ud800"


def test_what_a_terminal_would_obey_or_hide_is_shown() -> None:
    assert printable(HOSTILE) == ESCAPED
    assert printable("a\nb\tc\r", keep="\n\t") == "a\nb\tc\\r"
    assert printable("a\x1bb", mark="?") == "a?b"
    assert printable(without_colors("\x1b[1;31mbad\x1b[0m value\x1b[2J")) == "bad value\\x1b[2J"
    assert printable("Größe 漢字 → ✖") == "Größe 漢字 → ✖"
    assert printable_document({"a\x1b": ["\x9b", 1, None, ("x\n",)]}) == {"a\\x1b": ["\\x9b", 1, None, ["x\n"]]}


def test_lines_of_our_own(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    assert capsys.readouterr().err == f"stepscope: {ESCAPED}\n"
    assert finding_line(1, "info", HOSTILE, wall_s=0.0).endswith(ESCAPED)


def harmless(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    """A run of somebody else's: escapes in its name, host, command, user, and in the traceback that ended it."""
    word = HOSTILE.replace("\ud800", "")
    made = create_run(tmp_path / "runs", "night", ["train.py", word], environ={}, sessions=tmp_path / "sessions")
    end_run(made.run_dir, exit_code=1, status="failed")
    meta = {**read_meta(made.run_dir), "name": word, "host": word, "user": word, "launcher": None}
    write_meta(made.run_dir, meta)
    error = {"schema": 1, "rank": 0, "pid": 7, "type": "E", "message": word, "wall_ns": 1, "attempt": 0}
    (made.run_dir / "errors").mkdir(exist_ok=True)
    (made.run_dir / "errors" / "7.json").write_text(json.dumps({**error, "traceback": f"File {word}\n  x\n"}))
    return made.run_dir


def stepscope(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-m", "stepscope", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_reports_and_lists_of_a_run_of_somebody_else(hostile_run: Path) -> None:
    folder = hostile_run.parent.parent
    shown = stepscope("report", str(hostile_run), cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert r"\x1b]0;owned\x07" in shown.stdout.replace("\n", "").replace(" ", "")
    said = [shown.stdout, shown.stderr, (hostile_run / "summary.txt").read_text()]
    bad = hostile_run.parent / "bad\x1b[31m"
    bad.mkdir()
    (bad / "run.json").write_text("{")
    listed = stepscope("list", str(hostile_run.parent), cwd=folder)
    refused = stepscope("report", str(bad), cwd=folder)
    assert refused.returncode == 3
    said += [listed.stdout, listed.stderr, refused.stdout, refused.stderr]
    assert [harmless(text) for text in said] == [True] * len(said)


def test_colors_are_ours_alone(hostile_run: Path) -> None:
    summary: dict[str, Any] = json.loads(stepscope("report", "--json", str(hostile_run), cwd=hostile_run.parent).stdout)
    drawn = render_text(summary, color=True)
    import re

    assert harmless(re.sub(r"\x1b\[[0-9;]*m", "", drawn))
    assert "\x1b]" not in drawn


@pytest.mark.parametrize("whole", [False, True])
def test_durations_are_written_as_on_the_page(whole: bool, root: Path) -> None:
    examples = json.loads((root / "tests" / "records" / "durations.json").read_text())
    rows = examples["whole" if whole else "precise"]
    assert [[ns, ns_text(ns, whole=whole)] for ns, _ in rows] == rows
    assert [duration_text(ns / 1e9, whole=whole) for ns, _ in rows] == [text for _, text in rows]


@pytest.mark.parametrize(
    ("kind", "text"), [("hours", hours_text), ("shares", percent_text), ("confidences", confidence_text)]
)
def test_figures_of_the_fleet_are_written_as_on_the_page(
    kind: str, text: Callable[[float | None], str], root: Path
) -> None:
    rows = json.loads((root / "tests" / "records" / "fleet_numbers.json").read_text())[kind]
    assert [[value, text(value)] for value, _ in rows] == rows
