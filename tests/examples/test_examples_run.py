"""The examples run bare too, and each of them is listed; how they run under Stepscope: test_examples_recorded.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = 3
SINGLE = ("accumulation.py", "gan.py", "single.py")
RANKS = ("ddp.py", "fsdp2.py")
WITH_API = ("custom_loop.py",)
MODELS = ("bert.py", "llama.py", "vit.py")
"""Need Transformers: test_models_recorded.py."""


def last_line(stdout: str) -> str:
    return stdout.rstrip().splitlines()[-1]


@pytest.mark.soak  # near: test_single in test_examples_recorded.py
def test_single_process_with_workers(root: Path, run_python: Callable[..., Any]) -> None:
    done = run_python(root / "examples" / "single.py", "--steps", str(STEPS), "--workers", "1")
    assert done.code == 0, done.stderr
    assert last_line(done.stdout).startswith(f"step {STEPS} ")


@pytest.mark.soak  # near: test_switched_off_it_is_not_there in tests/launch/test_command_line.py
@pytest.mark.parametrize("name", WITH_API)
def test_api_is_a_no_op_when_switched_off(root: Path, run_python: Callable[..., Any], name: str) -> None:
    done = run_python(root / "examples" / name, "--steps", str(STEPS), env={"STEPSCOPE": "0"})
    assert (done.code, done.stderr, done.run_dir) == (0, "", None)
    assert last_line(done.stdout).startswith(f"step {STEPS} ")


def test_every_example_is_listed_and_tested(root: Path) -> None:
    names = {path.name for path in (root / "examples").glob("*.py")}
    assert names == {*SINGLE, *RANKS, *WITH_API, *MODELS}
    page = (root / "examples" / "README.md").read_text()
    assert {name for name in names if f"| `{name}` |" not in page} == set()


@pytest.mark.parametrize("name", [*SINGLE, *RANKS, *MODELS])
def test_ordinary_scripts_know_nothing_of_us(root: Path, name: str) -> None:
    assert "import stepscope" not in (root / "examples" / name).read_text()
