"""What the catalog has of a run: its rows in four tables, from the documents in its folder.

GPU hours of a run are its duration times its ranks (on CPUs: hours of ranks).  ``run_hours`` splits them by cause:

- The parts outside of training are those of the ledger (``goodput/ledger.py``).
- Within training, the time in which ranks wait for peers or the network is measured.  What the rank that waits least
  waits is the exchange itself; what the others wait beyond that, they wait for a slow rank.  Where it was not measured,
  the price of the findings is taken.
- Work of a failed run since its last checkpoint is lost with the crash, by the price of that finding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.goodput.restart_advice import HARDWARE

__all__ = [
    "CAUSES",
    "FINDING_COLUMNS",
    "GPU_COLUMNS",
    "HOST_COLUMNS",
    "PHASES",
    "RUN_COLUMNS",
    "RunRecord",
    "hours_column",
    "record_of",
    "team_of",
]

CAUSES: Mapping[str, str] = {
    "useful": "useful training",
    "slow_rank": "waiting for a slow rank",
    "input": "waiting for input",
    "exchange": "exchange between ranks",
    "hangs": "hangs",
    "crashes": "crashes and restarts",
    "lost_steps": "steps made twice",
    "start_up": "start-up",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "stalls": "stalls",
    "shutdown": "shutdown",
    "unknown": "not recorded",
}
"""By key; each GPU hour belongs to one of them."""
FROM_LEDGER: Mapping[str, str] = {
    "start_up": "start_up",
    "imports": "start_up",
    "process_group": "start_up",
    "compile": "start_up",
    "training": "useful",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "stalls": "stalls",
    "hang": "hangs",
    "lost": "lost_steps",
    "restart": "crashes",
    "shutdown": "shutdown",
    "unknown": "unknown",
}
"""Cause of each part of the ledger; some of ``useful`` is moved to other causes."""
PHASES = ("input", "h2d", "forward", "backward", "exchange", "optimizer")
"""Of which the catalog has the mean time per step."""
STRAGGLERS = ("input_straggler", "compute_straggler", "h2d_straggler", "straggler", "node_straggler", "between_steps")
"""Findings that name slow ranks."""
MOST_HOSTS = 4096
MOST_FINDINGS = 32
MOST_GPUS = 4096
LONGEST_TEXT = 400
LONGEST_JOB = 120
LARGEST = float(1 << 62)
IMAGE_VARIABLES = (
    *("STEPSCOPE_IMAGE", "SLURM_CONTAINER", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"),
    *("NVIDIA_BUILD_ID", "NVIDIA_PYTORCH_VERSION"),
)
"""Environment variables that name the container image, the most specific first."""

RUN_COLUMNS: Mapping[str, str] = {
    "run": "VARCHAR", "job": "VARCHAR", "series": "VARCHAR", "command": "VARCHAR", "started_wall_ns": "BIGINT",
    "ended_wall_ns": "BIGINT", "status": "VARCHAR", "status_text": "VARCHAR", "verdict": "VARCHAR", "user": "VARCHAR",
    "team": "VARCHAR", "tags": "VARCHAR[]", "host": "VARCHAR", "hosts": "INTEGER", "ranks": "INTEGER",
    "gpu_name": "VARCHAR", "image": "VARCHAR", "driver": "VARCHAR", "file_system": "VARCHAR", "torch": "VARCHAR",
    "python": "VARCHAR", "platform": "VARCHAR", "stepscope": "VARCHAR", "commit": "VARCHAR", "branch": "VARCHAR",
    "steps": "BIGINT", "step_ms": "DOUBLE", **{f"{phase}_ms": "DOUBLE" for phase in PHASES}, "goodput": "DOUBLE",
    "gpu_hours": "DOUBLE", **{f"{cause}_gpu_hours": "DOUBLE" for cause in CAUSES},
}  # fmt: skip
HOST_COLUMNS: Mapping[str, str] = {
    "host": "VARCHAR", "position": "INTEGER", "ranks": "INTEGER", "device": "VARCHAR", "work_ms": "DOUBLE",
    "slowest_rank": "INTEGER", "gpu_uuid": "VARCHAR",
}  # fmt: skip
FINDING_COLUMNS: Mapping[str, str] = {
    "position": "INTEGER", "kind": "VARCHAR", "severity": "VARCHAR", "title": "VARCHAR", "phase": "VARCHAR",
    "hosts": "VARCHAR[]", "cost_share": "DOUBLE", "cost_gpu_hours": "DOUBLE",
}  # fmt: skip
GPU_COLUMNS: Mapping[str, str] = {
    "host": "VARCHAR", "gpu_index": "INTEGER", "gpu_uuid": "VARCHAR", "gpu_name": "VARCHAR", "event": "VARCHAR",
    "throttled_share": "DOUBLE", "reasons": "VARCHAR[]",
}  # fmt: skip

Row = dict[str, Any]
Document = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Rows of the tables ``runs``, ``run_hosts``, ``run_findings`` and ``run_gpus``."""

    run: Row
    hosts: tuple[Row, ...] = ()
    findings: tuple[Row, ...] = ()
    gpus: tuple[Row, ...] = ()


