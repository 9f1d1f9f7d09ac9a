"""Peers: which ranks do as much work as this one, and may be compared with it.

Told by what the script has set up already: the process group of DDP, or the device mesh that the parameters of FSDP2
and DTensor carry.  A mesh's dimensions are known by their names.  Ranks that differ only in data dimensions do the same
on other data; those that differ in a tensor or context dimension have equal shards of one layer or sequence; those of
an expert dimension have as many experts, though a router may send them unequal numbers of tokens.  Stages of a pipeline
are not alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.records.facts import rank_runs
from stepscope.records.group_kinds import ALIKE, kind_of

__all__ = ["group_facts", "mesh_facts"]


def group_facts(distributed: Any, group: Any) -> dict[str, Any]:
    """The peers in a process group, as facts."""
    if not distributed.is_initialized():
        return {}
    return {"peers": rank_runs(distributed.get_process_group_ranks(group), distributed.get_rank())}


def mesh_facts(meshes: Sequence[Any], *, sharded: bool) -> dict[str, Any]:
    """The mesh that says most, and the peers in it, as facts.

    ``sharded``: whether the parameters are FSDP's; then dimensions without names are data dimensions.
    """
    if not meshes:
        return {}
    mesh = max((_whole(mesh) for mesh in meshes), key=lambda mesh: mesh.ndim)
    names = [str(name) for name in mesh.mesh_dim_names or ()]
    facts: dict[str, Any] = {"mesh": {"names": names, "shape": [int(size) for size in mesh.shape]}}
    place = mesh.get_coordinate()
    if place is None or not (names or sharded):
        return facts
    alike = [kind_of(name) in ALIKE for name in names] or [True] * mesh.ndim
    ranks = [mesh.mesh.tolist()]
    for at, free in zip(place, alike, strict=True):
        ranks = [rank for row in ranks for rank in row] if free else [row[at] for row in ranks]
    return {**facts, "peers": rank_runs(ranks, mesh.get_rank())}


def _whole(mesh: Any) -> Any:
    """The mesh that this one was cut out of, unless that one does not know its dimensions."""
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    names = set(mesh.mesh_dim_names or ())
    return root if names and names <= set(root.mesh_dim_names or ()) else mesh
