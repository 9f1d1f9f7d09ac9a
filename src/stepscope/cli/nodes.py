"""How many nodes a job has, which one this is, and where the first of them is to be found.  Pure.

Asked in this order, field by field: our own flags; the words of torchrun or of ``accelerate launch``, when the job is
started by one of them; torchrun's own variables (``PET_NNODES`` …, as Kubernetes operators set them); ``MASTER_ADDR``;
Slurm.  A job of one node is ``Nodes(count=1, …)``, whatever else was said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepscope.cli.slurm import SlurmStep
from stepscope.errors import UsageError
from stepscope.recorder.identity import is_launcher

__all__ = ["Nodes", "Said", "find_nodes", "said_by_environment", "said_by_words", "split_endpoint", "starts_ranks"]

_COUNT = re.compile(r"([1-9]\d{0,6})(?::([1-9]\d{0,6}))?")
_WITHOUT_VALUE = (
    *("--standalone", "--no-python", "--no_python", "--run-path", "--run_path"),
    *("--virtual-local-rank", "--virtual_local_rank", "--use-env", "--use_env"),
)
"""Of torchrun's options: all others are followed by a value."""
_MEANING = {
    "nnodes": "count",
    "node_rank": "rank",
    "master_addr": "address",
    "rdzv_endpoint": "endpoint",
    "rdzv_backend": "backend",
    "rdzv_id": "id",
    "num_machines": "count",
    "machine_rank": "rank",
    "main_process_ip": "address",
}
"""Options of torchrun and of accelerate."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    count: int = 1
    """The most, in an elastic job."""
    least: int = 1
    rank: int = 0
    address: str = ""
    """Of node 0; empty when nobody said, which is for node 0 itself to bear."""
    id: str = ""
    """What a launcher's rendezvous calls the job."""

    @property
    def several(self) -> bool:
        return self.count > 1


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one source said; empty: nothing."""

    count: str = ""
    rank: str = ""
    address: str = ""
    id: str = ""
    own: bool = True
    """Whether a launcher that is told no number takes this node for the first."""


def find_nodes(
    flags: Said,
    words: Sequence[str],
    environ: Mapping[str, str],
    slurm: SlurmStep | None,
    *,
    torchrun: bool = False,
) -> Nodes:
    """``torchrun``: we start one ourselves.  UsageError for what makes no sense, or leaves open which node this is."""
    launcher = starts_ranks(words)
    theirs = said_by_words(words) if launcher else Said()
    torchs = said_by_environment(environ) if launcher or torchrun else Said()
    count_text = flags.count or theirs.count or torchs.count
    # What Slurm allocated is of use only if the job is spread over all of it.
    step = slurm if slurm is not None and (not count_text or _span(count_text)[1] == slurm.nodes) else None
    if not count_text:
        count_text = str(step.nodes) if step is not None else "1"
    least, most = _span(count_text)
    if most == 1 and flags.rank not in ("", "0"):
        raise UsageError(f"--node-rank {flags.rank} of one node; say how many there are with --nnodes")
    if most == 1:
        return Nodes()
    rank_text = flags.rank or theirs.rank or torchs.rank or (str(step.node) if step is not None else "")
    if not rank_text and launcher and theirs.own and torchs.own:
        rank_text = "0"  # as torchrun has it
    if not rank_text:
        raise UsageError(
            f"a job of {count_text} nodes, and nothing says which of them this is; give --node-rank (0 on the first)"
        )
    if not (rank_text.isascii() and rank_text.isdigit() and int(rank_text) < most):
        raise UsageError(f"--node-rank {rank_text} of {most} nodes: it must be from 0 to {most - 1}")
    address = flags.address or theirs.address or torchs.address or environ.get("MASTER_ADDR", "")
    address = address or (step.address if step is not None else "")
    if int(rank_text) and not address:
        raise UsageError(f"node {rank_text} must be told where node 0 is: give --master-addr")
    return Nodes(count=most, least=least, rank=int(rank_text), address=address, id=theirs.id or torchs.id)


def starts_ranks(words: Sequence[str]) -> bool:
    """Whether the words after ``stepscope run`` start a launcher of ranks: torchrun, accelerate or the like."""
    if not words:
        return False
    python = re.fullmatch(r"python[\d.]*", os.path.basename(words[0]))  # noqa: PTH119 - a word, maybe no path
    return is_launcher(words if python else ["python", *words])


def said_by_words(words: Sequence[str]) -> Said:
    """Of the options ahead of the script; a word that begins otherwise, and belongs to no option, is the script."""
    at = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    found: dict[str, str] = {}
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--module", "--"):
        name, equals, value = words[at].partition("=")
        following = words[at + 1] if at + 1 < len(words) else "-"
        takes = not equals and name not in _WITHOUT_VALUE and not following.startswith("-")
        if takes and not following.endswith(".py"):
            value = following
            at += 1
        at += 1
        if meaning := _MEANING.get(name.lstrip("-").replace("-", "_")):
            found[meaning] = value
    return _said(found)


def said_by_environment(environ: Mapping[str, str]) -> Said:
    names = {f"PET_{option.upper()}": meaning for option, meaning in _MEANING.items()}
    return _said({meaning: environ[name] for name, meaning in names.items() if environ.get(name)})


def split_endpoint(endpoint: str) -> str:
    """The host of ``host:port``, ``[2001:db8::1]:29400`` or a bare one."""
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    host, colon, port = endpoint.rpartition(":")
    return host if colon and port.isdigit() and ":" not in host else endpoint


def _said(found: Mapping[str, str]) -> Said:
    backend = found.get("backend", "static")
    # An etcd stands anywhere; the other rendezvous are held by the first node.
    endpoint = "" if backend.startswith("etcd") else split_endpoint(found.get("endpoint", ""))
    count = found.get("count", "")
    return Said(
        count=count if _COUNT.fullmatch(count) else "",
        rank=found.get("rank", ""),
        address=endpoint or found.get("address", ""),
        id=found.get("id", ""),
        own=backend == "static",
    )


def _span(text: str) -> tuple[int, int]:
    """``4`` or, elastic, ``1:4``."""
    found = _COUNT.fullmatch(text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UsageError(f"--nnodes {text}: a number of nodes, or the least and the most (1:4)")
    return int(found[1]), int(found[2] or found[1])
