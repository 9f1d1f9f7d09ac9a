"""``stepscope capture --pid``: a process with torch and without Stepscope is captured, and the errors."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepscope.cli.main import run_command
from stepscope.errors import CaptureError, UsageError

TRAINING = """
import sys, time
import torch

assert "stepscope" not in " ".join(sys.modules)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
print("ready", flush=True)
while True:
    model(torch.randn(32, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, which fits into the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="kineto-") as name:
        yield Path(name)


def test_a_process_with_torch_that_stepscope_did_not_start(
    commands: Any,
    script: Callable[..., Path],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables = {"KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": str(folder), "RANK": "1", "WORLD_SIZE": "2"}
    # Without our path: nothing of ours can be loaded there.
    process = commands.start_python(script(TRAINING), env={**variables, "PYTHONPATH": ""})
    assert process.stdout.readline() == "ready\n"
    output = tmp_path / "trace.json.gz"

    assert run_command(["capture", "--pid", str(process.pid), "--steps", "4", "--shapes", "-o", str(output)]) == 0

    printed = capsys.readouterr()
    assert f"stepscope: process {process.pid} (rank 1): recording 4 optimizer steps\n" in printed.err
    assert "Operators" in printed.out
    trace = json.loads(gzip.decompress(output.read_bytes()))
    assert trace["distributedInfo"] == {"rank": 1, "world_size": 2}
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("Optimizer.step#SGD.step") == 4
    lines = {
        event["name"].rpartition("/")[2] for event in trace["traceEvents"] if event.get("cat") == "python_function"
    }
    assert any(line.startswith("script.py(") for line in lines)
    assert process.poll() is None
    assert list(folder.glob("dynolog")) == []

    # A time instead of steps, of the same process.
    assert run_command(["capture", "--pid", str(process.pid), "--ms", "200", "-o", str(output), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["ranks"]) == ["1"]


def test_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--ms and --steps exclude each other"):
        run_command(["capture", "--pid", "1", "--ms", "5", "--steps", "6"])
    with pytest.raises(UsageError, match="--ms: must be at most 60000 milliseconds"):
        run_command(["capture", "--pid", "1", "--ms", "60001"])


def test_a_process_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    unused = next(pid for pid in range(4_000_000, 5_000_000) if not psutil.pid_exists(pid))
    with pytest.raises(CaptureError, match=f"there is no process {unused}"):
        run_command(["capture", "--pid", str(unused)])
    assert capsys.readouterr().out == ""
