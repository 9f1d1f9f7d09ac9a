"""Lightning's Trainer, which starts its other rank itself: validation, a callback, checkpoints."""

import logging
import time

import lightning
import torch
from common import (
    BATCH,
    CHECKPOINT_S,
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
)
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.functional import cross_entropy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.net = Net(fault)

    def training_step(self, batch, index):
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validation", cross_entropy(self.net(x), y), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        if self.fault.hits("checkpoint"):
            time.sleep(CHECKPOINT_S)  # fault: checkpoint

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), LEARNING_RATE)


class Hook(Callback):
    def __init__(self, fault):
        self.fault = fault

    def on_train_batch_end(self, *args):
        if self.fault.hits("callback"):
            time.sleep(STEP_S)  # fault: callback


def main():
    devices = ("2", "1")
    args = arguments(("--devices", devices))
    ranks, fault = int(args.devices), args.fault
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        val_check_interval=PERIOD,
        num_sanity_val_steps=0,
        callbacks=[Hook(fault), ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=PERIOD)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Classifier(fault),
        torch.utils.data.DataLoader(
            Samples(STEPS * BATCH * ranks, fault), BATCH, shuffle=True, collate_fn=Collate(fault)
        ),
        torch.utils.data.DataLoader(Samples(2 * BATCH * ranks, Fault()), BATCH),
    )
    if trainer.is_global_zero:
        result(trainer.global_step, trainer.callback_metrics["loss"])


if __name__ == "__main__":
    main()
