"""The phases of a step, by slot number.

A step's wall-clock time is split over these slots exclusively: an instant belongs to one phase, so the slots of a
step always add up to its length.  The first nine are ours; the last seven are for names the user gives.
"""

from __future__ import annotations

__all__ = [
    "BACKWARD",
    "BUILTIN_PHASES",
    "CHECKPOINT",
    "COMM",
    "COMPUTE_PHASES",
    "EVAL",
    "FIRST_USER_SLOT",
    "FORWARD",
    "GRAPH_PHASE",
    "H2D",
    "INPUT",
    "OPTIMIZER",
    "OTHER",
    "PHASE_SLOTS",
    "shown_name",
]

OTHER = 0
"""What no hook claims: logging, ``.item()``, metrics, the loop itself."""
INPUT = 1
"""Waiting for the next batch."""
H2D = 2
"""Copying tensors to the device."""
FORWARD = 3
"""Inside the outermost modules called with gradients."""
BACKWARD = 4
"""Inside autograd, less what is known to be waiting for peers."""
COMM = 5
"""Waiting for peers or the network, not hidden behind compute."""
OPTIMIZER = 6
EVAL = 7
"""Inside the same modules without gradients, and the input waited for on their behalf."""
CHECKPOINT = 8
"""Inside ``torch.save`` or distributed checkpointing."""

BUILTIN_PHASES = ("other", "input", "h2d", "forward", "backward", "comm", "optimizer", "eval", "checkpoint")
FIRST_USER_SLOT = len(BUILTIN_PHASES)
PHASE_SLOTS = 16
GRAPH_PHASE = "cuda_graph"
"""Takes a user's slot in processes that replay whole steps as CUDA graphs: forward, backward and optimizer in one."""
COMPUTE_PHASES = ("forward", "backward", "optimizer", GRAPH_PHASE)
"""What training itself consists of."""
TAKEN = frozenset({"wall", "work", "rank", "step", "allocated", "reserved", "peak_allocated"})
"""Figures that stand beside the phases in answers, under these names."""


def shown_name(name: str) -> str:
    """What a user's phase is called wherever it is shown: ``work`` is another figure already, so ``work_phase``."""
    return f"{name}_phase" if name in TAKEN else name
