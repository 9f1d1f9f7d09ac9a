"""What a kernel or a call of the device's runtime does, judged by its name alone.

What a kernel does, by its name alone.

A name is looked at in two parts: the function (what stands before the template's and the call's arguments), then what
is inside of them, since wrappers such as ``cutlass::Kernel<…>`` say there what they run.  All rules are tables of words
in lower case; of the classes the first that fits is taken, so that the special stand before the general.

Names are few but long and come again and again: whoever has many events asks once per name (``Trace.names_where``).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

__all__ = [
    "is_asked_to_wait",
    "is_communication",
    "is_fp32_matmul",
    "is_graph_launch",
    "is_matrix_class",
    "is_synchronising",
    "kernel_class",
    "uses_tensor_cores",
]


# -- kernel names -----------------------------------------------------------------------------------------------------

LOOKED_AT: Final = 400
"""Characters of a name beyond the function that are looked at: what follows repeats the arguments' types."""

COMMUNICATION_STARTS: Final = ("nccl", "rccl", "msccl", "oneccl", "xccl", "hccl", "ucc_", "ccl::", "ccl_", "hcom_")
COMMUNICATION_WORDS: Final = (
    "all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "reducescatter", "all_to_all", "alltoall",
    "cross_device_reduce", "multimem_", "symm_mem", "symmetric_memory", "deep_ep", "nvshmem", "mscclpp", "c10d::",
    "cclkernel", "oneccl",
)  # fmt: skip
NOT_COMMUNICATION: Final = ("triton_", "gemm", "matmul", "warpallreduce", "warp_all_reduce", "blockallreduce")
"""Inductor names a kernel after all operators near it; a product fused with a collective computes first of all."""

CLASSES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("attention", (
        "flash", "fmha", "attention", "attn", "sdpa", "_mha_", "bmha", "xqa", "batchprefill", "batchdecode", "qk_int8",
        "mla_",
    )),
    ("embedding", ("embedding", "_embs", "bounds_check_indices", "linearize_index", "fbgemm_gpu::")),
    ("optimizer", (
        "multi_tensor", "multitensor", "adam", "fused_sgd", "adagrad", "lamb_", "rmsprop", "adafactor", "optimizer",
        "_foreach_", "amp_non_finite", "muon",
    )),
    ("normalisation", (
        "batch_norm", "batchnorm", "bn_fw", "bn_bw", "bn_finalize", "layer_norm", "layernorm", "rmsnorm", "rms_norm",
        "group_norm", "groupnorm", "instance_norm", "normalization", "rowwisemoments", "gammabeta", "gradinputcuda",
        "computegradinput", "miopenbatchnorm",
    )),
    ("copy", ("nchwtonhwc", "nhwctonchw", "nchw_to_nhwc", "nhwc_to_nchw", "catarray", "batched_transpose")),
    ("conv", (
        "convol", "conv1d", "conv2d", "conv3d", "conv_", "_conv", "conv::", "fprop", "dgrad", "wgrad", "winograd",
        "cudnn_", "scudnn", "hcudnn", "icudnn", "884cudnn", "1688cudnn", "cudnn::cnn", "cask_cudnn", "im2col", "col2im",
        "fft2d", "igemm_fwd", "igemm_bwd", "miopen",
    )),
    ("gemm", (
        "gemm", "gemv", "nvjet", "cijk_", "matmul", "xmma", "hmma", "wgmma", "cublas", "splitk", "epilogue::impl",
        "dot_kernel", "reduce_1block", "_mm_", "_bmm", "bmm_", "addmm", "linear_kernel", "gemmk1", "gcgemm",
    )),
    ("softmax", ("softmax", "nll_loss", "nllloss", "classnll", "cross_entropy", "crossentropy")),
    ("pooling", ("pool",)),
    ("random", (
        "distribution_", "dropout", "philox", "curand", "bernoulli", "randperm", "uniform_kernel", "normal_kernel",
        "random",
    )),
    ("sort", ("sort", "topk", "bitonic", "radix", "::unique", "histogram", "kth_value", "gatherkth")),
    ("elementwise", ("elementwise_kernel_with_index",)),
    ("copy", (
        "index", "gather", "scatter", "transpose", "permute", "copy", "slice", "roll_", "flip", "repeat", "tril",
        "triu", "concat", "memcpy", "memset", "offsets_range", "to_dense", "to_padded", "jagged",
    )),
    ("reduction", ("reduce", "reduction", "devicescan", "scan_", "_scan", "cumsum", "argmax", "argmin", "segment_sum",
                   "devicecompact")),
    ("elementwise", (
        "elementwise", "pointwise", "activation", "act_and_mul", "relu", "gelu", "silu", "swiglu", "sigmoid", "rotary",
        "rope", "scalepackedtensor", "quant", "cast_kernel", "fill", "add_kernel", "mul_kernel",
    )),
)  # fmt: skip
"""By order of asking; a class may stand there twice."""
COMPILED: Final = "triton_"
"""What inductor wrote: named after the operators that it fused."""
COPYING: Final = ("direct_copy_kernel", "copy_device_to_device", "bfloat16_copy", "loadwithcast_copy")
"""Inside of an elementwise kernel."""
MATRIX_CLASSES: Final = frozenset({"gemm", "conv", "attention"})

