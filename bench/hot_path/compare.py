"""The recorder's hot path in Python and in C (``ledger.c``), side by side inside one training process.

Rounds of steps in random order: one without hooks, one with the hooks in Python, one with those in C.  As in
``hook_costs.py`` nothing is patched back and forth; a step calls the hooks of its kind itself, by way of C where a
script would (``next``, a call of a model).  The hooks of both kinds write the same ring.  Between two steps, outside
the clock, the state moves from the ledger in Python to that in C and back.

Steps in which anything rare is due are run in Python and not counted, and the readings of the loss and of gradients are
off while it measures: they cost the same either way.

    python bench/hot_path/compare.py                    # starts itself under stepscope run, with a real agent
    python bench/hot_path/compare.py --check            # only: do both write the same words?
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import json
import operator
import os
import random
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["Native", "build", "load", "main"]

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent
SOURCE = HERE / "ledger.c"
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fstack-protector-strong")
"""Those of hatch_build.py, which compiles the scanner of traces."""
TP_CALL = "LEDGER_TP_CALL"
"""Build with the limited API of Python 3.10 alone, without vectorcall."""
WARM_STEPS = 150
SETTLE_STEPS = 2000
AHEAD = 8
"""So many steps nothing rare may be due before a round begins."""
RESAMPLES = 400
FAR = 1 << 60
"""No such step comes."""
CODE_MASK, DATA = 31, 1 << 63
NONE, PYTHON, NATIVE, STRICT, EMPTY = "no hooks", "Python", "C", "C, no vectorcall", "empty C"
HOOKS = {"input": ("take",), "forward": ("model",), "backward": ("backward",), "optimizer": ("before", "after")}
"""The fields of ``Hooks`` of each."""

Lap = tuple[float, float]
"""Main-thread CPU and wall-clock time of one step, µs."""
Rounds = list[dict[str, Lap]]
Interval = tuple[float, float, float]
"""Low, middle, high."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="1", help="transformer, or a size of loop.py (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1000, help="of all hooks (default: %(default)s)")
    parser.add_argument(
        "--floor-rounds", type=int, default=1000, help="of hooks that do nothing (default: %(default)s)"
    )
    parser.add_argument("--hook-rounds", type=int, default=1000, help="of each hook (default: %(default)s)")
    parser.add_argument("--check-steps", type=int, default=200, help="of each kind (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single step there")
    parser.add_argument("--inside", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        _inside(args)
        return
    inherited = [str(BENCH.parent / "src"), str(BENCH), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, inherited)), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="stepscope-bench-") as work:
        for name, defines in (("vectorcall", ()), ("strict", (TP_CALL,))):
            build(Path(work, name), *defines)
        command = [sys.executable, "-m", "stepscope", "run", "--quiet", "--dir", str(Path(work, "runs"))]
        inside = [sys.executable, __file__, *sys.argv[1:], "--inside", work]
        status = subprocess.call([*command, *inside], env=environment)
        raise SystemExit(status or _check_run(Path(work)))


def _check_run(work: Path) -> int:
    """Whether the run on disk has all steps that were recorded."""
    expected = json.loads((work / "steps.json").read_text())
    (summary,) = (json.loads(path.read_text()) for path in (work / "runs").rglob("summary.json"))
    stored = {rank["last_step"] + 1 for rank in summary["ranks"]}
    print(f"steps recorded: {expected:,}; in the run's summary: {', '.join(f'{steps:,}' for steps in stored)}")
    return int(stored != {expected})


# -- The part in C ----------------------------------------------------------------------------------------------------


def build(folder: Path, *defines: str) -> None:
    """Compile ``ledger.c`` into ``folder``."""
    folder.mkdir()
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    include = f"-I{sysconfig.get_paths()['include']}"
    named = [f"-D{name}" for name in defines]
    subprocess.run([*compiler, *FLAGS, *named, include, str(SOURCE), "-o", str(folder / "ledger.abi3.so")], check=True)


