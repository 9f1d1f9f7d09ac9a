"""``steps/KEY.json``: what the header of one ring last said, for when the ring itself is gone; and how fast it steps.

The agent writes it, as a whole each time; whoever opens the run reads it.  Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from stepscope.records.collectives import ProcessGroup, groups_from_json, groups_to_json
from stepscope.records.facts import checked_facts
from stepscope.records.identity import RankIdentity
from stepscope.records.phases import BUILTIN_PHASES, PHASE_SLOTS
from stepscope.records.series import RankState
from stepscope.ring import RingHeader
from stepscope.store import atomic
from stepscope.store.paths import SIDECAR_SUFFIX, STEPS, ring_key, sidecar_path
from stepscope.store.reading import read_document

__all__ = ["RingSidecar", "groups_as_kept", "guess_sidecar", "read_sidecars", "sidecar_of", "write_sidecar"]

SCHEMA = 1
_STATES = get_args(RankState)
_HEXADECIMAL = re.compile("[0-9a-f]{1,16}")


@dataclass(frozen=True, kw_only=True)
class RingSidecar:
    """One ring, without its slots."""

    identity: RankIdentity
    pid: int
    start_ticks: int
    anchor_mono_ns: int
    anchor_wall_ns: int
    phase_names: tuple[str, ...]
    state: RankState
    live_phase: int
    live_since_ns: int
    live_step: int
    hook_failures: int
    heard_wall_ns: int = 0
    """When this was written."""
    ended_wall_ns: int | None = None
    """When the process was seen to be gone; from then on nothing comes after what the segment holds."""
    usual_step_ns: int = 0
    """The median of its last steps, for lists of runs; 0: not known."""
    facts: dict[str, Any] = field(default_factory=dict)
    groups: tuple[ProcessGroup, ...] = ()

    @property
    def key(self) -> str:
        return ring_key(self.identity.host, self.pid, self.anchor_wall_ns)

    @classmethod
    def from_dict(cls, raw: object) -> RingSidecar:
        """Check every value: the file may be of another hand.  ValueError when one is off."""
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            raise ValueError("not a sidecar of ours")
        names = raw.get("phase_names")
        if not isinstance(names, list) or len(names) != PHASE_SLOTS or not all(isinstance(n, str) for n in names):
            raise ValueError("phase_names")
        if raw.get("state") not in _STATES:
            raise ValueError("state")
        ended = raw.get("ended_wall_ns")
        return cls(
            identity=RankIdentity.from_dict(raw.get("identity")),
            phase_names=tuple(names),
            state=raw["state"],
            live_phase=_word(raw, "live_phase") % PHASE_SLOTS,
            ended_wall_ns=None if ended is None else _word(raw, "ended_wall_ns"),
            usual_step_ns=_word({"usual_step_ns": 0, **raw}, "usual_step_ns"),
            facts=checked_facts(raw.get("facts")),
            groups=_groups(raw.get("groups")),
            **{name: _word(raw, name) for name in _WORDS},
        )

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "groups": groups_as_kept(self.groups)}


_WORDS = (
    "pid",
    "start_ticks",
    "anchor_mono_ns",
    "anchor_wall_ns",
    "live_since_ns",
    "live_step",
    "hook_failures",
    "heard_wall_ns",
)


def sidecar_of(header: RingHeader, *, heard_wall_ns: int = 0) -> RingSidecar:
    """What a live ring's header says; its state is the process's own claim."""
    return RingSidecar(
        identity=header.identity,
        pid=header.pid,
        start_ticks=header.start_ticks,
        anchor_mono_ns=header.anchor_mono_ns,
        anchor_wall_ns=header.anchor_wall_ns,
        phase_names=header.phase_names,
        state=header.state.name.lower(),  # type: ignore[arg-type]  # RingState's names are RankStates
        live_phase=header.live_phase,
        live_since_ns=header.live_since_ns,
        live_step=header.live_step,
        hook_failures=header.hook_failures,
        heard_wall_ns=heard_wall_ns,
        facts=header.facts,
        groups=header.groups,
    )


def guess_sidecar(key: str) -> RingSidecar:
    """The little that a file's name says, for a segment whose sidecar cannot be read."""
    host, pid, anchor = (*key.split("-"), "", "")[:3]
    number = int(pid) if pid.isdecimal() else 0
    return RingSidecar(
        identity=RankIdentity(host=host, pid=number),
        pid=number,
        start_ticks=0,
        anchor_mono_ns=0,
        anchor_wall_ns=int(anchor, 16) if _HEXADECIMAL.fullmatch(anchor) else 0,
        phase_names=(*BUILTIN_PHASES, *[""] * (PHASE_SLOTS - len(BUILTIN_PHASES))),
        state="vanished",
        live_phase=0,
        live_since_ns=0,
        live_step=0,
        hook_failures=0,
    )


def write_sidecar(run_dir: Path, sidecar: RingSidecar) -> None:
    atomic.write_json(sidecar_path(run_dir, sidecar.key), sidecar.to_dict())


def read_sidecars(run_dir: Path) -> tuple[dict[str, RingSidecar], list[str]]:
    """All sidecars by key, and the names of those that cannot be read."""
    found: dict[str, RingSidecar] = {}
    bad: list[str] = []
    for path in sorted((run_dir / STEPS).glob(f"*{SIDECAR_SUFFIX}")):
        try:
            found[path.stem] = RingSidecar.from_dict(json.loads(read_document(path)))
        except (OSError, ValueError, RecursionError):
            bad.append(path.name)
    return found, bad


def groups_as_kept(groups: Sequence[ProcessGroup]) -> list[Any]:
    """The form that ``groups_from_json`` reads, all of it: a file has room."""
    kept: list[Any] = json.loads(groups_to_json(groups, sys.maxsize))
    return kept


def _groups(raw: object) -> tuple[ProcessGroup, ...]:
    """Like facts: what is missing or of another hand is nothing, and no reason to lose a rank's name."""
    try:
        return groups_from_json(raw)
    except ValueError:
        return ()


def _word(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(name)
    return value
