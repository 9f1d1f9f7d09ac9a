"""``stepscope snapshot``: ask a running rank for a snapshot of CUDA's memory allocator, for torch's own viewer.

The rank reads the request next to its ring after one of its next steps, because the ring's request word has changed
(``recorder/layers/memory_dump.py``), so only a process on this machine can be asked.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepscope.cli.arguments import RUN_HELP, amount, locate_run, whole_number
from stepscope.cli.output import progress_bar
from stepscope.errors import RingError, RunError, UsageError
from stepscope.records.files import replaced
from stepscope.records.paths import ANSWER_SUFFIX, ASK_SUFFIX, SNAPSHOT_SUFFIX, snapshot_path
from stepscope.records.text import bytes_text, duration_text
from stepscope.ring import RingReader
from stepscope.ring.reader import RingHeader
from stepscope.ring.requests import announce_request
from stepscope.store.documents import read_meta
from stepscope.store.file_io import read_document
from stepscope.store.liveness import is_local, process_alive, session_of

__all__ = ["EPILOG", "HELP", "add_arguments", "request_snapshot", "run"]

HELP = "save the CUDA memory of a running rank, for torch's memory viewer"
EPILOG = """\
examples:
  stepscope snapshot                       the newest active run, if it has one rank
  stepscope snapshot NAME --rank 3         what rank 3 holds after its current step
  stepscope snapshot NAME --rank 3 --history 10 -o oom.pickle
                                           also every allocation of the next 10 seconds, with the lines that made them

