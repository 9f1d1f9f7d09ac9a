"""A small data-parallel job in which one rank may be slower than the others: what ``stepscope demo`` runs.

Knows nothing of Stepscope.  Started by torchrun, or by ranks.py beside it:
slow_rank.py --slow-rank 2 --slow-phase forward --slow-ms 30
"""

import argparse
import os

import torch
import torch.distributed as dist
from pieces import Images, Net, SlowSGD
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

PHASES = ("input", "forward", "backward", "optimizer")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-phase", choices=PHASES, default="forward")
    parser.add_argument("--slow-ms", type=float, default=30.0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pause = dict.fromkeys(PHASES, 0.0)
    if rank == args.slow_rank:
        pause[args.slow_phase] = args.slow_ms / 1000

    batch = 16
    pictures = Images(batch * args.steps * dist.get_world_size(), batch, lambda step: pause["input"])
    data = DataLoader(pictures, batch_size=batch, sampler=DistributedSampler(pictures))
    net = Net()
    net.forward_s, net.backward_s = pause["forward"], pause["backward"]
    model = DistributedDataParallel(net)
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    optimizer.pause_s = pause["optimizer"]
    loss_of = nn.CrossEntropyLoss()
    for step, (images, labels) in enumerate(data):
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    # Without it torch 2.13 hangs now and then: a thread of gloo's needs the GIL to let go of the last exchange, and is
    # joined, with the GIL held, when the model goes.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
