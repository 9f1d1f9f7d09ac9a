"""Names of kernels as traces have them, of several vendors and years, and what they are."""

from __future__ import annotations

import pytest
from fakes.traces import MadeTrace

from stepscope.traces.model.columns import Trace
from stepscope.traces.model.kernel_names import (
    is_communication,
    is_fp32_matmul,
    kernel_class,
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
