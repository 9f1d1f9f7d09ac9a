"""The modules of a model as a tree: their names, who owns which parameters, and which ranks hold the same ones.

Wrappers (DDP, FSDP1, ``torch.compile``, activation checkpointing) are left out: what they wrap takes their place, so
names are those that the script uses, and what a wrapper owns itself counts for what is in it.

*What may be called* of the script's objects: nothing.  Of a module its dicts of children, parameters and buffers are
read, which torch itself reads in each call, never its methods or properties; of a tensor sizes, dtypes and placements,
while ``__torch_function__`` is off (by the caller), never values; of an optimizer ``state``.
*How long it may take*: some microseconds for each of at most ``MOST_MODULES`` modules, once for a model and again when
it has changed; it counts towards the cost of a sample (``Schedule`` in ``sampler.py``).
*What may be kept alive*: nothing; modules are held by weak references.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from types import FunctionType
from typing import Any

from stepscope.recorder.model import fsdp_version, is_fully_sharded, named_parameters
from stepscope.recorder.process_groups import whole_mesh
from stepscope.recorder.variables import attributes_of, class_name
from stepscope.records.collectives import is_data_dimension

__all__ = ["MOST_MODULES", "ModuleTree", "local_part", "tensor_bytes"]

MOST_NODES = 3_000
"""In larger models only the upper levels are shown; what is below counts for them."""
MOST_MODULES = 50_000
"""Larger models are not sampled."""
COUNT_AGAIN = 16
"""Samples after which sizes are counted again although nothing seems to have changed."""
MAX_MESHES = 8
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_forward_module",
}
"""By class: the child that a wrapper wraps."""
LEFT_TO_RANKS = "localSGD"
"""In the name of a DDP communication hook after which replicas differ on purpose."""


class _Node:
    __slots__ = ("depth", "kind", "name", "owners", "parent")

    def __init__(self, name: str, kind: str, parent: int, depth: int) -> None:
        self.name = name
        self.kind = kind
        self.parent = parent
        self.depth = depth
        self.owners: list[weakref.ref[Any]] = []
        """The module itself, then those whose parameters count for it: its wrappers, and what is too deep to show."""


class ModuleTree:
    """The tree of one model as it was when it was walked; ``is_current`` says whether it still is."""

    def __init__(self, root: Any, *, compiled: bool) -> None:
        """``compiled``: this process has compiled code, maybe functions that call modules of the model."""
        self.root = weakref.ref(root)
        self.nodes: list[_Node] = []
        """Empty if the model is too large."""
        self.compiled = self._compiled_before = compiled
        """Whether it may run as compiled code."""
        self._signatures: list[tuple[weakref.ref[Any], tuple[Any, ...]]] = []
        sharing = _Sharing()
        self._walk(root, sharing)
        for _, parameter in self.parameters():
            sharing.meet(parameter)
        if len(self.nodes) > MOST_MODULES:
            self.nodes.clear()
        elif len(self.nodes) > MOST_NODES:
            self._cut()
        self.leaf = [True] * len(self.nodes)
        for node in self.nodes:
            if node.parent >= 0:
                self.leaf[node.parent] = False
        self.replicated, self.group = sharing.replicated, sharing.group
        self.rows: list[list[Any]] = []
        """``[name, class, parent, elements, trainable]`` of each node."""
        self.unsummed: set[int] = set()
        """Nodes with parameters that DDP does not keep equal."""
        self._sizes: tuple[Any, int, dict[str, list[int]]] | None = None
        """Bytes that were counted, for which optimizers, and how often they were used since."""
        self.id = self._count(sharing)
        self.bucket_bytes = self._bucket_bytes(sharing.ddp)
        """Of DDP's buckets, which exist as long as the model …"""
        self.grads_in_buckets = bool(getattr(sharing.ddp, "gradient_as_bucket_view", False))
        """… and whether gradients are in them, instead of being copied into them."""
        self.gathered_bytes = self._gathered_bytes()
        """What FSDP2 needs on the way: parameters that it gathers, and gradients before they are reduced."""

    def is_current(self, *, compiled: bool) -> bool:
        if compiled != self._compiled_before:
            return False
        for reference, signature in self._signatures:
            module = reference()
            if module is None or _signature(module) != signature:
                return False
        return True

    def timed(self) -> Iterator[tuple[int, int]]:
        """The ``id`` of each module that is a node, and the node's index."""
        for at, node in enumerate(self.nodes):
            module = node.owners[0]()
            if module is not None:
                yield id(module), at

    def parameters(self) -> Iterator[tuple[int, Any]]:
        """The index of the owner and the parameter, each once: a shared one belongs to the first owner."""
        seen: set[int] = set()
        for at, node in enumerate(self.nodes):
            for reference in node.owners:
                module = reference()
                if module is not None:
                    for parameter in module._parameters.values():
                        if parameter is None or id(parameter) in seen or hasattr(type(parameter), "materialize"):
                            continue  # or a lazy one that has no shape yet
                        seen.add(id(parameter))
                        yield at, parameter

    def buffers(self) -> Iterator[tuple[int, Any]]:
        seen: set[int] = set()
        for at, node in enumerate(self.nodes):
            for reference in node.owners:
                module = reference()
                if module is not None and module._buffers:
                    for buffer in module._buffers.values():
                        if buffer is None or id(buffer) in seen or hasattr(type(buffer), "materialize"):
                            continue
                        seen.add(id(buffer))
                        yield at, buffer

    def held_bytes(self, torch: Any, optimizers: Sequence[Any]) -> dict[str, list[int]]:
        """Bytes of parameters, optimizer state and buffers; counted again when the optimizers change, and at times."""
        key = tuple([(id(optimizer), len(optimizer.state)) for optimizer in optimizers])
        if self._sizes is None or self._sizes[0] != key or self._sizes[1] >= COUNT_AGAIN:
            found = {name: [0] * len(self.nodes) for name in ("parameters", "optimizer", "buffers")}
            for at, parameter in self.parameters():
                found["parameters"][at] += tensor_bytes(local_part(parameter))
                for optimizer in optimizers:
                    for value in (optimizer.state.get(parameter) or {}).values():
                        if isinstance(value, torch.Tensor):
                            found["optimizer"][at] += tensor_bytes(local_part(value))
            for at, buffer in self.buffers():
                found["buffers"][at] += tensor_bytes(local_part(buffer))
            self._sizes = (key, 0, found)
        _, uses, found = self._sizes
        self._sizes = (key, uses + 1, found)
        return dict(found)

    def device_types(self) -> set[str]:
        """Where its parameters are."""
        return {local_part(parameter).device.type for _, parameter in self.parameters()}

    def gradient_bytes(self) -> int:
        """Of the gradients that exist now."""
        if self.grads_in_buckets:
            return self.bucket_bytes
        gradients = [parameter.grad for _, parameter in self.parameters() if parameter.is_leaf]
        return sum(tensor_bytes(local_part(gradient)) for gradient in gradients if gradient is not None)

    def _walk(self, root: Any, sharing: _Sharing) -> None:
        seen: set[int] = set()
        left: list[tuple[Any, str, int, int]] = [(root, "", -1, 0)]
        while left and len(self.nodes) <= MOST_MODULES:
            module, name, parent, depth = left.pop()
            wrappers = []
            while (inside := self._unwrap(module, sharing)) is not None:
                wrappers.append(module)
                module = inside
            if id(module) in seen:
                continue
            seen.add(id(module))
            at, kind = len(self.nodes), type(module)
            kind = kind.__bases__[-1] if is_fully_sharded(kind) else kind
            node = _Node(name, kind.__name__, parent, depth)
            node.owners = [weakref.ref(part) for part in (module, *wrappers)]
            self.nodes.append(node)
            self._signatures += [(reference, _signature(reference())) for reference in node.owners]
            self.compiled = self.compiled or getattr(module, "_compiled_call_impl", None) is not None
            prefix = f"{name}." if name else ""
            left += [
                (child, prefix + key, at, depth + 1)
                for key, child in reversed(module._modules.items())
                if child is not None
            ]

    def _unwrap(self, module: Any, sharing: _Sharing) -> Any:
        """What a wrapper wraps; None: it is no wrapper."""
        kind = type(module)
        key = WRAPPERS.get(kind.__name__)
        inside = None if key is None else module._modules.get(key)
        if inside is None:
            return None
        if kind.__name__ == "OptimizedModule":
            self.compiled = True
        elif kind.__name__ == "DistributedDataParallel":
            sharing.ddp = sharing.ddp or module
        elif fsdp_version(kind) == 1:
            sharing.flat = True
        return inside

    def _cut(self) -> None:
        """Keep the levels that together have few enough modules; the parents of deeper ones take what they hold."""
        levels = Counter(node.depth for node in self.nodes)
        total = deepest = 0
        while total + levels[deepest] <= MOST_NODES:
            total += levels[deepest]
            deepest += 1
        upper: list[_Node] = []
        moved: list[int] = []
        for node in self.nodes:
            parent = moved[node.parent] if node.parent >= 0 else -1
            if node.depth >= deepest and parent >= 0:
                upper[parent].owners += node.owners
                moved.append(parent)
                continue
            node.parent = parent
            moved.append(len(upper))
            upper.append(node)
        self.nodes = upper

    def _bucket_bytes(self, ddp: Any) -> int:
        if ddp is None:
            return 0
        trained = [parameter for _, parameter in self.parameters() if parameter.requires_grad]
        return sum(parameter.numel() * parameter.element_size() for parameter in trained)

    def _gathered_bytes(self) -> int:
        """The parameters of the outermost group, two further groups, and the gradients of one, twice: as they are
        computed, and as they are reduced."""
        groups: dict[int, int] = {}
        for at, parameter in self.parameters():
            if local_part(parameter) is parameter:
                continue
            group = at
            while group >= 0 and not is_fully_sharded(type(self.nodes[group].owners[0]())):
                group = self.nodes[group].parent
            if group < 0:
                continue  # split for another reason
            groups[group] = groups.get(group, 0) + parameter.numel() * parameter.element_size()
        return groups.pop(0, 0) + 4 * max(groups.values(), default=0)

    def _count(self, sharing: _Sharing) -> str:
        """Fill ``rows``; return the model's id."""
        elements, trainable = [0] * len(self.nodes), [0] * len(self.nodes)
        ignored = sharing.ignored
        digest = blake2b(digest_size=8)
        for at, parameter in self.parameters():
            local = local_part(parameter)
            size = local.numel()
            elements[at] += size
            if parameter.requires_grad:
                trainable[at] += size
            shape = "" if sharing.flat else tuple(parameter.shape)  # FSDP1's shards differ from rank to rank
            digest.update(f"{at} {shape} {parameter.dtype} {parameter.requires_grad}\n".encode())
            if id(parameter) in ignored:
                self.unsummed.add(at)
        for node, size, trained in zip(self.nodes, elements, trainable, strict=True):
            self.rows.append([node.name, node.kind, node.parent, size, trained])
            digest.update(f"{node.name} {node.kind} {node.parent}\n".encode())
        digest.update(f"{self.compiled} {self.replicated}".encode())
        return digest.hexdigest()


