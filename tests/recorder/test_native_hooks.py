"""Hooks in C: the same record as with hooks in Python, and nothing that the script could tell apart."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stepscope.recorder import bootstrap, guard
from stepscope.recorder.guard import ImportWatch
from stepscope.recorder.hooks import forward, native
from stepscope.recorder.instrumentation import Instrumentation
from stepscope.recorder.ledger import NOBODY, NOT_NOW, Ledger
from stepscope.recorder.recorder import Recorder
from stepscope.records.identity import RankIdentity
from stepscope.records.paths import ENV_C_HOOKS
from stepscope.records.steps import BACKWARD, FORWARD, INPUT, OPTIMIZER, OTHER
from stepscope.ring import RingWriter
from stepscope.ring.layout import CODE_MASK, DATA, ENTER, MIN_CAPACITY
from tests.conftest import Commands

JOB = Path(__file__).with_name("native_job.py")
JOBS = 17
MODES = ("0", "1")

Call = Callable[..., Any]


@pytest.fixture
def module() -> Any:
    found = native.extension()
    if found is None:
        pytest.skip("the hooks in C were not built: no C compiler")
    return found


@pytest.fixture
def ring(tmp_path: Path) -> RingWriter:
    return _ring(tmp_path)


@pytest.fixture
def ledger(module: Any, ring: RingWriter) -> Iterator[Any]:
    ledger = _native_ledger()
    ledger.open(ring)
    yield ledger
    ledger.let_go()


@pytest.fixture
def recorder(module: Any, tmp_path: Path) -> Iterator[Recorder]:
    """Torch with hooks in C."""
    kind = native.recorder_class()
    assert kind is not None
    (tmp_path / "session").mkdir()
    recorder, watch, failures = kind(tmp_path / "session", tmp_path), ImportWatch(), guard.failures()
    instrumentation = Instrumentation(recorder, torch, watch)
    yield recorder
    instrumentation.remove()
    watch.remove()
    guard.on_failure(None)
    assert guard.failures() == failures


def _ring(folder: Path) -> RingWriter:
    return RingWriter(folder / "1.ring", RankIdentity(host="", pid=os.getpid()), capacity=MIN_CAPACITY)


def _native_ledger() -> Any:
    kind = native.recorder_class()
    assert kind is not None
    return kind.ledger_class(time.perf_counter_ns, lambda _: False)


def _words(ledger: Any, begin: int = 2) -> list[int]:
    """Codes of time words, and data words; not those with which the recording begins."""
    return [word if word & DATA else word & CODE_MASK for word in ledger.body[begin : ledger.at]]


# -- The same record --------------------------------------------------------------------------------------------------


def test_jobs_of_all_kinds_are_recorded_alike(module: Any, commands: Commands, tmp_path: Path) -> None:
    _compare_modes(commands, tmp_path, JOBS, JOB)


@pytest.mark.soak  # near: jobs of all other kinds, above
def test_compiled_jobs_are_recorded_alike(module: Any, commands: Commands, tmp_path: Path) -> None:
    _compare_modes(commands, tmp_path, 1, JOB, words=("compiled",))


@pytest.mark.ranks
def test_ranks_are_recorded_alike(module: Any, commands: Commands, forked_ranks: Path, tmp_path: Path) -> None:
    _compare_modes(commands, tmp_path, 2, forked_ranks, "2", JOB)


def _compare_modes(
    commands: Commands, folder: Path, count: int, *command: str | Path, words: tuple[str, ...] = ()
) -> None:
    """Run the jobs with hooks in Python and in C, at the same time."""
    started = []
    for mode in MODES:
        (folder / mode).mkdir()
        options = ("--quiet", "--layers", "off", "--name", mode)
        started.append(commands.start("run", *options, *command, folder / mode, *words, env={ENV_C_HOOKS: mode}))
    for process in started:
        done = commands.finish(process, timeout_s=240)
        assert done.code == 0, done.stderr
    python, c = ({path.name: json.loads(path.read_text()) for path in (folder / mode).iterdir()} for mode in MODES)
    assert len(python) == count
    assert python.keys() == c.keys()
    for name, made in python.items():
        assert (made.pop("native"), c[name].pop("native")) == (False, True)
        assert made == c[name], name
        assert made["state"][-1] == 0, "a hook of ours failed"


def test_a_small_ring_several_times_around(module: Any, tmp_path: Path) -> None:
    found = []
    for name, make in (("python", lambda: Ledger(time.perf_counter_ns, lambda _: False)), ("c", _native_ledger)):
        (tmp_path / name).mkdir()
        ledger, ring = make(), _ring(tmp_path / name)
        ledger.open(ring)
        call = ledger.timed(lambda: None, INPUT)
        for _ in range(3 * MIN_CAPACITY):
            call()
        words = [word if word & DATA else word & CODE_MASK for word in ring.body]
        found.append((words[1:], ledger.at, ledger.rounds, ledger.limit, ring.header[7]))
        ledger.let_go()
        ring.close()
    assert found[0] == found[1]


# -- When hooks in C are used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("python", "machine", "expected"),
    [((3, 10), "x86_64", True), ((3, 13), "x86_64", True), ((3, 99), "x86_64", False), ((3, 11), "aarch64", False)],
)
def test_by_default_they_are_used_where_they_were_tried(
    monkeypatch: pytest.MonkeyPatch, python: tuple[int, int], machine: str, expected: bool
) -> None:
    for unset in ("", "yes"):
        monkeypatch.setenv(ENV_C_HOOKS, unset)
        assert native.are_wanted(python, machine) is expected
    monkeypatch.delenv(ENV_C_HOOKS)
    assert native.are_wanted(python, machine) is expected
    for value, wanted in (("0", False), ("1", True)):
        monkeypatch.setenv(ENV_C_HOOKS, value)
        assert native.are_wanted(python, machine) is wanted


def test_the_setting_turns_them_on_and_off(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_C_HOOKS, "1")
    assert bootstrap.recorder_class().native is not None
    monkeypatch.setenv(ENV_C_HOOKS, "0")
    assert bootstrap.recorder_class() is Recorder


def test_without_the_extension_hooks_are_in_python(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ENV_C_HOOKS, "1")
    monkeypatch.setitem(sys.modules, native.EXTENSION, None)
    assert bootstrap.recorder_class() is Recorder
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("difference", [{"INTERFACE": 0}, {"LAYOUT": (4,)}, {}])
def test_an_extension_from_another_source_is_not_used(
    monkeypatch: pytest.MonkeyPatch, difference: dict[str, Any]
) -> None:
    same = {"INTERFACE": native.INTERFACE, "LAYOUT": native.LAYOUT} if difference else {}
    monkeypatch.setitem(sys.modules, native.EXTENSION, SimpleNamespace(**{**same, **difference}))
    assert native.extension() is None


def test_without_a_gil_hooks_are_in_python(module: Any) -> None:
    assert native.extension(lambda: False) is None


def test_numbers_that_both_modules_have() -> None:
    assert native.IN_TRAINING_MODE == forward.IN_TRAINING_MODE


# -- The ordinary is done in C, all else in Python ------------------------------------------------------------------


def test_an_ordinary_call_does_not_reach_the_hook_in_python(module: Any, ledger: Any) -> None:
    def original(*args: Any, **kwargs: Any) -> Any:
        assert ledger.phase == INPUT
        return args, kwargs

    def python(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError

    hook = module.Hook(module.TIMED, ledger, None, original, python, INPUT, None, None, None, None)
    assert hook(1, two=2) == ((1,), {"two": 2})
    assert _words(ledger) == [ENTER + INPUT, OTHER]
    assert ledger.phase == OTHER


def test_another_thread_and_a_timed_device_are_left_to_python(module: Any, ledger: Any) -> None:
    def in_python() -> str:
        return "Python"

    hook = module.Hook(module.TIMED, ledger, None, lambda: "C", in_python, INPUT, None, None, None, None)
    results = []
    thread = threading.Thread(target=lambda: results.append(hook()))
    thread.start()
    thread.join()
    ledger.device = object()
    results.append(hook())
    ledger.device = None
    ledger.close()
    assert ledger.thread == NOBODY
    results.append(hook())
    assert results == ["Python"] * 3
    assert _words(ledger) == []


def test_steps_of_a_usual_loop_end_in_c(nothing_is_compiled_yet: None, recorder: Recorder) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.ones(2)).sum().backward()
            optimizer.step()

    train(12)  # the model is found, and what is due in the first steps is over
    ended: list[int] = []

    def see(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is Recorder.end_step.__code__:
            ended.append(recorder.step)

    sys.setprofile(see)
    train(100)
    recorder.attend()
    train(1)
    sys.setprofile(None)
    assert recorder.step == 113
    assert ended[-1] == 112
    assert len(ended) < 50  # checks are due now and then


def test_enter_and_leave(ledger: Any) -> None:
    marks: list[tuple[int, int]] = []
    assert ledger.enter(INPUT) == OTHER
    assert ledger.enter(INPUT) == NOT_NOW
    assert ledger.enter(FORWARD) == INPUT
    ledger.device = SimpleNamespace(mark=lambda ended, begun: marks.append((ended, begun)))
    ledger.leave(INPUT)
    assert ledger.enter(BACKWARD) == INPUT
    ledger.device = None
    ledger.leave(OTHER)
    assert _words(ledger) == [ENTER + INPUT, ENTER + FORWARD, INPUT, ENTER + BACKWARD, OTHER]
    assert marks == [(FORWARD, INPUT), (INPUT, BACKWARD)]
    for method in (ledger.enter, ledger.leave):
        with pytest.raises(TypeError):
            method("input")
    ledger.close()
    assert ledger.enter(INPUT) == NOT_NOW


def test_a_phase_ends_when_the_original_raises(ledger: Any) -> None:
    def fail() -> None:
        ledger.enter(OPTIMIZER)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ledger.timed(fail, INPUT)()
    assert ledger.phase == OTHER
    assert _words(ledger) == [ENTER + INPUT, ENTER + OPTIMIZER, OTHER]


def test_a_device_that_is_timed_from_within_gets_the_end_of_the_phase(ledger: Any) -> None:
    marks: list[tuple[int, int]] = []

    def begin() -> int:
        ledger.device = SimpleNamespace(mark=lambda ended, begun: marks.append((ended, begun)))
        return 5

    assert ledger.timed(begin, BACKWARD)() == 5
    ledger.device = None
    assert marks == [(BACKWARD, OTHER)]


def test_an_observer_is_shown_the_arguments_from_its_step_on(recorder: Any, ring: RingWriter) -> None:
    recorder.ledger.open(ring)
    seen: list[Any] = []
    observer = SimpleNamespace(recorder=recorder, due=2, see=lambda *arguments: seen.append(arguments))
    call = recorder.ledger.timed(lambda *_args, **_kwargs: None, BACKWARD, observer)
    for recorder.step in range(4):
        call(recorder.step, at=recorder.step)
    recorder.ledger.before_backward = lambda *arguments: seen.append(("before", *arguments))
    observer.due = 9
    call(7)
    recorder.ledger.before_backward = None
    del observer.due  # it fails in Python, as it would without C
    with pytest.raises(AttributeError):
        call(8)
    recorder.ledger.let_go()
    assert seen == [((2,), {"at": 2}), ((3,), {"at": 3}), ("before", (7,), {})]


# -- Memory -----------------------------------------------------------------------------------------------------------


def test_a_ring_cannot_be_closed_below_a_hook(ledger: Any, ring: RingWriter) -> None:
    call = ledger.timed(lambda: None, INPUT)
    with pytest.raises(BufferError):
        ring.header.release()
    with pytest.raises(BufferError):
        ring.body.release()
    call()
    ledger.let_go()  # as in a forked child
    ring.close()
    call()


def test_a_phase_that_is_in_progress_when_the_ring_goes_ends_without_it(ledger: Any, ring: RingWriter) -> None:
    def let_go() -> None:
        ledger.let_go()
        ring.close()

    ledger.timed(let_go, INPUT)()
    assert ledger.phase == OTHER
    assert ledger.at == 1


def test_no_index_leads_out_of_the_ring(module: Any, ledger: Any) -> None:
    hook = module.Hook(module.TIMED, ledger, None, lambda: "C", lambda: "Python", INPUT, None, None, None, None)
    for at in (-1, MIN_CAPACITY - 4, MIN_CAPACITY, 1 << 62, -(1 << 63)):
        ledger.at = at
        assert hook() == "Python"
    ledger.at, ledger.limit = MIN_CAPACITY - 5, 1 << 40
    assert hook() == "C"
    inside = module.Hook(
        module.TIMED, ledger, None, lambda: setattr(ledger, "at", 1 << 50), lambda: None, INPUT, None, None, None, None
    )
    ledger.at = 0
    inside()  # the word of its end goes nowhere
    ledger.at = 0
    for memory in (memoryview(b""), memoryview(bytes(64)), memoryview(bytearray(64))[1:57]):
        ledger.body = memory
        assert hook() == "Python"
    with pytest.raises(TypeError):
        ledger.body = 3
    with pytest.raises(TypeError):
        del ledger.body
    ledger.body = memoryview(bytearray(8 * 64)).cast("Q")


def test_arguments_of_another_kind(module: Any, ledger: Any, recorder: Recorder) -> None:
    for arguments in (
        (),
        (9, ledger, None, int, int, 1, None, None, None, None),
        (module.TIMED, object(), None, int, int, 1, None, None, None, None),
        (module.TIMED, ledger, object(), int, int, 1, None, None, None, None),
        (module.TIMED, ledger, None, int, int, 1, object(), None, None, None),
        (module.TIMED, ledger, None, int, 3, 1, None, None, None, None),
        (module.FORWARD, ledger, recorder, int, int, 1, None, [], {}, None),
        (module.AFTER_STEP, ledger, recorder, int, int, 1, None, None, None, None),
    ):
        with pytest.raises(TypeError):
            module.Hook(*arguments)
    before = module.Hook(module.BEFORE_STEP, ledger, recorder, [], lambda *_: "Python", OPTIMIZER, *[None] * 4)
    after = module.Hook(module.AFTER_STEP, ledger, recorder, [3], lambda *_: "Python", OPTIMIZER, *[None] * 4)
    for given in ((), (1,), (1, 2, 3), (1, (), 3), (1, [1], {})):
        assert before(*given) == "Python"
        assert after(*given) == "Python"
    model = module.Hook(module.FORWARD, ledger, recorder, str, lambda *_: "Python", FORWARD, None, {}, {}, int)
    assert model() == "Python"
    assert model(1) == "Python"  # gradients are off
    with pytest.raises(TypeError):
        module.Hook.__new__(module.Hook).__init__(1)
    with pytest.raises(RuntimeError):
        module.Hook.__new__(module.Hook)()


def test_hooks_and_ledgers_are_collected(module: Any) -> None:
    gone: list[int] = []

    class Original:
        def __call__(self) -> None: ...

        def __del__(self) -> None:
            gone.append(1)

    ledger = _native_ledger()
    ledger.device = [ledger]
    ledger.body = memoryview(bytearray(8 * 64)).cast("Q")
    original: Any = Original()
    original.__name__ = "original"
    call = ledger.timed(original, INPUT)
    original.itself = call
    del ledger, original, call
    gc.collect()
    assert gone == [1]


# -- What scripts see -------------------------------------------------------------------------------------------------


def test_hooks_are_functions_like_those_in_python(recorder: Recorder) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.ones(2)).sum().backward()
        optimizer.step()
    call = nn.Linear.__call__
    iterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    for hooked in (torch.autograd.backward, call, iterator.__next__):
        assert type(hooked) is FunctionType
        original = hooked.__wrapped__  # type: ignore[attr-defined]
        assert inspect.signature(hooked) == inspect.signature(original)
        assert (hooked.__name__, hooked.__doc__) == (original.__name__, original.__doc__)
    assert pickle.loads(pickle.dumps(torch.autograd.backward)) is torch.autograd.backward
    assert copy.deepcopy(call) is call
    twin, _ = pickle.loads(pickle.dumps(copy.deepcopy((net, optimizer))))
    assert vars(twin).keys() == vars(net).keys()
    module: Any = sys.modules["torch.optim.optimizer"]
    for hooks in (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks):
        assert {type(hook) for hook in hooks.values()} == {FunctionType}


def test_a_traceback_goes_through_frames_of_ours_alone(recorder: Recorder) -> None:
    def fail(self: Any, grad: Any) -> None:
        raise KeyError

    tensor = torch.ones(2, requires_grad=True)
    tensor.sum().backward()
    tensor.register_hook(lambda grad: fail(None, grad))
    with pytest.raises(KeyError) as raised:
        tensor.sum().backward()
    ours = [entry.frame.f_globals["__name__"] for entry in raised.traceback if "stepscope" in str(entry.path)]
    assert "stepscope.recorder.hooks.native" in ours
