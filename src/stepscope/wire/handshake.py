"""How an agent and a hub prove themselves: the user's key, and hello, challenge, join and welcome signed with it.

An agent says who it is and learns where to resume and which token to send frames with.

    agent → hub   POST /api/v1/hello            a nonce,             signed over the body and the hub's certificate
    hub → agent                                 a challenge,         signed over the nonce, the body, the certificate
    agent → hub   POST /api/v1/runs/RUN/join    JSON of ``Join``,    signed over the body and the hub's certificate
    hub → agent                                 JSON of ``Welcome``, signed over the nonce, the body, the certificate

All signatures are in the header ``X-Stepscope-Proof``. Each side signs over the certificate it sees (its SHA-256, or
nothing without TLS), so a man in the middle shows a different certificate and has no key. The first exchange contains
nothing about the run, not even its name: the hub proves that it has the key before the agent says what it runs. The hub
signs nothing for strangers and reads only the few bytes of a hello from them: a join carries the challenge as its
bearer token. A challenge is valid for one minute and only in the process that issued it, so a recorded join is useless
later.

The welcome says what the hub already has, so an agent stores no positions: if either side restarts, the agent joins
again and resumes from there. Version 1 had no hello. Hubs and agents of the two versions refuse each other, because the
first message of a version 1 agent is exactly what the hello protects.

*Why a protocol of our own.*  TLS has one for a shared key, but Python's ``ssl`` only since 3.13, and uvloop not at all.
Certificates for clients need an authority, and a file on each node that expires.  HTTP message signatures (RFC 9421) do
not cover the certificate, and their libraries would have to be loaded by every agent.  This is HMAC-SHA256 of the
standard library over the body, a nonce and the certificate.

The key is the secret that one user's nodes share: ``STEPSCOPE_KEY`` if set, or the file that ``STEPSCOPE_KEY_FILE``
names, which is never created, otherwise ``~/.config/stepscope/key``, which is created on first use and readable only by
its owner. With a home folder that all nodes share, there is nothing else to do; elsewhere, copy the file once or set a
variable. The key itself is never sent: it signs the handshake,
which hands out the run's own random tokens.

To change the key while jobs run, the file temporarily has two lines: the new key and the previous one (``rotate_key``,
``retire_key``). A hub rereads the file when it changes and accepts both keys; an agent reads it whenever it joins and
tries them in this order (``KeyRing``).
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepscope.errors import FrameError, UsageError
from stepscope.records.files import key_path, private_folder, write_private
from stepscope.records.paths import ENV_KEY, ENV_TEAM_KEY, ENV_TEAM_KEY_FILE
from stepscope.records.text import say
from stepscope.wire.frames import HELLO_BYTES, JOIN_BYTES

__all__ = [
    "ENV_KEY_FILE",
    "HELLO_PATH",
    "PROOF_HEADER",
    "Join",
    "KeyRing",
    "Peer",
    "Positions",
    "Welcome",
    "kept_secret",
    "load_keys",
    "peers_of",
    "positions_of",
    "read_challenge",
    "read_hello",
    "read_join",
    "read_welcome",
    "retire_key",
    "rotate_key",
    "sign",
    "signed",
    "team_environ",
    "write_challenge",
    "write_hello",
    "write_join",
    "write_welcome",
]

# -- key --------------------------------------------------------------------------------------------------------------

ENV_KEY_FILE = "STEPSCOPE_KEY_FILE"
SHORTEST = 16
_MOST_KEYS = 2
_REREAD_S = 1.0
_STOP_S = 1.0


def load_keys(environ: Mapping[str, str] | None = None) -> tuple[bytes, ...]:
    """Return the key to use, followed by the previous one if it is still accepted.

    Raise UsageError if there is no key and none can be created, or if others could have read it.
    """
    environ = os.environ if environ is None else environ
    if given := environ.get(ENV_KEY):
        if len(given) < SHORTEST:
            raise UsageError(f"{ENV_KEY} is too short for a secret: at least {SHORTEST} characters")
        return (_digest(given),)
    path = _key_file(environ)
    return tuple(map(_digest, _lines(path, kept_secret(path, "key", f"set {ENV_KEY}"))))


def team_environ(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Where the key of the team's hub is, for ``load_keys`` and ``KeyRing``: the user's own if no other is named."""
    if given := environ.get(ENV_TEAM_KEY):
        return {ENV_KEY: given}
    if named := environ.get(ENV_TEAM_KEY_FILE):
        return {ENV_KEY_FILE: named}
    return environ


