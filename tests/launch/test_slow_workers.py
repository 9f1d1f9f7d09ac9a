"""A job whose DataLoader workers are slow: the run names their line, and neither job nor workers notice anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.store.load import open_run

Run = Callable[..., Any]

TRAIN = """
import os, signal, subprocess, sys, time
import torch
import torch.distributed as dist
from torch import nn

way = sys.argv[1]
late = os.environ.get("RANK", "1") == "1"


def load(index):
    if late:
        time.sleep(0.02)  # slow
    return torch.full((16,), float(index % 7))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 240 if "RANK" in os.environ else 160

    def __getitem__(self, index):
        if way == "children" and index % 40 == 0:  # rarely: on a busy machine a fork takes longer than a slow item
            subprocess.run(["true"], check=True)
            child = os.fork()
            if not child:
                time.sleep(0.05)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        return load(index)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        for index in range(worker.id, 160, worker.num_workers):
            yield load(index)


def collate(rows):
    for row in rows:
        load(0)
    return torch.stack(rows)


def prepare(_):
    if way == "own handlers":  # what libraries do in their workers
        for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
            signal.signal(number, signal.SIG_DFL)


def main():
    options = {"batch_size": 4, "num_workers": 2, "worker_init_fn": prepare, "persistent_workers": way == "persistent"}
    if way == "spawn":
        options["multiprocessing_context"] = "spawn"
    if way == "collate":
        options["collate_fn"] = collate
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        options["num_workers"] = 1  # two would make every second step long
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Stream() if way == "stream" else Data(), **options)
    for epoch in range(2 if way == "persistent" else 1):
        for batch in loader:
            loss = model(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.is_initialized() and dist.get_rank():
                continue
            print(loss.item().hex())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
LINE = next(number for number, text in enumerate(TRAIN.splitlines(), 1) if text.endswith("# slow"))
PLACE = f"load, train.py:{LINE}, in a DataLoader worker"


@pytest.fixture
def train(script: Callable[..., Path]) -> Path:
    return script(TRAIN, "train.py")


def findings_of(run_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run_dir / "summary.json").read_text())["findings"]
    return found


@pytest.mark.parametrize(
    "way",
    ["plain", *(pytest.param(way, marks=pytest.mark.soak) for way in ("stream", "collate", "persistent", "children"))],
)
def test_the_line_of_slow_workers_is_named(run_stepscope: Run, run_python: Run, train: Path, way: str) -> None:
    done = run_stepscope("run", "--quiet", train, way, env={"OMP_NUM_THREADS": "1"})
    bare = run_python(train, way, env={"OMP_NUM_THREADS": "1"})
    assert (done.code, done.stdout, done.stderr) == (0, bare.stdout, bare.stderr)
    (found,) = (finding for finding in findings_of(done.run_dir) if finding["kind"] == "input_bound")
    assert found["evidence"]["place"] == PLACE
    assert f"mostly in {PLACE}." in found["title"]
    stacks = [stack for stack in open_run(done.run_dir).stacks if stack.get("worker")]
    assert {(stack["rank"], stack["phase"]) for stack in stacks} == {(0, "input")}
    assert {stack["frames"][-1]["file"].rpartition("/")[2] for stack in stacks} == {"fetch.py"}
    # And nothing is left in the session.
    assert not Path(json.loads((done.run_dir / "run.json").read_text())["session"]).exists()


@pytest.mark.soak
@pytest.mark.parametrize("way", ["spawn", "own handlers"])
def test_workers_that_cannot_answer_are_left_alone(run_stepscope: Run, run_python: Run, train: Path, way: str) -> None:
    done = run_stepscope("run", "--quiet", train, way, env={"OMP_NUM_THREADS": "1"})
    bare = run_python(train, way, env={"OMP_NUM_THREADS": "1"})
    assert (done.code, done.stdout, done.stderr) == (0, bare.stdout, bare.stderr)
    assert not [stack for stack in open_run(done.run_dir).stacks if stack.get("worker")]
    (found,) = (finding for finding in findings_of(done.run_dir) if finding["kind"] == "input_bound")
    assert found["evidence"]["place"] is None


@pytest.mark.soak
def test_so_is_that_of_the_workers_of_a_late_rank(run_stepscope: Run, train: Path, forked_ranks: Path) -> None:
    done = run_stepscope("run", "--quiet", forked_ranks, "2", train, "plain", env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0, done.stderr
    (found,) = (finding for finding in findings_of(done.run_dir) if finding["kind"] == "input_straggler")
    assert (found["ranks"], found["evidence"]["place"]) == ([1], PLACE)
