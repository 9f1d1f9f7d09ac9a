"""Redaction: keep secrets out of what is recorded.  Names are kept out of what leaves a run (``redacted_copy``).

Secrets are values on a command line and environment variables.  They are recognized by name first (``--api-token
VALUE``, ``-p VALUE``, ``db.password=VALUE``), then by the form of the value (a token of a known vendor, a password
inside a URL).  Rather too much is hidden than too little: ``srun -p PARTITION`` is, too.
Text printed to a log is not checked.

Every start of a run needs this, so patterns are compiled when a word may match them: all of them take 20 ms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["REDACTED", "kept_environment", "redact_command", "redact_text"]

REDACTED = "[redacted]"

ENV_FAMILIES = ("CUDA_", "GLOO_", "HIP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TORCHELASTIC_")
"""Settings of libraries, all of which can explain a slow run."""
_ENV_NAMES = frozenset(
    {"RANK", "GROUP_RANK", "LOCAL_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"SLURMD_NODENAME"}
)
_OF_SLURM = "SLURM_"
_SLURM_NAME = (
    r"SLURM_("
    r"ARRAY_(JOB|TASK)_ID|CLUSTER_NAME|CPUS_(ON_NODE|PER_TASK)|GPUS(_(ON|PER)_NODE|_PER_TASK)?"
    r"|JOB_(CPUS_PER_NODE|GPUS|ID|NAME|NODELIST|NUM_NODES|PARTITION|QOS)|LOCALID|MEM_PER_NODE|NNODES|NODEID|NODELIST"
    r"|NPROCS|NTASKS(_PER_NODE)?|PROCID|RESTART_COUNT|STEP_(ID|NODELIST|NUM_NODES|NUM_TASKS)|TASKS_PER_NODE"
    r"|TOPOLOGY_ADDR)|SLURM_CONTAINER|STEPSCOPE_IMAGE|(APPTAINER|SINGULARITY)_CONTAINER|NVIDIA_(BUILD_ID|PYTORCH_VERSION)"
)
"""Only these: Slurm also passes tokens and passwords in variables."""
_SECRET_WORDS = frozenset(
    {"api_key", "apikey", "auth", "authorization", "bearer", "cookie", "cred", "creds", "jwt", "key", "keys", "pass"}
    | {"pat", "pw", "pwd", "sas", "token"}
)
_SECRET_PARTS = ("apikey", "credential", "passwd", "password", "passphrase", "secret")
_VOCABULARY = frozenset({"bos", "cls", "eos", "image", "mask", "pad", "sep", "special", "stop", "unk"})
"""``--pad-token`` is not a secret."""
_NAME = r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+"
_OPTION = r"(?s)(--?[A-Za-z][\w.-]*|[+~]*[A-Za-z_][\w.@/-]*)=(.*)"
_ATTACHED = r"-p(?=.*[^a-z_-])[^=]+"
"""``-pVALUE``, as of mysql; ``-print`` is not one."""
_IN_SCRIPT = r"(?<![\w-])(--?[A-Za-z][\w.-]*)(\s+)(\"[^\"]*\"|'[^']*'|[^\s-]\S*)"
"""An option inside one word: ``bash -c "train.py --password VALUE"``."""
_IN_VALUE = (
    r"(?<![\w/])([A-Za-z_][\w.-]*)([\"']?\s*[=:]\s*(?!//)(?:(?i:bearer|basic)\s+)?)"
    r"(\"[^\"]*\"|'[^']*'|[^\s\"',;&(){}\[\]]+)"
)
"""A name and its value inside one word: of JSON, a header, a dictionary of hydra, or a script."""
_IN_ADDRESS = r"(?<=://)[^/\s@]+(?=@)"
_IN_QUERY = r"([?&;]([\w.-]+)=)[^&;\s]+"
_KNOWN_MAKES = ("hf_", "sk-", "gh", "github_pat_", "glpat-", "AKIA", "xox", "eyJ")
_OF_A_KNOWN_MAKE = (
    r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_BEARER = r"(?i)\b(bearer|basic)\s+[\w+/=.~-]{8,}"


def redact_command(words: Sequence[str]) -> list[str]:
    shown: list[str] = []
    before = ""
    for word in words:
        secret = _is_option(before) and "=" not in before and _is_secret(before)
        if secret and (not _is_option(word) or (word[1] != "-" and len(word) > len("-x"))):
            shown.append(REDACTED)
        elif before == "-u" and ":" in word:  # curl's user and password
            shown.append(f"{word.partition(':')[0]}:{REDACTED}")
        else:
            shown.append(_redact_word(word))
        before = "" if shown[-1] == REDACTED else word
    return shown


def _redact_word(word: str) -> str:
    option = re.fullmatch(_OPTION, word) if "=" in word else None
    if option is not None:
        return f"{option[1]}={REDACTED if _is_secret(option[1]) else _redact_word(option[2])}"
    if word.startswith("-p") and re.fullmatch(_ATTACHED, word):
        return f"-p{REDACTED}"
    word = redact_text(word)
    if any(map(str.isspace, word)):
        word = re.sub(_IN_SCRIPT, _hide_value, word)
    return re.sub(_IN_VALUE, _hide_value, word) if "=" in word or ":" in word else word


def _hide_value(found: re.Match[str]) -> str:
    return found[1] + found[2] + REDACTED if _is_secret(found[1]) else found[0]


def redact_text(text: str) -> str:
    """Redact what can be recognized by its form."""
    if "://" in text:
        text = re.sub(_IN_ADDRESS, REDACTED, text)
    if "=" in text:
        text = re.sub(_IN_QUERY, lambda found: found[1] + REDACTED if _is_secret(found[2]) else found[0], text)
    if any(map(str.isspace, text)):
        text = re.sub(_BEARER, lambda found: f"{found[1]} {REDACTED}", text)
    return re.sub(_OF_A_KNOWN_MAKE, REDACTED, text) if any(mark in text for mark in _KNOWN_MAKES) else text


def kept_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of the environment that explains a run, without anything that looks like a secret."""
    return {
        name: redact_text(environ[name])
        for name in sorted(environ)
        if name in _ENV_NAMES
        or (name.startswith(_OF_SLURM) and re.fullmatch(_SLURM_NAME, name))
        or (name.startswith(ENV_FAMILIES) and not _is_secret(name))
    }


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()


def _is_secret(name: str) -> bool:
    if name == "-p":
        return True
    words = [word.lower() for word in re.findall(_NAME, name)]
    if "token" in words and not _VOCABULARY.isdisjoint(words):
        return False
    words.append("".join(words))
    return any(word in _SECRET_WORDS or any(part in word for part in _SECRET_PARTS) for word in words)
