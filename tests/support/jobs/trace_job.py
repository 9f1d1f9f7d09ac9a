"""A small data-parallel job that leaves a profiler's trace of every rank: a plain script.

Knows nothing of Stepscope.  Started by torchrun, or alone; on CPU, or with ``--device cuda`` on one GPU for all ranks:

    torchrun --nproc-per-node 4 trace_job.py --out traces --slow-rank 2 --slow-ms 30 --where forward

``--exchange``: how gradients are averaged: by DDP, by one all_reduce of the script's own, or by FSDP.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, Dataset

WHERE = ("input", "forward", "backward", "optimizer", "comm")
WIDTH = 256


class Rows(Dataset):
    """Random vectors; the first of a batch takes a while."""

    def __init__(self, length, batch, pause_s):
        self.length, self.batch, self.pause_s = length, batch, pause_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.pause_s and index % self.batch == 0:
            time.sleep(self.pause_s)
        return torch.randn(WIDTH)


class Slow(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
        self.forward_s = self.backward_s = 0.0

    def forward(self, x):
        if self.forward_s:
            time.sleep(self.forward_s)
        x = self.layers(x)
        return Slow.apply(x, self.backward_s) if self.backward_s else x


def average(model, late_s):
    """All gradients in one all_reduce."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if late_s:
        time.sleep(late_s)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def distributed(net, args):
    if args.exchange == "ddp":
        # One bucket: one all_reduce in a step.
        return DistributedDataParallel(net, bucket_cap_mb=100)
    if args.exchange == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(args.device, (dist.get_world_size(),))
        for layer in net.layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    return net


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4, help="that are traced")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--exchange", choices=("ddp", "explicit", "fsdp"), default="ddp")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-ms", type=float, default=30.0)
    parser.add_argument("--where", choices=WHERE, default="forward")
    parser.add_argument("--loader-ms", type=float, default=0.0, help="for each batch, on all ranks")
    parser.add_argument("--item", type=int, default=0, help="calls of .item() in a step")
    parser.add_argument("--plain", action="store_true", help="rank_N.json.gz instead of TensorBoard's names")
    parser.add_argument("--stacks", action="store_true")
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--memory", action="store_true")
    return parser.parse_args()


def train(args, net, model, pause, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = Rows(args.batch * (args.steps + 2), args.batch, args.loader_ms / 1000 + pause["input"])
    net.forward_s, net.backward_s = pause["forward"], pause["backward"]
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (args.device == "cuda")
    named = tensorboard_trace_handler(str(args.out), use_gzip=True)

    def plain(profiler):
        profiler.export_chrome_trace(str(args.out / f"rank_{rank}.json.gz"))

    with profile(
        activities=activities,
        schedule=schedule(wait=1, warmup=1, active=args.steps),
        on_trace_ready=plain if args.plain else named,
        record_shapes=args.shapes,
        profile_memory=args.memory,
        with_stack=args.stacks,
    ) as profiler:
        for batch in DataLoader(rows, batch_size=args.batch):
            optimizer.zero_grad()
            loss = model(batch.to(args.device)).square().mean()
            loss.backward()
            if args.exchange == "explicit":
                average(model, pause["comm"])
            for _ in range(args.item):
                loss.item()
            if pause["optimizer"]:
                time.sleep(pause["optimizer"])
            optimizer.step()
            profiler.step()


def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if several else 0
    if not several or dist.get_world_size() == 1:
        args.exchange = "none"
    pause = dict.fromkeys(WHERE, 0.0)
    if rank == args.slow_rank:
        pause[args.where] = args.slow_ms / 1000
    net = Net().to(args.device)
    train(args, net, distributed(net, args), pause, rank)
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
