"""Jobs that do not reach their end."""

import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from common import FEATURES, Report, arguments, batches, line, network, rank, seed, start_ranks
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = 30
LIMIT_BYTES = 2 << 30


def out_of_memory(device, step):
    """Keep more and more, up to a limit of this process, so that others on the GPU are not disturbed."""
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / torch.cuda.mem_get_info()[1])
    kept = []
    while True:
        kept.append(torch.zeros(64 << 20, device=device))


def device_assert(device, step):
    """An embedding is asked for a row it does not have."""
    nn.Embedding(10, FEATURES).to(device)(torch.tensor([11], device=device)).sum().backward()
    torch.cuda.synchronize()


def exception(device, step):
    raise ValueError(f"no data for step {step}")


def exit_code(device, step):
    sys.exit(7)


def segfault(device, step):
    ctypes.string_at(0)


def sigkill(device, step):
    os.kill(os.getpid(), signal.SIGKILL)


def wait(device, step):
    """For Ctrl-C."""
    if dist.is_initialized():
        dist.barrier()
    if rank() == 0:
        line("ready")
    while True:
        time.sleep(0.01)


ENDINGS = {
    "out_of_memory": out_of_memory,
    "device_assert": device_assert,
    "exception": exception,
    "exit_code": exit_code,
    "segfault": segfault,
    "sigkill": sigkill,
    "wait": wait,
}


def main():
    args = arguments("ending", list(ENDINGS))
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = start_ranks(args.device) if several else torch.device(args.device)
    seed()
    model = network().to(device)
    if several:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    report = Report(live=True)
    for step, (x, y) in enumerate(batches(device, STEPS + 10)):
        if step == STEPS and (not several or rank() == 1 or args.ending == "wait"):
            report.steps(step)
            ENDINGS[args.ending](device, step)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report.loss(step, loss)


if __name__ == "__main__":
    main()
