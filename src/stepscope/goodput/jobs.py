"""Several runs of one job: started again by hand, by a script, or requeued by Slurm.

Consecutive runs of the same command in the same folder are one job until one of them finishes.  A run that began while
the one before it was still active is another job.  Steps that a later run of the job made again are lost, as between
the attempts of a run; the time between two runs belongs to none of them and is listed apart.

Everything here works on documents (``Ledger.to_dict``), so that finished runs need not be read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stepscope.goodput.ledger import PARTS, Resumption, lost_steps, rounded

__all__ = ["JobRun", "job_document", "jobs_of"]


@dataclass(frozen=True, kw_only=True)
class JobRun:
    name: str
    job: tuple[str, ...]
    """What is equal in all runs of a job: folder and command."""
    created_wall_ns: int
    status: str
    ledger: Mapping[str, Any]


def jobs_of(runs: Sequence[JobRun]) -> list[list[JobRun]]:
    """The runs by job, each in order of time; the job with the newest run last."""
    jobs: list[list[JobRun]] = []
    open_jobs: dict[tuple[str, ...], list[JobRun]] = {}
    for run in sorted(runs, key=lambda run: run.created_wall_ns):
        job = open_jobs.get(run.job)
        if job is None or job[-1].status == "finished" or _ended_ns(job[-1]) > run.created_wall_ns:
            job = open_jobs[run.job] = []
            jobs.append(job)
        job.append(run)
    return sorted(jobs, key=lambda job: job[-1].created_wall_ns)


def _ended_ns(run: JobRun) -> int:
    return run.created_wall_ns + round(float(run.ledger["seconds"]) * 1e9)


def job_document(job: Sequence[JobRun]) -> dict[str, Any]:
    """The ledger of a job: the sum of its runs, with the steps that later runs made again."""
    attempts = [(run, attempt) for run in job for attempt in run.ledger["attempts"]]
    known = [
        Resumption(
            steps=attempt["steps"],
            unsaved=attempt["unsaved_steps"],
            first=attempt["resumed_at"],
            per_step=attempt["count_per_step"],
        )
        for _, attempt in attempts
    ]
    parts = {part: sum(run.ledger["parts"].get(part, 0.0) for run in job) for part in PARTS}
    lost = estimated = 0
    for (_, attempt), (count, by) in zip(attempts, lost_steps(known), strict=True):
        more = count - attempt["lost_steps"]
        trained = attempt["steps"] - attempt["lost_steps"]
        moved = attempt["parts"]["training"] * more / trained if more > 0 and trained > 0 else 0.0
        parts["training"] -= moved
        parts["lost"] += moved
        lost += max(count, attempt["lost_steps"])
        estimated += by in ("checkpoint", "no_checkpoint") and count > 0
    seconds = round(sum(run.ledger["seconds"] for run in job), 3)
    between = [max(after.created_wall_ns - _ended_ns(before), 0) / 1e9 for before, after in pairwise(job)]
    parts = rounded(parts)
    return {
        "runs": [run.name for run in job],
        "status": job[-1].status,
        "seconds": seconds,
        "between_runs_s": round(sum(between), 3),
        "goodput": round(parts["training"] / seconds, 4) if seconds > 0 else None,
        "parts": parts,
        "restarts": len(attempts) - 1 if attempts else 0,
        "lost_steps": lost,
        "estimated": bool(estimated),
    }
