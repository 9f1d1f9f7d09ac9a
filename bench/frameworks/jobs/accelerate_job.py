"""Accelerate under ``accelerate launch``: gradient accumulation, clipping, evaluation and ``save_state``."""

import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import (
    BATCH,
    LEARNING_RATE,
    PERIOD,
    STEP_S,
    STEPS,
    Collate,
    Fault,
    Net,
    Samples,
    arguments,
    result,
    save_own_state,
)
from torch.nn.functional import cross_entropy


def main():
    fault = arguments().fault
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    ranks = accelerator.num_processes
    model = Net(fault)
    model, optimizer, batches, evaluation = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), LEARNING_RATE),
        torch.utils.data.DataLoader(
            Samples(STEPS * BATCH * ranks, fault), BATCH, shuffle=True, collate_fn=Collate(fault)
        ),
        torch.utils.data.DataLoader(Samples(2 * BATCH * ranks, Fault()), BATCH),
    )
    step = 0
    # Twice the same data: two batches make a step.
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if fault.hits("callback"):
                time.sleep(STEP_S)  # fault: callback
            if step % PERIOD == 0:
                model.eval()
                with torch.no_grad():
                    for inputs, labels in evaluation:
                        accelerator.gather_for_metrics(cross_entropy(model(inputs), labels).reshape(1))
                model.train()
                accelerator.save_state("state")
                save_own_state(fault, step)  # fault: checkpoint
    if accelerator.is_main_process:
        result(step, loss)
    accelerator.end_training()


if __name__ == "__main__":
    main()
