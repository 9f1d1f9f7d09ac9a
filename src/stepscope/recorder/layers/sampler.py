"""Samples the layers of the model in a few steps: their time, memory, gradients and checksums.

``records/layers.py`` has the format.  Steps that are not sampled pay nothing: no hook exists during them, and the
recorder does not even ask.

*Which steps.*  One early step, then one in 100·2^k, at the same place in each block of 100, so that ranks have steps in
common although each chooses its own k.  That place is no round number: loops log, evaluate and save at those.  The more
often 100 steps fit into the time that may pass between two samples, and the longer the run, the larger k; and large
enough that samples take no more than a 500th of the time, whatever the model is.

*After something odd* (``suspect``) two more steps are sampled, a few times in a run.  A rank does so for itself: ranks
are compared only at steps that several of them sampled.

*Compiled code.*  A hook would change what ``torch.compile`` has to guard, and make it compile again.  In a process that
has compiled anything, no hook is installed: such samples have sizes, norms and checksums, but no times.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stepscope.recorder.device import Scalars, StreamMarks
from stepscope.recorder.guard import above_standard_streams, failsafe, immortal, warn
from stepscope.recorder.layers.gradient_trail import GradientTrail
from stepscope.recorder.layers.sampled_step import LayerLabels, SampledStep
from stepscope.recorder.layers.tree import MOST_MODULES, ModuleTree
from stepscope.recorder.ledger import Ledger
from stepscope.recorder.model import unwrapped
from stepscope.recorder.recorder import Oddity
from stepscope.records import run_clock
from stepscope.records.layers import FIRST_SHARED_STEP, SHARED_STEPS
from stepscope.records.paths import ENV_LAYERS, LAYERS_SUFFIX
from stepscope.records.steps import FLAG_SAMPLED, FLAG_SKIPPED
from stepscope.ring import RingWriter

__all__ = ["LayerSampler", "Schedule", "layer_sampler"]

MAX_ROOTS = 4
SAMPLED_DEVICES = ({"cpu"}, {"cuda"}, {"cpu", "cuda"})
MAX_FILE_BYTES = 32 << 20
"""If the agent leaves this much unread, nothing is added."""


NEEDED = (
    *(
        "_C.DisableTorchFunction",
        "_C._DisableAutocast",
        "_C._get_tracing_state",
        "_C._functorch.peek_interpreter_stack",
    ),
    *("_C._len_torch_dispatch_stack", "_C._len_torch_function_stack", "_C._autograd._top_saved_tensors_default_hooks"),
    *("_C._autograd._get_sequence_nr", "_C._autograd.SavedTensor.data"),
    *("_foreach_norm", "segment_reduce", "nn.modules.module._global_forward_hooks_with_kwargs"),
)
"""What is private to torch, or may change; 2.13 has all of it.  Without it, layers are not sampled."""


def layer_sampler(
    torch: Any, ledger: Ledger, environ: Mapping[str, str], labels: LayerLabels | None = None
) -> LayerSampler | None:
    """The sampler that the environment asks for; None: it is off."""
    mode = environ.get(ENV_LAYERS, "")
    if mode == "off" or not all(_has(torch, name) for name in NEEDED):
        return None
    return LayerSampler(torch, ledger, every_step=mode == "every", labels=labels)


def _has(torch: Any, path: str) -> bool:
    found = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is not None


# -- Schedule ---------------------------------------------------------------------------------------------------------

EARLY_STEP = 11
SHORTEST_NS, LONGEST_NS = 2_000_000_000, 60_000_000_000
"""Time between two samples: at least the first at the beginning, and the second in a long run …"""
SAMPLES_BEFORE_GROWTH = 150
"""… growing once the run has taken this many times the first."""
MOST_COST = 0.002
"""Samples may take this share of a run's time; if they take longer, there are fewer of them …"""
UNCHARGED_SAMPLES = 6
"""… except for the first ones: what is wrong from the beginning should be known after seconds."""
LARGEST_STRIDE = SHARED_STEPS << 24
FEW_STEPS = 8
MOST_DELAY = 8
"""A sampled step is longer than others by what the sample itself takes, and by what it delays: the device may run out
of work meanwhile.  What is more than this many times the sample itself has another reason."""


