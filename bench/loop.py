"""The training loop that every tool is measured on; a plain script that knows nothing of Stepscope.

Started by ``harness.py`` in a fresh process, bare or under a tool.  It times itself and leaves one JSON object.
"""

from __future__ import annotations

import time

FIRST_LINE_NS = time.monotonic_ns()

import argparse  # noqa: E402 - the line above is what is measured
import contextlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

__all__ = ["MLPS"]

MLPS = {
    # name: hidden width, depth, batch
    "1": (64, 2, 16),
    "5": (256, 3, 96),
    "20": (512, 3, 128),
    "deep": (16, 100, 4),
}
"""By the milliseconds a step takes on a slow core; ``deep`` has a hundred layers with next to nothing in them."""
FEATURES = 64
CLASSES = 10


class OneBatch(torch.utils.data.Dataset[Any]):
    """The same batch over and over, so that data costs the same for everyone."""

    def __init__(self, length: int, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._length = length
        self._batch = batch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._batch


class Transformer(nn.Module):
    """Two layers: many small kernels, so that the host is what holds the step back on a fast GPU."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.encoder(x).mean(dim=1))


def build(workload: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The model and its one batch, on the CPU."""
    if workload == "transformer":
        model: nn.Module = Transformer(width=256, layers=2)
        return model, (torch.randn(8, 64, 256), torch.randint(0, CLASSES, (8,)))
    if workload == "large":  # about 50 ms on an H200, and the device holds it back
        return Transformer(width=1024, layers=8), (torch.randn(16, 256, 1024), torch.randint(0, CLASSES, (16,)))
    hidden, depth, batch = MLPS[workload]
    layers: list[nn.Module] = []
    width = FEATURES
    for _ in range(depth):
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    model = nn.Sequential(*layers, nn.Linear(width, CLASSES))
    return model, (torch.randn(batch, FEATURES), torch.randint(0, CLASSES, (batch,)))


def traced_step(enabled: bool) -> Callable[[nn.Module], contextlib.AbstractContextManager[Any]]:
    """TraceML wants a context manager around each step; nobody else does."""
    if not enabled:
        nothing = contextlib.nullcontext()
        return lambda model: nothing
    import traceml_ai

    traceml_ai.init(mode="auto")
    traced: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] = traceml_ai.trace_step
    return traced


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run the loop; the clocks start after the warm-up."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    around = traced_step(args.traceml)
    device = torch.device(args.device)
    model, batch = build(args.workload)
    model.to(device)
    # A pinned batch would be copied by another path; plain memory is what most scripts have.
    optimizer: Any = (torch.optim.SGD if args.workload in MLPS else torch.optim.AdamW)(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()
    total = args.warm + args.steps
    batches: Iterator[Any] = iter(torch.utils.data.DataLoader(OneBatch(total, batch), batch_size=None))
    ends: list[int] = []
    first_step_ns = 0
    thread_ns = process_ns = started_ns = 0
    for index in range(total):
        if index == args.warm:
            synchronize(device)
            thread_ns, process_ns, started_ns = time.thread_time_ns(), time.process_time_ns(), time.perf_counter_ns()
            ends.append(started_ns)
        x, y = next(batches)
        with around(model):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
        if index >= args.warm:
            ends.append(time.perf_counter_ns())
        elif index == 0:
            synchronize(device)
            first_step_ns = time.monotonic_ns()
    thread_ns, process_ns = time.thread_time_ns() - thread_ns, time.process_time_ns() - process_ns
    synchronize(device)
    mean_ns = (time.perf_counter_ns() - started_ns) / args.steps
    laps = sorted(later - earlier for earlier, later in itertools.pairwise(ends))
    return {
        "wall_us": statistics.median(laps) / 1e3,
        "mean_us": mean_ns / 1e3,
        "p99_us": laps[int(0.99 * len(laps))] / 1e3,
        "cpu_us": thread_ns / args.steps / 1e3,
        "process_us": process_ns / args.steps / 1e3,
        "rss_mb": status_kib("VmRSS") / 1024,
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "sockets": open_sockets(),
        "first_line_ms": (FIRST_LINE_NS - args.launched_ns) / 1e6,
        "first_step_ms": (first_step_ns - args.launched_ns) / 1e6,
        "loss": float(loss).hex(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def status_kib(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0


def open_sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(link.readlink()).startswith("socket:")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=[*MLPS, "transformer", "large"], required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--launched-ns", type=int, required=True, help="monotonic time of the launch")
    parser.add_argument("--traceml", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.with_suffix(".pid").write_text(str(os.getpid()))
    args.out.write_text(json.dumps(train(args)))


if __name__ == "__main__":
    main()
