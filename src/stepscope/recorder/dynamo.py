"""Keep dynamo from compiling our own code.

Behind a graph break dynamo looks at every Python frame that is called, and a hook in which it finds something to
compile would be compiled: in pieces, guarded, again and again.  Code that is marked here runs as it stands.  Inside of
a graph that is being traced the mark means nothing: there a hook is inlined or not, as it would be without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepscope.recorder.guard import failsafe

__all__ = ["leave_alone"]


@failsafe
def leave_alone(torch: Any, function: Callable[..., Any], *, with_calls: bool) -> None:
    """Mark a function, ``with_calls`` also all that it calls.  Before torch 2.6 there are no such marks."""
    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):
        skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
        strategy = dynamo._FrameExecStrategy(skip, skip if with_calls else default)
        dynamo.set_code_exec_strategy(function.__code__, strategy)
