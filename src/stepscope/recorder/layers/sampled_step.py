"""One sampled step: what two hooks see of every module's call, and the figures of the step when it is over.

The hooks are torch's global module hooks: nothing is attached to the model, so nothing can remain on it or be pickled
with it, and hooks of the script run in their order.  ``SampledStep`` owns the hooks; each thing that they collect has
its own class: times (``_Times``), the sizes of batches (``_ModelInputs``), where values stop being finite
(``_Nonfinite``), and what activation checkpointing computes again (``_Recomputation``).  What is kept for backward, and
the peak of each phase, come from the sizes in the autograd graph when backward begins (``autograd_graph.py``), on a GPU
as on the CPU; the allocator's own peak is read as well and never reset, which the script would notice.  What is read
of the parameters is in ``parameter_figures.py``.

Forward calls that activation checkpointing repeats during backward are not counted.

*What may be called* of the script's objects: of an output or an argument only what torch's own classes of tensors have.
Containers and attributes are read as in ``recorder/variables.py``, and neither a mode nor a subclass of tensors of the
script sees it.  One exception: a class of tensors with a ``__getattr__`` sees the name ``_local_tensor``
(``local_part``); to look it up in the class instead takes five times as long.
*How long it may take*: a few microseconds for each module, and on a CPU one pass over each output; it counts towards
the cost of a sample, which decides how often there is one (``Schedule`` in ``sampler.py``).
*What may be kept alive*: sums and slices of our own, until ``read`` or ``discard``; of the script's tensors only weak
references.  A mark in a graph that the script keeps leads to this object, which is empty by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, Protocol

from stepscope.recorder.device import Scalars, StreamMarks
from stepscope.recorder.guard import failsafe
from stepscope.recorder.hooks.compiled import leave_alone
from stepscope.recorder.layers.autograd_graph import AutogradGraph
from stepscope.recorder.layers.parameter_figures import ParameterChanges, ParameterFigures, is_wide_float, undisturbed
from stepscope.recorder.layers.tree import ModuleTree, local_part
from stepscope.recorder.ledger import Ledger
from stepscope.recorder.variables import attributes_of, first_of
from stepscope.records.layers import plain_numbers
from stepscope.records.steps import BACKWARD

__all__ = ["LayerLabels", "SampledStep"]

MAX_OUTPUTS = 8
"""Tensors of one output that are inspected."""
MOST_READINGS = 64
"""Of the allocator, 50 µs each, where something is computed again in backward."""
ROOTS = frozenset({"Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop"})
"""Optimizers that take the root of all second moments together (``foreach``), unless they are fused."""

Figures = tuple[ModuleTree, dict[str, Any]]


class LayerLabels(Protocol):
    """Labels calls of modules for a profiler (``capture/labels.py``)."""

    @property
    def active(self) -> bool:
        """Whether a profiler would see them."""
        ...

    def layer_begins(self, name: str) -> None: ...

    def layer_ends(self, name: str) -> None: ...

    def backward_reaches(self, name: str) -> None: ...

    def backward_ends(self) -> None: ...


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
        labels: LayerLabels | None = None,
    ) -> None:
        """``labels``: layers are labeled, because a profiler is active."""
        self._torch = torch
        self._labels = labels
        self._ledger = ledger
        self._now = now
        self._trees = trees
        self._gradients = gradients
        self._nodes = _Nodes(trees)
        self._device_index = _device_index(trees)
        self._graph = _graph_of(torch, trees, self._device_index) if activations else None
        """None if activations are not wanted, and after ``read``."""
        marks.start(self._device_index)
        self._times = _Times(self._nodes.count, marks if _on_one_gpu(trees) else None)
        self._inputs = _ModelInputs(torch, self._nodes.count)
        self._nonfinite = _Nonfinite(torch)
        self._recomputation = _Recomputation(torch, self._device_index, wanted=activations)
        self._changes = ParameterChanges(torch)
        self._outermost = -1
        """The node that the script itself called, during the call."""
        self._handles: list[Any] = []
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
        """Remove the hooks; marks in a graph that is still alive do nothing from now on."""
        self._over = True
        self._label_backward_end()
        # torch does not forget on removal that the hook wants keyword arguments.
        with_kwargs = self._torch.nn.modules.module._global_forward_hooks_with_kwargs
        while self._handles:
            handle = self._handles.pop()
            handle.remove()
            with_kwargs.pop(handle.id, None)

    def discard(self) -> None:
        """Remove the hooks and what they collected, which will not be read."""
        self.remove()
        self._graph = None
        self._changes.forget()
        self._nonfinite.sums.clear()

    def _make_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        now, ledger, graph = self._now, self._ledger, self._graph
        index, tops, count = self._nodes.index, self._nodes.tops, self._nodes.count
        times, marks = self._times, self._times.marks
        forward_ns, called = times.forward_ns, times.called
        recomputation, note_layout = self._recomputation, self._inputs.note_layout
        names, labels = self._nodes.names, self._labels
        label_begins = _no_label if labels is None else labels.layer_begins
        label_ends = _no_label if labels is None else labels.layer_ends
        calls = 0
        last_call = [0] * count
        """Which call was the last one of each module: if none came after it, the module called no other one."""
        begun_ns = [0] * count
        """When the call in progress began; 0: none that counts."""
        begun_mark = [0] * count
        own_before_ns = [0] * count

        @failsafe
        def before(module: Any, args: Any) -> None:
            nonlocal calls
            at = index.get(id(module))
            if at is None or self._inside:
                return
            self._inside = True
            here_ns = now()
            calls += 1
            last_call[at] = calls
            begun_ns[at] = 0
            if ledger.phase == BACKWARD:
                recomputation.begin(at)
            elif (self._outermost >= 0 and at not in tops) or self._enter(at):
                if graph is not None:
                    graph.enter(at)
                    self._keep_inputs(graph, at, args)
                label_begins(names[at])
                if marks is not None:
                    begun_mark[at] = marks.mark()
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
            calls_none = last_call[at] == calls
            if begun_ns[at] and self._outermost >= 0:
                forward_ns[at] += here_ns - begun_ns[at] - (self.own_ns - own_before_ns[at])
                begun_ns[at] = 0
                called[at] = True
                if marks is not None:
                    end = marks.mark()
                    times.forward_marks.append((at, begun_mark[at], end))
                label_ends(names[at])
                if graph is not None:
                    graph.leave(at)
                self._inspect(at, calls_none, (args, kwargs), output)
                note_layout(module, args, kwargs)
                if at == self._outermost:
                    self._leave(at, args, kwargs)
                if marks is not None and calls_none:
                    times.own_marks.append((end, marks.mark()))
                self.own_ns += now() - here_ns
            elif ledger.phase == BACKWARD:
                self._after_recomputed(at, calls_none, output)
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
        self._times.node = -1  # if the last backward failed, its end was not seen
        self._label_backward_end()
        self._outermost = at
        self._inputs.layouts.clear()
        return True

    def _leave(self, at: int, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._outermost = -1
        self._nonfinite.forget_output()
        self._inputs.count(at, args, kwargs)

    def _keep_inputs(self, graph: AutogradGraph, at: int, args: Any) -> None:
        """Activation checkpointing keeps what it calls a module with, to call it again."""
        if _saves_elsewhere(self._torch):
            with self._torch._C.DisableTorchFunction():
                graph.keep(at, _tensors_in(self._torch, args))

    def _inspect(self, at: int, calls_none: bool, inputs: Any, output: Any) -> None:
        """Inspect what a module returned; ``calls_none``: it called no other module."""
        torch = self._torch
        if type(output) is torch.Tensor and not torch._C._len_torch_function_stack():
            self._inspect_tensors(at, calls_none, inputs, [output])
            return
        with torch._C.DisableTorchFunction():  # neither modes nor tensors of the script see what follows
            self._inspect_tensors(at, calls_none, inputs, _tensors_in(torch, output))

    def _inspect_tensors(self, at: int, calls_none: bool, inputs: Any, tensors: Sequence[Any]) -> None:
        torch, graph = self._torch, self._graph
        if graph is not None:
            if self._nonfinite.forward is None and not torch._C._len_torch_dispatch_stack():
                self._nonfinite.check_output(at, calls_none, inputs, tensors)
            if at == self._outermost or _saves_elsewhere(torch):
                graph.keep(at, tensors)
        if calls_none and self._gradients:
            self._mark_backward(at, tensors)

    def _after_recomputed(self, at: int, calls_none: bool, output: Any) -> None:
        """Activation checkpointing has called a module during backward; its graph may be the one that is used."""
        torch = self._torch
        if calls_none:
            with torch._C.DisableTorchFunction():
                tensors = _tensors_in(torch, output)
                self._recomputation.add(tensors)
                if self._gradients and torch.is_grad_enabled() and not _saves_elsewhere(torch):
                    self._mark_backward(at, tensors)
        self._recomputation.end(at)

    # -- Backward -------------------------------------------------------------------------------------------------
    # Backward hooks of modules cost 195 µs each.  Instead, a module that calls no other module marks the autograd node
    # of its output; the time between two marks belongs to the module of the first.  Marks disappear with the graph.

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

    def _mark_backward(self, at: int, tensors: Sequence[Any]) -> None:
        node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
        if node is not None:
            node.register_prehook(_Mark(self._backward_reaches, at))

    def _backward_reaches(self, at: int, gradients: Sequence[Any]) -> None:
        """Backward is about to go through the module ``at``."""
        if self._over or self._inside:
            return
        self._inside = True
        here_ns = self._now()
        times, torch = self._times, self._torch
        mark = times.end_backward(here_ns)
        if times.node < 0:
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        times.reached[at] = True
        gradient = next((gradient for gradient in gradients if gradient is not None), None)
        local: Any = local_part(gradient)
        # A mode of the script would see the sum.
        seen = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
        if not seen and type(local) is torch.Tensor and local.numel():
            self._nonfinite.sums.append((False, at, _sum(torch, local)))
        times.node = at
        if times.marks is not None:
            times.since_mark = times.marks.mark()
            times.own_marks.append((mark, times.since_mark))
        # Compiled autograd calls marks while it traces.
        if self._labels is not None and not torch.compiler.is_dynamo_compiling():
            self._labels.backward_reaches(self._nodes.names[at])
        times.since_ns = self._now()
        self.own_ns += times.since_ns - here_ns
        self._inside = False

    @failsafe
    def _backward_ends(self) -> None:
        if self._times.node >= 0 and not self._over:
            self._times.end_backward(self._now())
        self._times.node = -1
        if not self._over:
            self._label_backward_end()

    def _label_backward_end(self) -> None:
        if self._labels is not None:
            self._labels.backward_ends()

    # -- Figures --------------------------------------------------------------------------------------------------

    def copy_slices(self) -> None:
        """Before the step: copy what shows how much the optimizer changes."""
        self._changes.copy(self._trees)

    def read(self, scalars: Scalars, optimizers: Sequence[Any]) -> Callable[[], list[Figures]]:
        """Read the figures at the end of the step; the result returns them, once ``scalars`` have arrived."""
        torch = self._torch
        numeric = not torch._C._len_torch_dispatch_stack()
        scalars.start()
        with undisturbed(torch):
            models = [
                ParameterFigures(torch, tree, scalars, optimizers, gradients=self._gradients, numeric=numeric)
                for tree in self._trees
            ]
            changes = self._changes.read(scalars, models)
            sums = scalars.add([total for _, _, total in self._nonfinite.sums])
            overflows = [getattr(optimizer, "found_inf", None) for optimizer in optimizers]
            skips = scalars.add([flag for flag in overflows if isinstance(flag, torch.Tensor) and flag.ndim == 0])
            scalars.send()
        device = self._device_memory()
        peaks = self._peaks([model.memory for model in models], optimizers)
        graph, self._graph = self._graph, None
        activations = graph.activations() if graph is not None and graph.known else None
        flops = {} if graph is None else graph.flops()

        def figures() -> list[Figures]:
            self._nonfinite.judge(scalars.numbers(sums))
            changed = changes()
            skipped = any(scalars.numbers(skips))  # by a fused optimizer, which decides by itself
            found = []
            for tree, first, model in zip(self._trees, self._nodes.firsts, models, strict=True):
                last = first + len(tree.nodes)
                read = model.figures(changed)
                if activations is not None:
                    read["memory"]["activations"] = _of_nodes(activations, first, last)
                read |= self._times.figures(first, last)
                read["work"] = self._inputs.work(_of_nodes(flops, first, last), first, last)
                for name, bad in (("forward", self._nonfinite.forward), ("backward", self._nonfinite.backward)):
                    if bad is not None and first <= bad < last:
                        read[f"nonfinite_{name}"] = bad - first
                if peaks:
                    read["peaks"] = {
                        phase: [size, at - first if first <= at < last else None] for phase, (size, at) in peaks.items()
                    }
                found.append((tree, {**read, **device, **({"skipped": True} if skipped else {})}))
            return found

        return figures

    def _peaks(self, sizes: Sequence[Mapping[str, list[int]]], optimizers: Sequence[Any]) -> dict[str, tuple[int, int]]:
        """By phase: the most bytes in use, and the node; {} if no graph was seen."""
        graph = self._graph
        if graph is None or not graph.known:
            return {}
        gradients = sum(sum(model["gradients"]) for model in sizes)
        always = sum(sum(model[kind]) for model in sizes for kind in ("parameters", "optimizer", "buffers"))
        always += sum(tree.bucket_bytes for tree in self._trees if not tree.grads_in_buckets)
        before = always + graph.gradients_before
        gathered = max((tree.gathered_bytes for tree in self._trees), default=0)
        most, node = graph.peak(self._recomputation.most_bytes)
        temporary = _temporary_bytes(optimizers, gradients if self._device_index is not None else 0)
        return {
            "forward": (before + sum(graph.activations().values()) + gathered, graph.last_module),
            "backward": (before + most + gathered, node),
            "optimizer": (always + gradients + temporary, -1),
        }

    def _device_memory(self) -> dict[str, int]:
        if self._device_index is None:
            return {}
        used = self._torch._C._cuda_memoryStats(self._device_index)["allocated_bytes"]["all"]
        return {"device_bytes": int(used["current"]), "device_peak": int(used["peak"])}


class _Nodes:
    """The modules of all trees, numbered one tree after the other: the index of every list of this step."""

    def __init__(self, trees: Sequence[ModuleTree]) -> None:
        self.firsts: list[int] = []
        """Where each tree's nodes begin."""
        self.index: dict[int, int] = {}
        """id of a module → its node."""
        self.names: list[str] = []
        """As the script would write them; of a model the name of its class."""
        self.count = 0
        for tree in trees:
            self.firsts.append(self.count)
            self.index.update((key, self.count + at) for key, at in tree.timed())
            self.names += [node.name or node.kind for node in tree.nodes]
            self.count += len(tree.nodes)
        self.tops = set(self.firsts)


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


