"""Where a run is to be looked at: the address of a hub, what opens it, and which run of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.agent.shipping.client import split_url
from stepscope.errors import HubError, UsageError
from stepscope.store.hub_file import HubFile

__all__ = ["ENV_TOKEN", "Place", "fingerprint_from", "place_of_hub_file", "token_from"]

ENV_TOKEN = "STEPSCOPE_TOKEN"
_TOKEN = re.compile(r"[!-~]{1,1024}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Place:
    url: str
    token: str = field(repr=False)
    run: str
    """Its id; empty: the newest run of that hub."""
    fingerprint: str = ""
    """SHA-256 of the certificate, hexadecimal; empty: an authority that this machine trusts must have signed it."""

    def __post_init__(self) -> None:
        """UsageError when that is no address of a hub, HubError when nobody could send such a token."""
        split_url(self.url)
        if not _TOKEN.fullmatch(self.token):
            raise HubError("that is no token: it is empty, or has characters that no token has")


def place_of_hub_file(about: HubFile, run: str) -> Place:
    return Place(url=about.url, token=about.token, run=run, fingerprint=about.fingerprint)


def token_from(file: Path | None, environ: Mapping[str, str] | None = None) -> str:
    """The token of a hub elsewhere: never from the command line, where others could read it."""
    environ = os.environ if environ is None else environ
    if file is None:
        token = environ.get(ENV_TOKEN, "").strip()
        if not token:
            raise UsageError(f"the hub wants a token: --token-file FILE, or {ENV_TOKEN} in the environment")
        return token
    try:
        return file.read_text(errors="replace").strip()
    except OSError as error:
        raise UsageError(f"cannot read the token {file}: {error.strerror}") from None


def fingerprint_from(said: str) -> str:
    """As `hub.json`, ``serve`` or ``openssl`` write it."""
    plain = said.replace(":", "").lower()
    if plain and not _FINGERPRINT.fullmatch(plain):
        raise UsageError("--fingerprint is the SHA-256 of the hub's certificate: 64 hexadecimal digits")
    return plain
