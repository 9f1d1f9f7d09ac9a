"""Stacks as faulthandler writes them."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from pathlib import Path

from fakes.dumps import stack_text
from hypothesis import given
from hypothesis import strategies as st

from stepscope.flight.stacks import (
    COLLECTIVE_FILE,
    group_stacks,
    is_hook_file,
    is_user_file,
    main_thread,
    parse_threads,
    user_frame,
)
from stepscope.records.hang import Frame, ThreadStack

SITE = "/venv/lib/python3.11/site-packages"


def test_every_file_of_the_recorder_is_known_as_ours(root: Path) -> None:
    """A call of the script goes through these; wherever they move, their frames must not count as the user's."""
    recorder = root / "src" / "stepscope" / "recorder"
    files = [str(path) for path in [*recorder.glob("*.py"), *(recorder / "hooks").glob("*.py")]]
    assert len(files) > 20
    assert [file for file in files if not is_hook_file(file) or is_user_file(file)] == []


def test_a_collective_that_fails_does_so_in_these_hooks(root: Path) -> None:
    hooks = root / "src" / "stepscope" / "recorder" / "hooks"
    calling = {path.name for path in hooks.glob("*.py") if COLLECTIVE_FILE.search(str(path))}
    assert calling == {"collectives.py", "ddp.py"}


def test_real_threads_of_this_process() -> None:
    begun, done = threading.Event(), threading.Event()

    def helper() -> None:
        begun.set()
        done.wait()

    thread = threading.Thread(target=helper)
    thread.start()
    begun.wait()
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            threads = parse_threads(file.read())
    finally:
        done.set()
        thread.join()
    assert len(threads) >= 2
    main = main_thread(threads)
    assert main is not None
    assert main.frames[0].function == "test_real_threads_of_this_process"
    assert any(frame.function == "helper" for thread in threads if not thread.main for frame in thread.frames)


def test_which_thread_and_which_line_are_the_users() -> None:
    text = stack_text(
        (f"{SITE}/torch/distributed/distributed_c10d.py", 3252, "all_reduce"), ("/job/model.py", 8, "loss")
    )
    threads = parse_threads(text)
    assert [thread.main for thread in threads] == [False, True]
    assert user_frame(threads) == Frame(file="/job/model.py", line=8, function="loss")


def test_names_escapes_cuts_and_single_stacks() -> None:
    text = (
        "# a note\nThread 0x00007f [worker \\xe4] (most recent call first):\n"
        '  File "/job/d\\xe4ta.py", line ??? in l\\u0153d\n  ...\n'
        "Thread 0x1 (most recent call first):\n  <no Python frame>\n"
    )
    assert parse_threads(text) == (
        ThreadStack(main=True, name="worker ä", frames=(Frame(file="/job/däta.py", line=0, function="lœd"),)),
        ThreadStack(main=False),
    )
    single = parse_threads('Stack (most recent call first):\n  File "a.py", line 3 in f\n')
    assert single == (ThreadStack(main=True, frames=(Frame(file="a.py", line=3, function="f"),)),)


def test_the_thread_that_trains_counts_as_the_main_one() -> None:
    text = (
        'Thread 0x00007f10 (most recent call first):\n  File "/job/train.py", line 5 in train\n'
        'Current thread 0x00007f20 (most recent call first):\n  File "worker.py", line 3 in <module>\n'
    )
    assert [thread.main for thread in parse_threads(text)] == [False, True]
    assert user_frame(parse_threads(text, trains=0x7F10)) == Frame(file="/job/train.py", line=5, function="train")
    assert [thread.main for thread in parse_threads(text, trains=0x7F30)] == [False, True]


def test_files_that_are_not_the_users() -> None:
    theirs = ("train.py", "/jobs/torchtitan/train.py", "/jobs/stepscope_demo/train.py", "/data/torch/train.py")
    others = (
        "<frozen runpy>", "<string>", f"{SITE}/megatron/x.py", "/usr/lib/python3.11/threading.py",
        "/opt/conda/lib/python3.12/queue.py", "/usr/lib/python3/dist-packages/x.py",
        "/src/pytorch/torch/nn/modules/module.py", "/src/stepscope/recorder/forward.py", "",
    )  # fmt: skip
    assert [file for file in theirs if not is_user_file(file)] == []
    assert [file for file in others if is_user_file(file)] == []


def test_a_thousand_alike_are_one() -> None:
    waiting = parse_threads(stack_text(("/job/train.py", 41, "step")))
    odd = parse_threads(stack_text(("/job/data.py", 7, "load")))
    groups = group_stacks({rank: odd if rank == 417 else waiting for rank in range(1000)})
    assert [len(group.ranks) for group in groups] == [1, 999]
    assert groups[0].ranks == (417,)
    assert groups[0].threads == odd


@given(st.text())
def test_any_text(text: str) -> None:
    for form in (text, f"Stack (most recent call first):\n{text}", stack_text((text, 1, text))):
        threads = parse_threads(form)
        assert sum(thread.main for thread in threads) <= 1
        user_frame(threads)
        group_stacks({0: threads, 1: threads})
