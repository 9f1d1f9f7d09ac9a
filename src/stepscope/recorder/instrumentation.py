"""All hooks of a recorder.  The bootstrap loads this, and with it the recorder, when torch has been imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stepscope.recorder import facts, frameworks
from stepscope.recorder.capture.captures import Captures
from stepscope.recorder.capture.labels import Labels
from stepscope.recorder.guard import ImportWatch, Patches
from stepscope.recorder.hooks import backward, checkpoint, collectives, compiled, dataloader, ddp, notes
from stepscope.recorder.hooks.compiled import leave_shared_code_alone
from stepscope.recorder.hooks.forward import ForwardProbe
from stepscope.recorder.hooks.loss import StepValues
from stepscope.recorder.hooks.optimizer import OptimizerHooks
from stepscope.recorder.layers.gradient_trail import GradientTrail
from stepscope.recorder.layers.sampler import layer_sampler
from stepscope.recorder.recorder import Recorder
from stepscope.recorder.stacks import StackOffer
from stepscope.recorder.worker_server import ServerOffer

__all__ = ["Instrumentation"]


class Instrumentation:
    """All hooks of one recorder in the torch of this process; ``remove`` restores torch."""

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
        dataloader.install_transfers(recorder, torch, patches)
        checkpoint.install(recorder, torch, patches, watch)
        notes.install(recorder, patches, watch)
        facts.install_step_counters(self._meet_owner, patches, watch)
        frameworks.install(recorder, patches, watch, os.environ)
        collectives.install(recorder, torch, patches, watch)
        ddp.install(recorder, torch, patches)
        ddp.install_stream_waits(recorder, torch, patches)
        backward.install(recorder, torch, patches, StepValues(recorder, torch, patches, watch, os.environ))
        backward.install_deepspeed(recorder, patches, watch)
        compiled.install(recorder, torch, patches)
        recorder.labels = labels = Labels(torch, recorder)
        recorder.captures = captures = Captures(torch, recorder.ledger, labels, os.environ)
        captures.install(patches)
        self._undo.append(captures.withdraw)
        recorder.when_ending(captures.end)
        recorder.stacks = StackOffer()
        self._undo.append(recorder.stacks.withdraw)
        recorder.server = ServerOffer()
        self._undo.append(recorder.server.withdraw)
        self._undo.append(recorder.stop_snapshots)
        recorder.layers = sampler = layer_sampler(torch, recorder.ledger, os.environ, labels)
        if sampler is not None:
            self._undo.append(sampler.withdraw)
            recorder.trail = trail = GradientTrail(torch, recorder, recorder.ledger.now)
            self._undo.append(trail.stop)
        collectives.install_init_process_group(recorder, torch, patches)
        recorder.ask_after_steps(forward)

    def _meet_owner(self, owner: Any, framework: str, names: tuple[str, ...]) -> None:
        # The recorder of a forked child has new ``objects``.
        self._recorder.objects.global_steps.meet(owner, framework, names)

    def remove(self) -> None:
        self._recorder.ask_after_steps(None)
        while self._undo:
            self._undo.pop()()
