"""Input: the time the script waits for its next batch, and for a new iterator (its workers start there).

``_BaseDataLoaderIter.__next__`` serves map-style and iterable datasets, with and without workers, and the stateful
loader of torchdata, which derives from it (but makes its iterator in a way of its own).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stepscope.recorder.imports import ImportWatch
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.records.phases import INPUT

__all__ = ["install"]


def install(
    recorder: Recorder, torch: Any, patches: Patches, watch: ImportWatch, expect_evaluation: Callable[[Any], None]
) -> None:
    """``expect_evaluation`` is told of loaders that begin to be iterated."""
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    patches.set(iterator, "__next__", recorder.ledger.timed(iterator.__next__, INPUT))
    _patch_iter(recorder, patches, torch.utils.data.DataLoader, expect_evaluation)
    watch.when_imported(
        "torchdata.stateful_dataloader.stateful_dataloader",
        lambda module: _patch_iter(recorder, patches, module.StatefulDataLoader, expect_evaluation),
    )


def _patch_iter(recorder: Recorder, patches: Patches, loader: Any, expect_evaluation: Callable[[Any], None]) -> None:
    make_iterator = recorder.ledger.timed(loader.__iter__, INPUT)

    @functools.wraps(loader.__iter__)
    def __iter__(self: Any) -> Any:  # noqa: N807 - it stands for the loader's
        made = make_iterator(self)
        recorder.epoch_starts()
        expect_evaluation(self)
        recorder.objects.meet_loader(self, recorder.step)
        return made

    patches.set(loader, "__iter__", __iter__)
