"""Hooks on input: the wait for the DataLoader's next batch, and the copy of a batch to the device.

Input also includes creating an iterator, which starts its workers.  ``_BaseDataLoaderIter.__next__`` serves map-style
and iterable datasets, with and without workers, and the stateful loader of torchdata, which derives from it (but
creates its iterator in its own way).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

from stepscope.recorder.guard import ImportWatch, Patches
from stepscope.recorder.hooks.compiled import leave_alone
from stepscope.recorder.recorder import Recorder
from stepscope.recorder.stacks import STATEFUL_LOADER
from stepscope.records.steps import FIRST_USER_SLOT, H2D, INPUT, OTHER
from stepscope.ring.layout import ENTER, TIME_SHIFT

__all__ = ["goes_to_device", "install", "install_transfers"]


# -- DataLoader -------------------------------------------------------------------------------------------------------


def install(
    recorder: Recorder, torch: Any, patches: Patches, watch: ImportWatch, expect_evaluation: Callable[[Any], None]
) -> None:
    """Install the hooks; ``expect_evaluation`` is called with each loader when its iteration begins."""
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    patches.set(iterator, "__next__", recorder.ledger.timed(iterator.__next__, INPUT))
    _patch_iter(recorder, patches, torch.utils.data.DataLoader, expect_evaluation)
    watch.when_imported(
        STATEFUL_LOADER,
        lambda module: _patch_iter(recorder, patches, module.StatefulDataLoader, expect_evaluation),
    )


def _patch_iter(recorder: Recorder, patches: Patches, loader: Any, expect_evaluation: Callable[[Any], None]) -> None:
    make_iterator = recorder.ledger.timed(loader.__iter__, INPUT)

    @functools.wraps(loader.__iter__)
    def __iter__(self: Any) -> Any:  # noqa: N807 - it replaces the loader's
        made = make_iterator(self)
        recorder.epoch_starts()
        expect_evaluation(self)
        recorder.objects.meet_loader(self, recorder.step)
        return made

    patches.set(loader, "__iter__", __iter__)


# -- Host to device copies --------------------------------------------------------------------------------------------
# ``Tensor.to`` and ``Tensor.cuda``, called by the script itself.
#
# Only copies between batches and forward matter: inside forward, backward or the optimizer the call goes straight
# through.  On a torch built without an accelerator nothing is patched.


def install_transfers(recorder: Recorder, torch: Any, patches: Patches) -> None:
    if torch.version.cuda or torch.version.hip or torch.backends.mps.is_built() or torch.xpu._is_compiled():
        patches.set(torch.Tensor, "to", _timed_transfer(recorder, torch, torch.Tensor.to, goes_to_device))
        patches.set(torch.Tensor, "cuda", _timed_transfer(recorder, torch, torch.Tensor.cuda, lambda *_: True))


def goes_to_device(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of ``Tensor.to`` name a device other than the host."""
    target: Any = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if "device" in kwargs:  # as in ``to(dtype, device=…)``
        target = kwargs["device"]
    if isinstance(target, str):
        return not target.startswith("cpu")
    if isinstance(target, torch.device):
        return bool(target.type != "cpu")
    if isinstance(target, torch.Tensor):
        return bool(target.device.type != "cpu")
    return isinstance(target, int)


class _NoFlag:
    """For a torch without this flag."""

    _is_compiling_flag = False


def _timed_transfer(
    recorder: Recorder, torch: Any, original: Any, wanted: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]
) -> Any:
    is_compiling, device = torch.compiler.is_dynamo_compiling, torch.device
    compiler = torch.compiler if hasattr(torch.compiler, "_is_compiling_flag") else _NoFlag
    ledger, now, code = recorder.ledger, recorder.ledger.now, H2D + ENTER

    @functools.wraps(original)
    def maybe_timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        outer = ledger.phase
        if (
            (outer != OTHER and outer < FIRST_USER_SLOT)
            or get_ident() != ledger.thread
            or not self.is_cpu
            or compiler._is_compiling_flag  # the flag of ``torch.compiler.is_compiling``, which costs two calls
            or not (args[0].type != "cpu" if args and type(args[0]) is device else wanted(torch, args, kwargs))
        ):
            return original(self, *args, **kwargs)
        # Inlined like ``Ledger.timed``, for the same reason.
        at = ledger.at
        ledger.body[at] = (now() << TIME_SHIFT) + code
        ledger.at = at + 1
        ledger.phase = H2D
        try:
            if ledger.device is not None:
                ledger.device.mark(outer, H2D)
            return original(self, *args, **kwargs)
        finally:
            ledger.leave(outer)

    leave_alone(torch, maybe_timed, with_calls=False)
    return maybe_timed
