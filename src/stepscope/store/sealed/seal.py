"""Seal a run that is over: write everything columnar as Parquet, then remove the files it came from.

    1  read the run as it is, with what other nodes sent
    2  write steps.parquet, samples.parquet, ranks.json and the collectives, if any, to a staging folder and read them
       back; also events.jsonl with the notes in it, and a run.json that says "sealed"
    3  move them into place, all at once (``store/locks.py``)
    4  remove segments, samples.jsonl, rings and the inbox

If killed before 3, the run is unchanged and can be sealed again; if killed later, sealing again does the rest.
Concurrent seals are serialized.  What other nodes send later is sealed in the same way.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import RingError, RunError, RunUnwritable
from stepscope.records.layers import layer_lines
from stepscope.records.series import RankSeries
from stepscope.records.text import Progress, no_progress
from stepscope.ring import RingReader
from stepscope.store import file_io, locks
from stepscope.store.documents import NodeInfo, awaits_delivery, read_meta, read_refused, write_meta, write_nodes
from stepscope.store.live.sample_files import remove_samples
from stepscope.store.liveness import (
    LEASE,
    Lease,
    LeaseKeeper,
    is_local,
    process_alive,
    processes_alive,
    read_lease,
    remove_session,
    ring_files,
    sealing_barred,
    session_of,
)
from stepscope.store.load import Loaded, load_run
from stepscope.store.locks import LockBusy, locked, take_lock
from stepscope.store.paths import EVENTS, INBOX, LAYERS, PARTS, STACKS, STEPS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepscope.store.inbox.remote import Shown

__all__ = ["needs_seal", "seal"]


def seal(run_dir: Path, *, watched: Lease | None = None, progress: Progress = no_progress) -> None:
    """Seal a run; a sealed run is only changed if other nodes sent more.  RunError while it is still active.

    ``watched``: the lease of a remote run that the caller has already watched (``sealing_barred``).  ``progress``
    reports shares of the work: reading, writing and reading back take about the same time.
    """
    meta = read_meta(run_dir)
    if watched is None:
        barred = sealing_barred(run_dir, meta)
        if barred:
            raise RunError(f"{run_dir} cannot be sealed: {barred}")
        watched = read_lease(run_dir)
    lease = LeaseKeeper(run_dir)

    def report(done: int, total: int) -> None:
        lease.renew()
        progress(done, total)

    try:
        with locked(run_dir), _hub_shut_out(run_dir):
            locks.finish_stage(run_dir)
            if needs_seal(run_dir):
                if read_meta(run_dir).get("sealed") is not True and _goes_on(run_dir, meta, watched):
                    raise RunError(f"{run_dir} cannot be sealed: its processes are still running")
                _write(run_dir, report)
                locks.finish_stage(run_dir)
            _clean(run_dir)
    except OSError as error:
        raise RunUnwritable(f"cannot seal {run_dir}: {error.strerror or error}") from error


def _goes_on(run_dir: Path, meta: Mapping[str, Any], watched: Lease | None) -> bool:
    return processes_alive(run_dir) if is_local(meta) else read_lease(run_dir) != watched


def needs_seal(run_dir: Path) -> bool:
    """Whether any data of a run is not sealed: all of it, or what other nodes sent later.

    A spool is never sealed: it is sent to the run that it belongs to. Nor is a run before the team's hub has all of it.
    """
    meta = read_meta(run_dir)
    if awaits_delivery(meta):
        return False
    return meta.get("sealed") is not True or locks.is_stage_committed(run_dir) or _late(run_dir)


def _late(run_dir: Path) -> bool:
    from stepscope.store.inbox.journal import unsealed_bytes

    return unsealed_bytes(run_dir) > 0


def _write(run_dir: Path, progress: Progress) -> None:
    parts_stay = _seal_journals(run_dir)
    if parts_stay and read_meta(run_dir).get("sealed") is True:
        return
    loaded = load_run(run_dir, alone=parts_stay, progress=lambda done, total: progress(done, 3 * total))
    data = loaded.data
    stage = locks.new_stage(run_dir)
    _write_and_verify(stage, loaded, progress)
    layers = tuple(layer_lines(data.layers)) if data.layers else ()
    for name, records in ((EVENTS, data.events), (STACKS, data.stacks), (LAYERS, layers)):
        if records and (name == EVENTS or data.nodes):
            lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
            file_io.write_bytes(stage / name, lines.encode())
    if data.nodes and not parts_stay:
        _write_positions(run_dir, stage, loaded.shown)
    if data.nodes:
        write_nodes(stage, [NodeInfo.from_dict(node) for node in data.nodes], refused=read_refused(run_dir))
    write_meta(stage, {**data.meta, "sealed": True})
    locks.commit_stage(run_dir)


def _seal_journals(run_dir: Path) -> bool:
    """Turn what other nodes sent into parts if it is much; return whether they are so large that they stay."""
    from stepscope.store.inbox.journal import JOURNAL_BYTES, journals, read_positions, unsealed_bytes
    from stepscope.store.inbox.parts import rewrite_journal
    from stepscope.store.inbox.remote import is_too_large

    sealed = read_positions(run_dir)
    if sealed.parts or unsealed_bytes(run_dir) > JOURNAL_BYTES:
        for number in journals(run_dir, after=sealed.through):
            rewrite_journal(run_dir, number)
    return is_too_large(read_positions(run_dir))


def _write_positions(run_dir: Path, stage: Path, shown: Shown) -> None:
    """Write the nodes' positions in what is now sealed, and the rank and attempt of each ring there."""
    from stepscope.store.inbox.journal import SealedPositions, recover, write_positions

    now = recover(run_dir)
    for (name, ident), pair in shown.items():
        if name in now.spools and ident in now.spools[name].rings:
            now.spools[name].rings[ident].shown = pair
    write_positions(stage, SealedPositions(through=now.last, base=now.last, spools=now.spools))


