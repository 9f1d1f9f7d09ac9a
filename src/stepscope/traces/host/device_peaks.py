"""What devices can do at most, by their names: dense TFLOP/s as their makers publish them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Peak", "peak_of"]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """10¹² floating-point operations a second, without sparsity; None: it cannot, or nobody says."""

    fp32: float
    tf32: float | None
    half: float
    """FP16 and BF16, with sums in FP32."""
    fp8: float | None

    def tflops(self, dtype: str, *, tf32: bool = False) -> float | None:
        """``dtype`` as the profiler writes it: ``float``, ``c10::BFloat16``, ``c10::Half``, ``c10::Float8_e4m3fn``."""
        if "Float8" in dtype:
            return self.fp8
        if "Half" in dtype or "BFloat16" in dtype:
            return self.half
        return (self.tf32 if tf32 and self.tf32 else self.fp32) if dtype == "float" else None


PEAKS: Final = (
    # The first pattern that is found in the name counts.
    (r"B300|GB300", (75.0, 1125.0, 2250.0, 4500.0)),
    (r"GB200", (80.0, 1250.0, 2500.0, 5000.0)),
    (r"B200", (75.0, 1125.0, 2250.0, 4500.0)),
    (r"H100 NVL", (60.0, 417.5, 835.5, 1671.0)),
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
    # Of these two a device of the runtime is one of two dies.
    (r"MI250X", (23.9, None, 191.5, None)),
    (r"MI250", (22.6, None, 181.0, None)),
    (r"MI210", (22.6, None, 181.0, None)),
)


def peak_of(name: str | None) -> Peak | None:
    for pattern, (fp32, tf32, half, fp8) in PEAKS:
        if name and re.search(pattern, name, re.IGNORECASE):
            return Peak(fp32=fp32, tf32=tf32, half=half, fp8=fp8)
    return None
