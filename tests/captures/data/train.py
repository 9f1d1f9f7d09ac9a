"""The job whose captured traces are in this folder: two gloo ranks, of which rank 1 has a fault (the first argument).

torchrun --nproc-per-node 2 train.py FAULT FOLDER
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

FAULT, FOLDER = sys.argv[1], sys.argv[2]


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        for _ in range(REPEATS["backward"]):
            weight @ weight
        return gradient, None


def augment(batch):
    time.sleep(REPEATS["loader"] * 0.01)
    return batch


def normalize(x):
    total = 0
    for number in range(REPEATS["line"] * 60_000):
        total += number % 7
    return x


class Tokens(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield augment(torch.ones(16, 64))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.register_buffer("mixer", torch.ones(400, 400))

    def forward(self, x):
        for _ in range(REPEATS["layer"]):
            self.mixer.matmul(self.mixer)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.register_buffer("weight", torch.ones(400, 400))

    def forward(self, x):
        return ScaledGradient.apply(self.block(normalize(x)), self.weight).pow(2).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    REPEATS.update({name: 5 * (name == FAULT and rank == 1) for name in REPEATS})
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(torch.utils.data.DataLoader(Tokens(), batch_size=None))

    def step(number):
        with record_function(f"stepscope.step {number}"):
            with record_function("stepscope.input"):
                batch = next(batches)
            with record_function("stepscope.forward"):
                loss = model(batch)
            with record_function("stepscope.backward"):
                loss.backward()
            with record_function("stepscope.optimizer"):
                optimizer.step()
                optimizer.zero_grad()

    for number in range(5):
        step(number)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True, acc_events=False) as profiler:
        for number in range(5, 9):
            profiler.step_num = number
            with record_function(f"ProfilerStep#{number}"):
                step(number)
    profiler.export_chrome_trace(f"{FOLDER}/rank-{rank}.pt.trace.json.gz")
    dist.destroy_process_group()


REPEATS = {"backward": 0, "loader": 0, "line": 0, "layer": 0}
if __name__ == "__main__":
    main()
