"""The optional parts in C, which ``hatch_build.py`` builds where there is a compiler; all have an equal in Python."""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

__all__ = ["PURE", "native_part"]

PURE: Final = "STEPSCOPE_PURE_PYTHON"
"""Set to work without the parts in C even if they were built."""


def native_part(module: str) -> Any | None:
    """Import a part in C; None if it was not built or is switched off."""
    if os.environ.get(PURE):
        return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
