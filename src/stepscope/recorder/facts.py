"""Collects the facts that make advice specific: loader, model, DDP, FSDP, optimizer, framework, global step, process.

The hooks pass the live objects of the training as they see them, outside the hot path: a loader when an iterator is
taken, a root when it is found, an optimizer at the end of a step at which the recorder runs its checks.  Nothing is
imported: what the script has not loaded is not there.  The recorder writes the facts into the ring's header
(``records/identity.py`` has the format).

*What may be called* of the script's objects (the rules are in ``recorder/variables.py``): of loaders, samplers and
modules nothing but their stored attributes is read, so a property of a subclass is not run and its fact is unknown.
Three exceptions, each of which torch or the framework itself calls in every epoch or step: ``len`` of the dataset, once
for each loader, through torch's own samplers; ``param_groups`` and ``state`` of an optimizer; and the step counter of a
framework's trainer.  Of tensors only size and dtype are read, and the optimizer's own count of steps if it is on the
host.
*How long it may take*: ``WALK_NS`` in a step for the modules; everything else does not depend on the size of the model
or the data, but ``len`` of a dataset takes as long as the script makes it.
*What may be kept alive*: nothing; objects are held by weak references, and facts are plain values.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from stepscope.recorder.guard import ImportWatch, Patches, failsafe
from stepscope.recorder.model import ModelWalk, autocast_seen_in
from stepscope.recorder.variables import attribute_of, class_name, class_namespace, is_python_class

__all__ = ["STEP_COUNTERS", "Callers", "GlobalSteps", "LiveObjects", "install_step_counters"]


# -- Data loaders -----------------------------------------------------------------------------------------------------
# The loader that feeds the training: its settings, and whether its sampler learns which epoch begins.
#
# A loader is seen when the script asks it for an iterator.  Its settings are read then (the loader of ``for x in
# DataLoader(…)`` is gone after that), and a weak reference recognizes it later.  Most scripts have several.  The
# training loader is the one whose iterator was taken last when the recorder runs its checks after a step, preferably
# one that shuffles; it stays the training loader while it lives.
#
# *set_epoch.*  A ``DistributedSampler`` that shuffles gives the same order in each epoch unless the script sets the
# epoch number.  A second iterator at the same epoch may also be taken just to look at one batch, so it counts only once
# steps were taken with it, and no longer if the epoch changes later.

MAX_LOADERS = 256
"""Per process; a script that creates a new one each step is not followed forever."""
EPOCH_STEPS = 2
"""An iterator belongs to an epoch once this many steps followed it."""


class _SeenLoader:
    def __init__(self, loader: Any, forget: Any) -> None:
        self.loader = weakref.ref(loader, forget)
        self.settings = _loader_settings(loader)
        self.set_epoch_missing = False
        self.epochs = 0
        """Epochs that were over when the next began."""
        sampler = _sampler_of(loader)
        self.shuffles = _shuffles(sampler)
        self.watched = _epoch_of(sampler) is not None and self.shuffles and _is_distributed(sampler)
        self._epoch: int | None = None
        self._taken_at = -1
        self._suspect = False
        self._ever_set = False

    def taken(self, loader: Any, step: int) -> None:
        """Note that an iterator is taken before the step ``step`` ends."""
        self.epochs += self._taken_at >= 0 and step - self._taken_at >= EPOCH_STEPS
        if not self.watched:
            self._taken_at = step
            return
        self.confirm(step)
        epoch = _epoch_of(_sampler_of(loader))
        if self._taken_at >= 0:
            self._ever_set |= epoch != self._epoch
            self._suspect = step > self._taken_at and not self._ever_set
            self.set_epoch_missing &= not self._ever_set
        self._epoch, self._taken_at = epoch, step

    def confirm(self, step: int) -> None:
        """Check, after this many steps, whether the last iterator was an epoch's."""
        if self._suspect and step - self._taken_at >= EPOCH_STEPS:
            self.set_epoch_missing = True


