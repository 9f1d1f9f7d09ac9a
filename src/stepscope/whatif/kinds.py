"""The kinds of operations that the model knows, by the names they have in traces."""

from __future__ import annotations

__all__ = [
    "BACKWARD",
    "CLIP",
    "COMPUTING",
    "EMBEDDING",
    "FORWARD",
    "GATHER",
    "GC",
    "KINDS",
    "LAYERNORM",
    "OPTIMIZER",
    "PIPELINE",
    "REDUCE",
    "SEPARATE",
]

FORWARD, BACKWARD, GC, OPTIMIZER = "forward-compute", "backward-compute", "gc", "optimizer"
GATHER, REDUCE = "params-all-gather", "grads-reduce-scatter"
SEPARATE = "separate-grads-all-reduce"
"""Only there when the other reductions overlap with backward."""
LAYERNORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP = "optimizer-clip-main-grad"
PIPELINE = ("forward-send", "forward-recv", "backward-send", "backward-recv")
COMPUTING = (FORWARD, BACKWARD, GC, OPTIMIZER)
"""The rest communicates."""
KINDS = (*COMPUTING, GATHER, REDUCE, SEPARATE, LAYERNORM, EMBEDDING, CLIP, *PIPELINE)
