"""Lightning with accumulation, a sanity check and validations; ``progress_lightning.py FOLDER EPOCHS RANKS [resume]``.

Prints what its logger wrote, and what is in its list of callbacks.
"""

import csv
import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 4)

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def loader(samples, *, shuffle=False):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 2, shuffle=shuffle)


def main(folder, epochs, ranks, resume):
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        accumulate_grad_batches=4,
        val_check_interval=0.5,
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)],
        logger=CSVLogger(folder, name="log", version=epochs),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    last = Path(folder, "last.ckpt")
    trainer.fit(model, loader(96 * ranks, shuffle=True), loader(8), ckpt_path=last if resume else None)
    trainer.predict(model, loader(8))
    if trainer.is_global_zero:
        rows = csv.DictReader(Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines())
        logged = [(int(row["step"]), float(row["loss"])) for row in rows if row["loss"]]
        result = {
            "logged": logged,
            "weights": sum(each.double().sum().item() for each in model.parameters()).hex(),
            "callbacks": [type(each).__name__ for each in trainer.callbacks],
            "state": sorted(torch.load(last, weights_only=False)["callbacks"]),
        }
        print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), len(sys.argv) > 4)