class Loaders:
    def __init__(self) -> None:
        self._alive: dict[int, _SeenLoader] = {}
        """By id; the last one taken comes last."""
        self._last: dict[bool, _SeenLoader] = {}
        """The last one taken, alive or not, among those that shuffle and among those that do not."""
        self._main: _SeenLoader | None = None
        self._met = 0

    def taken(self, loader: Any, step: int) -> None:
        key = id(loader)
        seen = self._alive.pop(key, None)
        if seen is None:
            if self._met >= MAX_LOADERS:
                return
            self._met += 1
            seen = _SeenLoader(loader, lambda _: self._alive.pop(key, None))
        self._alive[key] = self._last[seen.shuffles] = seen
        seen.taken(loader, step)

    def choose(self) -> None:
        """Choose the training loader, right after the end of a step."""
        if self._main is None or self._main.loader() is None:
            met = [seen for seen in (self._main, *self._alive.values(), *self._last.values()) if seen is not None]
            shuffling = [seen for seen in met if seen.shuffles]
            if met:
                self._main = (shuffling or met)[-1]

    def facts(self, step: int) -> dict[str, Any]:
        """Facts about the training loader; {} before there is one."""
        if self._main is None:
            return {}
        self._main.confirm(step)
        main = self._main
        return {"loader": {**main.settings, "set_epoch_missing": main.set_epoch_missing, "epochs": main.epochs}}


def _loader_settings(loader: Any) -> dict[str, Any]:
    sampler, batches = _sampler_of(loader), attribute_of(loader, "batch_sampler")
    size = _int_of(loader, "batch_size")
    size = _int_of(batches, "batch_size") if size is None else size
    drop_last = _is_set(loader, "drop_last") or _is_set(batches, "drop_last")
    samples = _samples_of(sampler, batches)
    length, last_batch = samples, None
    if samples is not None and batches is not None:
        length = (samples if drop_last else samples + size - 1) // size if size else None
        last_batch = samples % size or size if size and not drop_last else None
    return {
        "num_workers": _int_of(loader, "num_workers") or 0,
        "pin_memory": _is_set(loader, "pin_memory"),
        "prefetch_factor": _int_of(loader, "prefetch_factor"),
        "persistent_workers": _is_set(loader, "persistent_workers"),
        "batch_size": size,
        "sampler": class_name(sampler),
        "dataset": class_name(attribute_of(loader, "dataset")),
        "distributed_sampler": _is_distributed(sampler),
        "length": length,
        "drop_last": drop_last,
        "last_batch": last_batch,
    }


def _samples_of(sampler: Any, batches: Any) -> int | None:
    """Samples in an epoch, if only torch's own samplers choose them: others may count in any way.

    Their ``len`` is that of the dataset, which may be the script's; they have just called it to make the iterator.  Not
    that of an iterable dataset, whose ``len`` may have side effects: its sampler has none.
    """
    if not all(_is_torchs(chosen) for chosen in (sampler, batches) if chosen is not None):
        return None
    return len(sampler) if hasattr(type(sampler), "__len__") else None


def _is_torchs(sampler: Any) -> bool:
    module = class_namespace(type(sampler)).get("__module__")
    return type(module) is str and module.startswith("torch.utils.data.")


def _sampler_of(loader: Any) -> Any:
    """What chooses the samples; for a batch sampler, the sampler inside it."""
    batches = attribute_of(loader, "batch_sampler")
    if batches is None:
        return attribute_of(loader, "sampler")
    inside = attribute_of(batches, "sampler")
    return batches if inside is None else inside


def _epoch_of(sampler: Any) -> int | None:
    return _int_of(sampler, "epoch")


def _int_of(value: Any, name: str) -> int | None:
    """Also one of numpy; not of a class of the script, which may compute it."""
    found = attribute_of(value, name)
    is_known = hasattr(type(found), "__index__") and not is_python_class(type(found))
    return operator.index(found) if is_known else None