def hours_column(cause: str) -> str:
    return f"{cause}_gpu_hours"


def record_of(run: str, facts: Document, meta: Document, summary: Document) -> RunRecord:
    """The rows of a run.  ``facts``: of its line in a list (``run_facts``); what is missing or invalid is left out."""
    about = _map(summary.get("run"))
    ranks = _rows(summary.get("ranks"))
    phases = _phase_times(summary, ranks)
    findings = _rows(summary.get("findings"))[:MOST_FINDINGS]
    world = max(int(_number(summary.get("world_size")) or 0), len(ranks))
    hours = run_hours(summary, world, phases)
    environment = _map(meta.get("environment"))
    images = (_text(environment.get(name)) for name in IMAGE_VARIABLES)
    started_ns = int(_number(facts.get("created_wall_ns")) or 0)
    ended_ns = _number(about.get("ended_wall_ns"))
    tags = [tag for tag in facts.get("tags") or () if isinstance(tag, str)]
    first = ranks[0] if ranks else {}
    words = [str(word) for word in facts.get("command") or ()]
    step_ms = _number(_map(summary.get("step_time")).get("p50_ms"))
    hosts = _host_rows(summary, ranks, findings, step_ms)
    gpu_name = _text(first.get("device_name")) or _text(first.get("device"))
    row: Row = {
        "run": run,
        "job": job_of(words, world),
        "series": f"{' '.join(words)[:LONGEST_TEXT]} · {world} · {gpu_name}",
        "command": " ".join(words)[:LONGEST_TEXT],
        "started_wall_ns": started_ns,
        "ended_wall_ns": None if ended_ns is None else int(ended_ns),
        "status": _text(facts.get("status")),
        "status_text": _text(facts.get("status_text")),
        "verdict": _text(facts.get("verdict")),
        "user": _text(meta.get("user")) or _text(about.get("user")),
        "team": team_of(tags),
        "tags": tags,
        "host": _text(facts.get("host")),
        "hosts": len(hosts),
        "ranks": world,
        "gpu_name": gpu_name,
        "image": next(filter(None, images), ""),
        "driver": _text(meta.get("driver")),
        "file_system": _text(meta.get("file_system")),
        "torch": _text(first.get("torch")),
        "python": _text(meta.get("python")),
        "platform": _text(meta.get("platform")),
        "stepscope": _text(meta.get("stepscope")),
        "commit": _text(facts.get("commit")),
        "branch": _text(facts.get("branch")),
        "steps": facts.get("steps") if type(facts.get("steps")) is int else None,
        "step_ms": step_ms,
        **{f"{phase}_ms": phases.get(phase) for phase in PHASES},
        "goodput": _number(_map(summary.get("goodput")).get("goodput")),
        "gpu_hours": sum(hours.values()) if hours else None,
        **{hours_column(cause): hours.get(cause) for cause in CAUSES},
    }
    return RunRecord(
        run=row,
        hosts=tuple(hosts),
        findings=tuple(_finding_row(place, finding, world) for place, finding in enumerate(findings)),
        gpus=tuple(_gpu_rows(summary)),
    )


def job_of(command: Sequence[str], world: int) -> str:
    """What runs of one job have in common: the command without its interpreter, folders and numbers, and the ranks."""
    words = [word for word in command if word]
    if words and words[0].rpartition("/")[2].startswith("python"):
        words = words[1:]
    shown = [
        word.rstrip("/").rpartition("/")[2] if "/" in word and not word.startswith("-") else word for word in words
    ]
    text = re.sub(r"\d+", "#", " ".join(shown))
    return f"{text[:LONGEST_JOB] or 'unknown'} · {world} rank{'' if world == 1 else 's'}"


