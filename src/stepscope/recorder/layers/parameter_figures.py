"""What a sampled step reads of a model's parameters when it is over: sizes, norms, zeros, changes and checksums.

Sizes come from metadata; norms, zeros and checksums take one pass over the values each.  How much the optimizer changed
a parameter is shown by ``SLICE`` of its values, which are copied before the step.  On a GPU nothing waits: the numbers
are copied to the host in the background (``Scalars``).

*What may be called* of the script's objects: what torch itself reads of them in every step, which are the dicts of a
module (``_parameters``, ``_buffers``) and ``param_groups``, ``state`` and ``defaults`` of an optimizer; and
``grad_scale``, which a GradScaler sets.  Values are read of torch's own classes of tensors only, and no mode or
subclass of the script sees our operations (``undisturbed``).
*How long it may take*: as long as the passes over the values; it counts towards the cost of a sample, which decides how
often there is one (``Schedule`` in ``sampler.py``).
*What may be kept alive*: the copied slices until the end of the step, and one number per parameter until the device has
sent them.  Of the script's own tensors nothing, once ``Scalars`` are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from stepscope.recorder.device import Scalars
from stepscope.recorder.layers.tree import ModuleTree, local_part, tensor_bytes
from stepscope.records.layers import plain_numbers

__all__ = ["Changes", "ParameterChanges", "ParameterFigures", "is_wide_float", "norms_of", "undisturbed"]

SLICE = 1024
"""Elements of each parameter that show how much the optimizer changed it."""
NARROW = ("torch.float16", "torch.bfloat16")
"""Dtypes in which a norm could overflow."""

Changes = Mapping[int, tuple[float, float]]
"""By id of a parameter: the sum of squares of the change of some of its values, and of these values."""


class ParameterFigures:
    """The figures of one model's parameters at the end of a step."""

    def __init__(
        self,
        torch: Any,
        tree: ModuleTree,
        scalars: Scalars,
        optimizers: Sequence[Any],
        *,
        gradients: bool,
        numeric: bool,
    ) -> None:
        """``gradients``: also read those; ``numeric``: values may be read, else only sizes."""
        self._tree = tree
        self._scalars = scalars
        self.ids: list[int] = []
        self.weights: list[Any] = []
        """Parameters whose values are read, until ``Scalars`` are sent."""
        self._owners: list[int] = []
        self._grad_owners: list[int] = []
        self._sizes: list[int] = []
        self._scales: list[float] = []
        self.memory = tree.held_bytes(torch, optimizers)
        grad_bytes = self.memory["gradients"] = [0] * len(tree.nodes)
        grads: list[Any] = []
        scale_of = _scales(optimizers)
        for at, parameter in tree.parameters():
            local = local_part(parameter)
            has_values = numeric and _has_values(torch, local)
            if has_values:
                self._owners.append(at)
                self.ids.append(id(parameter))
                self.weights.append(local)
            gradient = parameter.grad if parameter.is_leaf else None
            if gradient is None:
                continue
            gradient = local_part(gradient)
            grad_bytes[at] += tensor_bytes(gradient)
            if has_values and gradients and type(gradient) is torch.Tensor and gradient.layout is torch.strided:
                self._grad_owners.append(at)
                self._sizes.append(gradient.numel())
                self._scales.append(scale_of.get(id(parameter), 1.0))
                grads.append(gradient)
        self._of_weights = scalars.add(norms_of(torch, self.weights))
        self._of_grads = scalars.add(norms_of(torch, grads))
        self._nonzero = scalars.add([torch.count_nonzero(gradient) for gradient in grads])
        self._sums = scalars.add([_bit_sum(torch, weight) for weight in self.weights] if tree.replicated else [])

    def figures(self, changed: Changes) -> dict[str, Any]:
        """All lists have one entry for each node."""
        count, numbers = len(self._tree.nodes), self._scalars.numbers
        norms = zip(numbers(self._of_grads), self._scales, strict=True)
        zeros = _Ratios(count)
        for at, size, nonzero in zip(self._grad_owners, self._sizes, numbers(self._nonzero), strict=True):
            zeros.add(at, size - nonzero, size)
        changes = _Ratios(count)
        for at, key in zip(self._owners, self.ids, strict=True):
            if key in changed:
                changes.add(at, *changed[key])
        return {
            "memory": self.memory,
            "grad_norm": plain_numbers(_root_sums(count, self._grad_owners, [norm / scale for norm, scale in norms])),
            "weight_norm": plain_numbers(_root_sums(count, self._owners, numbers(self._of_weights))),
            "update_ratio": plain_numbers([ratio if ratio is None else ratio**0.5 for ratio in changes.read()]),
            "zero_share": plain_numbers(zeros.read()),
            "checksum": self._checksums(count),
        }

    def _checksums(self, count: int) -> list[str | None] | None:
        sums = self._scalars.numbers(self._sums)
        if not sums:
            return None
        mixed = [0] * count
        places = [0] * count
        for at, bits in zip(self._owners, sums, strict=True):
            places[at] += 1
            mixed[at] += int(bits) * (2 * places[at] - 1) + places[at]
        known = [places[at] and at not in self._tree.unsummed for at in range(count)]
        return [f"{mixed[at] & (1 << 64) - 1:016x}" if known[at] else None for at in range(count)]