def _is_set(value: Any, name: str) -> bool:
    return bool(_int_of(value, name))


def _is_distributed(sampler: Any) -> bool:
    loaded: Any = sys.modules.get("torch.utils.data.distributed")
    if loaded is not None and issubclass(type(sampler), loaded.DistributedSampler):
        return True
    return "Distributed" in class_name(sampler)


def _shuffles(sampler: Any) -> bool:
    return _is_set(sampler, "shuffle") or "Random" in class_name(sampler)


# -- Frameworks on the stack ------------------------------------------------------------------------------------------
# Frameworks and pipeline schedules that run the training loop, by the modules whose functions are on the stack.
#
# A script may import any of them and use none, so the stack decides, not ``sys.modules``.  It is walked when the
# recorder runs its checks anyway: when a model is found (then it contains the model's caller, such as a pipeline
# schedule) and at the end of some steps (then it contains the optimizer's caller).  Only module names are read.

MAX_CALLER_FRAMES = 200
FRAMEWORKS = {
    "transformers.trainer": "transformers",
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
    "accelerate.optimizer": "accelerate",
    "accelerate.accelerator": "accelerate",
    "deepspeed.runtime": "deepspeed",
    "ray.train": "ray",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
}
"""A module, or a package of which any module counts, and the name of the framework."""
SCHEDULES = ("torch.distributed.pipelining", "megatron.core.pipeline_parallel", "deepspeed.runtime.pipe")
"""Packages that run the stages of a pipeline."""


class Callers:
    """What was seen on the stack so far."""

    def __init__(self) -> None:
        self._frameworks: list[str] = []
        self._pipeline = False

    def walk_stack(self) -> None:
        """Walk the stack of the caller."""
        seen = []
        frame: FrameType | None = sys._getframe(1)
        for _ in range(MAX_CALLER_FRAMES):
            if frame is None:
                break
            module = _module_of(frame.f_globals)
            framework = next((name for package, name in FRAMEWORKS.items() if _is_within(module, package)), None)
            if framework is not None:
                seen.append(framework)
            self._pipeline = self._pipeline or any(_is_within(module, package) for package in SCHEDULES)
            frame = frame.f_back
        # Outermost first; a framework seen before keeps its position.
        self._frameworks += [name for name in dict.fromkeys(reversed(seen)) if name not in self._frameworks]

    def facts(self) -> dict[str, Any]:
        # Lightning's trainer is built on Fabric, whose modules then do not indicate a separate loop.
        names = [name for name in self._frameworks if name != "fabric" or "lightning" not in self._frameworks]
        return {**({"frameworks": names} if names else {}), **({"pipeline": True} if self._pipeline else {})}


def _module_of(namespace: dict[str, Any]) -> str:
    """The module's name; for one run as a script (``python -m torchtitan.train``), the name it is imported by."""
    name = namespace.get("__name__")
    if name == "__main__":
        name = getattr(namespace.get("__spec__"), "name", None)
    return name if isinstance(name, str) else ""


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


# -- Global step ------------------------------------------------------------------------------------------------------
# How many steps the training had completed when this process took its first one: after a resume it is not 0.
#
# A framework counts them in an object that is remembered (weakly) on creation: the trainer of Hugging Face or
# Lightning, the engine of DeepSpeed.  In a plain script the optimizer has the count, if it counts its steps.  Both are
# read when the first step has just ended, inside the optimizer's step: the framework has not counted that step yet, the
# optimizer has.  The value of a tensor on a device is not read: that would wait for the device.
#
# The same counter is read again at later checks.  Lightning counts the steps of all optimizers, and a GAN's critic is
# stepped several times in one of our steps: where the two counts diverge, both are kept.

