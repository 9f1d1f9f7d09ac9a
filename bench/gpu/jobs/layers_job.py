"""A small GPT that trains with AdamW, with one thing wrong or nothing: what looking at its layers should find.

Written without any reference to Stepscope.  The last line is JSON: the losses, and the allocator's peak.
"""

import argparse
import gc
import json
import os
import time

import torch
import torch.distributed as dist
from common import share_gpu
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

FAULTS = (
    *(
        "none",
        "nan",
        "nan_backward",
        "nan_update",
        "nudge",
        "flip",
        "no_sync",
        "dead",
        "keep_loss",
        "keep_logits",
        "keep_hidden",
    ),
    *("total", "leak", "leak_on_one", "oom"),
)
CACHE = []
"""What ``leak_on_one`` keeps: 64 MiB in every second step, on the faulty rank only."""


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.factor = 1.0
        self.bad_backward = False

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.out(mixed)
        wide = self.up(self.norm2(x)) * self.factor
        return x + self.down(functional.gelu(BadBackward.apply(wide) if self.bad_backward else wide))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList([Block(args.width, args.width // 64) for _ in range(args.blocks)])
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocabulary, bias=False)
        self.checkpointing = args.checkpoint
        self.kept = None

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
            if self.kept is not None and block is self.blocks[1]:
                self.kept.append(x)
        return self.head(self.norm(x))


def arguments():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--fault", choices=FAULTS, default="none")
    add("--at", type=int, default=50, help="the step of the fault")
    add("--steps", type=int, default=120)
    add("--blocks", type=int, default=12)
    add("--width", type=int, default=256)
    add("--vocabulary", type=int, default=1024)
    add("--batch", type=int, default=4)
    add("--length", type=int, default=128)
    add("--held-gb", type=float, default=0.0, help="memory that the job holds from the beginning")
    add("--epoch", type=int, default=100, help="steps after which 100 MB leak")
    add("--pause-s", type=float, default=0.0, help="after each step")
    add("--clip", type=float, default=0.0, help="the largest norm of the gradients; 0: any")
    add("--autocast", action="store_true")
    add("--checkpoint", action="store_true")
    add("--fused", action="store_true")
    add("--fsdp", action="store_true")
    add("--exact", action="store_true", help="without the attention kernel that differs from run to run")
    add("--no-waiting", action="store_true", help="torch raises where an operation waits for the device")
    return parser.parse_args()


def processes(args, ranks):
    if ranks > 1:
        share_gpu()
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    elif args.fsdp:
        backend = "nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def wrapped(model, args, ranks):
    if args.fsdp:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    return nn.parallel.DistributedDataParallel(model) if ranks > 1 else model


def disturb(model, args, step, faulty):
    """What is wrong in this step with the model of the faulty rank."""
    here = faulty and step == args.at
    model.blocks[3].factor = float("nan") if here and args.fault == "nan" else 1.0
    model.blocks[3].bad_backward = here and args.fault == "nan_backward"
    if here and args.fault == "nudge":
        with torch.no_grad():
            model.blocks[5].qkv.weight += 1e-6
    if here and args.fault == "flip":
        model.blocks[7].down.weight.data.view(torch.int32).view(-1)[12345:12346].bitwise_xor_(1)


def own_gradients(model, tokens):
    """Those of this rank alone, as if they had not been exchanged."""
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad.copy_(gradient)


def keep(kept, args, step, loss, logits, faulty):
    """What a script keeps by mistake."""
    if args.fault == "leak_on_one" and faulty and step % 2 == 0:
        CACHE.append(torch.ones(16 << 20, device=loss.device))
    if args.fault == "keep_loss":
        kept.append(loss)
    if args.fault == "keep_logits":
        kept.append(logits)
    if args.fault == "leak" and step % args.epoch == 0:
        kept.append(torch.ones(25_000_000, device=loss.device))
    if args.fault == "oom" and step >= args.at:
        kept.append(torch.ones(1_000_000_000, device=loss.device))


def main():
    args = arguments()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    processes(args, ranks)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_mem_efficient_sdp(not args.exact)
    torch.manual_seed(0)
    plain = GPT(args).to(device)
    model = wrapped(plain, args, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.fused or None)
    generator = torch.Generator().manual_seed(rank)
    shape = (args.batch, args.length + 1)
    batches = [torch.randint(0, args.vocabulary, shape, generator=generator).to(device) for _ in range(8)]
    held = torch.ones(int(args.held_gb * 1e9 / 4), device=device) if args.held_gb else None
    kept, losses = [], []
    total = torch.zeros((), device=device)
    if args.fault == "dead":
        plain.blocks[2].factor = 0.0
    if args.fault == "keep_hidden":
        plain.kept = kept
    gc.collect()
    if args.no_waiting:
        torch.cuda.set_sync_debug_mode("error")
    for step in range(1, args.steps + 1):
        if step == args.steps - 3 and args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        disturb(plain, args, step, rank == 1 or ranks == 1)
        for group in optimizer.param_groups if args.fault == "nan_update" else ():
            group["lr"] = float("inf") if step == args.at else 1e-4
        tokens = batches[step % len(batches)]
        optimizer.zero_grad()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast):
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if args.fault == "no_sync" and rank == 1 and step >= args.at:
            own_gradients(plain, tokens)
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        losses.append(loss.detach())
        total = total + (loss if args.fault == "total" else loss.detach())
        keep(kept, args, step, loss, logits, rank == 1 or ranks == 1)
        time.sleep(args.pause_s)
    if args.no_waiting:
        torch.cuda.set_sync_debug_mode("default")
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
    del held
    if rank == 0:
        print(json.dumps({"peak": peak, "losses": [one.item().hex() for one in losses]}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
