"""Collect each ring's records from a run that is not sealed: its segment, then what only the ring still holds.

A ring is opened before its segment is read.  The agent may drain and remove the ring in between; the open mapping then
still has the slots that are missing from the segment as read.
"""

from __future__ import annotations

import platform
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import RingError
from stepscope.records.collectives import merged_groups
from stepscope.records.steps import SLOT_BYTES
from stepscope.records.text import Progress, no_progress
from stepscope.ring import RingReader
from stepscope.store.live.ring_files import RingSidecar, guess_sidecar, read_segment, read_sidecars, sidecar_of
from stepscope.store.liveness import is_local, process_alive, ring_files
from stepscope.store.paths import SEGMENT_SUFFIX, STEPS, segment_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RingRecords", "collect_rings"]


@dataclass(frozen=True, kw_only=True)
class RingRecords:
    """Everything that one process recorded."""

    about: RingSidecar
    slots: NDArray[Any]
    """uint8, one row of 256 bytes per slot, ordered by seq."""
    lost: int
    torn: int


def collect_rings(
    run_dir: Path, meta: dict[str, Any], *, live: bool, progress: Progress = no_progress
) -> tuple[list[RingRecords], list[str]]:
    """Return the records of every ring, and notices about what is missing.

    With ``live``, an incomplete frame means that the agent is writing, and gets no notice.  ``progress`` counts rings.
    """
    notices: list[str] = []
    with ExitStack() as stack:
        rings: dict[str, RingReader] = {}
        abouts: dict[str, RingSidecar] = {}
        for path in ring_files(run_dir, meta):
            try:
                reader = RingReader(path)
            except (RingError, OSError) as error:
                notices.append(f"A ring could not be read: {error}.")
                continue
            stack.callback(reader.close)
            about = sidecar_of(reader.header())
            rings[about.key] = reader
            abouts[about.key] = about
        sidecars, bad = read_sidecars(run_dir)
        notices += [f"{STEPS}/{name} could not be read; the rank of its steps is a guess." for name in bad]
        segments = {path.stem for path in (run_dir / STEPS).glob(f"*{SEGMENT_SUFFIX}")}
        local = is_local(meta)
        found: list[RingRecords] = []
        for key in sorted(keys := {*rings, *sidecars, *segments}):
            about = _settle(abouts.get(key), sidecars.get(key) or guess_sidecar(key), local=local)
            path = segment_path(run_dir, key)
            found.append(_records(about, path, rings.get(key), notices if not live else []))
            progress(len(found), len(keys))
        if not live:
            _say_if_rings_are_gone(found, rings, notices)
    return found, notices


def _records(about: RingSidecar, path: Path, ring: RingReader | None, notices: list[str]) -> RingRecords:
    import numpy as np

    slots = b""
    last_seq = lost = torn = 0
    if path.exists():
        segment = read_segment(path)
        slots, last_seq, lost, torn = segment.slots, segment.last_seq, segment.lost, segment.torn
        if segment.skipped_bytes:
            notices.append(
                f"{STEPS}/{path.name} was cut off or damaged: {segment.skipped_bytes:,} of its bytes could not be used."
            )
    if ring is not None:
        tail = ring.read(last_seq)
        slots += b"".join(tail.slots)
        lost += tail.lost
        torn += tail.torn
    rows = np.frombuffer(slots, np.uint8).reshape(-1, SLOT_BYTES)
    return RingRecords(about=about, slots=rows, lost=lost, torn=torn)


def _settle(ring: RingSidecar | None, sidecar: RingSidecar, *, local: bool) -> RingSidecar:
    """Merge ring and sidecar: the ring is newer, but only the sidecar has the end.  Check that the process exists."""
    about = sidecar
    if ring is not None:
        facts, groups = ring.facts or sidecar.facts, merged_groups(ring.groups, sidecar.groups)
        about = replace(ring, ended_wall_ns=sidecar.ended_wall_ns, facts=facts, groups=groups)
    if about.state in ("starting", "running"):
        here = local and about.identity.host == platform.node()
        if about.ended_wall_ns is not None or (here and not process_alive(about.pid, about.start_ticks)):
            about = replace(about, state="vanished")
    return about


def _say_if_rings_are_gone(found: list[RingRecords], rings: dict[str, RingReader], notices: list[str]) -> None:
    gone = [r.about for r in found if r.about.ended_wall_ns is None and r.about.key not in rings]
    if gone:
        ranks = ", ".join(str(rank) for rank in sorted({about.identity.rank for about in gone}))
        notices.append(f"The rings of rank {ranks} are gone and were not read completely; steps may be missing.")
