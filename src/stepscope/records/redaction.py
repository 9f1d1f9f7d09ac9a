"""Keep secrets out of what is written down: values on a command line, variables of the environment.

Redaction works by name first (``--api-token VALUE``, ``db.password=VALUE``), then by the look of the value (a token of
a known make, a password inside an address).  What somebody prints into a log is not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["REDACTED", "kept_environment", "redact_command", "redact_text"]

REDACTED = "[redacted]"

ENV_FAMILIES = ("CUDA_", "GLOO_", "HIP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TORCHELASTIC_")
"""Settings of libraries, all of which can explain a slow run."""
_ENV_NAME = re.compile(
    r"(GROUP_|LOCAL_|ROLE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|SLURMD_NODENAME|SLURM_("
    r"ARRAY_(JOB|TASK)_ID|CLUSTER_NAME|CPUS_(ON_NODE|PER_TASK)|GPUS(_(ON|PER)_NODE|_PER_TASK)?"
    r"|JOB_(CPUS_PER_NODE|GPUS|ID|NAME|NODELIST|NUM_NODES|PARTITION|QOS)|LOCALID|MEM_PER_NODE|NNODES|NODEID|NODELIST"
    r"|NPROCS|NTASKS(_PER_NODE)?|PROCID|RESTART_COUNT|STEP_(ID|NODELIST|NUM_NODES|NUM_TASKS)|TASKS_PER_NODE"
    r"|TOPOLOGY_ADDR)"
)
"""Slurm also hands out tokens and passwords this way: only what is named here."""
_SECRET_WORD = re.compile(
    r"api_?key|auth|authorization|bearer|cookie|cred|creds|jwt|keys?|pass|pat|pw|pwd|sas|token"
    r"|.*(apikey|credential|passwd|password|passphrase|secret).*"
)
_VOCABULARY = re.compile(r"bos|cls|eos|image|mask|pad|sep|special|stop|unk")
"""``--pad-token`` names no secret."""
_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_OPTION = re.compile(r"(--?[A-Za-z][\w.-]*|[A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_IN_QUERY = re.compile(r"([?&;]([\w.-]+)=)[^&;\s]+")
_OF_A_KNOWN_MAKE = re.compile(
    r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w+/=.~-]{8,}")


def redact_command(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    secret_follows = False
    for word in words:
        option = _OPTION.fullmatch(word)
        if secret_follows and not _is_option(word):
            kept.append(REDACTED)
        elif option is not None and _is_secret(option[1]):
            kept.append(f"{option[1]}={REDACTED}")
        else:
            kept.append(redact_text(word))
        secret_follows = _is_option(word) and option is None and _is_secret(word)
    return kept


def redact_text(text: str) -> str:
    """What gives itself away by its look."""
    text = _IN_ADDRESS.sub(REDACTED, text)
    text = _IN_QUERY.sub(lambda found: found[1] + REDACTED if _is_secret(found[2]) else found[0], text)
    text = _BEARER.sub(lambda found: f"{found[1]} {REDACTED}", text)
    return _OF_A_KNOWN_MAKE.sub(REDACTED, text)


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the environment explains a run; never what looks like a secret."""
    return {
        name: redact_text(environ[name])
        for name in sorted(environ)
        if _ENV_NAME.fullmatch(name) or (name.startswith(ENV_FAMILIES) and not _is_secret(name))
    }


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()


def _is_secret(name: str) -> bool:
    words = [word.lower() for word in _NAME.findall(name)]
    if "token" in words and any(map(_VOCABULARY.fullmatch, words)):
        return False
    return any(map(_SECRET_WORD.fullmatch, [*words, "".join(words)]))
