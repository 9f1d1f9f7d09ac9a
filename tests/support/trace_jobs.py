"""Jobs of several ranks that exchange within every layer, made up: who is late, and why, is put in.

A host launches kernels one after the other and waits for its device at the end of a step; a device runs them in order;
a collective begins on a rank when its device gets there and ends when all have come and the transfer is done.  Times
are microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fakes.traces import MadeTrace

__all__ = ["MadeJob"]

REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
LAUNCH = 5.0
"""A call of the host, and how long after its start work may begin."""
Times = Callable[[int, int, int], float]
"""By rank, step and layer."""


def _nothing(rank: int, step: int, layer: int) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class MadeJob:
    """``made.ranks()``: one trace per rank; the last step is one more, since it is left out."""

    world: int = 8
    steps: int = 3
    layers: int = 28
    kernel: float = 200.0
    kernels: int = 2
    """To a layer, before its collective."""
    transfer: float = 20.0
    slower: Times = _nothing
    """What each kernel takes longer."""
    more: Callable[[int, int, int], int] = lambda rank, step, layer: 0
    """Kernels that the others do not have."""
    host: Times = _nothing
    """What the host does before it launches a layer."""
    held: Times = _nothing
    """By how much a layer's first kernel begins later than its stream and its launch explain."""
    load: Times = _nothing
    """In the DataLoader, before the first layer (layer 0)."""
    description: str = "mesh_tp"
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that exchange in every layer; empty: all of them."""
    gradients: tuple[tuple[int, ...], ...] = ()
    """Ranks that exchange at the end of a step, in data-parallel groups."""
    dims: Callable[[int], list[list[int]]] | None = None
    """By rank: the shapes of the matrix products' inputs."""

    def ranks(self) -> list[MadeTrace]:
        made = [MadeTrace(rank=rank, world_size=self.world) for rank in range(self.world)]
        host, device = [0.0] * self.world, [0.0] * self.world
        for step in range(self.steps + 1):
            began = list(host)
            for layer in range(self.layers):
                for rank, own in enumerate(made):
                    host[rank], device[rank] = self._layer(own, rank, step, layer, host[rank], device[rank])
                self._exchange(made, self.groups or (tuple(range(self.world)),), self.description, host, device)
            self._exchange(made, self.gradients, "mesh_dp", host, device)
            for rank, own in enumerate(made):
                own.runtime("cudaDeviceSynchronize", host[rank], max(device[rank] - host[rank], 1))
                host[rank] = max(host[rank] + 1, device[rank])
                own.step(step, began[rank], host[rank] - began[rank])
        return made

    def _layer(
        self, made: MadeTrace, rank: int, step: int, layer: int, host: float, device: float
    ) -> tuple[float, float]:
        load = self.load(rank, step, layer) if layer == 0 else 0.0
        if load:
            made.op(LOADER, host, load)
            host += load
        host += self.host(rank, step, layer)
        count = self.kernels + self.more(rank, step, layer)
        for at in range(count):
            held = self.held(rank, step, layer) if at == 0 else 0.0
            start = max(device, host + LAUNCH) + held
            took = self.kernel + self.slower(rank, step, layer)
            if self.dims is not None:
                args: dict[str, Any] = {"Input Dims": self.dims(rank), "Input type": ["c10::BFloat16"] * 2}
                made.op("aten::mm", host, LAUNCH, **args)
            made.launched("gemm_bf16", at=host, start=start, dur=took, call=LAUNCH - 1)
            host, device = host + LAUNCH, start + took
        return host, device

    def _exchange(
        self,
        made: Sequence[MadeTrace],
        groups: Sequence[tuple[int, ...]],
        description: str,
        host: list[float],
        device: list[float],
    ) -> None:
        for members in groups:
            arrivals = {rank: max(device[rank], host[rank] + LAUNCH) for rank in members}
            end = max(arrivals.values()) + self.transfer
            for rank, start in arrivals.items():
                about: dict[str, Any] = {
                    "Collective name": "allreduce",
                    "Process Group Name": f"{description} {members[0]}",
                    "Process Group Description": description,
                    "Process Group Ranks": str(list(members)),
                    "Group size": len(members),
                }
                made[rank].launched(
                    REDUCE, at=host[rank], start=start, dur=end - start, call=LAUNCH - 1, stream=20, **about
                )
                host[rank] += LAUNCH
                device[rank] = end
