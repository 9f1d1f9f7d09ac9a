"""Results of earlier checks: of this node in a private file, of other nodes in a folder that they share.

    $XDG_STATE_HOME/stepscope/probe/HOST.jsonl    the last checks of this user on a host (the folder may be shared)
    $XDG_STATE_HOME/stepscope/probe.jsonl         those of all hosts, as once written: read until the host has its file
    FOLDER/HOST.json                              the newest result of each node

Everything that is read is bounded, and what is not one of our results is skipped: a shared folder may hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError
from stepscope.records.files import private_folder, replaced, write_private
from stepscope.records.text import host_in_name
from stepscope.store.file_io import read_document
from stepscope.store.user_runs import state_path

__all__ = ["append_past", "publish", "read_past", "read_peers", "read_results"]

PAST = "probe"
OLD_PAST = "probe.jsonl"
JUDGED = ("version", "host", "kind", "wall_s", "state", "figures")
"""What is kept of a past result: what ``judge`` reads, and when it was."""
MOST_PAST = 200
MOST_PEERS = 4096
MOST_BYTES = 1 << 20
VERSION = 1


def read_past(environ: Mapping[str, str], host: str) -> list[dict[str, Any]]:
    """Return the results of earlier checks of a host, the oldest first."""
    path = _past_path(environ, host)
    if path.exists():
        return _lines_of(path, MOST_BYTES)
    # Its last line may have made that file larger than it was allowed to be.
    return [result for result in _lines_of(state_path(environ) / OLD_PAST, 2 * MOST_BYTES) if result["host"] == host]


def append_past(result: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Add a result, and drop the oldest ones; OSError if they cannot be written.

    Of two checks at the same moment one may be lost.
    """
    path = _past_path(environ, str(result["host"]))
    private_folder(path.parent)
    newest: list[str] = []
    size = 0
    for each in [result, *reversed(read_past(environ, str(result["host"])))][:MOST_PAST]:
        line = json.dumps({name: each[name] for name in JUDGED if name in each}) + "\n"
        size += len(line)
        if size > MOST_BYTES:
            break
        newest.append(line)
    write_private(path, "".join(reversed(newest)))


def _past_path(environ: Mapping[str, str], host: str) -> Path:
    return state_path(environ) / PAST / f"{host_in_name(host)}.jsonl"


def read_peers(folder: Path, own: str) -> list[dict[str, Any]]:
    """Return the newest result of each other node in a folder; UsageError if it cannot be read."""
    try:
        names = sorted(folder.glob("*.json"))[:MOST_PEERS]
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from error
    found = [result for path in names for result in _results_in(path)]
    return [result for result in found if result["host"] != own]


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file (what ``--json`` printed, or several); UsageError if it has none."""
    found = _results_in(path)
    if not found:
        raise UsageError(f"{path} holds no result of `stepscope probe --json`")
    return found


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write the result for other nodes; UsageError if the folder cannot be written."""
    path = folder / f"{host_in_name(str(result['host']))}.json"
    try:
        with replaced(path) as new:
            new.write_text(json.dumps(dict(result)) + "\n")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error


def _lines_of(path: Path, most: int) -> list[dict[str, Any]]:
    try:
        lines = read_document(path, most=most).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return []
    return [result for line in lines if (result := _result(line)) is not None]


def _results_in(path: Path) -> list[dict[str, Any]]:
    try:
        text = read_document(path, most=MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return []
    whole = _result(text)
    return [whole] if whole else [result for line in text.splitlines() if (result := _result(line)) is not None]


def _result(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        return None
    figures = found.get("figures")
    if (
        not isinstance(figures, dict)
        or not isinstance(found.get("host"), str)
        or not isinstance(found.get("kind"), str)
    ):
        return None
    numbers = {name: value for name, value in figures.items() if type(value) in (int, float) and 0 < value < 1e12}
    return {**found, "figures": numbers}
