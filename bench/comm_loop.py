"""A training loop of two ranks over gloo that communicates; a plain script that knows nothing of Stepscope.

Started by ``comm_overhead.py`` through torchrun, bare or under Stepscope.  Rank 0 times itself and leaves one JSON
object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["KINDS"]

FEATURES = 64
HIDDEN = 64


def layers() -> Any:
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
    )


def ddp() -> Any:
    return nn.parallel.DistributedDataParallel(layers())


def fsdp() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer)
    return model


KINDS: dict[str, Callable[[], Any]] = {"explicit": layers, "ddp": ddp, "fsdp": fsdp}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run the loop; the clocks start after the warm-up."""
    torch.manual_seed(0)
    model = KINDS[args.kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()
    x, y = torch.randn(16, FEATURES), torch.randint(0, 10, (16,))
    messages = [torch.ones(256) for _ in range(args.collectives)]
    ends: list[int] = []
    thread_ns = 0
    for index in range(args.warm + args.steps):
        if index == args.warm:
            thread_ns = time.thread_time_ns()
            ends.append(time.perf_counter_ns())
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        for work in [dist.all_reduce(message, async_op=True) for message in messages]:
            work.wait()
        optimizer.step()
        if index >= args.warm:
            ends.append(time.perf_counter_ns())
    thread_ns = time.thread_time_ns() - thread_ns
    laps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return {
        "cpu_us": thread_ns / args.steps / 1e3,
        "wall_us": statistics.median(laps) / 1e3,
        "loss": float(loss.detach()).hex(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--collectives", type=int, default=0, help="all-reduces of 1 KiB in each step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = train(args)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
