"""Facts about the model: its modules and parameters, DDP's settings, FSDP's units, and autocast.

They are counted once, a little at a time, from classes, sizes and dtypes alone.  The walk visits the modules of a root
without the generators of ``nn.Module`` (which take ten times as long), holds those still to be visited by weak
references, and stops when its time is up, to continue after the next step: a model with ten thousand modules is counted
over several steps.  It reads the dict of each module, not its attributes, whose names a module may define itself, and
tensors while ``__torch_function__`` is off (the rules are in ``recorder/variables.py``).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from stepscope.recorder.process_groups import display_name, group_facts, mesh_facts
from stepscope.recorder.variables import attributes_of, class_name, torch_functions_off

__all__ = ["ModelWalk", "autocast_around_call", "autocast_seen_in", "named_parameters", "unwrapped"]


# -- FSDP -------------------------------------------------------------------------------------------------------------
# How FSDP has wrapped a model: its units and their settings.
#
# A *unit* is what FSDP gathers and frees together.  FSDP1 wraps a module in ``FullyShardedDataParallel``, which has one
# flat parameter.  ``fully_shard`` (FSDP2) gives a state to one or several modules, and shards those of their parameters
# that no inner unit has.  ``ModelWalk`` says which modules it visits.  Attributes are read, and only plain values are
# kept.  Most of the names are private to torch (2.10 to 2.15 have them); what is missing is left out.

NO_UNIT = -1
FSDP1 = "FullyShardedDataParallel"
MADE_BY_FSDP2 = ("FSDPModule", "ReplicateModule")
FSDP2_STRATEGIES = {"FSDPMeshInfo": "full_shard", "HSDPMeshInfo": "hybrid_shard", "DDPMeshInfo": "no_shard"}
"""FSDP2's mesh classes, and FSDP1's names for their strategies."""
FSDP1_RESHARDING = ("full_shard", "hybrid_shard")
"""For FSDP1: the other strategies keep parameters gathered between forward and backward."""

EXPLICIT = "explicit"
"""The script itself says which units are prefetched (``set_modules_to_backward_prefetch``)."""


def fsdp_version(kind: type) -> int:
    """1 or 2 when the class is FSDP's, else 0."""
    if is_fully_sharded(kind):
        return 2
    loaded: Any = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    wrapper = getattr(loaded, FSDP1, None)
    return 1 if isinstance(wrapper, type) and issubclass(kind, wrapper) else 0


def is_fully_sharded(kind: type) -> bool:
    """Whether FSDP2 created this class: ``FSDPNet``, from its own class and ``Net``."""
    return kind.__bases__[0].__name__ in MADE_BY_FSDP2


class _FsdpUnit:
    def __init__(self, settings: dict[str, Any], parameters: int = 0) -> None:
        self.settings = settings
        self.parameters = parameters
        self.dtype: Any = None


class FsdpUnits:
    """The units of one model."""

    def __init__(self) -> None:
        self._units: list[_FsdpUnit] = []
        self._by_state: dict[int, int] = {}
        """Modules that ``fully_shard`` got as a list share a state, by its id."""
        self._version = 0

    def enter(self, version: int, module: Any, outer: int) -> int:
        """The number of the unit that the module's parameters belong to; ``outer``: that of the unit around it."""
        if version == 1:
            self._version = self._version or 1
            self._enter_wrapper(module)
            return NO_UNIT  # its size is known from the flat parameter
        state = _state_of(module)
        if state is None:
            return outer
        known = self._by_state.get(id(state))
        if known is None:
            settings = _fsdp2_settings(state)
            if settings is None:
                return outer
            self._version = 2
            known = self._by_state[id(state)] = len(self._units)
            self._units.append(_FsdpUnit(settings))
        return known

    def count(self, number: int, size: int, dtype: Any) -> None:
        """Count a sharded parameter with ``size`` elements in total for that unit."""
        unit = self._units[number]
        unit.parameters += size
        unit.dtype = unit.dtype or dtype

    def facts(self) -> dict[str, Any]:
        """{} for a model without FSDP."""
        units = [unit for unit in self._units if unit.parameters]
        if not units:
            return {}
        largest = max(units, key=lambda unit: unit.parameters)
        total = sum(unit.parameters for unit in units)
        settings = [unit.settings for unit in units]
        explicit = any(setting["backward_prefetch"] == EXPLICIT for setting in settings)
        param_dtype = largest.settings["param_dtype"] or largest.dtype
        reduce_dtype = largest.settings["reduce_dtype"] or param_dtype
        facts = {
            "version": self._version,
            "units": len(units),
            "parameters": total,
            "largest_share": round(largest.parameters / total, 4),
            "strategy": largest.settings["strategy"],
            "resharded_units": sum(bool(setting["reshard"]) for setting in settings),
            "param_dtype": _dtype_text(param_dtype),
            "reduce_dtype": _dtype_text(reduce_dtype),
            "cpu_offload": any(setting["cpu_offload"] for setting in settings),
            "forward_prefetch": any(setting["forward_prefetch"] for setting in settings),
            "backward_prefetch": EXPLICIT if explicit else largest.settings["backward_prefetch"],
        }
        optional = ("backward_prefetch",)
        return {"fsdp": {name: value for name, value in facts.items() if value is not None or name in optional}}

    def _enter_wrapper(self, module: Any) -> None:
        flat: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
        size = getattr(flat, "_unpadded_unsharded_size", None)
        if size is None:
            return  # all of its parameters are in inner units
        strategy = _enum_text(getattr(module, "sharding_strategy", None))
        precision = getattr(module, "mixed_precision", None)
        settings = {
            "strategy": strategy,
            "reshard": strategy in FSDP1_RESHARDING,
            "param_dtype": getattr(precision, "param_dtype", None),
            "reduce_dtype": getattr(precision, "reduce_dtype", None),
            "cpu_offload": bool(getattr(getattr(module, "cpu_offload", None), "offload_params", False)),
            "forward_prefetch": bool(getattr(module, "forward_prefetch", False)),
            "backward_prefetch": _enum_text(getattr(module, "backward_prefetch", None)),
        }
        unit = _FsdpUnit(settings, size.numel())
        unit.dtype = flat.dtype
        self._units.append(unit)


