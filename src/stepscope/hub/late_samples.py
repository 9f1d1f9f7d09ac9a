"""The samples of a run that is over come after everything else: the page is drawn while they are read.

A night of a large job has hundreds of thousands of them, and none is needed for a verdict that was written down, for
the steps or for the map.  Whoever asks for them meanwhile waits (``OpenRun.sampled``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from stepscope.errors import RunError
from stepscope.hub.model.live_run import LiveRun
from stepscope.hub.past import lines_by_node
from stepscope.store.paths import SAMPLES

__all__ = ["bring_samples"]

AT_ONCE = 5_000
"""Lines put in before others have their turn."""


async def bring_samples(path: Path, live: LiveRun, nodes: Mapping[str, str]) -> None:
    """Read them in a thread and put them in; ``nodes`` as ``past_run`` has them."""
    try:
        by_node = await asyncio.to_thread(_read, path, live, nodes)
    except (RunError, OSError):
        return  # it was removed or damaged meanwhile: the next look at the run says so
    for node, lines in by_node.items():
        for first in range(0, len(lines), AT_ONCE):
            live.lines(SAMPLES, lines[first : first + AT_ONCE], node=node, offset_ns=0)
            await asyncio.sleep(0)


def _read(path: Path, live: LiveRun, nodes: Mapping[str, str]) -> dict[str, list[bytes]]:
    from stepscope.store.samples import sealed_samples  # loads DuckDB, for which hubs of live runs have no use

    return lines_by_node(live, sealed_samples(path), nodes)
