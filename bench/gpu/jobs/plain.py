"""A plain training loop with a DataLoader, in every setting that starts processes beside it."""

import multiprocessing
import os
import subprocess
import sys

import torch
from common import Report, Samples, arguments, network, seed
from torch.utils.data import DataLoader

EPOCHS = 3
SETTINGS = {
    "workers0": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "eval": {},
    "pinned": {"num_workers": 2, "pin_memory": True},
    "pinned_persistent": {"num_workers": 2, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 4},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "mp_fork": {},
    "mp_pool": {},
    "os_fork": {},
    "subprocess": {},
}


def norm_of(index):
    return torch.full((16, 16), float(index)).norm().item()


def put_norm(index, queue):
    queue.put(norm_of(index))


def evaluate(model, device):
    """With workers that are forked after the device is in use."""
    model.eval()
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in DataLoader(Samples(64), batch_size=16, num_workers=2):
            total += torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    model.train()
    return total


def with_process(_):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=put_norm, args=(3, queue))
    process.start()
    value = queue.get(timeout=60)
    process.join()
    assert process.exitcode == 0, process.exitcode
    return value


def with_pool(_):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return sum(pool.map(norm_of, range(8)))


def with_fork(_):
    """One child ends at once, the other as a script does, with its exit handlers."""
    total = 0
    for by_hand in (True, False):
        child = os.fork()
        if child == 0:
            value = int(norm_of(2))
            if by_hand:
                os._exit(value)
            sys.exit(value)
        total += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return float(total)


def with_subprocess(_):
    code = "import torch; print(torch.full((16, 16), 2.0).norm().item())"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main():
    args = arguments("loader", list(SETTINGS))
    seed()
    device = torch.device(args.device)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(
        Samples(512), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(7), **SETTINGS[args.loader]
    )
    beside = {"mp_fork": with_process, "mp_pool": with_pool, "os_fork": with_fork, "subprocess": with_subprocess}
    report = Report()
    step = 0
    for epoch in range(EPOCHS):
        for x, y in loader:
            logits = model(x.to(device, non_blocking=True))
            loss = torch.nn.functional.cross_entropy(logits, y.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            report.loss(step, loss)
        if args.loader in beside:
            report.evaluation(epoch, beside[args.loader](model))
        else:
            report.evaluation(epoch, evaluate(model, device) if args.loader == "eval" else 0.0)
    report.steps(step)


if __name__ == "__main__":
    main()