def _state_of(module: Any) -> Any:
    composable: Any = sys.modules.get("torch.distributed._composable_state")
    known = getattr(composable, "_module_state_mapping", {}).get(module)
    return known() if callable(known) else known


def _fsdp2_settings(state: Any) -> dict[str, Any] | None:
    """Settings of a unit; None: inner units have all its parameters."""
    groups = getattr(state, "_fsdp_param_groups", None)  # since 2.11; before that there was only one
    if groups is None:
        groups = [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
    if not groups:
        return None
    policy = getattr(state, "_mp_policy", None)
    offload = getattr(groups[0], "offload_policy", None)
    explicit = bool(getattr(state, "_states_to_backward_prefetch", ()))
    return {
        "strategy": FSDP2_STRATEGIES.get(type(getattr(groups[0], "mesh_info", None)).__name__),
        "reshard": any(getattr(group, "post_forward_mesh_info", None) is not None for group in groups),
        "param_dtype": getattr(policy, "param_dtype", None),
        "reduce_dtype": getattr(policy, "reduce_dtype", None),
        "cpu_offload": any(kind.__name__ == "CPUOffloadPolicy" for kind in type(offload).__mro__),
        "forward_prefetch": bool(getattr(state, "_states_to_forward_prefetch", ())),
        # By default FSDP2 prefetches in backward in the order of the forward.
        "backward_prefetch": EXPLICIT if explicit else "implicit",
    }


def _dtype_text(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _enum_text(value: Any) -> str | None:
    """``BackwardPrefetch.BACKWARD_PRE`` as ``backward_pre``."""
    return None if value is None else str(getattr(value, "name", value)).lower().lstrip("_")


# -- Model ------------------------------------------------------------------------------------------------------------

MODULES_AT_ONCE = 16
"""Modules between two checks of the clock."""
MAX_BUCKETS = 32
"""Buckets whose sizes are recorded."""
MAX_MESHES = 8
MAX_WRAPPERS = 8
MIB = 1 << 20
SYNC = "SyncBatchNorm"
COMPILED = "OptimizedModule"
"""The class that ``torch.compile`` turns a module into."""


class ModelWalk:
    """Counts one root."""

    def __init__(self, root: Any) -> None:
        self.root = weakref.ref(root)
        self.facts: dict[str, Any] | None = None
        """``model``, ``ddp``, ``fsdp``, ``mesh`` and ``peers``, if there are any; None until everything is counted."""
        self._left: list[tuple[weakref.ref[Any], bool, int]] = [(self.root, False, NO_UNIT)]
        """Modules to visit, whether they are inside a DDP, and the FSDP unit around them."""
        self._seen: set[int] = set()
        self._classes: dict[int, tuple[str, int]] = {}
        """How many modules of each class."""
        self._fsdp_classes: dict[int, int] = {}
        """Classes that FSDP created, and its version."""
        self._units = FsdpUnits()
        self._normalizing: dict[int, bool] = {}
        """Whether the modules of a class are plain BatchNorm layers."""
        self._own_statistics = 0
        """BatchNorm layers in a DDP that use the statistics of their own rank's batch."""
        self._parameter_classes: dict[int, bool] = {}
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
                with torch_functions_off():
                    self._visit(module, in_ddp, unit)
            visited += 1
            if visited % MODULES_AT_ONCE == 0 and now() >= until_ns:
                break
        if not self._left and self.facts is None:
            self.facts = self._sum_up()
            self._seen.clear()
            for known in (self._classes, self._parameter_classes, self._fsdp_classes, self._normalizing):
                known.clear()  # by id of a class, which may go

    def reducer_facts(self) -> dict[str, Any]:
        """How DDP packs the gradients now, and whether it found parameters that took no part in an iteration.

        After the first iterations DDP rebuilds the buckets in the order in which the gradients arrived.
        """
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None:
            return {}
        figures = ddp.logger._get_ddp_logging_data()
        listed = (figures.strs_map.get("rebuilt_bucket_sizes") or figures.strs_map.get("bucket_sizes", "")).split(",")
        sizes = [int(size) for size in listed if size.strip().isdigit()]
        return {
            "buckets": len(sizes),
            "bucket_sizes_mb": [round(size / MIB, 3) for size in sizes[:MAX_BUCKETS]],
            "tensors": figures.ints_map.get("num_parameter_tensors"),
            **_unused_facts(ddp, figures.ints_map),
        }

    def _visit(self, module: Any, in_ddp: bool, unit: int) -> None:
        self._seen.add(id(module))
        kind = type(module)
        name, number = self._classes.get(id(kind), ("", 0))
        self._classes[id(kind)] = name or class_name(module), number + 1
        own = attributes_of(module) or {}
        if not number and not in_ddp and _is_ddp(module):  # a second DDP is ignored
            in_ddp = True
            self._ddp = weakref.ref(module)
        if not number:
            self._fsdp_classes[id(kind)] = fsdp_version(kind)
            self._normalizing[id(kind)] = _is_plain_batchnorm(kind)
        if self._fsdp_classes[id(kind)]:
            unit = self._units.enter(self._fsdp_classes[id(kind)], module, unit)
        if in_ddp and self._normalizing[id(kind)] and own.get("training"):
            self._own_statistics += 1
        if own.get("_compiled_call_impl") is not None:
            self._compiled = True
        for parameter in (own.get("_parameters") or {}).values():
            if parameter is not None and id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                self._count(parameter, in_ddp, unit)
        children = (own.get("_modules") or {}).values()
        self._left += [(weakref.ref(child), in_ddp, unit) for child in children if child is not None]

    def _count(self, parameter: Any, in_ddp: bool, unit: int) -> None:
        dtype = parameter.dtype
        size = parameter.numel()
        self._sizes[dtype] = self._sizes.get(dtype, 0) + size
        if in_ddp and parameter.requires_grad:
            self._gradient_bytes += size * dtype.itemsize
        kind = type(parameter)
        meshed = self._parameter_classes.get(id(kind))
        if meshed is None:
            meshed = self._parameter_classes[id(kind)] = hasattr(kind, "device_mesh")
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
        named = list(self._classes.values())
        model: dict[str, Any] = {
            "class": _own_class(type(inner)).__name__,
            "parameters": self.parameters,
            "modules": sum(layers for _, layers in named),
            "batchnorm": sum(layers for name, layers in named if "BatchNorm" in name and name != SYNC),
            "sync_batchnorm": sum(layers for name, layers in named if name == SYNC),
            "compiled": self._compiled or any(name == COMPILED for name, _ in named),
            "dtype": self.dtype,
        }
        units = self._units.facts()
        if units:
            # For FSDP1's flat parameters the walk has seen this rank's part only.
            model["parameters"] = max(self.parameters, units["fsdp"]["parameters"])
        meshes = [mesh for mesh in (known() for known in self._meshes) if mesh is not None]
        sharded = is_fully_sharded(type(inner))
        facts = {"model": model, **units, **mesh_facts(meshes, sharded=sharded)}
        ddp = None if self._ddp is None else self._ddp()
        if ddp is not None:
            gradient = {"gradient_mb": round(self._gradient_bytes / MIB, 3), "group": display_name(ddp.process_group)}
            hook = {"comm_hook": place} if (place := _comm_hook(ddp)) else {}
            facts["ddp"] = {**_ddp_settings(ddp), "batchnorm": self._own_statistics, **gradient, **hook}
            replicas = group_facts(sys.modules["torch.distributed"], ddp.process_group)
            # A mesh may know more ranks with the same work: those of tensor parallelism.
            if _peers_in(replicas) > _peers_in(facts):
                facts.update(replicas)
        return facts


def _peers_in(facts: dict[str, Any]) -> int:
    """The number of peers."""
    return sum(run[1] for run in facts.get("peers", ()))


def _ddp_settings(ddp: Any) -> dict[str, Any]:
    names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers")
    settings: dict[str, Any] = {name: bool(getattr(ddp, name)) for name in names if hasattr(ddp, name)}
    return {"bucket_mb": round(ddp.bucket_bytes_cap / MIB, 3), **settings}


def _comm_hook(ddp: Any) -> str:
    """``compress, train.py:40``: the function that the script gave DDP to exchange gradients with; empty: none."""
    hooks = getattr(ddp, "_comm_hooks", None)
    hook = hooks[-1][0] if type(hooks) is list and hooks else None
    hook = hook.__func__ if type(hook) is MethodType else hook
    if type(hook) is not FunctionType:
        return ""
    code = hook.__code__
    return f"{code.co_name}, {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


def _unused_facts(ddp: Any, figures: Any) -> dict[str, Any]:
    """What find_unused_parameters=True found so far; {}: it is off, or nothing is known yet.

    The reducer compares every iteration's unused parameters with those of the one before.  If they never changed, the
    iteration that DDP logged last represents all of them.
    """
    iterations, unused_bytes = figures.get("iteration"), figures.get("unused_parameter_size")
    is_static = getattr(ddp.reducer, "_ddp_graph_static", None)
    searched = bool(getattr(ddp, "find_unused_parameters", False)) and not getattr(ddp, "static_graph", False)
    if not searched or is_static is None or iterations is None or unused_bytes is None:
        return {}
    return {"iterations": iterations, "unused": "varying" if not is_static() else "same" if unused_bytes else "none"}


def _is_plain_batchnorm(kind: type) -> bool:
    """Also excludes the frozen kind that libraries have, which torch does not regard as BatchNorm."""
    loaded: Any = sys.modules.get("torch.nn.modules.batchnorm")
    return loaded is not None and issubclass(kind, loaded._BatchNorm) and not issubclass(kind, loaded.SyncBatchNorm)


def _is_ddp(module: Any) -> bool:
    loaded: Any = sys.modules.get("torch.nn.parallel.distributed")
    return loaded is not None and isinstance(module, loaded.DistributedDataParallel)


def unwrapped(module: Any) -> Any:
    """The user's own model inside DDP, FSDP1 and ``torch.compile``."""
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


def named_parameters(root: Any) -> Iterator[tuple[str, Any]]:
    """As ``nn.Module`` names them, without its method, which a class of the script may replace; in the same order."""
    left = [("", root)]
    seen: set[int] = set()
    while left:
        prefix, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        children = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
        left += reversed(children)


def _own_class(kind: type) -> type:
    return kind.__bases__[-1] if is_fully_sharded(kind) else kind


# -- Autocast ---------------------------------------------------------------------------------------------------------
# The dtype in which autocast runs the model, found without entering the model: autocast is on around the call of a
# root; or its ``forward`` is wrapped in one (by a decorator, or by Accelerate); or the parameters are wide and the
# output is narrow.

NARROW_DTYPES = ("bfloat16", "float16")


def autocast_around_call(torch: Any, module: Any) -> str | None:
    """The dtype of the autocast that is now active for the module's device; None if it is off."""
    _, first = next(named_parameters(module))
    device = first.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def autocast_seen_in(module: Any, output_dtype: str, parameter_dtype: str) -> str | None:
    """The same, found from the outside after the call."""
    for each in (module, unwrapped(module)):
        wrapped = _autocast_in_wrappers(each.forward)
        if wrapped is not None:
            return wrapped
    return output_dtype if output_dtype in NARROW_DTYPES and parameter_dtype == "float32" else None


def _autocast_in_wrappers(function: Any) -> str | None:
    """The dtype of an enabled ``torch.autocast`` among the variables of a wrapper, or of what it wraps."""
    for _ in range(MAX_WRAPPERS):
        function = getattr(function, "__func__", function)
        for cell in getattr(function, "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not yet filled
                continue
            if type(value).__name__ == "autocast" and getattr(value, "_enabled", False):
                return str(value.fast_dtype).removeprefix("torch.")
        function = getattr(function, "__wrapped__", None)
    return None
