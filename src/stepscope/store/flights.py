"""``flight/``: what the ranks' Flight Recorders and stacks said when it mattered; ``stepscope flight`` reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from stepscope.store import atomic
from stepscope.store.paths import FLIGHT

__all__ = ["keep_flights"]

OURS = re.compile(r"rank_\d+\.json|stacks_\d+\.txt")


def keep_flights(run_dir: Path, answers: Mapping[int, bytes], stacks: Mapping[int, str] | None = None) -> None:
    """The answers (JSON) and the stacks (as faulthandler wrote them) by rank; OSError when there is no room.

    They take the place of all that was kept before: what ranks said at different times must not be compared.
    """
    files = {f"rank_{rank}.json": answer for rank, answer in answers.items()}
    files |= {f"stacks_{rank}.txt": text.encode() for rank, text in (stacks or {}).items()}
    if not files:
        return
    folder = run_dir / FLIGHT
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and path.name not in files:
            path.unlink(missing_ok=True)
    for name, data in files.items():
        atomic.write_bytes(folder / name, data)
