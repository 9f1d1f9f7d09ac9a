"""How torch spells operations, peers and lists of ranks, and one spelling for each.  Pure."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["MAX_RANK", "operation_name", "peers_of", "rank_or", "ranks_of"]

MAX_RANK = 1 << 17
"""No job is that large; ranks have no gaps, so whoever claims one of a billion would have a billion looked for."""

SAME = {
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_coalesced": "all_gather",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allreduce_sparse": "all_reduce",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
    "all_reduce_barrier": "barrier",
    "allreduce_barrier": "barrier",
}

_SEND = re.compile(r"send (\d{1,8})->(\d{1,8})")
_RECV = re.compile(r"recv (\d{1,8})<-(\d{1,8})")
_NUMBER = re.compile(r"\d{1,9}")


def operation_name(wording: str) -> tuple[str, str]:
    """``nccl:_all_gather_base`` → ``nccl``, ``all_gather``."""
    backend, colon, name = wording.partition(":")
    if not colon:
        backend, name = "", wording
    word = name.split(" ")[0].lower()
    return backend[:32].lower(), SAME.get(word, word)[:128] or "unknown"


def peers_of(wording: str) -> tuple[int, int, bool] | None:
    """Of a send or recv: the sender, the receiver, both by their place in the group, and whether this is the send."""
    name = wording.rpartition(":")[2]
    if sent := _SEND.fullmatch(name):
        return int(sent[1]), int(sent[2]), True
    if received := _RECV.fullmatch(name):
        return int(received[2]), int(received[1]), False
    return None


def ranks_of(value: Any) -> tuple[int, ...]:
    """``"[0, 1, 2]"``, or a list of them; nothing for anything else."""
    if isinstance(value, str):
        value = [int(number) for number in _NUMBER.findall(value[: 16 * MAX_RANK])]
    if not isinstance(value, list | tuple) or len(value) > MAX_RANK:
        return ()
    ranks = [rank for rank in value if type(rank) is int and 0 <= rank < MAX_RANK]
    return tuple(dict.fromkeys(ranks)) if len(ranks) == len(value) else ()


def rank_or(number: int, default: int) -> int:
    return number if 0 <= number < MAX_RANK else default