STEP_COUNTERS = {
    "transformers.trainer": ("Trainer", "transformers", ("state", "global_step")),
    "lightning.pytorch.trainer.trainer": ("Trainer", "lightning", ("global_step",)),
    "pytorch_lightning.trainer.trainer": ("Trainer", "lightning", ("global_step",)),
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "deepspeed", ("global_steps",)),
}
"""By module: the class whose objects count, the framework as in the fact ``frameworks``, and the attribute path."""
COUNTED_BY_OPTIMIZER = "optimizer"
"""The counter if no framework counts."""


class GlobalSteps:
    def __init__(self) -> None:
        self._owners: list[tuple[weakref.ref[Any], str, tuple[str, ...]]] = []
        self._first: dict[str, Any] = {}
        """What the counter showed after the first step."""
        self._counter: weakref.ref[Any] | None = None
        """The counter: the object that has the number, or the optimizer."""
        self._name = ""

    def meet(self, owner: Any, framework: str, names: tuple[str, ...]) -> None:
        self._owners = [known for known in self._owners if known[0]() is not None]
        self._owners.append((weakref.ref(owner), framework, names))
        if self._first.get("by") == framework:  # another training begins and counts from elsewhere
            self._counter = None

    def facts(self, frameworks: list[str], optimizer: Any) -> dict[str, Any]:
        """Facts after the first step, which ``optimizer`` ended below these frameworks, the outermost first.

        {}: there is no counter.
        """
        for framework in frameworks:
            for reference, made_by, names in reversed(self._owners):
                counts = reference()
                if counts is not None and made_by == framework:
                    for name in names[:-1]:
                        counts = getattr(counts, name, None)
                    return self._begin(framework, counts, names[-1], getattr(counts, names[-1], None))
        counted = _counted_by(optimizer)
        return {} if counted is None else self._begin(COUNTED_BY_OPTIMIZER, optimizer, "", counted - 1)

    def facts_later(self, step: int, *, at_end: bool = False) -> dict[str, Any]:
        """Facts after ``step`` of our steps; {}: as expected from the first one, or the counter is gone.

        ``at_end``: no step is ending, so the framework has counted the last one as well.
        """
        counts = self._counter() if self._counter is not None else None
        if counts is None:
            return {}
        counted = getattr(counts, self._name, None) if self._name else _counted_by(counts)
        if type(counted) is not int:
            return {}
        last = counted - 1 if at_end or not self._name else counted
        ahead = last - (self._first["first"] + step - 1)
        if last < self._first["first"] or abs(ahead) <= 1:  # where a script marks its steps, one may be in progress
            return {}
        return {"global_step": {**self._first, "last": last, "at": step - 1}}

    def _begin(self, by: str, counts: Any, name: str, first: Any) -> dict[str, Any]:
        if type(first) is not int or first < 0:
            return {}
        self._first, self._name = {"by": by, "first": first}, name
        with contextlib.suppress(TypeError):  # not every object supports weak references
            self._counter = weakref.ref(counts)
        return {"global_step": dict(self._first)}


def _counted_by(optimizer: Any) -> int | None:
    """How many steps an optimizer has taken, by the state of its first parameter."""
    torch: Any = sys.modules.get("torch")
    states = getattr(optimizer, "state", None)
    if torch is None or not isinstance(states, dict):
        return None
    state = next(iter(states.values()), None)
    counted: Any = state.get("step") if isinstance(state, dict) else None
    if type(counted) is torch.Tensor and counted.device.type == "cpu" and counted.numel() == 1:
        counted = counted.item()
    return int(counted) if type(counted) in (int, float) and counted >= 1 else None