def _write_and_verify(stage: Path, loaded: Loaded, progress: Progress) -> None:
    import duckdb

    from stepscope.store.sealed.parquet import one_database, read_ranks, write_ranks
    from stepscope.store.sealed.samples import write_samples

    data = loaded.data
    try:
        with one_database():
            write_ranks(stage, data.ranks, loaded.kept_notices)
            same = write_samples(stage, Path(data.path), loaded.sent_samples)
            progress(2, 3)
            ranks, notices = read_ranks(stage, progress=lambda done, total: progress(2 * total + done, 3 * total))
    except duckdb.Error as error:
        raise RunUnwritable(f"cannot seal {data.path}: {str(error).strip().splitlines()[0]}") from error
    same = same and len(ranks) == len(data.ranks) and all(map(_same, ranks, data.ranks))
    if not same or notices != list(loaded.kept_notices):
        raise RunUnwritable(f"cannot seal {data.path}: the written files do not read back the same")


def _same(series: RankSeries, other: RankSeries) -> bool:
    fields = ("identity", "rank", "state", "phase_names", "anchor_mono_ns", "anchor_wall_ns", "lost", "torn", "facts")
    if not all(getattr(series, field) == getattr(other, field) for field in (*fields, "groups")):
        return False
    exchanges = ("comm", "collectives")
    return series.steps.same(other.steps) and all(
        _bytes_of(getattr(series, name)) == _bytes_of(getattr(other, name)) for name in exchanges
    )


def _bytes_of(rows: NDArray[Any] | None) -> bytes | None:
    return None if rows is None else rows.tobytes()


def _has_parts(run_dir: Path) -> bool:
    from stepscope.store.inbox.journal import read_positions

    return len(read_positions(run_dir).parts) > 0


def _clean(run_dir: Path) -> None:
    """Remove what the sealed files replace; a ring that cannot be read stays, and so does its folder."""
    meta = read_meta(run_dir)
    for folder in (STEPS, locks.STAGE, INBOX, *(() if _has_parts(run_dir) else (PARTS,))):
        shutil.rmtree(run_dir / folder, ignore_errors=True)
    remove_samples(run_dir)
    for path in ring_files(run_dir, meta):
        with suppress(RingError, OSError):
            reader = RingReader(path)
            header = reader.header()
            reader.close()
            if not process_alive(header.pid, header.start_ticks):
                path.unlink()
    session = session_of(run_dir, meta)
    if session is not None and session != run_dir / "rings":
        remove_session(session)
    for left in (run_dir / LEASE, *file_io.leftovers(run_dir)):
        left.unlink(missing_ok=True)


@contextmanager
def _hub_shut_out(run_dir: Path) -> Iterator[None]:
    """Keep hubs from receiving: what one received while we read would be lost."""
    with ExitStack() as stack:
        if (run_dir / INBOX).is_dir():
            try:
                stack.callback(os.close, take_lock(run_dir / INBOX))
            except LockBusy:
                raise RunError(f"{run_dir} cannot be sealed: its hub is still receiving data") from None
            from stepscope.store.inbox.parts import parts_locked

            stack.enter_context(parts_locked(run_dir))
        yield