def load(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("ledger", folder / "ledger.abi3.so")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _address(words: memoryview) -> int:
    return ctypes.addressof(ctypes.c_uint64.from_buffer(words))


def _ledger_class(module: Any) -> Any:
    """The ledger in C with the rare methods of that in Python, which find the attributes that they know."""
    from stepscope.recorder.ledger import Ledger

    def set_part(name: str) -> property:
        def store(self: Any, words: memoryview) -> None:
            setattr(self, f"_{name}", words)
            if hasattr(self, "_body") and hasattr(self, "_header"):
                self.set_memory(_address(self._body), _address(self._header))

        return property(operator.attrgetter(f"_{name}"), store)

    rare = ("enter", "leave", "end_step", "put", "turn", "close", "let_go", "rests", "written", "_refused")
    parts = {name: set_part(name) for name in ("body", "header")}
    return type("NativeLedger", (module.Ledger,), {**{name: vars(Ledger)[name] for name in rare}, **parts})


class Native:
    """A ledger in C, which takes over from that in Python for a step."""

    LEDGER_FIELDS = ("at", "limit", "rounds", "phase", "thread", "_capacity", "device", "before_backward")

    def __init__(self, module: Any, ledger: Any) -> None:
        self.module, self.python = module, ledger
        self.ledger = _ledger_class(module)()
        self.ledger.now, self.ledger._on_refusal = ledger.now, ledger._on_refusal
        self.fallbacks = 0

    def copy_in(self) -> None:
        for name in ("body", "header"):
            if getattr(self.ledger, f"_{name}", None) is not getattr(self.python, name):
                setattr(self.ledger, name, getattr(self.python, name))
        for name in self.LEDGER_FIELDS:
            setattr(self.ledger, name, getattr(self.python, name))

    def copy_out(self) -> None:
        for name in self.LEDGER_FIELDS:
            setattr(self.python, name, getattr(self.ledger, name))

    def timed(self, original: Any, phase: int, observer: Any = None) -> Any:
        """As ``Ledger.timed``."""
        from stepscope.recorder.ledger import Ledger

        in_python = Ledger.timed(self.ledger, original, phase, observer)
        hook = self.module.Hook(self.module.TIMED, self.ledger, original, in_python, phase, ())
        return functools.update_wrapper(hook, original)

    def empty(self, original: Any) -> Any:
        return self.module.Hook(self.module.EMPTY, self.ledger, original, original, 0, ())


class NativeRecorder(Native):
    """The same with the hooks of a recorder."""

    def __init__(self, module: Any, recorder: Any, python: Hooks) -> None:
        super().__init__(module, recorder.ledger)
        self._recorder = recorder
        self._search = recorder._search
        self._optimizers = _enclosed(python.before, "self")
        self.values = _enclosed(_innermost_hook(python.backward), "observer")
        self.ledger.lend, self.ledger.take = self._fall_back, self._take
        self.hooks = self._make_hooks(python)

    def _make_hooks(self, python: Hooks) -> Hooks:
        from stepscope.recorder.ledger import Ledger
        from stepscope.records.steps import BACKWARD, FORWARD, INPUT, OPTIMIZER

        module, ledger, recorder, search = self.module, self.ledger, self._recorder, self._search
        recorder.ledger = ledger  # of the hooks in Python that are made here, for what is rare
        try:
            call = _original(python.model)
            about = (search._roots, search._frozen, search._grad_enabled)
            model = module.Hook(module.FORWARD, ledger, call, search._make_timer(call), FORWARD, about)
            before, after = self._optimizers._make_hooks()
        finally:
            recorder.ledger = self.python
        before = module.Hook(module.BEFORE, ledger, self._optimizers._open, before, OPTIMIZER, ())
        backward = self.timed(_original(python.backward), BACKWARD, self.values)
        assert isinstance(self.python, Ledger)
        return Hooks(
            take=self.timed(_original(python.take), INPUT),
            model=functools.update_wrapper(model, call),
            backward=backward,
            before=before,
            after=module.Hook(module.AFTER, ledger, None, after, OPTIMIZER, before),
            native=self,
        )

    def empty_hooks(self, bare: Hooks) -> Hooks:
        """Hooks at the same places that do nothing: what no implementation gets rid of."""
        nothing = self.module.Hook(self.module.NOTHING, self.ledger, None, None, 0, ())
        calls = {name: self.empty(getattr(bare, name)) for name in ("take", "model", "backward")}
        return Hooks(**calls, before=nothing, after=nothing, native=None)

    # The fields of the recorder that ``ledger.c`` has too.

    def _take(self) -> None:
        recorder, ledger = self._recorder, self.ledger
        ledger.step, ledger.flags, ledger.attend_at = recorder.step, recorder.flags, recorder._attend_at
        ledger.ended_ns, ledger.slow_ns = recorder._ended_ns, recorder._slow_ns
        ledger.forward_seen = recorder.forward_seen
        ledger.sole = 0 if recorder.explicit else recorder.boundaries.sole
        ledger.trail_due = FAR if recorder.trail is None else recorder.trail.due
        ledger.searching = bool(self._search._steps_to_search or self._search._expecting)
        ledger.returned = self._optimizers._returned
        self.hooks.backward.due = FAR if self.values is None else self.values.due

    def _lend(self) -> None:
        recorder, ledger = self._recorder, self.ledger
        recorder.step, recorder.flags, recorder._ended_ns = ledger.step, ledger.flags, ledger.ended_ns
        recorder.forward_seen = bool(ledger.forward_seen)
        self._optimizers._returned = ledger.returned

    def _fall_back(self) -> None:
        self.fallbacks += 1
        self._lend()

    def begin(self) -> None:
        """The next words are written by the part in C."""
        self.copy_in()
        self._take()
        self._recorder.ledger = self.ledger

    def end(self) -> None:
        self._recorder.ledger = self.python
        self._lend()
        self.copy_out()


def _enclosed(function: Any, name: str) -> Any:
    """A variable that a function has from the one around it."""
    return dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))[name].cell_contents


