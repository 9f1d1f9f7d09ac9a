"""How FSDP has wrapped a model: its units, and the settings they were made with.

A *unit* is what FSDP gathers and frees together.  FSDP1 wraps a module in ``FullyShardedDataParallel``, which has one
flat parameter; ``fully_shard`` (FSDP2) gives a module, or several, a state, and shards the parameters in them that no
inner unit has.  The walk over the model (``recorder/model.py``) says which modules it meets.  Attributes are read and
nothing is kept but plain values.  Most of the names are private to torch (2.10 to 2.15 have them): what is missing is
left out.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["NO_UNIT", "FsdpUnits", "fsdp_version", "is_fully_sharded"]

NO_UNIT = -1
FSDP1 = "FullyShardedDataParallel"
MADE_BY_FSDP2 = ("FSDPModule", "ReplicateModule")
STRATEGIES = {"FSDPMeshInfo": "full_shard", "HSDPMeshInfo": "hybrid_shard", "DDPMeshInfo": "no_shard"}
"""FSDP2's, by the names that FSDP1 has for them."""
RESHARDING = ("full_shard", "hybrid_shard")
"""Of FSDP1: the other strategies keep parameters gathered between forward and backward."""

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
    """Whether FSDP2 has made this class: ``FSDPNet``, out of itself and ``Net``."""
    return kind.__bases__[0].__name__ in MADE_BY_FSDP2


class _Unit:
    def __init__(self, settings: dict[str, Any], parameters: int = 0) -> None:
        self.settings = settings
        self.parameters = parameters
        self.dtype: Any = None


class FsdpUnits:
    """The units of one model."""

    def __init__(self) -> None:
        self._units: list[_Unit] = []
        self._by_state: dict[int, int] = {}
        """Modules that ``fully_shard`` got as a list share a state, by its id."""
        self._version = 0

    def enter(self, version: int, module: Any, outer: int) -> int:
        """The number of the unit that the module's parameters belong to; ``outer``: of the unit around it."""
        if version == 1:
            self._version = self._version or 1
            self._enter_wrapper(module)
            return NO_UNIT  # its size is known from the flat parameter
        state = _state_of(module)
        if state is None:
            return outer
        known = self._by_state.get(id(state))
        if known is None:
            settings = _settings_of_state(state)
            if settings is None:
                return outer
            self._version = 2
            known = self._by_state[id(state)] = len(self._units)
            self._units.append(_Unit(settings))
        return known

    def count(self, number: int, size: int, dtype: Any) -> None:
        """A sharded parameter of so many elements in all, of that unit."""
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
        explicit = any(one["backward_prefetch"] == EXPLICIT for one in settings)
        param_dtype = largest.settings["param_dtype"] or largest.dtype
        reduce_dtype = largest.settings["reduce_dtype"] or param_dtype
        facts = {
            "version": self._version,
            "units": len(units),
            "parameters": total,
            "largest_share": round(largest.parameters / total, 4),
            "strategy": largest.settings["strategy"],
            "resharded_units": sum(bool(one["reshard"]) for one in settings),
            "param_dtype": _dtype_text(param_dtype),
            "reduce_dtype": _dtype_text(reduce_dtype),
            "cpu_offload": any(one["cpu_offload"] for one in settings),
            "forward_prefetch": any(one["forward_prefetch"] for one in settings),
            "backward_prefetch": EXPLICIT if explicit else largest.settings["backward_prefetch"],
        }
        optional = ("backward_prefetch",)
        return {"fsdp": {name: value for name, value in facts.items() if value is not None or name in optional}}

    def _enter_wrapper(self, module: Any) -> None:
        flat: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
        size = getattr(flat, "_unpadded_unsharded_size", None)
        if size is None:
            return  # all of its parameters are in units further in
        strategy = _enum_text(getattr(module, "sharding_strategy", None))
        precision = getattr(module, "mixed_precision", None)
        settings = {
            "strategy": strategy,
            "reshard": strategy in RESHARDING,
            "param_dtype": getattr(precision, "param_dtype", None),
            "reduce_dtype": getattr(precision, "reduce_dtype", None),
            "cpu_offload": bool(getattr(getattr(module, "cpu_offload", None), "offload_params", False)),
            "forward_prefetch": bool(getattr(module, "forward_prefetch", False)),
            "backward_prefetch": _enum_text(getattr(module, "backward_prefetch", None)),
        }
        unit = _Unit(settings, size.numel())
        unit.dtype = flat.dtype
        self._units.append(unit)


def _state_of(module: Any) -> Any:
    composable: Any = sys.modules.get("torch.distributed._composable_state")
    known = getattr(composable, "_module_state_mapping", {}).get(module)
    return known() if callable(known) else known


def _settings_of_state(state: Any) -> dict[str, Any] | None:
    """None: it has no parameters of its own, since inner units have them all."""
    groups = getattr(state, "_fsdp_param_groups", None)  # since 2.11; before that there was only one
    if groups is None:
        groups = [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]
    if not groups:
        return None
    policy = getattr(state, "_mp_policy", None)
    offload = getattr(groups[0], "offload_policy", None)
    explicit = bool(getattr(state, "_states_to_backward_prefetch", ()))
    return {
        "strategy": STRATEGIES.get(type(getattr(groups[0], "mesh_info", None)).__name__),
        "reshard": any(getattr(group, "post_forward_mesh_info", None) is not None for group in groups),
        "param_dtype": getattr(policy, "param_dtype", None),
        "reduce_dtype": getattr(policy, "reduce_dtype", None),
        "cpu_offload": any(kind.__name__ == "CPUOffloadPolicy" for kind in type(offload).__mro__),
        "forward_prefetch": bool(getattr(state, "_states_to_forward_prefetch", ())),
        # Unless told otherwise, FSDP2 prefetches in backward in the order in which forward came by.
        "backward_prefetch": EXPLICIT if explicit else "implicit",
    }


def _dtype_text(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _enum_text(value: Any) -> str | None:
    """``BackwardPrefetch.BACKWARD_PRE`` as ``backward_pre``."""
    return None if value is None else str(getattr(value, "name", value)).lower().lstrip("_")
