"""How much a step does, as a sampled step showed it; names of rates that scripts report; the peak rates of devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["RATES", "WORK_KINDS", "Peak", "Work", "named_rates", "peak_of", "read_work"]


# -- Work of a step ---------------------------------------------------------------------------------------------------

LARGEST: Final = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one rank did in one step, with all its micro-batches.  None: not known."""

    flops: int | None = None
    """Floating-point operations of forward and backward: matrix products, convolutions and attention, without what is
    computed again."""
    samples: int | None = None
    """First dimension of the model's first input; the second where its layers have ``batch_first=False`` and get that
    input in the same order."""
    tokens: int | None = None
    """Samples times the length of the sequences, where that input is a matrix of integers."""

    def plain(self) -> dict[str, int]:
        """The form that ``read_work`` reads."""
        return {name: value for name in WORK_KINDS if (value := getattr(self, name)) is not None}


WORK_KINDS: Final = ("flops", "samples", "tokens")


def read_work(raw: Any) -> Work | None:
    """What ``work`` of a sample says; None if nothing in it is valid.  Zero is not: nothing was counted."""
    if not isinstance(raw, Mapping):
        return None
    known = {name: raw[name] for name in WORK_KINDS if type(raw.get(name)) is int and 0 < raw[name] <= LARGEST}
    return Work(**known) if known else None


# -- Rates that the script reports itself -----------------------------------------------------------------------------

RATES: Final = ("samples_per_second", "tokens_per_second", "tflops", "mfu")
_PER_SECOND = r"(_?per_?s(ec(ond)?)?|_?p(er)?_?s|/s(ec(ond)?)?|_s)"
_NAMES: Final = (
    (rf"(samples?|images?|imgs?|examples?|sequences?|seqs?){_PER_SECOND}", ("samples_per_second",)),
    (rf"(tokens?|toks?|words?){_PER_SECOND}|tps|tgs|wps", ("tokens_per_second",)),
    (r"(t|g|p)?flop/?s?(_?per_?s(ec(ond)?)?)?", ("tflops",)),
    (r"mfu|hfu", ("mfu",)),
    (r"throughput", ("samples_per_second", "tokens_per_second")),
)
"""The last word says neither of which."""


def named_rates(name: str) -> tuple[str, ...]:
    """The rates that a value with this name may be: ``tokens_per_second`` for ``train/tokens_per_sec``."""
    lower = name.lower().replace(" ", "_").replace("-", "_")
    for pattern, rates in _NAMES:
        if re.search(rf"(?<![a-z])(?:{pattern})(?![a-z])", lower):
            return rates
    return ()


# -- Device peaks -----------------------------------------------------------------------------------------------------
# Dense TFLOP/s by device name, as published by the vendors.


@dataclass(frozen=True, kw_only=True)
class Peak:
    """10¹² floating-point operations per second, without sparsity; None: not supported or not published."""

    fp32: float
    tf32: float | None
    half: float
    """FP16 and BF16, with FP32 accumulation."""
    fp8: float | None

    def tflops(self, dtype: str, *, tf32: bool = False) -> float | None:
        """Return the rate for a data type as the profiler writes it.

        Examples: ``float``, ``c10::BFloat16``, ``c10::Half``, ``c10::Float8_e4m3fn``.
        """
        if "Float8" in dtype:
            return self.fp8
        if "Half" in dtype or "BFloat16" in dtype:
            return self.half
        return (self.tf32 if tf32 and self.tf32 else self.fp32) if dtype == "float" else None


PEAKS: Final = (
    # the first pattern found in the name counts
    (r"B300|GB300", (75.0, 1125.0, 2250.0, 4500.0)),
    (r"GB200", (80.0, 1250.0, 2500.0, 5000.0)),
    (r"B200", (75.0, 1125.0, 2250.0, 4500.0)),
    (r"H[12]00 NVL", (60.0, 417.5, 835.5, 1671.0)),
    (r"H100.*PCIe", (51.2, 378.0, 756.0, 1513.0)),
    (r"H100|H800|H200|GH200", (66.9, 494.7, 989.4, 1978.9)),
    (r"\bH20\b", (44.0, 74.0, 148.0, 296.0)),
    (r"A100|A800", (19.5, 156.0, 312.0, None)),
    (r"\bA30\b", (10.3, 82.0, 165.0, None)),
    (r"\bA40\b", (37.4, 74.8, 149.7, None)),
    (r"\bA10G?\b", (31.2, 62.5, 125.0, None)),
    (r"RTX A6000", (38.7, 77.4, 154.8, None)),
    (r"RTX 6000 Ada", (91.1, 182.1, 364.2, 728.5)),
    (r"V100.*PCIE", (14.0, None, 112.0, None)),
    (r"V100", (15.7, None, 125.0, None)),
    (r"\bL40S\b", (91.6, 183.0, 362.0, 733.0)),
    (r"\bL40\b", (90.5, 90.5, 181.0, 362.0)),
    (r"\bL4\b", (30.3, 60.0, 121.0, 242.0)),
    (r"\bT4\b", (8.1, None, 65.0, None)),
    (r"RTX 5090", (104.8, 104.8, 209.5, 419.0)),
    (r"RTX 4090", (82.6, 82.6, 165.2, 330.3)),
    (r"RTX 3090", (35.6, 35.6, 71.0, None)),
    (r"MI355X", (157.3, None, 2516.6, 5033.2)),
    (r"MI325X|MI300X", (163.4, 653.7, 1307.4, 2614.9)),
    # for these two, the runtime's device is one of two dies
    (r"MI250X", (23.9, None, 191.5, None)),
    (r"MI250", (22.6, None, 181.0, None)),
    (r"MI210", (22.6, None, 181.0, None)),
)


def peak_of(name: str | None) -> Peak | None:
    """None: not known, or a part of a device (MIG), which has a part of the peak."""
    if name and " MIG " in name:
        return None
    for pattern, (fp32, tf32, half, fp8) in PEAKS:
        if name and re.search(pattern, name, re.IGNORECASE):
            return Peak(fp32=fp32, tf32=tf32, half=half, fp8=fp8)
    return None
