"""What the autograd graph of a sampled step keeps for backward, what backward needs on its way, and its model FLOPs.

When backward is called, every tensor that an operation saved is still in the graph.  ``AutogradGraph.walk`` visits its
nodes and reads sizes and shapes only: no value is read, nothing saved is unpacked (that would run the forward of
activation checkpointing again), and no node or tensor is kept.  Sequence numbers of the nodes say which module made
them: they are counted up while the modules are called.

``peak`` then plays backward through, node after node, as autograd's engine does: an operation's saved tensors are freed
behind it, gradients flow from node to node, those of parameters stay.

FLOPs are those of matrix products, convolutions and attention, forward and backward; what activation checkpointing
computes again is not counted.  They are unknown if a part of the graph is one compiled function, or is only built in
backward.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from stepscope.recorder.layers.tree import local_part

__all__ = ["AutogradGraph"]

MOST_NODES = 20_000
"""A larger graph is not looked at: a node takes some microseconds."""
MOST_WALKS = 4
"""Of one step.  More calls of backward (gradient accumulation) are taken to be like these."""
NO_SEQUENCE = 1 << 63
"""AccumulateGrad has the largest number there is."""
OPAQUE = ("CompiledFunctionBackward", "CheckpointFunctionBackward")
"""Nodes behind which there is more than can be seen."""
PASSED_ON = frozenset(
    {
        *("Add", "Alias", "Clone", "Detach", "Expand", "Permute", "ReshapeAlias", "Squeeze", "Sub"),
        *("T", "Transpose", "UnsafeView", "Unsqueeze", "View"),
    }
)
"""Operations whose gradient is, or shares memory with, the one that they receive."""


SLOTS: dict[type, tuple[str, ...]] = {}
"""By the class of a node, of those that torch itself has: the names of what it may have saved."""


class _Node:
    __slots__ = ("bytes", "flops", "hooked", "nexts", "owner", "parameter", "passes_on", "saved", "sequence")

    def __init__(self, sequence: int, owner: int) -> None:
        self.sequence = sequence
        self.owner = owner
        """The module that made it; -1: none, such as a loss."""
        self.bytes = 0
        """Of the gradients that it receives."""
        self.saved: list[int] = []
        """Addresses of what it saved."""
        self.hooked = False
        """Whether what it saved is somewhere else: computed again, or moved away."""
        self.nexts: list[_Node] = []
        self.parameter = -1
        """For AccumulateGrad: the bytes of the parameter whose gradient it makes."""
        self.passes_on = False
        self.flops = 0


class AutogradGraph:
    """The graphs of one step.  The hooks of ``SampledStep`` call ``enter`` and ``leave`` around each module."""

    def __init__(self, torch: Any, parameters: Sequence[Any], buffers: Iterable[Any], device_type: str) -> None:
        self._torch = torch
        self._now = torch._C._autograd._get_sequence_nr
        self._device_type = device_type
        self._parameters = {id(one) for one in parameters}
        self._known = {_address(local_part(one)) for one in (*parameters, *buffers)}
        """Addresses of what operations save, too, but which exists in any case."""
        whole = sum(one.numel() * one.element_size() for one in parameters)
        own = sum(one.numel() * one.element_size() for one in map(local_part, parameters))
        self._shard = own / whole if whole else 1.0
        """This rank's share of the parameters."""
        self._sequences: list[int] = [-1]
        self._owners: list[int] = [-1]
        self._inside: list[int] = []
        self._nodes: list[_Node] = []
        """Of the largest graph, in the order in which backward executes them."""
        self._sizes: dict[int, tuple[int, int]] = {}
        """Of that graph, by address: bytes of a saved tensor, and the module that saved it first."""
        self._returned: list[tuple[int, weakref.ref[Any]]] = []
        self._flops: dict[int, int] = {}
        """By module, of all graphs."""
        self._counted: set[int] = set()
        self._opaque = False
        self._backwards = 0
        self._walks = 0
        self._too_large = False

    # -- During the step ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The script calls a model: whatever an exception left open before is over."""
        self._inside.clear()

    def enter(self, at: int) -> None:
        self._inside.append(at)
        self._sequences.append(self._now())
        self._owners.append(at)

    def leave(self, at: int) -> None:
        inside = self._inside
        while inside and inside.pop() != at:
            pass
        self._sequences.append(self._now())
        self._owners.append(inside[-1] if inside else -1)

    def keep(self, at: int, tensors: Sequence[Any]) -> None:
        """A module returned these, and no node may have saved them: they count if they still exist at backward.

        The script holds the output of the model, and activation checkpointing the input of what it computes again.
        """
        for tensor in tensors:
            if type(tensor) is self._torch.Tensor and len(self._returned) < MOST_NODES:
                self._returned.append((at, weakref.ref(tensor)))

    def walk(self, tensors: Any) -> None:
        """Backward is about to begin from these tensors."""
        self._backwards += 1
        if self._walks >= MOST_WALKS or self._too_large:
            return
        self._walks += 1
        if isinstance(tensors, self._torch.Tensor):
            tensors = (tensors,)
        roots = [one.grad_fn for one in tensors if isinstance(one, self._torch.Tensor) and one.grad_fn is not None]
        read = self._read(roots)
        if read is None:
            self._too_large = True
            return
        nodes, sizes = read
        for at, reference in self._returned:
            tensor = reference()
            if tensor is not None and tensor.device.type == self._device_type:
                address = _address(tensor)
                if address and address not in self._known:
                    sizes.setdefault(address, (tensor.untyped_storage().nbytes(), at))
        self._returned.clear()
        if not self._nodes or _total(sizes) > _total(self._sizes):
            self._nodes, self._sizes = nodes, sizes

    def _read(self, roots: Sequence[Any]) -> tuple[list[_Node], dict[int, tuple[int, int]]] | None:
        found: dict[int, _Node] = {}
        alive: list[Any] = []
        """The nodes' objects, so that none of them is made anew with the id of another one."""
        sizes: dict[int, tuple[int, int]] = {}
        left: list[Any] = []

        def meet(function: Any) -> _Node:
            node = found.get(id(function))
            if node is None:
                sequence = function._sequence_nr()
                node = found[id(function)] = _Node(sequence, self._owner_of(sequence))
                alive.append(function)
                left.append(function)
            return node

        for root in roots:
            meet(root)
        while left:
            if len(found) > MOST_NODES:
                return None
            function = left.pop()
            node = found[id(function)]
            if node.sequence >= NO_SEQUENCE:
                node.parameter = self._gradient_bytes(function.variable)
                continue
            name = type(function).__name__
            node.bytes = sum(prod(one.shape) * one.dtype.itemsize for one in function._input_metadata)
            node.passes_on = name.rstrip("0123456789").removesuffix("Backward") in PASSED_ON
            self._opaque = self._opaque or name in OPAQUE
            shapes = self._read_saved(function, node, sizes)
            edges = [edge[0] for edge in function.next_functions]
            node.nexts = [meet(edge) for edge in edges if edge is not None]
            if node.sequence not in self._counted:
                self._counted.add(node.sequence)
                flops = _flops(name, function, shapes, edges)
                if flops:
                    self._flops[node.owner] = self._flops.get(node.owner, 0) + flops
        owned = {address: (size, self._owner_of(sequence)) for address, (size, sequence) in sizes.items()}
        return sorted(found.values(), key=lambda one: -one.sequence), owned

    def _read_saved(self, function: Any, node: _Node, sizes: dict[int, tuple[int, int]]) -> dict[str, Sequence[int]]:
        """Note the sizes of what a node saved; return shapes by the names of the arguments."""
        kind = type(function)
        slots = SLOTS.get(kind)
        if slots is None:
            if isinstance(function, self._torch.autograd.function.BackwardCFunction):
                slots = ("_raw_saved_tensors",)
            else:
                slots = SLOTS[kind] = tuple(name for name in dir(function) if name.startswith("_raw_saved_"))
        shapes: dict[str, Sequence[int]] = {}
        for slot in slots:
            saved = getattr(function, slot)
            for one in saved if isinstance(saved, list | tuple) else (saved,):
                tensor = one.data
                if tensor is None:
                    continue
                if not isinstance(tensor, self._torch.Tensor):
                    node.hooked = True
                    continue
                shapes[slot.removeprefix("_raw_saved_")] = tensor.shape
                local = local_part(tensor)
                if local.device.type != self._device_type or local.layout is not self._torch.strided:
                    continue
                address = _address(local)
                if address and address not in self._known:
                    node.saved.append(address)
                    known = sizes.get(address)
                    if known is None:
                        sizes[address] = (local.untyped_storage().nbytes(), node.sequence)
                    elif node.sequence < known[1]:
                        sizes[address] = (known[0], node.sequence)
        return shapes

    def _gradient_bytes(self, variable: Any) -> int:
        """What backward adds for a parameter that has no gradient yet."""
        if variable.grad is not None:
            return 0
        size = local_part(variable).numel() * variable.element_size()
        # FSDP computes with gathered parameters, of whose gradients a shard remains.
        return size if id(variable) in self._parameters else int(size * self._shard)

    def _owner_of(self, sequence: int) -> int:
        # A module's nodes have the numbers from where it began up to, but not including, where it ended.
        return self._owners[bisect_right(self._sequences, sequence) - 1] if sequence < NO_SEQUENCE else -1

    # -- Figures --------------------------------------------------------------------------------------------------

    @property
    def known(self) -> bool:
        return bool(self._nodes)

    def activations(self) -> dict[int, int]:
        """By module: the bytes that were kept for backward; -1: for what is outside of modules."""
        found: dict[int, int] = {}
        for size, owner in self._sizes.values():
            found[owner] = found.get(owner, 0) + size
        return found

    def flops(self) -> dict[int, int]:
        """By module: FLOPs of all forward and backward passes of the step; {} if they are unknown."""
        if self._opaque or self._too_large or not self._walks:
            return {}
        return {owner: count * self._backwards // self._walks for owner, count in self._flops.items()}

    @property
    def last_module(self) -> int:
        """The last one of forward."""
        return next((node.owner for node in self._nodes if node.owner >= 0 and node.parameter < 0), -1)

    def peak(self, again: int) -> tuple[int, int]:
        """Backward's largest need on top of what existed before the step: bytes, and the module.

        ``again``: bytes of what activation checkpointing computes again for one module.
        """
        last_user: dict[int, _Node] = {}
        for node in self._nodes:
            for address in node.saved:
                last_user[address] = node
        freed: dict[int, int] = {}
        for address, node in last_user.items():
            freed[id(node)] = freed.get(id(node), 0) + self._sizes[address][0]
        saved, gradients, flowing = _total(self._sizes), 0, 0
        most, where = saved, self.last_module
        buffers: dict[int, _Buffer] = {}
        for node in self._nodes:
            if node.parameter >= 0:
                continue
            own = buffers.pop(id(node), None)
            if own is None:
                own = _Buffer(node.bytes)
                own.users = 1
                flowing += node.bytes
            produced = 0
            for following in node.nexts:
                if following.parameter >= 0:
                    gradients += following.parameter
                    following.parameter = 0  # the next one is added to it
                    continue
                buffer = buffers.get(id(following))
                if buffer is not None:
                    produced += 0 if node.passes_on else following.bytes  # it exists until it is added
                    continue
                buffer = own if node.passes_on else _Buffer(following.bytes)
                if buffer is not own:
                    flowing += buffer.bytes
                buffer.users += 1
                buffers[id(following)] = buffer
            now = saved + gradients + flowing + produced + (again if node.hooked else 0)
            if now > most:
                most, where = now, node.owner
            saved -= freed.get(id(node), 0)
            own.users -= 1
            if own.users <= 0:
                flowing -= own.bytes
        return most, where


class _Buffer:
    """A gradient on its way, and how many nodes have yet to use it."""

    __slots__ = ("bytes", "users")

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.users = 0


def _total(sizes: Mapping[int, tuple[int, int]]) -> int:
    return sum(size for size, _ in sizes.values())


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr()) if not tensor.is_sparse else 0


