"""How jobs of frameworks end: their workers are ended from outside, or started beside the script."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
pytestmark = [pytest.mark.long, pytest.mark.ranks]

RAY = """
import sys
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def train(config):
    import torch
    from ray.train.torch import prepare_model
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(30):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()

ray.init(num_cpus=3, include_dashboard=False)
scaling = ScalingConfig(num_workers=2, use_gpu=False)
TorchTrainer(train, scaling_config=scaling, run_config=RunConfig(storage_path=sys.argv[1])).fit()
ray.shutdown()
if sys.argv[2] == "raises":
    raise KeyError("accuracy")
"""


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")  # importing it here starts threads
@pytest.mark.parametrize("how", ["ends", "raises"])
def test_workers_of_ray_train(run_stepscope: Run, script: Callable[..., Path], tmp_path: Path, how: str) -> None:
    script(RAY)
    done = run_stepscope("run", "--quiet", "script.py", tmp_path / "results", how)
    assert done.code == int(how == "raises"), done.stderr
    summary = json.loads((done.run_dir / "summary.json").read_text())
    assert (summary["steps"]["total"], summary["world_size"], summary["attempts"]) == (30, 2, [])
    crashes = [finding["title"] for finding in summary["findings"] if finding["kind"] == "rank_crashed"]
    assert crashes == (["The script raised KeyError: 'accuracy' (after step 29)."] if how == "raises" else [])
    assert summary["status"] == ("failed" if how == "raises" else "finished")


LIGHTNING = """
import sys
import lightning
import torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        if index == 0:
            print("rank", self.global_rank, "trains", flush=True)
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy=sys.argv[1], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    ).fit(Model(), torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=2))
"""


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize(("strategy", "logs"), [("ddp", ["main", "rank-1"]), ("ddp_spawn", ["rank-0", "rank-1"])])
def test_every_rank_of_lightning_has_a_log(
    run_stepscope: Run, script: Callable[..., Path], strategy: str, logs: list[str]
) -> None:
    script(LIGHTNING)
    done = run_stepscope("run", "--quiet", "script.py", strategy)
    assert done.code == 0, done.stderr
    for rank, name in enumerate(logs):
        lines = (done.run_dir / "logs" / f"{name}.log").read_text().split(os.linesep)
        assert f"rank {rank} trains" in lines
