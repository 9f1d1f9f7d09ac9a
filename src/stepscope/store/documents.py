"""The JSON documents of a run: run.json, nodes.json, hub.json, summary.json and findings.json.

``run.json``: what was run and how it ended.

The launcher writes it when a run begins and when it ends, ``seal`` after that; each replaces the file as a whole.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from stepscope.errors import NotARun, RunUnwritable
from stepscope.records import run_clock
from stepscope.store import file_io
from stepscope.store.file_io import read_document
from stepscope.store.paths import FINDINGS, HUB, META, NODES, SUMMARY, SUMMARY_TEXT

__all__ = [
    "RUN_SCHEMA",
    "HubFile",
    "NodeInfo",
    "RunStatus",
    "clock_offsets",
    "end_run",
    "load_findings",
    "load_summary",
    "log_names",
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


# -- meta -------------------------------------------------------------------------------------------------------------

RUN_SCHEMA = 1

RunStatus = Literal["finished", "failed", "crashed", "interrupted"]


def read_meta(run_dir: Path) -> dict[str, Any]:
    """The whole of ``run.json``; NotARun when the folder is missing, foreign or damaged."""
    path = run_dir / META
    try:
        text = read_document(path)
    except (FileNotFoundError, NotADirectoryError):
        what = "is no run: it holds no run.json" if run_dir.is_dir() else "does not exist"
        raise NotARun(f"{run_dir} {what}") from None
    except OSError as error:
        raise NotARun(f"{path} cannot be read: {error.strerror}") from error
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError):
        raise NotARun(f"{path} is damaged or cut off: it is not JSON") from None
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
    """Say how the run ended; once said, it stays."""
    meta = read_meta(run_dir)
    if meta.get("end") is None:
        end = {"exit_code": exit_code, "status": status, "wall_ns": wall_ns or run_clock.now_of(meta)}
        write_meta(run_dir, {**meta, "end": end})


# -- nodes ------------------------------------------------------------------------------------------------------------
# ``nodes.json``: the nodes that sent something to a run, how far ahead their clocks are, and what became of them.
#
# The hub writes it, as a whole each time; whoever opens the run reads it.  It stays when the run is sealed.

NODES_SCHEMA = 1
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One sender: a node of the job, or a part of its life if it was started more than once."""

    node: int
    host: str
    spool: str
    """The random name of its own run directory."""
    address: str = ""
    offset_ns: int | None = None
    """What its clock is ahead of the hub's; None: no round trip said."""
    rtt_ns: int | None = None
    """The round trip that told it: half of it is how far off the offset may be."""
    joined_wall_ns: int = 0
    heard_wall_ns: int = 0
    """First and last heard of, by the hub's clock."""
    bye: dict[str, Any] | None = None
    """How its part of the job ended, as it said; None: it never did."""
    frames: int = 0
    rows: int = 0
    bytes: int = 0
    """What was taken of it."""
    duplicates: int = 0
    """Parts that it sent again."""
    refused: int = 0
    """Frames that were not taken."""
    replaced_by: str = ""
    """The spool of another sender that took over its number."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What it said of itself when it joined: command, python, platform."""

    @classmethod
    def from_dict(cls, raw: object) -> NodeInfo:
        """ValueError when a value is off; keys that are not known are passed."""
        if not isinstance(raw, dict):
            raise ValueError("a node is a JSON object")  # noqa: TRY004  # like every other fault of the bytes
        known: dict[str, Any] = {}
        for own in fields(cls):
            if own.name in raw:
                if not _fits_field(own.type, raw[own.name]):
                    raise ValueError(f"{own.name} of a node is {raw[own.name]!r}")
                known[own.name] = raw[own.name]
        missing = {"node", "host", "spool"} - set(known)
        if missing:
            raise ValueError(f"a node without {', '.join(sorted(missing))}")
        return cls(**known)


def write_nodes(run_dir: Path, nodes: Iterable[NodeInfo], *, refused: Mapping[str, int] | None = None) -> None:
    """``refused``: by reason, what came from nobody we know.  OSError when there is no room."""
    ordered = sorted(nodes, key=lambda one: (one.node, one.joined_wall_ns, one.spool))
    counts = {why: count for why, count in (refused or {}).items() if count}
    value = {"schema": NODES_SCHEMA, "nodes": [asdict(node) for node in ordered], "refused": counts}
    file_io.write_bytes(run_dir / NODES, (json.dumps(value, separators=(",", ":")) + "\n").encode())


