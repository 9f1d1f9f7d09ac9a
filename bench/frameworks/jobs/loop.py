"""The ordinary loop that the jobs without a trainer have: steps, and now and then an evaluation and a checkpoint."""

import time

import torch
from common import PERIOD, STEP_S
from torch.nn.functional import cross_entropy


def train(model, optimizer, batches, evaluation, fault, save):
    """The number of steps, and the last loss."""
    step, loss = 0, None
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if fault.hits("callback"):
            time.sleep(STEP_S)  # fault: callback
        if step % PERIOD == 0:
            evaluate(model, evaluation)
            save(step)
    return step, loss.detach()


def evaluate(model, batches):
    model.eval()
    with torch.no_grad():
        losses = [cross_entropy(model(x), y) for x, y in batches]
    model.train()
    return torch.stack(losses).mean()