def _innermost_hook(hooked: Any) -> Any:
    """The hook around the original, if there are several."""
    while hasattr(hooked.__wrapped__, "__wrapped__"):
        hooked = hooked.__wrapped__
    return hooked


def _original(hooked: Any) -> Any:
    """What a hook stands for."""
    while hasattr(hooked, "__wrapped__"):
        hooked = hooked.__wrapped__
    return hooked


# -- Steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hooks:
    """What a step calls, hooked or not."""

    take: Any
    model: Any
    backward: Any
    before: Any = None
    after: Any = None
    native: NativeRecorder | None = None


class Training:
    """The training loop of ``loop.py`` with hooks of several kinds."""

    def __init__(self, torch: Any, loop: Any, args: argparse.Namespace) -> None:
        from stepscope.recorder import bootstrap

        recorder = bootstrap.current()
        if recorder is None:
            raise SystemExit("this process is not recorded")
        self.recorder: Any = recorder
        self.torch = torch
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.net, batch = loop.build(args.workload)
        kind = torch.optim.SGD if args.workload in loop.MLPS else torch.optim.AdamW
        self.optimizer = kind(self.net.parameters(), lr=1e-3)
        self.loss_of = torch.nn.CrossEntropyLoss()
        self.batches = iter(torch.utils.data.DataLoader(loop.OneBatch(10**9, batch), batch_size=None))
        optimizers: Any = sys.modules["torch.optim.optimizer"]
        self._tables = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
        self.discarded = 0
        self.last_loss: Any = None
        self._warm_up()
        installed = Hooks(
            type(self.batches).__next__, type(self.net).__call__, torch.autograd.backward, *self._installed_hooks()
        )
        bare = Hooks(*(_original(getattr(installed, name)) for name in ("take", "model", "backward")))
        folder = Path(args.inside)
        self.natives = {
            NATIVE: NativeRecorder(load(folder / "vectorcall"), recorder, installed),
            STRICT: NativeRecorder(load(folder / "strict"), recorder, installed),
        }
        self.kinds = {NONE: bare, PYTHON: installed, EMPTY: self.natives[NATIVE].empty_hooks(bare)}
        self.kinds |= {name: native.hooks for name, native in self.natives.items()}
        for kind in (PYTHON, NATIVE):
            for name, fields in HOOKS.items():
                without = {field: getattr(bare, field) for field in fields}
                self.kinds[f"{kind} without {name}"] = replace(self.kinds[kind], **without)

    def _installed_hooks(self) -> list[Any]:
        return [hook for table in self._tables for hook in table.values()]

    def _warm_up(self) -> None:
        """With everything as it is installed; until the model is found."""
        for _ in range(WARM_STEPS):
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            self.loss_of(self.net(x), y).backward()
            self.optimizer.step()

    def is_quiet(self, steps: int = 0) -> bool:
        """Whether nothing rare is due for so many steps."""
        recorder, search = self.recorder, self.recorder._search
        sampling = recorder.layers is not None and recorder.layers.sampling
        searching = search._steps_to_search or search._expecting
        return recorder._attend_at > recorder.step + steps and not sampling and not searching

    def stop_readings(self) -> None:
        values = self.natives[NATIVE].values
        if values is not None:
            values.due = values._next = FAR
        if self.recorder.trail is not None:
            self.recorder.trail.due = FAR

    def settle(self) -> None:
        for _ in range(SETTLE_STEPS):
            if self.is_quiet(AHEAD):
                return
            self.step(PYTHON)
        raise SystemExit("something is due in every step")

    def round(self, kinds: Sequence[str]) -> dict[str, Lap]:
        """A step of each kind, in random order."""
        while True:
            self.settle()
            laps: dict[str, Lap] = {}
            for kind in random.sample(kinds, len(kinds)):
                if not self.is_quiet():
                    self.discarded += 1
                    break
                laps[kind] = self.step(kind)
            else:
                return laps

    @contextlib.contextmanager
    def with_hooks(self, kind: str) -> Iterator[Hooks]:
        hooks = self.kinds[kind]
        for table, hook in zip(self._tables, (hooks.before, hooks.after), strict=True):
            table.clear()
            if hook is not None:
                table[0] = hook
        if hooks.model is self.kinds[NONE].model:
            self.recorder.forward_seen = True  # or it would look for the model
        self.recorder._ended_ns = self.recorder.ledger.now()  # or a step after some without hooks would be a long one
        if hooks.native is not None:
            hooks.native.begin()
        try:
            yield hooks
        finally:
            if hooks.native is not None:
                hooks.native.end()

    def step(self, kind: str) -> Lap:
        with self.with_hooks(kind) as hooks:
            # A script enters these two from C.
            take, model = functools.partial(hooks.take), functools.partial(hooks.model)
            backward, batches, net, optimizer, loss_of = (
                hooks.backward, self.batches, self.net, self.optimizer, self.loss_of
            )  # fmt: skip
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            x, y = take(batches)
            optimizer.zero_grad()
            loss = loss_of(model(net, x), y)
            backward(loss, None, None, False, inputs=None)  # as Tensor.backward does
            optimizer.step()
            wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
        self.last_loss = loss
        return cpu / 1e3, wall / 1e3


