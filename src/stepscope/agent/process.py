"""The agent as a process: tend a run to its end, then leave a summary if nobody else will."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from stepscope.agent.loop import Agent
from stepscope.agent.on_hang import HangPolicy
from stepscope.agent.probes import Probes
from stepscope.agent.shipping.destination import Destination
from stepscope.records import run_clock
from stepscope.records.modes import umask_of
from stepscope.records.places import helper_command
from stepscope.store.meta import read_meta

__all__ = ["tend"]


def tend(
    run_dir: Path,
    session: Path,
    *,
    owner: int | None = None,
    interval_s: float = 0.2,
    on_hang: HangPolicy | None = None,
    hub: Destination | None = None,
) -> int:
    """Until the run is over; the exit code.  NotARun when ``run_dir`` is none.

    ``owner`` is a process that may still start ranks, where no launcher of ours says when the job is over.  ``hub`` is
    sent everything; of a node that is not its own, the run directory is but a spool, which goes when it has it.
    """
    os.umask(umask_of(run_dir))
    run_clock.follow_run(read_meta(run_dir))
    shipper = probes = None
    if hub is not None:
        from stepscope.agent.shipping.ship import Shipper  # HTTP: a megabyte or two, only where there is a hub

        probes = Probes(platform.node(), hub.node)
        shipper = Shipper(run_dir, hub, probe_port=probes.port)
    agent = Agent(run_dir, session, owner=owner, interval_s=interval_s, on_hang=on_hang, probes=probes, shipper=shipper)
    if agent.run() != "orphaned":
        return 0
    if hub is not None and hub.node != 0:
        if agent.delivered is not None and agent.delivered.whole and not agent.delivered.local:
            shutil.rmtree(run_dir, ignore_errors=True)
    else:
        # In place of this process: what a summary needs is loaded only now, and the agent's own memory is given back.
        command = helper_command("stepscope", "report", "--quiet", str(run_dir))
        os.execv(command[0], command)
    return 0