# -- What is collected ------------------------------------------------------------------------------------------------


class _Times:
    """What forward and backward of each module took: on the host, without what our hooks take inside it, and on a GPU
    between marks on the stream, which are read when they have passed.

    The hooks write the fields themselves: a method would be one more call for each module.
    """

    def __init__(self, count: int, marks: StreamMarks | None) -> None:
        """``marks``: None if one stream cannot say how long all layers take."""
        self.marks = marks
        self.forward_ns = [0] * count
        self.called = [False] * count
        self.forward_marks: list[tuple[int, int, int]] = []
        """On a GPU: a node, and the marks around its forward."""
        self.backward_ns = [0] * count
        self.reached = [False] * count
        self.backward_marks: list[tuple[int, int, int]] = []
        self.own_marks: list[tuple[int, int]] = []
        """The marks around what our hooks did."""
        self.node = -1
        """The node whose backward is running …"""
        self.since_ns = 0
        self.since_mark = 0
        """… and when it began."""

    def end_backward(self, here_ns: int) -> int:
        """The backward of a module, if one is running, ends here; the mark of that."""
        mark = self.marks.mark() if self.marks is not None else 0
        if self.node >= 0:
            self.backward_ns[self.node] += here_ns - self.since_ns
            if self.marks is not None:
                self.backward_marks.append((self.node, self.since_mark, mark))
        return mark

    def figures(self, first: int, last: int) -> dict[str, Any]:
        """Of these nodes: by the device's clock if it was marked, and then by the host's, too."""
        host = {
            "forward_us": _microseconds(self.forward_ns, self.called, first, last),
            "backward_us": _microseconds(self.backward_ns, self.reached, first, last),
        }
        if self.marks is None or not self.marks.complete or not any(self.called):
            return {"clock": "host", **host}
        us = self.marks.read()
        own = [0.0] * (len(us) + 1)
        for begin, end in self.own_marks:
            own[end] += us[end] - us[begin]
        for at in range(1, len(own)):
            own[at] += own[at - 1]
        device: dict[str, Any] = {"clock": "device"}
        for name, spans, known in (
            ("forward_us", self.forward_marks, self.called),
            ("backward_us", self.backward_marks, self.reached),
        ):
            spent_ns = [0] * len(known)
            for at, begin, end in spans:
                spent_ns[at] += max(int((us[end] - us[begin] - (own[end] - own[begin])) * 1e3), 0)
            device[name] = _microseconds(spent_ns, known, first, last)
        return {**device, **{f"host_{name}": times for name, times in host.items()}}