def team_of(tags: Iterable[str]) -> str:
    """The team that a run counts for: its tag ``team:NAME`` or ``team=NAME``, else its first tag."""
    words = list(tags)
    named = [word[5:] for word in words if word.startswith(("team:", "team=")) and len(word) > 5]
    return (named or words or [""])[0]


# -- hours ------------------------------------------------------------------------------------------------------------


def run_hours(summary: Document, world: int, phases: Mapping[str, float]) -> dict[str, float]:
    """GPU hours by cause; they add up to the duration times the ranks.  Empty if the duration is not known."""
    ledger = _map(summary.get("goodput"))
    parts = _map(ledger.get("parts"))
    seconds = {part: max(_number(parts.get(part)) or 0.0, 0.0) for part in FROM_LEDGER}
    total = sum(seconds.values())
    if not 0 < total < LARGEST:
        return {}
    spent = dict.fromkeys(CAUSES, 0.0)
    for part, cause in FROM_LEDGER.items():
        spent[cause] += seconds[part]
    shares = _training_shares(summary, phases)
    training = spent["useful"]
    for cause, share in shares.items():
        moved = min(share * training, spent["useful"])
        spent[cause] += moved
        spent["useful"] -= moved
    crash = sum(_cost(finding, "seconds") for finding in _rows(summary.get("findings")) if _is_crash(finding))
    lost = min(crash, spent["useful"])
    spent["crashes"] += lost
    spent["useful"] -= lost
    return {cause: took * max(world, 1) / 3600 for cause, took in spent.items()}


def _is_crash(finding: Document) -> bool:
    return finding.get("kind") == "rank_crashed" and finding.get("severity") != "info"


def _training_shares(summary: Document, phases: Mapping[str, float]) -> dict[str, float]:
    """Of the training time, what ranks waited for one of them, for input and for the exchange."""
    table = _map(summary.get("phases"))
    comm = _clocked(_map(table.get("comm")), summary)
    step_ms = _number(_map(summary.get("step_time")).get("mean_ms"))
    shares = {"slow_rank": 0.0, "input": _number(_map(table.get("input")).get("share")) or 0.0, "exchange": 0.0}
    mean_ms, exchange_ms = _number(comm.get("mean_ms")), phases.get("exchange")
    if mean_ms is not None and step_ms and exchange_ms is not None:
        shares["exchange"] = min(exchange_ms, mean_ms) / step_ms
        shares["slow_rank"] = max(mean_ms - exchange_ms, 0.0) / step_ms
    else:
        named = [finding for finding in _rows(summary.get("findings")) if finding.get("kind") in STRAGGLERS]
        shares["slow_rank"] = sum(_cost(finding, "share") for finding in named)
    return {cause: min(max(share, 0.0), 1.0) for cause, share in shares.items()}


def _phase_times(summary: Document, ranks: Sequence[Document]) -> dict[str, float]:
    """Mean milliseconds per step; the exchange: what the rank that waits least waits."""
    table = _map(summary.get("phases"))
    found = {name: _number(_clocked(_map(table.get(name)), summary).get("mean_ms")) for name in PHASES}
    exposed = _number(_map(summary.get("communication")).get("exposed_ms"))
    waits = [wait for row in ranks if (wait := _number(row.get("comm_ms"))) is not None]
    found["exchange"] = exposed if exposed is not None else min(waits) if len(waits) > 1 else None
    return {name: took for name, took in found.items() if took is not None}


def _clocked(phase: Document, summary: Document) -> Document:
    device = phase.get("device")
    return device if summary.get("clock") == "device" and isinstance(device, Mapping) else phase


# -- hosts ------------------------------------------------------------------------------------------------------------


