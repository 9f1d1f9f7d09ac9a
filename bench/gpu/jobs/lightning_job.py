"""PyTorch Lightning: workers, accumulation, validation, checkpoints."""

import os

import pytorch_lightning as lightning
import torch
from common import Report, Samples, arguments, network, seed, share_gpu_in_framework
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self, report):
        super().__init__()
        self.network = network()
        self.report = report
        self.batches = 0

    def training_step(self, batch, index):
        x, y = batch
        loss = cross_entropy(self.network(x), y)
        self.log("loss", loss)
        self.batches += 1
        self.report.loss(self.batches, loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        loss = cross_entropy(self.network(x), y)
        self.log("validation", loss, sync_dist=True)
        self.report.evaluation(index, loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    args = arguments("workers", ("0", "2", "persistent"))
    share_gpu_in_framework()
    seed()
    several = int(os.environ.get("WORLD_SIZE", "1"))
    workers = {"num_workers": 0 if args.workers == "0" else 2, "persistent_workers": args.workers == "persistent"}
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1,
        num_nodes=several,
        strategy="ddp" if several > 1 else "auto",
        precision="bf16-mixed" if args.device == "cuda" else "32-true",
        accumulate_grad_batches=2,
        num_sanity_val_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    report = Report()
    trainer.fit(
        Classifier(report),
        DataLoader(Samples(512), batch_size=16, shuffle=True, **workers),
        DataLoader(Samples(64), batch_size=16, **workers),
    )
    report.steps(trainer.global_step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
