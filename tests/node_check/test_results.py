"""Files of results: this user's own past, and a folder that nodes share."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UsageError
from stepscope.node_check import append_past, publish, read_past, read_peers, read_results


def result(host: str = "n1", **figures: Any) -> dict[str, Any]:
    return {"version": 1, "host": host, "kind": "CPU", "figures": figures or {"memory": 12.0}}


def test_the_past_is_private_and_bounded(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert read_past(environ) == []
    for number in range(1, 4):
        append_past(result(memory=float(number)), environ)
    assert [each["figures"]["memory"] for each in read_past(environ)] == [1.0, 2.0, 3.0]
    path = tmp_path / "stepscope" / "probe.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_nodes_read_each_other_and_not_themselves(tmp_path: Path) -> None:
    publish(result("n1"), tmp_path)
    publish(result("n2"), tmp_path)
    publish(result("n2", memory=9.0), tmp_path)
    assert read_peers(tmp_path, "n1") == [result("n2", memory=9.0)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "host": "x", "kind": 3, "figures": {}}', "\0" * 100]
)
def test_what_is_no_result_is_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert read_peers(tmp_path, "n1") == []
    with pytest.raises(UsageError):
        read_results(tmp_path / "x.json")


def test_figures_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(result(memory="fast", disk_read=-1, processor=1.5, disk_write=True)))
    assert read_results(tmp_path / "x.json")[0]["figures"] == {"processor": 1.5}
