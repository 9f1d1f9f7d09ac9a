"""Floating-point operations: formulas, what counts, utilization."""

from __future__ import annotations

import pytest
from fakes.traces import MadeTrace

from stepscope.records.throughput import peak_of
from stepscope.traces.host.flops import flops_found, flops_of, flops_table
from stepscope.traces.model.window import window_of

CONV = '["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]'


@pytest.mark.parametrize(
    ("name", "dims", "concrete", "expected"),
    [
        ("aten::mm", "[[2, 3], [3, 5]]", "", 2 * 2 * 3 * 5),
        ("aten::addmm", "[[5], [2, 3], [3, 5], [], []]", "", 2 * 2 * 3 * 5),
        ("aten::bmm", "[[7, 2, 3], [7, 3, 5]]", "", 7 * 2 * 2 * 3 * 5),
        ("aten::baddbmm", "[[7, 2, 5], [7, 2, 3], [7, 3, 5], [], []]", "", 7 * 2 * 2 * 3 * 5),
        ("aten::linear", "[[4, 2, 3], [5, 3], [5]]", "", 2 * 4 * 2 * 3 * 5),
        ("aten::matmul", "[[4, 1, 2, 3], [3, 5]]", "", 2 * 4 * 2 * 3 * 5),
        ("aten::matmul", "[[3], [3, 5]]", "", 2 * 3 * 5),
        ("aten::mv", "[[4, 3], [3]]", "", 2 * 4 * 3),
        ("aten::dot", "[[9], [9]]", "", 18),
        ("aten::convolution", "[[2, 3, 9, 9], [4, 3, 3, 3], [4]]", CONV, 2 * 2 * 5 * 5 * 4 * 3 * 9),
        ("aten::convolution", "[[2, 3, 9, 9], [4, 3, 3, 3], [4]]", "", None),
        (
            "aten::convolution",
            "[[2, 3, 4, 4], [3, 6, 2, 2], [6]]",
            CONV.replace("False", "True"),
            2 * 2 * 3 * 16 * 6 * 4,
        ),
        ("aten::conv2d", "[[1, 2, 8, 8], [2, 1, 3, 3], []]", '["","","","[1]","[1]","[1]","2"]', 2 * 64 * 2 * 9),
        ("aten::conv2d", "[[1, 2, 8, 8], [2, 2, 3, 3], []]", '["","","","[1]","same","[1]","1"]', None),
        (
            "aten::convolution_backward",
            "[[2, 4, 5, 5], [2, 3, 9, 9], [4, 3, 3, 3]]",
            '["","","","[4]","[2, 2]","[1, 1]","[1, 1]","False","[0, 0]","1","[True, True, True]"]',
            2 * 2 * 2 * 25 * 4 * 27,
        ),
        (
            "aten::convolution_backward",
            "[[2, 4, 5, 5], [2, 3, 9, 9], [4, 3, 3, 3]]",
            '["","","","[4]","[2, 2]","[1, 1]","[1, 1]","False","[0, 0]","1","[False, True, True]"]',
            2 * 2 * 25 * 4 * 27,
        ),
        (
            "aten::_scaled_dot_product_flash_attention",
            "[[2, 8, 128, 64], [2, 8, 256, 64], [2, 8, 256, 64]]",
            "",
            2 * 2 * 2 * 8 * 128 * 256 * 64,
        ),
        (
            "aten::_flash_attention_backward",
            "[[2, 128, 8, 64], [2, 128, 8, 64], [2, 256, 8, 64], [2, 256, 8, 64]]",
            "",
            5 * 2 * 2 * 8 * 128 * 256 * 64,
        ),
        ("aten::add", "[[2], [2]]", "", None),
        ("aten::mm", "", "", None),
        ("aten::mm", "[[2, 3]]", "", None),
        ("aten::mm", "[[2, 3], [4, 5]]", "", None),
        ("aten::mm", "nonsense", "", None),
    ],
)
def test_formulas(name: str, dims: str, concrete: str, expected: int | None) -> None:
    assert flops_of(name, dims, concrete) == expected


def shaped(made: MadeTrace, name: str, start: float, dur: float, dims: list[object], dtype: str = "float") -> None:
    made.op(name, start, dur, **{"Input Dims": dims, "Input type": [dtype] * len(dims)})


