"""The JSON documents of a run: ``run.json``, ``nodes.json``, ``hub.json``, ``summary.json`` and ``findings.json``.

``run.json`` says what was run and how it ended.  The launcher writes it when a run begins and ends; ``seal`` writes it
after that.  Every document is replaced as a whole.

``Destination``, the hub that a node sends to, is here because an agent without a hub loads no code for sending.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepscope.errors import NotARun, RunUnwritable
from stepscope.records import run_clock
from stepscope.store import file_io
from stepscope.store.file_io import read_document
from stepscope.store.paths import FINDING_HISTORY, FINDINGS, HUB, META, NODES, SUMMARY, SUMMARY_TEXT

if TYPE_CHECKING:
    from stepscope.records.finding_history import FindingEpisode

__all__ = [
    "JOINED",
    "RUN_SCHEMA",
    "TEAM_HUB",
    "Destination",
    "HubFile",
    "NodeInfo",
    "RunStatus",
    "awaits_delivery",
    "clock_offsets",
    "end_run",
    "load_findings",
    "load_summary",
    "log_names",
    "note_delivered",
    "read_finding_history",
    "read_hub_file",
    "read_meta",
    "read_nodes",
    "read_refused",
    "remove_hub_file",
    "save_findings",
    "save_summary",
    "write_hub_file",
    "write_meta",
    "write_nodes",
]

# -- run.json ---------------------------------------------------------------------------------------------------------

RUN_SCHEMA = 1

RunStatus = Literal["finished", "failed", "crashed", "interrupted"]


def read_meta(run_dir: Path) -> dict[str, Any]:
    """Read ``run.json``; NotARun if the folder is missing, damaged or not a run."""
    path = run_dir / META
    try:
        text = read_document(path)
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a run: it contains no run.json" if run_dir.is_dir() else "does not exist"
        raise NotARun(f"{run_dir} {what}") from None
    except OSError as error:
        raise NotARun(f"{path} cannot be read: {error.strerror}") from error
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError):
        raise NotARun(f"{path} is damaged or cut off: it is not valid JSON") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("name"), str) or not isinstance(meta.get("schema"), int):
        raise NotARun(f"{path} was not written by Stepscope")
    if meta["schema"] != RUN_SCHEMA:
        raise NotARun(f"{path} has schema {meta['schema']}; this Stepscope reads schema {RUN_SCHEMA}")
    return meta


def write_meta(run_dir: Path, meta: dict[str, Any]) -> None:
    try:
        file_io.write_json(run_dir / META, meta, durable=True)
    except OSError as error:
        raise RunUnwritable(f"cannot write {run_dir / META}: {error.strerror}") from error


def end_run(run_dir: Path, *, exit_code: int | None, status: RunStatus, wall_ns: int | None = None) -> None:
    """Record how the run ended.  The first call wins."""
    meta = read_meta(run_dir)
    if meta.get("end") is None:
        end = {"exit_code": exit_code, "status": status, "wall_ns": wall_ns or run_clock.now_of(meta)}
        write_meta(run_dir, {**meta, "end": end})


# -- nodes.json -------------------------------------------------------------------------------------------------------
# The nodes that sent data to a run, their clock offsets, and how they ended.  The hub writes the file; it remains when
# the run is sealed.

NODES_SCHEMA = 1
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One sender: a node of the job, or one of its launches if it was started more than once."""

    node: int
    host: str
    spool: str
    """The random name of the node's own run directory."""
    address: str = ""
    offset_ns: int | None = None
    """How far its clock is ahead of the hub's; None: no round trip has measured it."""
    rtt_ns: int | None = None
    """The round trip that measured the offset; half of it bounds the error."""
    joined_wall_ns: int = 0
    heard_wall_ns: int = 0
    """When the hub first and last heard from it, by the hub's clock."""
    bye: dict[str, Any] | None = None
    """How its part of the job ended, as it reported; None: it never did."""
    frames: int = 0
    rows: int = 0
    bytes: int = 0
    """What was accepted from it."""
    duplicates: int = 0
    """Parts that it sent more than once."""
    refused: int = 0
    """Frames that were rejected."""
    replaced_by: str = ""
    """The spool of another sender that took over its node number."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What it reported about itself when it joined: command, python, platform."""

    @classmethod
    def from_dict(cls, raw: object) -> NodeInfo:
        """Parse a node; ValueError if a value is invalid.  Unknown keys are ignored."""
        if not isinstance(raw, dict):
            raise ValueError("a node must be a JSON object")  # noqa: TRY004  # like any other invalid input
        known: dict[str, Any] = {}
        for own in fields(cls):
            if own.name in raw:
                if not _fits_field(own.type, raw[own.name]):
                    raise ValueError(f"invalid node: {own.name} cannot be {raw[own.name]!r}")
                known[own.name] = raw[own.name]
        missing = {"node", "host", "spool"} - set(known)
        if missing:
            raise ValueError(f"a node without {', '.join(sorted(missing))}")
        return cls(**known)


