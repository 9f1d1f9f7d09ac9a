"""A loop with Accelerate: workers, accumulation, evaluation with gathered metrics, saved states."""

import torch
from accelerate import Accelerator
from common import Report, Samples, arguments, network, seed, share_gpu_in_framework
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def evaluate(accelerator, model, loader):
    model.eval()
    losses = []
    with torch.no_grad():
        for x, y in loader:
            losses.append(accelerator.gather_for_metrics(cross_entropy(model(x), y, reduction="none")))
    model.train()
    return torch.cat(losses).mean()


def main():
    args = arguments("workers", ("0", "2"))
    share_gpu_in_framework()
    seed()
    accelerator = Accelerator(
        cpu=args.device == "cpu",
        gradient_accumulation_steps=2,
        mixed_precision="bf16" if args.device == "cuda" else "no",
    )
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=50)
    workers = int(args.workers)
    training = DataLoader(Samples(512), batch_size=16, shuffle=True, num_workers=workers)
    evaluation = DataLoader(Samples(64), batch_size=16, num_workers=workers)
    model, optimizer, training, evaluation, scheduler = accelerator.prepare(
        model, optimizer, training, evaluation, scheduler
    )
    report = Report()
    batches = steps = 0
    for epoch in range(3):
        for x, y in training:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    steps += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            batches += 1
            report.loss(batches, loss)
        report.evaluation(epoch, evaluate(accelerator, model, evaluation))
        accelerator.save_state(f"state{epoch}")
    report.steps(steps)
    accelerator.end_training()


if __name__ == "__main__":
    main()
