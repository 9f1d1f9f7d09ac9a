"""Runs with an incident, written by hand as the hub, the agent and the ranks write them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fakes.cluster import ANCHOR_WALL_NS, Cluster, Death, slow_at
from fakes.samples import with_samples

from stepscope.alerts.incident_file import append_incident
from stepscope.alerts.model import Incident, Message
from stepscope.alerts.outbox import Delivery, SentLog, append_messages
from stepscope.incidents.document import Incidents, incidents_in
from stepscope.records.finding_history import FindingEpisode, episode_line
from stepscope.records.hang import Culprit, Frame, HangRecord, StackGroup, ThreadStack
from stepscope.records.series import RankError, RunData
from stepscope.reports import summarize
from stepscope.store.file_io import append_jsonl, write_json
from stepscope.store.paths import FINDING_HISTORY, META, SUMMARY

S = 10**9
COMMAND = ["torchrun", "--nproc-per-node", "4", "train.py", "--steps", "600"]
AUTHOR = {
    **{
        f"GIT_{who}_{what}": text
        for who in ("AUTHOR", "COMMITTER")
        for what, text in (("NAME", "Ada"), ("EMAIL", "a@b.c"))
    },
    **{f"GIT_{who}_DATE": "2026-01-02T03:04:05Z" for who in ("AUTHOR", "COMMITTER")},
}


def git(folder: Path, *words: str, stdin: str | None = None) -> str:
    """Run git with a fixed author and date: hashes are always the same."""
    environment = {**os.environ, **AUTHOR, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", *words], cwd=folder, env=environment, check=True, capture_output=True, text=True, input=stdin
    )
    return done.stdout.strip()


def commit(folder: Path, message: str, **files: str) -> str:
    """Write ``NAME=text`` into ``NAME.py`` and commit; return the hash."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


@dataclass(frozen=True, kw_only=True, repr=False)
class Made:
    """A folder of runs: ``good``, then the run with the incident."""

    runs: Path
    run_dir: Path
    run: RunData
    repository: Path

    def __repr__(self) -> str:
        return f"Made({self.run.name})"

    def incidents(self) -> Incidents:
        return incidents_in(self.run_dir, self.run, summarize(self.run), over=True)


def _meta(name: str, created_ns: int, **more: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": name,
        "command": COMMAND,
        "created_wall_ns": created_ns,
        "host": "node0",
        "python": "3.11.9",
        "sealed": True,
        **more,
    }


def _write_run(folder: Path, run: RunData) -> None:
    folder.mkdir(parents=True)
    (folder / "logs").mkdir()
    write_json(folder / META, run.meta)
    write_json(folder / SUMMARY, summarize(run))


def make_runs(tmp_path: Path, run: RunData, name: str) -> Made:
    """Write a healthy run of yesterday and this one, started from two commits of a repository."""
    repository = tmp_path / "job"
    repository.mkdir()
    git(repository, "init", "-q", "-b", "main")
    before = commit(repository, "Train a model", train="print(1)\n", data="x = 1\n")
    commit(repository, "Cache the data | and <more>", data="x = 1\ncache = {}\n")
    after = commit(repository, "Raise the learning rate", train="print(2)\n")
    end = {"exit_code": 0, "status": "finished", "wall_ns": ANCHOR_WALL_NS - 80_000 * S}
    healthy = Cluster(ranks=4, steps=120).run()
    earlier = _meta("good", ANCHOR_WALL_NS - 86_400 * S, cwd=str(repository), end=end)
    earlier |= {"git": {"commit": before, "branch": "main", "dirty": False}, "environment": {"NCCL_DEBUG": "WARN"}}
    runs = tmp_path / "runs"
    _write_run(runs / "good", replace(healthy, name="good", path="", meta=earlier))
    meta = _meta(
        name, ANCHOR_WALL_NS - S, cwd=str(repository), **{key: run.meta[key] for key in ("end",) if key in run.meta}
    )
    meta |= {"git": {"commit": after, "branch": "main", "dirty": False}}
    meta["environment"] = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0"}
    run = replace(run, name=name, path="", meta=meta)
    _write_run(runs / name, run)
    return Made(runs=runs, run_dir=runs / name, run=run, repository=repository)


def write_log(made: Made, rank: int, text: str) -> None:
    (made.run_dir / "logs" / f"rank-{rank}.log").write_text(text)


