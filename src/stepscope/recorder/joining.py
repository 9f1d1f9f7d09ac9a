"""The moment at which a process joins others: ``init_process_group``.

A job of several ranks can hang before its first step, in the rendezvous already, when one of them never comes.  So
in such a job the ring is made when the process group is being set up, not only at the first sign of training; a single
process stays as it is.  What was given in the call or by the launcher says who we are until the group itself does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.identity import of_this_process
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder

__all__ = ["install"]

FUNCTION = "init_process_group"
MODULES = ("torch.distributed.distributed_c10d", "torch.distributed", "torch.distributed.device_mesh")
"""Where torch itself has the function by name."""
WORLD_SIZE_AT, RANK_AT = 3, 4
"""Where they stand when they are given by position."""


def install(recorder: Recorder, torch: Any, patches: Patches) -> None:
    if not torch.distributed.is_available():
        return
    original = getattr(torch.distributed, FUNCTION, None)
    if original is None:
        return

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        _joins(recorder, _given(args, kwargs, RANK_AT, "rank"), _given(args, kwargs, WORLD_SIZE_AT, "world_size"))
        result = original(*args, **kwargs)
        _has_joined(recorder)
        return result

    for name in MODULES:
        module = sys.modules.get(name)
        if getattr(module, FUNCTION, None) is original:
            patches.set(module, FUNCTION, init_process_group)
    if torch.distributed.is_initialized():
        _has_joined(recorder)  # it was quicker than ``stepscope.init()``


@failsafe
def _joins(recorder: Recorder, rank: int | None, world_size: int | None) -> None:
    """The group is being set up: who waits in there for a rank that never comes can be seen from now on."""
    found = of_this_process()
    rank = found.rank if rank is None else rank
    world_size = found.world_size if world_size is None else world_size
    if world_size > 1 and recorder.ring is None:
        recorder.appear(replace(found, rank=rank, world_size=max(world_size, rank + 1)), serve=False)


@failsafe
def _has_joined(recorder: Recorder) -> None:
    """The group is there: now it is certain who we are, and that there are others."""
    found = of_this_process()
    if found.world_size > 1:
        recorder.appear(found, serve=True)


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str) -> int | None:
    """An argument of the call; None where it is left to the environment."""
    value = args[at] if len(args) > at else kwargs.get(name)
    return value if type(value) is int and value >= 0 else None
