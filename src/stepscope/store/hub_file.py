"""``hub.json``: where a run's hub listens, and the token to ask it with.  Readable by its owner only.

The launcher writes it before the hub is started, so that a hub that is started again keeps port and token; it is
removed when the hub is gone for good.  Standard library only.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from stepscope.store.paths import HUB
from stepscope.store.reading import read_document

__all__ = ["HubFile", "read_hub_file", "remove_hub_file", "write_hub_file"]

SCHEMA = 1


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
            json.dump({"schema": SCHEMA, **asdict(hub)}, file)
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
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        return None
    values = {name: raw.get(name) for name in ("url", "token", "fingerprint")}
    if not all(isinstance(value, str) for value in values.values()):
        return None
    return HubFile(**{name: str(value) for name, value in values.items()})


def remove_hub_file(run_dir: Path) -> None:
    """Whether it was there or not, or cannot be removed."""
    with suppress(OSError):
        (run_dir / HUB).unlink()
