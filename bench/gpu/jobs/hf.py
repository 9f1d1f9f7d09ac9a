"""Hugging Face Trainer on a small GPT-2 with random weights: workers, accumulation, evaluation, checkpoints."""

import torch
from common import Report, arguments, seed, share_gpu_in_framework
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

TOKENS = 64
VOCABULARY = 512
STEPS = 40


class Texts(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class ReportingTrainer(Trainer):
    """The Trainer logs rounded losses; this one reports them as they are."""

    report = Report()
    calls = 0

    def compute_loss(self, model, *args, **kwargs):
        result = super().compute_loss(model, *args, **kwargs)
        self.calls += 1
        loss = result[0] if isinstance(result, tuple) else result
        self.report.loss(self.calls, loss, kind="loss" if model.training else "eval")
        return result


def main():
    args = arguments("workers", ("0", "2", "persistent"))
    share_gpu_in_framework()
    seed()
    config = GPT2Config(
        n_layer=2, n_embd=128, n_head=4, vocab_size=VOCABULARY, n_positions=TOKENS, bos_token_id=0, eos_token_id=1
    )
    config._attn_implementation = "eager"
    settings = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=15,
        save_steps=20,
        bf16=args.device == "cuda",
        use_cpu=args.device == "cpu",
        dataloader_num_workers=0 if args.workers == "0" else 2,
        dataloader_persistent_workers=args.workers == "persistent",
        disable_tqdm=True,
        report_to=[],
    )
    # 200 samples are fewer than the steps need, so several epochs begin, and their workers with them.
    trainer = ReportingTrainer(
        model=GPT2LMHeadModel(config), args=settings, train_dataset=Texts(200), eval_dataset=Texts(48)
    )
    trainer.train()
    trainer.report.steps(trainer.state.global_step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