def test_only_the_innermost_count_and_only_within_steps() -> None:
    made = MadeTrace()
    made.step(1, 0, 100)
    shaped(made, "aten::linear", 10, 20, [[2, 3], [5, 3], [5]])
    shaped(made, "aten::addmm", 12, 10, [[5], [2, 3], [3, 5]])
    made.launched("gemm", at=13, start=30, dur=6)
    shaped(made, "aten::matmul", 40, 5, [[2, 3], [3, 5]])
    shaped(made, "aten::mm", 150, 5, [[20, 30], [30, 50]])
    window = window_of(made.trace())
    found = flops_found(window)
    assert (found.total, found.unknown) == (120, 0)
    table = flops_table(window, found)
    assert table is not None
    assert table.rows == (
        ("aten::addmm", 1, 60, 6_000, 60 / 6_000 / 1000),
        ("aten::matmul", 1, 60, 0, None),
    )


def test_what_is_not_known_leaves_no_sum() -> None:
    made = MadeTrace()
    shaped(made, "aten::mm", 0, 5, [[2, 3], [3, 5]])
    made.op("aten::mm", 10, 5)
    window = window_of(made.trace())
    found = flops_found(window)
    assert (found.total, found.unknown, found.mfu) == (None, 1, None)
    table = flops_table(window, found)
    assert table is not None
    assert "1 calls" in table.note


def test_an_operator_is_known_by_what_is_inside_or_around_it() -> None:
    made = MadeTrace()
    made.op("aten::conv2d", 0, 10, **{"Input Dims": [[1, 2, 8, 8], [2, 2, 3, 3]]})
    args = {"Input Dims": [[1, 2, 8, 8], [2, 2, 3, 3]], "Concrete Inputs": CONV}
    args["Concrete Inputs"] = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    made.op("aten::convolution", 1, 8, **args)
    made.op("aten::cudnn_convolution", 2, 5, **{"Input Dims": [[1, 2, 8, 8], [2, 2, 3, 3]]})
    found = flops_found(window_of(made.trace()))
    assert (found.total, found.unknown) == (2 * 64 * 2 * 2 * 9, 0)


def test_utilization() -> None:
    made = MadeTrace(header={"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]})
    made.step(1, 0, 1000)
    shaped(made, "aten::mm", 10, 20, [[1000, 1000], [1000, 1000]], "c10::BFloat16")
    made.launched("gemm", at=13, start=30, dur=6)
    found = flops_found(window_of(made.trace()))
    assert found.total == 2 * 10**9
    assert found.mfu == pytest.approx(2e9 / (989.4e12 * 1e-3))
    shaped(made, "aten::mm", 40, 20, [[1000, 1000], [1000, 1000]])
    assert flops_found(window_of(made.trace())).mfu == pytest.approx(2e9 / 989.4e9 + 2e9 / 66.9e9)
    made.launched("sm80_xmma_gemm_f32f32_tf32f32_f32_tn", at=42, start=60, dur=6)
    assert flops_found(window_of(made.trace())).mfu == pytest.approx(2e9 / 989.4e9 + 2e9 / 494.7e9)
    shaped(made, "aten::mm", 70, 20, [[10, 10], [10, 10]], "double")
    assert flops_found(window_of(made.trace())).mfu is None


def test_no_utilization_of_unknown_devices_or_none() -> None:
    made = MadeTrace(header={"deviceProperties": [{"id": 0, "name": "Something New"}]})
    shaped(made, "aten::mm", 10, 20, [[10, 10], [10, 10]])
    assert flops_found(window_of(made.trace())).mfu is None
    made.launched("gemm", at=13, start=30, dur=6)
    assert flops_found(window_of(made.trace())).mfu is None
    nothing = window_of(MadeTrace().trace())
    assert flops_found(nothing).total is None
    assert flops_table(nothing, flops_found(nothing)) is None


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("Tesla V100-SXM2-32GB", 125.0),
        ("NVIDIA A100-PG509-200", 312.0),
        ("NVIDIA A10G", 125.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
        ("Unknown", None),
        (None, None),
    ],
)
def test_peaks(name: str | None, half: float | None) -> None:
    peak = peak_of(name)
    assert (peak.tflops("c10::Half") if peak else None) == half
