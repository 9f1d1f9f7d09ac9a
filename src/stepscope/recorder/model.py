"""What a model consists of: counted once, a little at a time, from classes, sizes and dtypes alone.

The walk goes over the modules of a root without the generators of ``nn.Module`` (which take ten times as long), holds
what is still to be visited by weak references, and stops when its time is up, to go on after the next step: a model of
ten thousand modules is counted over some steps.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from stepscope.recorder.fsdp import NO_UNIT, FsdpUnits, fsdp_version, is_fully_sharded
from stepscope.recorder.groups import told_name
from stepscope.recorder.mesh import group_facts, mesh_facts

__all__ = ["ModelWalk", "unwrapped"]

MODULES_AT_ONCE = 16
"""Between two looks at the clock."""
MAX_BUCKETS = 32
"""Of which the size is told."""
MAX_MESHES = 8
MAX_WRAPPERS = 8
MIB = 1 << 20
SYNC = "SyncBatchNorm"
COMPILED = "OptimizedModule"
"""What ``torch.compile`` makes of a module."""


class ModelWalk:
    """The count of one root."""

    def __init__(self, root: Any) -> None:
        self.root = weakref.ref(root)
        self.facts: dict[str, Any] | None = None
        """``model``, ``ddp``, ``fsdp``, ``mesh`` and ``peers``, as far as there are such; None until all is counted."""
        self._left: list[tuple[weakref.ref[Any], bool, int]] = [(self.root, False, NO_UNIT)]
        """Modules to visit, whether they are inside of a DDP, and the FSDP unit around them."""
        self._seen: set[int] = set()
        self._classes: dict[type, int] = {}
        """How many modules of each class."""
        self._fsdp_classes: dict[type, int] = {}
        """Classes that FSDP has made, and its version."""
        self._units = FsdpUnits()
        self._normalising: dict[type, bool] = {}
        """Whether the modules of a class are plain BatchNorm layers."""
        self._own_statistics = 0
        """BatchNorm layers in a DDP that take the statistics of their own rank's batch."""
        self._parameter_classes: dict[type, bool] = {}
        """Whether the parameters of a class have a device mesh: asking the instances is slow."""
        self._compiled = False
        self._sizes: dict[Any, int] = {}
        """Parameters by dtype."""
        self._gradient_bytes = 0
        self._ddp: weakref.ref[Any] | None = None
        self._meshes: list[weakref.ref[Any]] = []

    @property
    def parameters(self) -> int:
        return sum(self._sizes.values())

    @property
    def dtype(self) -> str:
        return str(max(self._sizes, key=self._sizes.__getitem__, default="")).removeprefix("torch.")

    def go_on(self, now: Callable[[], int], until_ns: int) -> None:
        visited = 0
        while self._left:
            reference, in_ddp, unit = self._left.pop()
            module = reference()
            if module is not None and id(module) not in self._seen:
                self._visit(module, in_ddp, unit)
            visited += 1
            if visited % MODULES_AT_ONCE == 0 and now() >= until_ns:
                break
        if not self._left and self.facts is None:
            self.facts = self._sum_up()
            self._seen.clear()
            for known in (self._classes, self._parameter_classes, self._fsdp_classes, self._normalising):
                known.clear()  # the script's

    def reducer_facts(self) -> dict[str, Any]:
        """How DDP packs the gradients now: after the first iterations it does so anew, in the order they came.

        And whether it found parameters that took no part in an iteration.
        """
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None:
            return {}
        said = ddp.logger._get_ddp_logging_data()
        listed = (said.strs_map.get("rebuilt_bucket_sizes") or said.strs_map.get("bucket_sizes", "")).split(",")
        sizes = [int(size) for size in listed if size.strip().isdigit()]
        return {
            "buckets": len(sizes),
            "bucket_sizes_mb": [round(size / MIB, 3) for size in sizes[:MAX_BUCKETS]],
            "tensors": said.ints_map.get("num_parameter_tensors"),
            **_unused_facts(ddp, said.ints_map),
        }

    def _visit(self, module: Any, in_ddp: bool, unit: int) -> None:
        self._seen.add(id(module))
        kind = type(module)
        number = self._classes.get(kind, 0)
        self._classes[kind] = number + 1
        if not number and not in_ddp and _is_ddp(module):  # a second DDP is not looked at
            in_ddp = True
            self._ddp = weakref.ref(module)
        if not number:
            self._fsdp_classes[kind] = fsdp_version(kind)
            self._normalising[kind] = _is_plain_batchnorm(kind)
        if self._fsdp_classes[kind]:
            unit = self._units.enter(self._fsdp_classes[kind], module, unit)
        if in_ddp and self._normalising[kind] and module.training:
            self._own_statistics += 1
        if getattr(module, "_compiled_call_impl", None) is not None:
            self._compiled = True
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                self._count(parameter, in_ddp, unit)
        self._left += [(weakref.ref(child), in_ddp, unit) for child in module._modules.values() if child is not None]

    def _count(self, parameter: Any, in_ddp: bool, unit: int) -> None:
        dtype = parameter.dtype
        size = parameter.numel()
        self._sizes[dtype] = self._sizes.get(dtype, 0) + size
        if in_ddp and parameter.requires_grad:
            self._gradient_bytes += size * dtype.itemsize
        kind = type(parameter)
        meshed = self._parameter_classes.get(kind)
        if meshed is None:
            meshed = self._parameter_classes[kind] = hasattr(kind, "device_mesh")
        if meshed and unit != NO_UNIT:
            self._units.count(unit, size, dtype)
        if meshed and len(self._meshes) < MAX_MESHES:
            mesh = parameter.device_mesh
            if not any(known() is mesh for known in self._meshes):
                self._meshes.append(weakref.ref(mesh))

    def _sum_up(self) -> dict[str, Any]:
        root = self.root()
        if root is None:
            return {}
        inner = unwrapped(root)
        named = [(kind.__name__, layers) for kind, layers in self._classes.items()]
        model: dict[str, Any] = {
            "class": _own_class(type(inner)).__name__,
            "parameters": self.parameters,
            "modules": sum(self._classes.values()),
            "batchnorm": sum(layers for name, layers in named if "BatchNorm" in name and name != SYNC),
            "sync_batchnorm": sum(layers for name, layers in named if name == SYNC),
            "compiled": self._compiled or any(name == COMPILED for name, _ in named),
            "dtype": self.dtype,
        }
        units = self._units.facts()
        if units:
            # Of FSDP1's flat parameters the walk has seen this rank's part only.
            model["parameters"] = max(self.parameters, units["fsdp"]["parameters"])
        meshes = [mesh for mesh in (known() for known in self._meshes) if mesh is not None]
        sharded = is_fully_sharded(type(inner))
        facts = {"model": model, **units, **mesh_facts(meshes, sharded=sharded)}
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None:
            gradient = {"gradient_mb": round(self._gradient_bytes / MIB, 3), "group": told_name(ddp.process_group)}
            facts["ddp"] = {**_ddp_settings(ddp), "batchnorm": self._own_statistics, **gradient}
            replicas = group_facts(sys.modules["torch.distributed"], ddp.process_group)
            if _peers_in(replicas) > _peers_in(
                facts
            ):  # a mesh may know more ranks that do as much: those of tensor parallelism
                facts.update(replicas)
        return facts


