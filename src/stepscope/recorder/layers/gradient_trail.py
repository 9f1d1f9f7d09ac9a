"""The norms of the last steps' gradients, kept on the device: where NaN began, if that step was not sampled.

One step after NaN arises in the backward of one layer on one rank, every weight of every rank is NaN.  So what shows
the layer and the rank has to be there before anyone knows that something is wrong.  Four sources, none of which waits
for the device or keeps a tensor of the script:

- *Clipping* computes the norm of each gradient anyway: what ``clip_grad_norm_`` stacks is kept, in every step, for a
  reference each.  It shows the layer, but not the rank, because gradients have been exchanged by then.
- *Before DDP's exchange*: its reducer copies gradients into buckets and writes them back at the end of backward, so
  when backward has computed the last one, ``.grad`` of all parameters is still this rank's own.  (Not with
  ``gradient_as_bucket_view``, where gradients are in the buckets and may have been reduced already.)
- *Before the update*, where no other source has any: the gradients that the optimizer is given.
- *What is given to a reducing collective in backward* (FSDP): the norm of the whole buffer.

The last three launch kernels of their own.  They read all gradients if that takes no more than ``MOST_SHARE`` of a
step, else a few small ones spread over the model (NaN in backward spreads to everything before it, so these show the
step, the rank, and between which two of them it began), else nothing.  With them go the norms of a few weights, before
the update: gradients that were finite and weights that are not show that the update is to blame.

Nothing is read until a loss or a norm is seen that is not finite (``suspect``).  Then all norms are copied together, in
the background, and the step from which on they are not finite is written like a sample (``records/layers.py``).

*What may be called* of the script's objects: what torch itself reads in every step, which is ``grad`` of parameters and
``param_groups`` of an optimizer; of a DDP, attributes that torch gave it.  No mode of the script and no class of its
tensors sees our operations.
*How long it may take*: ``MOST_SHARE`` of the steps' time, measured on host and device.
*What may be kept alive*: norms, which are a number per parameter, of the last ``STEPS`` steps; no gradient, parameter,
optimizer or DDP, of which there are ids and weak references.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any, Literal

from stepscope.recorder.device import Scalars, StreamMarks
from stepscope.recorder.guard import failsafe, immortal
from stepscope.recorder.hooks.compiled import leave_alone
from stepscope.recorder.layers.autograd_graph import last_parameter_before_bad
from stepscope.recorder.layers.parameter_figures import norms_of, undisturbed
from stepscope.recorder.layers.tree import ModuleTree, local_part
from stepscope.recorder.recorder import Recorder
from stepscope.records.layers import plain_numbers

__all__ = ["GradientTrail"]

STEPS = 256
"""Steps that are kept: on a GPU it takes up to half a second until a loss that is NaN is known."""
MOST_SHARE = 0.002
"""Of a step's time: what reading gradients may take."""
FIRST_STEP = 4
"""The first reading shows what it costs; steps before this one are not typical."""
RECENT = 8
"""Steps, and readings, from which the length of a step and the cost of a reading are known."""
SHORTEST_NS = 10_000_000
"""Of shorter steps nothing is read: even a few gradients take 20 µs."""
CHECK_STEPS = 64
"""If it costs too much, it is tried again after so many steps: it may have been slow because others were busy."""
LEAST_READINGS = 4
"""The first readings of a process are slower than the others."""
FEW_GRADIENTS = 16
"""4 took 157 to 264 µs on an H200, 16 took 266, all of 100 306 to 415; 16 usually show the block of a transformer."""
FEW_WEIGHTS = 4
SMALL = 1 << 16
"""Elements: a gradient of this size is read in the time that it takes to launch the kernel."""
MOST_ORDERS = 16
"""Sets of parameters that clipping has seen; a script with more of them is left alone."""
MOST_READS = 4
READ_STEPS = 40
"""Reads in a run, and steps between two of them."""
READ_AS_FLOAT = {"torch.float32", "torch.float16", "torch.bfloat16"}
BYTES_PER_NS = {"cuda": 1_000, "cpu": 4}
GIVEN_NS = 20_000
"""How fast a buffer is read at least, and what the host takes for it: it is on its own stream, so nothing can be
measured between kernels of the step."""

