"""``stepscope incident``: the list, one incident as text, Markdown and JSON, into a file, and mistakes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from fakes.cluster import Cluster, slow_at

from stepscope.cli.main import run_command
from stepscope.errors import UsageError
from tests.hub.run_parts import record


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    slow = Cluster(ranks=4, steps=200, faults=(slow_at(2, "forward", 30.0, range(100, 200)),)).run()
    return record(tmp_path_factory.mktemp("incident") / "runs", "slow", slow)


def test_the_list_and_one_incident(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["incident", str(run_dir)]) == 0
    assert "Rank 2 is " in capsys.readouterr().out
    assert run_command(["incident", str(run_dir), "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["incident"]["kind"], document["onset"]["step"]) == ("compute_straggler", 100)
    file = tmp_path / "incident.md"
    assert run_command(["incident", str(run_dir), "1", "--markdown", "--redact", "-o", str(file)]) == 0
    assert "## Onset" in file.read_text() and "node0" not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "read it before you send it" in capsys.readouterr().err


def test_a_number_that_is_not_there_is_one_clear_line(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="has 1 incident; there is no number 7"):
        run_command(["incident", str(run_dir), "7"])
