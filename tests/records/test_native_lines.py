"""Which lines are native code's, whose they are, and what of them may be shown."""

from __future__ import annotations

import pytest

from stepscope.store.live.logs import (
    LONGEST_SHOWN_LINE,
    is_native,
    labeled_pid,
    labeled_rank,
    last_native_lines,
    plain_line,
)

DEVICE = "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectSmallIndex: block: [0,0,0], thread: [{},0,0] "
WATCHDOG = (
    "[rank3]:[E1116 12:01:02.123456789 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group "
    "watchdog thread terminated with exception: CUDA error: device-side assert triggered"
)
NCCL = "gpu-node7:41:97 [2] transport/net_ib.cc:2345 NCCL WARN NET/IB : Got completion from peer with status=12"
NATIVE = (
    NCCL,
    "gpu-node7:41:97 [2] NCCL WARN Call to connect failed",
    WATCHDOG,
    DEVICE.format(7) + "Assertion `srcIndex < srcSelectDimSize` failed.",
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "terminate called without an active exception",
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 5] Process group watchdog thread terminated",
    "malloc(): corrupted top size",
    "free(): double free detected in tcache 2",
    "double free or corruption (!prev)",
    "corrupted size vs. prev_size",
    "*** stack smashing detected ***: terminated",
    "python3: loader.c:12: load: Assertion `p != NULL' failed.",
    "Fatal Python error: Segmentation fault",
    "==12==ERROR: AddressSanitizer: heap-use-after-free",
)
OTHERS = (
    "step 12 loss 0.3",
    "*** epoch 3 ***",
    "[rank0]: Traceback (most recent call last):",
    "[rank0]:W1116 12:00:00.000000 41 torch/_dynamo/utils.py:1] a warning of Python",
    "[rank0]:[W1116 12:00:00.000000000 socket.cpp:1] cannot be resolved",
    "gpu-node7:41:97 [2] NCCL INFO Channel 00/0 : 0[0] -> 1[1]",
    "AssertionError: assertion failed",
    "free: 12 GB",
    "",
)


@pytest.mark.parametrize("line", NATIVE)
def test_lines_of_native_code(line: str) -> None:
    assert is_native(line)


@pytest.mark.parametrize("line", OTHERS)
def test_lines_of_others(line: str) -> None:
    assert not is_native(line)


def test_whose_they_are() -> None:
    assert [labeled_pid(line) for line in (NCCL, NATIVE[1], OTHERS[5], WATCHDOG, OTHERS[0])] == [
        41,
        41,
        41,
        None,
        None,
    ]
    ranks = [labeled_rank(line) for line in (WATCHDOG, NATIVE[6], OTHERS[4], OTHERS[2], OTHERS[3], NCCL)]
    assert ranks == [3, 5, 0, None, None, None]


def test_one_line_for_each_thread_of_a_kernel_is_told_once() -> None:
    threads = [DEVICE.format(thread) + "Assertion `i < n` failed." for thread in range(128)]
    lines = last_native_lines([NCCL, "step 1", *threads, "terminate called without an active exception"])
    assert lines == (
        NCCL,
        threads[0] + " (and 127 more like it)",
        "terminate called without an active exception",
    )


def test_a_progress_bar_before_it_is_left_out() -> None:
    bars = "\r 12%|██  |\r 13%|██  | 12.3it/s"
    lines = (f"{bars}\rfree(): invalid size\r", f"{bars}malloc(): bad", f"{bars} done")
    assert last_native_lines(lines) == ("free(): invalid size", "malloc(): bad")


def test_what_is_kept_is_bounded_and_the_last() -> None:
    assert last_native_lines((f"malloc(): {letter}" for letter in "abcdefghijklmnopq"), 3) == (
        "malloc(): o",
        "malloc(): p",
        "malloc(): q",
    )
    assert len(plain_line("free(): " + "x" * 10_000)) == LONGEST_SHOWN_LINE


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[31mfree(): bad\x1b[0m\x07", "free(): bad?"),
        ("what(): GET https://me:pass@host/x?token=abc failed", "what(): GET https://…@host/x?token=… failed"),
        ("what(): Authorization: Bearer abc.def", "what(): Authorization: …"),
        ("what(): HF_TOKEN='abc' api_key: xyz, rest", "what(): HF_TOKEN='…' api_key: …, rest"),
    ],
)
def test_nothing_that_a_terminal_obeys_and_no_passwords(line: str, shown: str) -> None:
    assert plain_line(line) == shown