def _host_rows(
    summary: Document, ranks: Sequence[Document], findings: Sequence[Document], step_ms: float | None
) -> list[Row]:
    """One row per host in the order of its first rank; ``work_ms``: of its slowest rank, without its waiting."""
    by_host: dict[str, list[Document]] = {}
    for rank in sorted(ranks, key=lambda row: _number(row.get("rank")) or 0):
        if host := _text(rank.get("host")):
            by_host.setdefault(host, []).append(rank)
    uuids = {
        (_text(gpu.get("node")), gpu.get("index")): _text(gpu.get("uuid"))
        for gpu in _rows(_map(summary.get("host")).get("gpus"))
    }
    named = _named_excess(findings) if step_ms else {}
    measured = any(_number(rank.get("comm_ms")) is not None for rank in ranks)
    judged = _map(summary.get("communication")).get("measured") is not None
    rows: list[Row] = []
    for position, (host, own) in enumerate(list(by_host.items())[:MOST_HOSTS]):
        work = [(took, rank) for rank in own if (took := _work_ms(rank)) is not None] if measured else []
        slowest: Document = max(work, key=lambda pair: pair[0])[1] if work else {}
        work_ms: float | None = max(took for took, _ in work) if work else None
        if not measured and step_ms and (named or judged):
            work_ms = step_ms * (1 + named.get(host, 0.0))
        rows.append(
            {
                "host": host,
                "position": position,
                "ranks": len(own),
                "device": _text(own[0].get("device_name")) or _text(own[0].get("device")),
                "work_ms": work_ms,
                "slowest_rank": int(_number(slowest.get("rank")) or 0) if slowest else None,
                "gpu_uuid": uuids.get((host, slowest.get("device_index")), "") or None,
            }
        )
    return rows


def _work_ms(rank: Document) -> float | None:
    step, wait = _number(rank.get("step_ms")), _number(rank.get("comm_ms"))
    return None if step is None or wait is None or step <= wait else step - wait


def _named_excess(findings: Iterable[Document]) -> dict[str, float]:
    """By host, the share of the step by which the findings say that its rank is slow."""
    found: dict[str, float] = {}
    for finding in findings:
        evidence = _map(finding.get("evidence"))
        excess = _number(evidence.get("excess_share"))
        if finding.get("kind") in STRAGGLERS and excess is not None and 0 < excess < 100:
            for host in _hosts_of(finding):
                found[host] = max(found.get(host, 0.0), excess)
    return found


# -- findings and GPUs ------------------------------------------------------------------------------------------------


def _finding_row(position: int, finding: Document, world: int) -> Row:
    cost = _map(finding.get("cost"))
    seconds = _number(cost.get("seconds"))
    return {
        "position": position,
        "kind": _text(finding.get("kind")),
        "severity": _text(finding.get("severity")),
        "title": _text(finding.get("title")),
        "phase": _text(finding.get("phase")) or None,
        "hosts": _hosts_of(finding),
        "cost_share": _number(cost.get("share")),
        "cost_gpu_hours": None if seconds is None else seconds * world / 3600,
    }


def _hosts_of(finding: Document) -> list[str]:
    hosts = _map(finding.get("evidence")).get("hosts")
    return [_text(host) for host in hosts[:MOST_HOSTS] if isinstance(host, str)] if isinstance(hosts, list) else []


def _gpu_rows(summary: Document) -> Iterable[Row]:
    """GPUs that were throttled, as the finding decides it, and failures that name the hardware (ECC, Xid, NVLink)."""
    gpus = _rows(_map(summary.get("host")).get("gpus"))[:MOST_GPUS]
    known = {(_text(gpu.get("node")), gpu.get("index")): gpu for gpu in gpus}
    for finding in _rows(summary.get("findings")):
        if finding.get("kind") != "gpu_throttled":
            continue
        for named in _rows(_map(finding.get("evidence")).get("gpus")):
            index, reasons = named.get("gpu"), named.get("reasons")
            host = _text(named.get("node"))
            gpu = known.get((host, index), {})
            yield {
                "host": host,
                "gpu_index": index if type(index) is int else None,
                "gpu_uuid": _text(gpu.get("uuid")) or None,
                "gpu_name": _text(gpu.get("name")) or None,
                "event": "throttled",
                "throttled_share": _number(named.get("held_back_share")),
                "reasons": [_text(word) for word in reasons] if isinstance(reasons, list) else [],
            }
    for end in _rows(summary.get("attempt_ends")):
        if end.get("cause") == "device_error" and _text(end.get("host")):
            found = HARDWARE.search(f"{end.get('type')} {end.get('message')}")
            yield {
                "host": _text(end.get("host")),
                "event": "hardware_error",
                "reasons": [found[0].lower()] if found else [],
            }


# -- values that may be anything --------------------------------------------------------------------------------------


def _map(value: Any) -> Document:
    return value if isinstance(value, Mapping) else {}


def _rows(value: Any) -> list[Document]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value[:LONGEST_TEXT] if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        return None
    return float(value)


def _cost(finding: Document, key: str) -> float:
    return max(_number(_map(finding.get("cost")).get(key)) or 0.0, 0.0)
