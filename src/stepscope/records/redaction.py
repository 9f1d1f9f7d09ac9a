"""Redaction: keep secrets out of what is recorded, and names out of what leaves a run.

Secrets are values on a command line and environment variables.  They are recognized by name first (``--api-token
VALUE``, ``-p VALUE``, ``db.password=VALUE``), then by the form of the value (a token of a known vendor, a password
inside a URL).  Rather too much is hidden than too little: ``srun -p PARTITION`` is, too.
Text printed to a log is not checked.

Every start of a run needs this, so patterns are compiled when a word may match them: all of them take 20 ms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from posixpath import basename
from typing import Any

from stepscope.records.steps import BUILTIN_PHASES

__all__ = ["REDACTED", "Redactor", "kept_environment", "redact_command", "redact_text"]


# -- Secrets ----------------------------------------------------------------------------------------------------------

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


# -- Documents that leave a run ---------------------------------------------------------------------------------------
# Redacts documents so that they do not reveal where, by whom and on what a run was made.
#
#     redactor = Redactor(meta, summary)          # learns hosts, users and values from these
#     redactor.document(summary)                  # the same document, safe to send
#
# Host names become ``host-1``, ``host-2`` … and IP addresses ``address-1`` …, consistently, so that a report still says
# which machine is slow.  Absolute paths keep only the file name (in ``site-packages``, the part from there on).
# Command lines keep programs, scripts and option names.  The environment, the working directory, URLs and git remotes
# are removed.
#
# Other text written by people is not recognized: names of runs, classes and phases, lines of source, the rest of an
# exception's message.

_HOST_KEYS = frozenset({"host", "hosts", "node", "nodes", "peer"})
_REMOVED = frozenset({"cwd", "session", "spool", "place", "launcher", "git", "commit", "branch", "executable"})
_STRUCTURE = frozenset(
    {"backend", "cause", "device", "dtype", "event", "kind", "live_phase", "order", "phase", "severity", "stat"}
    | {"state", "status", "status_severity", "status_text", "unit"}
)
"""Keys whose values are our own words, by which readers of a document distinguish its parts."""
_WORDS = frozenset(
    {"host", "hosts", "node", "nodes", "rank", "ranks", "gpu", "cpu", "cuda", "process", "probe", "run", "runs", "name"}
    | {"step", "steps", "user", "path", "root", "main", "local", "localhost", "train", "python", "torch", "script"}
    | set(BUILTIN_PHASES)
)
"""Never replaced inside other text: a host with such a name would garble our sentences, and reveals nothing."""
_SHORTEST_VALUE = 6
_PLAIN_WORD = r"[a-z_]+|[-+.\d]+(?:e[-+]?\d+)?"
_IN_PATH = r"[^\s\"'`<>|:,;()\[\]{}]"
_PATH = rf"(?<![\w.:/~…-])~?(?:/{_IN_PATH}+)+/?"
_QUOTED_PATH = r"(?<=File \")/[^\"\n]+(?=\")"
_PUBLIC_PATH = r"/dev/shm/?|/dev/(?:null|zero|nvidia\w*|infiniband)|/(?:proc|sys)(?:/.*)?|/(?:metrics|healthz)"
_LIBRARY = r".*/(?=(?:site|dist)-packages/.)"
_FILE = r".*\.[A-Za-z]\w{0,9}"
_URL = r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>]+|\b[\w.-]+@[\w.-]+\.[\w.-]+(?::[\w./~-]+)?|\bgit@[\w.-]+:\S+"
_IP4 = r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)"
_IP6 = r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?:%\w+)?(?![\w:])"
_IP = f"{_IP4}|{_IP6}"
_UUID = r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"


class Redactor:
    """Knows what to hide in one run, and gives each thing one name for the redactor's lifetime."""

    def __init__(self, *documents: Any) -> None:
        """``documents``: everything that says who and where; ``run.json`` first."""
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._folders: set[str] = set()
        for document in documents:
            self._learn(document)
        self._compile()

    def document(self, value: Any, key: str = "") -> Any:
        """A JSON document without what must be hidden; ``key``: the key it is found under."""
        if isinstance(value, str):
            return value if key in _STRUCTURE else self._whole(value, key)
        if isinstance(value, Mapping):
            return {self._key(name): self._field(name, inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.document(inner, key) for inner in value]
        return value

    def text(self, text: str) -> str:
        if not text or text in _WORDS:
            return text
        text = redact_text(text)
        text = re.sub(_URL, "[address]", text)
        text = re.sub(_QUOTED_PATH, lambda found: self._path(found[0]), text)
        text = self._paths.sub(lambda found: self._path(found[0]), text)
        text = re.sub(_UUID, lambda found: self._named("GPU", found[0]), text)
        text = re.sub(_IP, self._ip, text)
        return self._known.sub(lambda found: self._names[found[0]], text) if self._known is not None else text

    def command(self, words: Sequence[str]) -> list[str]:
        """Programs, scripts, modules and option names; everything else is replaced by a placeholder."""
        return [shown for shown, _ in self._command(words)]

    # -- What to hide -------------------------------------------------------------------------------------------------

    def _learn(self, value: Any, key: str = "") -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                self._learn_field(str(name), inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                if not isinstance(inner, int | float | None):
                    self._learn(inner, key)
        elif isinstance(value, str) and key in _HOST_KEYS:
            self._learn_host(value)

    def _learn_field(self, name: str, value: Any) -> None:
        if name == "environment" and isinstance(value, Mapping):
            for variable, content in value.items():
                if variable in ("MASTER_ADDR", "SLURMD_NODENAME"):
                    self._learn_host(str(content))
                self._learn_value(str(content))
        elif name == "command" and isinstance(value, list | tuple):
            for _, hidden in self._command([str(word) for word in value]):
                self._learn_value(hidden)
        elif name in ("cwd", "path", "session", "executable") and isinstance(value, str) and value.startswith("/"):
            parts = value.rstrip("/").split("/")
            self._folders |= {
                "/".join(parts[: end + 1]) for end in range(1, len(parts) if name != "executable" else -1)
            }
            if len(parts) > 2 and parts[1] in ("home", "Users"):
                self._learn_user(parts[2])
        elif name == "user" and isinstance(value, str):
            self._learn_user(value)
        self._learn(value, name)

    def _learn_host(self, name: str) -> None:
        if not name or name == "localhost" or name in self._names or re.fullmatch(_IP, name):
            return
        short, _, domain = name.partition(".")
        self._names[name] = self._names.get(short) or self._next("host")
        self._names.setdefault(short, self._names[name])
        if domain:
            self._names.setdefault(domain, "domain")

    def _learn_user(self, name: str) -> None:
        if name and name not in self._names:
            self._names[name] = self._next("user")

    def _learn_value(self, value: str) -> None:
        if len(value) >= _SHORTEST_VALUE and not re.fullmatch(_PLAIN_WORD, value) and value not in self._names:
            self._names[value] = REDACTED

    def _compile(self) -> None:
        """Longest first: a name may be the start of another."""
        known = [name for name in self._names if name not in _WORDS and not name.isdigit() and len(name) > 1]
        either = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
        self._known = re.compile(rf"(?<![A-Za-z0-9])(?:{either})(?![A-Za-z0-9])") if known else None
        folders = "|".join(re.escape(folder) for folder in sorted(self._folders, key=len, reverse=True))
        below = rf"(?:{folders})(?:/{_IN_PATH}+)*/?(?![\w-])|" if folders else ""
        self._paths = re.compile(below + _PATH)

    # -- Replacement --------------------------------------------------------------------------------------------------

    def _field(self, name: str, value: Any) -> Any:
        if name == "environment":
            return {}
        if name in _REMOVED:
            return None
        if name == "command" and isinstance(value, list | tuple):
            return self.command([str(word) for word in value])
        return self.document(value, name)

    def _key(self, name: Any) -> Any:
        return self.text(name) if isinstance(name, str) else name

    def _whole(self, value: str, key: str) -> str:
        """The value of a key that says what it is, or a text."""
        if key == "user" or key in _HOST_KEYS:
            return self._names.get(value) or self.text(value)
        return self.text(value)

    def _command(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        """For each word, what is shown of it and what is hidden."""
        module = False
        for place, word in enumerate(words):
            option, equals, value = word.partition("=")
            name = basename(word)
            if word.startswith("-") and not word[1:2].isdigit():
                yield (f"{option}={REDACTED}", value) if equals else (word, "")
            elif module:
                yield word, ""
            elif (
                place == 0 or name.endswith((".py", ".sh")) or name in ("torchrun", "accelerate", "deepspeed", "launch")
            ):
                yield (f"…/{name}" if word.startswith("/") else name), ""
            else:
                yield REDACTED, word
            module = word == "-m"

    def _path(self, path: str) -> str:
        if re.fullmatch(_PUBLIC_PATH, path):
            return path
        trimmed = path.rstrip("/.")
        if trimmed in self._folders or not re.fullmatch(_FILE, basename(trimmed)):
            return "[path]"
        library = re.sub(_LIBRARY, "…/", path)
        return library if library != path else f"…/{basename(path)}"

    def _ip(self, found: re.Match[str]) -> str:
        import ipaddress

        try:
            known = ipaddress.ip_address(found[0].partition("%")[0])
        except ValueError:
            return found[0]  # a time of day, a version, a slice
        return found[0] if known.is_loopback or known.is_unspecified else self._named("address", found[0])

    def _named(self, kind: str, name: str) -> str:
        if name not in self._names:
            self._names[name] = self._next(kind)
        return self._names[name]

    def _next(self, kind: str) -> str:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}-{self._counts[kind]}"
