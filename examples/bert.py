"""A small BERT with the Trainer of Transformers: random weights from a config, made-up sentences, nothing downloaded.

stepscope run examples/bert.py
stepscope run --nproc-per-node 2 examples/bert.py --fault straggler
"""

import argparse
import os
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

VOCABULARY = 500
LENGTH = 32
KEPT: list[torch.Tensor] = []
RANK = int(os.environ.get("RANK", "0"))


class Sentences(Dataset):
    def __init__(self, count: int, fault: str) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
        self.fault = fault

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.fault == "input":
            time.sleep(0.01)  # a slow tokenizer
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": (tokens[0] > VOCABULARY // 2).long()}


class Metrics(TrainerCallback):
    """Something that one rank does after each of its steps."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if RANK == 1:
            time.sleep(0.1)


class Leaking(Trainer):
    """Keeps the hidden states of every step, to plot them one day."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs, output_hidden_states=True)
        KEPT.append(torch.cat([states.detach().repeat(1, 32, 1) for states in outputs.hidden_states]))
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--fault", choices=["none", "straggler", "input", "memory"], default="none")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = (Leaking if args.fault == "memory" else Trainer)(
            model=BertForSequenceClassification(config),
            args=TrainingArguments(
                folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.batch_size,
                use_cpu=True,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                logging_strategy="no",
            ),
            train_dataset=Sentences(args.steps * args.batch_size * world_size, args.fault),
            callbacks=[Metrics()] if args.fault == "straggler" else [],
        )
        result = trainer.train()
    if RANK == 0:
        print(f"step {result.global_step}  loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