def _peers_in(facts: dict[str, Any]) -> int:
    """How many peers."""
    return sum(run[1] for run in facts.get("peers", ()))


def _ddp_settings(ddp: Any) -> dict[str, Any]:
    names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers")
    settings: dict[str, Any] = {name: bool(getattr(ddp, name)) for name in names if hasattr(ddp, name)}
    return {"bucket_mb": round(ddp.bucket_bytes_cap / MIB, 3), **settings}


def _unused_facts(ddp: Any, figures: Any) -> dict[str, Any]:
    """What find_unused_parameters=True found so far; {}: it is off, or nothing is known yet.

    The reducer compares every iteration's unused parameters with those of the one before.  If they never changed, the
    iteration that DDP logged last speaks for all of them.
    """
    iterations, unused_bytes = figures.get("iteration"), figures.get("unused_parameter_size")
    is_static = getattr(ddp.reducer, "_ddp_graph_static", None)
    searched = bool(getattr(ddp, "find_unused_parameters", False)) and not getattr(ddp, "static_graph", False)
    if not searched or is_static is None or iterations is None or unused_bytes is None:
        return {}
    return {"iterations": iterations, "unused": "varying" if not is_static() else "same" if unused_bytes else "none"}


def _is_plain_batchnorm(kind: type) -> bool:
    """Not of the frozen kind that libraries have either, which is no BatchNorm to torch."""
    loaded: Any = sys.modules.get("torch.nn.modules.batchnorm")
    return loaded is not None and issubclass(kind, loaded._BatchNorm) and not issubclass(kind, loaded.SyncBatchNorm)


def _is_ddp(module: Any) -> bool:
    loaded: Any = sys.modules.get("torch.nn.parallel.distributed")
    return loaded is not None and isinstance(module, loaded.DistributedDataParallel)


def unwrapped(module: Any) -> Any:
    """The user's own model inside of DDP, FSDP1 and ``torch.compile``."""
    for _ in range(MAX_WRAPPERS):
        if type(module).__name__ == COMPILED:
            inside = "_orig_mod"
        elif _is_ddp(module):
            inside = "module"
        elif fsdp_version(type(module)) == 1:
            inside = "_fsdp_wrapped_module"
        else:
            break
        module = module._modules[inside]
    return module


def _own_class(kind: type) -> type:
    return kind.__bases__[-1] if is_fully_sharded(kind) else kind
