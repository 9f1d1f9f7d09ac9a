"""A Trainer with accumulation, evaluations and checkpoints; ``progress_hf.py FOLDER EPOCHS [resume]``.

``transformers`` is imported before torch.  Prints what its trackers get, and what is in its list of callbacks.
"""

import json
import pickle
import sys

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed  # isort: skip
import torch

SAMPLES, TOKENS, VOCABULARY = 96, 8, 50


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main(folder, epochs, resume):
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=epochs,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    short = torch.utils.data.Subset(Texts(), range(8))
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Texts(),
        eval_dataset={"short": short, "whole": Texts()},
    )
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.predict(short)
    pickle.dumps(trainer.callback_handler.callbacks)
    logged = [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row]
    result = {
        "logged": logged,
        "epoch": trainer.state.epoch,
        "weights": sum(each.double().sum().item() for each in trainer.model.parameters()).hex(),
        "callbacks": [type(each).__name__ for each in trainer.callback_handler.callbacks],
        "state": sorted(trainer.state.stateful_callbacks),
    }
    if trainer.is_world_process_zero():
        print("RESULT", json.dumps(result))


main(sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3)
