"""A small job for ``test_capture_runs.py``: DDP over gloo if there are ranks; each epoch forks its own workers.

It prints every loss, bit by bit.  With ``fork``, it then forks a child that ends as a script does.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    if "compile" in sys.argv:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(40, 16), torch.randn(40, 1))
    for _ in range(6):
        for x, y in DataLoader(data, batch_size=8, num_workers=1):
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Ranks share the pipe.
            os.write(1, f"loss {rank} {loss.item().hex()}\n".encode())
    if ranks > 1:
        torch.distributed.destroy_process_group()
    if "fork" in sys.argv:
        fork_a_child()


def fork_a_child() -> None:
    """Torch's profiler leaves a thread behind, whose condition a child must not destroy when it ends."""
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).printf(b"buffered by C\n")
        raise SystemExit(7)
    print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


main()
