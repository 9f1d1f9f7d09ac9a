"""Copies of documents that do not reveal where, by whom and on what a run was made.

    redactor = Redactor(meta, summary)          # learns hosts, users and values from these
    redactor.document(summary)                  # the same document, safe to send

Host names become ``host-1``, ``host-2`` … and IP addresses ``address-1`` …, consistently, so that a report still says
which machine is slow.  Absolute paths keep only the file name (in ``site-packages``, the part from there on).
Command lines keep programs, scripts and option names.  The environment, the working directory, URLs and git remotes
are removed.

Other text written by people is not recognized: names of runs, classes and phases, lines of source, the rest of an
exception's message.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from posixpath import basename
from typing import Any

from stepscope.records.redaction import REDACTED, redact_text
from stepscope.records.steps import BUILTIN_PHASES

__all__ = ["Redactor"]

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
_PLAIN_WORD = re.compile(r"[a-z_]+|[-+.\d]+(?:e[-+]?\d+)?")
_IN_PATH = r"[^\s\"'`<>|:,;()\[\]{}]"
_PATH = rf"(?<![\w.:/~…-])~?(?:/{_IN_PATH}+)+/?"
_QUOTED_PATH = re.compile(r"(?<=File \")/[^\"\n]+(?=\")")
_PUBLIC_PATH = re.compile(
    r"/dev/shm/?|/dev/(?:null|zero|nvidia\w*|infiniband)|/(?:proc|sys)(?:/.*)?|/(?:metrics|healthz)"
)
_LIBRARY = re.compile(r".*/(?=(?:site|dist)-packages/.)")
_FILE = re.compile(r".*\.[A-Za-z]\w{0,9}")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>]+|\b[\w.-]+@[\w.-]+\.[\w.-]+(?::[\w./~-]+)?|\bgit@[\w.-]+:\S+")
_IP4 = r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)"
_IP6 = r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?:%\w+)?(?![\w:])"
_IP = re.compile(f"{_IP4}|{_IP6}")
_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")


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
        text = _URL.sub("[address]", text)
        text = _QUOTED_PATH.sub(lambda found: self._path(found[0]), text)
        text = self._paths.sub(lambda found: self._path(found[0]), text)
        text = _UUID.sub(lambda found: self._named("GPU", found[0]), text)
        text = _IP.sub(self._ip, text)
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
        if not name or name == "localhost" or name in self._names or _IP.fullmatch(name):
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
        if len(value) >= _SHORTEST_VALUE and not _PLAIN_WORD.fullmatch(value) and value not in self._names:
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
        if _PUBLIC_PATH.fullmatch(path):
            return path
        trimmed = path.rstrip("/.")
        if trimmed in self._folders or not _FILE.fullmatch(basename(trimmed)):
            return "[path]"
        library = _LIBRARY.sub("…/", path)
        return library if library != path else f"…/{basename(path)}"

    def _ip(self, found: re.Match[str]) -> str:
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
