"""``stepscope probe`` on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SHORT = ("--seconds", "2")
UNFIT = """
import sys, stepscope.node_check as check
check.measure_node = lambda *_: {
    "version": 1, "host": "n1", "kind": "CPU", "wall_s": 1.0, "figures": {"memory": 12.0}, "skipped": {},
    "throttled": 0.9, "cpu_quota": 0.5,
}
from stepscope.cli.main import main
main()
"""
"""The command on a node that was measured as unfit."""


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
    (past,) = (path for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert past.parent == tmp_path / "state" / "stepscope" / "probe"
    (shared,) = (tmp_path / "peers").iterdir()
    assert json.loads(shared.read_text()) == found


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_result_that_cannot_be_stored_does_not_hide_the_verdict(tmp_path: Path, options: tuple[str, ...]) -> None:
    state, peers = tmp_path / "state", tmp_path / "peers"
    state.write_text("not a folder")
    peers.mkdir()
    (peers / "n1.json").mkdir()
    (peers / "n1.json" / "x").touch()
    command = [sys.executable, "-c", UNFIT, "probe", "--disk", str(tmp_path), "--peers", str(peers), *options]
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3, done.stderr
    assert "n1 is unfit: its CPU quota of 0.5 CPUs is used up 90% of the time." in done.stdout
    first, *_ = done.stderr.splitlines()
    assert first.startswith("stepscope: the result cannot be kept for later checks: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_check_that_is_ended_leaves_no_load_behind(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "stepscope", "probe", "--seconds", "90", "--no-past", "--disk", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as check:
        parent = psutil.Process(check.pid)
        while not (loads := parent.children()):
            assert check.poll() is None
            time.sleep(0.01)
        check.send_signal(number)
        code = check.wait()
    _, alive = psutil.wait_procs(loads, timeout=30)
    assert alive == []
    assert code == (143 if number == signal.SIGTERM else -9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seconds", "600"), "--seconds: must be 2 to 90, not '600'"),
        (("--peers", "nowhere"), "nowhere is not a folder"),
        (("--against", "nowhere"), "nowhere holds no result of `stepscope probe --json`"),
        (("--against", __file__), "test_probe.py holds no result of `stepscope probe --json`"),
        (("--quick", "--seconds", "3"), "not allowed with argument --quick"),
    ],
)
def test_a_wrong_command_line_measures_nothing(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = probe(tmp_path, *options)
    assert done.returncode == 2
    assert message in done.stderr
