"""Rules about choices that are slow whatever they cost here, and about traces that do not contain everything."""

from __future__ import annotations

import numpy as np

from stepscope.records.finding import Finding
from stepscope.records.text import count_text
from stepscope.traces.rules import thresholds
from stepscope.traces.rules.view import JobView, cost_of, in_ms

__all__ = ["find_practices", "find_start_up", "find_truncated"]


def find_practices(view: JobView) -> list[Finding]:
    return [*_data_parallel(view), *_without_nccl(view)]


def _data_parallel(view: JobView) -> list[Finding]:
    where = np.array([analysis.host.uses_data_parallel for analysis in view.analyses], np.bool_)
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


def _without_nccl(view: JobView) -> list[Finding]:
    backends = [(analysis.host.ddp_backend or "").lower() for analysis in view.analyses]
    worlds = [analysis.meta.world_size or 1 for analysis in view.analyses]
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
            title=f"The ranks compute on GPUs but communicate with {backends[row]}, through host memory.",
            ranks=view.culprits(where),
            phase="comm",
            steps=view.span,
            cost=cost_of(view, np.zeros(len(view.ranks), np.int64), where),
            evidence={"backend": backends[row], "world_size": worlds[row]},
            advice=('init_process_group("nccl") (or "cpu:gloo,cuda:nccl") sends from device to device.',),
            confidence=0.9,
        )
    ]


def find_start_up(view: JobView) -> list[Finding]:
    """Flag a trace that is mostly the first runtime call: it says little about later training."""
    longest = [analysis.host.longest_call or ("", 0) for analysis in view.analyses]
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
                f"Most of this is start-up: a single {name} call takes {view.each_step(call_ns)}, which has no "
                "profiler steps."
            ),
            evidence={"call": name, "call_ms": in_ms(call_ns), "call_share": round(float(shares[row]), 4)},
            advice=("Trace later steps: use schedule(wait=…, warmup=…, active=…) and call step() after each.",),
            confidence=view.confidence(),
        )
    ]


def find_truncated(view: JobView) -> list[Finding]:
    """Report truncated traces of all ranks, including those without a complete step."""
    cut = [analysis for analysis in view.job.ranks if analysis.meta.truncated]
    if not cut:
        return []
    return [
        Finding(
            kind="truncated_trace",
            severity="info",
            title=(
                f"The trace of rank {cut[0].rank} ends early: {cut[0].meta.truncated}."
                if len(cut) == 1
                else f"The traces of {count_text(len(cut), 'rank')} end early: what came after is unknown."
            ),
            ranks=tuple(analysis.rank for analysis in cut),
            evidence={"reasons": {str(analysis.rank): analysis.meta.truncated for analysis in cut}},
            advice=("A rank killed while writing leaves such a file; everything before the cut is used.",),
        )
    ]
