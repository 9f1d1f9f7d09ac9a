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
