"""Compiled and captured code: how the hooks behave under torch.compile and in CUDA graphs.

Recording must not cause graph breaks in a compiled program, so dynamo is kept away from our own code.  It encounters a
hook in two ways.

*While it traces* a caller, it inlines what is called.  A hook around something that dynamo can trace (a module) is, for
dynamo, only the call of the original: ``is_dynamo_compiling`` is a constant there.  A hook around something at which
dynamo breaks the graph anyway (backward) carries the mark of ``torch.compiler.disable``: the graph breaks once, at the
call of the hook, where it would break without us.

*After a graph break* dynamo inspects every Python frame that is called, and would compile a hook like any other code:
in pieces, guarded, again and again.  Code that is marked here runs unchanged.

Traced code does not run.  A hook that must not be missed sets a value on a plain object: dynamo repeats such an
assignment each time the graph has run, without a break.  ``around_regions`` is the way to check for it.

A fully compiled step has 4 graph breaks without Stepscope and 3 with it (9 before these marks).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from stepscope.recorder.guard import ImportWatch, Patches, failsafe
from stepscope.recorder.ledger import NOT_NOW, LedgerMethods
from stepscope.recorder.recorder import Recorder
from stepscope.records.steps import FLAG_COMPILED, FLAG_REPLAYED, GRAPH_PHASE, OTHER

__all__ = ["around_regions", "break_at", "install", "leave_alone", "leave_shared_code_alone"]


# -- Dynamo -----------------------------------------------------------------------------------------------------------


@failsafe
def leave_alone(torch: Any, function: Callable[..., Any], *, with_calls: bool) -> None:
    """Make dynamo run a function as it is, ``with_calls`` also all that it calls.  Marks its code, so all closures."""
    dynamo = torch._C._dynamo.eval_frame
    code = getattr(function, "__func__", function).__code__
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip if with_calls else default))


def break_at(function: Any) -> None:
    """Let dynamo break the graph at calls of this function instead of inlining it: for what it cannot trace anyway."""
    function._torchdynamo_disable = True


def leave_shared_code_alone(torch: Any, recorder: Recorder) -> None:
    """Mark what hooks have in common: the ledger, and everything that is failsafe."""
    ledger = recorder.ledger
    for timed in (ledger.timed, functools.partial(LedgerMethods.timed, ledger)):  # the second: beside a hook in C
        leave_alone(torch, timed(leave_shared_code_alone, 0), with_calls=False)  # dynamo must see the original
    methods = LedgerMethods
    for ours in (leave_alone, methods.enter, methods.leave, methods.turn, methods._refused, recorder.end_step):
        leave_alone(torch, ours, with_calls=True)


def around_regions(watch: ImportWatch, patches: Patches, enter: Callable[[], Callable[[], None]]) -> None:
    """Call ``enter`` before each call of a function compiled by ``torch.compile``, and its result afterwards."""

    @failsafe
    def add_hook(context: Any) -> None:
        context.enter_exit_hooks.append(enter)

    @failsafe
    def install(module: Any) -> None:
        context = module.OptimizeContext
        original = context.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it replaces the context's
            original(self, *args, **kwargs)
            add_hook(self)

        patches.set(context, "__init__", __init__)

    watch.when_imported("torch._dynamo.eval_frame", install)


# -- CUDA graphs ------------------------------------------------------------------------------------------------------
# A replay of a graph that contains an optimizer step is a training step.
#
# During the capture of a graph the script's Python runs as usual, hooks included, but nothing happens on the device and
# no parameter changes: an ``optimizer.step()`` in it ends no step.  Instead, the graph is marked as containing one.
# Each ``replay`` of such a graph then runs forward, backward and the optimizer at once.  To the host that is one call,
# so its time is one phase, ``cuda_graph``, and the step ends when it returns.  The step in which a graph was captured
# is marked like one in which something was compiled: it is not representative.
#
# A graph without an optimizer step (a graphed forward, or those of ``torch.compile``) is not a step and costs nothing.


class _GoneOptimizer:
    """Replaces the optimizer of a graph when the script has released it: the graph does not need it."""

    param_groups = ()


GONE = _GoneOptimizer()


def install(recorder: Recorder, torch: Any, patches: Patches) -> None:
    graph = torch.cuda.CUDAGraph
    if not all(hasattr(graph, name) for name in ("capture_begin", "capture_end", "replay")):
        return
    captures = _Captures(recorder, torch.cuda.is_current_stream_capturing)
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = begin(self, *args, **kwargs)
        captures.begin(self)
        return result

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        captures.end(self)
        return end(self, *args, **kwargs)

    @functools.wraps(replay)
    def timed_replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = captures.optimizer_of.get(self)
        if optimizer is None:
            return replay(self, *args, **kwargs)
        slot = recorder.slot_of(GRAPH_PHASE)
        outer = NOT_NOW if slot == OTHER else recorder.ledger.enter(slot)  # OTHER: no slot is left
        try:
            result = replay(self, *args, **kwargs)
        except BaseException:
            if outer != NOT_NOW:
                recorder.ledger.leave(outer)
            raise
        recorder.forward_seen = True  # inside the graph
        recorder.end_step(FLAG_REPLAYED, outer, optimizer() or GONE)
        return result

    patches.set(graph, "capture_begin", capture_begin)
    patches.set(graph, "capture_end", capture_end)
    patches.set(graph, "replay", timed_replay)


class _Captures:
    """Which graphs contain an optimizer step."""

    def __init__(self, recorder: Recorder, is_capturing: Callable[[], bool]) -> None:
        self._recorder = recorder
        self._is_capturing = failsafe(is_capturing)  # called inside the script's optimizer.step()
        self.optimizer_of: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        """The optimizer that stepped last during the capture of a graph, by graph."""

    @failsafe
    def begin(self, graph: Any) -> None:
        self.optimizer_of.pop(graph, None)
        self._recorder.capture_starts(self._is_capturing)

    @failsafe
    def end(self, graph: Any) -> None:
        stepped = self._recorder.capture_ends()
        self._recorder.flags |= FLAG_COMPILED
        if stepped is not None:
            self.optimizer_of[graph] = weakref.ref(stepped)
