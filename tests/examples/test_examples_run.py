"""Each example is listed, and knows nothing of us; how they run under Stepscope: test_examples_recorded.py."""

from __future__ import annotations

from pathlib import Path

import pytest

SINGLE = ("accumulation.py", "gan.py", "single.py")
RANKS = ("ddp.py", "fsdp2.py")
WITH_API = ("custom_loop.py",)
MODELS = ("bert.py", "llama.py", "vit.py")
"""Need Transformers: test_models_recorded.py."""


def test_every_example_is_listed_and_tested(root: Path) -> None:
    names = {path.name for path in (root / "examples").glob("*.py")}
    assert names == {*SINGLE, *RANKS, *WITH_API, *MODELS}
    page = (root / "examples" / "README.md").read_text()
    assert {name for name in names if f"| `{name}` |" not in page} == set()


@pytest.mark.parametrize("name", [*SINGLE, *RANKS, *MODELS])
def test_ordinary_scripts_know_nothing_of_us(root: Path, name: str) -> None:
    assert "import stepscope" not in (root / "examples" / name).read_text()