class ParameterChanges:
    """Some values of each trained parameter before the step, compared with those after it."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._slices: dict[Any, tuple[list[int], list[int], Any]] = {}
        """By device and dtype: ids of parameters, how many values of each, and these values before the step."""

    def copy(self, trees: Sequence[ModuleTree]) -> None:
        """Before the step: copy some values of each parameter that is trained."""
        torch = self._torch
        if torch._C._len_torch_dispatch_stack():
            return
        with undisturbed(torch):
            found: dict[Any, tuple[list[int], list[Any]]] = {}
            for tree in trees:
                for _, parameter in tree.parameters():
                    local = local_part(parameter)
                    if parameter.requires_grad and _has_values(torch, local) and local.is_contiguous():
                        ids, slices = found.setdefault((local.device, local.dtype), ([], []))
                        ids.append(id(parameter))
                        slices.append(_slice(local))
            for key, (ids, slices) in found.items():
                self._slices[key] = ids, [len(values) for values in slices], torch.cat(slices)

    def read(self, scalars: Scalars, models: Sequence[ParameterFigures]) -> Callable[[], Changes]:
        """Compare at the end of the step; the result returns the changes, once ``scalars`` have arrived."""
        torch = self._torch
        alive = {key: weight for model in models for key, weight in zip(model.ids, model.weights, strict=True)}
        requested: list[tuple[list[int], int, int]] = []
        for (device, dtype), (ids, sizes, before) in self._slices.items():
            weights = [alive.get(key) for key in ids]
            if not all(weight is not None and weight.is_contiguous() and weight.device == device for weight in weights):
                continue  # the script has replaced parameters, or moved them
            after = torch.cat([_slice(weight) for weight in weights])
            if after.shape != before.shape or after.dtype != dtype:
                continue
            change, size = _squares(torch, after - before, sizes), _squares(torch, before, sizes)
            requested.append((ids, scalars.add([change]), scalars.add([size])))
        self.forget()
        for model in models:
            model.weights.clear()

        def changes() -> Changes:
            return {
                key: (change, size)
                for ids, changed, sized in requested
                for key, change, size in zip(ids, scalars.numbers(changed), scalars.numbers(sized), strict=True)
            }

        return changes

    def forget(self) -> None:
        self._slices.clear()


class _Ratios:
    """A ratio of two sums for each node."""

    def __init__(self, count: int) -> None:
        self._above = [0.0] * count
        self._below = [0.0] * count

    def add(self, at: int, above: float, below: float) -> None:
        self._above[at] += above
        self._below[at] += below

    def read(self) -> list[float | None]:
        return [above / below if below else None for above, below in zip(self._above, self._below, strict=True)]


def _root_sums(count: int, owners: Sequence[int], norms: Sequence[float]) -> list[float | None]:
    """The norm over all parameters of each node."""
    squares: list[float | None] = [None] * count
    for at, norm in zip(owners, norms, strict=True):
        squares[at] = (squares[at] or 0.0) + norm * norm
    return [square if square is None else square**0.5 for square in squares]


def _scales(optimizers: Sequence[Any]) -> dict[int, float]:
    """By id of a parameter: what its gradient is multiplied with, where a fused optimizer divides by itself."""
    found: dict[int, float] = {}
    for optimizer in optimizers:
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None and not getattr(scale, "is_cuda", False):
            value = float(scale)
            found |= {
                id(parameter): value for group in optimizer.param_groups for parameter in group["params"] if value
            }
    return found


def is_wide_float(tensor: Any) -> bool:
    """Numbers with which every operation works: those of one byte have few."""
    return bool(tensor.is_floating_point()) and tensor.itemsize > 1


def _has_values(torch: Any, tensor: Any) -> bool:
    """Whether its values may be read: an ordinary tensor of numbers, in memory that torch holds now."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and is_wide_float(tensor)
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0
    )


def _slice(tensor: Any) -> Any:
    """Some values of a contiguous tensor, evenly spaced, as a view."""
    size = tensor.numel()
    if size <= SLICE:
        return tensor.view(-1)
    # An odd distance: an even one would read the same column of a matrix again and again.
    distance = max(size // SLICE - 1 | 1, 1)
    return tensor.as_strided((min(size // distance, SLICE),), (distance,), tensor.storage_offset())


def _squares(torch: Any, values: Any, sizes: Sequence[int]) -> Any:
    """The sums of squares of consecutive parts of these sizes."""
    wide = values.float() if str(values.dtype) in NARROW else values
    if wide.is_cpu:
        return torch.segment_reduce(wide.square(), "sum", lengths=torch.tensor(sizes), unsafe=True)
    return torch.stack(torch._foreach_norm(wide.split(sizes))).square()  # the sizes need not be copied to the GPU


def norms_of(torch: Any, tensors: Sequence[Any]) -> list[Any]:
    """Their norms, in order; those of narrow dtypes in a wider one."""
    groups: dict[Any, list[int]] = {}
    for at, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(at)
    found: list[Any] = [None] * len(tensors)
    for (_, dtype), own in groups.items():
        wide = torch.float32 if str(dtype) in NARROW else None
        for at, norm in zip(own, torch._foreach_norm([tensors[at] for at in own], 2, wide), strict=True):
            found[at] = norm
    return found


def _bit_sum(torch: Any, tensor: Any) -> Any:
    """The sum of a tensor's bits as integers, which wraps around: the same in any order."""
    if tensor.is_contiguous() and tensor.numel() * tensor.element_size() % 8 == 0 and tensor.storage_offset() == 0:
        return tensor.view(-1).view(torch.int64).sum()
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(same_size).sum(dtype=torch.int64)


@contextmanager
def undisturbed(torch: Any) -> Iterator[None]:
    """Our own operations: no graph, no autocast, and no mode of the script sees them."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
        yield
