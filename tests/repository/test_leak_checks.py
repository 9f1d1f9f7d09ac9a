"""The leak checks of ``tests/conftest.py`` catch what they are there for."""

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
