"""``positions.json``: how far each sender came in the journals that are sealed, so that these can go.

Journals up to number ``through`` are in parts or in the sealed files of the run, and nowhere else: replacing this file
is what makes a part count (``store/parts.py``).  What a sender sends again after that is still recognised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import NotARun
from stepscope.store import atomic
from stepscope.store.paths import POSITIONS
from stepscope.store.reading import read_document
from stepscope.store.spools import RingPosition, Spool
from stepscope.wire.blocks import ring_id

__all__ = ["Sealed", "read_positions", "write_positions"]

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Sealed:
    through: int = 0
    """Number of the last journal that is sealed."""
    base: int = 0
    """Those up to this one are in the sealed files of the run; those after it in parts."""
    steps: int = 0
    """In parts: steps of all their rings."""
    spools: dict[str, Spool] = field(default_factory=dict)

    @property
    def parts(self) -> range:
        """Numbers of the parts that count."""
        return range(self.base + 1, self.through + 1)


def read_positions(run_dir: Path) -> Sealed:
    """Nothing sealed where there is no such file; NotARun when it is damaged: what it says decides what counts."""
    path = run_dir / POSITIONS
    try:
        raw = msgspec.json.decode(read_document(path))
        if raw["schema"] != SCHEMA:
            raise NotARun(f"{path} has schema {raw['schema']}; this Stepscope reads schema {SCHEMA}")
        spools = {name: _spool(name, said) for name, said in raw["spools"].items()}
        numbers = {name: int(raw[name]) for name in ("through", "base", "steps")}
        return Sealed(**numbers, spools=spools)
    except FileNotFoundError:
        return Sealed()
    except (OSError, msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotARun(f"{path} is damaged") from error


def write_positions(folder: Path, sealed: Sealed) -> None:
    """On disk when this returns; OSError when there is no room."""
    spools = {name: _told(spool) for name, spool in sealed.spools.items()}
    numbers = {name: getattr(sealed, name) for name in ("through", "base", "steps")}
    value = {"schema": SCHEMA, **numbers, "spools": spools}
    atomic.write_bytes(folder / POSITIONS, (json.dumps(value, separators=(",", ":")) + "\n").encode(), durable=True)


def _told(spool: Spool) -> dict[str, Any]:
    rings = {ring.key: [*ring.live, *ring.heard, ring.number, *(ring.shown or ())] for ring in spool.rings.values()}
    return {"rings": rings, "files": spool.files, "whole": spool.whole}


def _spool(name: str, said: Mapping[str, Any]) -> Spool:
    spool = Spool(name)
    for key, (seq, since, state, step, phase, ended, heard, number, *shown) in said["rings"].items():
        live = (int(seq), int(since), int(state), int(step), int(phase))
        position = RingPosition(key, (bool(ended), int(heard)), live, int(number))
        if shown:
            position.shown = (int(shown[0]), int(shown[1]))
        spool.rings[ring_id(key)] = position
    spool.files.update({str(file): int(at) for file, at in said["files"].items()})
    spool.whole.update({str(file): (int(sent), int(crc)) for file, (sent, crc) in said["whole"].items()})
    return spool
