"""Waiting for peers where DDP communicates in C++ (all else: ``recorder/collectives.py``).

DDP's own logging tells how long the exchange of the gradients went on after this rank had computed its own: that was
waiting.  (4 µs a step.)  On a GPU measuring it waits for the device, so it is left at DDP's own rate, the
first ten iterations and every hundredth, and only read: a sample now and then tells a rank whose backward is slow from
those that wait for it.

Before forward DDP broadcasts the model's buffers (BatchNorm's, a table of positions).  On a CPU that blocks until the
last rank has come, and is ``comm``; on a GPU the host goes on, and ``recorder/stalls.py`` knows what its device waits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from stepscope.recorder.dynamo import leave_alone
from stepscope.recorder.guard import failsafe
from stepscope.recorder.ledger import Ledger
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import COMM
from stepscope.ring.words import DDP_COMM, DDP_COMPUTE, DDP_EXPOSED, DDP_SAMPLED_COMPUTE, data_word

__all__ = ["DdpFigures", "install"]


def install(recorder: Recorder, torch: Any, patches: Patches) -> None:
    if not torch.distributed.is_available():
        return
    figures = DdpFigures()
    ddp = torch.nn.parallel.DistributedDataParallel
    original = ddp.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for DDP's
        original(self, *args, **kwargs)
        if figures.watch(self):
            recorder.watch_backward(figures)

    patches.set(ddp, "__init__", __init__)
    if hasattr(ddp, "_sync_buffers"):
        sync_buffers = _on_cpu(ddp._sync_buffers, recorder.ledger, torch.compiler.is_dynamo_compiling)
        leave_alone(torch, sync_buffers, with_calls=False)
        patches.set(ddp, "_sync_buffers", sync_buffers)


def _on_cpu(original: Callable[..., Any], ledger: Ledger, is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    blocking = ledger.timed(original, COMM)

    @functools.wraps(original)
    def _sync_buffers(self: Any) -> Any:
        if is_compiling() or getattr(self, "device_type", None) != "cpu":
            return original(self)
        return blocking(self)

    return _sync_buffers


class DdpFigures:
    """What DDP itself measured in the last synchronised backward that it measured."""

    def __init__(self) -> None:
        self.every_step = False
        """Whether there is something to read at the end of each step."""
        self._sampled = 0
        """The sample that was told last."""
        self._watched: list[weakref.ref[Any]] = []
        """The DDP modules.  Not their loggers: a logger keeps the reducer alive, and with it all gradients."""

    @failsafe
    def watch(self, ddp: Any) -> bool:
        if next(ddp.parameters()).device.type == "cpu":
            # Before the first backward: later than that DDP keeps to the rate it has.
            ddp.reducer._set_ddp_runtime_logging_sample_rate(1)
            self.every_step = True
        self._watched.append(weakref.ref(ddp))
        return True

    def words(self) -> list[int]:
        """As data words for the step that ends; none where there is nothing new."""
        compute, comm, exposed = self._read()
        if self.every_step:
            return [data_word(DDP_COMPUTE, compute), data_word(DDP_COMM, comm), data_word(DDP_EXPOSED, exposed)]
        if compute == self._sampled:
            return []
        self._sampled = compute
        return [data_word(DDP_SAMPLED_COMPUTE, compute), data_word(DDP_COMM, comm)]

    def _read(self) -> tuple[int, int, int]:
        """Nanoseconds of computing gradients, of communicating them, and of the latter what came after the former.

        Zeros where nothing was measured.  DDP counts computing from the end of forward, whatever the script does before
        backward: only the third says how long this rank waited.
        """
        compute = comm = exposed = 0
        for reference in self._watched:
            ddp = reference()
            if ddp is not None:
                figures = ddp.logger._get_ddp_logging_data().ints_map
                if figures.get("avg_backward_compute_time"):
                    compute += figures["backward_compute_time"]
                    comm += figures["backward_comm_time"]
                    exposed += max(0, figures["backward_comm_time"] - figures["backward_compute_comm_overlap_time"])
        return compute, comm, exposed
