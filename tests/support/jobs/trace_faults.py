"""Train a small transformer with one fault at a time and leave a profiler's trace of each: a plain script.

    python trace_faults.py OUT                       # all faults that the machine can show
    python trace_faults.py OUT --only sync,loader    # some

Needs a GPU for most of them.  The files are called after what was put in; what Stepscope says of them is tested.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function, schedule

STEPS = 4
BATCH, LENGTH, WIDTH, HEADS = 32, 512, 2048, 16
LAYERS = {"tiny": 4, "graph_breaks": 3}
"""One, where nothing else is said: the files stay small."""


class Block(nn.Module):
    def __init__(self, width: int, naive: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.naive = naive

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        if self.naive:
            y = (q @ k.transpose(-1, -2) / (width // HEADS) ** 0.5).softmax(-1) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Job:
    """One fault, or none."""

    def __init__(self, fault: str, device: str) -> None:
        torch.manual_seed(0)
        self.fault, self.device = fault, device
        self.width = 64 if fault == "tiny" else WIDTH
        self.batch, self.length = (4, 16) if fault == "tiny" else (BATCH, LENGTH)
        model = nn.Sequential(*(Block(self.width, fault == "naive_attention") for _ in range(LAYERS.get(fault, 1)))).to(
            device
        )
        self.model = model
        if fault in ("compiled", "graphs"):
            self.model = torch.compile(model, mode="reduce-overhead" if fault == "graphs" else None)
        if fault == "graph_breaks":
            self.model = torch.compile(broken(model))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fault != "tiny" and device == "cuda")
        self.amp = fault != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = fault != "fp32"
        self.kept: list[Any] = []

    def batches(self) -> Iterator[Any]:
        pinned = torch.randn(self.batch, self.length, self.width)
        pinned = pinned.pin_memory() if self.device == "cuda" and self.fault != "copies" else pinned
        while True:
            with record_function("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                if self.fault == "loader":
                    time.sleep(0.03)
                batch = pinned.clone() if self.fault == "copies" else pinned
            yield batch.to(self.device, non_blocking=self.fault != "copies")

    def step(self, x: Any) -> None:
        with torch.autocast(self.device, torch.bfloat16) if self.amp else nullcontext():
            with record_function("forward"):
                y = self.model(x)
            loss = functional.mse_loss(y.float(), torch.zeros_like(y, dtype=torch.float32))
        self.extras(y)
        with record_function("backward"):
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.fault == "sync":
            for value in y.detach().float().mean(dim=(1, 2))[:8]:
                self.kept.append(value.item())
            time.sleep(0.004)  # what the host does with it while the device has nothing left

    def extras(self, y: Any) -> None:
        if self.fault == "gc":
            self.kept = [[index] for index in range(300_000)]
            gc.collect()
        if self.fault == "fragmentation" and self.device == "cuda":
            for megabytes in range(24, 480, 4):  # none of them fits where the last one was
                torch.empty(megabytes << 20, dtype=torch.uint8, device=self.device)


def broken(model: Any) -> Callable[[Any], Any]:
    def forward(x: Any) -> Any:
        for layer in model:
            x = layer(x)
            if x.float().mean().item() > 1e9:  # the compiler cannot see past it
                x = x * 0.5
        return x

    return forward


def traced(fault: str, device: str, out: Path) -> None:
    job = Job(fault, device)
    batches = job.batches()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=2, warmup=2, active=STEPS),
        on_trace_ready=lambda prof: prof.export_chrome_trace(str(out / f"{fault}.json.gz")),
        record_shapes=True,
        profile_memory=fault in ("healthy", "fragmentation"),
        with_stack=fault in ("sync", "gc"),
        with_modules=fault == "sync",
    ) as prof:
        for _ in range(4 + STEPS):
            job.step(next(batches))
            prof.step()
    if device == "cuda":
        torch.cuda.synchronize()


FAULTS = (
    "healthy", "fp32", "sync", "copies", "loader", "tiny", "naive_attention", "compiled", "graphs", "graph_breaks",
    "gc", "fragmentation",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(FAULTS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for fault in args.only.split(","):
        began = time.perf_counter()
        traced(fault, device, args.out)
        print(f"{fault}: {time.perf_counter() - began:.1f} s", flush=True)
        torch.compiler.reset()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
