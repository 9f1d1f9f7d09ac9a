"""Choices that are known to be slow whatever they cost here, and traces that do not hold all of what happened."""

from __future__ import annotations

import numpy as np

from stepscope.records.finding import Finding
from stepscope.records.units import count_text, ms_text, share_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import View, cost_of

__all__ = ["find_practices", "find_start_up", "find_truncated"]


def find_practices(view: View) -> list[Finding]:
    return [*_data_parallel(view), *_without_nccl(view)]


def _data_parallel(view: View) -> list[Finding]:
    where = np.array([one.host.uses_data_parallel for one in view.analyses], np.bool_)
    if not where.any():
        return []
    return [
        Finding(
            kind="data_parallel",
            severity="warning",
            title=(
                f"The model runs in torch.nn.DataParallel{view.of_whom(where)}: one process copies it to every device "
                "in each step."
            ),
            ranks=view.culprits(where),
            steps=view.span,
            cost=cost_of(view, np.zeros(len(view.ranks), np.int64), where),
            evidence={"ranks": int(where.sum())},
            advice=(
                "DistributedDataParallel (torchrun, one process per device) neither copies the model nor shares a GIL.",
            ),
            confidence=0.9,
        )
    ]


def _without_nccl(view: View) -> list[Finding]:
    backends = [(one.host.ddp_backend or "").lower() for one in view.analyses]
    worlds = [one.meta.world_size or 1 for one in view.analyses]
    where = view.on_device & np.array(
        [
            world > 1 and "gloo" in backend and "nccl" not in backend
            for backend, world in zip(backends, worlds, strict=True)
        ]
    )
    if not where.any():
        return []
    row = int(where.argmax())
    return [
        Finding(
            kind="ddp_without_nccl",
            severity="warning",
            title=f"The ranks compute on GPUs but exchange by {backends[row]}, by way of the host's memory.",
            ranks=view.culprits(where),
            phase="comm",
            steps=view.span,
            cost=cost_of(view, np.zeros(len(view.ranks), np.int64), where),
            evidence={"backend": backends[row], "world_size": worlds[row]},
            advice=('init_process_group("nccl") (or "cpu:gloo,cuda:nccl") sends from device to device.',),
            confidence=0.9,
        )
    ]


def find_start_up(view: View) -> list[Finding]:
    """A trace that is mostly the first call of the runtime says little of how training goes on."""
    longest = [one.host.longest_call or ("", 0) for one in view.analyses]
    shares = view.share(np.array([ns for _, ns in longest], np.int64))
    row = int(shares.argmax())
    if view.stepped or shares[row] <= thresholds.START_UP_SHARE:
        return []
    name, call_ns = longest[row]
    return [
        Finding(
            kind="start_up",
            severity="info",
            title=(
                f"Most of this is start-up: a single call of {name} takes {ms_text(call_ns / 1e6)}, "
                f"{share_text(float(shares[row]))} of the trace, which has no profiler steps."
            ),
            evidence={"call": name, "call_ms": round(call_ns / 1e6, 3), "call_share": round(float(shares[row]), 4)},
            advice=("Trace later steps: schedule(wait=…, warmup=…, active=…), and step() after each.",),
            confidence=view.confidence(),
        )
    ]


def find_truncated(view: View) -> list[Finding]:
    """Of all ranks, also those that have no whole step."""
    cut = [one for one in view.job.ranks if one.meta.truncated]
    if not cut:
        return []
    return [
        Finding(
            kind="truncated_trace",
            severity="info",
            title=(
                f"The trace of rank {cut[0].rank} ends early: {cut[0].meta.truncated}."
                if len(cut) == 1
                else f"The traces of {count_text(len(cut), 'rank')} end early: what came after is not known."
            ),
            ranks=tuple(one.rank for one in cut),
            evidence={"reasons": {str(one.rank): one.meta.truncated for one in cut}},
            advice=("A rank that was killed while it wrote leaves such a file; everything before the cut is used.",),
        )
    ]
