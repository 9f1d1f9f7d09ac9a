"""Lines of torchtitan and Megatron-LM: what they say, with and without colors, and lines that are none."""

from __future__ import annotations

import pytest

from stepscope.store.live.logs import timer_line, training_line, training_summary

TITAN = (
    "[titan] 2026-11-16 12:00:00,123 - root - INFO - step: 10  loss:  7.1250  grad_norm:  1.5000  "
    "memory:  1.90GiB(2.40%)  tps: 1,234  tflops: 12.34  mfu: 3.21%"
)
COLORED = (
    "[rank0]:\x1b[31mstep: 20  \x1b[32mloss:  6.5000  \x1b[38;2;180;60;0mgrad_norm:  1.2500  "
    "\x1b[36mmemory:  1.90GiB(2.40%)  \x1b[34mtps: 2,000  \x1b[36mtflops: 20.00  \x1b[35mmfu: 5.00%\x1b[39m"
)
MEGATRON = (
    " [2026-11-16 12:00:00.000000] iteration      100/    1000 | consumed samples:         6400 | "
    "elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 210.5 | "
    "learning rate: 1.500000E-04 | global batch size:    64 | lm loss: 2.500000E+00 | load_balancing_loss: 1.0E+00 | "
    "loss scale: 1.0 | grad norm: 0.750 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_torchtitan() -> None:
    line = training_line(TITAN)
    assert line is not None
    assert (line.framework, line.iteration) == ("torchtitan", 10)
    assert line.figures == {
        "loss": 7.125, "grad_norm": 1.5, "tokens_per_second": 1234.0, "tflops": 12.34, "mfu_percent": 3.21,
    }  # fmt: skip


def test_torchtitan_in_colors() -> None:
    line = training_line(COLORED)
    assert line is not None
    assert (line.iteration, line.figures["loss"], line.figures["mfu_percent"]) == (20, 6.5, 5.0)


def test_megatron() -> None:
    line = training_line(MEGATRON)
    assert line is not None
    assert (line.framework, line.iteration) == ("megatron", 100)
    assert line.figures == {"iteration_ms": 123.4, "tflops": 210.5, "loss": 2.5, "grad_norm": 0.75}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step: 10  loss: 7.1",
        "tps: 12 of the steps:",
        " iteration 5 | of something",
        "  validation loss at iteration 100 | lm loss value: 2.3E+00 | lm loss PPL: 1.0E+01 |",
        "{'loss': 2.5, 'step': 10}",
    ],
)
def test_other_lines_are_none(line: str) -> None:
    assert training_line(line) is None


def test_a_loss_that_is_no_number_is_left_out() -> None:
    line = training_line(TITAN.replace("7.1250", "nan"))
    assert line is not None
    assert "loss" not in line.figures
    assert line.figures["tflops"] == 12.34


def test_last_and_median() -> None:
    lines = [training_line(text) for text in (TITAN, COLORED, TITAN.replace("step: 10", "step: 30"))]
    assert training_summary(line for line in lines if line is not None) == {
        "framework": "torchtitan",
        "iteration": 30,
        "lines": 3,
        "figures": {
            "loss": {"last": 7.125, "median": 7.125},
            "grad_norm": {"last": 1.5, "median": 1.5},
            "tokens_per_second": {"last": 1234.0, "median": 1234.0},
            "tflops": {"last": 12.34, "median": 12.34},
            "mfu_percent": {"last": 3.21, "median": 3.21},
        },
        "timers_ms": {},
    }
    assert training_summary([]) == {}


@pytest.mark.parametrize(
    ("line", "timer"),
    [
        ("    forward-backward ...............................: (1201.20, 1210.90)", ("forward-backward", 1210.9)),
        ("    optimizer-inner-step ...........................: 12.30", ("optimizer-inner-step", 12.3)),
        ("[rank3]:    optimizer ....: 12.30", None),
        ("(min, max) time across ranks (ms):", None),
        ("    optimizer ......................................: many", None),
        ("    loading ..: done", None),
    ],
)
def test_timers_of_megatron(line: str, timer: tuple[str, float] | None) -> None:
    assert timer_line(line) == timer


def test_timers_are_summed_up_where_there_are_lines() -> None:
    line = training_line(MEGATRON)
    assert line is not None
    timers = [("optimizer", 10.0), ("optimizer", 14.0), ("optimizer", 12.0)]
    assert training_summary([line], timers)["timers_ms"] == {"optimizer": {"last": 12.0, "median": 12.0}}
    assert training_summary([], timers) == {}
