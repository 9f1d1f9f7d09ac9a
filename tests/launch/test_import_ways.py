"""Scripts are recorded however they get their torch; where nothing is recorded, the summary says why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
def train():
    import torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

WAYS = {
    # What transformers, datasets, evaluate and accelerate do first.
    "find_spec": """
        import importlib.util
        assert importlib.util.find_spec("torch") is not None
        assert importlib.util.find_spec("torch").loader.is_package("torch")
        from training import train
        train()
    """,
    "lazy": """
        import importlib.util, sys
        spec = importlib.util.find_spec("torch")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules["torch"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        from training import train
        train()
    """,
    "thread": """
        import importlib, threading
        thread = threading.Thread(target=importlib.import_module, args=("torch",))
        thread.start()
        thread.join()
        from training import train
        train()
    """,
    "runpy": """
        import runpy
        runpy.run_module("training")["train"]()
    """,
    "reload": """
        import importlib, sys, torch, training
        importlib.reload(training)
        importlib.reload(sys.modules["torch.optim.sgd"])
        training.train()
    """,
    "fork": """
        import os, torch
        from training import train
        child = os.fork()
        if child == 0:
            train()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """,
}


def recorded_steps(done: Any) -> list[int]:
    summary = json.loads((done.run_dir / "summary.json").read_text())
    return [row["steps"] for row in summary["ranks"]]


@pytest.mark.soak  # near: every job imports torch, and tests/recorder/test_import_watch.py
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_import_torch_is_recorded(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], way: str
) -> None:
    script(TRAIN, "training.py")
    done = run_stepscope("run", script(WAYS[way]))
    assert done.code == 0, done.stderr
    assert recorded_steps(done) == [12]


@pytest.mark.soak
def test_torch_on_the_command_line_and_from_a_pth_file(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], tmp_path: Path
) -> None:
    """A ``.pth`` file may import torch before the interpreter comes to us."""
    script(TRAIN, "training.py")
    done = run_stepscope("run", sys.executable, "-c", "import torch; from training import train; train()")
    assert (done.code, recorded_steps(done)) == (0, [12]), done.stderr
    script("import torch\n", "site/early.pth")
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
    script(code, "mine/usercustomize.py")
    script(code, "first/sitecustomize.py")
    plain = script("from training import train; train()", "plain.py")
    done = run_stepscope("run", plain, env={"PYTHONPATH": str(tmp_path / "first")})
    assert (done.code, recorded_steps(done)) == (0, [12]), done.stderr


WITHOUT_IMPORT = "import sys, types; sys.modules['torch'] = types.SimpleNamespace(__version__='8.8')"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('no torch here')", "Nothing was recorded: script.py ended without importing torch."),
        pytest.param(
            "import torch", "the hooks could not be installed in torch 9.9 (AttributeError: ", marks=pytest.mark.soak
        ),
        pytest.param(
            WITHOUT_IMPORT,
            "Nothing was recorded: script.py loaded torch 8.8 without Python's import system.",
            marks=pytest.mark.soak,
        ),
    ],
    ids=["none", "another", "no import"],
)
def test_an_empty_run_says_why(
    run_stepscope: Callable[..., Any], script: Callable[..., Path], code: str, text: str
) -> None:
    script('raise_later = True\n__version__ = "9.9"\n', "torch.py")
    done = run_stepscope("run", script(code))
    assert done.code == 0, done.stderr
    (finding,) = json.loads((done.run_dir / "summary.json").read_text())["findings"]
    assert finding["kind"] == "insufficient_data"
    assert text in finding["title"]


@pytest.mark.soak
def test_a_script_that_imports_torch_and_does_not_train(
    run_stepscope: Callable[..., Any], script: Callable[..., Path]
) -> None:
    done = run_stepscope("run", script("import torch; print(torch.ones(2) + 1)"))
    (finding,) = json.loads((done.run_dir / "summary.json").read_text())["findings"]
    assert finding["title"].startswith("Nothing was recorded: script.py imported torch 2.")
    assert finding["title"].endswith(" and ended without training.")


PLANT = """
import importlib.machinery, importlib.util, os, sys
with open({ran!r}, "a") as file:
    file.write("{name}\\n")
paths = [path for path in sys.path if os.path.realpath(path or ".") != {folder!r}]
spec = importlib.machinery.PathFinder.find_spec("{name}", paths)
if spec is None:  # of another operating system
    raise ModuleNotFoundError("No module named '{name}'", name="{name}")
module = sys.modules["{name}"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
"""Notes that it ran, and becomes the module that it is named like."""
NOT_LOADED = """
import sys, torch
known = {*sys.modules, *sys.builtin_module_names}
print(*(name for name in sys.stdlib_module_names - known if not name.startswith("_")))
"""
PLAIN = ("antigravity", "idlelib", "this", "turtle", "turtledemo")
"""These do something when they are imported."""


@pytest.mark.soak  # near: tests/launch/test_loaded_modules.py
def test_files_named_like_modules_of_the_standard_library_do_not_run(
    run_stepscope: Callable[..., Any], run_python: Callable[..., Any], script: Callable[..., Path]
) -> None:
    """The script's folder is on the path when the recorder is loaded: it needs nothing that torch has not loaded."""
    whole = {"STEPSCOPE_WHOLE_TORCH": "1"}
    names = [name for name in run_python("-c", NOT_LOADED, env=whole).stdout.split() if name not in PLAIN]
    assert {"statistics", "sched"} <= set(names)
    # Not where the launcher works.  What torch loads later, in training, it loads in a bare run as well.
    train = script(f"import os, torch\nos.rename('RAN', 'RAN-torch')\n{TRAIN}\ntrain()", name="job/train.py")
    ran = train.parent / "ran.txt"
    train.write_text(train.read_text().replace("RAN", str(ran)))
    for name in names:
        (train.parent / f"{name}.py").write_text(
            PLANT.format(name=name, ran=str(ran), folder=str(train.parent.resolve()))
        )

    def loaded() -> list[set[str]]:
        """While torch was imported, and later."""
        parts = [train.parent / name for name in ("ran.txt-torch", "ran.txt")]
        found = [set(part.read_text().split()) if part.exists() else set[str]() for part in parts]
        for part in parts:
            part.unlink(missing_ok=True)
        return found

    ran.touch()
    assert run_python(str(train), env=whole).code == 0
    bare = loaded()
    ran.touch()
    done = run_stepscope("run", "--quiet", train, env=whole)
    assert done.code == 0, done.stderr
    assert recorded_steps(done) == [12]
    for recorded, expected in zip(loaded(), bare, strict=True):
        assert recorded - expected == set()