def _key_file(environ: Mapping[str, str]) -> Path:
    """The file of the key; raise UsageError if the environment names a file that does not exist."""
    if not (named := environ.get(ENV_KEY_FILE)):
        return key_path(environ)
    if not Path(named).exists():
        raise UsageError(f"{ENV_KEY_FILE} names {named}, which does not exist")
    return Path(named)


def _say(text: str) -> None:
    with suppress(OSError):  # the output is closed, but the hub continues
        say(text)


class KeyRing:
    """The current keys, for long-lived processes.

    Calling it returns the keys as last read. Only the first call touches the file system (``load_keys``, UsageError).
    ``refresh`` rereads the file if it changed; between ``start`` and ``stop`` a thread does so once a second. If the
    file is missing, truncated or readable by others, the previous keys stay in use, no file is created, and the problem
    is reported once.
    """

    def __init__(self, environ: Mapping[str, str], *, tell: Callable[[str], None] = _say) -> None:
        self._environ = environ
        named = environ.get(ENV_KEY_FILE)
        self._path = None if environ.get(ENV_KEY) else Path(named) if named else key_path(environ)
        self._tell = tell
        self._seen: tuple[int, ...] = ()
        self._keys: tuple[bytes, ...] = ()
        self._reported = ""
        self._refreshing = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self) -> tuple[bytes, ...]:
        if not self._keys:
            load_keys(self._environ)  # creates the file if necessary; before that it has no state
            self._seen, self._keys = self._state(), load_keys(self._environ)
        return self._keys

    @property
    def behind_s(self) -> float:
        """How long a change to the file may go unnoticed while it is watched."""
        return 1.5 * _REREAD_S if self._thread is not None else 0.0

    def refresh(self) -> tuple[bytes, ...]:
        """Reread the file if it changed. May block for a while if the home folder is on a network file system."""
        self()
        with self._refreshing:
            state = self._state()
            if self._path is not None and state != self._seen:
                self._read_again(self._path)
            self._seen = state
        return self._keys

    def start(self) -> None:
        """Call ``refresh`` once a second in a thread, so that an event loop is not blocked."""
        if self._path is not None:
            self._thread = threading.Thread(target=self._watch, name="keys", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)  # do not wait longer: the file system may be unreachable

    def _watch(self) -> None:
        while not self._stopped.wait(_REREAD_S):
            self.refresh()

    def _read_again(self, path: Path) -> None:
        try:
            self._keys = tuple(map(_digest, _lines(path, _read(path, "key", whole=True))))
            self._reported = ""
        except (OSError, UsageError) as error:
            why = f"cannot read the key {path}: {error.strerror}" if isinstance(error, OSError) else str(error)
            if why != self._reported:
                self._reported = why
                self._tell(f"{why}; continuing with the previous key")

    def _state(self) -> tuple[int, ...]:
        """Return a value that differs if the file may have changed."""
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return (0,)
        return () if found is None else (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def rotate_key(environ: Mapping[str, str]) -> Path:
    """Put a new key before the present one and return the file's path. Raise UsageError on failure."""

    def changed(lines: list[str]) -> list[str]:
        if len(lines) >= _MOST_KEYS:
            raise UsageError("the old key is still accepted; remove it with `stepscope key retire`, then rotate again")
        return [secrets.token_hex(32), *lines]

    return _change(environ, changed)


def retire_key(environ: Mapping[str, str]) -> Path:
    """Keep only the newest key and return the file's path. Raise UsageError on failure."""

    def changed(lines: list[str]) -> list[str]:
        if len(lines) < _MOST_KEYS:
            raise UsageError("there is no old key to retire; `stepscope key rotate` creates a new one")
        return lines[:1]

    return _change(environ, changed)


def _change(environ: Mapping[str, str], changed: Callable[[list[str]], list[str]]) -> Path:
    if environ.get(ENV_KEY):
        raise UsageError(f"{ENV_KEY} is set, and a running job cannot reread it; only a key file can be changed")
    path = _key_file(environ)
    kept_secret(path, "key", "use a writable folder")
    path = path.resolve()  # keep a symbolic link
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"the key {path} is being changed by another command") from None
            except OSError:
                pass  # a file system without locks
            lines = changed(_lines(path, _read(path, "key")))
            write_private(path, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise UsageError(f"cannot write the key {path}: {error.strerror}") from error
    return path


def kept_secret(path: Path, what: str, instead: str) -> str:
    """Return the secret in a file that only its owner can read. Create it on first use; raise UsageError on failure.

    ``instead`` says what the user can do then.
    """
    try:
        return _read(path, what)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from error
    try:
        private_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(temporary, path)  # atomic; another node may have been faster
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        return _read(path, what)
    except OSError as error:
        raise UsageError(f"cannot create the {what} {path}: {error.strerror}; {instead} instead") from error


def sign(key: bytes, purpose: str, *parts: bytes) -> str:
    """Return a proof that its author has the key and signed exactly this."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for word in (purpose.encode(), *parts):
        mac.update(len(word).to_bytes(8, "little"))
        mac.update(word)
    return mac.hexdigest()


def signed(key: bytes, proof: str, purpose: str, *parts: bytes) -> bool:
    """Check a proof in constant time, whatever it contains."""
    return hmac.compare_digest(sign(key, purpose, *parts).encode(), proof.encode(errors="replace"))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _lines(path: Path, text: str) -> list[str]:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if len(lines) > _MOST_KEYS:
        raise UsageError(f"the key {path} has {len(lines)} lines; at most two are allowed, the new key and the old one")
    if any(len(line) < SHORTEST for line in lines):
        raise UsageError(f"a line of the key {path} is too short for a secret: at least {SHORTEST} characters")
    return lines


def _is_private(found: os.stat_result) -> bool:
    """Whether only we can read the file, or only root and a group that root chose.

    The second is how Kubernetes mounts a Secret for a user other than root: it belongs to root and the pod's group.
    """
    others = found.st_mode & 0o077
    return not others or (others == 0o040 and found.st_uid == 0 and os.geteuid() != 0)


def _read(path: Path, what: str, *, whole: bool = False) -> str:
    """Read a secret. ``whole``: another process may be writing it; require a line end as proof that it is complete."""
    if not _is_private(path.stat()):
        raise UsageError(f"other users can read the {what} {path}; `chmod 600` it, or remove it to create a new one")
    written = path.read_text(errors="replace")
    text = written.strip()
    if len(text) < SHORTEST:
        raise UsageError(f"the {what} {path} is empty or cut off; remove it to create a new one")
    if whole and not written.endswith("\n"):
        raise UsageError(f"the last line of the {what} {path} has no newline, so it may be cut off")
    return text


# -- handshake --------------------------------------------------------------------------------------------------------

PROOF_HEADER = "x-stepscope-proof"
HELLO_PATH = "/api/v1/hello"
VERSION = 2
_HEX = re.compile(r"[0-9a-f]{16,128}")
_CHALLENGE = re.compile(r"[0-9a-f.]{16,255}")
_LARGEST = (1 << 63) - 1
_LONGEST_HOST = 255
_WELCOME_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Join:
    run: str
    """The name requested with ``--name``."""
    node: int
    nnodes: int
    host: str
    spool: str
    """Random hexadecimal name of the sender's run directory."""
    nonce: str
    """Random hexadecimal; the welcome must be signed over it."""
    challenge: str = ""
    """The challenge from the hub's answer to our hello."""
    probe_port: int = 0
    """UDP port on which the agent answers probes; 0 if it does not."""
    stepscope: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``run.json`` that describe the node: command, python, platform, environment."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """What the hub already has from one spool."""

    rings: Mapping[str, int] = field(default_factory=dict)
    """The last sequence number by ring key."""
    files: Mapping[str, int] = field(default_factory=dict)
    """By name: the number of bytes for lines and logs, the crc32 for files that are sent whole."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    node: int
    host: str
    address: str
    port: int
    """Port for its probes."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    run: str
    """The actual name of the run."""
    token: str
    positions: Positions
    probe_key: str
    """Hexadecimal key that signs probes between agents."""
    next_s: float
    """How long to collect before the next frame."""
    peers: tuple[Peer, ...] = ()
    local: bool = False
    """The hub reads this spool itself, because it is the run directory: send no parts, only signs of life."""


def write_hello(nonce: str, key: bytes, certificate: bytes) -> tuple[bytes, str]:
    """Return the body and its proof."""
    body = json.dumps({"version": VERSION, "nonce": nonce}, separators=(",", ":")).encode()
    return body, sign(key, "hello", body, certificate)


def read_hello(body: bytes, proof: str, key: bytes, certificate: bytes) -> str | None:
    """Return the nonce, or None if the sender does not have the key. Raise FrameError if the content is invalid."""
    if len(body) > HELLO_BYTES or not signed(key, proof, "hello", body, certificate):
        return None
    message = _object(body)
    nonce = message.get("nonce")
    if message.get("version") != VERSION:
        raise FrameError("the agent has a different version; install the same Stepscope on all nodes")
    if not isinstance(nonce, str) or not _HEX.fullmatch(nonce):
        raise FrameError("an agent sent an invalid message")
    return nonce


def write_challenge(challenge: str, nonce: str, key: bytes, certificate: bytes) -> tuple[bytes, str]:
    body = json.dumps({"version": VERSION, "challenge": challenge}, separators=(",", ":")).encode()
    return body, sign(key, "challenge", nonce.encode(), body, certificate)


def read_challenge(body: bytes, proof: str, nonce: str, key: bytes, certificate: bytes) -> str:
    """Return the challenge. Raise FrameError if the hub does not have the key or the content is invalid."""
    if len(body) > HELLO_BYTES or not signed(key, proof, "challenge", nonce.encode(), body, certificate):
        raise FrameError("it does not have this node's key")
    challenge = _object(body).get("challenge")
    if not isinstance(challenge, str) or not _CHALLENGE.fullmatch(challenge):
        raise FrameError("the hub sent an invalid answer")
    return challenge


def write_join(join: Join, key: bytes, certificate: bytes) -> tuple[bytes, str]:
    """Return the body and its proof."""
    body = json.dumps({"version": VERSION, **asdict(join)}, separators=(",", ":")).encode()
    return body, sign(key, "join", body, certificate)


def read_join(body: bytes, proof: str, key: bytes, certificate: bytes) -> Join | None:
    """Return None if the sender does not have the key. Raise FrameError if the content is invalid."""
    if len(body) > JOIN_BYTES or not signed(key, proof, "join", body, certificate):
        return None
    message = _object(body)
    if message.get("version") != VERSION:
        raise FrameError(f"the agent has a different version ({message.get('stepscope', 'unknown')})")
    texts: dict[str, Any] = {
        name: message.get(name) for name in ("run", "host", "spool", "nonce", "challenge", "stepscope")
    }
    if not all(isinstance(text, str) and len(text) <= _LONGEST_HOST for text in texts.values()):
        raise FrameError("an agent sent an invalid message")
    if not (_HEX.fullmatch(message["spool"]) and _HEX.fullmatch(message["nonce"])) or not isinstance(
        message.get("meta"), dict
    ):
        raise FrameError("an agent sent an invalid message")
    numbers: dict[str, Any] = {name: _number(message.get(name)) for name in ("node", "nnodes", "probe_port")}
    if not 0 <= numbers["probe_port"] < 1 << 16:
        raise FrameError("an agent sent an invalid message")
    return Join(**texts, **numbers, meta=message["meta"])


def write_welcome(welcome: Welcome, nonce: str, key: bytes, certificate: bytes) -> tuple[bytes, str]:
    body = json.dumps({"version": VERSION, **asdict(welcome)}, separators=(",", ":")).encode()
    return body, sign(key, "welcome", nonce.encode(), body, certificate)


def read_welcome(body: bytes, proof: str, nonce: str, key: bytes, certificate: bytes) -> Welcome:
    """Raise FrameError if the hub does not have the key or the content is invalid."""
    if len(body) > _WELCOME_BYTES or not signed(key, proof, "welcome", nonce.encode(), body, certificate):
        raise FrameError("it does not have this node's key")
    message = _object(body)
    try:
        return Welcome(
            run=str(message["run"]),
            token=str(message["token"]),
            positions=positions_of(message["positions"]),
            probe_key=str(message["probe_key"]),
            next_s=float(message["next_s"]),
            peers=peers_of(message["peers"]),
            local=message["local"] is True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError("the hub sent an invalid answer") from error


def positions_of(message: Any) -> Positions:
    """Read positions from JSON; raise KeyError, TypeError or ValueError if they are invalid."""
    rings = {str(key): _number(seq) for key, seq in dict(message["rings"]).items()}
    return Positions(rings=rings, files={str(name): _number(at) for name, at in dict(message["files"]).items()})


def peers_of(message: Any) -> tuple[Peer, ...]:
    """Read peers from JSON; raise KeyError, TypeError or ValueError if they are invalid."""
    return tuple(
        Peer(node=_number(p["node"]), host=str(p["host"]), address=str(p["address"]), port=_number(p["port"]))
        for p in message
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError("the message is not valid JSON") from error
    if not isinstance(message, dict):
        raise FrameError("the message is not a JSON object")
    return message


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise FrameError("a number is invalid")
    return value
