"""The shape of a job as its meta file tells it: a flat list of ``name: value``, in YAML or JSON.

Of YAML only that much is read, on purpose: anything with structure in it is refused by line rather than guessed at.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import TraceError

__all__ = ["JobShape", "read_meta"]

SIZES = ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size")
"""All default to 1, all are counts."""
_LARGEST = 1 << 24
_LARGEST_FILE = 1 << 16
_LINE = re.compile(r"(?P<name>[A-Za-z_][\w-]*)\s*:(?:\s+(?P<value>.*))?")
_STRUCTURED = tuple("[{&*!|>%@`")


@dataclass(frozen=True, kw_only=True)
class JobShape:
    trial_name: str
    dp_size: int
    """Data-parallel ranks."""
    pp_size: int
    """Pipeline stages."""
    tp_size: int
    dsp_size: int
    vpp_size: int
    """Model chunks on each stage (interleaved schedules); 1: none."""


def read_meta(path: Path) -> JobShape:
    """TraceError, in one sentence, when the file is missing, no flat list, or contradicts itself."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_FILE + 1)
        if len(raw) > _LARGEST_FILE:
            raise TraceError(f"{path} is too large for a meta file")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not text") from error
    values = _json(path, text) if text.lstrip().startswith("{") else _flat_yaml(path, text)
    sizes = {name: _count(path, name, values.get(name, 1)) for name in SIZES}
    if not {"dp_size", "pp_size"} <= values.keys():
        raise TraceError(f"{path} says neither how many ranks nor how many stages: it needs dp_size and pp_size")
    world = sizes["dp_size"] * sizes["pp_size"] * sizes["tp_size"] * sizes["dsp_size"]
    if "world_size" in values and _count(path, "world_size", values["world_size"]) != world:
        raise TraceError(
            f"{path}: world_size is {values['world_size']}, but dp_size × pp_size × tp_size × dsp_size is {world}"
        )
    return JobShape(trial_name=str(values.get("trial_name", path.stem)), **sizes)


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} begins like JSON but is none") from error
    if not isinstance(values, dict):
        raise TraceError(f"{path} is no object of names and values")
    return values


def _flat_yaml(path: Path, text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line.rstrip() == "---":
            continue
        match = _LINE.fullmatch(line.rstrip())
        value = "" if match is None or match["value"] is None else _without_comment(match["value"])
        if match is None or not value or value.startswith(_STRUCTURED):
            raise TraceError(f"{path}, line {number}: not of the form `name: value`")
        if match["name"] in values:
            raise TraceError(f"{path}, line {number}: {match['name']} is there twice")
        values[match["name"]] = _scalar(value)
    return values


def _without_comment(value: str) -> str:
    return re.sub(r"(^|\s)#.*", "", value).strip()


def _scalar(value: str) -> str | int:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return int(value) if re.fullmatch(r"[+-]?[0-9]{1,18}", value) else value


def _count(path: Path, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise TraceError(f"{path}: {name} must be a whole number of at least 1")
    return value
