"""What a kernel or a runtime call does, judged by its name alone; and names shortened to fit a table.

A name is examined in two parts: first the function (before the arguments of the template and the call), then the
arguments, since wrappers such as ``cutlass::Kernel<…>`` name there what they run. All rules are tables of lower-case
words. The first matching class wins, so special ones precede general ones.

Names are few but long and occur often: code with many events should look up each name once (``Trace.names_where``).

Short names of kernels and operators fit a table and stay distinct.

    void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, …>(int, …)
    → vectorized_elementwise_kernel<CUDAFunctor_add>

C++ names lose their return type, namespaces, parameters and template arguments, except for the one that says what is
done: the innermost first that is neither a number nor a plain type.  A name that is still too long keeps its beginning
and its end, which contain the numbers that distinguish kernels (tile sizes, layouts).

Lines of Python, as the profiler writes them, become ``train.py:31 in step``.  To fit they lose their folders, then the
function; file name and line always stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

__all__ = [
    "fitted",
    "is_asked_to_wait",
    "is_communication",
    "is_fp32_matmul",
    "is_graph_launch",
    "is_matrix_class",
    "is_synchronizing",
    "kernel_class",
    "short_name",
    "short_names",
    "uses_tensor_cores",
]

# -- kernels ----------------------------------------------------------------------------------------------------------

LOOKED_AT: Final = 400
"""Characters examined beyond the function: what follows repeats the types of the arguments."""

COMMUNICATION_STARTS: Final = ("nccl", "rccl", "msccl", "oneccl", "xccl", "hccl", "ucc_", "ccl::", "ccl_", "hcom_")
COMMUNICATION_WORDS: Final = (
    "all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "reducescatter", "all_to_all", "alltoall",
    "cross_device_reduce", "multimem_", "symm_mem", "symmetric_memory", "deep_ep", "nvshmem", "mscclpp", "c10d::",
    "cclkernel", "oneccl",
)  # fmt: skip
NOT_COMMUNICATION: Final = ("triton_", "gemm", "matmul", "warpallreduce", "warp_all_reduce", "blockallreduce")
"""Inductor names a kernel after all operators near it; a product fused with a collective is mainly computation."""

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
    ("normalization", (
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
"""In order of matching; a class may occur twice."""
COMPILED: Final = "triton_"
"""Generated by inductor: named after the operators that it fused."""
COPYING: Final = ("direct_copy_kernel", "copy_device_to_device", "bfloat16_copy", "loadwithcast_copy")
"""Inside an elementwise kernel."""
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
"""Helpers, or products with a vector: Tensor Cores would gain nothing."""
REDUCES: Final = "reduction::kernel"
"""Inside a wrapper: the sum over the parts of a split product."""
FP32_WORDS: Final = ("sgemm", "scudnn", "simt_s", "ffma", "f32f32_f32f32_f32", "<float", "<int, float", "_sb_", "fp32")

_ANONYMOUS: Final = re.compile(r"\(anonymous namespace\)::|\(anonymous namespace\)|<unnamed>::")
_BEFORE: Final = re.compile(r"^(void\s+|std::enable_if<.{0,80}?>::type\s+|_Z\d*)+")


@lru_cache(maxsize=1 << 16)
def _parts(name: str) -> tuple[str, str]:
    """Return the function, and the function with its arguments: in lower case, without noise."""
    text = _BEFORE.sub("", _ANONYMOUS.sub("", name[: 2 * LOOKED_AT]))
    end = min((at for at in (text.find("<"), text.find("(")) if at > 0), default=len(text))
    return text[:end].lower(), text[: end + LOOKED_AT].lower()


@lru_cache(maxsize=1 << 16)
def is_communication(name: str) -> bool:
    """Detect NCCL, RCCL, MSCCL(++), oneCCL, NVSHMEM, symmetric memory, DeepEP … by the function's own name."""
    function, _ = _parts(name)
    if any(word in function for word in NOT_COMMUNICATION):
        return False
    return function.startswith(COMMUNICATION_STARTS) or any(word in function for word in COMMUNICATION_WORDS)


