"""Ray Train: the driver starts two workers, which train with DDP and report to it."""

import sys
import tempfile
import time
from pathlib import Path

import ray
import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

HERE = str(Path(__file__).resolve().parent)


def train_on_worker(config):
    sys.path.insert(0, HERE)
    import torch
    from common import (
        BATCH,
        LEARNING_RATE,
        PERIOD,
        STEP_S,
        STEPS,
        Collate,
        Fault,
        Net,
        Samples,
        rank,
        result,
        save_own_state,
    )
    from loop import evaluate
    from torch.nn.functional import cross_entropy

    fault = Fault(config["fault"])
    ranks = ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    model = prepare_model(Net(fault))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    samples = Samples(STEPS * BATCH * ranks, fault)
    batches = prepare_data_loader(torch.utils.data.DataLoader(samples, BATCH, shuffle=True, collate_fn=Collate(fault)))
    evaluation = prepare_data_loader(torch.utils.data.DataLoader(Samples(2 * BATCH * ranks, Fault()), BATCH))
    step = 0
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if fault.hits("callback"):
            time.sleep(STEP_S)  # fault: callback
        if step % PERIOD == 0:
            evaluate(model, evaluation)
            with tempfile.TemporaryDirectory() as folder:
                save_own_state(fault, step, folder)  # fault: checkpoint
                ray.train.report({"loss": loss.item()}, checkpoint=Checkpoint.from_directory(folder))
    if rank() == 0:
        result(step, loss)


def main():
    sys.path.insert(0, HERE)
    from common import arguments

    args = arguments()
    ray.init(num_cpus=3, include_dashboard=False)
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"fault": args.fault.text},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(Path("results").resolve()), name="job"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
