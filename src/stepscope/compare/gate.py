"""Limits on a comparison: pass, regression, or not decidable; and baselines that are kept in a folder by branch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from stepscope.compare.comparison import (
    MEMORY_WORDS,
    compare_inputs,
    differs_in_what_matters,
    interval_text,
    needed_text,
    percent_text,
)
from stepscope.compare.inputs import Input, check_comparable, encode_baseline, read_input
from stepscope.errors import CompareError
from stepscope.records.text import bytes_text, count_text
from stepscope.store import file_io

__all__ = ["EXIT_CODES", "Limits", "alike", "gate_inputs", "record_baseline", "stored_baselines"]

Result = Literal["pass", "regression", "cannot_tell"]
EXIT_CODES: dict[Result, int] = {"pass": 0, "regression": 1, "cannot_tell": 2}
WORDS: dict[Result, str] = {"pass": "Pass", "regression": "Regression", "cannot_tell": "Cannot tell"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """All but the last relative: 0.02 is two percent.  None: not checked."""

    slowdown: float
    memory: float | None = None
    new_findings: bool = True
    """Whether new findings are accepted."""


def gate_inputs(baselines: Sequence[Input], candidate: Input, limits: Limits) -> dict[str, Any]:
    """The document of a comparison with ``gate``: the result, its exit code, and one row per check."""
    document = compare_inputs(baselines, candidate, limit=limits.slowdown)
    checks = list(_checks(document, limits))
    results = [check["result"] for check in checks]
    result: Result = "regression" if "regression" in results else "cannot_tell" if "cannot_tell" in results else "pass"
    decisive = [check["text"] for check in checks if check["result"] == result]
    text = f"{WORDS[result]}: {decisive[0] if result != 'pass' else _passed(document, limits)}"
    document["gate"] = {"result": result, "exit_code": EXIT_CODES[result], "text": text, "checks": checks}
    return document


def _passed(document: dict[str, Any], limits: Limits) -> str:
    limit = percent_text(limits.slowdown, signed=False)
    return f"{document['candidate']['name']} is not more than {limit} slower."


def _checks(document: dict[str, Any], limits: Limits) -> Iterator[dict[str, Any]]:
    yield _slowdown(document, limits.slowdown)
    if limits.memory is not None:
        yield _memory(document, limits.memory)
    if not limits.new_findings:
        yield _findings(document)


def _slowdown(document: dict[str, Any], limit: float) -> dict[str, Any]:
    low, high = document["interval"]
    if document["all_steps"]:
        # Ordinary steps may show a regression; a pass needs all of them.
        high = max(high, document["all_steps"]["interval"][1])
    most = percent_text(limit, signed=False)
    name = document["candidate"]["name"]
    slower = f"{name} is {interval_text([low, high])}; the limit is {most}"
    if not document["like_for_like"]:
        changed = [row["label"] for row in document["context"] if row["matters"]]
        return _check(
            "slowdown", "cannot_tell", limit, f"{' and '.join(changed)} changed, so steps cannot be compared."
        )
    if high <= limit:
        return _check("slowdown", "pass", limit, f"{slower}.")
    if low > limit:
        return _check("slowdown", "regression", limit, f"{slower}.")
    return _check("slowdown", "cannot_tell", limit, f"{slower}. {needed_text(document)}".strip())


def _memory(document: dict[str, Any], limit: float) -> dict[str, Any]:
    name, row = next(iter(document["memory"].items()), (None, None))
    if name is None or row is None:
        return _check("memory", "cannot_tell", limit, "the peak memory of these runs is not known.")
    most = percent_text(limit, signed=False)
    sizes = f"{bytes_text(row['before'])} → {bytes_text(row['after'])} ({percent_text(row['change'])})"
    result: Result = "pass" if row["change"] <= limit else "regression"
    return _check("memory", result, limit, f"{MEMORY_WORDS[name]} {sizes}; the limit is {most} more.")


def _findings(document: dict[str, Any]) -> dict[str, Any]:
    found = document["findings"]
    if found is None:
        raise CompareError("--no-new-findings needs runs of Stepscope: numbers of other tools contain no findings")
    if found["new"]:
        text = f"{count_text(len(found['new']), 'new finding')}: {found['new'][0]['title']}"
        return _check("findings", "regression", None, text)
    return _check("findings", "pass", None, "no new findings.")


def _check(name: str, result: Result, limit: float | None, text: str) -> dict[str, Any]:
    return {"name": name, "result": result, "limit": limit, "text": text}


# -- baselines by branch ----------------------------------------------------------------------------------------------
# ``FOLDER/BRANCH/TIME-NAME.json``: small files, so that a CI cache or an artifact can hold them.

NAME_CHARACTERS = 80


def stored_baselines(folder: Path, branch: str, candidate: Input) -> list[Input]:
    """The baselines of a branch, oldest first, without the candidate itself; CompareError if one cannot be read."""
    paths = sorted(_branch_folder(folder, branch).glob("*.json"))
    found = [read_input(path) for path in paths]
    return [one for one in found if (one.name, one.created_wall_ns) != (candidate.name, candidate.created_wall_ns)]


def alike(baselines: Sequence[Input], candidate: Input) -> list[Input]:
    """Those that did the same work on the same kind of machine as the candidate."""
    return [one for one in baselines if not differs_in_what_matters(one, candidate)]


def record_baseline(folder: Path, branch: str, one: Input, *, keep: int) -> Path:
    """Keep a run as a baseline of a branch and remove all but its newest ``keep``; CompareError if that fails."""
    check_comparable([one])
    document = json.dumps(encode_baseline(one), separators=(",", ":"), allow_nan=False)
    into = _branch_folder(folder, branch)
    when = one.created_wall_ns if one.created_wall_ns is not None else time.time_ns()
    path = into / f"{when:020d}-{quote(one.name, safe='')[:NAME_CHARACTERS]}.json"
    try:
        into.mkdir(parents=True, exist_ok=True)
        file_io.write_bytes(path, document.encode())
        for old in sorted(into.glob("*.json"))[:-keep]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise CompareError(f"cannot keep a baseline in {into}: {error.strerror}") from None
    return path


def _branch_folder(folder: Path, branch: str) -> Path:
    """A branch may contain slashes; a folder name may not, and must not leave the folder."""
    return folder / (quote(branch, safe="").replace(".", "%2E") if branch.strip(".") == "" else quote(branch, safe=""))
