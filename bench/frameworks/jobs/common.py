"""What the jobs share: their fault, a small model, samples, and one line at the end that says what was trained.

A line that loses time on purpose has the comment ``# fault: KIND``; the league takes the line's number from there.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEPS = 80
PERIOD = 20
"""Steps from one evaluation, and from one checkpoint, to the next."""
BATCH = 8
FEATURES, CLASSES = 256, 10
STEP_S = 0.04
"""What a fault costs that comes in every step …"""
EVALUATION_S = 0.2
"""… in every batch of an evaluation, which has two …"""
CHECKPOINT_S = 0.4
"""… and in every checkpoint."""
LEARNING_RATE = 1e-3


def rank():
    """0 before there is a process group: then nobody else is there to compare with."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Fault:
    """``KIND:RANK`` or ``KIND:all``; ``none``: a healthy job."""

    def __init__(self, text="none"):
        self.text = text
        self.kind, _, self.who = text.partition(":")

    def hits(self, kind):
        return self.kind == kind and self.who in ("all", str(rank()))


def arguments(*more):
    """``--fault``, and which variant of the job: ``more`` are flags with their choices."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", type=Fault, default=Fault())
    # The DeepSpeed launcher passes it.
    parser.add_argument("--local_rank", type=int, default=-1)
    for flag, choices in more:
        parser.add_argument(flag, choices=choices, default=choices[0])
    return parser.parse_args()


class Samples(torch.utils.data.Dataset):
    """Random numbers, the same in every run."""

    def __init__(self, length, fault):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, FEATURES, generator=generator)
        self.y = torch.randint(0, CLASSES, (length,), generator=generator)
        self.fault = fault

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.fault.hits("data"):
            time.sleep(STEP_S / BATCH)  # fault: data
        return self.x[index], self.y[index]


class Collate:
    def __init__(self, fault):
        self.fault = fault

    def __call__(self, samples):
        if self.fault.hits("collate"):
            time.sleep(STEP_S)  # fault: collate
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Net(nn.Module):
    def __init__(self, fault, width=512, classes=CLASSES):
        super().__init__()
        self.fault = fault
        self.first = nn.Linear(FEATURES, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, classes)

    def forward(self, x):
        if self.training and self.fault.hits("forward"):
            time.sleep(STEP_S)  # fault: forward
        if not self.training and self.fault.hits("evaluation"):
            time.sleep(EVALUATION_S)  # fault: evaluation
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class History:
    """Something of the user's own in a checkpoint that takes long to write."""

    def __init__(self, fault):
        self.fault = fault

    def __getstate__(self):
        if self.fault.hits("checkpoint"):
            time.sleep(CHECKPOINT_S)  # fault: checkpoint
        return {"text": self.fault.text}


def save_own_state(fault, step, folder="own"):
    """What a rank keeps for itself beside the framework's checkpoint."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save({"step": step, "history": History(fault)}, Path(folder) / f"rank-{rank()}.pt")  # fault: checkpoint


def loaders(fault, replicas, position, *, samples=None):
    """For training and for evaluation: each replica has its own part."""
    train = Samples(samples or STEPS * BATCH * replicas, fault)
    evaluation = Samples(2 * BATCH * replicas, Fault())

    def loader(dataset, collate):
        sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=replicas, rank=position)
        return torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=collate)

    return loader(train, Collate(fault)), loader(evaluation, None)


def result(steps, loss):
    """On one rank: what the framework counted, and the last loss to the bit."""
    value = loss.item() if isinstance(loss, torch.Tensor) else loss
    print(f"RESULT steps={steps} loss={value.hex()}", flush=True)
