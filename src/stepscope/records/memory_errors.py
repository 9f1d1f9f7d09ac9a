"""Which exceptions say that memory has run out."""

from __future__ import annotations

from typing import Literal

__all__ = ["memory_cause"]

DEVICE_MEMORY = ("outofmemoryerror", "out of memory", "cudaerrormemoryallocation", "cublas_status_alloc_failed")
HOST_MEMORY = ("defaultcpuallocator", "cannot allocate memory", "std::bad_alloc")
"""Texts that mean out of memory; the host's are checked first."""


def memory_cause(type_name: str, message: str) -> Literal["oom_host", "oom_cuda"] | None:
    """Which memory an exception says has run out."""
    text = f"{type_name} {message}".lower()
    if type_name == "MemoryError" or any(words in text for words in HOST_MEMORY):
        return "oom_host"
    return "oom_cuda" if any(words in text for words in DEVICE_MEMORY) else None