NEVER = 1 << 62

Part = Literal["local", "reduced", "weights", "probe"]
"""Gradients of this rank alone, those that the optimizer gets, weights before the update; or a number of which only
counts whether it is finite: of this rank alone, but not of known parameters."""
Scope = Literal["all", "few", "none"]
Order = tuple[int, ...]
"""The ids of parameters, in the order of their norms."""


class _Step:
    """What was seen of one step."""

    __slots__ = ("forward", "optimizers", "parts", "skipped", "step", "whole")

    def __init__(self, step: int) -> None:
        self.step = step
        self.parts: list[tuple[Part, Order, Any]] = []
        """Which norms, of which parameters, and the norms: one tensor, or a few."""
        self.whole = False
        """Whether all gradients were read."""
        self.optimizers: set[int] = set()
        self.forward = 0
        """On a CPU: id of the parameter that forward used last before a value was not finite."""
        self.skipped = False
        """By a GradScaler, which is normal."""

    def has(self, *kinds: Part) -> bool:
        return any(kind in kinds for kind, _, _ in self.parts)


class GradientTrail:
    """Owned by the recorder; used on the training thread, and on autograd's while that one waits for it."""

    def __init__(self, torch: Any, recorder: Recorder, now: Callable[[], int]) -> None:
        self._torch = torch
        self._recorder = recorder
        self._now = now
        private = torch._C
        self._modes: tuple[Callable[[], Any], ...] = (
            private._len_torch_dispatch_stack,
            private._len_torch_function_stack,
            private._functorch.peek_interpreter_stack,
        )
        self._marks = immortal(StreamMarks(torch))
        self._foreach_norm, self._stack = torch._foreach_norm, torch.stack
        self._clipping = 0
        """The thread that clips now."""
        self._groups: list[Any] = []
        self._stacked: list[Any] = []
        self._keepers = self._make_keepers()
        leave_alone(torch, self.clip, with_calls=False)
        self.forget()

    def forget(self) -> None:
        """Start over: initially, and in a forked child, which must not destroy what is on its parent's device."""
        immortal([getattr(self, "_steps", None)])
        self._steps: deque[_Step] = deque(maxlen=STEPS)
        self.due = FIRST_STEP
        """The next step of which gradients may be read."""
        self._off = False
        self._scope: Scope = "all"
        self._lengths_ns: deque[float] = deque(maxlen=RECENT)
        self._host_ns: dict[Scope, deque[int]] = {"all": deque(maxlen=RECENT), "few": deque(maxlen=RECENT)}
        self._device_ns: dict[Scope, deque[int]] = {"all": deque(maxlen=RECENT), "few": deque(maxlen=RECENT)}
        """What readings took: the host, and a GPU."""
        self._begun: tuple[int, int] | None = None
        """The last step that began, and when."""
        self._checked = 0
        """The step at which costs were last forgotten, to try again."""
        self._given_ns = self._given_before_ns = 0.0
        """What the norms of all buffers that collectives reduce would take, in this step and in the last one."""
        self._timing: Scope = "none"
        """The scope of the reading that the marks on the stream are around."""
        self._orders: list[tuple[weakref.ref[Any], weakref.ref[Any], Order]] = []
        """Of clipping: the first and the last parameter, and all of them."""
        self._plans: dict[tuple[int, int], tuple[weakref.ref[Any], _Plan]] = {}
        """By id of an optimizer or a DDP, and how many parameters it has."""
        self.wanted = False
        """Whether the norms should be read at the end of this step."""
        self._reads = 0
        self._read_step = -READ_STEPS

    def stop(self) -> None:
        self._off = True
        self.due = NEVER
        self._steps.clear()

    # -- Sources --------------------------------------------------------------------------------------------------

    def clip(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``clip_grad_norm_``, and keep the norms that it computes and stacks."""
        dispatch, function, functorch = self._modes
        if self._off or len(self._orders) >= MOST_ORDERS or dispatch() or function() or functorch():
            return original(*args, **kwargs)
        torch = self._torch
        self._foreach_norm, self._stack = torch._foreach_norm, torch.stack
        self._clipping = get_ident()
        # For the length of this call only: torch finds them by name.
        torch._foreach_norm, torch.stack = self._keepers
        try:
            return original(*args, **kwargs)
        finally:
            torch._foreach_norm, torch.stack = self._foreach_norm, self._stack
            self._clipping = 0
            self._clipped()

    def _make_keepers(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def keep_groups(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == self._clipping:
                self._groups.append(tensors)
            return self._foreach_norm(tensors, *args, **kwargs)

        def keep_stacked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            result = self._stack(tensors, *args, **kwargs)
            if get_ident() == self._clipping:
                self._stacked.append(result)
            return result

        for keeper in (keep_groups, keep_stacked):
            leave_alone(self._torch, keeper, with_calls=False)
        return keep_groups, keep_stacked

    @failsafe
    def _clipped(self) -> None:
        groups, stacked = self._groups, self._stacked
        self._groups, self._stacked = [], []
        if not groups or len(stacked) != 1:
            return
        norms = stacked[0] if type(stacked[0]) is self._torch.Tensor else local_part(stacked[0])
        if norms.dim() != 1:
            return
        count = norms.size(0)  # ``len`` of a tensor takes three times as long
        order = self._known_order(groups[0][0], groups[-1][-1], count) or self._order_of(groups)
        if order is not None and count == len(order):
            current = self._current()
            current.parts.append(("reduced", order, norms))
            current.whole = True

    def _known_order(self, first: Any, last: Any, count: int) -> Order | None:
        """Of parameters with these gradients at the ends: one call may clip a generator, and the next a critic."""
        with self._torch._C.DisableTorchFunction():
            for first_of, last_of, order in self._orders:
                if len(order) != count or getattr(first_of(), "grad", None) is not first:
                    continue
                if getattr(last_of(), "grad", None) is last:
                    return order
        return None

    def _order_of(self, groups: Iterable[Sequence[Any]]) -> Order | None:
        """Whose gradients these are; None: they are not those of known optimizers."""
        known: dict[int, Any] = {}
        with undisturbed(self._torch):
            for optimizer in self._optimizers():
                for parameter in _parameters_of(optimizer):
                    if (gradient := parameter.grad) is not None:
                        known[id(gradient)] = parameter
        found = [known.get(id(gradient)) for group in groups for gradient in group]
        if any(parameter is None for parameter in found):
            return None  # an optimizer is not known before its first step
        order = tuple(map(id, found))
        self._orders.append((weakref.ref(found[0]), weakref.ref(found[-1]), order))
        return order

    def _optimizers(self) -> list[Any]:
        return self._recorder.objects.optimizers(self._recorder.closing_optimizer())

    @failsafe
    def before_exchange(self, ddp: Any) -> None:
        """Backward has computed all gradients of this DDP, and its reducer has not written any back."""
        if not self._may_read() or getattr(ddp, "gradient_as_bucket_view", False):
            return
        parameters = getattr(ddp, "_module_parameters", None)
        if parameters:
            self._read_norms("local", ddp, parameters)

    @failsafe
    def before_update(self, optimizer: Any) -> None:
        """An optimizer is about to use its gradients."""
        if not self._may_read():
            return
        current = self._current()
        if id(optimizer) in current.optimizers or (current.has("local", "reduced") and current.has("weights")):
            return
        current.optimizers.add(id(optimizer))
        parameters = _parameters_of(optimizer)
        if parameters:
            self._read_norms("weights" if current.has("local", "reduced") else "reduced", optimizer, parameters)

    @failsafe
    def given_to_collective(self, buffer: Any) -> None:
        """A collective in backward is about to reduce this buffer."""
        torch = self._torch
        if type(buffer) is not torch.Tensor or not (buffer.is_cpu or buffer.is_cuda) or not self._may_read():
            return
        self._given_ns += GIVEN_NS + buffer.nbytes / BYTES_PER_NS["cuda" if buffer.is_cuda else "cpu"]
        affordable = self._given_before_ns <= MOST_SHARE * _middle(self._lengths_ns)
        if affordable and buffer.is_floating_point() and buffer.itemsize > 1 and buffer.layout is torch.strided:
            with undisturbed(torch):
                self._current().parts.append(("probe", (), norms_of(torch, [buffer])))

    # -- Reading norms on the device ------------------------------------------------------------------------------

    def _may_read(self) -> bool:
        recorder = self._recorder
        if self._off or recorder.step < self.due or recorder.capturing or any(mode() for mode in self._modes):
            return False
        self._turn(recorder.step)
        return self._scope != "none"

    def _turn(self, step: int) -> None:
        """Decide how much to read in this step, once."""
        if self._begun is not None and self._begun[0] == step:
            return
        now_ns = self._now()
        if self._begun is not None:
            before, before_ns = self._begun
            self._lengths_ns.append((now_ns - before_ns) / (step - before))
        self._begun = step, now_ns
        self._given_before_ns, self._given_ns = self._given_ns, 0.0
        if self._scope != "none" and step % RECENT and self._cost_ns(self._scope):
            return  # what was affordable still is
        self._scope = "none"
        self.due = 0
        if len(self._lengths_ns) < 2:
            return
        length_ns = _middle(self._lengths_ns)
        if length_ns >= SHORTEST_NS:
            if step - self._checked >= CHECK_STEPS:
                self._checked = step
                for scope in ("all", "few"):
                    self._forget_cost(scope, MOST_SHARE * length_ns)
            self._scope = self._affordable(MOST_SHARE * length_ns)
        if self._scope == "none":
            # The steps after the pause are timed again.
            self._begun, self.due = None, step + CHECK_STEPS
            self._lengths_ns.clear()

    def _affordable(self, most_ns: float) -> Scope:
        if self._cost_ns("all") <= most_ns:
            return "all"
        return "few" if self._cost_ns("few") <= most_ns else "none"

    def _cost_ns(self, scope: Scope) -> int:
        """0 if it is not known."""
        host_ns, device_ns = self._host_ns[scope], self._device_ns[scope]
        return max(min(host_ns), min(device_ns, default=0)) if len(host_ns) >= LEAST_READINGS else 0

    def _forget_cost(self, scope: Scope, most_ns: float) -> None:
        """Try again what was too much, unless even that would be: so many readings in ``CHECK_STEPS`` steps."""
        if most_ns < self._cost_ns(scope) <= most_ns * CHECK_STEPS / LEAST_READINGS:
            self._host_ns[scope].clear()
            self._device_ns[scope].clear()

    def _read_norms(self, part: Part, source: Any, parameters: Sequence[Any]) -> None:
        """Add the norms of gradients, all or a few, and on a GPU of a few weights."""
        due, self.due = self.due, NEVER  # if this fails, it would fail each time
        scope, begun_ns = self._scope, self._now()
        torch, current = self._torch, self._current()
        known = self._plans.get((id(source), len(parameters)))
        plan = known[1] if known is not None and known[0]() is source else self._plan(source, parameters)
        with plan.quietly():
            chosen = parameters if scope == "all" else [parameters[at] for at in plan.few]
            owners = [] if part == "weights" else [parameter for parameter in chosen if parameter.grad is not None]
            tensors = [local_part(owner.grad) if plan.sharded else owner.grad for owner in owners]
            count = len(tensors)
            weights = [] if plan.on_cpu or current.has("weights") else [parameters[at] for at in plan.few_weights]
            tensors += map(local_part, weights) if plan.sharded else weights
            if not tensors or not plan.usable:
                self.due = due if plan.usable else NEVER
                return
            measured = not plan.on_cpu and self._begin_marks(tensors[0], scope)
            norms: Any = torch._foreach_norm(tensors, 2, plan.dtype)
            if scope == "all":
                norms = torch.stack(norms)
            if measured:
                self._marks.mark()
        if count:
            current.parts.append((part, tuple(map(id, owners)), norms[:count]))
            current.whole = current.whole or scope == "all"
        if weights:
            current.parts.append(("weights", tuple(map(id, weights)), norms[count:]))
        self._host_ns[scope].append(self._now() - begun_ns)
        self.due = due

    def _plan(self, source: Any, parameters: Sequence[Any]) -> _Plan:
        if len(self._plans) > MOST_ORDERS:
            self._plans.clear()
        with undisturbed(self._torch):
            plan = _Plan(self._torch, parameters)
        self._plans[id(source), len(parameters)] = weakref.ref(source), plan
        return plan

    def _begin_marks(self, tensor: Any, scope: Scope) -> bool:
        """On a GPU, measure what the device takes, too; the figures of the last reading may have arrived."""
        if not tensor.is_cuda:
            return False
        if self._timing != "none":
            if not self._marks.passed():
                return False
            self._device_ns[self._timing].append(int(self._marks.read()[-1] * 1e3))
        self._timing = scope
        self._marks.start(tensor.device.index or 0)
        self._marks.mark()
        return True

    def _current(self) -> _Step:
        step = self._recorder.step
        if not self._steps or self._steps[-1].step != step:
            self._steps.append(_Step(step))
        return self._steps[-1]

    # -- Copying them to the host ---------------------------------------------------------------------------------

    def skip(self, step: int) -> None:
        """A GradScaler has skipped this step."""
        if self._steps and self._steps[-1].step == step:
            self._steps[-1].skipped = True

    @failsafe
    def suspect(self, step: int) -> bool:
        """A value of this step, or one before, is not finite; whether the norms should be read when it ends."""
        if self._off or self.wanted or self._reads >= MOST_READS or step - self._read_step < READ_STEPS:
            return False
        self.wanted = True
        if not any(mode() for mode in self._modes) and not self._recorder.capturing:
            self._see_weights()
        return True

    def _see_weights(self) -> None:
        """On a CPU a loss is read at once, so the weights show where the last update had NaN in it."""
        parameters = [parameter for optimizer in self._optimizers() for parameter in _parameters_of(optimizer)]
        with undisturbed(self._torch):
            if parameters and (plan := _Plan(self._torch, parameters)).usable and plan.on_cpu:
                weights = list(map(local_part, parameters))
                norms = self._torch.stack(self._torch._foreach_norm(weights, 2, plan.dtype))
                self._current().parts.append(("weights", tuple(map(id, parameters)), norms))

    @failsafe
    def see_forward(self, loss: Any) -> None:
        """On a CPU: backward is about to begin with this loss, which is not finite."""
        if self.wanted and not any(mode() for mode in self._modes) and not self._recorder.capturing:
            with undisturbed(self._torch):
                parameter = last_parameter_before_bad(self._torch, loss)
            self._current().forward = 0 if parameter is None else id(parameter)

    def read(self, scalars: Scalars) -> Callable[[Sequence[ModuleTree]], list[tuple[ModuleTree, dict[str, Any]]]]:
        """Begin to copy the norms; the result returns what to write of each model, once ``scalars`` have arrived."""
        self.wanted = False
        self._reads += 1
        is_first = self._reads == 1
        self._read_step = self._recorder.step
        steps = [step for step in self._steps if step.parts and not step.skipped]
        devices = {norms[0].device for step in steps for _, _, norms in step.parts}
        scalars.start()
        places: dict[Any, int] = {}
        with undisturbed(self._torch):
            for device in devices:
                every = [norms for step in steps for _, _, norms in step.parts if norms[0].device == device]
                joined = [self._torch.stack(norms) if isinstance(norms, list | tuple) else norms for norms in every]
                places[device] = scalars.add([self._torch.cat([norms.float() for norms in joined])])
            scalars.send()
        forward = {step.step: step.forward for step in steps}
        layout = [
            (step.step, step.whole, [(kind, order, norms[0].device, len(norms)) for kind, order, norms in step.parts])
            for step in steps
        ]

        def found(trees: Sequence[ModuleTree]) -> list[tuple[ModuleTree, dict[str, Any]]]:
            taken = dict.fromkeys(devices, 0)
            seen = []
            for step, whole, parts in layout:
                values = []
                for kind, order, device, count in parts:
                    begin = taken[device]
                    taken[device] = begin + count
                    values.append((kind, order, scalars.numbers(places[device])[begin : begin + count]))
                seen.append((step, whole, values))
            return _lines(seen, trees, forward, is_first=is_first)

        return found


class _Plan:
    """How to read the norms of an optimizer's or a DDP's gradients in one call, found out once."""

    def __init__(self, torch: Any, parameters: Sequence[Any]) -> None:
        kinds = (torch.Tensor, torch.nn.Parameter)
        own = list(map(local_part, parameters))
        plain = all(type(parameter) in kinds for parameter in parameters)
        self.quietly: Callable[[], Any] = torch.no_grad if plain else functools.partial(undisturbed, torch)
        """No mode of the script is active; tensors of the script's classes must not notice anything, either."""
        self.sharded = any(part is not parameter for part, parameter in zip(own, parameters, strict=True))
        self.on_cpu = bool(own and own[0].is_cpu)
        dtypes = {str(part.dtype) for part in own}
        self.usable = bool(own) and (self.on_cpu or bool(own[0].is_cuda)) and len({part.device for part in own}) == 1
        self.usable = self.usable and dtypes <= READ_AS_FLOAT and all(type(part) in kinds for part in own)
        grads = [parameter.grad for parameter in parameters if parameter.is_leaf and parameter.grad is not None]
        self.usable = self.usable and all(local_part(gradient).layout is torch.strided for gradient in grads)
        self.dtype = None if dtypes == {"torch.float32"} else torch.float32
        trained = [at for at, parameter in enumerate(parameters) if parameter.requires_grad and own[at].numel()]
        small = [at for at in trained if own[at].numel() <= SMALL]
        known = small or sorted(trained, key=lambda at: int(own[at].numel()))[:1]
        self.few = _spread(known, FEW_GRADIENTS)
        self.few_weights = _spread(self.few, FEW_WEIGHTS)


def _spread(places: Sequence[int], count: int) -> list[int]:
    """So many of them, evenly spaced, with the first and the last."""
    last = len(places) - 1
    return sorted({places[round(at * last / (count - 1))] for at in range(count)}) if places else []


Values = Sequence[tuple[Part, Order, Sequence[float]]]


def _parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def _is_bad(values: Values) -> bool:
    return not all(math.isfinite(number) for _, _, numbers in values for number in numbers)


def _lines(
    seen: Sequence[tuple[int, bool, Values]], trees: Sequence[ModuleTree], forward: Mapping[int, int], *, is_first: bool
) -> list[tuple[ModuleTree, dict[str, Any]]]:
    """The first of the last steps that are all bad, and the one after it; nothing if the last one is good.

    ``is_first``: nothing was read before; else steps that are all bad say nothing new.
    """
    at = len(seen)
    while at and _is_bad(seen[at - 1][2]):
        at -= 1
    if at == len(seen) or (not at and not is_first):
        return []
    some = [step for step, _, values in seen[:at] if any(kind != "weights" for kind, _, _ in values)]
    every = [step for step, whole, _ in seen[:at] if whole]
    found = []
    for tree in trees:
        nodes = {id(parameter): node for node, parameter in tree.parameters()}
        good = {"good_step": every[-1] if every else None, "good_some_step": some[-1] if some else None}
        for step, _, values in seen[at : at + 2]:
            line = {"step": step, **good, **_by_node(values, nodes, len(tree.nodes))}
            line["nonfinite_forward"] = nodes.get(forward[step])
            found.append((tree, {name: value for name, value in line.items() if value is not None}))
            good = {}
    return found


def _by_node(values: Values, nodes: Mapping[int, int], count: int) -> dict[str, Any]:
    names = {"local": "local_norm", "reduced": "grad_norm", "weights": "weight_norm"}
    found: dict[str, Any] = {}
    for kind, name in names.items():
        squares: list[float | None] = [None] * count
        for part, order, numbers in values:
            if part == kind:
                for key, number in zip(order, numbers, strict=False):
                    if (node := nodes.get(key)) is not None:
                        squares[node] = (squares[node] or 0.0) + number * number
        if any(square is not None for square in squares):
            found[name] = plain_numbers([None if square is None else math.sqrt(square) for square in squares])
    few = [number for part, order, numbers in values if part == "probe" for number in numbers]
    if few:
        found["own_norm"] = plain_numbers([math.sqrt(sum(number * number for number in few))])[0]
    return found


def _middle(lengths: Collection[float]) -> float:
    return sorted(lengths)[len(lengths) // 2]
