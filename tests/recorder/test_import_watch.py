"""Callbacks after an import, however the module is requested, found and loaded."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepscope.recorder import facts, frameworks
from stepscope.recorder.bootstrap import WATCHED_MODULES
from stepscope.recorder.guard import ImportWatch
from stepscope.recorder.hooks import checkpoint, notes
from stepscope.recorder.instrumentation import Instrumentation
from stepscope.recorder.recorder import Recorder
from stepscope.recorder.stacks import STATEFUL_LOADER

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules that can be imported during the test only."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name: str, code: str = "value = 1\n") -> None:
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def watch() -> Iterator[ImportWatch]:
    made = ImportWatch()
    yield made
    made.remove()


class Seen(list[Any]):
    """A callback that keeps the modules it was called with."""

    def __call__(self, module: Any) -> None:
        self.append(module)


def test_asking_for_a_module_is_not_importing_it(write: Write, watch: ImportWatch) -> None:
    write("asked_for")
    seen = Seen()
    watch.when_imported("asked_for", seen)
    for _ in range(3):
        assert importlib.util.find_spec("asked_for") is not None
    assert seen == []
    module = importlib.import_module("asked_for")
    assert seen == [module]


def test_a_missing_module_may_appear_later(write: Write, watch: ImportWatch) -> None:
    seen = Seen()
    watch.when_imported("not_there_yet", seen)
    assert importlib.util.find_spec("not_there_yet") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("not_there_yet")
    write("not_there_yet")
    importlib.import_module("not_there_yet")
    assert len(seen) == 1


def test_a_module_that_fails_may_be_imported_again(write: Write, watch: ImportWatch) -> None:
    write("fails_first", "import sys\nif not hasattr(sys, 'second_try'): raise ImportError('not today')\n")
    seen = Seen()
    watch.when_imported("fails_first", seen)
    with pytest.raises(ImportError, match="not today"):
        importlib.import_module("fails_first")
    assert seen == []
    sys.second_try = True  # type: ignore[attr-defined]
    try:
        module = importlib.import_module("fails_first")
    finally:
        del sys.second_try  # type: ignore[attr-defined]
    assert seen == [module]


def test_the_loader_looks_like_the_one_it_wraps(write: Write, watch: ImportWatch, tmp_path: Path) -> None:
    write("inspected")
    bare = importlib.util.find_spec("inspected")
    watch.when_imported("inspected", Seen())
    spec = importlib.util.find_spec("inspected")
    assert spec is not None
    assert bare is not None
    loader: Any = spec.loader
    assert isinstance(loader, SourceFileLoader)
    assert (spec.name, spec.origin, spec.cached) == (bare.name, bare.origin, bare.cached)
    assert loader.get_filename("inspected") == str(tmp_path / "inspected.py")
    assert loader.get_source("inspected") == "value = 1\n"
    assert loader.is_package("inspected") is False
    module = importlib.import_module("inspected")
    assert type(module.__loader__) is SourceFileLoader
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert inspect.getsource(module) == "value = 1\n"
    assert pickle.loads(pickle.dumps(module.__spec__)).name == "inspected"


def test_a_lazy_loader_calls_back_when_the_code_runs(write: Write, watch: ImportWatch) -> None:
    write("lazily")
    seen = Seen()
    watch.when_imported("lazily", seen)
    spec = importlib.util.find_spec("lazily")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["lazily"] = module
    spec.loader.exec_module(module)
    assert seen == []
    assert module.value == 1
    assert seen == [module]


def test_a_module_that_replaces_itself(write: Write, watch: ImportWatch) -> None:
    """As ``transformers`` does with its lazy module: hooks belong on what importers get."""
    write("replaced", "import sys, types\nsys.modules[__name__] = types.SimpleNamespace(value=2)\n")
    seen = Seen()
    watch.when_imported("replaced", seen)
    module = importlib.import_module("replaced")
    assert seen == [module]
    assert module.value == 2


def test_a_reload_calls_nobody_again(write: Write, watch: ImportWatch) -> None:
    write("reloaded")
    seen = Seen()
    watch.when_imported("reloaded", seen)
    module = importlib.import_module("reloaded")
    assert importlib.reload(module) is module
    assert seen == [module]


def test_a_module_that_runs_as_the_script_is_not_imported(write: Write, watch: ImportWatch) -> None:
    write("script_and_module", "value = __name__\n")
    seen = Seen()
    watch.when_imported("script_and_module", seen)
    assert runpy.run_module("script_and_module", run_name="__main__")["value"] == "__main__"
    assert seen == []
    module = importlib.import_module("script_and_module")
    assert seen == [module]


def test_an_import_in_another_thread(write: Write, watch: ImportWatch) -> None:
    write("in_a_thread")
    seen = Seen()
    watch.when_imported("in_a_thread", seen)
    thread = threading.Thread(target=importlib.import_module, args=("in_a_thread",))
    thread.start()
    thread.join()
    assert seen == [sys.modules["in_a_thread"]]


def test_submodules_are_found_below_their_package(write: Write, watch: ImportWatch) -> None:
    write("package.__init__", "")
    write("package.inner")
    seen = Seen()
    watch.when_imported("package.inner", seen)
    assert importlib.util.find_spec("package.inner") is not None
    module = importlib.import_module("package.inner")
    assert seen == [module]


class AsksAgain(MetaPathFinder):
    """A finder of somebody else that asks all finders for each name, once."""

    def __init__(self) -> None:
        self.inside = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if self.inside:
            return None
        self.inside = True
        try:
            return importlib.util.find_spec(fullname)
        finally:
            self.inside = False


@pytest.mark.parametrize("position", [0, 1])
def test_finders_that_ask_each_other(
    write: Write, watch: ImportWatch, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    write("wanted_by_two")
    other, seen = ImportWatch(), Seen()
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    watch.when_imported("wanted_by_two", seen)
    other.when_imported("wanted_by_two", seen)
    sys.meta_path.insert(position, AsksAgain())
    module = importlib.import_module("wanted_by_two")
    assert seen == [module, module]


def test_a_callback_registered_while_the_module_runs_waits_for_its_end(write: Write, watch: ImportWatch) -> None:
    """``transformers.trainer`` imports torch, whose hooks then want ``transformers.trainer``."""
    write("framework", "import backend\nTrainer = 'complete'\n")
    write("backend")
    found: list[str] = []

    def hook_framework(module: Any) -> None:
        found.append(module.Trainer)

    watch.expect("framework")
    watch.when_imported("backend", lambda module: watch.when_imported("framework", hook_framework))
    importlib.import_module("framework")
    assert found == ["complete"]


def test_a_module_that_was_already_running_is_hooked_at_the_next_import(write: Write, watch: ImportWatch) -> None:
    write("half_done", "import sys\nsys.during(sys.modules[__name__])\nlast = 1\n")
    write("later")
    found: list[int] = []

    def during(module: ModuleType) -> None:
        watch.when_imported("half_done", lambda done: found.append(done.last))
        assert found == []

    sys.during = during  # type: ignore[attr-defined]
    try:
        importlib.import_module("half_done")
    finally:
        del sys.during  # type: ignore[attr-defined]
    importlib.import_module("later")
    assert found == [1]


def test_a_failing_callback_does_not_reach_the_import(
    write: Write, watch: ImportWatch, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.recorder.guard._count", 0)
    write("well_behaved")
    seen = Seen()

    def fail(module: ModuleType) -> None:
        raise RuntimeError("broken hook")

    watch.when_imported("well_behaved", fail)
    watch.when_imported("well_behaved", seen)
    assert importlib.import_module("well_behaved").value == 1
    assert len(seen) == 1
    assert "RuntimeError: broken hook" in capfd.readouterr().err


def test_modules_that_may_import_torch_are_expected_before_it(make_recorder: Callable[..., Recorder]) -> None:
    """All names outside torch that hooks wait for: their code may be running when the hooks are installed."""
    import torch

    class Names(ImportWatch):
        def when_imported(self, name: str, callback: Callable[[ModuleType], object]) -> None:
            awaited.add(name)

    awaited: set[str] = set()
    Instrumentation(make_recorder(), torch, Names()).remove()
    outside = {name for name in awaited if name.partition(".")[0] != "torch"}
    assert outside
    assert outside - set(WATCHED_MODULES) == set()
    tables = {*checkpoint.FUNCTIONS, *checkpoint.METHODS, *notes.LOGGERS, *facts.STEP_COUNTERS, *frameworks.MODULES}
    assert set(WATCHED_MODULES) == {*tables, STATEFUL_LOADER}