def local_part(tensor: Any) -> Any:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def tensor_bytes(tensor: Any) -> int:
    if tensor.is_sparse:
        return int(tensor._values().nbytes + tensor._indices().nbytes)
    return int(tensor.numel() * tensor.element_size())


def _signature(module: Any) -> tuple[Any, ...]:
    """Changes when a module's children or parameters do."""
    parameters = module._parameters.values()
    return (
        tuple(map(id, module._modules.values())),
        tuple([parameter is not None and (id(parameter), parameter.requires_grad) for parameter in parameters]),
        getattr(module, "_compiled_call_impl", None) is not None,
    )


# -- Replicas ---------------------------------------------------------------------------------------------------------
# Only what is said to be kept equal is compared: the parameters of DDP, and those of a device mesh along the dimensions
# in which they are replicated.  Everything else (FSDP's shards, tensor parallelism without a mesh, ranks that train for
# themselves) may differ.


class _Sharing:
    def __init__(self) -> None:
        self.ddp: Any = None
        self.flat = False
        """Whether FSDP1 has flattened and sharded parameters."""
        self._own = False
        """Whether there are parameters that no mesh knows about …"""
        self._foreign = False
        """… or that another library has split."""
        self._sharded: dict[int, tuple[Any, list[bool]]] = {}
        """By id of a mesh: the mesh, and along which of its dimensions any parameter is sharded."""

    def meet(self, parameter: Any) -> None:
        if not hasattr(type(parameter), "device_mesh"):
            self._own = True
            self._foreign = self._foreign or (attributes_of(parameter) or {}).get("tensor_model_parallel") is True
            return
        mesh = parameter.device_mesh
        if id(mesh) not in self._sharded and len(self._sharded) < MAX_MESHES:
            self._sharded[id(mesh)] = (mesh, [False] * mesh.ndim)
        known = self._sharded.get(id(mesh))
        if known is None:
            self._foreign = True
            return
        for at, placement in enumerate(parameter.placements):
            known[1][at] = known[1][at] or not placement.is_replicate()

    @property
    def ignored(self) -> set[int]:
        """The ids of parameters that DDP leaves alone."""
        names = getattr(self.ddp, "parameters_to_ignore", None)
        if not names:
            return set()
        return {id(parameter) for name, parameter in named_parameters(self.ddp._modules["module"]) if name in names}

    @property
    def replicated(self) -> bool:
        if self.flat or self._foreign:
            return False
        if self.ddp is not None:
            hooks = getattr(self.ddp, "_comm_hooks", ())
            return not any(LEFT_TO_RANKS in _function_name(hook) for hook, *_ in hooks)
        meshes = list(self._sharded.values())
        if self._own or len(meshes) != 1:
            return False
        mesh, sharded = meshes[0]
        return any(size > 1 and not split for size, split in zip(mesh.shape, sharded, strict=True))

    @property
    def group(self) -> str:
        """This rank's coordinates along the dimensions in which ranks hold different parameters."""
        found: dict[str, int] = {}
        for mesh, sharded in self._sharded.values():
            names = [str(name) for name in mesh.mesh_dim_names or ()] or [f"dim{at}" for at in range(mesh.ndim)]
            places = zip(names, mesh.get_coordinate() or (), sharded, strict=False)
            found |= {name: at for name, at, split in places if split}
            whole = whole_mesh(mesh)
            for name, at in zip(whole.mesh_dim_names or (), whole.get_coordinate() or (), strict=False):
                if name not in names and not is_data_dimension(str(name)):
                    found[str(name)] = at
        return ",".join(f"{name}={at}" for name, at in sorted(found.items()))


def _function_name(hook: Any) -> str:
    """Of a communication hook, which may be an object of the script: its attributes are not asked for."""
    return hook.__name__ if type(hook) is FunctionType else class_name(hook)