# -- Do both do the same? ---------------------------------------------------------------------------------------------


def _ordinary(training: Training, hooks: Hooks) -> None:
    x, y = hooks.take(training.batches)
    training.optimizer.zero_grad()
    hooks.backward(training.loss_of(hooks.model(training.net, x), y))
    training.optimizer.step()


def _accumulating(training: Training, hooks: Hooks) -> None:
    for _ in range(3):
        x, y = hooks.take(training.batches)
        hooks.backward(tensors=training.loss_of(hooks.model(training.net, x), y))
    training.optimizer.step()


def _evaluating(training: Training, hooks: Hooks) -> None:
    x, _ = hooks.take(training.batches)
    with training.torch.no_grad():
        hooks.model(training.net, x)
    training.net.eval()
    hooks.model(training.net, x)
    training.net.train()
    _ordinary(training, hooks)


def _closing(training: Training, hooks: Hooks) -> None:
    x, y = hooks.take(training.batches)

    def closure() -> Any:
        loss = training.loss_of(hooks.model(training.net, x), y)
        hooks.backward(loss)
        return loss

    training.optimizer.step(closure)
    training.optimizer.step(closure=closure)


def _failing(training: Training, hooks: Hooks) -> None:
    def fail() -> None:
        raise KeyError

    x, _ = hooks.take(training.batches)
    with contextlib.suppress(RuntimeError):
        hooks.model(training.net, x[..., :1])
    with contextlib.suppress(RuntimeError):
        hooks.backward(x)
    with contextlib.suppress(KeyError):
        training.optimizer.step(fail)
    groups, training.optimizer.param_groups = training.optimizer.param_groups, [{}]
    with contextlib.suppress(KeyError):
        training.optimizer.step()
    training.optimizer.param_groups = groups
    _ordinary(training, hooks)
    _ordinary(training, hooks)