@lru_cache(maxsize=1 << 16)
def kernel_class(name: str) -> str:
    """Return ``gemm``, ``attention`` …; ``communication``; ``compiled`` (fused by a compiler); ``other`` (unknown)."""
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
    """Replace words that contain a word of another rule."""
    return text.replace("convert", "cast").replace("flashinfer", "")


def is_matrix_class(found: str) -> bool:
    """Test whether a class multiplies matrices and could use Tensor Cores."""
    return found in MATRIX_CLASSES


def _compiled_class(function: str) -> str:
    """Classify a compiled kernel: only templates (``tem``) multiply; the rest is fused pointwise work or reductions."""
    if "_tem_" not in function and not function.startswith(("triton_mm", "triton_bmm")):
        return "compiled"
    return "attention" if "attention" in function else "conv" if "conv" in function else "gemm"


def _first(text: str) -> str | None:
    return next((found for found, words in CLASSES if any(word in text for word in words)), None)


@lru_cache(maxsize=1 << 16)
def uses_tensor_cores(name: str) -> bool:
    """Detect Tensor Cores (including TF32) or AMD's matrix cores; assumed for compiler templates."""
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
    """Detect an FP32 matrix product or convolution on ordinary cores, which TF32 or half precision would speed up."""
    if kernel_class(name) not in ("gemm", "conv") or uses_tensor_cores(name):
        return False
    _, whole = _parts(name)
    return _multiplies(name) and any(word in whole for word in FP32_WORDS)


def _multiplies(name: str) -> bool:
    function, whole = _parts(name)
    return REDUCES not in whole and not any(word in function for word in NO_MATRIX)


# -- runtime calls ----------------------------------------------------------------------------------------------------
# Calls of the CUDA, HIP and Intel runtimes and drivers.

SYNCHRONIZING: Final = re.compile(
    r"(cuda|cu|hip|mtia|xpu|ze)[A-Za-z]*Synchronize(_\w+)?$"
    r"|(cuda|hip)Memcpy(2D|3D|To(Symbol|Array)|From(Symbol|Array)|Peer|DtoH|HtoD|DtoD|WithStream)?(_ptds|_v\d+)?$"
    r"|cuMemcpy(DtoH|HtoD|DtoD|2D|3D)?(_v2)?$"
    r"|ur(QueueFinish|EventWait)$"
)
"""Matched from the start of the name: calls that return only when the device has done something.

A copy to pageable host memory waits too, whatever its name.
"""
FREEING: Final = re.compile(r"(cuda|hip)(Free|FreeHost|HostUnregister)$|cuMemFree(_v2)?$")
"""Waits implicitly for everything the device still has to do."""
GRAPH_LAUNCH: Final = re.compile(r"(cuda|cu|hip)GraphLaunch")


@lru_cache(maxsize=4096)
def is_synchronizing(name: str) -> bool:
    return is_asked_to_wait(name) or FREEING.match(name) is not None


@lru_cache(maxsize=4096)
def is_asked_to_wait(name: str) -> bool:
    """Test for calls that wait explicitly, not only because they free memory."""
    return SYNCHRONIZING.match(name) is not None


@lru_cache(maxsize=4096)
def is_graph_launch(name: str) -> bool:
    return GRAPH_LAUNCH.match(name) is not None


# -- short names ------------------------------------------------------------------------------------------------------

PLAIN = re.compile(
    r"^(const |unsigned |signed |long |short |volatile )*"
    r"((\([\w:]+\))?-?\d\w*|true|false|float\d?|double|int|long|short|char|bool|void|signed|unsigned|__half|__nv_bfloat16|"
    r"u?int\d+_t|(std::)?size_t|(c10::|at::)?(Half|BFloat16|Float8\w*|complex<\w+>))[\s*&]*$"
)
"""A template argument that says nothing about what the kernel does."""
CONTAINER = re.compile(r"^(\w*Metadata|OpaqueType|Array|TensorInfo)$")
"""Neither do these."""
WRAPPER = re.compile(r"^(gpu_kernel_impl\w*|[AB]UnaryFunctor|BinaryFunctor|ReduceOp|func_wrapper_t)$")
"""The argument one level below says what is done."""
SAYS_NOTHING = ("Kernel", "Kernel2")
"""CUTLASS gives all of its kernels these names."""
ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\{anonymous\}::|<unnamed>::|_GLOBAL__N__\w+::")
RETURNS = re.compile(r"^(void |(std::)?enable_if<[^<>]*>::type )+")
"""Precedes the name of a function."""
CALLED = re.compile(r"^[\w:~ *&]*\w\(.*\)$")
AUTOGRAD = "autograd::engine::evaluate_function: "
BUILT_IN = "<built-in "
"""Python's functions, not C++."""
PYTHON_LINE = re.compile(r"^(?P<file>[^()]+\.py)\((?P<line>\d+)\): (?P<function>.+)$")
PLACE = re.compile(r"^(?P<place>[^:]+\.py:\d+)(?P<function> in .+)?$")
DEEPEST = 8
LONGEST = 4096
"""Only this many characters of a name are considered."""


