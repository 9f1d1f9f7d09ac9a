"""CUDA graphs: a replay of a graph into which an optimizer step was captured is a training step.

While a graph is captured the script's Python runs as ever, hooks included, but nothing happens on the device and no
parameter changes: an ``optimizer.step()`` in there ends no step.  It is remembered instead that the graph contains one.
Each ``replay`` of such a graph then runs forward, backward and the optimizer at once.  To the host that is one call, so
its time is one phase, ``cuda_graph``, and with its return the step ends.  The step in which a graph was captured is
marked like one in which something was compiled: it is no measure of the others.

A graph without an optimizer step (a graphed forward, or those of ``torch.compile``) is not a step and costs nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from stepscope.recorder.guard import failsafe
from stepscope.recorder.ledger import NOT_NOW
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import GRAPH_PHASE, OTHER
from stepscope.records.slot import FLAG_COMPILED, FLAG_REPLAYED

__all__ = ["install"]


class _GoneOptimizer:
    """Stands for the optimizer of a graph when the script has let go of it: the graph does not need it."""

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
        outer = NOT_NOW if slot == OTHER else recorder.ledger.enter(slot)  # no slot is left
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
        self._is_capturing = failsafe(is_capturing)  # asked inside of the script's optimizer.step()
        self.optimizer_of: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        """The optimizer that stepped last while a graph was captured, by graph."""

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