def _in_threads(training: Training, hooks: Hooks) -> None:
    def elsewhere() -> None:
        x, y = hooks.take(training.batches)
        hooks.backward(training.loss_of(hooks.model(training.net, x), y))
        training.optimizer.step()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    _ordinary(training, hooks)


def _nested(training: Training, hooks: Hooks) -> None:
    original = training.net.forward
    inner: Any = training.net[:] if hasattr(training.net, "__getitem__") else training.net.encoder
    training.net.forward = lambda x: original(x) + hooks.model(inner, x)
    try:
        with contextlib.suppress(RuntimeError):
            _ordinary(training, hooks)
    finally:
        del training.net.forward


def _with_device(training: Training, hooks: Hooks) -> list[tuple[int, int]]:
    marks: list[tuple[int, int]] = []
    ledger = training.recorder.ledger
    ledger.device = SimpleNamespace(mark=lambda ended, begun: marks.append((ended, begun)))
    _ordinary(training, hooks)
    ledger.device = None
    return marks


def _with_device_from(training: Training, hooks: Hooks) -> list[tuple[int, int]]:
    """The device is timed from the middle of a phase on."""
    marks: list[tuple[int, int]] = []
    ledger = training.recorder.ledger
    handle = training.net.register_forward_hook(
        lambda *_: setattr(ledger, "device", SimpleNamespace(mark=lambda ended, begun: marks.append((ended, begun))))
    )
    _ordinary(training, hooks)
    handle.remove()
    ledger.device = None
    return marks


def _observed(training: Training, hooks: Hooks) -> list[Any]:
    seen: list[Any] = []
    training.recorder.ledger.before_backward = lambda args, kwargs: seen.append((len(args), sorted(kwargs)))
    _ordinary(training, hooks)
    training.recorder.ledger.before_backward = None
    return seen


def _explicit(training: Training, hooks: Hooks) -> None:
    """The script marks its steps itself."""
    recorder = training.recorder
    recorder.explicit = True
    if hooks.native is not None:
        hooks.native._take()
    _ordinary(training, hooks)
    recorder.explicit = False
    if hooks.native is not None:
        hooks.native._take()
    _ordinary(training, hooks)


