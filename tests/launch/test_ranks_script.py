"""The launcher of the demo: ranks with their variables, and what becomes of the others when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.cli.commands import demo
from stepscope.cli.main import run_command
from stepscope.errors import UsageError

RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
port = open("port-" + os.environ["RANK"], "w").write(os.environ["MASTER_PORT"])
os.write(1, (" ".join(os.environ[name] for name in names) + "\\n").encode())  # at once, or they mix
if len(sys.argv) > 1:
    if rank == 1:
        exec(sys.argv[1])
    time.sleep(60)
"""


def launched(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK)
    line = [sys.executable, str(demo.LAUNCHER), "2", "rank.py", *words]
    # These ranks do nothing with torch: an empty one is loaded for them.
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "_dynamo.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.Popen(line, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def test_each_rank_knows_which_it_is(tmp_path: Path) -> None:
    process = launched(tmp_path)
    printed, _ = process.communicate(timeout=30)
    assert (process.returncode, sorted(printed.splitlines())) == (0, ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"])
    assert (tmp_path / "port-0").read_text() == (tmp_path / "port-1").read_text()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("deed", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)]
)
def test_when_one_fails_the_others_are_ended(tmp_path: Path, deed: str, code: int) -> None:
    process = launched(tmp_path, deed)
    process.communicate(timeout=30)
    assert process.returncode == code


@pytest.mark.faults
def test_who_ends_it_ends_the_ranks(tmp_path: Path) -> None:
    process = launched(tmp_path, "")
    assert process.stdout is not None
    while len(list(tmp_path.glob("port-*"))) < 2:
        time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_without_torch_the_demo_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="the demo needs torch, which is not installed"):
        run_command(["demo"])
