"""The leak checks and the report of flaky tests in ``tests/conftest.py`` do what they are there for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LEAKS = """
import os, signal, subprocess, sys, threading
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

def test_thread():
    threading.Thread(target=threading.Event().wait, args=(7,), name="forgotten", daemon=True).start()

def test_process():
    test_process.kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

def test_environment():
    os.environ["LEFT_BEHIND"] = "1"

def test_signal():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_optimizer_hook():
    register_optimizer_step_post_hook(lambda *_: None)

def test_patched_call():
    torch.nn.Module.__call__ = lambda self, *args: self.forward(*args)

def test_patched_backward():
    torch.autograd.backward = print

def test_orphan(run_python):
    run_python("-c", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
               "start_new_session=True, stdin=-3, stdout=-3, stderr=-3)")

@pytest.mark.leaks_allowed
def test_allowed():
    os.environ["LEFT_ON_PURPOSE"] = "1"

def test_clean(monkeypatch, tmp_path):
    monkeypatch.setenv("PUT_BACK", "1")
    monkeypatch.chdir(tmp_path)
    threading.Thread(target=lambda: None).start()
"""
SHORT_GRACE = "GRACE_S = 0.3"


@pytest.mark.soak  # it starts pytest in another process; the fixtures hardly ever change
def test_each_leak_is_caught(root: Path, tmp_path: Path, run_python: Callable[..., Any]) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    text = (root / "tests" / "conftest.py").read_text()
    assert "GRACE_S = 5.0" in text
    (tests / "conftest.py").write_text(text.replace("GRACE_S = 5.0", SHORT_GRACE))
    (tests / "test_leaks.py").write_text(LEAKS)
    shutil.copytree(root / "tests" / "support", tests / "support")
    shutil.copy(root / "pyproject.toml", tmp_path)

    done = run_python("-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-rA", tests)

    lines = done.stdout.splitlines()
    caught = {line.split("::")[1].split()[0] for line in lines if line.startswith("ERROR tests")}
    assert caught == {
        *("test_thread", "test_process", "test_environment", "test_signal", "test_folder"),
        *("test_optimizer_hook", "test_patched_call", "test_patched_backward", "test_orphan"),
    }, done.stdout
    assert "thread 'forgotten' still runs" in done.stdout
    assert "environment: LEFT_BEHIND was None and is '1'" in done.stdout
    assert lines[-1].startswith("11 passed, 9 errors")


# -- Tests that pass only when they run again are listed and counted (``--flaky-report`` of ``tests/conftest.py``) ----


TESTS = """
from pathlib import Path

def test_sound():
    pass

def test_broken():
    assert 1 == 2

def test_flaky():
    first = Path(__file__).with_name("ran-before")
    seen = first.exists()
    first.touch()
    assert seen, "only the first time"
"""


@pytest.mark.soak  # it starts pytest in two other processes; the hook hardly ever changes
def test_a_test_that_passes_the_second_time_is_named_with_its_failure(
    root: Path, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_some.py").write_text(TESTS)
    shutil.copy(root / "tests" / "conftest.py", tests)
    shutil.copytree(root / "tests" / "support", tests / "support")
    shutil.copy(root / "pyproject.toml", tmp_path)
    first = run_python("-m", "pytest", "-n", "0", tests)
    assert (first.code, first.stdout.splitlines()[-1][:18]) == (1, "2 failed, 1 passed")
    assert "flaky:" not in first.stdout

    # As in `make soak` after `make test`: a file that exists must not be taken for tests to run.
    (tmp_path / "flaky").write_text("an earlier line\n")
    repeated = run_python("-m", "pytest", "-n", "0", "--last-failed", f"--flaky-report={tmp_path / 'flaky'}", tests)

    line = "tests/test_some.py::test_flaky: AssertionError: only the first time"
    assert repeated.code == 1  # one is still broken
    assert f"FLAKY {line}" in repeated.stdout
    assert "1 flaky: failed among others and passed alone" in repeated.stdout
    assert (tmp_path / "flaky").read_text() == f"an earlier line\n{line}\n"