def _microseconds(spent_ns: list[int], known: list[bool], first: int, last: int) -> list[float | str | None] | None:
    if not any(known[first:last]):
        return None
    return plain_numbers(
        [ns / 1e3 if seen else None for ns, seen in zip(spent_ns[first:last], known[first:last], strict=True)]
    )


class _ModelInputs:
    """How many samples and tokens the script gave to its models."""

    def __init__(self, torch: Any, count: int) -> None:
        self._torch = torch
        self._samples = [0] * count
        self._tokens = [0] * count
        self.layouts: set[tuple[int, ...]] = set()
        """Sequence length and batch size of what layers with ``batch_first=False`` were given in this call."""

    def note_layout(self, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        if module.__dict__.get("batch_first") is False:
            with self._torch._C.DisableTorchFunction():
                if given := _tensors_in(self._torch, (args, kwargs)):
                    self.layouts.add(tuple(local_part(given[0]).shape[:2]))

    def count(self, at: int, args: Any, kwargs: Mapping[str, Any]) -> None:
        """The script has called a model with these arguments."""
        torch = self._torch
        ids = kwargs.get("input_ids")
        with torch._C.DisableTorchFunction():
            given = _tensors_in(torch, (args, kwargs) if ids is None else ids)
            shape = tuple(local_part(given[0]).shape) if given else ()
            if not shape:
                return
            # Recurrent layers and torch's transformers put the sequence first by default, and so do many scripts.
            sequence_first = shape[:2] in self.layouts and shape[1::-1] not in self.layouts
            self._samples[at] += shape[1 if sequence_first else 0]
            if len(shape) == 2 and not given[0].is_floating_point() and not given[0].is_complex():
                self._tokens[at] += shape[0] * shape[1]

    def work(self, flops: Sequence[int], first: int, last: int) -> dict[str, int] | None:
        """What the step did with the model of these nodes."""
        found = {"flops": sum(flops)}
        if sum(map(bool, self._samples[first:last])) == 1:  # else parts of it are called in turn, with the same samples
            found |= {"samples": sum(self._samples[first:last]), "tokens": sum(self._tokens[first:last])}
        return {name: number for name, number in found.items() if number} or None


class _Nonfinite:
    """The first module whose output, and the first whose gradient, is not finite.

    Outputs on the CPU are checked at once.  Everything else is summed; the sums are judged when the step is over.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.forward: int | None = None
        self.backward: int | None = None
        self.sums: list[tuple[bool, int, Any]] = []
        """Whether it was in forward, the node, and the sum of its output or gradient."""
        self._checked: weakref.ref[Any] | None = None
        """The output that was checked last: the module around it may return the same tensor."""

    def forget_output(self) -> None:
        self._checked = None

    def check_output(self, at: int, calls_none: bool, inputs: Any, tensors: Sequence[Any]) -> None:
        torch = self._torch
        for tensor in tensors:
            local = local_part(tensor)
            if type(local) is not torch.Tensor or not is_wide_float(local) or not local.numel():
                continue
            if local.is_cuda:
                if calls_none:
                    self.sums.append((True, at, _sum(torch, local)))
            elif local.is_cpu and not (self._checked is not None and self._checked() is tensor):
                self._checked = weakref.ref(tensor)
                if _is_bad(torch, local):
                    with torch._C.DisableTorchFunction():
                        given = [local_part(argument) for argument in _tensors_in(torch, inputs)]
                        if not any(part.is_cpu and is_wide_float(part) and _is_bad(torch, part) for part in given):
                            self.forward = at
                    self._checked = None
                    return

    def judge(self, numbers: Sequence[float]) -> None:
        for (forward, at, _), number in zip(self.sums, numbers, strict=True):
            if number - number == 0:
                continue
            if forward and self.forward is None and number != -float("inf"):
                self.forward = at
            elif not forward and self.backward is None:
                self.backward = at
        self.sums.clear()


class _Recomputation:
    """The most bytes that activation checkpointing held at once, as it called modules again during backward."""

    def __init__(self, torch: Any, device_index: int | None, *, wanted: bool) -> None:
        self._torch = torch
        self._device_index = device_index
        self._wanted = wanted
        self._node = -1
        """The outermost module that is being called again …"""
        self._before_bytes = 0
        """… when so many bytes of the device were in use …"""
        self._outputs: dict[int, int] = {}
        """… and what modules in it returned: bytes by address."""
        self._readings = 0
        self.most_bytes = 0

    def begin(self, at: int) -> None:
        if self._node < 0 and self._wanted:
            self._node, self._before_bytes = at, self._bytes_in_use()
            self._outputs = {}

    def add(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors if self._node >= 0 else ():
            if type(tensor) is self._torch.Tensor:
                storage = tensor.untyped_storage()
                self._outputs[storage.data_ptr()] = storage.nbytes()

    def end(self, at: int) -> None:
        if at == self._node:
            self._node = -1
            grown = self._bytes_in_use() - self._before_bytes if self._before_bytes else 0
            self.most_bytes = max(self.most_bytes, grown or sum(self._outputs.values()))

    def _bytes_in_use(self) -> int:
        """Of CUDA's allocator; 0: not known."""
        self._readings += 1
        if self._device_index is None or self._readings > MOST_READINGS:
            return 0
        return int(self._torch._C._cuda_memoryStats(self._device_index)["allocated_bytes"]["all"]["current"])


# -- Helpers ----------------------------------------------------------------------------------------------------------


def _no_label(name: str) -> None:
    """No profiler is active."""


def _graph_of(torch: Any, trees: Sequence[ModuleTree], device_index: int | None) -> AutogradGraph:
    parameters = [parameter for tree in trees for _, parameter in tree.parameters()]
    buffers = [buffer for tree in trees for _, buffer in tree.buffers()]
    in_buckets = [parameter for tree in trees if tree.grads_in_buckets for _, parameter in tree.parameters()]
    device_type = "cpu" if device_index is None else "cuda"
    return AutogradGraph(torch, parameters, buffers, device_type, have_gradients=in_buckets)


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


def _sum(torch: Any, tensor: Any) -> Any:
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.sum(dtype=torch.float32 if tensor.itemsize < 4 else tensor.dtype)


def _is_bad(torch: Any, tensor: Any) -> bool:
    """Whether there is a NaN or plus infinity in it; with minus infinity scripts mask what does not count.

    A sum is the fastest way to inspect all values; one that is not finite may also have overflowed.
    """
    total = _sum(torch, tensor).item()
    if total - total == 0 or total == -float("inf"):
        return False
    return not tensor.detach().max().item() < float("inf")


def _saves_elsewhere(torch: Any) -> bool:
    """Whether tensors are not kept as they are for backward, but recomputed or moved: checkpointing, offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _tensors_in(torch: Any, value: Any) -> list[Any]:
    """The first tensors in an output or in arguments, in order; nothing of the script is called."""
    found: list[Any] = []
    left = [value]
    for _ in range(4 * MAX_OUTPUTS):
        if not left or len(found) >= MAX_OUTPUTS:
            break
        value = left.pop()
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            found.append(value)
        elif issubclass(kind, list | tuple | dict):
            left += reversed(first_of(value, MAX_OUTPUTS))
        elif not callable(value):
            left += reversed(first_of(attributes_of(value) or {}, MAX_OUTPUTS))
    return found
