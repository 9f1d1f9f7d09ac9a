"""The handshake of an agent and a hub: hello, challenge, join and welcome, each signed with the user's key.

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
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stepscope.errors import FrameError
from stepscope.wire.frames import HELLO_BYTES, JOIN_BYTES
from stepscope.wire.keys import sign, signed

__all__ = [
    "HELLO_PATH",
    "PROOF_HEADER",
    "Join",
    "Peer",
    "Positions",
    "Welcome",
    "peers_of",
    "positions_of",
    "read_challenge",
    "read_hello",
    "read_join",
    "read_welcome",
    "write_challenge",
    "write_hello",
    "write_join",
    "write_welcome",
]

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
    said = _object(body)
    nonce = said.get("nonce")
    if said.get("version") != VERSION:
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
    said = _object(body)
    if said.get("version") != VERSION:
        raise FrameError(f"the agent has a different version ({said.get('stepscope', 'unknown')})")
    texts: dict[str, Any] = {
        name: said.get(name) for name in ("run", "host", "spool", "nonce", "challenge", "stepscope")
    }
    if not all(isinstance(text, str) and len(text) <= _LONGEST_HOST for text in texts.values()):
        raise FrameError("an agent sent an invalid message")
    if not (_HEX.fullmatch(said["spool"]) and _HEX.fullmatch(said["nonce"])) or not isinstance(said.get("meta"), dict):
        raise FrameError("an agent sent an invalid message")
    numbers: dict[str, Any] = {name: _number(said.get(name)) for name in ("node", "nnodes", "probe_port")}
    if not 0 <= numbers["probe_port"] < 1 << 16:
        raise FrameError("an agent sent an invalid message")
    return Join(**texts, **numbers, meta=said["meta"])


def write_welcome(welcome: Welcome, nonce: str, key: bytes, certificate: bytes) -> tuple[bytes, str]:
    body = json.dumps({"version": VERSION, **asdict(welcome)}, separators=(",", ":")).encode()
    return body, sign(key, "welcome", nonce.encode(), body, certificate)


def read_welcome(body: bytes, proof: str, nonce: str, key: bytes, certificate: bytes) -> Welcome:
    """Raise FrameError if the hub does not have the key or the content is invalid."""
    if len(body) > _WELCOME_BYTES or not signed(key, proof, "welcome", nonce.encode(), body, certificate):
        raise FrameError("it does not have this node's key")
    said = _object(body)
    try:
        return Welcome(
            run=str(said["run"]),
            token=str(said["token"]),
            positions=positions_of(said["positions"]),
            probe_key=str(said["probe_key"]),
            next_s=float(said["next_s"]),
            peers=peers_of(said["peers"]),
            local=said["local"] is True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError("the hub sent an invalid answer") from error


def positions_of(said: Any) -> Positions:
    """Read positions from JSON; raise KeyError, TypeError or ValueError if they are invalid."""
    rings = {str(key): _number(seq) for key, seq in dict(said["rings"]).items()}
    return Positions(rings=rings, files={str(name): _number(at) for name, at in dict(said["files"]).items()})


def peers_of(said: Any) -> tuple[Peer, ...]:
    """Read peers from JSON; raise KeyError, TypeError or ValueError if they are invalid."""
    return tuple(
        Peer(node=_number(p["node"]), host=str(p["host"]), address=str(p["address"]), port=_number(p["port"]))
        for p in said
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError("the message is not valid JSON") from error
    if not isinstance(said, dict):
        raise FrameError("the message is not a JSON object")
    return said


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise FrameError("a number is invalid")
    return value
