"""The handshake of an agent and a hub: hello, challenge, join and welcome, each signed with the user's key.

How an agent joins a run's hub: who it is, where it left off, and the token it may send frames with.

    agent → hub   POST /api/v1/hello            a nonce,             signed over the body and the hub's certificate
    hub → agent                                 a challenge,         signed over the nonce, the body, the certificate
    agent → hub   POST /api/v1/runs/RUN/join    JSON of ``Join``,    signed over the body and the hub's certificate
    hub → agent                                 JSON of ``Welcome``, signed over the nonce, the body, the certificate

All signatures stand in the header ``X-Stepscope-Proof``.  The certificate (its SHA-256, or nothing without TLS) is the
one that each side sees: one who sits in between has another, and no key.  The first exchange has nothing of the run in
it, not even its name: before the agent says what it runs, the hub has proved that it has the key.  And the hub signs
nothing for strangers, and reads no more than the few bytes of a hello from them: the join brings the challenge along as
its bearer token.  A challenge holds for a minute, and only at the process that gave it, so that a join that somebody
recorded on the way is worth nothing later.

The hub's welcome says what it already has, so an agent keeps no account of its own: after a restart of either it joins
again and goes on from there.  Version 1 had no hello.  Hubs and agents of the two versions refuse one another: what an
agent of version 1 sends first is what the hello protects.
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
    """The name that was asked for with ``--name``."""
    node: int
    nnodes: int
    host: str
    spool: str
    """Random hexadecimal name of the sender's run directory."""
    nonce: str
    """Random hexadecimal; the welcome must be signed over it."""
    challenge: str = ""
    """That the hub gave for our hello."""
    probe_port: int = 0
    """UDP port on which the agent answers probes; 0: none."""
    stepscope: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What of ``run.json`` explains the node: command, python, platform, environment."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """What the hub has of one spool."""

    rings: Mapping[str, int] = field(default_factory=dict)
    """By ring key, the last sequence number."""
    files: Mapping[str, int] = field(default_factory=dict)
    """By name, the bytes of lines and logs, and the crc32 of a file that is sent as a whole."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    node: int
    host: str
    address: str
    port: int
    """Of its probes."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    run: str
    """What the run is really called."""
    token: str
    positions: Positions
    probe_key: str
    """Hexadecimal: what probes between agents are signed with."""
    next_s: float
    """How long to collect before the next frame."""
    peers: tuple[Peer, ...] = ()
    local: bool = False
    """The hub reads this spool itself (it is the run directory): send no parts, only that you are there."""


def write_hello(nonce: str, key: bytes, certificate: bytes) -> tuple[bytes, str]:
    """The body, and its proof."""
    body = json.dumps({"version": VERSION, "nonce": nonce}, separators=(",", ":")).encode()
    return body, sign(key, "hello", body, certificate)


def read_hello(body: bytes, proof: str, key: bytes, certificate: bytes) -> str | None:
    """The nonce.  None: whoever wrote it does not have the key.  FrameError: it does, but makes no sense."""
    if len(body) > HELLO_BYTES or not signed(key, proof, "hello", body, certificate):
        return None
    said = _object(body)
    nonce = said.get("nonce")
    if said.get("version") != VERSION:
        raise FrameError("an agent of another version wants to join: install the same Stepscope on all nodes")
    if not isinstance(nonce, str) or not _HEX.fullmatch(nonce):
        raise FrameError("an agent said nothing of ours")
    return nonce


def write_challenge(challenge: str, nonce: str, key: bytes, certificate: bytes) -> tuple[bytes, str]:
    body = json.dumps({"version": VERSION, "challenge": challenge}, separators=(",", ":")).encode()
    return body, sign(key, "challenge", nonce.encode(), body, certificate)


def read_challenge(body: bytes, proof: str, nonce: str, key: bytes, certificate: bytes) -> str:
    """FrameError when it is not from a hub that has the key, or makes no sense."""
    if len(body) > HELLO_BYTES or not signed(key, proof, "challenge", nonce.encode(), body, certificate):
        raise FrameError("whoever answers there does not have our key")
    challenge = _object(body).get("challenge")
    if not isinstance(challenge, str) or not _CHALLENGE.fullmatch(challenge):
        raise FrameError("the hub said something that makes no sense")
    return challenge


def write_join(join: Join, key: bytes, certificate: bytes) -> tuple[bytes, str]:
    """The body, and its proof."""
    body = json.dumps({"version": VERSION, **asdict(join)}, separators=(",", ":")).encode()
    return body, sign(key, "join", body, certificate)


def read_join(body: bytes, proof: str, key: bytes, certificate: bytes) -> Join | None:
    """None: whoever wrote it does not have the key.  FrameError: it does, but said something that makes no sense."""
    if len(body) > JOIN_BYTES or not signed(key, proof, "join", body, certificate):
        return None
    said = _object(body)
    if said.get("version") != VERSION:
        raise FrameError(f"an agent of another version ({said.get('stepscope', 'unknown')}) wants to join")
    texts: dict[str, Any] = {
        name: said.get(name) for name in ("run", "host", "spool", "nonce", "challenge", "stepscope")
    }
    if not all(isinstance(text, str) and len(text) <= _LONGEST_HOST for text in texts.values()):
        raise FrameError("an agent said nothing of ours")
    if not (_HEX.fullmatch(said["spool"]) and _HEX.fullmatch(said["nonce"])) or not isinstance(said.get("meta"), dict):
        raise FrameError("an agent said nothing of ours")
    numbers: dict[str, Any] = {name: _number(said.get(name)) for name in ("node", "nnodes", "probe_port")}
    if not 0 <= numbers["probe_port"] < 1 << 16:
        raise FrameError("an agent said nothing of ours")
    return Join(**texts, **numbers, meta=said["meta"])


def write_welcome(welcome: Welcome, nonce: str, key: bytes, certificate: bytes) -> tuple[bytes, str]:
    body = json.dumps({"version": VERSION, **asdict(welcome)}, separators=(",", ":")).encode()
    return body, sign(key, "welcome", nonce.encode(), body, certificate)


def read_welcome(body: bytes, proof: str, nonce: str, key: bytes, certificate: bytes) -> Welcome:
    """FrameError when it is not from a hub that has the key, or makes no sense."""
    if len(body) > _WELCOME_BYTES or not signed(key, proof, "welcome", nonce.encode(), body, certificate):
        raise FrameError("whoever answers there does not have our key")
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
        raise FrameError("the hub said something that makes no sense") from error


def positions_of(said: Any) -> Positions:
    """From JSON; KeyError, TypeError or ValueError when it is none."""
    rings = {str(key): _number(seq) for key, seq in dict(said["rings"]).items()}
    return Positions(rings=rings, files={str(name): _number(at) for name, at in dict(said["files"]).items()})


def peers_of(said: Any) -> tuple[Peer, ...]:
    """From JSON; KeyError, TypeError or ValueError when it is none."""
    return tuple(
        Peer(node=_number(p["node"]), host=str(p["host"]), address=str(p["address"]), port=_number(p["port"]))
        for p in said
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError("what came is no JSON") from error
    if not isinstance(said, dict):
        raise FrameError("what came is no JSON object")
    return said


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise FrameError("a number is none")
    return value