def _flops(name: str, function: Any, shapes: Mapping[str, Sequence[int]], edges: Sequence[Any]) -> int:
    """Of an operation's forward, and of its backward: as much again for each operand that has a gradient."""
    name = name.rstrip("0123456789").removesuffix("Backward")
    operands = edges
    if name in ("Mm", "Addmm"):
        first = "_saved_self_sym_sizes" if name == "Mm" else "_saved_mat1_sym_sizes"
        left, right = getattr(function, first, ()), getattr(function, "_saved_mat2_sym_sizes", ())
        once = 2 * prod(left) * right[-1] if left and right else 0
        operands = edges[-2:]
    elif name in ("Bmm", "Baddbmm"):
        out = function._input_metadata[0].shape
        left, right = (
            shapes.get("self" if name == "Bmm" else "batch1", ()),
            shapes.get("mat2", shapes.get("batch2", ())),
        )
        inner = left[-1] if left else right[-2] if right else 0
        once = 2 * prod(out) * inner
        operands = edges[-2:]
    elif name == "Convolution":
        weight = shapes.get("weight")
        once = 0
        if weight:
            moving = shapes.get("input") if function._saved_transposed else function._input_metadata[0].shape
            once = 2 * prod(moving or ()) * prod(weight[1:])
        operands = edges[:2]
    elif name.startswith("ScaledDotProduct"):
        out = function._input_metadata[0].shape
        query, key = shapes.get("query", out), shapes.get("key", out)
        once = 2 * prod(query[:-1]) * key[-2] * (query[-1] + out[-1])
        operands = edges[:2]
    else:
        return 0
    return int(once) * (1 + sum(one is not None for one in operands))
