"""Tests that pass only when they run again are listed and counted (``--flaky-report`` of ``tests/conftest.py``)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = """
from pathlib import Path

def test_sound():
    pass

def test_broken():
    assert 1 == 2

def test_flaky():
    first = Path(__file__).with_name("ran-before")
    seen = first.exists()
    first.touch()
    assert seen, "only the first time"
"""


@pytest.mark.soak  # it starts pytest in two other processes; the hook hardly ever changes
def test_a_test_that_passes_the_second_time_is_named_with_its_failure(
    root: Path, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_some.py").write_text(TESTS)
    shutil.copy(root / "tests" / "conftest.py", tests)
    shutil.copytree(root / "tests" / "support", tests / "support")
    shutil.copy(root / "pyproject.toml", tmp_path)
    first = run_python("-m", "pytest", "-n", "0", tests)
    assert (first.code, first.stdout.splitlines()[-1][:18]) == (1, "2 failed, 1 passed")
    assert "flaky:" not in first.stdout

    # As in `make soak` after `make test`: a file that exists must not be taken for tests to run.
    (tmp_path / "flaky").write_text("an earlier line\n")
    repeated = run_python("-m", "pytest", "-n", "0", "--last-failed", f"--flaky-report={tmp_path / 'flaky'}", tests)

    line = "tests/test_some.py::test_flaky: AssertionError: only the first time"
    assert repeated.code == 1  # one is still broken
    assert f"FLAKY {line}" in repeated.stdout
    assert "1 flaky: failed among others and passed alone" in repeated.stdout
    assert (tmp_path / "flaky").read_text() == f"an earlier line\n{line}\n"