def read_nodes(run_dir: Path) -> list[NodeInfo]:
    """By number and time of joining; none where there is no such file.  One that makes no sense is left out."""
    found = []
    listed = _read_nodes_file(run_dir).get("nodes")
    for raw in listed if isinstance(listed, list) else ():
        try:
            found.append(NodeInfo.from_dict(raw))
        except ValueError:
            continue
    return found


def read_refused(run_dir: Path) -> dict[str, int]:
    """By reason, how often somebody unknown was turned away."""
    said = _read_nodes_file(run_dir).get("refused")
    return {str(why): n for why, n in said.items() if _fits_field("int", n)} if isinstance(said, dict) else {}


def clock_offsets(nodes: Iterable[NodeInfo]) -> dict[str, int]:
    """What the clocks of other nodes are ahead, by spool; those that are not known to be are left out."""
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


# -- hub file ---------------------------------------------------------------------------------------------------------
# ``hub.json``: where a run's hub listens, and the token to ask it with.  Readable by its owner only.
#
# The launcher writes it before the hub is started, so that a hub that is started again keeps port and token; it is
# removed when the hub is gone for good.  Standard library only.

HUB_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class HubFile:
    url: str
    """``http://127.0.0.1:43211`` or ``https://…``."""
    token: str
    """For readers: the page, the terminal view, tools; an agent gets its own when it joins."""
    fingerprint: str = ""
    """SHA-256 of the certificate, hexadecimal; empty without TLS."""


def write_hub_file(run_dir: Path, hub: HubFile) -> None:
    """OSError when the disk refuses."""
    path = run_dir / HUB
    beside = path.with_name(f".{HUB}.{secrets.token_hex(4)}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump({"schema": HUB_SCHEMA, **asdict(hub)}, file)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read_hub_file(run_dir: Path) -> HubFile | None:
    """None: there is no hub, or nothing that says where."""
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
    """Whether it was there or not, or cannot be removed."""
    with suppress(OSError):
        (run_dir / HUB).unlink()


# -- results ----------------------------------------------------------------------------------------------------------
# What was concluded from a run: ``summary.json``, ``summary.txt``, ``findings.json``, each written as a whole.

RESULTS_SCHEMA = 1


def save_summary(run_dir: Path, summary: Mapping[str, Any], text: str) -> None:
    """The summary in both its forms, and its findings once more on their own."""
    try:
        save_findings(run_dir, summary.get("findings", []))
        file_io.write_bytes(run_dir / SUMMARY_TEXT, (text.rstrip("\n") + "\n").encode(errors="replace"))
        file_io.write_json(run_dir / SUMMARY, dict(summary))
    except OSError as error:
        raise RunUnwritable(f"cannot write the summary to {run_dir}: {error.strerror}") from error


def save_findings(run_dir: Path, findings: Sequence[Mapping[str, Any]]) -> None:
    """While the run goes on the watchdog's, then all of them.  OSError when there is no room."""
    file_io.write_json(run_dir / FINDINGS, {"schema": RESULTS_SCHEMA, "findings": list(findings)})


def load_summary(run_dir: Path) -> dict[str, Any] | None:
    """``summary.json``; None when there is none yet or it cannot be read (it can be made again)."""
    return _load_object(run_dir / SUMMARY)


def load_findings(run_dir: Path) -> list[dict[str, Any]]:
    """Those of ``findings.json``; none when it is not there or cannot be read."""
    said = (_load_object(run_dir / FINDINGS) or {}).get("findings")
    return [finding for finding in said if isinstance(finding, dict)] if isinstance(said, list) else []


def log_names(run_dir: Path) -> list[str]:
    """What the ranks printed, as paths inside the run."""
    return sorted((str(path.relative_to(run_dir)) for path in (run_dir / "logs").glob("*.log")), key=_natural)


def _natural(name: str) -> tuple[int, str]:
    return len(name), name


def _load_object(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(read_document(path))
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
