"""What the autograd graph of a sampled step keeps for backward, what backward needs on its way, and its model FLOPs.

When backward is called, every tensor that an operation saved is still in the graph.  ``AutogradGraph.walk`` visits its
nodes and reads sizes and shapes only: no value is read, nothing saved is unpacked (that would run the forward of
activation checkpointing again), and no node or tensor is kept.  Sequence numbers of the nodes say which module made
them: they are counted up while the modules are called.

``peak`` then plays backward through, node after node, as autograd's engine does: an operation's saved tensors are freed
behind it, gradients flow from node to node, those of parameters stay.

FLOPs are those of matrix products, convolutions and attention, forward and backward.  What activation checkpointing
computes again is not counted, nor what an ``autograd.Function`` of a library computes.  They are unknown if a part of
the graph is one compiled function or recurrent layer, is only built in backward, or has shapes that are not numbers.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from stepscope.recorder.layers.tree import local_part

__all__ = ["AutogradGraph", "last_parameter_before_bad"]

MOST_NODES = 20_000
"""A larger graph is not walked: a node takes some microseconds."""
MOST_WALKS = 4
"""Of one step.  More calls of backward (gradient accumulation) are taken to be like these."""
NO_SEQUENCE = 1 << 63
"""AccumulateGrad has the largest number there is."""
OPAQUE = frozenset({"CheckpointFunction", "CompiledFunction", "CudnnRnn", "MiopenRnn", "MkldnnRnnLayer"})
"""Nodes behind which there is more than can be seen."""
OPERANDS = {
    "Addmm": ("", "mat1", "mat2"),
    "Baddbmm": ("", "batch1", "batch2"),
    "Bmm": ("self", "mat2"),
    "Convolution": ("input", "weight"),
    "Linear": ("input", "weight"),
    "Mm": ("self", "mat2"),
    "ScaledDotProduct": ("query", "key"),
}
"""By operation with FLOPs: the names of the operands that backward has a gradient for, in the order of its edges."""
PASSED_ON = frozenset(
    {
        *("Add", "Alias", "Clone", "Detach", "Expand", "Permute", "ReshapeAlias", "Squeeze", "Sub"),
        *("T", "Transpose", "UnsafeView", "Unsqueeze", "View"),
        *("RegisterPostBackwardFunction", "_DDPSink"),  # of FSDP2 and DDP
    }
)
"""Operations whose gradient is, or shares memory with, the one that they receive."""


Shapes = dict[str, Sequence[int]]
SLOTS: dict[type, tuple[str, ...]] = {}
"""By the class of a node, of those that torch itself has: the names of what it may have saved."""


class _Node:
    __slots__ = ("bytes", "hooked", "nexts", "owner", "parameter", "passes_on", "saved", "sequence", "sparse")

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
        self.sparse = False
        """Whether one of its operands has another layout than usual."""


class AutogradGraph:
    """The graphs of one step.  The hooks of ``SampledStep`` call ``enter`` and ``leave`` around each module."""

    def __init__(
        self,
        torch: Any,
        parameters: Sequence[Any],
        buffers: Iterable[Any],
        device_type: str,
        *,
        have_gradients: Iterable[Any] = (),
    ) -> None:
        """``device_type``: where the model is; tensors that are elsewhere do not count.

        ``have_gradients``: those of the parameters that have memory for their gradients in any case.
        """
        self._torch = torch
        self._now = torch._C._autograd._get_sequence_nr
        self._ordinary = (torch.Tensor, torch.nn.Parameter)
        self._device_type = device_type
        self._parameters = {id(parameter) for parameter in parameters}
        self._have_gradients = {id(parameter) for parameter in have_gradients}
        self._known = {_address(part) for tensor in (*parameters, *buffers) for part in _plain_parts(torch, tensor)}
        """Addresses of what operations save, too, but which exists in any case."""
        self._sharded = any(local_part(parameter) is not parameter for parameter in parameters)
        whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        own = sum(part.numel() * part.element_size() for part in map(local_part, parameters))
        self._shard = own / whole if whole else 1.0
        """This rank's share of the parameters."""
        self._sequences: list[int] = [-1]
        self._owners: list[int] = [-1]
        self._inside: list[int] = []
        self._nodes: list[_Node] = []
        """Of the largest graph, in the order in which backward executes them."""
        self._sizes: dict[int, tuple[int, int]] = {}
        """Of that graph, by address: bytes of a saved tensor, and the module that saved it first."""
        self.gradients_before = 0
        """Bytes of gradients that existed before its backward."""
        self._returned: list[tuple[int, weakref.ref[Any]]] = []
        self._flops: dict[int, int] = {}
        """By module, of all graphs."""
        self._counted: set[int] = set()
        self._opaque = False
        self._had_gradients = False
        """Whether there were any before the backward that is walked."""
        self._backwards = 0
        self._walks = 0
        self._last_was_new = False
        """Whether the last walk met operations that no walk before it had met."""
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
        if len(self._returned) < MOST_NODES:
            self._returned += [(at, weakref.ref(tensor)) for tensor in tensors]

    def walk(self, tensors: Any, gradients_before: int = 0) -> None:
        """Backward is about to begin from these tensors; parameters have gradients of so many bytes already."""
        self._backwards += 1
        if self._walks >= MOST_WALKS or self._too_large:
            return
        self._walks += 1
        if isinstance(tensors, self._torch.Tensor):
            tensors = (tensors,)
        elif not isinstance(tensors, list | tuple):
            tensors = ()
        self._had_gradients = gradients_before > 0
        roots = [
            tensor.grad_fn
            for tensor in tensors
            if isinstance(tensor, self._torch.Tensor) and tensor.grad_fn is not None
        ]
        read = self._read(roots)
        if read is None:
            self._too_large = True
            self._returned.clear()
            return
        nodes, sizes = read
        for at, reference in self._returned:
            tensor = reference()
            if tensor is not None:
                for part in self._counted_parts(tensor):
                    address = _address(part)
                    if address and address not in self._known:
                        sizes.setdefault(address, (part.untyped_storage().nbytes(), at))
        self._returned.clear()
        need = _total(sizes) + gradients_before
        if nodes and (not self._nodes or need > _total(self._sizes) + self.gradients_before):
            self._nodes, self._sizes, self.gradients_before = nodes, sizes, gradients_before

    def _read(self, roots: Sequence[Any]) -> tuple[list[_Node], dict[int, tuple[int, int]]] | None:
        found: dict[int, _Node] = {}
        alive: list[Any] = []
        """The nodes' objects, so that none of them is made anew with the id of another one."""
        sizes: dict[int, tuple[int, int]] = {}
        trained: set[int] = set()
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
        self._last_was_new = False
        while left:
            if len(found) > MOST_NODES:
                return None
            function = left.pop()
            node = found[id(function)]
            if node.sequence >= NO_SEQUENCE:
                variable = getattr(function, "variable", None)
                node.parameter = 0
                if variable is not None:
                    node.bytes, node.parameter = self._gradient_bytes(variable)
                    if id(variable) not in self._parameters or hasattr(variable, "_local_shard"):
                        trained.update(map(_address, self._counted_parts(variable)))
                continue
            name = type(function).__name__.rstrip("0123456789").removesuffix("Backward")
            node.bytes = sum(map(_bytes, function._input_metadata))
            node.passes_on = name in PASSED_ON
            self._opaque = self._opaque or name in OPAQUE
            name = "ScaledDotProduct" if name.startswith("ScaledDotProduct") else name
            shapes, ranks = self._read_saved(function, node, sizes, has_flops=name in OPERANDS)
            edges = function.next_functions
            node.nexts = [meet(edge) for edge, _ in edges if edge is not None]
            if node.sequence not in self._counted:
                self._counted.add(node.sequence)
                self._last_was_new = True
                if name in OPERANDS:
                    self._count_flops(name, function, edges, node, shapes, ranks)
        for address in trained:  # parameters of other models, or those that FSDP1 or 2 has gathered, which count apart
            sizes.pop(address, None)
        owned = {address: (size, self._owner_of(sequence)) for address, (size, sequence) in sizes.items()}
        return sorted(found.values(), key=lambda node: -node.sequence), owned

    def _read_saved(
        self, function: Any, node: _Node, sizes: dict[int, tuple[int, int]], *, has_flops: bool
    ) -> tuple[Shapes, int]:
        """Note the sizes of what a node saved.

        If it has FLOPs, return shapes by the names of the arguments, and over how many ranks the operation is spread
        (tensor parallelism).
        """
        shapes: Shapes = {}
        spread: dict[int, int] = {}
        foreign = False
        """Whether it is an operation of another library, which may be a matrix product (attention, a fused loss)."""
        kind = type(function)
        slots = SLOTS.get(kind)
        if slots is None:
            if isinstance(function, self._torch.autograd.function.BackwardCFunction):
                slots = ("_raw_saved_tensors",)
                made_by = str(getattr(getattr(kind, "_forward_cls", None), "__module__", ""))
                foreign = made_by.partition(".")[0] != "torch"
            else:
                slots = SLOTS[kind] = tuple(name for name in dir(function) if name.startswith("_raw_saved_"))
        for slot in slots:
            try:
                saved = getattr(function, slot)
            except RuntimeError:
                continue  # backward went through it before, and freed it
            for value in saved if isinstance(saved, list | tuple) else (saved,):
                tensor = value.data
                if tensor is None:
                    continue
                if not isinstance(tensor, self._torch.Tensor):
                    node.hooked = True
                    continue
                self._opaque = self._opaque or (foreign and tensor.ndim > 1)
                if has_flops:
                    shape = _shape(tensor)
                    if shape is not None and len(shape) > 1:
                        shapes[slot.removeprefix("_raw_saved_")] = shape
                    spread |= _spread(tensor)
                    node.sparse = node.sparse or tensor.layout is not self._torch.strided
                for part in self._counted_parts(tensor):
                    address = _address(part)
                    if address and address not in self._known:
                        node.saved.append(address)
                        known = sizes.get(address)
                        if known is None:
                            sizes[address] = (part.untyped_storage().nbytes(), node.sequence)
                        elif node.sequence < known[1]:
                            sizes[address] = (known[0], node.sequence)
        return shapes, prod(spread.values())

    def _counted_parts(self, tensor: Any) -> Sequence[Any]:
        """The ordinary tensors of which it consists, if they are where the model is."""
        parts = (tensor,) if type(tensor) in self._ordinary else _plain_parts(self._torch, tensor)
        return [part for part in parts if part.device.type == self._device_type and part.layout is self._torch.strided]

    def _count_flops(
        self, name: str, function: Any, edges: Sequence[tuple[Any, int]], node: _Node, shapes: Shapes, ranks: int
    ) -> None:
        operands = OPERANDS[name]
        if self._sharded and ranks == 1:
            ranks = prod({at: size for edge, _ in edges for at, size in _spread(_leaf(edge)).items()}.values())
        out = _shape(function._input_metadata[0])
        found = [
            _operand_shape(edges[at]) or getattr(function, f"_saved_{operand}_sym_sizes", None) or shapes.get(operand)
            for at, operand in enumerate(operands)
            if operand
        ]
        flops = None if out is None else _flops(name, function, out, found)
        if flops is None or node.sparse:
            self._opaque = True
            return
        first = len(operands) - 2
        times = 1 + sum(edge is not None for edge, _ in edges[first : first + 2])
        self._flops[node.owner] = self._flops.get(node.owner, 0) + flops * times // ranks

    def _gradient_bytes(self, variable: Any) -> tuple[int, int]:
        """Of the gradient that backward computes for a parameter, and of what remains if it had none before."""
        local = local_part(variable)
        size = local.numel() * local.element_size()
        if variable.grad is not None or id(variable) in self._have_gradients:
            return size, 0
        if id(variable) in self._parameters:
            return size, size
        # FSDP computes with gathered parameters, of whose gradients a shard remains.
        return size, 0 if self._sharded and self._had_gradients else int(size * self._shard)

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
        # If the last one only went through an old graph once more, so do those that were not walked.
        times = self._backwards if self._last_was_new else self._walks
        return {owner: count * times // self._walks for owner, count in self._flops.items()}

    @property
    def last_module(self) -> int:
        """The last one of forward."""
        return next((node.owner for node in self._nodes if node.owner >= 0 and node.parameter < 0), -1)

    def peak(self, recomputed: int) -> tuple[int, int]:
        """Backward's largest need on top of what existed before the step: bytes, and the module.

        ``again``: bytes of what activation checkpointing computes again for one module.
        """
        freed = self._freed_behind()
        saved, gradients, flowing = _total(self._sizes), 0, 0
        most, where = saved, self.last_module
        buffers: dict[int, _Buffer] = {}
        has_gradient: set[int] = set()
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
                    if following.parameter and id(following) not in has_gradient:
                        has_gradient.add(id(following))
                        gradients += following.parameter
                        if node.passes_on and own.users == 1:
                            produced -= min(following.parameter, own.bytes)  # it is the same memory
                        continue
                    waiting: _Buffer | None = own
                else:
                    waiting = buffers.get(id(following))
                if waiting is not None:
                    produced += 0 if node.passes_on else following.bytes  # it exists until it is added
                    continue
                buffer = own if node.passes_on else _Buffer(following.bytes)
                if buffer is not own:
                    flowing += buffer.bytes
                buffer.users += 1
                buffers[id(following)] = buffer
            now = saved + gradients + flowing + produced + (recomputed if node.hooked else 0)
            if now > most:
                most, where = now, node.owner
            saved -= freed.get(id(node), 0)
            own.users -= 1
            if own.users <= 0:
                flowing -= own.bytes
        return most, where

    def _freed_behind(self) -> dict[int, int]:
        """By id of a node: the bytes of what no node after it needs."""
        last_user: dict[int, int] = {}
        for node in self._nodes:
            for address in node.saved:
                last_user[address] = id(node)
        freed: dict[int, int] = {}
        for address, user in last_user.items():
            if address in self._sizes:
                freed[user] = freed.get(user, 0) + self._sizes[address][0]
        return freed


class _Buffer:
    """A gradient on its way, and how many nodes have yet to use it."""

    __slots__ = ("bytes", "users")

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.users = 0


def _total(sizes: Mapping[int, tuple[int, int]]) -> int:
    return sum(size for size, _ in sizes.values())


def _address(tensor: Any) -> int:
    """Of its memory; 0 if it has none, or it is not known."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:  # sparse, opaque, or a wrapper of torch.func
        return 0


def _plain_parts(torch: Any, tensor: Any, deeper: int = 2) -> list[Any]:
    """The ordinary tensors of which a tensor consists: of a DTensor the local one, of a nested one its values …"""
    local = local_part(tensor)
    flatten = getattr(type(local), "__tensor_flatten__", None)
    if flatten is None or not deeper:
        return [local]
    parts = [getattr(local, name, None) for name in flatten(local)[0]]
    return [
        inner for part in parts if isinstance(part, torch.Tensor) for inner in _plain_parts(torch, part, deeper - 1)
    ]


def _shape(holder: Any) -> Sequence[int] | None:
    """Of a tensor, or of what a node receives; None if it is not made of numbers."""
    try:
        shape: Sequence[int] = holder.shape
    except RuntimeError:
        return None  # a nested tensor has none
    return shape if all(type(size) is int for size in shape) else None


def _bytes(metadata: Any) -> int:
    """Of what a node receives; 0 if its shape is not made of numbers."""
    try:
        size = prod(metadata.shape) * metadata.dtype.itemsize
    except RuntimeError:
        return 0
    return size if type(size) is int else 0


def _spread(tensor: Any) -> dict[int, int]:
    """By dimension of the mesh along which a DTensor is split: over how many ranks."""
    if tensor is None or not hasattr(type(tensor), "device_mesh"):
        return {}
    placed = enumerate(tensor.placements)
    return {at: int(tensor.device_mesh.size(at)) for at, placement in placed if placement.is_shard()}


def _leaf(function: Any) -> Any:
    """The parameter that an operand is, or is a view or a copy of."""
    for _ in range(4):
        if function is None or hasattr(function, "variable"):
            break
        nexts = function.next_functions
        function = nexts[0][0] if len(nexts) == 1 else None
    return getattr(function, "variable", None)


# -- FLOPs ------------------------------------------------------------------------------------------------------------


def _operand_shape(edge: tuple[Any, int]) -> Sequence[int] | None:
    """Of what a node had as an operand, if that has a gradient."""
    function, which = edge
    return None if function is None else _shape(function._input_metadata[which])


def _flops(name: str, function: Any, out: Sequence[int], operands: Sequence[Sequence[int] | None]) -> int | None:
    """Of an operation's forward; backward takes as many for each operand that has a gradient."""
    left, right = operands
    if name == "ScaledDotProduct":
        if left is None or right is None:
            return None
        return 2 * prod(left[:-1]) * right[-2] * (left[-1] + out[-1])
    if name == "Convolution":
        moving = left if function._saved_transposed else out
        return None if moving is None or right is None else 2 * prod(moving) * prod(right[1:])
    inner = left[-1] if left else right[-1 if name == "Linear" else -2] if right else None
    return None if inner is None else 2 * prod(out) * inner


# -- Where NaN began in forward ---------------------------------------------------------------------------------------

INPUT_SLOTS = frozenset({"input", "mat1", "batch1", "self", "query", "key", "value"})
"""What an operation saved of its input, rather than of its result."""
MOST_BAD_BYTES = 1 << 30
"""Of saved tensors that are read."""


def last_parameter_before_bad(torch: Any, loss: Any) -> Any:
    """The parameter that forward used last before a value was not finite; None: not known.

    Reads the values that operations on the CPU have saved, in the order of forward, up to the first bad one.  For a
    loss that is not finite, once: it takes as long as reading all activations.
    """
    nodes: dict[int, Any] = {}
    left = [loss.grad_fn]
    while left and len(nodes) <= MOST_NODES:
        function = left.pop()
        if function is not None and id(function) not in nodes:
            nodes[id(function)] = function
            left += [edge for edge, _ in function.next_functions]
    if left:
        return None
    own = (node for node in nodes.values() if node._sequence_nr() < NO_SEQUENCE)
    last, size = None, 0
    for function in sorted(own, key=lambda node: int(node._sequence_nr())):
        used = _used_parameter(function)
        for slot, tensor in _saved_values(torch, function):
            size += tensor.nbytes
            if size > MOST_BAD_BYTES:
                return None
            if not bool(torch.isfinite(tensor.sum(dtype=torch.float32)).item()) and not _is_mask(torch, tensor):
                return last if used is None or slot in INPUT_SLOTS else used
        last = last if used is None else used
    return last


def _used_parameter(function: Any) -> Any:
    """The parameter that an operation is applied to, maybe as a view of it."""
    for edge, _ in function.next_functions:
        for _ in range(3):
            variable = getattr(edge, "variable", None)
            if variable is not None:
                return variable
            further: Any = getattr(edge, "next_functions", ())
            if len(further) != 1:
                break
            edge = further[0][0]  # noqa: PLW2901 - a transposed or expanded view
    return None


def _saved_values(torch: Any, function: Any) -> list[tuple[str, Any]]:
    found = []
    for name in dir(function):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(function, name)
            except RuntimeError:
                continue
            for value in saved if isinstance(saved, list | tuple) else (saved,):
                tensor = value.data
                if type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_floating_point() and tensor.numel():
                    found.append((name.removeprefix("_raw_saved_"), tensor))
    return found


def _is_mask(torch: Any, tensor: Any) -> bool:
    """Whether nothing but minus infinity is in it, with which scripts mask what does not count; or it overflowed."""
    return bool((torch.isfinite(tensor) | (tensor == -float("inf"))).all().item())
