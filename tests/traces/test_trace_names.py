"""Names as traces have them, of several vendors and years: kernels, calls of the runtime, and what fits a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.traces import MadeTrace
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.model.columns import Kind, Trace
from stepscope.traces.model.kernel_names import (
    fitted,
    is_communication,
    is_fp32_matmul,
    is_graph_launch,
    is_synchronizing,
    kernel_class,
    short_name,
    short_names,
    uses_tensor_cores,
)

COMMUNICATION = (
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)",
    "nccl:all_reduce",
    "_Z35ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE",
    "void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)",
    "mscclKernel_Sum_half_LL_false(ncclDevComm*, mscclAlgo*, mscclWork*)",
    "void mscclpp::collective::allreduceNvls<__half>(mscclpp::DeviceHandle*)",
    "oneccl_reduce_base<float, 2, 16, 1, 1, 2>",
    "oneccl_allreduce_pcie<sycl::half>",
    "void nvshmemi_transfer_rma<int>(int, int)",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
    "void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 2>(c10::BFloat16**, int)",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
    "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(int)1>(int)",
)
COMPUTE = (
    "cclRender",
    "cclosure_kernel(int)",
    "void my::kernel<ncclDataType_t>(ncclComm*)",
    "void at::native::vectorized_elementwise_kernel<4, nccl_like_functor>(int)",
    "triton_poi_fused_add_all_reduce_4",
    "void flux::ag_gemm_kernel<all_gather>(int)",
    "fused_matmul_reduce_scatter_kernel",
    "void warp_all_reduce_sum<float>(float*)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)",
    "volta_sgemm_128x32_nt",
    "",
)


@pytest.mark.parametrize("name", COMMUNICATION)
def test_communication(name: str) -> None:
    assert is_communication(name)
    assert kernel_class(name) == "communication"
    assert not uses_tensor_cores(name)
    assert not is_fp32_matmul(name)


@pytest.mark.parametrize("name", COMPUTE)
def test_no_communication(name: str) -> None:
    assert not is_communication(name)


TENSOR, FP32, NEITHER = "tensor cores", "FP32", "neither"

MATRICES = {
    ("gemm", FP32): (
        "volta_sgemm_128x32_nt",
        "ampere_sgemm_32x32_sliced1x4_nn",
        "void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm::Params)",
        "void gemmSN_NN_kernel<float, 256, 4, 2, 8, 4, 4, false, cublasGemvTensorStridedBatched<float const>>(int",
        "void gemmk1_kernel<int, float, 256, 5, false, false, false, false>(int)",
        "void magma_sgemmEx_kernel<float, float, float, false, false, 6, 3, 5, 3, 3>(int, int)",
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_",
        "Cijk_Ailk_Bljk_SB_MT64x64x8_SN_1LDSB0_APM1",
    ),
    ("gemm", TENSOR): (
        "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn",
        "ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_nn",
        "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
        "volta_h884gemm_64x64_ldg8_nn",
        "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nt_align4>(cutlass_80_tensorop_s1688gemm::",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>(int)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_ker",
        "sm80_xmma_gemm_tf32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel",
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
        "nvjet_sm100_tst_64x16_64x16_2x4_2cta_h_bz_splitK_TNT",
        "void deep_gemm::fp8_gemm_kernel<7168u, 2048u>(float*)",
        "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_CMS_SN_LDSB0",
        "triton_tem_fused_addmm_relu_0",
    ),
    ("gemm", NEITHER): (
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(int)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float>(int)",
        "void splitKreduce_kernel<32, 16, int, float, float, float, float, true>(cublasSplitKParams<float>)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)",
        "void epilogue::impl::globalKernel<float, float, float, true, true>(int, int, long)",
        "volta_hgemm_128x128_nn",
        "volta_dgemm_64x64_nn",
    ),
    ("conv", FP32): (
        "volta_scudnn_128x64_relu_interior_nn_v1",
        "volta_scudnn_128x128_stridedB_splitK_medium_nn_v1",
        "cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "void implicit_convolve_sgemm<float, float, 512, 6, 8, 3, 3, 5, 1, false, true, true>(int)",
        "void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 8, 3, 3, 5, false, 512>(int)",
    ),
    ("conv", TENSOR): (
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32_stage5_warpsize2x2x1",
        "void cutlass_cudnn_train::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32_256x64_16x4_nhwc_align4>(int",
        "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS_10tfloat32_tE",
        "volta_fp16_s884cudnn_fp16_128x128_ldg8_relu_exp_small_nhwc_tn_v1",
    ),
    ("conv", NEITHER): ("void cask_cudnn::computeOffsetsKernel<false, false>(cask_cudnn::ComputeOffsetsParams)",),
    ("attention", TENSOR): (
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(int)",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_0",
    ),
    ("attention", NEITHER): (
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>)",
    ),
}
"""The longest are cut off."""


@pytest.mark.parametrize(
    ("name", "expected", "cores"), [(name, *expected) for expected, names in MATRICES.items() for name in names]
)
def test_matrices(name: str, expected: str, cores: str) -> None:
    assert kernel_class(name) == expected
    assert (uses_tensor_cores(name), is_fp32_matmul(name)) == (cores == TENSOR, cores == FP32)


OTHERS = {
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
        "void at::native::(anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange>(int)",
        "at::native::xpu::VectorizedElementwiseKernel<4, at::native::xpu::AddFunctor<float>>",
        "void at::native::convert_dtype_cast_kernel<float>(int)",
    ),
    "copy": (
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_c",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>(int)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>(float*)",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(int)",
    ),
    "reduction": (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(int)",
        "void cub::DeviceScanKernel<cub::DeviceScanPolicy<int>::Policy600>(int)",
    ),
    "sort": ("void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800>(int)",),
    "normalization": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(int)",
        "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(int)",
    ),
    "softmax": (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>(float*)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>(float*)",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFu",
    ),
    "embedding": ("void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<float>(int)",),
    "random": (
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(int)",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4>(int)",
    ),
    "pooling": ("void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int)",),
    "compiled": (
        "triton_poi_fused_add_cos_sin_0",
        "triton_red_fused__to_copy_native_layer_norm_mm_3",
    ),
    "other": (
        "at::cuda::(anonymous namespace)::spin_kernel(long)",
        "",
    ),
}


@pytest.mark.parametrize(
    ("name", "expected"), [(name, expected) for expected, names in OTHERS.items() for name in names]
)
def test_other_classes(name: str, expected: str) -> None:
    assert kernel_class(name) == expected
    assert not uses_tensor_cores(name)
    assert not is_fp32_matmul(name)


def test_a_name_is_asked_about_once() -> None:
    made = MadeTrace()
    for number in range(6):
        made.kernel(f"kernel{number % 2}", number, 1)
    trace: Trace = made.trace()
    names: list[str] = []

    def ask(name: str) -> bool:
        names.append(name)
        return name == "kernel1"

    assert trace.names_where(ask)[trace.slices.name].tolist() == [False, True] * 3
    assert sorted(names) == ["kernel0", "kernel1"]
    assert trace.names_where(ask)[trace.slices.name[:0]].tolist() == []
    assert sorted(names) == ["kernel0", "kernel1"], "the answers are kept"


# -- Calls of the runtime that wait for the device, and those that launch graphs --------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize_v3020",
        "cuCtxSynchronize", "cuStreamSynchronize", "hipDeviceSynchronize", "hipStreamSynchronize",
        "hipEventSynchronize", "cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cuMemcpyDtoH_v2", "hipMemcpy",
        "hipMemcpyWithStream", "cudaFree", "hipFree", "urQueueFinish", "zeEventHostSynchronize",
    ],
)  # fmt: skip
def test_synchronizing(name: str) -> None:
    assert is_synchronizing(name)


@pytest.mark.parametrize(
    "name",
    [
        "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cuMemcpyDtoHAsync_v2", "hipMemcpyAsync", "cudaFreeAsync",
        "cudaLaunchKernel", "cudaEventQuery", "cudaStreamWaitEvent", "cudaMalloc", "myStreamSynchronize", "",
    ],
)  # fmt: skip
def test_not_synchronizing(name: str) -> None:
    assert not is_synchronizing(name)


def test_graph_launches() -> None:
    names = ("cudaGraphLaunch", "cudaGraphLaunch_v10000", "hipGraphLaunch", "cuGraphLaunch", "cudaGraphInstantiate")
    assert [is_graph_launch(name) for name in names] == [True, True, True, True, False]


# -- Names that a table can hold --------------------------------------------------------------------------------------


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
