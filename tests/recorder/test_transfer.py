"""Copies to a device; ``meta`` stands for one where there is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stepscope.recorder.guard import Patches
from stepscope.recorder.hooks import dataloader
from stepscope.records.steps import BUILTIN_PHASES


@pytest.mark.parametrize(
    ("args", "kwargs", "goes"),
    [
        ((torch.device("meta"),), {}, True),
        ((torch.device("cpu"),), {}, False),
        ((torch.device("meta"), torch.float16), {"non_blocking": True}, True),
        (("cuda:0",), {}, True),
        (("cpu",), {}, False),
        ((1,), {}, True),
        ((torch.float16,), {}, False),
        ((), {"device": "cuda"}, True),
        ((), {"device": torch.device("cpu")}, False),
        ((), {"device": None, "dtype": torch.float16}, False),
        ((), {"dtype": torch.float16}, False),
        ((torch.float16,), {"device": "cuda"}, True),
        ((), {"other": torch.empty(1, device="meta")}, True),
        ((torch.empty(1),), {}, False),
    ],
)
def test_what_goes_to_a_device(args: tuple[Any, ...], kwargs: dict[str, Any], goes: bool) -> None:
    assert dataloader.goes_to_device(torch, args, kwargs) is goes


@pytest.fixture
def patched(recording: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As on a torch that is built for CUDA."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    patches = Patches()
    dataloader.install_transfers(recording.recorder, torch, patches)
    yield recording
    patches.undo()


def h2d_words(recording: Any, copy: Any) -> int:
    """How many words a copy in the middle of a step leaves behind."""
    ledger = recording.recorder.ledger
    before = ledger.at
    copy()
    return int(ledger.at - before)


def test_a_copy_of_a_batch_is_timed_and_others_are_not(patched: Any) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    x, there = torch.ones(4), torch.ones(4, device="meta")
    assert h2d_words(patched, lambda: x.to("meta")) == 2
    assert h2d_words(patched, lambda: x.to(torch.device("meta"), non_blocking=True)) == 2
    assert h2d_words(patched, lambda: x.to(torch.float16)) == 0
    assert h2d_words(patched, lambda: x.to("cpu")) == 0
    assert h2d_words(patched, lambda: there.to(torch.float16)) == 0, "it is there already"
    ledger = patched.recorder.ledger
    outer = ledger.enter(BUILTIN_PHASES.index("forward"))
    assert h2d_words(patched, lambda: x.to("meta")) == 0, "a part of forward"
    ledger.leave(outer)
    thread = threading.Thread(target=x.to, args=("meta",))
    assert h2d_words(patched, lambda: (thread.start(), thread.join())) == 0, "on another thread"
    with pytest.raises(RuntimeError):
        x.to("no such device")
    step()
    assert list(patched.phase("h2d") > 0) == [False, True]