def short_names(names: Iterable[str], columns: int) -> dict[str, str]:
    """Short names by name; all distinct, and none but a line of code longer than ``columns`` (at least 12)."""
    out: dict[str, str] = {}
    used: set[str] = set()
    met: dict[str, int] = {}
    for name in dict.fromkeys(names):
        short = short_name(name)
        text = fitted(short, columns)
        while text in used:
            number = met[short] = met.get(short, 1) + 1
            # After a line of code, a number in parentheses would look like another line.
            mark = f" #{number}" if PLACE.match(short) else f" ({number})"
            text = fitted(short, columns - len(mark)) + mark
        used.add(text)
        out[name] = text
    return out


def short_name(name: str) -> str:
    """The name without its dispensable parts; names that are not C++ are returned unchanged."""
    text = " ".join(name[:LONGEST].split())
    if text.startswith(BUILT_IN):
        return text
    if line := PYTHON_LINE.match(text):
        inside = "" if line["function"] == "<module>" else f" in {line['function']}"
        return f"{line['file']}:{line['line']}{inside}"
    if text.startswith(AUTOGRAD):
        return f"autograd: {text[len(AUTOGRAD) :]}"
    known = ANONYMOUS.sub("", text)
    if not ("<" in known and ">" in known) and not CALLED.match(known):
        return text
    base, arguments = _parted(RETURNS.sub("", known))
    inner = _telling(arguments, DEEPEST)
    if not inner:
        return base
    return inner if base in SAYS_NOTHING else f"{base}<{inner}>"


def fitted(text: str, columns: int) -> str:
    """The text with its middle cut out if it is too long; of a line of code, file name and line stay."""
    if len(text) <= columns:
        return text
    if place := PLACE.match(text):
        _, folder, name = place["place"].replace("\\", "/").rpartition("/")
        inside = f"…/{name}" if folder else name
        shorter = (f"{inside}{place['function'] or ''}", inside)
        return next((text for text in shorter if len(text) <= columns), name)
    tail = max(columns // 3, 1)
    return f"{text[: columns - 1 - tail]}…{text[len(text) - tail :]}"


def _parted(text: str) -> tuple[str, list[str]]:
    """The bare name and its template arguments."""
    at = min((place for place in (text.find("<"), text.find("(")) if place > 0), default=len(text))
    base = text[:at].strip().rpartition(" ")[2].rpartition("::")[2] or text[:at]
    if text[at : at + 1] != "<":
        return base, []
    arguments, depth, since = [], 0, at + 1
    for place in range(at, len(text)):
        letter = text[place]
        if letter in "<({[":
            depth += 1
        elif letter in ">)}]" and text[place - 1] != "-":
            depth -= 1
        if depth == 0 or (depth == 1 and letter == ","):
            arguments.append(text[since:place].strip())
            since = place + 1
        if depth == 0:
            break
    else:
        # Cut off: the last argument has no end.
        arguments.append(text[since:].strip())
    return base, arguments


def _telling(arguments: list[str], depth: int) -> str:
    for argument in arguments:
        if not argument or PLAIN.match(argument):
            continue
        base, inner = _parted(argument)
        if CONTAINER.match(base):
            continue
        return (_telling(inner, depth - 1) if depth and WRAPPER.match(base) else "") or base
    return ""
