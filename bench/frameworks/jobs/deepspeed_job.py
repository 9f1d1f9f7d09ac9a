"""DeepSpeed with ZeRO-1: its engine runs backward and the optimizer, and writes checkpoints."""

import time

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, LEARNING_RATE, PERIOD, STEP_S, Net, arguments, loaders, rank, result, save_own_state
from loop import evaluate
from torch.nn.functional import cross_entropy


def main():
    fault = arguments().fault
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Net(fault)
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": PERIOD,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    batches, evaluation = loaders(fault, dist.get_world_size(), rank())
    for x, y in batches:
        loss = cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        if fault.hits("callback"):
            time.sleep(STEP_S)  # fault: callback
        if engine.global_steps % PERIOD == 0:
            evaluate(engine, evaluation)
            engine.save_checkpoint("checkpoint")
            save_own_state(fault, engine.global_steps)  # fault: checkpoint
    if rank() == 0:
        result(engine.global_steps, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