TENSOR_CORE_WORDS: Final = (
    "tensorop", "s1688", "s16816", "s884", "h884", "h1688", "h16816", "i8816", "i16832", "s161616", "s16832", "884gemm",
    "884cudnn", "1688cudnn", "16816cudnn", "tf32", "tfloat32", "hmma", "imma_", "wgmma", "wmma", "tcgen05", "nvjet",
    "_tensor16x8x", "f16f16", "bf16bf16", "e4m3", "e5m2", "e2m1", "mxfp", "xdl", "mfma", "triton_tem_", "deep_gemm",
    "fp8_gemm", "bmm_bf",
)  # fmt: skip
MATRIX_INSTRUCTION: Final = re.compile(r"_mi\d+x\d+x")
"""AMD's matrix cores, in Tensile's names: the shape of the instruction."""
HALF_ATTENTION: Final = ("f16", "half", "flash", "sdpa", "fp8")
NO_MATRIX: Final = ("gemv", "dot_kernel", "reduce_1block", "splitkreduce", "epilogue::impl", "offsetskernel")
"""Functions that are helpers, or products with a vector: Tensor Cores would gain nothing."""
REDUCES: Final = "reduction::kernel"
"""Inside of a wrapper: the sum over the parts of a split product."""
FP32_WORDS: Final = ("sgemm", "scudnn", "simt_s", "ffma", "f32f32_f32f32_f32", "<float", "<int, float", "_sb_", "fp32")

_ANONYMOUS: Final = re.compile(r"\(anonymous namespace\)::|\(anonymous namespace\)|<unnamed>::")
_BEFORE: Final = re.compile(r"^(void\s+|std::enable_if<.{0,80}?>::type\s+|_Z\d*)+")


@lru_cache(maxsize=1 << 16)
def _parts(name: str) -> tuple[str, str]:
    """The function, and it with what follows: in lower case, without what says nothing."""
    text = _BEFORE.sub("", _ANONYMOUS.sub("", name[: 2 * LOOKED_AT]))
    end = min((at for at in (text.find("<"), text.find("(")) if at > 0), default=len(text))
    return text[:end].lower(), text[: end + LOOKED_AT].lower()


@lru_cache(maxsize=1 << 16)
def is_communication(name: str) -> bool:
    """NCCL, RCCL, MSCCL(++), oneCCL, NVSHMEM, symmetric memory, DeepEP … by the function's own name."""
    function, _ = _parts(name)
    if any(word in function for word in NOT_COMMUNICATION):
        return False
    return function.startswith(COMMUNICATION_STARTS) or any(word in function for word in COMMUNICATION_WORDS)