SCENARIOS: dict[str, Callable[[Training, Hooks], object]] = {
    "an ordinary step": _ordinary,
    "accumulated gradients": _accumulating,
    "evaluation": _evaluating,
    "closures": _closing,
    "exceptions": _failing,
    "another thread": _in_threads,
    "a model in a model": _nested,
    "a timed device": _with_device,
    "a device timed from then on": _with_device_from,
    "a sampled backward": _observed,
    "steps marked by the script": _explicit,
}


def check(training: Training, steps: int) -> list[str]:
    """Differences between the hooks in Python and those in C."""
    different = []
    for kind in (NATIVE, STRICT):
        for name, scenario in SCENARIOS.items():
            expected, found = (_words_of(training, each, scenario) for each in (PYTHON, kind))
            if expected != found:
                different.append(f"{kind}, {name}: {expected} in Python, {found} in C")
    different += _check_turns(training)
    different += _check_losses(training, steps)
    different += _check_phases(training, steps)
    different += _check_real_patches(training)
    return different


def _words_of(training: Training, kind: str, scenario: Callable[[Training, Hooks], object]) -> object:
    """What a scenario writes into the ring, without instants and numbers of steps, and what it returns."""
    training.settle()
    ledger, step = training.recorder.ledger, training.recorder.step
    begin = ledger.at
    if begin > ledger._capacity - 8192:
        raise SystemExit("the ring is about to turn")
    training.net.zero_grad()
    training.recorder._slow_ns = FAR  # or the layers of the step after a long one would be sampled
    with training.with_hooks(kind) as hooks:
        returned = scenario(training, hooks)
    words = []
    for word in ledger.body[begin : ledger.at]:
        if not word & DATA:
            words.append(word & CODE_MASK)
        elif word >> 55 == DATA >> 55 | 2:  # STEP_ABOUT
            words.append(f"step {(word >> 20 & 0xFFFFFFFF) - step} {word & 0xFFFFF}")
    state = ledger.phase, training.recorder.step - step, ledger.header[7] == ledger.written
    return words, state, returned


def _check_turns(training: Training) -> list[str]:
    """Several rounds of two small rings."""
    from stepscope.recorder.ledger import Ledger
    from stepscope.records.identity import RankIdentity
    from stepscope.records.steps import INPUT
    from stepscope.ring import RingWriter
    from stepscope.ring.layout import MIN_CAPACITY

    found: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for native in (None, *training.natives.values()):
            path = Path(folder, f"{len(found)}.ring")
            ring = RingWriter(path, RankIdentity(host="", pid=os.getpid()), capacity=MIN_CAPACITY)
            ledger = Ledger(time.perf_counter_ns, lambda _: False)
            ledger.open(ring)
            around = None if native is None else Native(native.module, ledger)
            if around is not None:
                around.copy_in()
            call = (ledger if around is None else around).timed(lambda: None, INPUT)
            for _ in range(3 * MIN_CAPACITY):
                call()
            if around is not None:
                around.copy_out()
            codes = [word & (CODE_MASK if not word & DATA else -1) for word in ring.body]
            found.append((codes[1:], ledger.at, ledger.rounds, ledger.limit, ring.header[7]))
    return [] if found[0] == found[1] == found[2] else ["a small ring, several times around"]


def _check_losses(training: Training, steps: int) -> list[str]:
    """The same training from the same weights, with hooks of each kind."""
    start = {name: tensor.clone() for name, tensor in training.net.state_dict().items()}
    losses: dict[str, list[str]] = {}
    for kind in (NONE, PYTHON, NATIVE, STRICT, EMPTY):
        training.net.load_state_dict(start)
        training.optimizer.state.clear()
        losses[kind] = []
        for _ in range(steps):
            training.step(kind)
            losses[kind].append(training.last_loss.item().hex())
    print(f"last of {steps} losses: {', '.join(f'{kind} {values[-1]}' for kind, values in losses.items())}")
    return [f"losses with {kind}" for kind, values in losses.items() if values != losses[NONE]]


