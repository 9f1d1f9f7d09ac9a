"""Pipeline parallelism under torchrun: two stages, 1F1B.  Every stage reads the samples and takes what it needs."""

import time

import torch
import torch.distributed as dist
from common import (
    BATCH,
    CLASSES,
    EVALUATION_S,
    FEATURES,
    LEARNING_RATE,
    PERIOD,
    STEP_S,
    STEPS,
    Collate,
    Fault,
    Samples,
    arguments,
    rank,
    result,
    save_own_state,
)
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

MICRO_BATCHES = 4


class Stage(nn.Module):
    def __init__(self, width, fault):
        super().__init__()
        self.fault = fault
        self.layers = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, width))

    def forward(self, x):
        if self.training and self.fault.hits("forward"):
            time.sleep(STEP_S / MICRO_BATCHES)  # fault: forward
        if not self.training and self.fault.hits("evaluation"):
            time.sleep(EVALUATION_S / MICRO_BATCHES)  # fault: evaluation
        return self.layers(x)


def main():
    fault = arguments().fault
    dist.init_process_group("gloo")
    last = dist.get_world_size() - 1
    torch.manual_seed(0)
    model = Stage(CLASSES if rank() == last else FEATURES, fault)
    stage = PipelineStage(model, rank(), dist.get_world_size(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    batches = torch.utils.data.DataLoader(Samples(STEPS * BATCH, fault), BATCH, collate_fn=Collate(fault))
    evaluation = torch.utils.data.DataLoader(Samples(2 * BATCH, Fault()), BATCH)
    step, losses = 0, []

    def through(act, x, y):
        """One batch through the pipeline: the first stage has the input, the last one the loss."""
        losses.clear()
        if rank() == 0:
            act(x)
        elif rank() == last:
            act(target=y, losses=losses)
        else:
            act()

    for x, y in batches:
        through(schedule.step, x, y)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if fault.hits("callback"):
            time.sleep(STEP_S)  # fault: callback
        if step % PERIOD == 0:
            loss = torch.stack(losses).mean() if losses else None
            model.eval()
            with torch.no_grad():
                for each in evaluation:
                    through(schedule.eval, *each)
            model.train()
            save_own_state(fault, step)  # fault: checkpoint
    if rank() == last:
        result(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
