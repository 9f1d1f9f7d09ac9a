"""Accelerate with accumulation and a tracker; ``progress_accelerate.py FOLDER EPOCHS [resume]``.

Prints what its tracker got.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import set_seed


class Tracker(GeneralTracker):
    name, requires_logging_directory = "own", False

    def __init__(self):
        super().__init__()
        self.logged = []

    @property
    def tracker(self):
        return self.logged

    @on_main_process
    def log(self, values, step, **kwargs):
        self.logged += [(step, values["loss"])] if "loss" in values else []


def main(folder, epochs, resume):
    set_seed(0)
    tracker = Tracker()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, log_with=tracker)
    accelerator.init_trackers("progress")
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(192, 8, generator=generator), torch.randint(0, 4, (192,), generator=generator)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done, per_epoch = 0, len(loader) // 4
    if resume:
        accelerator.load_state(folder)
        done = int(Path(folder, "done").read_text())
    for epoch in range(done // per_epoch, epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done % 3 == 0:
                    accelerator.log({"loss": loss.item()}, step=done)
        accelerator.log({"epoch": epoch}, step=epoch)
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        Path(folder, "done").write_text(str(done))
        weights = sum(each.double().sum().item() for each in model.parameters()).hex()
        print("RESULT", json.dumps({"logged": tracker.logged, "weights": weights, "callbacks": [], "state": []}))
    accelerator.end_training()


main(sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3)
