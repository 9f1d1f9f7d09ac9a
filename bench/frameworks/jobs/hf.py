"""Hugging Face Trainer under torchrun: a small GPT-2 with random weights, evaluation, logging and checkpoints."""

import time

import torch
import torch.distributed as dist
from common import (
    BATCH,
    EVALUATION_S,
    LEARNING_RATE,
    PERIOD,
    STEP_S,
    STEPS,
    Fault,
    arguments,
    rank,
    result,
    save_own_state,
)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

TOKENS, VOCABULARY = 32, 500


class Texts(torch.utils.data.Dataset):
    def __init__(self, length, fault):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCABULARY, (length, TOKENS), generator=generator)
        self.fault = fault

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        if self.fault.hits("data"):
            time.sleep(STEP_S / BATCH)  # fault: data
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Model(GPT2LMHeadModel):
    fault = Fault()

    def forward(self, input_ids=None, labels=None, **kwargs):
        if self.training and self.fault.hits("forward"):
            time.sleep(STEP_S)  # fault: forward
        if not self.training and self.fault.hits("evaluation"):
            time.sleep(EVALUATION_S)  # fault: evaluation
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class Callback(TrainerCallback):
    def __init__(self, fault):
        self.fault = fault

    def on_step_end(self, *args, **kwargs):
        if self.fault.hits("callback"):
            time.sleep(STEP_S)  # fault: callback


class OwnTrainer(Trainer):
    fault = Fault()

    def _save_checkpoint(self, *args, **kwargs):
        super()._save_checkpoint(*args, **kwargs)
        save_own_state(self.fault, self.state.global_step)  # fault: checkpoint


def main():
    fault = arguments().fault

    def collate(samples):
        if fault.hits("collate"):
            time.sleep(STEP_S)  # fault: collate
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1
    )
    Model.fault = OwnTrainer.fault = fault
    settings = TrainingArguments(
        output_dir="out",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        logging_steps=PERIOD,
        eval_strategy="steps",
        eval_steps=PERIOD,
        save_strategy="steps",
        save_steps=PERIOD,
        save_total_limit=1,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    ranks = int(settings.world_size)
    trainer = OwnTrainer(
        model=Model(config),
        args=settings,
        train_dataset=Texts(STEPS * BATCH * ranks, fault),
        eval_dataset=Texts(2 * BATCH * ranks, Fault()),
        data_collator=collate,  # of evaluation, too
        callbacks=[Callback(fault)],
    )
    done = trainer.train()
    if rank() == 0:
        result(done.global_step, done.training_loss)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