def _check_phases(training: Training, steps: int) -> list[str]:
    """What the reader makes of the words: the phases add up, and none is missing."""
    from stepscope.records.steps import BUILTIN_PHASES, PHASE_SLOTS, SLOT_HEAD, STEP, STEP_SLOT
    from stepscope.ring.reader import RingReader

    reader = RingReader(training.recorder.ring.path)
    position = reader.read(0).last_seq
    kind_of: dict[int, str] = {}
    while len(kind_of) < steps * 2:
        training.settle()
        for kind in random.sample((PYTHON, NATIVE), 2):
            if training.is_quiet():
                kind_of[training.recorder.step] = kind
                training.step(kind)
    batch = reader.read(position)
    reader.close()
    wrong = [f"{batch.lost} steps lost, {batch.torn} torn"] if batch.lost or batch.torn else []
    decoded: dict[str, list[tuple[int, ...]]] = {PYTHON: [], NATIVE: []}
    for slot in batch.slots:
        if SLOT_HEAD.unpack_from(slot)[1] == STEP:
            _, _, _, step, _, length, *rest = STEP_SLOT.unpack(slot)
            phases = tuple(rest[:PHASE_SLOTS])
            if sum(phases) != length:
                wrong.append(f"step {step}: {phases} in {length} ns")
            if step in kind_of:
                decoded[kind_of.pop(step)].append(phases)
    if kind_of:
        wrong.append(f"{len(kind_of)} steps were not decoded")
    seen = {kind: Counter(tuple(map(bool, phases)) for phases in found) for kind, found in decoded.items()}
    if seen[PYTHON].keys() != seen[NATIVE].keys():
        wrong.append(f"other phases: {seen}")
    for kind, found in decoded.items():
        medians = (statistics.median(phases[at] for phases in found) / 1e3 for at in range(len(BUILTIN_PHASES)))
        text = ", ".join(f"{name} {us:.1f}" for name, us in zip(BUILTIN_PHASES, medians, strict=True) if us)
        print(f"decoded with {kind}, {len(found)} steps, median µs: {text}")
    return wrong


def _check_real_patches(training: Training) -> list[str]:
    """The hooks in C as attributes of classes, called by ``next`` and as a model."""
    patched = [(type(training.batches).__mro__[1], "__next__"), (type(training.net), "__call__")]
    expected = _words_of(training, PYTHON, _ordinary)
    before = [vars(owner)[name] for owner, name in patched]
    hooks = training.kinds[NATIVE]
    for (owner, name), hook in zip(patched, (hooks.take, hooks.model), strict=True):
        setattr(owner, name, hook)

    def as_a_script(training: Training, hooks: Hooks) -> None:
        training.torch.autograd.backward = hooks.backward
        x, y = next(training.batches)
        training.optimizer.zero_grad()
        training.loss_of(training.net(x), y).backward()
        training.optimizer.step()
        training.torch.autograd.backward = training.kinds[PYTHON].backward

    found = _words_of(training, NATIVE, as_a_script)
    for (owner, name), value in zip(patched, before, strict=True):
        setattr(owner, name, value)
    return [] if found == expected else [f"as attributes of classes: {found} instead of {expected}"]


# -- Figures ----------------------------------------------------------------------------------------------------------


def _inside(args: argparse.Namespace) -> None:
    import loop
    import torch

    training = Training(torch, loop, args)
    different = check(training, args.check_steps)
    for difference in different:
        print(f"DIFFERENT: {difference}")
    if not different:
        print(f"the same words: {', '.join(SCENARIOS)}; the same losses, phases that add up")
    if not args.check:
        _measure(training, args)
    (args.inside / "steps.json").write_text(json.dumps(training.recorder.step))
    raise SystemExit(bool(different))


