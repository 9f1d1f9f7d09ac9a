"""Put all hooks into torch, and take them out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepscope.recorder import (
    backward,
    checkpoint,
    collectives,
    dataloader,
    deepspeed,
    global_steps,
    graphs,
    joining,
    stalls,
    transfer,
    waiting,
)
from stepscope.recorder.dynamo import leave_shared_code_alone
from stepscope.recorder.forward import ForwardProbe
from stepscope.recorder.imports import ImportWatch
from stepscope.recorder.optimizer import OptimizerHooks
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.recorder.server import ServerOffer
from stepscope.recorder.stacks import StackOffer

__all__ = ["Instrumentation"]


class Instrumentation:
    """All hooks of one recorder in the torch of this process; ``remove`` leaves torch as it was."""

    def __init__(self, recorder: Recorder, torch: Any, watch: ImportWatch) -> None:
        self._recorder = recorder
        self._patches = Patches()
        self._undo: list[Callable[[], None]] = [self._patches.undo]
        try:
            self._install(recorder, torch, watch)
        except BaseException:
            self.remove()  # half instrumented is worse than not at all
            raise

    def _install(self, recorder: Recorder, torch: Any, watch: ImportWatch) -> None:
        patches = self._patches
        leave_shared_code_alone(torch, recorder)
        forward = ForwardProbe(recorder, torch, patches)
        self._undo.append(forward.disarm)
        optimizer = OptimizerHooks(recorder, torch, patches, watch)
        self._undo.append(optimizer.remove)
        dataloader.install(recorder, torch, patches, watch, forward.expect_evaluation)
        transfer.install(recorder, torch, patches)
        checkpoint.install(recorder, torch, patches, watch)
        global_steps.install(self._meet_owner, patches, watch)
        collectives.install(recorder, torch, patches, watch)
        waiting.install(recorder, torch, patches)
        stalls.install(recorder, torch, patches)
        backward.install(recorder, torch, patches)
        deepspeed.install(recorder, patches, watch)
        graphs.install(recorder, torch, patches)
        recorder.stacks = StackOffer()
        self._undo.append(recorder.stacks.withdraw)
        recorder.server = ServerOffer()
        self._undo.append(recorder.server.withdraw)
        joining.install(recorder, torch, patches)
        recorder.ask_after_steps(forward)

    def _meet_owner(self, owner: Any, framework: str, names: tuple[str, ...]) -> None:
        # The recorder of a forked child has new ``objects``.
        self._recorder.objects.global_steps.meet(owner, framework, names)

    def remove(self) -> None:
        self._recorder.ask_after_steps(None)
        while self._undo:
            self._undo.pop()()
