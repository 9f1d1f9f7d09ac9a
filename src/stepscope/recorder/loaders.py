"""The loader that feeds the training: how it is set up, and whether its sampler is told which epoch begins.

A loader is seen when the script asks it for an iterator; its settings are read then (the loader of ``for x in
DataLoader(…)`` does not live any longer), and it is known again by a weak reference.  Most scripts have several.  The
one that feeds the training is the one whose iterator was taken last when the recorder looks around after a step, a
shuffling one if there is any; it stays that as long as it lives.

*set_epoch.*  A ``DistributedSampler`` that shuffles gives the same order in each epoch unless it is told its number.
An iterator taken a second time at the same epoch may also be a mere look at one batch, so it counts only once steps
were taken with it, and no longer when the epoch changes later on.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

__all__ = ["Loaders"]

MAX_LOADERS = 256
"""In the life of a process; a script that makes a new one each step is not followed for ever."""
EPOCH_STEPS = 2
"""So many steps after it was taken, an iterator is that of an epoch."""


class _Seen:
    """One loader."""

    def __init__(self, loader: Any, forget: Any) -> None:
        self.loader = weakref.ref(loader, forget)
        self.settings = _settings_of(loader)
        self.set_epoch_missing = False
        self.epochs = 0
        """That were over when the next began."""
        sampler = _sampler_of(loader)
        self.shuffles = _shuffles(sampler)
        self.watched = hasattr(sampler, "epoch") and self.shuffles and _is_distributed(sampler)
        self._epoch: Any = None
        self._taken_at = -1
        self._suspect = False
        self._ever_set = False

    def taken(self, loader: Any, step: int) -> None:
        """An iterator is taken before the step ``step`` ends."""
        self.epochs += self._taken_at >= 0 and step - self._taken_at >= EPOCH_STEPS
        if not self.watched:
            self._taken_at = step
            return
        self.confirm(step)
        epoch = _sampler_of(loader).epoch
        if self._taken_at >= 0:
            self._ever_set |= epoch != self._epoch
            self._suspect = step > self._taken_at and not self._ever_set
            self.set_epoch_missing &= not self._ever_set
        self._epoch, self._taken_at = epoch, step

    def confirm(self, step: int) -> None:
        """So many steps ended by now: was the last iterator an epoch's?"""
        if self._suspect and step - self._taken_at >= EPOCH_STEPS:
            self.set_epoch_missing = True


class Loaders:
    def __init__(self) -> None:
        self._alive: dict[int, _Seen] = {}
        """By id, the one taken last at the end."""
        self._last: dict[bool, _Seen] = {}
        """Of those that shuffle and of those that do not, the one taken last, alive or not."""
        self._main: _Seen | None = None
        self._met = 0

    def taken(self, loader: Any, step: int) -> None:
        key = id(loader)
        seen = self._alive.pop(key, None)
        if seen is None:
            if self._met >= MAX_LOADERS:
                return
            self._met += 1
            seen = _Seen(loader, lambda _: self._alive.pop(key, None))
        self._alive[key] = self._last[seen.shuffles] = seen
        seen.taken(loader, step)

    def choose(self) -> None:
        """A step has just ended: which of them feeds the training?"""
        if self._main is None or self._main.loader() is None:
            met = [seen for seen in (self._main, *self._alive.values(), *self._last.values()) if seen is not None]
            shuffling = [seen for seen in met if seen.shuffles]
            if met:
                self._main = (shuffling or met)[-1]

    def facts(self, step: int) -> dict[str, Any]:
        """Of the loader that feeds the training; {} before there is one."""
        if self._main is None:
            return {}
        self._main.confirm(step)
        main = self._main
        return {"loader": {**main.settings, "set_epoch_missing": main.set_epoch_missing, "epochs": main.epochs}}


def _settings_of(loader: Any) -> dict[str, Any]:
    sampler, batches = _sampler_of(loader), getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None)
    size = getattr(batches, "batch_size", None) if size is None else size
    size = size if isinstance(size, int) else None
    drop_last = bool(getattr(loader, "drop_last", False)) or bool(getattr(batches, "drop_last", False))
    return {
        "num_workers": int(loader.num_workers),
        "pin_memory": bool(loader.pin_memory),
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": bool(loader.persistent_workers),
        "batch_size": size,
        "sampler": type(sampler).__name__,
        "dataset": type(loader.dataset).__name__,
        "distributed_sampler": _is_distributed(sampler),
        "length": _length(sampler, batches),
        "drop_last": drop_last,
        "last_batch": None if drop_last else _last_batch(sampler, batches, size),
    }


def _length(sampler: Any, batches: Any) -> int | None:
    """Batches an epoch, where torch's own samplers say it: the ``len`` of an iterable dataset has side effects."""
    source = sampler if batches is None else batches
    return len(source) if _are_torchs(sampler, source) and hasattr(sampler, "__len__") else None


def _last_batch(sampler: Any, batches: Any, size: int | None) -> int | None:
    """Samples in the last batch of an epoch, where that is known as above."""
    if batches is None or not size or not _are_torchs(sampler, batches) or not hasattr(sampler, "__len__"):
        return None
    return len(sampler) % size or size


def _are_torchs(*samplers: Any) -> bool:
    return all(type(one).__module__.startswith("torch.utils.data.") for one in samplers)


def _sampler_of(loader: Any) -> Any:
    """What chooses the samples; of a batch sampler of the script's own, what stands in it."""
    batches = getattr(loader, "batch_sampler", None)
    return loader.sampler if batches is None else getattr(batches, "sampler", batches)


def _is_distributed(sampler: Any) -> bool:
    loaded: Any = sys.modules.get("torch.utils.data.distributed")
    if loaded is not None and isinstance(sampler, loaded.DistributedSampler):
        return True
    return "Distributed" in type(sampler).__name__


def _shuffles(sampler: Any) -> bool:
    return bool(getattr(sampler, "shuffle", False)) or "Random" in type(sampler).__name__
