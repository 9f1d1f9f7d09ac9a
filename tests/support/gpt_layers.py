"""Layer samples of a small GPT that no process trained: 12 blocks, AdamW, 4 ranks, 10 samples.

write_layer_samples(run_dir)              # ``layers.jsonl``, as an agent writes it
layer_records(ranks=2, samples=1)         # the same in memory

Rank 3 has longer sequences, so its activations are a tenth larger.  The optimizer's state appears with the second
sample.  On a GPU the host takes a tenth of the device's times.  All figures follow from shapes: nothing is drawn at
random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope.records.layers import LayerRecords, read_layers
from stepscope.store.file_io import append_jsonl
from stepscope.store.paths import LAYERS

__all__ = ["MODEL_ID", "layer_lines", "layer_records", "write_layer_samples"]

MODEL_ID = "a1b2c3d4"
WIDTH = 768
WORDS = 50_257
TOKENS = 4096
"""Of a batch: 8 sequences of 512."""
EVERY = 100
WALL_NS = 1_700_000_000_000_000_000

Row = tuple[str, str, int, int, float]
"""Name, type, parameters, elements of its output, share of the time of one token's pass."""


def model_rows(layers: int) -> list[Row]:
    rows: list[Row] = [
        ("", "GPT", 0, 0, 0.2),
        ("embed", "Embedding", WORDS * WIDTH, WIDTH, 0.3),
        ("layers", "ModuleList", 0, 0, 0.0),
    ]
    for at in range(layers):
        block = f"layers.{at}"
        rows += [
            (block, "Block", 0, WIDTH, 0.1),
            (f"{block}.norm1", "LayerNorm", 2 * WIDTH, WIDTH, 0.1),
            (f"{block}.attention", "Attention", 0, WIDTH, 0.9),
            (f"{block}.attention.qkv", "Linear", 3 * WIDTH * (WIDTH + 1), 3 * WIDTH, 0.6),
            (f"{block}.attention.out", "Linear", WIDTH * (WIDTH + 1), WIDTH, 0.2),
            (f"{block}.norm2", "LayerNorm", 2 * WIDTH, WIDTH, 0.1),
            (f"{block}.mlp", "MLP", 0, WIDTH, 0.05),
            (f"{block}.mlp.up", "Linear", 4 * WIDTH * (WIDTH + 1), 4 * WIDTH, 0.8),
            (f"{block}.mlp.act", "GELU", 0, 4 * WIDTH, 0.15),
            (f"{block}.mlp.down", "Linear", WIDTH * (4 * WIDTH + 1), WIDTH, 0.8),
        ]
    return [*rows, ("norm", "LayerNorm", 2 * WIDTH, WIDTH, 0.1), ("head", "Linear", WORDS * WIDTH, 0, 3.0)]


def layer_lines(*, ranks: int = 4, samples: int = 10, layers: int = 12, device: bool = True) -> list[dict[str, Any]]:
    """``device``: on a GPU, whose allocator is counted."""
    rows = model_rows(layers)
    names = [name for name, *_ in rows]
    parents = [-1 if not name else names.index(name.rpartition(".")[0]) for name in names]
    modules = [[name, kind, up, size, size] for (name, kind, size, *_), up in zip(rows, parents, strict=True)]
    model = {"kind": "model", "model": MODEL_ID, "modules": modules, "compiled": False, "replicated": True}
    lines: list[dict[str, Any]] = [model]
    for number in range(samples):
        lines += [_sample(rows, parents, rank, number, device=device) for rank in range(ranks)]
    return lines


def _sample(rows: list[Row], parents: list[int], rank: int, number: int, *, device: bool) -> dict[str, Any]:
    sizes = [size for _, _, size, _, _ in rows]
    outputs = [out * TOKENS * 4 * (11 if rank == 3 else 10) // 10 for _, _, _, out, _ in rows]
    has_children = set(parents)
    memory = {
        "parameters": [4 * size for size in sizes],
        "gradients": [4 * size for size in sizes],
        "optimizer": [8 * size if number else 0 for size in sizes],
        "buffers": [512 * 512 if kind == "Attention" else 0 for _, kind, *_ in rows],
        "activations": [0 if at in has_children else out for at, out in enumerate(outputs)],
    }
    own = [share * 1000 * (1.3 if rank == 3 else 1.0) for *_, share in rows]
    forward = list(own)
    for at in reversed(range(len(rows))):
        if parents[at] >= 0:
            forward[parents[at]] += forward[at]
    held = sum(sum(values) for kind, values in memory.items() if kind != "activations")
    kept, gradients = sum(memory["activations"]), sum(memory["gradients"])
    head = len(rows) - 1
    times = {
        "forward_us": [None if kind == "ModuleList" else forward[at] for at, (_, kind, *_) in enumerate(rows)],
        "backward_us": [None if at in has_children else 2 * us for at, us in enumerate(own)],
    }
    on_device: dict[str, Any] = {
        "device_peak": held + kept + (96 << 20),
        "device_bytes": held + (32 << 20),
        "peaks": {
            "forward": [held - gradients + kept, head],
            "backward": [held + kept, head],
            "optimizer": [held, None],
        },
        **{f"host_{name}": [us and us / 10 for us in values] for name, values in times.items()},
    }
    return {
        "rank": rank,
        "attempt": 0,
        "kind": "sample",
        "step": EVERY * number,
        "model": MODEL_ID,
        "wall_ns": WALL_NS + number * 10**9,
        "clock": "device" if device else "host",
        "group": "",
        **times,
        "memory": memory,
        "grad_norm": [None if not size else size**0.5 * 1e-4 / (1 + number) for size in sizes],
        "weight_norm": [None if not size else size**0.5 * 0.02 for size in sizes],
        "update_ratio": [None if not size else 1e-3 / (1 + number) for size in sizes],
        "zero_share": [None if not size else 0.6 if name == "embed" else 0.0 for name, _, size, *_ in rows],
        "checksum": [None if not size else f"{size:x}" for size in sizes],
        "skipped": False,
        **(on_device if device else {}),
    }


def layer_records(**how: Any) -> LayerRecords:
    records, bad = read_layers(layer_lines(**how))
    assert bad == 0
    return records


def write_layer_samples(run_dir: Path, **how: Any) -> None:
    append_jsonl(run_dir / LAYERS, layer_lines(**how))