def _measure(training: Training, args: argparse.Namespace) -> None:
    for native in training.natives.values():
        native.fallbacks = 0
    training.stop_readings()
    begun = time.monotonic()
    rounds = {"all": [training.round((NONE, PYTHON, NATIVE)) for _ in range(args.rounds)]}
    fallbacks = training.natives[NATIVE].fallbacks
    rounds["floor"] = [training.round((NONE, EMPTY, STRICT)) for _ in range(args.floor_rounds)]
    for name in HOOKS:
        kinds = [f"{kind}{rest}" for kind in (PYTHON, NATIVE) for rest in ("", f" without {name}")]
        rounds[name] = [training.round(kinds) for _ in range(args.hook_rounds)]
    seconds = time.monotonic() - begun
    _report(rounds, args)
    print(f"{training.discarded} rounds discarded; {fallbacks} of {args.rounds} steps in C fell back; {seconds:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(rounds))


def _report(rounds: dict[str, Rounds], args: argparse.Namespace) -> None:
    cpu, wall = (statistics.median(laps[NONE][at] for laps in rounds["all"]) for at in (0, 1))
    print(f"{args.workload} on a CPU: a step takes {wall:,.0f} µs without hooks, {cpu:,.0f} µs of CPU")
    print(f"  {'adds, µs a step':36}{'CPU':>8}  {'95% interval':16}{'wall':>8}  {'95% interval':16}")
    for name, kind in (("all", PYTHON), ("all", NATIVE), ("floor", STRICT), ("floor", EMPTY)):
        if rounds[name]:
            _print_row(f"all hooks, {kind}", rounds[name], (kind, NONE))
    for name in HOOKS:
        if rounds[name]:
            for kind in (PYTHON, NATIVE):
                _print_row(f"{name}, {kind}", rounds[name], (kind, f"{kind} without {name}"))
    print(f"  {'Python : C':36}{'CPU':>8}  {'95% interval':16}{'wall':>8}  {'95% interval':16}")
    _print_ratio("all hooks", rounds["all"], (PYTHON, NONE), (NATIVE, NONE))
    for name in HOOKS:
        if rounds[name]:
            pairs = ((kind, f"{kind} without {name}") for kind in (PYTHON, NATIVE))
            _print_ratio(name, rounds[name], *pairs)


def _print_row(name: str, rounds: Rounds, pair: tuple[str, str]) -> None:
    line = f"  {name:36}"
    for at in (0, 1):
        low, middle, high = _interval(rounds, lambda laps, at=at: [_added(laps, pair, at)], lambda means: means[0])
        line += f"{middle:>+8.1f}  {f'({low:+.1f} to {high:+.1f})':16}"
    print(line.rstrip())


def _print_ratio(name: str, rounds: Rounds, *pairs: tuple[str, str]) -> None:
    line = f"  {name:36}"
    for at in (0, 1):
        low, middle, high = _interval(
            rounds,
            lambda laps, at=at: [_added(laps, pair, at) for pair in pairs],
            lambda means: means[0] / means[1] if means[1] else 0.0,
        )
        line += f"{middle:>8.2f}  {f'({low:.2f} to {high:.2f})':16}"
    print(line.rstrip())


def _added(laps: dict[str, Lap], pair: tuple[str, str], at: int) -> float:
    return laps[pair[0]][at] - laps[pair[1]][at]


def _interval(
    rounds: Rounds, differences: Callable[..., list[float]], figure: Callable[[list[float]], float]
) -> Interval:
    """A figure of the trimmed means of some differences, and between what it lies if rounds are drawn again."""
    from hook_costs import trimmed

    rows = [differences(laps) for laps in rounds]

    def of(rows: Sequence[Sequence[float]]) -> float:
        return figure([trimmed(column) for column in zip(*rows, strict=True)])

    drawn = sorted(of(random.choices(rows, k=len(rows))) for _ in range(RESAMPLES))
    return drawn[int(0.025 * RESAMPLES)], of(rows), drawn[int(0.975 * RESAMPLES)]


if __name__ == "__main__":
    main()
