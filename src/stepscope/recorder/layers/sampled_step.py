"""One sampled step: what two hooks see of every module's call, and what is read of the parameters when it is over.

The hooks are torch's global module hooks: nothing is attached to the model, so nothing can remain on it or be pickled
with it, and hooks of the script run in their order.  A call is timed on the host, without what our hooks take inside
it.  Backward is timed without backward hooks of modules, which cost 195 µs each: a module that calls no other one marks
the autograd node of its output, and the time between two marks belongs to the module of the first one.  Marks disappear
with the graph.  Forward calls that activation checkpointing repeats during backward are not counted.

At the end the sizes of parameters, gradients, optimizer state and buffers are read from metadata; norms, zeros and
checksums take one pass over the values each.

What is kept for backward, and the peak of each phase, come from the sizes in the autograd graph when backward begins
(``autograd_graph.py``), on a GPU as on the CPU.  The allocator's own peak is read beside it and never reset, which the
script would notice.

On a GPU nothing waits: numbers are copied to the host in the background (``Scalars``), and layers are timed with events
on the stream (``StreamMarks``), which are read when they have passed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from stepscope.recorder.device import Scalars, StreamMarks
from stepscope.recorder.guard import failsafe
from stepscope.recorder.hooks.compiled import leave_alone
from stepscope.recorder.layers.autograd_graph import AutogradGraph
from stepscope.recorder.layers.tree import ModuleTree, local_part, tensor_bytes
from stepscope.recorder.ledger import Ledger
from stepscope.records.layers import plain_numbers
from stepscope.records.steps import BACKWARD

__all__ = ["SampledStep", "norms_of", "undisturbed"]

MAX_OUTPUTS = 8
"""Tensors of one output that are looked at."""
SLICE = 1024
"""Elements of each parameter that show how much the optimizer changed it."""
NARROW = ("torch.float16", "torch.bfloat16")
"""Dtypes in which a norm could overflow."""
MOST_READINGS = 64
"""Of the allocator, 50 µs each, where something is computed again in backward."""
ROOTS = frozenset({"Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop"})
"""Optimizers that take the root of all second moments together (``foreach``), unless they are fused."""

Figures = tuple[ModuleTree, dict[str, Any]]
Changes = Mapping[int, tuple[float, float]]
"""By id of a parameter: the sum of squares of the change of some of its values, and of these values."""


# -- The step ---------------------------------------------------------------------------------------------------------


class SampledStep:
    """What the hooks see during one step, and what is read at its end."""

    def __init__(
        self,
        torch: Any,
        ledger: Ledger,
        now: Callable[[], int],
        trees: Sequence[ModuleTree],
        *,
        marks: StreamMarks,
        activations: bool,
        gradients: bool,
    ) -> None:
        self._torch = torch
        self._ledger = ledger
        self._now = now
        self._trees = trees
        self._activations = activations
        self._gradients = gradients
        self._firsts: list[int] = []
        """Where each tree's nodes begin in the lists below, which have those of all trees."""
        self._index: dict[int, int] = {}
        """id of a module → its node."""
        count = 0
        for tree in trees:
            self._firsts.append(count)
            self._index.update((key, count + at) for key, at in tree.timed())
            count += len(tree.nodes)
        self._tops = set(self._firsts)
        self._forward_ns = [0] * count
        self._backward_ns = [0] * count
        self._called = [False] * count
        self._marked = [False] * count
        self._begun_ns = [0] * count
        """When the call in progress began; 0: none that counts."""
        self._own_before_ns = [0] * count
        self._entered = [0] * count
        self._calls = 0
        self._outermost = -1
        """The node that the script itself called, during the call."""
        self._device_index = _device_index(trees)
        self._graph: AutogradGraph | None = None
        if activations:
            held = [one for tree in trees for _, one in tree.parameters()]
            buffers = [one for tree in trees for _, one in tree.buffers()]
            in_buckets = [one for tree in trees if tree.grads_in_buckets for _, one in tree.parameters()]
            device_type = "cpu" if self._device_index is None else "cuda"
            self._graph = AutogradGraph(torch, held, buffers, device_type, have_gradients=in_buckets)
        self._again: dict[int, int] = {}
        """Outputs of modules that are called again in backward, since it entered the outermost one, by address …"""
        self._again_at = -1
        """… this one …"""
        self._again_before = 0
        """… when so many bytes of the device were in use."""
        self._most_again = 0
        self._readings = 0
        self._samples = [0] * count
        self._tokens = [0] * count
        """What the script gave to models."""
        self._layouts: set[tuple[int, ...]] = set()
        """Sequence length and batch size of what layers with ``batch_first=False`` were given in this call."""
        marks.start(self._device_index)
        self._marks = marks if _on_one_gpu(trees) else None
        self._marked_calls: list[tuple[int, int, int]] = []
        """On a GPU: a node, and the marks around its forward."""
        self._marked_backwards: list[tuple[int, int, int]] = []
        self._own_marks: list[tuple[int, int]] = []
        """The marks around what our hooks did."""
        self._begun_mark = [0] * count
        self._since_mark = 0
        self._in_backward = -1
        """The node whose backward is running."""
        self._since_ns = 0
        self._checked: weakref.ref[Any] | None = None
        self._bad_forward: int | None = None
        self._bad_backward: int | None = None
        self._sums: list[tuple[bool, int, Any]] = []
        """On a GPU: whether it was in forward, the node, and the sum of its output or gradient."""
        self._handles: list[Any] = []
        self._slices: dict[Any, tuple[list[int], list[int], Any]] = {}
        """By device and dtype: ids of parameters, how many values of each, and these values before the step."""
        self._over = False
        self._inside = False
        """Whether a hook is at work; it stays so when one fails, and then the others do nothing."""
        self.own_ns = 0
        """What the hooks took."""

    @property
    def failed(self) -> bool:
        return self._inside

    # -- Hooks ----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        modules: Any = self._torch.nn.modules.module
        before, after = map(self._outside_graphs, self._make_hooks())
        self._handles.append(modules.register_module_forward_pre_hook(before))
        self._handles.append(modules.register_module_forward_hook(after, with_kwargs=True))

    def _outside_graphs(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Wrap a hook so that it is nothing to dynamo, which may begin to compile in this very step."""
        is_compiling = self._torch.compiler.is_dynamo_compiling

        def outside(*args: Any) -> None:
            if not is_compiling():
                hook(*args)

        leave_alone(self._torch, outside, with_calls=False)
        return outside

    def remove(self) -> None:
        """Leave nothing behind: marks in a graph that is still alive do nothing from now on."""
        self._over = True
        # torch does not forget on removal that the hook wants keyword arguments.
        with_kwargs = self._torch.nn.modules.module._global_forward_hooks_with_kwargs
        while self._handles:
            handle = self._handles.pop()
            handle.remove()
            with_kwargs.pop(handle.id, None)

    def _make_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        now, ledger, index, tops = self._now, self._ledger, self._index, self._tops
        entered, begun_ns, own_before_ns = self._entered, self._begun_ns, self._own_before_ns
        graph, marks = self._graph, self._marks

        @failsafe
        def before(module: Any, args: Any) -> None:
            at = index.get(id(module))
            if at is None or self._inside:
                return
            self._inside = True
            here_ns = now()
            self._calls += 1
            entered[at] = self._calls
            begun_ns[at] = 0
            if ledger.phase == BACKWARD:
                self._begin_again(at)
            elif (self._outermost >= 0 and at not in tops) or self._enter(at):
                if graph is not None:
                    graph.enter(at)
                    self._keep_inputs(graph, at, args)
                if marks is not None:
                    self._begun_mark[at] = marks.mark()
                begun_ns[at] = there_ns = now()
                self.own_ns = own_before_ns[at] = self.own_ns + there_ns - here_ns
            self._inside = False

        @failsafe
        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            at = index.get(id(module))
            if at is None or self._inside:
                return
            here_ns = now()
            self._inside = True
            calls_none = entered[at] == self._calls
            if begun_ns[at] and self._outermost >= 0:
                self._forward_ns[at] += here_ns - begun_ns[at] - (self.own_ns - own_before_ns[at])
                begun_ns[at] = 0
                self._called[at] = True
                if marks is not None:
                    end = marks.mark()
                    self._marked_calls.append((at, self._begun_mark[at], end))
                if graph is not None:
                    graph.leave(at)
                self._look(at, calls_none, (args, kwargs), output)
                self._note_layout(module, args, kwargs)
                if at == self._outermost:
                    self._leave(at, args, kwargs)
                if marks is not None and calls_none:
                    self._own_marks.append((end, marks.mark()))
                self.own_ns += now() - here_ns
            elif ledger.phase == BACKWARD:
                self._end_again(at, calls_none, output)
            self._inside = False

        return before, after

    def _enter(self, at: int) -> bool:
        """The script calls a module; return whether it trains with it."""
        torch = self._torch
        if (
            get_ident() != self._ledger.thread
            or not torch.is_grad_enabled()
            or torch._C._get_tracing_state() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            self._outermost = -1
            return False
        if self._graph is not None:
            self._graph.begin()
        self._in_backward = -1  # if the last backward failed, its end was not seen
        self._outermost = at
        self._layouts.clear()
        return True

    def _keep_inputs(self, graph: AutogradGraph, at: int, args: Any) -> None:
        """Activation checkpointing keeps what it calls a module with, to call it again."""
        if _saves_elsewhere(self._torch):
            with self._torch._C.DisableTorchFunction():
                graph.keep(at, _tensors_in(self._torch, args))

    def _note_layout(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        sequence_first = module.__dict__.get("batch_first") is False
        given = _tensors_in(self._torch, (args, kwargs)) if sequence_first else []
        if given:
            self._layouts.add(tuple(local_part(given[0]).shape[:2]))

    def _leave(self, at: int, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._outermost = -1
        self._checked = None
        first = kwargs.get("input_ids")
        given = [first] if first is not None else _tensors_in(self._torch, (args, kwargs))
        shape = tuple(local_part(given[0]).shape) if given else ()
        if shape:
            # Recurrent layers and torch's transformers put the sequence first by default, and so do many scripts.
            sequence_first = shape[:2] in self._layouts and shape[1::-1] not in self._layouts
            self._samples[at] += shape[1 if sequence_first else 0]
            if len(shape) == 2 and not given[0].is_floating_point() and not given[0].is_complex():
                self._tokens[at] += shape[0] * shape[1]

    def _look(self, at: int, calls_none: bool, inputs: Any, output: Any) -> None:
        """Look at what a module returned; ``calls_none``: it called no other module."""
        torch = self._torch
        if not torch._C._len_torch_function_stack():
            self._look_at(at, calls_none, inputs, output)
            return
        with torch._C.DisableTorchFunction():  # the script's modes do not see what follows
            self._look_at(at, calls_none, inputs, output)

    def _look_at(self, at: int, calls_none: bool, inputs: Any, output: Any) -> None:
        torch = self._torch
        tensors = _tensors_in(torch, output)
        if self._bad_forward is None and self._activations and not torch._C._len_torch_dispatch_stack():
            self._check_output(at, calls_none, inputs, tensors)
        if self._graph is not None and (at == self._outermost or _saves_elsewhere(torch)):
            self._graph.keep(at, tensors)
        if not calls_none:
            return
        if self._gradients:
            node = next((one.grad_fn for one in tensors if one.grad_fn is not None), None)
            if node is not None:
                node.register_prehook(_Mark(self._backward_reaches, at))

    def backward_begins(self, tensors: Any) -> None:
        """The script calls backward on these tensors."""
        if self._graph is None or self._inside or self._over:
            return
        self._inside = True
        here_ns = self._now()
        with self._torch._C.DisableTorchFunction():  # neither modes nor tensors of the script see this
            self._graph.walk(tensors, sum(tree.gradient_bytes() for tree in self._trees))
        self.own_ns += self._now() - here_ns
        self._inside = False

    def _in_use(self) -> int:
        """Bytes of CUDA's allocator."""
        self._readings += 1
        if self._device_index is None or self._readings > MOST_READINGS:
            return 0
        return int(self._torch._C._cuda_memoryStats(self._device_index)["allocated_bytes"]["all"]["current"])

    def _begin_again(self, at: int) -> None:
        """A module is called during backward, by activation checkpointing."""
        if self._again_at < 0 and self._activations:
            self._again_at, self._again_before = at, self._in_use()
            self._again = {}

    def _end_again(self, at: int, calls_none: bool, output: Any) -> None:
        """Its graph may be the one that is used."""
        torch = self._torch
        if calls_none:
            tensors = _tensors_in(torch, output)
            for tensor in tensors if self._activations else ():
                if type(tensor) is torch.Tensor:
                    storage = tensor.untyped_storage()
                    self._again[storage.data_ptr()] = storage.nbytes()
            if self._gradients and torch.is_grad_enabled() and not _saves_elsewhere(torch):
                node = next((one.grad_fn for one in tensors if one.grad_fn is not None), None)
                if node is not None:
                    node.register_prehook(_Mark(self._backward_reaches, at))
        if at == self._again_at:
            self._again_at = -1
            grown = self._in_use() - self._again_before if self._again_before else 0
            self._most_again = max(self._most_again, grown or sum(self._again.values()))

    def _check_output(self, at: int, calls_none: bool, inputs: Any, tensors: Sequence[Any]) -> None:
        torch = self._torch
        for tensor in tensors:
            local = local_part(tensor)
            if type(local) is not torch.Tensor or not _is_float(local) or not local.numel():
                continue
            if local.is_cuda:
                if calls_none:
                    self._sums.append((True, at, _sum(torch, local)))
            elif local.is_cpu and not (self._checked is not None and self._checked() is tensor):
                self._checked = weakref.ref(tensor)
                if _is_bad(torch, local):
                    given = [local_part(one) for one in _tensors_in(torch, inputs)]
                    if not any(one.is_cpu and _is_float(one) and _is_bad(torch, one) for one in given):
                        self._bad_forward = at
                    self._checked = None  # the module around it may return the same tensor
                    return

    def _backward_reaches(self, at: int, gradients: Sequence[Any]) -> None:
        """Backward is about to go through the module ``at``."""
        if self._over or self._inside:
            return
        self._inside = True
        here_ns = self._now()
        mark = self._end_in_backward(here_ns)
        if self._in_backward < 0:
            self._torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        self._marked[at] = True
        torch = self._torch
        gradient = next((one for one in gradients if one is not None), None)
        local: Any = local_part(gradient)
        # A mode of the script would see the sum.
        seen = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
        if not seen and type(local) is torch.Tensor and local.numel():
            self._sums.append((False, at, _sum(torch, local)))
        self._in_backward = at
        if self._marks is not None:
            self._since_mark = self._marks.mark()
            self._own_marks.append((mark, self._since_mark))
        self._since_ns = self._now()
        self.own_ns += self._since_ns - here_ns
        self._inside = False

    def _end_in_backward(self, here_ns: int) -> int:
        """The backward of a module, if one is running, ends here; the mark of that."""
        mark = self._marks.mark() if self._marks is not None else 0
        if self._in_backward >= 0:
            self._backward_ns[self._in_backward] += here_ns - self._since_ns
            if self._marks is not None:
                self._marked_backwards.append((self._in_backward, self._since_mark, mark))
        return mark

    @failsafe
    def _backward_ends(self) -> None:
        if self._in_backward >= 0 and not self._over:
            self._end_in_backward(self._now())
        self._in_backward = -1

    # -- Figures --------------------------------------------------------------------------------------------------

    def copy_slices(self) -> None:
        """Before the step: copy some values of each parameter that is trained."""
        torch = self._torch
        if torch._C._len_torch_dispatch_stack():
            return
        with undisturbed(torch):
            found: dict[Any, tuple[list[int], list[Any]]] = {}
            for tree in self._trees:
                for _, parameter in tree.parameters():
                    local = local_part(parameter)
                    if parameter.requires_grad and _has_values(torch, local) and local.is_contiguous():
                        ids, slices = found.setdefault((local.device, local.dtype), ([], []))
                        ids.append(id(parameter))
                        slices.append(_slice(local))
            for key, (ids, slices) in found.items():
                self._slices[key] = ids, [len(one) for one in slices], torch.cat(slices)

    def read(self, scalars: Scalars, optimizers: Sequence[Any]) -> Callable[[], list[Figures]]:
        """Read the figures at the end of the step; the result returns them, once ``scalars`` have arrived."""
        torch = self._torch
        numeric = not torch._C._len_torch_dispatch_stack()
        scalars.start()
        with undisturbed(torch):
            readings = [
                _TreeReading(torch, tree, scalars, optimizers, gradients=self._gradients, numeric=numeric)
                for tree in self._trees
            ]
            changes = self._read_changes(scalars, readings)
            sums = scalars.add([one for _, _, one in self._sums])
            overflows = [getattr(optimizer, "found_inf", None) for optimizer in optimizers]
            skips = scalars.add([one for one in overflows if isinstance(one, torch.Tensor) and one.ndim == 0])
            scalars.send()
        device = self._device_memory()
        peaks = self._peaks([reading.memory for reading in readings], optimizers)
        graph, self._graph = self._graph, None  # a mark in a graph that the script keeps leads to this object
        activations = graph.activations() if graph is not None and graph.known else None
        flops = {} if graph is None else graph.flops()

        def figures() -> list[Figures]:
            self._judge_sums(scalars.numbers(sums))
            changed = changes()
            skipped = any(scalars.numbers(skips))  # by a fused optimizer, which decides by itself
            found = []
            for tree, first, reading in zip(self._trees, self._firsts, readings, strict=True):
                last = first + len(tree.nodes)
                read = reading.figures(changed)
                if activations is not None:
                    read["memory"]["activations"] = _of_nodes(activations, first, last)
                read |= self._all_times(first, last)
                read["work"] = self._work(flops, first, last)
                for name, bad in (("forward", self._bad_forward), ("backward", self._bad_backward)):
                    if bad is not None and first <= bad < last:
                        read[f"nonfinite_{name}"] = bad - first
                if peaks:
                    read["peaks"] = {
                        phase: [size, at - first if first <= at < last else None] for phase, (size, at) in peaks.items()
                    }
                found.append((tree, {**read, **device, **({"skipped": True} if skipped else {})}))
            return found

        return figures

    def _read_changes(self, scalars: Scalars, readings: Sequence[_TreeReading]) -> Callable[[], Changes]:
        """Compare the copied values with those after the step."""
        torch = self._torch
        alive = {key: weight for reading in readings for key, weight in zip(reading.ids, reading.weights, strict=True)}
        asked: list[tuple[list[int], int, int]] = []
        for (device, dtype), (ids, sizes, values) in self._slices.items():
            now = [alive.get(key) for key in ids]
            if not all(one is not None and one.is_contiguous() and one.device == device for one in now):
                continue  # the script has replaced parameters, or moved them
            after = torch.cat([_slice(one) for one in now])
            if after.shape != values.shape or after.dtype != dtype:
                continue
            squares = [_squares(torch, one, sizes) for one in (after - values, values)]
            asked.append((ids, scalars.add([squares[0]]), scalars.add([squares[1]])))
        self._slices.clear()
        for reading in readings:
            reading.weights.clear()

        def changes() -> Changes:
            return {
                key: (change, size)
                for ids, by, of in asked
                for key, change, size in zip(ids, scalars.numbers(by), scalars.numbers(of), strict=True)
            }

        return changes

    def _judge_sums(self, numbers: Sequence[float]) -> None:
        for (forward, at, _), number in zip(self._sums, numbers, strict=True):
            if number - number == 0:
                continue
            if forward and self._bad_forward is None and number != -float("inf"):
                self._bad_forward = at
            elif not forward and self._bad_backward is None:
                self._bad_backward = at
        self._sums.clear()

    def _peaks(self, sizes: Sequence[Mapping[str, list[int]]], optimizers: Sequence[Any]) -> dict[str, tuple[int, int]]:
        """By phase: the most bytes in use, and the node; {} if no graph was seen."""
        if self._graph is None or not self._graph.known:
            return {}
        gradients = sum(sum(one["gradients"]) for one in sizes)
        held = sum(sum(one[kind]) for one in sizes for kind in ("parameters", "optimizer", "buffers"))
        held += sum(tree.bucket_bytes for tree in self._trees if not tree.grads_in_buckets)
        before = held + self._graph.gradients_before
        gathered = max((tree.gathered_bytes for tree in self._trees), default=0)
        kept = sum(self._graph.activations().values())
        most, node = self._graph.peak(self._most_again)
        after = held + gradients + _temporary_bytes(optimizers, gradients if self._device_index is not None else 0)
        return {
            "forward": (before + kept + gathered, self._graph.last_module),
            "backward": (before + most + gathered, node),
            "optimizer": (after, -1),
        }

    def _all_times(self, first: int, last: int) -> dict[str, Any]:
        """Of forward and backward: by the device's clock if it was asked, and then by the host's, too."""
        host = {
            "forward_us": self._times(self._forward_ns, self._called, first, last),
            "backward_us": self._times(self._backward_ns, self._marked, first, last),
        }
        if self._marks is None or not self._marks.complete or not any(self._called):
            return {"clock": "host", **host}
        us = self._marks.read()
        own = [0.0] * (len(us) + 1)
        for begin, end in self._own_marks:
            own[end] += us[end] - us[begin]
        for at in range(1, len(own)):
            own[at] += own[at - 1]
        device: dict[str, Any] = {"clock": "device"}
        for name, spans, known in (
            ("forward_us", self._marked_calls, self._called),
            ("backward_us", self._marked_backwards, self._marked),
        ):
            spent_ns = [0] * len(known)
            for at, begin, end in spans:
                spent_ns[at] += max(int((us[end] - us[begin] - (own[end] - own[begin])) * 1e3), 0)
            device[name] = self._times(spent_ns, known, first, last)
        return {**device, **{f"host_{name}": times for name, times in host.items()}}

    @staticmethod
    def _times(spent_ns: list[int], known: list[bool], first: int, last: int) -> list[float | str | None] | None:
        if not any(known[first:last]):
            return None
        return plain_numbers(
            [ns / 1e3 if seen else None for ns, seen in zip(spent_ns[first:last], known[first:last], strict=True)]
        )

    def _work(self, flops: Mapping[int, int], first: int, last: int) -> dict[str, int] | None:
        """What the step did with this model; what is outside of modules counts for the first model."""
        found = {"flops": sum(_of_nodes(flops, first, last))}
        if sum(map(bool, self._samples[first:last])) == 1:  # else parts of it are called in turn, with the same samples
            found |= {"samples": sum(self._samples[first:last]), "tokens": sum(self._tokens[first:last])}
        return {name: number for name, number in found.items() if number} or None

    def _device_memory(self) -> dict[str, int]:
        if self._device_index is None:
            return {}
        used = self._torch._C._cuda_memoryStats(self._device_index)["allocated_bytes"]["all"]
        return {"device_bytes": int(used["current"]), "device_peak": int(used["peak"])}


class _Mark:
    """Called when backward reaches the autograd node of a module's output."""

    __slots__ = ("_at", "_reached")
    __torch_unserializable__ = True

    def __init__(self, reached: Callable[[int, Sequence[Any]], None], at: int) -> None:
        self._reached = reached
        self._at = at

    @failsafe
    def __call__(self, gradients: Sequence[Any]) -> None:
        self._reached(self._at, gradients)


# -- Parameters -------------------------------------------------------------------------------------------------------


class _TreeReading:
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
        self._tree = tree
        self._scalars = scalars
        self.ids: list[int] = []
        self.weights: list[Any] = []
        """Parameters whose values are read, until ``Scalars`` are sent."""
        self._owners: list[int] = []
        self._grad_owners: list[int] = []
        self._sizes: list[int] = []
        self._scales: list[float] = []
        parameters = list(tree.parameters())
        self.memory = tree.held_bytes(torch, optimizers)
        grad_bytes = self.memory["gradients"] = [0] * len(tree.nodes)
        grads: list[Any] = []
        scale_of = _scales(optimizers)
        for at, parameter in parameters:
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
        self._nonzero = scalars.add([torch.count_nonzero(one) for one in grads])
        self._sums = scalars.add([_bit_sum(torch, one) for one in self.weights] if tree.replicated else [])

    def figures(self, changed: Changes) -> dict[str, Any]:
        """All lists have one entry for each node."""
        count, numbers = len(self._tree.nodes), self._scalars.numbers
        norms = zip(numbers(self._of_grads), self._scales, strict=True)
        zeros = _Sums(count)
        for at, size, nonzero in zip(self._grad_owners, self._sizes, numbers(self._nonzero), strict=True):
            zeros.add(at, size - nonzero, size)
        changes = _Sums(count)
        for at, key in zip(self._owners, self.ids, strict=True):
            if key in changed:
                changes.add(at, *changed[key])
        return {
            "memory": self.memory,
            "grad_norm": plain_numbers(_root_sums(count, self._grad_owners, [norm / scale for norm, scale in norms])),
            "weight_norm": plain_numbers(_root_sums(count, self._owners, numbers(self._of_weights))),
            "update_ratio": plain_numbers([ratio if ratio is None else ratio**0.5 for ratio in changes.ratios()]),
            "zero_share": plain_numbers(zeros.ratios()),
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


class _Sums:
    """A ratio of two sums for each node."""

    def __init__(self, count: int) -> None:
        self._above = [0.0] * count
        self._below = [0.0] * count

    def add(self, at: int, above: float, below: float) -> None:
        self._above[at] += above
        self._below[at] += below

    def ratios(self) -> list[float | None]:
        return [above / below if below else None for above, below in zip(self._above, self._below, strict=True)]


def _root_sums(count: int, owners: Sequence[int], norms: Sequence[float]) -> list[float | None]:
    """The norm over all parameters of each node."""
    squares: list[float | None] = [None] * count
    for at, norm in zip(owners, norms, strict=True):
        squares[at] = (squares[at] or 0.0) + norm * norm
    return [square if square is None else square**0.5 for square in squares]


def _of_nodes(numbers: Mapping[int, int], first: int, last: int) -> list[int]:
    """In the order of the nodes; what belongs to none (-1) counts for the first model itself."""
    found = [numbers.get(at, 0) for at in range(first, last)]
    if not first and found:
        found[0] += numbers.get(-1, 0)
    return found


def _temporary_bytes(optimizers: Sequence[Any], gradients: int) -> int:
    """What ``step`` allocates and frees on a GPU: those with second moments make a root of all of them at once."""
    for optimizer in optimizers:
        options = getattr(optimizer, "defaults", {})
        if type(optimizer).__name__ in ROOTS and not options.get("fused") and options.get("foreach") is not False:
            return gradients
    return 0


def _device_index(trees: Sequence[ModuleTree]) -> int | None:
    """The GPU on which the models are; None: on the CPU."""
    for tree in trees:
        for _, parameter in tree.parameters():
            device = local_part(parameter).device
            return int(device.index or 0) if device.type == "cuda" else None
    return None


def _on_one_gpu(trees: Sequence[ModuleTree]) -> bool:
    """Whether one stream can say how long all layers take."""
    devices = {local_part(parameter).device for tree in trees for _, parameter in tree.parameters()}
    return len(devices) == 1 and devices.pop().type == "cuda"


def _scales(optimizers: Sequence[Any]) -> dict[int, float]:
    """By id of a parameter: what its gradient is multiplied with, where a fused optimizer divides by itself."""
    found: dict[int, float] = {}
    for optimizer in optimizers:
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None and not getattr(scale, "is_cuda", False):
            value = float(scale)
            found |= {id(one): value for group in optimizer.param_groups for one in group["params"] if value}
    return found


def _is_float(tensor: Any) -> bool:
    """Numbers with which every operation works: those of one byte have few."""
    return bool(tensor.is_floating_point()) and tensor.itemsize > 1


def _has_values(torch: Any, tensor: Any) -> bool:
    """Whether its values may be read: an ordinary tensor of numbers, in memory that torch holds now."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and _is_float(tensor)
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


def _sum(torch: Any, tensor: Any) -> Any:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.sum(dtype=torch.float32 if tensor.itemsize < 4 else tensor.dtype)


def _is_bad(torch: Any, tensor: Any) -> bool:
    """Whether there is a NaN or plus infinity in it; with minus infinity scripts mask what does not count.

    A sum is the fastest way to look at all values; one that is not finite may also have overflowed.
    """
    total = _sum(torch, tensor).item()
    if total - total == 0 or total == -float("inf"):
        return False
    return not tensor.detach().max().item() < float("inf")


def _saves_elsewhere(torch: Any) -> bool:
    """Whether tensors are not kept as they are for backward, but recomputed or moved: checkpointing, offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _tensors_in(torch: Any, value: Any) -> list[Any]:
    """The first tensors in an output or in arguments, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[Any] = []
    left = [value]
    for _ in range(4 * MAX_OUTPUTS):
        if not left or len(found) >= MAX_OUTPUTS:
            break
        one = left.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            left += reversed(one[:MAX_OUTPUTS])
        elif isinstance(one, dict):
            left += reversed(list(one.values())[:MAX_OUTPUTS])
        elif hasattr(one, "__dict__") and not callable(one):
            left += reversed(list(vars(one).values())[:MAX_OUTPUTS])
    return found


@contextmanager
def undisturbed(torch: Any) -> Iterator[None]:
    """Our own operations: no graph, no autocast, and no mode of the script sees them."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
        yield