@lru_cache(maxsize=1 << 16)
def kernel_class(name: str) -> str:
    """``gemm``, ``attention`` …; ``communication``; ``compiled``: fused by a compiler; ``other``: nobody knows."""
    if is_communication(name):
        return "communication"
    function, whole = (_without_traps(part) for part in _parts(name))
    if function.startswith(COMPILED):
        return _compiled_class(function)
    found = _first(function) or _first(whole)
    if found == "elementwise" and any(word in whole for word in COPYING):
        return "copy"
    if found is None:
        return "gemm" if "cutlass" in whole else "other"
    return found


def _without_traps(text: str) -> str:
    """Words that hold another rule's."""
    return text.replace("convert", "cast").replace("flashinfer", "")


def is_matrix_class(found: str) -> bool:
    """Of a class: does it multiply matrices, so that it could use Tensor Cores?"""
    return found in MATRIX_CLASSES


def _compiled_class(function: str) -> str:
    """Only templates (``tem``) multiply; all else is fused pointwise work and reductions."""
    if "_tem_" not in function and not function.startswith(("triton_mm", "triton_bmm")):
        return "compiled"
    return "attention" if "attention" in function else "conv" if "conv" in function else "gemm"


def _first(text: str) -> str | None:
    return next((found for found, words in CLASSES if any(word in text for word in words)), None)


@lru_cache(maxsize=1 << 16)
def uses_tensor_cores(name: str) -> bool:
    """Tensor Cores, or AMD's matrix cores; TF32 is theirs.  Of a compiler's templates it is taken for granted."""
    found = kernel_class(name)
    if found not in MATRIX_CLASSES:
        return False
    _, whole = _parts(name)
    if not _multiplies(name):
        return False
    if any(word in whole for word in TENSOR_CORE_WORDS) or MATRIX_INSTRUCTION.search(whole):
        return True
    return found == "attention" and "f32" not in whole and any(word in whole for word in HALF_ATTENTION)


@lru_cache(maxsize=1 << 16)
def is_fp32_matmul(name: str) -> bool:
    """A product of matrices or a convolution in FP32 on ordinary cores, which TF32 or half precision would speed up."""
    if kernel_class(name) not in ("gemm", "conv") or uses_tensor_cores(name):
        return False
    _, whole = _parts(name)
    return _multiplies(name) and any(word in whole for word in FP32_WORDS)


def _multiplies(name: str) -> bool:
    function, whole = _parts(name)
    return REDUCES not in whole and not any(word in function for word in NO_MATRIX)


# -- runtime names ----------------------------------------------------------------------------------------------------
# What a call of the device's runtime or driver does, by its name: CUDA's, HIP's and Intel's.

SYNCHRONISING: Final = re.compile(
    r"(cuda|cu|hip|mtia|xpu|ze)[A-Za-z]*Synchronize(_\w+)?$"
    r"|(cuda|hip)Memcpy(2D|3D|To(Symbol|Array)|From(Symbol|Array)|Peer|DtoH|HtoD|DtoD|WithStream)?(_ptds|_v\d+)?$"
    r"|cuMemcpy(DtoH|HtoD|DtoD|2D|3D)?(_v2)?$"
    r"|ur(QueueFinish|EventWait)$"
)
"""From the start of the name: calls that come back only when the device has done something.

A copy to the host's pageable memory waits too, whatever its name says.
"""
FREEING: Final = re.compile(r"(cuda|hip)(Free|FreeHost|HostUnregister)$|cuMemFree(_v2)?$")
"""Waits for all that the device has still to do, though nobody asked for it."""
GRAPH_LAUNCH: Final = re.compile(r"(cuda|cu|hip)GraphLaunch")


@lru_cache(maxsize=4096)
def is_synchronising(name: str) -> bool:
    return is_asked_to_wait(name) or FREEING.match(name) is not None


@lru_cache(maxsize=4096)
def is_asked_to_wait(name: str) -> bool:
    """Synchronising, and not only because it frees memory."""
    return SYNCHRONISING.match(name) is not None


@lru_cache(maxsize=4096)
def is_graph_launch(name: str) -> bool:
    return GRAPH_LAUNCH.match(name) is not None
