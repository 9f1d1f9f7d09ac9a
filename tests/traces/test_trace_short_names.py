"""Names that a table can hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.model.columns import Kind
from stepscope.traces.model.kernel_names import fitted, short_name, short_names

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
ADDED = """void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,
    at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)"""
MULTIPLIED = """void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor
    <float, float, float, at::native::binary_internal::MulFunctor<float> > >(…)::{lambda(int)#1}>(int, …)"""
MEAN = """void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>,
    unsigned int, float, 4> >(at::native::ReduceOp<float>)"""
CUTLASS = "cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::mm", "aten::mm"),
        ("train.py(46): <module>", "train.py:46"),
        ("/code/train.py(9): step", "/code/train.py:9 in step"),
        ("ProfilerStep#5", "ProfilerStep#5"),
        (LOADER, LOADER),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "autograd: AddmmBackward0"),
        (f"{NCCL}(ncclDevKernelArgsStorage<4096ul>)", NCCL),
        ("void at::native::(anonymous namespace)::softmax_warp<float, 10, true>(float*, int)", "softmax_warp"),
        (ADDED, "vectorized_elementwise_kernel<CUDAFunctor_add>"),
        (MULTIPLIED, "elementwise_kernel<MulFunctor>"),
        (MEAN, "reduce_kernel<MeanOps>"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(int)", "kernel"),
        (f"void cutlass::Kernel2<{CUTLASS}>(cutlass::Params)", CUTLASS),
        ("void f<g<h>", "f<g>"),
        ("(outside of operators)", "(outside of operators)"),
        ("<script>alert(1)</script>", "<script>alert"),
        ("", ""),
    ],
)
def test_short(name: str, short: str) -> None:
    assert short_name(name) == short


def test_cut_in_the_middle() -> None:
    assert fitted("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", 24) == "ampere_fp16_s16…_32x5_tn"
    assert fitted("aten::mm", 8) == "aten::mm"


def test_alike_names_are_told_apart() -> None:
    names = ["void f<float>(int)", "void f<double>(int)", "f", "f (2)", "void f<float>(int)"]
    assert short_names(names, 20) == {
        "void f<float>(int)": "f",
        "void f<double>(int)": "f (2)",
        "f": "f (3)",
        "f (2)": "f (2) (2)",
    }


@given(st.lists(st.text(alphabet="ab<>(),: *[]{}-1", max_size=60)), st.integers(12, 40))
def test_any_names(names: list[str], columns: int) -> None:
    short = short_names(names, columns)
    assert short.keys() == set(names)
    assert len(set(short.values())) == len(short)
    assert all(len(text) <= columns for text in short.values())


def test_names_of_real_traces(shared_data: Path, real_window: Callable[[Path], Any]) -> None:
    names: set[str] = set()
    for path in sorted((shared_data / "traces").rglob("*.json.gz")):
        trace = real_window(path).trace
        names |= {trace.name(row) for row in trace.rows_of((Kind.KERNEL,)).tolist()}
    assert len(names) > 100
    short = short_names(sorted(names), 60)
    assert len(set(short.values())) == len(names)
    assert not any("::" in text or text.startswith("void ") for text in short.values())


def test_functions_of_python_are_no_templates() -> None:
    assert short_name("<built-in function sleep>") == "<built-in function sleep>"
    assert short_name("<built-in method run_backward of X object at 0x7f>").startswith("<built-in method run_backward")


def test_file_and_line_are_never_shortened() -> None:
    names = [f"resnet50_profiler_api.py({line}): <module>" for line in (46, 47)]
    assert list(short_names(names, 12).values()) == ["resnet50_profiler_api.py:46", "resnet50_profiler_api.py:47"]
    place = "/opt/site-packages/torch/profiler/profiler.py:312 in step"
    assert [fitted(place, columns) for columns in (30, 20, 12)] == [
        "…/profiler.py:312 in step",
        "…/profiler.py:312",
        "profiler.py:312",
    ]
    same = ["a/utils.py(3): f", "b/utils.py(3): f"]
    assert list(short_names(same, 14).values()) == ["…/utils.py:3", "utils.py:3 #2"]
