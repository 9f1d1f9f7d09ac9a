"""A simulated cluster: runs of many jobs on many hosts over a time, as the documents that their folders would have.

Each job has its own model: step time, share of input and exchange, work that depends on the place in the job (a
pipeline, rank 0 that logs), noise from host to host and from run to run, and now and then a host that is slow for one
run only.  Hosts are given out in blocks, in the order of their names, so that a place in a job is often on the same
hosts.  Some hosts are slow, some links are slow, and images change at two moments; ``Fleet.truth`` has which.

    year = FleetYear(seed=1)
    for made in year.runs(): ...           # its folder's name, run.json, summary.json and tags
    year.write(folder)                     # the same as folders of runs

Everything follows from the seed; nothing here reads a clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

__all__ = ["BadHost", "BadLink", "FleetYear", "ImageChange", "MadeRun", "write_run"]

BEGIN_NS = 1_735_689_600_000_000_000
"""2025-01-01."""
DAY_NS = 86_400_000_000_000
TEAMS = ("vision", "speech", "language", "ranking", "robots", "")
ONE_OFF = 0.1
"""Share of runs of commands that are run only once."""


@dataclass(frozen=True, kw_only=True)
class BadHost:
    host: int
    slow: float
    """Of its work."""
    phase: str = "forward"
    share: float = 1.0
    """Of its runs in which it is slow."""
    from_day: float = 0.0
    ranks: int = 8
    """How many of its ranks are slow."""
    throttled: bool = False


@dataclass(frozen=True, kw_only=True)
class BadLink:
    hosts: tuple[int, int]
    ratio: float


@dataclass(frozen=True, kw_only=True)
class ImageChange:
    day: float
    image: str
    slower: float
    phase: str = "forward"


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    name: str
    meta: dict[str, Any]
    summary: dict[str, Any]
    tags: tuple[str, ...]


@dataclass(kw_only=True)
class _Job:
    command: list[str]
    user: str
    team: str
    hosts: int
    step_ms: float
    shares: dict[str, float]
    place: Any
    host_noise: float
    run_noise: float
    exchange_noise: float
    transient: float
    weight: float
    own_changes: list[tuple[float, float]]
    """Days on which a commit changes its step time, and by how much."""


@dataclass(frozen=True, kw_only=True)
class FleetYear:
    seed: int = 0
    count: int = 20_000
    days: int = 365
    hosts: int = 200
    ranks_per_host: int = 8
    jobs: int = 40
    own_changes: int = 3
    """How often each job changes for its own reasons."""
    bad_hosts: Sequence[BadHost] = field(
        default=(
            BadHost(host=17, slow=0.08),
            BadHost(host=58, slow=0.03, phase="backward"),
            BadHost(host=91, slow=0.15, share=0.3, ranks=1, throttled=True),
            BadHost(host=133, slow=0.06, phase="input", from_day=200),
            BadHost(host=176, slow=0.05, share=0.6, ranks=1),
        )
    )
    bad_links: Sequence[BadLink] = (
        BadLink(hosts=(40, 42), ratio=2.0),
        BadLink(hosts=(111, 112), ratio=1.5),
        BadLink(hosts=(160, 163), ratio=1.35),
    )
    image_changes: Sequence[ImageChange] = (
        ImageChange(day=121.4, image="train:25.05", slower=0.03),
        ImageChange(day=250.7, image="train:25.09", slower=-0.02, phase="backward"),
    )

    def host_name(self, number: int) -> str:
        return f"gpu-{number:03}"

    def runs(self) -> Iterator[MadeRun]:
        rng = np.random.default_rng(self.seed)
        jobs = [self._job(rng, at) for at in range(self.jobs)]
        weights = np.array([job.weight for job in jobs])
        days = np.sort(rng.uniform(0, self.days, self.count))
        chosen = rng.choice(len(jobs), self.count, p=weights / weights.sum())
        for number, (day, at) in enumerate(zip(days.tolist(), chosen.tolist(), strict=True)):
            job = self._job(rng, self.jobs + number) if rng.random() < ONE_OFF else jobs[at]
            yield self._run(rng, number, day, job)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for made in self.runs():
            write_run(folder, made)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _job(self, rng: Generator, number: int) -> _Job:
        hosts = int(rng.choice([1, 2, 4, 8, 16], p=[0.1, 0.25, 0.3, 0.3, 0.05]))
        hosts = min(hosts, self.hosts)
        place = np.zeros(hosts)
        kind = rng.random()
        if kind < 0.2:  # stages of a pipeline
            place = rng.normal(0, 0.08, hosts)
        elif kind < 0.6:  # the first rank logs and writes checkpoints
            place[0] = rng.uniform(0.01, 0.06)
        script = f"train_{'abcdefghijklmnop'[number % 16]}{'qrstuvwxyz'[number // 16 % 10]}.py"
        words = ["python", script, "--config", f"model-{number}.toml", "--batch-size", str(8 << int(rng.integers(4)))]
        if number >= self.jobs:
            words[3] = f"try-{chr(97 + number % 26)}{chr(97 + number // 26 % 26)}{chr(97 + number // 676 % 26)}.toml"
        return _Job(
            command=words,
            user=f"user{number % 12}",
            team=TEAMS[number % len(TEAMS)],
            hosts=hosts,
            step_ms=float(np.exp(rng.uniform(np.log(80), np.log(2000)))),
            shares={
                "input": float(rng.choice([0.005, 0.02, 0.15], p=[0.5, 0.35, 0.15])),
                "exchange": float(rng.uniform(0.03, 0.2)),
            },
            place=place,
            host_noise=float(np.exp(rng.uniform(np.log(0.002), np.log(0.015)))),
            run_noise=float(np.exp(rng.uniform(np.log(0.003), np.log(0.015)))),
            exchange_noise=float(rng.uniform(0.02, 0.08)),
            transient=float(rng.choice([0.01, 0.05, 0.2], p=[0.6, 0.3, 0.1])),
            weight=float(rng.pareto(1.5) + 0.3),
            own_changes=[
                (float(rng.uniform(0, self.days)), float(rng.normal(0, 0.06))) for _ in range(self.own_changes)
            ],
        )

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _run(self, rng: Generator, number: int, day: float, job: _Job) -> MadeRun:
        first = int(rng.integers(0, self.hosts))
        if rng.random() < 0.6:  # a block of neighbors
            spare = int(rng.integers(0, 3))
            pool = (first + rng.choice(job.hosts + spare, job.hosts, replace=False)) % self.hosts
        else:
            pool = rng.choice(self.hosts, job.hosts, replace=False)
        hosts = np.unique(pool)
        count, each = len(hosts), self.ranks_per_host
        level = job.step_ms * float(np.exp(rng.normal(0, job.run_noise)))
        level *= float(np.prod([1 + size for since, size in job.own_changes if day >= since]))
        extra = {change.phase: 0.0 for change in self.image_changes}
        for change in self.image_changes:
            if day >= change.day:
                extra[change.phase] += change.slower * level
        exchange = job.shares["exchange"] * level * float(np.exp(rng.normal(0, job.exchange_noise)))
        for link in self.bad_links:
            if link.hosts[0] in hosts and link.hosts[1] in hosts:
                exchange *= link.ratio
        base = level * (1 - job.shares["exchange"]) + sum(extra.values())
        work = np.full((count, each), base)
        work *= np.exp(rng.normal(0, job.host_noise, (count, 1)) + rng.normal(0, 0.001, (count, each)))
        work *= 1 + job.place[:count, None]
        phase, slow_host, throttled = "forward", -1, -1
        if count > 1 and rng.random() < job.transient:
            slow_host = int(rng.integers(count))
            work[slow_host] *= 1 + float(rng.exponential(0.08))
        for bad in self.bad_hosts:
            at = np.flatnonzero(hosts == bad.host)
            if len(at) and day >= bad.from_day and rng.random() < bad.share:
                work[int(at[0]), : bad.ranks] *= 1 + bad.slow
                slow_host, phase = int(at[0]), bad.phase
                throttled = int(at[0]) if bad.throttled else throttled
        step = float(work.max()) + exchange
        wait = step - work
        return self._documents(
            rng, number, day, job, hosts, work, wait, step, exchange, extra, phase, slow_host, throttled
        )

    def _documents(
        self,
        rng: Generator,
        number: int,
        day: float,
        job: _Job,
        hosts: Any,
        work: Any,
        wait: Any,
        step: float,
        exchange: float,
        extra: Mapping[str, float],
        phase: str,
        slow_host: int,
        throttled: int,
    ) -> MadeRun:
        count, each = work.shape
        names = [self.host_name(int(host)) for host in hosts]
        world = count * each
        seconds = float(np.exp(rng.normal(np.log(3 * 3600), 1.2)))
        began_ns = BEGIN_NS + int(day * DAY_NS)
        status, parts = self._parts(rng, seconds)
        ranks = [
            {
                "rank": place * each + local,
                "host": names[place],
                "pid": 1000 + local,
                "local_rank": local,
                "state": "exited",
                "device": "cuda",
                "device_name": "NVIDIA H100 80GB HBM3",
                "device_index": local,
                "backend": "nccl",
                "torch": "2.9.1",
                "steps": 1000,
                "last_step": 999,
                "step_ms": round(step, 4),
                "comm_ms": round(float(wait[place, local]), 4),
            }
            for place in range(count)
            for local in range(each)
        ]
        input_ms = job.shares["input"] * step
        own = {"input": input_ms, "forward": 0.35 * job.step_ms, "backward": 0.5 * job.step_ms, "optimizer": 4.0}
        means = {name: took + extra.get(name, 0.0) for name, took in own.items()} | {"comm": float(wait.mean())}
        phases = {
            name: {"share": took / step, "mean_ms": round(took, 4), "device": None} for name, took in means.items()
        }
        findings = self._findings(names, work, step, phase, slow_host, throttled, seconds)
        images = ["train:25.01", *(change.image for change in self.image_changes if day >= change.day)]
        meta: dict[str, Any] = {
            "schema": 1,
            "name": f"run-{number:05}",
            "command": job.command,
            "created_wall_ns": began_ns,
            "host": names[0],
            "user": job.user,
            "python": "3.12.3",
            "platform": "Linux-6.8.0-x86_64-with-glibc2.39",
            "stepscope": "0.4.0",
            "environment": {"STEPSCOPE_IMAGE": images[-1]},
            "driver": "570.86" if day < 180 else "575.51",
            "launcher": None,
            "sealed": True,
            "git": {"commit": f"{sum(day >= since for since, _ in job.own_changes):040x}", "branch": "main"},
            "end": {"exit_code": 0, "status": status, "wall_ns": began_ns + int(seconds * 1e9)},
        }
        summary: dict[str, Any] = {
            "schema": 1,
            "run": {"name": meta["name"], "ended_wall_ns": meta["end"]["wall_ns"], "duration_s": seconds},
            "status": status,
            "status_text": status,
            "status_severity": "info" if status == "finished" else "critical",
            "world_size": world,
            "ranks": ranks,
            "goodput": {"seconds": seconds, "goodput": parts["training"] / seconds, "parts": parts, "attempts": []},
            "steps": {"total": 1000},
            "step_time": {"mean_ms": step, "p50_ms": round(step, 4)},
            "phases": phases,
            "communication": None,
            "clock": "host",
            "host": {"nodes": [], "gpus": self._gpus(names, each, throttled)},
            "verdict": {"kind": findings[0]["kind"], "severity": "info", "title": findings[0]["title"]},
            "findings": findings,
            "attempt_ends": [],
        }
        return MadeRun(name=meta["name"], meta=meta, summary=summary, tags=(job.team,) if job.team else ())

    def _parts(self, rng: Generator, seconds: float) -> tuple[str, dict[str, float]]:
        spent = {
            "start_up": min(float(rng.uniform(30, 300)), seconds / 4),
            "evaluation": seconds * float(rng.uniform(0, 0.05)),
            "checkpoint": seconds * float(rng.uniform(0, 0.04)),
        }
        status = "finished"
        end = rng.random()
        if end < 0.03:
            spent["hang"], status = min(1800.0, seconds / 3), "interrupted"
        elif end < 0.1:
            spent |= {"restart": seconds * 0.05, "lost": seconds * float(rng.uniform(0, 0.1))}
            status = "crashed" if rng.random() < 0.3 else "finished"
        names = (
            *("start_up", "imports", "process_group", "compile", "training", "evaluation", "checkpoint", "stalls"),
            *("hang", "lost", "restart", "shutdown", "unknown"),
        )
        parts = {name: spent.get(name, 0.0) for name in names}
        parts["training"] = seconds - sum(parts.values())
        return status, parts

    def _findings(
        self, names: Sequence[str], work: Any, step: float, phase: str, slow_host: int, throttled: int, seconds: float
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if slow_host >= 0:
            others = np.delete(work.max(axis=1), slow_host)
            excess = float(work[slow_host].max() - np.median(others)) if len(others) else 0.0
            if excess > 0.01 * step:
                rank = slow_host * self.ranks_per_host + int(work[slow_host].argmax())
                found.append(
                    {
                        "kind": "input_straggler" if phase == "input" else "compute_straggler",
                        "severity": "warning",
                        "title": f"Rank {rank} is {excess:.1f} ms slower than its peers in {phase}.",
                        "ranks": [rank],
                        "phase": phase,
                        "cost": {"share": excess / step, "seconds": seconds * excess / step},
                        "evidence": {"excess_share": excess / step, "hosts": [names[slow_host]]},
                        "advice": ["Look at the host: clocks, other processes on its cores."],
                        "confidence": 0.9,
                    }
                )
        if throttled >= 0:
            gpu = {"node": names[throttled], "gpu": 0, "held_back_share": 0.4, "reasons": ["hw_thermal_slowdown"]}
            found.append(
                {
                    "kind": "gpu_throttled",
                    "severity": "warning",
                    "title": "A GPU is throttled.",
                    "evidence": {"gpus": [gpu]},
                }
            )
        return found or [{"kind": "healthy", "severity": "info", "title": "Nothing is wrong.", "evidence": {}}]

    def _gpus(self, names: Sequence[str], each: int, throttled: int) -> list[dict[str, Any]]:
        return [
            {
                "node": name,
                "index": local,
                "uuid": f"GPU-{name}-{local}",
                "name": "NVIDIA H100 80GB HBM3",
                "throttle_reasons": ["hw_thermal_slowdown"] if place == throttled and local == 0 else [],
            }
            for place, name in enumerate(names)
            for local in range(each)
        ]


def write_run(folder: Path, made: MadeRun) -> None:
    run_dir = folder / made.name
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps(made.meta))
    (run_dir / "summary.json").write_text(json.dumps(made.summary))
    if made.tags:
        labels = {"schema": 1, "name": "", "tags": list(made.tags), "note": ""}
        (run_dir / "labels.json").write_text(json.dumps(labels))
