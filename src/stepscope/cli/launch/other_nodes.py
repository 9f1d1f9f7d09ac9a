"""What runs in place of a job under ``stepscope run --hub-only``: it waits until the other nodes have finished.

Node 0 then has no ranks, so that every node with ranks can be replaced while the run stays the same: a scheduler may
restart, move or preempt them all. It ends with exit code 0 when every other node reported that its part finished. A
node that failed, or was lost, may be replaced at any time, so there is no limit to the wait; whoever started the hub
ends it.

Ctrl-C ends the run. SIGTERM does not say whether the scheduler ends the job or only moves the hub: if all nodes say
goodbye soon after it, the run ends; otherwise it is left open. The next ``--hub-only`` of that name continues such a
run, and one whose hub was killed: nodes keep what they could not send, and start at the position that is on its disk.

It reads ``nodes.json``, which the hub writes. A node that was replaced counts by its replacement.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.cli.launch.command import Nodes
from stepscope.errors import NotARun, RingNoSpace
from stepscope.records import run_clock
from stepscope.records.files import make_session
from stepscope.records.paths import ENV_RUN_DIR, helper_command, session_root
from stepscope.records.text import duration_text
from stepscope.store.create import RunPaths
from stepscope.store.documents import NodeInfo, read_meta, read_nodes, write_meta
from stepscope.store.liveness import ABANDONED_S, WATCH_S, LeaseKeeper, Place, mark_session, read_lease

__all__ = ["LEFT_OPEN", "all_ended", "all_finished", "continue_run", "wait_command", "wait_for_nodes"]

POLL_S = 0.5
LAST_REPORTS_S = 5.0
"""How long the last reports may take after Ctrl-C: the hub writes its file every three seconds."""
GOODBYES_S = 130.0
"""How long the nodes may take after SIGTERM, which they get too if the job ends: two minutes for a checkpoint."""
LEFT_OPEN = os.EX_TEMPFAIL
"""Exit code: the run is not over, and another hub may continue it."""


def wait_command(nodes: Nodes) -> list[str]:
    """Command line of the process; the run directory is in its environment."""
    return helper_command("stepscope.cli.launch.other_nodes", str(nodes.least - 1))


def all_finished(nodes: Sequence[NodeInfo], least: int) -> bool:
    """Whether every other node that joined has finished, and there were at least so many.

    ``nodes``: by number and time of joining, as in ``nodes.json``.
    """
    return _each(nodes, least, lambda bye: bye is not None and bye.get("status") == "finished")


def all_ended(nodes: Sequence[NodeInfo], least: int) -> bool:
    """Whether every other node said goodbye, for whatever reason."""
    return _each(nodes, least, lambda bye: bye is not None)


def _each(nodes: Sequence[NodeInfo], least: int, holds: Callable[[Mapping[str, Any] | None], bool]) -> bool:
    latest = {node.node: node for node in nodes if node.node}
    return len(latest) >= max(least, 1) and all(holds(node.bye) for node in latest.values())


def wait_for_nodes(
    run_dir: Path, least: int, caught: Callable[[], int], *, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Wait; return the exit code. ``caught``: the signal that ends this process, or 0."""
    waited_s = 0.0
    while not all_finished(nodes := read_nodes(run_dir), least):
        number = caught()
        moved = number == signal.SIGTERM
        if number and waited_s >= (GOODBYES_S if moved else LAST_REPORTS_S):
            return LEFT_OPEN if moved else 1
        if moved and all_ended(nodes, least):
            return 1
        waited_s += POLL_S if number else 0.0
        sleep(POLL_S)
    return 0


def continue_run(
    root: Path, name: str, about: Mapping[str, Any], *, sleep: Callable[[float], None] = time.sleep
) -> RunPaths | None:
    """Take over the unfinished run of a hub that is gone, or return None.

    ``about``: what its ``run.json`` says if it is of the same job. Blocks while it watches whether the run is active.
    """
    run_dir = root.resolve() / name
    try:
        meta = read_meta(run_dir)
    except NotARun:
        return None
    same = all(meta.get(key) == about.get(key) for key in ("command", "nnodes"))
    lease = read_lease(run_dir)
    if not same or meta.get("end") is not None or meta.get("sealed") or lease is None or lease.age_s() > ABANDONED_S:
        return None
    left_s = WATCH_S
    while left_s > 0:
        sleep(1.0)
        left_s -= 1.0
        if read_lease(run_dir) != lease:
            return None
    spool = str(meta.get("spool"))
    notices = [f"continuing the run {name}, whose hub ended {duration_text(lease.age_s(), whole=True)} ago"]
    try:
        session = make_session(session_root(), os.urandom(8).hex())
        mark_session(session, spool)
    except RingNoSpace as error:
        session = run_dir / "rings"
        notices.append(f"{error}; the rings are kept in {session}")
    LeaseKeeper(run_dir).renew()
    write_meta(run_dir, {**meta, **_recorder(meta), "session": str(session)})
    return RunPaths(name=name, wanted=name, run_dir=run_dir, session=session, notices=tuple(notices))


def _recorder(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What ``run.json`` says about the process that records the run, and its clock on this machine."""
    here = Place.here()
    elapsed_ns = run_clock.now_of(meta) - int(meta["created_wall_ns"])
    launcher = {"pid": os.getpid(), "start_ticks": run_clock.process_start_ticks(os.getpid())}
    return {
        "place": here.to_dict(),
        "host": here.host,
        "launcher": launcher,
        "created_mono_ns": time.monotonic_ns() - elapsed_ns,
    }


def main() -> int:
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda caught, _frame: signals.append(caught))
    return wait_for_nodes(Path(os.environ[ENV_RUN_DIR]), int(sys.argv[1]), lambda: signals[-1] if signals else 0)


if __name__ == "__main__":
    sys.exit(main())
