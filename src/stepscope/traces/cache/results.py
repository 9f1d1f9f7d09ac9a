"""What was found in a trace, as bytes and back: MessagePack with the types checked, arrays of numbers as they are.

The analyses of a million events take longer than a second look may, so the cache keeps their results too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from stepscope.traces.rank import RankAnalysis

__all__ = ["decode_analyses", "encode_analyses"]

ARRAY: Final = 1
NUMBERS: Final = "biuf"


def encode_analyses(analyses: Sequence[RankAnalysis]) -> bytes | None:
    """None where there is something in them that cannot be kept (a number of more than 64 bits)."""
    try:
        return msgspec.msgpack.encode(list(analyses), enc_hook=_encoded)
    except (OverflowError, UnicodeEncodeError):
        return None


def decode_analyses(data: bytes) -> list[RankAnalysis]:
    """ValueError or a MsgspecError where it is none."""
    return msgspec.msgpack.decode(data, type=list[RankAnalysis], dec_hook=_checked, ext_hook=_array)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
        about = f"{value.dtype.str} {' '.join(map(str, value.shape))}"
        return msgspec.msgpack.Ext(ARRAY, about.encode() + b"\0" + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} in the results of a trace")


def _array(code: int, data: memoryview) -> Any:
    about, _, values = bytes(data).partition(b"\0")
    kind, *shape = about.decode().split()
    if code != ARRAY or kind[1] not in NUMBERS:
        raise ValueError("no array")
    return np.frombuffer(values, np.dtype(kind)).reshape([int(length) for length in shape]).copy()


def _checked(wanted: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"no {wanted}")
    return value
