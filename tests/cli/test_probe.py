"""``stepscope probe`` on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHORT = ("--seconds", "2")


def probe(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "data").mkdir(exist_ok=True)
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "stepscope", "probe", "--disk", str(folder / "data"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.soak
def test_a_check_measures_compares_and_leaves_nothing_but_its_results(tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir()
    done = probe(tmp_path, *SHORT, "--json", "--peers", str(tmp_path / "peers"))
    found = json.loads(done.stdout)
    assert found["state"] in ("fit", "busy", "unfit")
    assert done.returncode == (3 if found["state"] == "unfit" else 0)
    assert {"processor", "slowest_core", "all_cores", "memory"} <= found["figures"].keys()
    assert list((tmp_path / "data").iterdir()) == []
    assert [path.name for path in (tmp_path / "state" / "stepscope").iterdir()] == ["probe.jsonl"]
    (shared,) = (tmp_path / "peers").iterdir()
    assert json.loads(shared.read_text()) == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seconds", "600"), "--seconds: must be 2 to 90, not '600'"),
        (("--peers", "nowhere"), "nowhere is not a folder"),
        (("--against", "nowhere"), "nowhere holds no result of `stepscope probe --json`"),
        (("--quick", "--seconds", "3"), "not allowed with argument --quick"),
    ],
)
def test_a_wrong_command_line_measures_nothing(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = probe(tmp_path, *options)
    assert done.returncode == 2
    assert message in done.stderr
