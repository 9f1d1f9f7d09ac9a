"""What a run is called, and its files that carry the name of a host."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from stepscope.errors import UsageError

__all__ = [
    "EVIDENCE",
    "LAUNCHER_MODULES",
    "TIME_IN_NAME",
    "checked_name",
    "default_name",
    "evidence_name",
    "hang_name",
    "host_in_name",
    "numbered",
]

MAX_NAME = 200
EVIDENCE = ".evidence."
TIME_IN_NAME = "%Y%m%d-%H%M%S"
LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
)
"""Modules that start ranks and do not train themselves."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_UNSAFE_HOST = re.compile(r"[^A-Za-z0-9._]+")
_HOST_CHARS = 64


def checked_name(name: str) -> str:
    """The name a user chose; UsageError when it cannot be that of a folder."""
    if not name or name.startswith(".") or len(name) > MAX_NAME or any(c == "/" or not c.isprintable() for c in name):
        raise UsageError(f"{name!r} cannot name a run: it must be a plain folder name")
    return name


def default_name(command: Sequence[str], when: str) -> str:
    """The script's stem and the time; enough to find last night's run."""
    script = next((PurePath(word).stem for word in command if word.endswith(".py")), "")
    modules = [after for word, after in itertools.pairwise(command) if word == "-m" and after not in LAUNCHER_MODULES]
    if not script and modules:
        script = modules[0].rpartition(".")[2]
    stem = _UNSAFE.sub("-", script or PurePath(command[0] if command else "run").stem).strip("-.") or "run"
    return f"{stem[:MAX_NAME]}-{when}"


def numbered(wanted: str) -> Iterator[str]:
    """NAME, NAME-2, NAME-3 …: the first that is free is taken."""
    yield wanted
    for number in itertools.count(2):
        yield f"{wanted}-{number}"


def host_in_name(host: str) -> str:
    """A host as a part of a file's name: short, and without the dash that ends it there."""
    return _UNSAFE_HOST.sub("_", host)[:_HOST_CHARS] or "host"


def hang_name(host: str, number: int) -> str:
    """Of the file of a hang, in ``hangs/``."""
    return f"{host_in_name(host)}-{number}.json"


def evidence_name(host: str, number: int) -> str:
    """Of what the host's watchdog knew of it, beside it."""
    return f"{host_in_name(host)}-{number}{EVIDENCE}json"
