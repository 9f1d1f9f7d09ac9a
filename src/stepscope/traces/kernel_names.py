"""What a kernel does, by its name: NCCL, RCCL, oneCCL and their kin communicate; everything else computes."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_communication"]

COMMUNICATION: Final = re.compile(
    r"^(void\s+)?(nccl|rccl|mscclpp|msccl|oneccl|ccl)(Dev)?Kernel"
    r"|^(void\s+)?(nccl|rccl|mscclpp|msccl)[A-Z_:]"
    r"|^(void\s+)?nvshmem|one_shot_all_reduce|two_shot_all_reduce|multimem_|deep_ep::|^(void\s+)?c10d::|symm_mem",
    re.IGNORECASE,
)


def is_communication(name: str) -> bool:
    return COMMUNICATION.search(name) is not None
