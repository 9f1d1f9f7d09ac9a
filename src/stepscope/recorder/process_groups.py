"""What is known about process groups and device meshes: slots, names, and ranks that may be compared.

Each group used in a collective gets a number.  It is inspected once, when its first collective is called; after that it
is found by its identity alone.  The ring's header has the result (``records/collectives.py`` has the format).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from stepscope.recorder.guard import failsafe
from stepscope.records.collectives import ALIKE_KINDS, MAX_GROUPS, ProcessGroup, group_kind, group_name
from stepscope.records.identity import rank_runs
from stepscope.ring import RingWriter
from stepscope.ring.layout import GROUP_SHIFT

__all__ = ["UNKNOWN_GROUP", "GroupTable", "KnownGroup", "display_name", "group_facts", "mesh_facts", "whole_mesh"]


# -- Process groups ---------------------------------------------------------------------------------------------------

SHARED = MAX_GROUPS - 1
"""The slot of groups that could not be identified, or came too late to get their own."""
NAME_CHARS = 80


class KnownGroup(NamedTuple):
    """What the words of a collective need to know about its group."""

    bits: int
    """Its slot, shifted into place."""
    size: int
    blind: bool
    """Whether a wait for work on a CUDA device only orders streams: then it says nothing about the collective."""
    ranks: tuple[int, ...]


UNKNOWN_GROUP = KnownGroup(SHARED << GROUP_SHIFT, 1, False, ())


class GroupTable:
    """The groups of this process.  ``known`` is for the hot path; groups that are not in it go through ``meet``."""

    def __init__(self) -> None:
        self.known: dict[Any, KnownGroup] = {}
        """By ``id`` of a group or of its mesh; by (``id`` of a mesh, dimension); by name."""
        self._slots: list[ProcessGroup] = []
        self._watched: dict[int, weakref.ref[Any]] = {}

    def forget(self) -> None:
        self.known.clear()
        self._slots.clear()
        self._watched.clear()

    def meet(self, group: Any, key: Any, owner: Any, distributed: Any, ring: RingWriter | None) -> KnownGroup:
        """Inspect a group for the first time; ``key`` identifies it while ``owner`` lives."""
        found = self._find(group, distributed, ring) or UNKNOWN_GROUP
        self._remember(key, owner, found)
        return found

    @failsafe
    def _find(self, group: Any, distributed: Any, ring: RingWriter | None) -> KnownGroup | None:
        group = _process_group(group, distributed)
        if group is None:
            return None
        try:
            ranks = tuple(distributed.get_process_group_ranks(group))
            backend = str(distributed.get_backend(group))
        except (KeyError, ValueError):
            return None  # created without torch.distributed's knowledge
        description = str(getattr(group, "group_desc", ""))[:NAME_CHARS]
        kind = group_kind(description)
        if kind == "other" and len(ranks) == distributed.get_world_size():
            kind = "world"
        about = ProcessGroup(
            slot=0,
            name=str(group.group_name)[:NAME_CHARS],
            description=description,
            kind=kind,
            backend=backend,
            ranks=ranks,
            size=len(ranks),
        )
        slot = self._slot(about)
        if ring is not None:
            ring.set_groups(self._slots)
        return KnownGroup(slot << GROUP_SHIFT, len(ranks), _is_blind(group, backend), ranks)

    @failsafe
    def _remember(self, key: Any, owner: Any, found: KnownGroup) -> None:
        if isinstance(owner, (str, list)):
            if isinstance(key, str):
                self.known[key] = found
            return  # nothing can be remembered for a list of ranks
        known, watched, number = self.known, self._watched, id(owner)

        def gone(_: object) -> None:
            """Forget the owner: its id may be reused."""
            watched.pop(number, None)
            for key in [key for key in known if key == number or (isinstance(key, tuple) and key[0] == number)]:
                del known[key]

        if number not in watched:
            watched[number] = weakref.ref(owner, gone)
        known[key] = found

    def _slot(self, about: ProcessGroup) -> int:
        """The slot of a group by its name; a group created again under the same name replaces the old one."""
        for slot, earlier in enumerate(self._slots):
            if earlier.name == about.name:
                self._slots[slot] = _with_slot(about, slot)
                return slot
        slot = len(self._slots)
        if slot >= SHARED:
            return SHARED
        self._slots.append(_with_slot(about, slot))
        return slot


def display_name(group: Any) -> str:
    """The displayed name, the same as everywhere else (``group_name``)."""
    return group_name(str(group.group_name), str(getattr(group, "group_desc", "")))[:NAME_CHARS]


def _with_slot(about: ProcessGroup, slot: int) -> ProcessGroup:
    return ProcessGroup(**{**about.__dict__, "slot": slot})


def _process_group(group: Any, distributed: Any) -> Any:
    """The group behind whatever functional collectives accept as one; None for a list of ranks."""
    if isinstance(group, distributed.ProcessGroup):
        return group
    if isinstance(group, str):
        return distributed.distributed_c10d._resolve_process_group(group)
    if isinstance(group, tuple):
        return group[0].get_group(group[1])
    return group.get_group() if hasattr(group, "get_group") else None


def _is_blind(group: Any, backend: str) -> bool:
    return "nccl" in backend or any("nccl" in str(name) for name in _backends(group))


def _backends(group: Any) -> list[str]:
    devices = getattr(group, "_device_types", ())
    return [group._get_backend(device).name() for device in devices]


# -- Peers ------------------------------------------------------------------------------------------------------------
# Which ranks do as much work as this one, and may be compared with it.
#
# The script's setup says so: the process group of DDP, or the device mesh of the parameters of FSDP2 and DTensor.  A
# mesh's dimensions are recognized by their names.  Ranks that differ only in data dimensions do the same on other data;
# those that differ in a tensor or context dimension have equal shards of one layer or sequence; those of an expert
# dimension have equally many experts, though a router may send them unequal numbers of tokens.  Stages of a pipeline
# are not alike.


def group_facts(distributed: Any, group: Any) -> dict[str, Any]:
    """The peers in a process group, as facts."""
    if not distributed.is_initialized():
        return {}
    return {"peers": rank_runs(distributed.get_process_group_ranks(group), distributed.get_rank())}


def mesh_facts(meshes: Sequence[Any], *, sharded: bool) -> dict[str, Any]:
    """The most informative mesh, and the peers in it, as facts.

    ``sharded``: whether the parameters are FSDP's; then dimensions without names are data dimensions.
    """
    if not meshes:
        return {}
    mesh = max((whole_mesh(mesh) for mesh in meshes), key=lambda mesh: mesh.ndim)
    names = [str(name) for name in mesh.mesh_dim_names or ()]
    facts: dict[str, Any] = {"mesh": {"names": names, "shape": [int(size) for size in mesh.shape]}}
    place = mesh.get_coordinate()
    if place is None or not (names or sharded):
        return facts
    alike = [group_kind(name) in ALIKE_KINDS for name in names] or [True] * mesh.ndim
    ranks = [mesh.mesh.tolist()]
    for at, free in zip(place, alike, strict=True):
        ranks = [rank for row in ranks for rank in row] if free else [row[at] for row in ranks]
    return {**facts, "peers": rank_runs(ranks, mesh.get_rank())}


def whole_mesh(mesh: Any) -> Any:
    """The mesh that this one was sliced from, unless that one lacks its dimensions."""
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    names = set(mesh.mesh_dim_names or ())
    return root if names and names <= set(root.mesh_dim_names or ()) else mesh
