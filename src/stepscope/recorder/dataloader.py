"""Input: the time the script waits for its next batch, and for a new iterator (its workers start there).

``_BaseDataLoaderIter.__next__`` serves map-style and iterable datasets, with and without workers, and the stateful
loader of torchdata, which derives from it.
"""

from __future__ import annotations

import functools
from typing import Any

from stepscope.records.phases import INPUT
from stepscope.recorder.patches import Patches
from stepscope.recorder.recorder import Recorder
from stepscope.recorder.timed import timed

__all__ = ["install"]


def install(recorder: Recorder, torch: Any, patches: Patches) -> None:
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    loader = torch.utils.data.DataLoader
    make_iterator = timed(recorder, loader.__iter__, INPUT)

    @functools.wraps(loader.__iter__)
    def __iter__(self: Any) -> Any:  # noqa: N807 - it stands for the loader's
        made = make_iterator(self)
        recorder.epoch_starts()
        return made

    patches.set(iterator, "__next__", timed(recorder, iterator.__next__, INPUT))
    patches.set(loader, "__iter__", __iter__)