def slow_rank(tmp_path: Path) -> Made:
    """Rank 2 is 30 ms slower in forward from step 300 on until step 500; found, sent, acknowledged, over."""
    cluster = Cluster(ranks=4, steps=600, faults=(slow_at(2, "forward", 30.0, range(300, 500)),))
    logged = 24 * 20

    def sizes(which: int, seconds: Any) -> list[int]:
        return [min(int(second * 20) * 20, 6000) for second in seconds]

    run = with_samples(
        cluster,
        host={"cpu_percent": lambda which, seconds: [30.0 if second < 12.5 else 88.0 for second in seconds]},
        process={"log_bytes": sizes},
    )
    onset_ns = ANCHOR_WALL_NS + 12 * S
    made = make_runs(tmp_path, _ended(run, "finished", 0), "slow")
    finding = next(row for row in summarize(run)["findings"] if row["kind"].endswith("straggler"))
    opened = FindingEpisode(
        number=1, change="opened", finding=finding, attempt=0, first_step=310, first_wall_ns=onset_ns + S, step=310,
        wall_ns=onset_ns + S,
    )  # fmt: skip
    resolved = replace(opened, change="resolved", step=520, wall_ns=onset_ns + 16 * S)
    append_jsonl(made.run_dir / FINDING_HISTORY, map(episode_line, (opened, resolved)))
    incident = Incident(
        number=1, topic="speed", state="open", kind=finding["kind"], severity=finding["severity"],
        title=finding["title"],
        rules=("findings",), receivers=("slack",), ranks=(2,), phase="forward", hosts=("node0",), line="model.py:41",
        since_step=300, since_wall_ns=onset_ns, opened_wall_ns=onset_ns + 2 * S, changed_wall_ns=onset_ns + 2 * S,
        cost=finding["cost"], advice=tuple(finding["advice"]), findings=(1,), messages=1, notified=("slack",),
    )  # fmt: skip
    taken = replace(incident, state="acknowledged", acknowledged_by="ada", changed_wall_ns=onset_ns + 6 * S)
    over = replace(
        taken, state="resolved", changed_wall_ns=onset_ns + 17 * S, resolved_wall_ns=onset_ns + 17 * S,
        resolved_step=522, resolved_why="it recovered", messages=2,
    )  # fmt: skip
    for number, (state, status) in enumerate(((incident, "firing"), (over, "resolved")), 1):
        message = Message(
            id=f"1/1/{number}/slack", receiver="slack", status=status, run="slow", dedup_key="1/1",
            created_wall_ns=state.changed_wall_ns, incident=state,
        )  # fmt: skip
        append_messages(made.run_dir, [message])
        sent = Delivery(id=message.id, state="sent", tries=number, wall_ns=state.changed_wall_ns + S // 2)
        SentLog(made.run_dir).append(sent)
    for state in (incident, taken, over):
        append_incident(made.run_dir, state)
    lines = [f"step {step:<4} loss {1 / (1 + step):.4f}\n"[:20].ljust(19) + "\n" for step in range(300)]
    lines[logged // 20 + 2] = "api_key=hunter2hunter2 retry\n"
    write_log(made, 2, "".join(lines))
    return made


def hang(tmp_path: Path) -> Made:
    """Rank 1 sleeps in step 60 and never calls the all-reduce; the run is ended by hand.  Recorded without a hub."""
    run = Cluster(ranks=4, steps=60).run()
    stopped_ns = ANCHOR_WALL_NS + 5 * S
    frame = Frame(file="/job/train.py", line=27, function="train")
    record = HangRecord(
        number=1, host="node0", kind="hang_missing_collective",
        title="Rank 1 never called all_reduce number 61 of default_pg: it sleeps at train.py:27.",
        declared_wall_ns=stopped_ns + 12 * S, stopped_wall_ns=stopped_ns, threshold_s=10.0, step_s=0.04,
        culprits=(Culprit(rank=1, reason="has not called all_reduce; it sleeps at train.py:27", at=frame),),
        victims=(0, 2, 3), evidence=("Rank 1 has been silent for 10 s and uses 1% of a core.",),
        stacks=(
            StackGroup(ranks=(1,), threads=(ThreadStack(main=True, frames=(frame,)),)),
            StackGroup(ranks=(0, 2, 3), threads=(ThreadStack(main=True, frames=(replace(frame, line=31),)),)),
        ),
        over="ended", over_wall_ns=stopped_ns + 40 * S,
    )  # fmt: skip
    made = make_runs(tmp_path, _ended(replace(run, hangs=(record,)), "interrupted", 130), "hang")
    write_log(made, 1, "".join(f"step {step}\n" for step in range(60)) + "waiting for the lock\n")
    return made


def crash(tmp_path: Path) -> Made:
    """Rank 3 raises in step 40; its log ends with the traceback, which contains a token."""
    traceback = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in <module>\nValueError: bad shard'
    error = RankError(rank=3, pid=1003, type="ValueError", message="bad shard", traceback=traceback,
                      wall_ns=ANCHOR_WALL_NS + 3 * S, step=40)  # fmt: skip
    run = Cluster(ranks=4, steps=60, deaths=(Death(rank=3, step=40, state="exception"),), errors=(error,)).run()
    made = make_runs(tmp_path, _ended(run, "failed", 1), "crash")
    write_log(made, 3, "reading shard 17\n" + traceback + "\n")
    return made


def _ended(run: RunData, status: str, code: int) -> RunData:
    end = {"exit_code": code, "status": status, "wall_ns": ANCHOR_WALL_NS + 60 * S}
    return replace(run, meta={**run.meta, "end": end})


def as_text(document: Any) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