def install_step_counters(
    meet: Callable[[Any, str, tuple[str, ...]], None], patches: Patches, watch: ImportWatch
) -> None:
    """Call ``meet`` with each object that counts steps, once it is created."""

    def when_imported(module_name: str, owner_class: str, framework: str, names: tuple[str, ...]) -> None:
        def patch(module: Any) -> None:
            cls = getattr(module, owner_class, None)
            if cls is None:
                return
            original = cls.__init__

            @functools.wraps(original)
            def __init__(owner: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it replaces theirs
                original(owner, *args, **kwargs)
                meet_safely(owner, framework, names)

            patches.set(cls, "__init__", __init__)

        watch.when_imported(module_name, patch)

    meet_safely = failsafe(meet)
    for module_name, counter in STEP_COUNTERS.items():
        when_imported(module_name, *counter)


# -- Facts ------------------------------------------------------------------------------------------------------------

WALK_NS = 500_000
"""The longest time one call counts modules; it continues after the next step."""
MAX_OBJECTS = 16
"""Roots and optimizers; a script that keeps creating new ones is not followed forever."""


class LiveObjects:
    """What the recorder of this process has seen."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._loaders = Loaders()
        self._callers = Callers()
        self.global_steps = GlobalSteps()
        self._roots: list[_Root] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._failed: list[Callable[..., dict[str, Any] | None]] = []
        self.facts: dict[str, Any] = {}

    # -- Objects from the hooks -----------------------------------------------------------------------------------

    def meet_loader(self, loader: Any, step: int) -> None:
        self._once_failed_never_again(self._meet_loader, loader, step)

    def meet_root(self, module: Any, autocast: str | None, output_dtype: str) -> None:
        if len(self._roots) < MAX_OBJECTS:
            self._roots.append(_Root(module, autocast, output_dtype))
            self._once_failed_never_again(self._of_callers)

    @failsafe
    def meet_optimizer(self, optimizer: Any) -> None:
        known = any(reference() is optimizer for reference in self._optimizers)
        if not known and len(self._optimizers) < MAX_OBJECTS:
            self._optimizers.append(weakref.ref(optimizer))

    def roots(self) -> list[Any]:
        """The models that are alive, as the script calls them, the largest first."""
        ordered = sorted(self._roots, key=lambda known: -known.walk.parameters)
        return [root for root in (known.walk.root() for known in ordered) if root is not None]

    def optimizers(self, last: Any = None) -> list[Any]:
        """The optimizers that are alive, and ``last``, if it is an optimizer that is not among them."""
        alive = [optimizer for optimizer in (known() for known in self._optimizers) if optimizer is not None]
        if hasattr(last, "state") and not any(optimizer is last for optimizer in alive):
            alive.append(last)
        return [optimizer for optimizer in alive if isinstance(getattr(optimizer, "state", None), dict)]

    @failsafe
    def _meet_loader(self, loader: Any, step: int) -> dict[str, Any]:
        self._loaders.taken(loader, step)
        return {}

    # -- Checks ---------------------------------------------------------------------------------------------------

    def update_facts(self, step: int, ended_by: Any = None) -> bool:
        """Update ``facts``; return whether to call this again after the very next step.

        ``ended_by`` is the optimizer that ended the last one.
        """
        until_ns = self._now() + WALK_NS
        self.facts = {
            **self.facts,
            **self._once_failed_never_again(self._of_process),
            **self._once_failed_never_again(self._of_callers),
            **self._once_failed_never_again(self._of_loader, step),
            **self._once_failed_never_again(self._of_optimizer),
            **self._once_failed_never_again(self._of_model, until_ns),
        }
        self.facts |= self._once_failed_never_again(self._of_global_steps, step, ended_by)
        if "ddp" in self.facts:
            reducer = self._once_failed_never_again(self._of_reducer)
            self.facts["ddp"] = {**self.facts["ddp"], **reducer}
        return self._of_model not in self._failed and any(root.walk.facts is None for root in self._roots)

    def update_at_end(self, step: int, *, in_order: bool) -> None:
        """Update what needs no live objects, at the end of the process, when those may be half destroyed.

        ``in_order``: the script reached its end, so it will never close what is still open.
        """
        self.facts = {**self.facts, **self._loaders.facts(step)}
        if in_order:
            self.facts |= self._once_failed_never_again(self._of_process_group)
            self.facts |= self._once_failed_never_again(self._of_global_steps_at_end, step)

    def _once_failed_never_again(self, part: Callable[..., dict[str, Any] | None], *args: Any) -> dict[str, Any]:
        """Run a part unless it failed before: it would fail on the script's objects each time; one report is enough."""
        if part in self._failed:
            return {}
        found = part(*args)
        if found is None:
            self._failed.append(part)
        return found or {}

    @failsafe
    def _of_loader(self, step: int) -> dict[str, Any]:
        self._loaders.choose()
        return self._loaders.facts(step)

    @failsafe
    def _of_callers(self) -> dict[str, Any]:
        self._callers.walk_stack()
        return self._callers.facts()

    @failsafe
    def _of_global_steps(self, step: int, optimizer: Any) -> dict[str, Any]:
        if step == 1:
            return self.global_steps.facts(self.facts.get("frameworks", []), optimizer)
        return self.global_steps.facts_later(step)

    @failsafe
    def _of_global_steps_at_end(self, step: int) -> dict[str, Any]:
        return self.global_steps.facts_later(step, at_end=True)

    @failsafe
    def _of_optimizer(self) -> dict[str, Any]:
        """Facts about the optimizer with the most tensors."""
        alive = [optimizer for optimizer in (known() for known in self._optimizers) if optimizer is not None]
        if not alive:
            return {}
        tensors, optimizer = max(((_tensors(optimizer), optimizer) for optimizer in alive), key=lambda pair: pair[0])
        group = optimizer.param_groups[0] if optimizer.param_groups else {}
        settings = {name: _bool_or_none(group.get(name)) for name in ("fused", "foreach")}
        return {"optimizer": {"class": class_name(optimizer), **settings, "tensors": tensors}}

    @failsafe
    def _of_model(self, until_ns: int) -> dict[str, Any]:
        """Facts about the root with the most parameters, once all roots are counted."""
        for root in self._roots:
            if root.walk.facts is None:
                root.count(self._now, until_ns)
        if not self._roots or any(root.walk.facts is None for root in self._roots):
            return {}
        largest = self._largest()
        return {**(largest.walk.facts or {}), "autocast": largest.autocast}

    @failsafe
    def _of_reducer(self) -> dict[str, Any]:
        return self._largest().walk.reducer_facts()

    def _largest(self) -> _Root:
        return max(self._roots, key=lambda root: root.walk.parameters)

    @failsafe
    def _of_process_group(self) -> dict[str, Any]:
        """Whether there still is one; {} if there was none."""
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return {}
        if distributed.is_initialized():
            return {"process_group_open": True}
        return {"process_group_open": False} if {"ddp", "fsdp", "mesh"} & set(self.facts) else {}

    @failsafe
    def _of_process(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"gc": {"enabled": gc.isenabled(), "thresholds": list(gc.get_threshold())}}
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            facts["threads"] = torch.get_num_threads()
            if torch.cuda.is_initialized():
                facts["cudnn_benchmark"] = bool(torch.backends.cudnn.benchmark)
                facts["tf32"] = _tf32(torch)
        return facts


class _Root:
    """A root and what was observed in its first call."""

    def __init__(self, module: Any, autocast: str | None, output_dtype: str) -> None:
        self.walk = ModelWalk(module)
        self.autocast = autocast
        self._output_dtype = output_dtype

    def count(self, now: Callable[[], int], until_ns: int) -> None:
        self.walk.go_on(now, until_ns)
        module = self.walk.root()
        if self.walk.facts is not None and self.autocast is None and module is not None:
            self.autocast = autocast_seen_in(module, self._output_dtype, self.walk.dtype)


def _tensors(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _bool_or_none(value: Any) -> bool | None:
    """Of an option of an optimizer; a tensor would have to be waited for."""
    return bool(value) if type(value) in (bool, int) else None


def _tf32(torch: Any) -> bool:
    matmul = torch.backends.cuda.matmul
    try:
        # Since 2.9; reading the older name then fails for scripts that set the newer one.
        return bool(matmul.fp32_precision == "tf32")
    except AttributeError:
        return bool(matmul.allow_tf32)