def write_nodes(run_dir: Path, nodes: Iterable[NodeInfo], *, refused: Mapping[str, int] | None = None) -> None:
    """Write ``nodes.json``.  ``refused`` counts requests from unknown senders by reason.  OSError if it fails."""
    ordered = sorted(nodes, key=lambda node: (node.node, node.joined_wall_ns, node.spool))
    counts = {why: count for why, count in (refused or {}).items() if count}
    value = {"schema": NODES_SCHEMA, "nodes": [asdict(node) for node in ordered], "refused": counts}
    file_io.write_bytes(run_dir / NODES, (json.dumps(value, separators=(",", ":")) + "\n").encode())


def read_nodes(run_dir: Path) -> list[NodeInfo]:
    """Return the nodes by number and join time; empty without the file.  Invalid entries are skipped."""
    found = []
    listed = _read_nodes_file(run_dir).get("nodes")
    for raw in listed if isinstance(listed, list) else ():
        try:
            found.append(NodeInfo.from_dict(raw))
        except ValueError:
            continue
    return found


def read_refused(run_dir: Path) -> dict[str, int]:
    """Return how many requests from unknown senders were refused, by reason."""
    refused = _read_nodes_file(run_dir).get("refused")
    return {str(why): n for why, n in refused.items() if _fits_field("int", n)} if isinstance(refused, dict) else {}


def clock_offsets(nodes: Iterable[NodeInfo]) -> dict[str, int]:
    """Return how far the clocks of other nodes are ahead, by spool; nodes without a known offset are left out."""
    return {node.spool: node.offset_ns for node in nodes if node.offset_ns}


def _read_nodes_file(run_dir: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_document(run_dir / NODES))
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) and raw.get("schema") == NODES_SCHEMA else {}


def _fits_field(kind: Any, value: object) -> bool:
    if kind in ("int", "int | None"):
        return (type(value) is int and abs(value) <= _LARGEST) or (value is None and kind != "int")
    if kind == "str":
        return isinstance(value, str)
    return isinstance(value, dict) or (value is None and "None" in str(kind))


# -- hub.json ---------------------------------------------------------------------------------------------------------
# The address of a run's hub and the token for reading from it; readable by its owner only.  The launcher writes it
# before it starts the hub, so that a restarted hub keeps its port and token.  It is removed when the hub is gone for
# good.  Standard library only.

HUB_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class HubFile:
    url: str
    """``http://127.0.0.1:43211`` or ``https://…``."""
    token: str
    """For readers: the page, the terminal view, tools.  An agent gets a different token when it joins."""
    fingerprint: str = ""
    """SHA-256 of the certificate in hexadecimal; empty without TLS."""


