"""The secret that the nodes of one user share, and what is proved with it.

``STEPSCOPE_KEY`` if it is set; else ``~/.config/stepscope/key``, made at the first need and readable by its owner only.
With a home folder that all nodes see that is all there is to do; elsewhere the file is copied once, or the variable
set.  The key itself never travels: it signs the handshake (``wire/joining.py``), in which a run's own random tokens are
handed out.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from stepscope.errors import UsageError

__all__ = ["ENV_KEY", "kept_secret", "key_path", "load_key", "sign", "signed"]

ENV_KEY = "STEPSCOPE_KEY"
SHORTEST = 16


def key_path(environ: Mapping[str, str]) -> Path:
    folder = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".config")
    return Path(folder) / "stepscope" / "key"


def load_key(environ: Mapping[str, str] | None = None) -> bytes:
    """UsageError when there is none and none can be made, or others could have read it."""
    environ = os.environ if environ is None else environ
    if given := environ.get(ENV_KEY):
        if len(given) < SHORTEST:
            raise UsageError(f"{ENV_KEY} is too short for a secret: at least {SHORTEST} characters")
        return hashlib.sha256(given.encode()).digest()
    return hashlib.sha256(kept_secret(key_path(environ), "key", f"set {ENV_KEY}").encode()).digest()


def kept_secret(path: Path, what: str, instead: str) -> str:
    """What stands in a file that only its owner can read, made at the first need; UsageError when that cannot be.

    ``instead``: what the user can do then.
    """
    try:
        return _read(path, what)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(beside, path)  # whole, or not at all; another node may have been faster
        except FileExistsError:
            pass
        finally:
            beside.unlink()
        return _read(path, what)
    except OSError as error:
        raise UsageError(f"cannot make the {what} {path}: {error.strerror}; {instead} instead") from error


def sign(key: bytes, purpose: str, *said: bytes) -> str:
    """A proof that whoever made it has the key and meant exactly this."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for word in (purpose.encode(), *said):
        mac.update(len(word).to_bytes(8, "little"))
        mac.update(word)
    return mac.hexdigest()


def signed(key: bytes, proof: str, purpose: str, *said: bytes) -> bool:
    """In constant time, whatever ``proof`` is."""
    return hmac.compare_digest(sign(key, purpose, *said).encode(), proof.encode(errors="replace"))


def _read(path: Path, what: str) -> str:
    if path.stat().st_mode & 0o077:
        raise UsageError(f"others may read the {what} {path}; `chmod 600` it, or remove it to get another")
    text = path.read_text(errors="replace").strip()
    if len(text) < SHORTEST:
        raise UsageError(f"the {what} {path} is empty or cut off; remove it to get another")
    return text
