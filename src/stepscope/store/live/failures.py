"""What went wrong in a run: ``errors/``, ``stacks.jsonl``, ``hangs/`` and ``flight/``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from stepscope.hangs.evidence import EXITED_IN_ORDER, EvidenceFile, evidence_from_dict, evidence_to_dict
from stepscope.hangs.multi_host import Elsewhere, GoneRank, SeenHang, SilentHost, join_hangs
from stepscope.records.hang import HangRecord
from stepscope.records.layers import read_memory
from stepscope.records.paths import FLIGHT, HANGS, UNRECORDED
from stepscope.records.series import RankError, RankSeries, Unrecorded
from stepscope.records.text import EVIDENCE, evidence_name, without_colors
from stepscope.store import file_io
from stepscope.store.documents import NodeInfo, clock_offsets
from stepscope.store.file_io import read_document, read_jsonl
from stepscope.store.paths import STACKS, hang_path
from stepscope.wire.frames import FILE_BYTES

__all__ = [
    "RankNumbers",
    "checked_stacks",
    "keep_flights",
    "nccl_dumped",
    "read_errors",
    "read_evidence",
    "read_flights",
    "read_hang_records",
    "read_hangs",
    "read_joined_hangs",
    "read_stacks",
    "read_unrecorded",
    "write_evidence",
    "write_hang",
]


# -- errors -----------------------------------------------------------------------------------------------------------
# ``errors/`` holds what dying processes wrote.  Errors are shown under the rank that the process is shown as.


class RankNumbers:
    """The rank that each process is shown as.  Processes on different hosts may have the same pid."""

    def __init__(self, ranks: Iterable[RankSeries], here: str) -> None:
        """``here`` is the host of processes that do not report one."""
        self._here = here
        self._by_host: dict[tuple[str, int], RankSeries | None] = {}
        self._by_pid: dict[int, RankSeries | None] = {}
        for series in ranks:
            who, pid = (series.identity.host, series.identity.pid), series.identity.pid
            self._by_host[who] = None if who in self._by_host else series
            self._by_pid[pid] = None if pid in self._by_pid else series

    def of(self, pid: int, host: str | None = None) -> int | None:
        """Return the rank; None if the pid is unknown, or two processes had it one after the other."""
        found = self.series(pid, host)
        return None if found is None else found.rank

    def series(self, pid: int, host: str | None = None) -> RankSeries | None:
        """Return the series of that process under the same conditions."""
        who = (host or self._here, pid)
        return self._by_host[who] if who in self._by_host else self._by_pid.get(pid)

    def on(self, host: str) -> Callable[[int], int | None]:
        """Return ``of`` for the pids of one host."""
        return lambda pid: self.of(pid, host)


def read_errors(
    run_dir: Path, numbers: RankNumbers, offsets: Mapping[str, int]
) -> tuple[tuple[RankError, ...], list[str]]:
    """Return the errors in order of time, and a notice for each file that cannot be read.

    ``offsets``: how far the clocks of other nodes are ahead, by spool.
    """
    errors: list[RankError] = []
    notices: list[str] = []
    for file in sorted((run_dir / "errors").glob("*.json")):
        try:
            errors.append(_error_of(json.loads(read_document(file)), numbers, offsets))
        except (OSError, ValueError, RecursionError):
            notices.append(f"errors/{file.name} could not be read.")
    return tuple(sorted(errors, key=lambda error: error.wall_ns)), notices


def _error_of(raw: Any, numbers: RankNumbers, offsets: Mapping[str, int]) -> RankError:
    if not isinstance(raw, dict) or not isinstance(raw.get("pid"), int):
        raise ValueError("not an error record")  # noqa: TRY004  # like any other invalid input
    rank, codes, step, host, wall_ns = (raw.get(key) for key in ("rank", "exit_codes", "step", "host", "wall_ns"))
    if isinstance(rank, int):
        shown = numbers.of(raw["pid"], host if isinstance(host, str) else None)
        rank = rank if shown is None else shown
    wall_ns = wall_ns if isinstance(wall_ns, int) else 0
    return RankError(
        rank=rank if isinstance(rank, int) else None,
        pid=raw["pid"],
        type=str(raw.get("type", "")),
        message=without_colors(str(raw.get("message", ""))),
        traceback=without_colors(str(raw.get("traceback", ""))),
        wall_ns=wall_ns and wall_ns - offsets.get(str(raw.get("spool")), 0),
        step=step if isinstance(step, int) else None,
        script=raw.get("script") is True,
        exit_codes={int(k): int(v) for k, v in codes.items()} if isinstance(codes, dict) else {},
        memory=read_memory(raw.get("memory")),
    )


# -- unrecorded -------------------------------------------------------------------------------------------------------
# ``unrecorded/`` holds what scripts and ranks wrote at their end if nothing was recorded of them.

MAX_UNRECORDED = 64
"""More would not change what the summary says."""


def read_unrecorded(run_dir: Path) -> tuple[Unrecorded, ...]:
    """Return what can be read; these files only explain an empty run."""
    found: list[Unrecorded] = []
    for file in sorted((run_dir / UNRECORDED).glob("*.json"))[:MAX_UNRECORDED]:
        try:
            raw = json.loads(read_document(file))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(raw, dict) and isinstance(raw.get("pid"), int):
            script, torch, hooks = (str(raw.get(key, "")) for key in ("script", "torch", "hooks"))
            found.append(Unrecorded(pid=raw["pid"], script=script, torch=torch, hooks=hooks))
    return tuple(found)


# -- stacks -----------------------------------------------------------------------------------------------------------
# ``stacks.jsonl``: the stacks of ranks that the agent sampled.

_LARGEST = (1 << 63) - 1
_NUMBERS = ("rank", "pid", "wall_ns", "step")


def read_stacks(run_dir: Path, rank_of: Callable[[int], int | None]) -> tuple[tuple[dict[str, Any], ...], int]:
    """Return the stacks in order of time, and the number of invalid lines.

    ``rank_of``: the rank that a pid is shown as, if known.
    """
    records, bad = read_jsonl(run_dir / STACKS)
    stacks, none = checked_stacks(records, rank_of)
    return stacks, bad + none


def checked_stacks(
    records: Iterable[dict[str, Any]], rank_of: Callable[[int], int | None]
) -> tuple[tuple[dict[str, Any], ...], int]:
    """Return the valid stacks among parsed records, and the number of invalid ones."""
    stacks, bad = [], 0
    for record in records:
        stack = _checked(record)
        if stack is None:
            bad += 1
            continue
        shown = rank_of(stack["pid"])
        stacks.append(stack if shown is None else {**stack, "rank": shown})
    return tuple(sorted(stacks, key=lambda stack: stack["wall_ns"])), bad


def _checked(raw: dict[str, Any]) -> dict[str, Any] | None:
    frames = raw.get("frames")
    if not all(_is_count(raw.get(name)) for name in _NUMBERS) or not isinstance(raw.get("phase"), str):
        return None
    if not isinstance(frames, list) or not frames or not all(_is_frame(frame) for frame in frames):
        return None
    plain = [{name: frame[name] for name in ("file", "line", "function")} for frame in frames]
    between = raw.get("between")
    return {
        **{name: raw[name] for name in (*_NUMBERS, "phase")},
        "between": between if isinstance(between, bool) else None,
        **({"worker": True} if raw.get("worker") is True else {}),
        "frames": plain,
    }


def _is_frame(raw: Any) -> bool:
    return (
        isinstance(raw, dict)
        and _is_count(raw.get("line"))
        and isinstance(raw.get("file"), str)
        and isinstance(raw.get("function"), str)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


# -- hangs ------------------------------------------------------------------------------------------------------------
# ``hangs/``: each hang as the watchdog of one host found it, and its evidence.
#
#     hangs/HOST-N.json            the verdict
#     hangs/HOST-N.evidence.json   in jobs with several hosts, the evidence, to be judged together with the others'
#
# Files from other nodes contain the name of their spool (``store/inbox/receiver.py``) and may have been renamed.

EVIDENCE_READ = 256 << 20
"""Limit for all evidence files together."""

T = TypeVar("T")
Sent = tuple[str, T]
"""The spool that a record came in (empty for this node's own), and the record."""


def write_hang(run_dir: Path, record: HangRecord) -> Path:
    """Write a hang, replacing its earlier version; OSError if the disk is full."""
    path = hang_path(run_dir, record.host, record.number)
    path.parent.mkdir(exist_ok=True)
    file_io.write_json(path, record.to_dict())
    return path


def write_evidence(run_dir: Path, evidence: EvidenceFile) -> None:
    """Write the evidence of a hang; evidence too large to send is not kept."""
    raw = json.dumps(evidence_to_dict(evidence), separators=(",", ":")).encode()
    if len(raw) <= FILE_BYTES:
        path = run_dir / HANGS / evidence_name(evidence.evidence.host, evidence.number)
        path.parent.mkdir(exist_ok=True)
        file_io.write_bytes(path, raw)


def read_hangs(
    run_dir: Path, offsets: Mapping[str, int] | None = None
) -> tuple[tuple[HangRecord, ...], tuple[str, ...]]:
    """Return the hangs of all hosts in order of time, and the names of files that cannot be read.

    ``offsets``: how far the clocks of other nodes are ahead, by spool.
    """
    found, bad = read_hang_records(run_dir, offsets)
    return tuple(record for _, record in found), bad


def read_hang_records(
    run_dir: Path, offsets: Mapping[str, int] | None = None
) -> tuple[list[Sent[HangRecord]], tuple[str, ...]]:
    """Like ``read_hangs``, with the spool of each record."""
    paths = [path for path in (run_dir / HANGS).glob("*.json") if EVIDENCE not in path.name]
    sent, bad = _read_sent(paths, HangRecord.from_dict)
    found = [(spool, _shifted(record, (offsets or {}).get(spool, 0))) for spool, record in sent]
    return sorted(found, key=lambda hang: (hang[1].stopped_wall_ns, hang[1].host, hang[1].number)), bad


def read_evidence(
    run_dir: Path, offsets: Mapping[str, int] | None = None
) -> tuple[list[Sent[EvidenceFile]], tuple[str, ...]]:
    """Return the evidence of all hosts, ordered by name, and the names of files that cannot be read."""
    room = EVIDENCE_READ
    paths = []
    for path in sorted((run_dir / HANGS).glob(f"*{EVIDENCE}*json")):
        size = path.stat().st_size
        room -= size
        if size <= 2 * FILE_BYTES and room >= 0:
            paths.append(path)
    sent, bad = _read_sent(paths, evidence_from_dict)
    return [(spool, _shifted_evidence(evidence, (offsets or {}).get(spool, 0))) for spool, evidence in sent], bad


def _read_sent(paths: Sequence[Path], decode: Callable[[Any], T]) -> tuple[list[Sent[T]], tuple[str, ...]]:
    found: list[Sent[T]] = []
    bad: list[str] = []
    for path in sorted(paths):
        try:
            raw = json.loads(read_document(path))
            found.append((str(raw.get("spool", "")), decode(raw)) if isinstance(raw, dict) else ("", decode(raw)))
        except (OSError, ValueError, RecursionError):
            bad.append(f"{HANGS}/{path.name}")
    return found, tuple(bad)


def _shifted(record: HangRecord, offset_ns: int) -> HangRecord:
    if not offset_ns:
        return record
    return replace(
        record,
        declared_wall_ns=record.declared_wall_ns - offset_ns,
        stopped_wall_ns=record.stopped_wall_ns - offset_ns,
        over_wall_ns=None if record.over_wall_ns is None else record.over_wall_ns - offset_ns,
    )


def _shifted_evidence(evidence: EvidenceFile, offset_ns: int) -> EvidenceFile:
    return replace(
        evidence,
        stopped_wall_ns=evidence.stopped_wall_ns - offset_ns,
        gathered_wall_ns=evidence.gathered_wall_ns - offset_ns,
        over_wall_ns=None if evidence.over_wall_ns is None else evidence.over_wall_ns - offset_ns,
    )


# -- joined hangs -----------------------------------------------------------------------------------------------------
# The hangs of a run as they are reported: a hang that several hosts saw is judged as one, on the hub's clock.  In
# addition to the watchdogs' files this uses what the run knows: which ranks are gone, and which nodes the hub stopped
# hearing from (``nodes.json``).

ENDED_WORDS = {"exited": EXITED_IN_ORDER}
LONGEST_MESSAGE = 300

Attempts = Mapping[tuple[str, int], int]
"""By host and pid."""


def read_joined_hangs(
    run_dir: Path,
    ranks: Sequence[RankSeries],
    errors: Sequence[RankError],
    nodes: Sequence[NodeInfo],
) -> tuple[tuple[HangRecord, ...], tuple[str, ...]]:
    """Return the joined hangs in order of time, and the names of files that could not be read."""
    offsets = clock_offsets(nodes)
    records, bad = read_hang_records(run_dir, offsets)
    evidence, worse = read_evidence(run_dir, offsets) if records else ([], ())
    if not evidence:
        return tuple(record for _, record in records), (*bad, *worse)
    attempts = {(series.identity.host, series.identity.pid): series.identity.attempt for series in ranks}
    seen = seen_hangs(records, evidence, attempts)
    return tuple(join_hangs(seen, elsewhere_of(ranks, errors, nodes))), (*bad, *worse)


def seen_hangs(
    records: Iterable[tuple[str, HangRecord]], evidence: Iterable[tuple[str, EvidenceFile]], attempts: Attempts
) -> list[SeenHang]:
    """Pair records with their evidence; evidence without a record is kept.  Both come with their spool."""
    by_name = {(spool, record.host, record.number): record for spool, record in records}
    found = []
    for spool, file in evidence:
        host = file.evidence.host
        of_it = [attempts[host, rank.pid] for rank in file.evidence.ranks if (host, rank.pid) in attempts]
        record = by_name.pop((spool, host, file.number), None)
        found.append(SeenHang(record=record, file=file, attempt=max(of_it, default=0), spool=spool))
    return [*found, *(SeenHang(record=record, spool=spool) for (spool, _, _), record in by_name.items())]


def elsewhere_of(ranks: Sequence[RankSeries], errors: Sequence[RankError], nodes: Iterable[NodeInfo]) -> Elsewhere:
    """Return which ranks are gone, and which hosts fell silent before the end."""
    texts = {error.pid: f"raised {error.type}: {error.message}"[:LONGEST_MESSAGE].rstrip(": ") for error in errors}
    gone = [
        GoneRank(
            rank=series.rank,
            host=series.identity.host,
            pid=series.identity.pid,
            attempt=series.identity.attempt,
            ended=ENDED_WORDS.get(series.state) or texts.get(series.identity.pid, ""),
            ended_wall_ns=series.ended_wall_ns,
            step=int(series.steps["step"][-1]) + 1 if len(series.steps) else None,
        )
        for series in ranks
        if series.ended_wall_ns is not None
    ]
    here: dict[tuple[str, int], list[int]] = {}
    for series in ranks:
        if series.ended_wall_ns is None:
            here.setdefault((series.identity.host, series.identity.attempt), []).append(series.rank)
    heard: dict[str, NodeInfo] = {}
    for node in nodes:
        if node.host not in heard or node.heard_wall_ns > heard[node.host].heard_wall_ns:
            heard[node.host] = node
    silent = [
        SilentHost(host=host, ranks=tuple(sorted(own)), attempt=attempt, heard_wall_ns=heard[host].heard_wall_ns)
        for (host, attempt), own in sorted(here.items())
        if host in heard and heard[host].bye is None
    ]
    return Elsewhere(gone=gone, silent=silent)


# -- flight recorder dumps --------------------------------------------------------------------------------------------
# ``flight/``: the ranks' Flight Recorder dumps and stacks at a hang or failure; ``stepscope flight`` reads them.

OUR_DUMPS = re.compile(r"rank_\d+\.json|stacks_\d+\.txt")
WATCHDOG_DUMPS = re.compile(r"nccl_trace_rank_(\d{1,7})")
"""Dumps that NCCL's watchdog wrote before it ended a process."""
NCCL_DUMPS = "nccl_dumps"
SAME_MOMENT_S = 30.0
MAX_DUMP_BYTES = 64 << 20
"""Limit for all dumps: a second or two of work.  For more, the user runs ``stepscope flight``."""


def keep_flights(run_dir: Path, answers: Mapping[int, bytes], stacks: Mapping[int, str] | None = None) -> None:
    """Write the answers (JSON) and the stacks (as faulthandler wrote them) by rank; OSError if the disk is full.

    They replace earlier files: dumps from different times must not be compared.  What a rank wrote itself when it died
    a moment ago is kept.
    """
    files = {f"rank_{rank}.json": answer for rank, answer in answers.items()}
    files |= {f"stacks_{rank}.txt": text.encode() for rank, text in (stacks or {}).items()}
    if not files:
        return
    folder = run_dir / FLIGHT
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if OUR_DUMPS.fullmatch(path.name) and path.name not in files and _age_s(path) > SAME_MOMENT_S:
            path.unlink(missing_ok=True)
    for name, data in files.items():
        file_io.write_bytes(folder / name, data)


def read_flights(
    run_dir: Path, errors: Mapping[int, str], *, since_ns: int, most_bytes: int = MAX_DUMP_BYTES
) -> tuple[dict[str, Any], list[str]]:
    """Judge the dumps written since ``since_ns``; return the document of ``stepscope flight --json``, and notices.

    ``errors`` are the ranks' tracebacks, which are part of the evidence.  Empty if fewer than two ranks left a dump:
    there is nothing to compare.  ``nccl_dumps`` lists the ranks for which NCCL's watchdog wrote a dump.
    """
    from stepscope.flight.read import read_paths
    from stepscope.hangs.judge import judge_dumps

    folder = run_dir / FLIGHT
    watchdogs = nccl_dumped(run_dir, since_ns=since_ns)
    files = [
        path for path in sorted(folder.glob("*")) if OUR_DUMPS.fullmatch(path.name) and _written_ns(path) >= since_ns
    ]
    ranks = {int(path.stem.removeprefix("rank_")) for path in files if path.suffix == ".json"}
    files = [path for path in files if not (path.suffix == ".json" and int(path.stem[5:]) in watchdogs)]
    files += watchdogs.values()
    if len(ranks | watchdogs.keys()) < 2:
        return {}, []
    if sum(path.stat().st_size for path in files) > most_bytes:
        return {}, [f"{FLIGHT}/ is large and was not analyzed; run stepscope flight {folder}."]
    reading = read_paths(files, jobs=1)
    if not reading.dumps:
        return {}, []
    document = judge_dumps(
        reading.dumps,
        stacks=reading.stacks,
        errors=errors,
        unreadable=reading.unreadable,
        problems=reading.problems,
    )
    return {**document, NCCL_DUMPS: sorted(watchdogs)}, []


def nccl_dumped(run_dir: Path, *, since_ns: int) -> dict[int, Path]:
    """Return the dumps that NCCL's watchdog wrote since ``since_ns``, by rank."""
    found = {}
    for path in sorted((run_dir / FLIGHT).glob("*")):
        name = WATCHDOG_DUMPS.fullmatch(path.name)
        if name and _written_ns(path) >= since_ns:
            found[int(name[1])] = path
    return found


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _age_s(path: Path) -> float:
    return (time.time_ns() - _written_ns(path)) / 1e9