def write_hub_file(run_dir: Path, hub: HubFile) -> None:
    """Write ``hub.json``; OSError if the disk refuses."""
    path = run_dir / HUB
    temporary = path.with_name(f".{HUB}.{os.urandom(4).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump({"schema": HUB_SCHEMA, **asdict(hub)}, file)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_hub_file(run_dir: Path) -> HubFile | None:
    """Read ``hub.json``; None if it is missing or invalid."""
    try:
        raw = json.loads(read_document(run_dir / HUB))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or raw.get("schema") != HUB_SCHEMA:
        return None
    values = {name: raw.get(name) for name in ("url", "token", "fingerprint")}
    if not all(isinstance(value, str) for value in values.values()):
        return None
    return HubFile(**{name: str(value) for name, value in values.items()})


def remove_hub_file(run_dir: Path) -> None:
    """Remove ``hub.json`` if it exists; a failure is ignored."""
    with suppress(OSError):
        (run_dir / HUB).unlink()


# -- results ----------------------------------------------------------------------------------------------------------
# The conclusions drawn from a run, each file written as a whole.

RESULTS_SCHEMA = 1


def save_summary(run_dir: Path, summary: Mapping[str, Any], text: str) -> None:
    """Write the summary as JSON and as text, and its findings as a separate file."""
    try:
        save_findings(run_dir, summary.get("findings", []))
        file_io.write_bytes(run_dir / SUMMARY_TEXT, (text.rstrip("\n") + "\n").encode(errors="replace"))
        file_io.write_json(run_dir / SUMMARY, dict(summary))
    except OSError as error:
        raise RunUnwritable(f"cannot write the summary to {run_dir}: {error.strerror}") from error


def save_findings(run_dir: Path, findings: Sequence[Mapping[str, Any]]) -> None:
    """Write ``findings.json``: the watchdog's findings while the run is active, then all.  OSError if it fails."""
    file_io.write_json(run_dir / FINDINGS, {"schema": RESULTS_SCHEMA, "findings": list(findings)})


def load_summary(run_dir: Path) -> dict[str, Any] | None:
    """Read ``summary.json``; None if it does not exist or cannot be read (it can be made again)."""
    from stepscope.records.finding import with_current_kinds  # the launcher loads this module, and needs no findings

    summary = _load_object(run_dir / SUMMARY)
    return None if summary is None else with_current_kinds(summary)


def load_findings(run_dir: Path) -> list[dict[str, Any]]:
    """Read ``findings.json``; empty if it does not exist or cannot be read."""
    from stepscope.records.finding import with_current_kinds

    findings = with_current_kinds(_load_object(run_dir / FINDINGS) or {}).get("findings")
    return [finding for finding in findings if isinstance(finding, dict)] if isinstance(findings, list) else []


def read_finding_history(run_dir: Path) -> tuple[FindingEpisode, ...]:
    """Read ``finding-history.jsonl``: all changes in order; empty if it does not exist or cannot be read."""
    from stepscope.records.finding_history import changes_of

    try:
        lines, _ = file_io.read_jsonl(run_dir / FINDING_HISTORY)
    except OSError:
        return ()
    return changes_of(lines)


def log_names(run_dir: Path) -> list[str]:
    """Return the ranks' output files as paths inside the run."""
    return sorted((str(path.relative_to(run_dir)) for path in (run_dir / "logs").glob("*.log")), key=_natural)


def _natural(name: str) -> tuple[int, str]:
    return len(name), name


def _load_object(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(read_document(path))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


# -- destination ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A hub and this node's identity there; stored as ``hub`` in the ``run.json`` of a spool."""

    url: str
    run: str
    """The requested name."""
    node: int
    nnodes: int

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], key: str = "hub") -> Destination | None:
        """Read the entry; return None if it is missing or invalid.  ``TEAM_HUB``: where a copy of a run is sent."""
        hub = meta.get(key)
        if not isinstance(hub, dict):
            return None
        url, run, node, nnodes = (hub.get(name) for name in ("url", "run", "node", "nnodes"))
        if not (isinstance(url, str) and isinstance(run, str) and type(node) is int and type(nnodes) is int):
            return None
        return cls(url=url, run=run, node=node, nnodes=nnodes)


JOINED = "joined"
"""In ``run.json`` of a run that joined the hub of a team by itself: true."""
TEAM_HUB = "team_hub"
"""In ``run.json`` of a run on one node, until the team's hub has all of it: its destination there."""


def awaits_delivery(meta: Mapping[str, Any]) -> bool:
    """Whether a hub may not have all data of a run directory yet, so that its files must stay as they are."""
    return isinstance(meta.get("hub"), dict) or isinstance(meta.get(TEAM_HUB), dict)


def note_delivered(run_dir: Path) -> None:
    """Record that the team's hub has all of a run, which may be sealed from now on."""
    meta = dict(read_meta(run_dir))
    if meta.pop(TEAM_HUB, None) is not None:
        write_meta(run_dir, meta)