Open the file at https://pytorch.org/memory_viz. The rank pauses while it writes the snapshot.
"""
WAIT_S = 60.0
LONGEST_HISTORY_S = 600.0
EVERY_S = 0.1
VIEWER = "https://pytorch.org/memory_viz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", type=Path, nargs="?", help=RUN_HELP)
    parser.add_argument("--rank", type=whole_number, metavar="R", help="this rank (default: the only one)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write it here (default: snapshot-rank-R.pickle)"
    )
    parser.add_argument(
        "--history",
        type=amount("seconds"),
        default=0.0,
        metavar="SECONDS",
        help="record all allocations for this long first (at most 600)",
    )
    parser.add_argument(
        "--wait",
        type=amount("seconds"),
        default=WAIT_S,
        metavar="SECONDS",
        help=f"give up if the rank does not answer for this long (default: {WAIT_S:.0f})",
    )


def run(args: argparse.Namespace) -> int:
    if args.history > LONGEST_HISTORY_S:
        raise UsageError(f"--history: at most {LONGEST_HISTORY_S:.0f} seconds, not {args.history:g}")
    run_dir = locate_run(args.path, prefer_live=True)
    ring, who = _rank_of(run_dir, args.rank)
    rank = who.identity.rank
    if who.identity.device != "cuda":
        raise RunError(
            f"rank {rank} trains on {who.identity.device}, and only CUDA's allocator can be asked for a snapshot; "
            f"`stepscope memory {run_dir}` shows what its layers hold"
        )
    output = args.output or Path(f"snapshot-rank-{rank}.pickle")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"cannot write {output}: {output.absolute().parent} does not exist")
    answer = request_snapshot(
        ring, rank=rank, history_s=args.history, wait_s=args.wait, alive=lambda: process_alive(who.pid, who.start_ticks)
    )
    saved = ring.with_suffix(SNAPSHOT_SUFFIX)
    try:
        with replaced(output) as spare:
            shutil.copyfile(saved, spare)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None
    finally:
        saved.unlink(missing_ok=True)
    _tell(output, rank, answer, args.history)
    return 0


def _tell(output: Path, rank: int, answer: dict[str, Any], history_s: float) -> None:
    size = bytes_text(output.stat().st_size)
    with_history = ""
    if answer.get("own_history") is True:
        with_history = ", with the history that the script records"
    elif answer.get("history") is True:
        with_history = f", with {duration_text(history_s)} of history"
    step = answer.get("step")
    after = f" after step {step:,}" if type(step) is int else ""
    kind = "trace_plot" if with_history else "segment_plot"
    print(f"{output}: rank {rank}{after}, {size}{with_history}")
    print(f"Drop it on {VIEWER} (it stays on your machine), or")
    print(f"python -m torch.cuda._memory_viz {kind} {output} -o {output.with_suffix('.html').name}")


# -- the rank ---------------------------------------------------------------------------------------------------------


def _rank_of(run_dir: Path, rank: int | None) -> tuple[Path, RingHeader]:
    """The ring of a running rank, and what it says of its process."""
    meta = read_meta(run_dir)
    left = snapshot_path(run_dir, rank or 0)
    at_failure = f"; {left} was written when it ran out of memory" if left.exists() else ""
    if not is_local(meta):
        raise RunError(f"{run_dir} is recorded on {meta.get('host')}; run this command there{at_failure}")
    session = session_of(run_dir, meta)
    found = {} if session is None else _running(session)
    if not found:
        raise RunError(
            f"no rank of {run_dir} runs on this host; `stepscope memory {run_dir}` shows what its layers held"
            f"{at_failure}"
        )
    if rank is None and len(found) == 1:
        return next(iter(found.values()))
    if rank is None or rank not in found:
        from stepscope.flight.wording import spans_text

        ranks = f"running on this host: {spans_text(sorted(found))}"
        if rank is None:
            raise UsageError(f"which rank? Name it with --rank; {ranks}")
        raise UsageError(f"rank {rank} is not running on this host; {ranks}")
    return found[rank]


def _running(session: Path) -> dict[int, tuple[Path, RingHeader]]:
    """By rank, the processes that are alive; of two attempts the later one."""
    found: dict[int, tuple[Path, RingHeader]] = {}
    for path in sorted(session.glob("*.ring")):
        try:
            reader = RingReader(path)
        except (OSError, RingError):
            continue  # it was removed, or is being made
        header = reader.header()
        reader.close()
        before = found.get(header.identity.rank)
        later = before is None or header.identity.attempt >= before[1].identity.attempt
        if later and process_alive(header.pid, header.start_ticks):
            found[header.identity.rank] = path, header
    return found


# -- request and answer -----------------------------------------------------------------------------------------------


def request_snapshot(
    ring: Path,
    *,
    rank: int,
    history_s: float,
    wait_s: float,
    alive: Callable[[], bool],
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Ask the process of a ring, and wait for its snapshot next to the ring; RunError if it does not come."""
    request, answer = ring.with_suffix(ASK_SUFFIX), ring.with_suffix(ANSWER_SUFFIX)
    identity = secrets.token_hex(8)
    answer.unlink(missing_ok=True)
    _write(request, {"id": identity, "history_s": history_s})
    began_s = now_s()
    state = ""
    try:
        if not announce_request(ring):
            raise RunError(f"rank {rank} ended before it answered")
        with progress_bar(f"waiting for rank {rank}", lambda s: f"{s} s") as tell:
            while True:
                reply = _read(answer)
                if reply.get("id") == identity:
                    state = str(reply.get("state"))
                    if state == "done":
                        return reply
                    if state == "failed":
                        raise RunError(f"rank {rank} took no snapshot: {reply.get('problem')}")
                waited_s = now_s() - began_s
                most_s = wait_s + history_s
                if waited_s >= most_s:
                    raise RunError(_silent(rank, state, waited_s))
                if not alive():
                    raise RunError(f"rank {rank} ended before it answered")
                tell(int(waited_s), int(most_s))
                sleep(EVERY_S)
    finally:
        request.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)


def _silent(rank: int, state: str, waited_s: float) -> str:
    if state == "recording":
        return f"rank {rank} recorded its history but has not ended a step since; it may hang (`stepscope watch`)"
    return (
        f"rank {rank} has not answered within {duration_text(waited_s)}: a rank checks for requests after a step, "
        "about twice a second. If steps are longer, raise --wait; a hung rank cannot answer (`stepscope watch`)"
    )


def _write(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_suffix(".asking")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(json.dumps(document).encode())
        partial.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_document(path))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
