"""The line of somebody's own code that a host slice comes from, and what is not their own: torch, libraries, Python.

With ``with_stack`` it is the innermost Python function around the slice, or the first frame of the operator's own
``Call stack``, that is the user's.  The profiler names a function by the file and line where it is defined, a frame
that was open before by the line it stood at.  It cuts off what stands in ``sys.path``, so libraries are told by the
names of their packages.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stepscope.traces.model.calls import padded

if TYPE_CHECKING:
    from stepscope.traces.host.view import HostView

__all__ = ["Sources", "is_user_frame", "sources_of"]

FRAME = re.compile(r"^(?P<path>[^<>()]+\.(?:py|ipynb)|<ipython[^>]*>|/tmp/ipykernel[^()]*)\((?P<line>\d+)\): ")
FOREIGN = re.compile(r"(^|/)(site-packages|dist-packages|lib/python\d[\d.]*|torchinductor_[^/]*)/")
LIBRARIES = frozenset(
    (
        "torch",
        "torchvision",
        "torchaudio",
        "torchdata",
        "torchrec",
        "torchtext",
        "triton",
        "functorch",
        "numpy",
        "pandas",
        "transformers",
        "accelerate",
        "datasets",
        "diffusers",
        "tokenizers",
        "peft",
        "trl",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "deepspeed",
        "fairscale",
        "xformers",
        "apex",
        "flash_attn",
        "bitsandbytes",
        "ignite",
        "fastai",
        "timm",
        "wandb",
        "tensorboard",
        "tqdm",
        "einops",
        "nvidia",
        "ray",
    )
)


def is_user_frame(name: str) -> bool:
    match = FRAME.match(name)
    if match is None:
        return False
    path = match["path"]
    if FOREIGN.search(path):
        return False
    first = path.split("/", 1)[0].removesuffix(".py")
    # Without a folder before it, it is a module found on sys.path: Python's own, a library's or the user's.
    return path.startswith("/") or (first not in LIBRARIES and first not in sys.stdlib_module_names)


@dataclass(frozen=True, kw_only=True)
class Sources:
    code: NDArray[np.int32]
    """[slices]; of host rows the index into ``texts``; −1: not known."""
    texts: list[str]
    """``train.py(31): step``."""

    def text(self, row: int) -> str | None:
        return self.texts[int(self.code[row])] if row >= 0 and self.code[row] >= 0 else None


def sources_of(host: HostView) -> Sources:
    """``HostView.sources`` keeps it.

    Autograd's operators have the line of the forward operator that made them, where it is known.
    """
    trace, calls, ops = host.trace, host.calls, host.trace.ops
    stacked = np.flatnonzero(ops.stack >= 0)
    known: dict[str, int] = {}
    code = np.full(len(trace), -1, np.int32)
    pythons = host.pythons
    if not len(stacked) and not len(pythons):
        return Sources(code=code, texts=[])
    if len(pythons):
        own = trace.names_where(is_user_frame)
        names = trace.slices.name[pythons]
        mine = pythons[own[names]]
        used, inverse = np.unique(trace.slices.name[mine], return_inverse=True)
        code[mine] = np.array([known.setdefault(trace.strings[at], len(known)) for at in used.tolist()], np.int32)[
            inverse
        ]
    if len(stacked):
        used, inverse = np.unique(ops.stack[stacked], return_inverse=True)
        frames = [_first(trace.strings[at]) for at in used.tolist()]
        codes = np.array([known.setdefault(text, len(known)) if text else -1 for text in frames], np.int32)[inverse]
        code[ops.row[stacked]] = np.where(codes >= 0, codes, code[ops.row[stacked]])
    code = padded(code)[calls.nearest(code >= 0)]
    forward = padded(code)[host.forward_of]
    return Sources(code=np.where(forward >= 0, forward, code), texts=list(known))


def _first(stack: str) -> str | None:
    """The innermost frame that is the user's."""
    return next((frame.strip() for frame in stack.split(";") if is_user_frame(frame.strip())), None)
