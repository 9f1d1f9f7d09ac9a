"""Whose code a frame is, and which forward operator a backward one comes from."""

from __future__ import annotations

import pytest
from fakes.traces import MadeTrace

from stepscope.traces.model.window import is_user_frame, window_of


@pytest.mark.parametrize(
    "name",
    [
        "train.py(31): step",
        "/srv/somebody/project/models/net.py(7): forward",
        "models/net.py(7): <lambda>",
        "notebook.ipynb(3): <module>",
        "/tmp/ipykernel_12/99.py(3): <module>",
    ],
)
def test_frames_of_the_user(name: str) -> None:
    assert is_user_frame(name)


@pytest.mark.parametrize(
    "name",
    [
        "torch/nn/modules/module.py(1782): _call_impl",
        "/opt/conda/lib/python3.10/site-packages/mylib/net.py(1): forward",
        "/usr/lib/python3.11/contextlib.py(81): inner",
        "contextlib.py(81): inner",
        "logging/__init__.py(1720): getEffectiveLevel",
        "<built-in method run_backward of torch._C._EngineBase object at 0xffff>",
        "<frozen os>(674): __getitem__",
        "<string>(2): __init__",
        "nn.Module: Linear_0",
        "/tmp/torchinductor_me/4b/c4b.py(74): call",
        "transformers/trainer.py(1): train",
        "aten::mm",
        "",
    ],
)
def test_frames_of_others(name: str) -> None:
    assert not is_user_frame(name)


def links(made: MadeTrace) -> dict[str, str]:
    window = window_of(made.trace())
    trace = window.trace
    return {trace.name(row): trace.name(int(to)) for row, to in enumerate(window.host.forward_of) if to >= 0}


def test_the_last_forward_operator_with_the_number_made_the_node() -> None:
    made = MadeTrace()
    made.op("outer", 0, 10, **{"Sequence number": 5})
    made.op("inner", 2, 5, **{"Sequence number": 5})
    made.op("other", 12, 5, **{"Sequence number": 6})
    made.op("InnerBackward", 30, 5, tid=9, **{"Sequence number": 5, "Fwd thread id": 1})
    made.op("aten::mul", 31, 2, tid=9)
    made.op("LostBackward", 40, 5, tid=9, **{"Sequence number": 99, "Fwd thread id": 1})
    made.op("later", 50, 5, **{"Sequence number": 5})
    assert links(made) == {"InnerBackward": "inner", "aten::mul": "inner"}


def test_forward_threads_are_told_apart_by_their_matches() -> None:
    made = MadeTrace()
    for tid, numbers in ((1, range(5)), (2, range(3, 12))):
        for number in numbers:
            made.op(f"f{tid}-{number}", number * 10, 5, tid=tid, **{"Sequence number": number})
    for origin, numbers in ((7, range(4)), (8, range(3, 12))):
        for number in numbers:
            args = {"Sequence number": number, "Fwd thread id": origin}
            made.op(f"b{origin}-{number}", 200 + number * 10, 5, tid=3, **args)
    found = links(made)
    assert found == {f"b7-{n}": f"f1-{n}" for n in range(4)} | {f"b8-{n}": f"f2-{n}" for n in range(3, 12)}


def test_the_main_thread() -> None:
    made = MadeTrace()
    made.op("busy", 0, 500, tid=11)
    made.op("aten::mm", 0, 5, tid=12)
    window = window_of(made.trace())
    assert window.trace.threads[window.host.main_thread].tid == 11
    made.step(1, 0, 100)
    window = window_of(made.trace())
    assert window.trace.threads[window.host.main_thread].tid == 4000
    assert window_of(MadeTrace().trace()).host.main_thread == -1


def sources(made: MadeTrace) -> dict[str, str | None]:
    window = window_of(made.trace())
    return {window.trace.name(row): window.host.sources.text(row) for row in window.host.ops.tolist()}


def test_a_frame_that_was_open_at_the_first_step_has_no_line() -> None:
    """The profiler reports where it was then: not where its calls are made."""
    made = MadeTrace()
    made.python("train.py(38): <module>", 0, 400)
    made.python("loop.py(70): train", 1, 390)
    made.step(1, 20, 200)
    made.op("aten::mm", 30, 10)
    made.python("data.py(5): augment", 50, 100)
    made.op("aten::add", 60, 10)
    assert sources(made) == {"aten::mm": "loop.py (train)", "aten::add": "data.py(5): augment"}


def test_without_steps_the_frames_that_are_open_all_the_time() -> None:
    made = MadeTrace()
    made.python("train.py(6): <module>", 0, 400)
    made.op("aten::mm", 30, 10)
    made.python("data.py(5): augment", 50, 100)
    made.op("aten::add", 60, 10)
    assert sources(made) == {"aten::mm": "train.py (<module>)", "aten::add": "data.py(5): augment"}
