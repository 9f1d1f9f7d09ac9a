"""What the rings themselves say about ranks that stand still, or that are gone: the beginning of all evidence."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepscope.agent.drain import RingDrain
from stepscope.agent.gather import Subject
from stepscope.agent.procfs import read_process
from stepscope.agent.progress import Departed, Member, World
from stepscope.agent.threads import Offers
from stepscope.hangs.evidence import LastCollective, RankEvidence
from stepscope.records.collectives import OPS
from stepscope.records.places import SERVER_SUFFIX, error_path
from stepscope.ring import RingHeader, RingState

__all__ = ["Subjects", "departed_of", "last_call"]

LONGEST_MESSAGE = 300
ENDED = (RingState.EXITED, RingState.EXCEPTION)
"""What the ring may say although the process is still there: going down may take seconds."""


class Subjects:
    """Makes them; keeps what GPUs were last seen to do."""

    def __init__(self, meta: dict[str, Any]) -> None:
        launcher = meta.get("launcher")
        self._launcher = launcher.get("pid") if isinstance(launcher, dict) else None
        self._gpus: dict[str | int, float] = {}
        """Utilisation by uuid and by index."""

    def saw_gpus(self, samples: Iterable[dict[str, Any]]) -> None:
        for sample in samples:
            if isinstance(used := sample.get("util_percent"), (int, float)):
                uuid = str(sample.get("uuid", "")).removeprefix("GPU-")  # torch leaves that out
                self._gpus |= dict.fromkeys((uuid, sample.get("index", -1)), float(used))

    def suspended(self) -> bool:
        """Whether the job was stopped together with its launcher, as by Ctrl-Z."""
        reading = read_process(self._launcher) if isinstance(self._launcher, int) else None
        return reading is not None and reading.state in ("T", "t")

    def of(self, world: World, now_s: float) -> list[Subject]:
        living = [self._subject(member, now_s) for member in world.members]
        return [*living, *(Subject(evidence=_evidence_of(one, now_s)) for one in world.departed)]

    def servers(self, members: Iterable[Member]) -> dict[int, Path]:
        """Where the worker servers listen, by rank."""
        return {m.rank: path for m in members if (path := _server(m.drain)) is not None}

    def _subject(self, member: Member, now_s: float) -> Subject:
        drain = member.drain
        header = drain.header = drain.reader.header()
        identity = header.identity
        silent_s = max(now_s - member.moved_s, 0.0)
        if header.live_since_ns:  # we may not have been there when it fell silent
            silent_s = max(silent_s, (time.perf_counter_ns() - header.live_since_ns) / 1e9)
        evidence = RankEvidence(
            rank=identity.rank,
            pid=header.pid,
            ended=_how(drain, oom_killed=False) if header.state in ENDED else "",
            step=header.live_step or None,
            phase=header.phase_names[header.live_phase],
            silent_s=round(silent_s, 1),
            collective=_collective(drain, header),
            groups=header.groups,
            device=identity.device,
            gpu_util_percent=self._gpus.get(
                identity.device_uuid.removeprefix("GPU-"), self._gpus.get(identity.device_index)
            )
            if identity.device != "cpu"
            else None,
        )
        return Subject(
            evidence=evidence,
            pidfd=_copy(drain.pidfd),
            offers=Offers(
                ring=drain.reader.path,
                threads=drain.reader.thread_offer(),
                stacks=drain.reader.stack_offer(),
                running=drain.reader.running_offer(),
                trains=drain.reader.training_thread(),
            ),
            server=_server(drain),
        )


def departed_of(drain: RingDrain, *, at_s: float, oom_killed: bool) -> Departed:
    """Of a rank whose process is gone and whose ring is still open."""
    header = drain.header
    return Departed(
        rank=header.identity.rank,
        pid=header.pid,
        ended=_how(drain, oom_killed=oom_killed),
        in_order=header.state is RingState.EXITED,
        at_s=at_s,
        step=header.live_step or None,
        phase=header.phase_names[header.live_phase],
    )


def last_call(drain: RingDrain) -> dict[str, Any] | None:
    """The collective that a rank called last, for its ``rank_end``; None: it called none that we saw."""
    last = _collective(drain, drain.header)
    if last is None or last.group is None:
        return None
    return {"op": last.op, "group": last.group.name, "bytes": last.bytes}


def _evidence_of(departed: Departed, now_s: float) -> RankEvidence:
    return RankEvidence(
        rank=departed.rank,
        pid=departed.pid,
        alive=False,
        ended=departed.ended,
        step=departed.step,
        phase=departed.phase,
        silent_s=round(now_s - departed.at_s, 1),
    )


def _how(drain: RingDrain, *, oom_killed: bool) -> str:
    """How a rank ended, in words; empty when nothing tells."""
    if drain.header.state is RingState.EXITED:
        return "exited in order"
    if oom_killed:
        return "killed by the kernel, which ran out of memory"
    try:
        error = json.loads(error_path(drain.run_dir, drain.header.pid).read_bytes())
        return f"raised {error['type']}: {error['message']}"[:LONGEST_MESSAGE].rstrip(": \n")
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return ""


def _collective(drain: RingDrain, header: RingHeader) -> LastCollective | None:
    last = drain.reader.last_collective()
    if last is None:
        return None
    return LastCollective(
        op=OPS[last.op] if last.op < len(OPS) else OPS[0],
        group=next((group for group in header.groups if group.slot == last.group), None),
        bytes=last.size_bytes,
        called_s=round(max(0.0, (time.perf_counter_ns() - last.called_ns) / 1e9), 1),
        waiting=last.waiting,
        peer=last.peer,
    )


def _server(drain: RingDrain) -> Path | None:
    return drain.reader.path.with_suffix(SERVER_SUFFIX) if drain.reader.server_offer() else None


def _copy(pidfd: int | None) -> int | None:
    """One that outlives the rank's burial."""
    with suppress(OSError):
        return None if pidfd is None else os.dup(pidfd)
    return None
