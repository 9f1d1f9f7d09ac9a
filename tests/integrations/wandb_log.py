"""Files of W&B, decoded as what they are: LevelDB's log of protocol buffers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["histories", "summary_of", "wandb_records"]

BLOCK = 32_768
HEAD = struct.Struct("<IHB")


def wandb_records(data: bytes) -> Iterator[Any]:
    """Records of a LevelDB log: after the file's head of 7 bytes, pieces of 7 bytes head and data, in blocks."""
    from wandb.proto import wandb_internal_pb2

    at, parts = 7, []
    while at + HEAD.size <= len(data):
        if BLOCK - at % BLOCK < HEAD.size:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = HEAD.unpack_from(data, at)
        parts.append(data[at + HEAD.size : at + HEAD.size + size])
        at += HEAD.size + size
        if kind in (1, 4):  # whole, or the last piece
            yield wandb_internal_pb2.Record.FromString(b"".join(parts))
            parts = []


def histories(records: Sequence[Any]) -> list[dict[str, Any]]:
    """What was logged, call by call."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def summary_of(records: Sequence[Any]) -> dict[str, Any]:
    """The summary of the run after all its changes."""
    return {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