MORE_SAMPLES = 2
"""After something odd …"""
MORE_STEPS = 40
"""… unless that was fewer steps ago than this, so that at most one step in 20 is sampled because of it …"""
MOST_TIMES: dict[Oddity, int] = {"nonfinite": 4, "skipped": 2, "slow": 2, "memory": 2}
"""… and so many times in a run: 20 samples."""


class Schedule:
    def __init__(self, *, every_step: bool, now: Callable[[], int]) -> None:
        self._every_step = every_step
        self._now = now
        self._began_ns = self._last_ns = now()
        self._last = 0
        self._taken = 0
        self._spent_ns = 0
        """What the samples have cost, without the first ones."""
        self._regular = 1 if every_step else EARLY_STEP
        self._more: range | None = None
        """Steps to sample because of something odd."""
        self._odd: int | None = None
        """The step in which it was seen."""
        self._times = dict(MOST_TIMES)

    def usual_ns(self, begun_ns: int, step: int) -> int:
        """The mean of the steps since the last regular sample until this one begins; 0 if there were too few."""
        steps = step - 1 - self._last
        return (begun_ns - self._last_ns) // steps if self._last and steps >= FEW_STEPS else 0

    @property
    def next(self) -> int:
        """The step to sample next."""
        return min(self._more[0], self._regular) if self._more else self._regular

    def suspect(self, step: int, why: Oddity) -> bool:
        """Sample the steps after this one, in which something odd was seen; False: that was done too often."""
        if self._every_step or not self._times[why] or (self._odd is not None and step - self._odd < MORE_STEPS):
            return False
        self._times[why] -= 1
        self._odd = step
        self._more = range(step + 1, step + 1 + MORE_SAMPLES)
        return True

    def sampled(self, step: int, cost_ns: int) -> None:
        """Choose the next step after this one, which was sampled and cost so much (or could not be: nothing)."""
        self._taken += cost_ns > 0
        if self._taken > UNCHARGED_SAMPLES:
            self._spent_ns += cost_ns
        if self._more:
            self._more = range(max(self._more[0], step + 1), self._more[-1] + 1)
        if step < self._regular:
            return  # the regular ones stay as they are
        now_ns = self._now()
        since_ns, steps = max(now_ns - self._last_ns, 1), max(step - self._last, 1)
        self._last_ns, self._last = now_ns, step
        if self._every_step:
            self._regular = step + 1
            return
        age_ns = now_ns - self._began_ns
        wanted_ns = min(max(age_ns // SAMPLES_BEFORE_GROWTH, SHORTEST_NS), LONGEST_NS)
        if self._taken >= UNCHARGED_SAMPLES:
            wanted_ns = max(wanted_ns, int((self._spent_ns + cost_ns) / MOST_COST) - age_ns)
        stride = SHARED_STEPS
        while stride * since_ns < wanted_ns * steps and stride < LARGEST_STRIDE:
            stride *= 2
        self._regular = (step - FIRST_SHARED_STEP) // stride * stride + stride + FIRST_SHARED_STEP


# -- Sampler ----------------------------------------------------------------------------------------------------------


Reading = tuple[Scalars, StreamMarks]
"""What a sample reads from the device: numbers, and times."""
LAST_WAIT_NS = 20_000_000
"""When a process ends, it waits this long for norms that show where NaN began: the device is idle by then."""
MOST_PENDING = 8
"""Samples whose numbers are on the way from a device that is behind; the next step is then not sampled."""


class LayerSampler:
    """Owned by the recorder; called on the training thread, except where autograd calls back."""

    def __init__(
        self,
        torch: Any,
        ledger: Ledger,
        *,
        every_step: bool = False,
        labels: LayerLabels | None = None,
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._torch = torch
        self._labels = labels
        self._ledger = ledger
        self._every_step = every_step
        self._now = now
        self._watched: weakref.ref[Any] | None = None
        self._parts = (True, True)
        self.forget()

    def forget(self) -> None:
        """Start over: initially, and in a forked child, whose parent still owns the file and is in the step."""
        step: SampledStep | None = getattr(self, "_step", None)
        if step is not None:
            step.remove()
        # They hold tensors on a device, which a child must not destroy.
        immortal([step, getattr(self, "_pending", None)])
        self._ledger.before_backward = None
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)
        self._fd = -1
        self._free: list[Reading] = []
        """Ways to read from the device that no sample uses."""
        self._readings = 0
        self._reading: Reading | None = None
        """That of the step in progress."""
        self._step: SampledStep | None = None
        self._schedule: Schedule | None = None
        self._trees: dict[int, ModuleTree] = {}
        self._written_models: set[str] = set()
        """ids of models whose modules are in the file."""
        self._last_activations: dict[str, tuple[int, list[int]]] = {}
        """By id of a model: the last sampled step, and the activations of its modules then."""
        self._pending: deque[tuple[Reading, Callable[[], None]]] = deque()
        """Samples whose numbers have not arrived from the device, the oldest first."""
        self._stopped = False
        self._cost_ns = 0
        """Of the sample in progress …"""
        self._begun_ns = 0
        """… which began then."""

    @property
    def sampling(self) -> bool:
        """Whether the step in progress is sampled."""
        return self._step is not None

    @failsafe
    def withdraw(self) -> None:
        """Remove everything, for good."""
        self.forget()
        self._stopped = True

    @failsafe
    def watch(self, model: Any, *, activations: bool, gradients: bool) -> None:
        """Sample this model, which the script names, instead of the roots that were found."""
        self._watched = weakref.ref(model)
        self._parts = (activations, gradients)
        self._trees.clear()

    def suspect(self, step: int, why: Oddity) -> bool:
        """Something odd was seen in this step; return whether the next steps will be sampled because of it."""
        if self._stopped:
            return False
        if self._schedule is None:
            self._schedule = Schedule(every_step=self._every_step, now=self._now)
        return self._schedule.suspect(step, why)

    @failsafe
    def _backward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The script calls backward with these arguments in a sampled step."""
        if self._step is not None:
            self._step.backward_begins(args[0] if args else kwargs.get("tensors"))

    def drop_step(self) -> None:
        """Stop sampling the current step, because a graph is being captured."""
        if self._step is not None:
            self._step.discard()
            self._step = None
            self._ledger.before_backward = None
            if self._reading is not None:
                self._free.append(self._reading)
                self._reading = None

    def finish(self, step: int, flags: int, optimizers: Sequence[Any], ring: RingWriter | None) -> int:
        """End the sampled step, if this was one: what else is in the step is over.  Returns a flag for it."""
        sampled, self._step = self._step, None
        if sampled is None:
            return 0
        self._ledger.before_backward = None
        begun_ns = self._now()
        sampled.remove()
        written = self._finish(sampled, step, flags, optimizers, ring)
        if written is None or sampled.failed:
            self._stop()
        ended_ns = self._now()
        self._cost_ns += ended_ns - begun_ns + sampled.own_ns
        if self._schedule is not None:
            if usual_ns := self._schedule.usual_ns(self._begun_ns, step):
                longer_ns = ended_ns - self._begun_ns - usual_ns
                self._cost_ns = max(self._cost_ns, min(longer_ns, MOST_DELAY * self._cost_ns))
            self._schedule.sampled(step, self._cost_ns)
        return FLAG_SAMPLED

    def after_step(self, step: int, roots: Callable[[], Sequence[Any]], *, compiled: bool, busy: bool) -> int:
        """Begin the next step, which is sampled if it is due; return the step at whose end to call this again.

        ``busy``: a CUDA graph is being captured.  ``compiled``: code was compiled in this process.
        """
        if self._stopped:
            return 1 << 62
        if self._schedule is None:
            self._schedule = Schedule(every_step=self._every_step, now=self._now)
        if self._pending and not busy:
            self._resolve()
        if step >= self._schedule.next:
            self._schedule.sampled(step, 0)  # nobody asked in time
        if step + 1 == self._schedule.next:
            begun_ns = self._now()
            began = False if busy else self._begin(roots, compiled)
            self._cost_ns, self._begun_ns = self._now() - begun_ns, begun_ns
            if began is None:
                self._stop()
            elif not began:
                self._schedule.sampled(step + 1, 0)
        if self._step is not None or self._pending:
            return step + 1
        return self._schedule.next - 1

    def _stop(self) -> None:
        """Once failed, never again."""
        self._stopped = True
        self._pending.clear()

    @failsafe
    def _resolve(self) -> None:
        while self._pending and _arrived(self._pending[0][0]):
            reading, write = self._pending.popleft()
            write()
            self._free.append(reading)

    @failsafe
    def _begin(self, roots: Callable[[], Sequence[Any]], compiled: bool) -> bool:
        """Install the hooks; False: there is nothing to sample."""
        trees = self._find_trees(roots, compiled) if self._has_free_reading() else []
        if not trees:
            return False
        self._reading = self._free.pop()
        activations, gradients = self._parts
        with self._torch._C.DisableTorchFunction():  # no tensor class of the script sees that sizes are read
            step = SampledStep(
                self._torch,
                self._ledger,
                self._now,
                trees,
                marks=self._reading[1],
                activations=activations,
                gradients=gradients,
                labels=self._labels if self._labels is not None and self._labels.active else None,
            )
        step.copy_slices()
        if not any(tree.compiled for tree in trees):
            step.install()
        self._step = step
        self._ledger.before_backward = self._backward_begins
        return True

    def _find_trees(self, roots: Callable[[], Sequence[Any]], compiled: bool) -> list[ModuleTree]:
        known, self._trees = self._trees, {}
        with self._torch._C.DisableTorchFunction():
            for model in self._models(roots()):
                tree = known.get(id(model))
                if tree is None or tree.root() is not model or not tree.is_current(compiled=compiled):
                    tree = ModuleTree(model, compiled=compiled)
                if not tree.nodes:
                    warn(f"the model has more than {MOST_MODULES:,} modules: its layers are not sampled")
                    self._stop()
                    return []
                self._trees[id(model)] = tree
            trees = [tree for tree in self._trees.values() if tree.device_types() in SAMPLED_DEVICES]
        # A model may be called in two ways, with its wrapper and without; and a part of it may be called by itself.
        inside = {key for tree in trees for key, at in tree.timed() if at}
        tops = {next(tree.timed())[0]: tree for tree in trees}
        return [tree for key, tree in tops.items() if key not in inside]

    def _models(self, roots: Sequence[Any]) -> Sequence[Any]:
        watched = self._watched() if self._watched is not None else None
        if watched is None:
            return roots[:MAX_ROOTS]
        # The wrapper says which ranks hold the same parameters.
        return [next((root for root in roots if unwrapped(root) is watched), watched)]

    @failsafe
    def _finish(
        self, sampled: SampledStep, step: int, flags: int, optimizers: Sequence[Any], ring: RingWriter | None
    ) -> bool:
        wall_ns = run_clock.wall_ns()
        reading, self._reading = self._reading, None
        assert reading is not None
        read = sampled.read(reading[0], optimizers)

        def write() -> None:
            lines: list[dict[str, Any]] = []
            written_models = set(self._written_models)
            for tree, figures in read():
                if tree.id not in written_models:
                    written_models.add(tree.id)
                    lines.append(_model_line(tree))
                sample = {"kind": "sample", "step": step, "wall_ns": wall_ns, "model": tree.id}
                sample |= {"group": tree.group, "skipped": bool(flags & FLAG_SKIPPED)}
                lines.append({**sample, **{name: value for name, value in figures.items() if value is not None}})
                if (activations := figures["memory"].get("activations")) is not None:
                    self._last_activations[tree.id] = (step, activations)
            if self._write(lines, ring):
                self._written_models = written_models

        if not self._pending and _arrived(reading):
            write()
            self._free.append(reading)
        else:
            self._pending.append((reading, write))
        return True

    @failsafe
    def write_trail(
        self,
        trail: GradientTrail,
        roots: Callable[[], Sequence[Any]],
        ring: RingWriter | None,
        *,
        compiled: bool,
        at_end: bool,
    ) -> None:
        """Write where the gradients of the last steps stopped being numbers; ``at_end``: the process is ending."""
        if self._stopped or not self._has_free_reading():
            return
        reading = self._free.pop()
        reading[1].start(None)
        wall_ns = run_clock.wall_ns()
        trees = self._find_trees(roots, compiled)
        find = trail.read(reading[0])

        def write() -> None:
            lines: list[dict[str, Any]] = []
            written_models = set(self._written_models)
            for tree, found in find(trees):
                if tree.id not in written_models:
                    written_models.add(tree.id)
                    lines.append(_model_line(tree))
                head = {"kind": "sample", "step": found["step"], "wall_ns": wall_ns, "model": tree.id}
                lines.append({**head, "group": tree.group, "trail": True, **found})
            if lines and self._write(lines, ring):
                self._written_models = written_models

        self._pending.append((reading, write))
        until_ns = self._now() + LAST_WAIT_NS if at_end else 0
        while self._pending and not _arrived(self._pending[0][0]) and self._now() < until_ns:
            pass
        self._resolve()

    def _has_free_reading(self) -> bool:
        if not self._free and self._readings < MOST_PENDING:
            self._readings += 1
            self._free.append((immortal(Scalars(self._torch)), immortal(StreamMarks(self._torch))))
        return bool(self._free)

    # -- Out of memory --------------------------------------------------------------------------------------------

    def activations_of(self, tree: ModuleTree) -> tuple[int, list[int]] | None:
        """A sampled step, and the bytes that the modules of a model with this tree kept for backward then."""
        return self._last_activations.get(tree.id)

    @failsafe
    def keep_sizes(
        self, step: int, trees: Sequence[ModuleTree], sizes: Sequence[dict[str, list[int]]], ring: RingWriter | None
    ) -> None:
        """Write what the layers hold as memory runs out in this step; it is not one of the samples."""
        wall_ns = run_clock.wall_ns()
        lines: list[dict[str, Any]] = []
        for tree, memory in zip(trees, sizes, strict=True):
            if tree.id not in self._written_models:
                lines.append(_model_line(tree))
            sample = {"kind": "sample", "step": step, "wall_ns": wall_ns, "model": tree.id, "clock": "host"}
            lines.append({**sample, "group": tree.group, "out_of_memory": True, "memory": memory})
        if lines:
            self._write(lines, ring)

    def _write(self, records: Iterable[Mapping[str, Any]], ring: RingWriter | None) -> bool:
        """Append lines to the file next to the ring; whether the agent will find them."""
        if ring is None:
            self._stop()
            return False
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = above_standard_streams(os.open(ring.path.with_suffix(LAYERS_SUFFIX), flags, 0o600))
        if os.fstat(self._fd).st_blocks * 512 > MAX_FILE_BYTES:
            return False
        text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode()
        if os.write(self._fd, text) != len(text):
            self._stop()
            return False
        return True


def _arrived(reading: Reading) -> bool:
    scalars, marks = reading
    return scalars.arrived() and marks.passed()


def _model_line(tree: ModuleTree) -> dict[str, Any]:
    return {
        "kind": "model",
        "model": tree.id,
        "compiled": tree.compiled,
        "replicated": tree.replicated,
        "modules": tree.rows,
    }
