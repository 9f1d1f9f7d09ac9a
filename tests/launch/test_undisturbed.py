"""What the script has and does is the same bare and recorded: its locals, its exit code, its modules."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stepscope_command
from stepscope.store.load import open_run

LEAKING = """
import sys
import torch

if "stepscope" in sys.modules:  # look at the memory as often as possible
    import stepscope.recorder.layers.growth as growth
    growth.LEAST_S, growth.MOST_COST = 0.0, 1.0

KEPT = []
def main():
    lr = 0.1
    config = locals()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(160):
        batch = torch.ones(2, 4)
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            KEPT.append(torch.full((1 << 20,), 1.0))
    print(sorted(config), config["lr"], flush=True)
    sys.exit(44)

main()
"""


@pytest.mark.soak  # near: what grows, and locals that no look keeps, in tests/recorder/test_growth.py
def test_a_leaking_script_keeps_its_locals(run_stepscope: Callable[..., Any], script: Callable[..., Path]) -> None:
    recorded = run_stepscope("run", script(LEAKING))
    assert (recorded.code, recorded.stdout) == (44, "['lr'] 0.1\n")  # as on its own
    (rank,) = open_run(recorded.run_dir).ranks
    found = rank.facts["growing"]
    assert found["holder"].startswith("KEPT, a list made at script.py:")
    assert (found["element"], found["per_step"]) == ("float32 [1048576]", 0.5)
    assert json.loads((recorded.run_dir / "summary.json").read_text())["ranks"][0]["steps"] == 160


# -- streams that nobody reads ----------------------------------------------------------------------------------------

EXITS_44 = """
import os, sys
import stepscope

mine = open("mine.txt", "w")  # gets the number of a stream that is closed
for _ in range(5):
    with stepscope.step():
        pass
if "close" in sys.argv:
    os.close(1)
    os.close(2)
mine.write("mine")
mine.close()
sys.exit(44)
"""

WITHOUT_STREAMS = """
import os, sys
for fd in map(int, sys.argv[1]):
    if sys.argv[2] == "closed":
        os.close(fd)
    else:
        reader, writer = os.pipe()
        os.dup2(writer, fd)
        os.close(reader)
        os.close(writer)
os.execv(sys.executable, [sys.executable, "-m", "stepscope", "run", "--name", "quiet", *sys.argv[3:]])
"""


@pytest.mark.parametrize(
    ("streams", "how"),
    [
        ("12", "closed"),
        pytest.param("1", "closed", marks=pytest.mark.soak),
        pytest.param("2", "closed", marks=pytest.mark.soak),
        pytest.param("012", "closed", marks=pytest.mark.soak),
        pytest.param("12", "gone", marks=pytest.mark.soak),  # near: closed
        pytest.param("", "close", marks=pytest.mark.soak),
    ],
)
def test_a_job_without_streams_keeps_its_exit_code_and_its_run(
    run_python: Callable[..., Any], script: Callable[..., Path], tmp_path: Path, streams: str, how: str
) -> None:
    job = script(EXITS_44, "job.py")
    done = run_python(script(WITHOUT_STREAMS), streams, how, job, *(["close"] if how == "close" else []))
    run_dir = tmp_path / "runs" / "quiet"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (done.code, [row["steps"] for row in summary["ranks"]]) == (44, [5])
    assert (run_dir / "steps.parquet").exists()
    assert (tmp_path / "mine.txt").read_text() == "mine"


# -- children that train ----------------------------------------------------------------------------------------------

PARENT = """
import multiprocessing, os, subprocess, sys
import stepscope

def train(steps):
    for _ in range(steps):
        with stepscope.step():
            pass

if __name__ == "__main__":
    if sys.argv[1] == "child":
        train(1)
        sys.exit()
    train(7)
    if sys.argv[1] == "fork":
        child = os.fork()
        if child == 0:
            train(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    elif sys.argv[1] == "spawn":
        process = multiprocessing.get_context("spawn").Process(target=train, args=(1,))
        process.start()
        process.join()
        assert process.exitcode == 0
    elif sys.argv[1] == "command":
        subprocess.run([sys.executable, __file__, "child"], check=True)
    train(5)
"""


@pytest.mark.parametrize("way", ["fork", *(pytest.param(way, marks=pytest.mark.soak) for way in ("spawn", "command"))])
def test_a_child_that_trains_does_not_replace_its_parent(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], way: str
) -> None:
    done = run_stepscope("run", script(PARENT), way)
    assert done.code == 0, done.stderr
    run = open_run(done.run_dir)
    assert [(rank.rank, rank.identity.attempt, len(rank.steps)) for rank in run.ranks] == [(0, 0, 12)]
    assert "attempt" not in done.stderr
    (notice,) = [notice for notice in run.notices if "trained as well" in notice]
    assert notice.endswith(f"(process {run.ranks[0].identity.pid}), trained as well: 1 step is not shown.")


# -- a module of the script named like ours ---------------------------------------------------------------------------

USES_OWN = """
import sys
import stepscope

print(stepscope.WHO, "_stepscope.recorder.bootstrap" in sys.modules, flush=True)
sys.exit(44)
"""

COMMAND = """
import sys
from stepscope_command import main

sys.argv = ["stepscope", "run", "--name", "own", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("place", ["job/stepscope.py", pytest.param("lib/stepscope.py", marks=pytest.mark.soak)])
def test_a_module_of_the_script_named_stepscope_is_the_one_it_imports(
    run_python: Callable[..., Any], script: Callable[..., Path], tmp_path: Path, place: str
) -> None:
    script('WHO = "mine"', place)
    library = str(tmp_path / "lib")
    path = os.pathsep.join([library, str(Path(stepscope_command.__file__).parent)])
    done = run_python(script(COMMAND), script(USES_OWN, "job/train.py"), env={"PYTHONPATH": path})
    assert (done.code, done.stdout) == (44, "mine True\n"), done.stderr
    assert (tmp_path / "runs" / "own" / "summary.json").exists()
