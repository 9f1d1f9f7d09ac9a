"""Ranks that outlived their launcher.

After a Ctrl-C none may stay behind: torchrun that is interrupted twice, or killed, leaves its ranks running.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from stepscope.recorder.identity import rank_from
from stepscope.records.places import ENV_CLAIM, ENV_SESSION, RING_SUFFIX
from stepscope.store.processes import process_alive

__all__ = ["end_orphans", "ranks_of"]

GRACE_S = 5.0
"""How long they may take to end by themselves, and then when asked to."""


def end_orphans(session: Path) -> None:
    """Wait for the ranks to be gone; ask those that are not, then make them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        ranks = ranks_of(session)
        while ranks and time.monotonic() < deadline:
            time.sleep(0.02)
            ranks = {pid for pid in ranks if process_alive(pid, 0)}
        for pid in ranks:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def ranks_of(session: Path) -> set[int]:
    """The processes of a run that train: they have a ring, or a launcher gave them a rank and they have none yet."""
    owners = {ring.stem for ring in session.glob(f"*{RING_SUFFIX}")}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone, or another user's
        environment = dict(os.fsdecode(one).partition("=")[::2] for one in variables)
        if environment.get(ENV_SESSION) != str(session):
            continue
        # A helper of a rank (a DataLoader worker, a logger that outlives it) was started with the rank's own claim.
        rank = rank_from(environment)
        if entry.name in owners or (rank is not None and environment.get(ENV_CLAIM) != f"rank {rank}"):
            found.add(int(entry.name))
    return found
