"""Files of results: this user's own past, and a folder that nodes share."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from stepscope.node_check import append_past, publish, read_past, read_peers


def result(host: str = "n1", **figures: Any) -> dict[str, Any]:
    return {"version": 1, "host": host, "kind": "CPU", "figures": figures or {"memory": 12.0}}


def test_the_past_is_private_and_by_host(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert read_past(environ, "n1") == []
    for number in range(1, 4):
        append_past(result(memory=float(number)), environ)
    append_past(result("n2"), environ)
    assert [each["figures"]["memory"] for each in read_past(environ, "n1")] == [1.0, 2.0, 3.0]
    path = tmp_path / "stepscope" / "probe" / "n1.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, path.parent.parent)] == [0o700, 0o700]


def large(number: int, host: str = "gpu-017") -> dict[str, Any]:
    """As a node with eight GPUs writes it, with its verdict."""
    figures = {f"gpu{gpu}_{what}": 600.0 + number for gpu in range(8) for what in ("matmul", "memory")}
    compared = [
        {"name": name, "value": 1.0, "usual": 1.0, "against": "its past (30 checks)", "low": False} for name in figures
    ]
    return {**result(host, **figures), "state": "fit", "title": "x" * 800, "compared": compared}


def test_many_large_results_do_not_end_the_past(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    for number in range(260):  # more than are kept
        append_past(large(number), environ)
    past = read_past(environ, "gpu-017")
    assert len(past) >= 30
    assert past[-1]["figures"]["gpu0_matmul"] == 859.0
    assert (past[-1]["state"], past[-1]["host"], past[-1]["kind"]) == ("fit", "gpu-017", "CPU")


def test_results_too_large_for_the_file_leave_the_newest(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    for number in range(5):
        append_past(result(**{f"figure{at}": number + 1.0 for at in range(20_000)}), environ)
    past = read_past(environ, "n1")
    assert 1 <= len(past) < 5
    assert past[-1]["figures"]["figure0"] == 5.0


def test_the_old_file_of_all_hosts_is_read_until_there_is_a_file_of_this_host(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    old = tmp_path / "stepscope" / "probe.jsonl"
    old.parent.mkdir()
    old.write_text("".join(json.dumps(large(number, f"n{number % 2}")) + "\n" for number in range(400)))
    assert old.stat().st_size > 1 << 20
    assert len(read_past(environ, "n1")) == 200
    append_past(large(400, "n1"), environ)
    assert {each["host"] for each in read_past(environ, "n1")} == {"n1"}
    assert len(read_past(environ, "n0")) == 200
    old.unlink()
    assert len(read_past(environ, "n1")) == 200


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
    assert read_peers(tmp_path, "n0") == []


def test_figures_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(result(memory="fast", disk_read=-1, processor=1.5, disk_write=True)))
    assert read_peers(tmp_path, "n0")[0]["figures"] == {"processor": 1.5}
