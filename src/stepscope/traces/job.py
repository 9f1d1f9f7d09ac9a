"""The ranks of a job together: what only shows when they are compared, and the findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepscope.records.finding import Finding
from stepscope.traces.findings import find, verdict_of
from stepscope.traces.model.table import Table
from stepscope.traces.path.job_path import JobPath, job_path
from stepscope.traces.rank import RankAnalysis
from stepscope.traces.ranks.clocks import Clocks
from stepscope.traces.ranks.collectives import CollectivesAnalysis, match
from stepscope.traces.ranks.distributed import distributed_table

__all__ = ["JobAnalysis", "analyse_job"]


@dataclass(frozen=True, kw_only=True)
class JobAnalysis:
    ranks: tuple[RankAnalysis, ...]
    """By rank."""
    collectives: CollectivesAnalysis
    distributed: Table
    """The ranks side by side."""
    path: JobPath
    findings: tuple[Finding, ...] = ()
    """The most severe and costly first."""
    verdict: str = ""
    notices: tuple[str, ...] = ()
    """What a reader should know of the files and of how they were compared."""
    mixed: str | None = None
    """Why the files cannot be of one job, and which of them were left out, if so."""

    @property
    def clocks(self) -> Clocks:
        return self.collectives.clocks


def analyse_job(
    analyses: Sequence[RankAnalysis], notices: Sequence[str] = (), *, mixed: str | None = None
) -> JobAnalysis:
    ranks = tuple(sorted(analyses, key=lambda one: one.rank))
    collectives = match(ranks)
    job = JobAnalysis(
        ranks=ranks,
        collectives=collectives,
        distributed=distributed_table(ranks, collectives),
        path=job_path(ranks, collectives),
        notices=(*notices, *collectives.notices),
        mixed=mixed,
    )
    job = replace(job, findings=find(job))
    return replace(job, verdict=verdict_of(job))
