"""Keep dynamo away from our own code: a compiled program gets no graph break for being recorded.

Dynamo meets a hook in two ways.

*While it traces* a caller, it inlines what is called.  A hook around something that dynamo can trace (a module) is, as
seen by dynamo, nothing but the call of the original: ``is_dynamo_compiling`` is a constant there.  A hook around
something at which dynamo breaks the graph anyway (backward) carries the mark of ``torch.compiler.disable``: the graph
breaks once, at the call of the hook, where it would break without us.

*Behind a graph break* dynamo looks at every Python frame that is called, and would compile a hook like any other code:
in pieces, guarded, again and again.  Code that is marked here runs as it stands.

What is traced does not run.  A hook that must not be missed leaves a value behind on a plain object: dynamo repeats
such an assignment each time the graph has run, without a break.  ``around_regions`` is how to look for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.imports import ImportWatch
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder

__all__ = ["around_regions", "break_at", "leave_alone", "leave_shared_code_alone"]


@failsafe
def leave_alone(torch: Any, function: Callable[..., Any], *, with_calls: bool) -> None:
    """Run a function as it stands, ``with_calls`` also all that it calls.  Marks its code, so all its closures."""
    dynamo = torch._C._dynamo.eval_frame
    code = getattr(function, "__func__", function).__code__
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip if with_calls else default))


def break_at(function: Any) -> None:
    """Let dynamo break the graph at calls of this function rather than inline it: for what it cannot trace anyway."""
    function._torchdynamo_disable = True


def leave_shared_code_alone(torch: Any, recorder: Recorder) -> None:
    """What hooks have in common: the ledger, and everything that is failsafe."""
    ledger = recorder.ledger
    leave_alone(torch, ledger.timed(leave_shared_code_alone, 0), with_calls=False)  # the original is for dynamo to see
    for ours in (leave_alone, ledger.enter, ledger.leave, ledger.turn, ledger._refused, recorder.end_step):
        leave_alone(torch, ours, with_calls=True)


def around_regions(watch: ImportWatch, patches: Patches, enter: Callable[[], Callable[[], None]]) -> None:
    """Call ``enter`` whenever a function that ``torch.compile`` made is called, and what it answers at the end."""

    @failsafe
    def add_hook(context: Any) -> None:
        context.enter_exit_hooks.append(enter)

    @failsafe
    def install(module: Any) -> None:
        context = module.OptimizeContext
        original = context.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for the context's
            original(self, *args, **kwargs)
            add_hook(self)

        patches.set(context, "__init__", __init__)

    watch.when_imported("torch._dynamo.eval_frame", install)
