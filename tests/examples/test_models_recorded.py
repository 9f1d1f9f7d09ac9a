"""The examples on small real models: each fault is the first finding about the job, on the rank that has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.ranks]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
STEPS = 60
OF_MACHINE = ("cpu_saturated", "ram_pressure")
"""True on a busy machine, whatever runs there."""


@pytest.fixture
def record(run_stepscope: Callable[..., Any], root: Path) -> Callable[..., list[dict[str, Any]]]:
    pytest.importorskip("transformers")

    def run(name: str, fault: str, ranks: int) -> list[dict[str, Any]]:
        script = root / "examples" / name
        several = ("--nproc-per-node", str(ranks)) if ranks > 1 else ()
        done = run_stepscope("run", "--quiet", *several, script, "--fault", fault, env=ENVIRONMENT, timeout_s=240.0)
        assert done.code == 0, done.stderr[-3000:]
        assert f"step {STEPS} " in done.stdout
        summary: dict[str, Any] = json.loads((done.run_dir / "summary.json").read_text())
        assert [row["steps"] for row in summary["ranks"]] == [STEPS] * ranks
        assert [row["hook_failures"] for row in summary["ranks"]] == [0] * ranks
        return [finding for finding in summary["findings"] if finding["kind"] not in OF_MACHINE]

    return run


@pytest.mark.parametrize(
    ("name", "fault", "ranks", "kind", "blamed"),
    [
        ("bert.py", "straggler", 2, "between_steps", [1]),
        ("bert.py", "input", 1, "input_bound", []),
        ("bert.py", "memory", 1, "memory_creep", []),
        ("vit.py", "input", 1, "input_bound", []),
        ("vit.py", "memory", 1, "memory_creep", []),
        ("llama.py", "straggler", 2, "compute_straggler", [1]),
        ("llama.py", "input", 2, "input_straggler", [1]),
        ("llama.py", "memory", 2, "memory_creep", [1]),
    ],
)
def test_the_fault_comes_first(
    record: Callable[..., Any], name: str, fault: str, ranks: int, kind: str, blamed: list[int]
) -> None:
    first = record(name, fault, ranks)[0]
    assert (first["kind"], first["ranks"] if ranks > 1 else []) == (kind, blamed)


@pytest.mark.parametrize(("name", "ranks"), [("bert.py", 1), ("vit.py", 1), ("llama.py", 2)])
def test_without_a_fault_nobody_is_accused(record: Callable[..., Any], name: str, ranks: int) -> None:
    found = [row for row in record(name, "none", ranks) if row["severity"] != "info"]
    assert [row["kind"] for row in found if row["kind"] == "memory_creep" or 0 < len(row["ranks"]) < ranks] == []
