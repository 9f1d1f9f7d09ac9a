"""What receivers have in common: a message becomes requests, their answers become an outcome.

Each type of receiver is a generator (``Exchange``): it yields a request, is sent the answer, and returns the outcome.
It does no I/O and knows no clock, so that payloads can be tested exactly; ``alerts/transport.py`` carries the requests
out, ``alerts/sender.py`` decides when.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepscope.alerts.model import Message

__all__ = [
    "Answer",
    "AppriseRequest",
    "CommandRequest",
    "Context",
    "Delivered",
    "Destination",
    "Exchange",
    "HttpRequest",
    "Outcome",
    "Refused",
    "Renewal",
    "Request",
    "RetryLater",
    "clipped",
    "json_bytes",
    "json_request",
    "outcome_of_status",
    "web_link",
]

TRY_AGAIN = (408, 425, 429)
"""Besides 5xx.  All other 4xx say that the same request will never be accepted."""
_SHOWN_BODY = 200
JSON = "application/json; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Destination:
    """A receiver of the settings with its secrets, as the sender has it in memory."""

    name: str
    type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """By name; ``url`` is the address."""
    timeout_s: float = 10.0

    def option(self, name: str, default: str = "") -> str:
        return str(self.options.get(name) or default)

    def without_secrets(self, text: str) -> str:
        """The text with every secret in it hidden: an answer may repeat what was sent."""
        parts = [part for secret in self.secrets.values() for part in (secret, *_secret_parts(secret)) if part]
        for part in sorted(parts, key=len, reverse=True):
            text = text.replace(part, "•••")
        return text


_SHORTEST_PART = 8


def _secret_parts(secret: str) -> list[str]:
    """The pieces of an address that may be a token: everything but the host."""
    _, found, rest = secret.partition("://")
    if not found:
        return []
    user, _, place = rest.rpartition("@")
    _, _, path = place.partition("/")
    return [part for part in re.split(r"[/?&=:#]", f"{user}/{path}") if len(part) >= _SHORTEST_PART]


# -- requests and answers ---------------------------------------------------------------------------------------------
# The address of a receiver is often its secret: no ``repr`` contains one.


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    url: str = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    method: str = "POST"


@dataclass(frozen=True, kw_only=True)
class CommandRequest:
    argv: tuple[str, ...]
    stdin: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class AppriseRequest:
    url: str = field(repr=False)
    title: str
    body: str
    severity: str


Request = HttpRequest | CommandRequest | AppriseRequest


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int = 200
    """Of HTTP; 200 for a command that succeeded."""
    body: bytes = b""
    retry_after_s: float | None = None

    def json(self) -> dict[str, Any]:
        """The body as an object; empty if it is not one."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


# -- outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Delivered:
    receipt: dict[str, Any] = field(default_factory=dict)
    """Kept with the message, for later messages about the same incident."""


@dataclass(frozen=True, kw_only=True)
class RetryLater:
    why: str
    after_s: float | None = None
    """What the receiver asked for; None: when our own backoff says so."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    why: str


Outcome = Delivered | RetryLater | Refused
Exchange = Generator[Request, Answer, Outcome]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a receiver may need besides the message."""

    wall_ns: int
    receipt: Mapping[str, Any] = field(default_factory=dict)
    """Of the messages about the same incident that were sent, merged."""
    repeated: bool = False
    """An earlier try may have arrived: it timed out, or the sender was killed before it had the answer."""


Renewal = Callable[[Destination, Sequence[Message], int], Request]
"""(destination, open messages, wall_ns) → the request that keeps them open at the receiver."""


def outcome_of_status(answer: Answer) -> Outcome:
    """The outcome of a plain HTTP request."""
    if 200 <= answer.status < 300:
        return Delivered()
    text = " ".join(answer.body[: 4 * _SHOWN_BODY].decode("utf-8", "replace").split())
    shown = "".join(letter for letter in text if letter.isprintable())[:_SHOWN_BODY]
    why = f"HTTP {answer.status}{f': {shown}' if shown else ''}"
    if answer.status in TRY_AGAIN or answer.status >= 500:
        return RetryLater(why=why, after_s=answer.retry_after_s)
    if 300 <= answer.status < 400:
        return Refused(why=f"HTTP {answer.status}: redirects to another address, which is not followed")
    return Refused(why=why)


# -- helpers ----------------------------------------------------------------------------------------------------------


def json_bytes(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def json_request(url: str, document: Any, headers: Mapping[str, str] | None = None) -> HttpRequest:
    return HttpRequest(url=url, body=json_bytes(document), headers={"Content-Type": JSON, **(headers or {})})


def clipped(text: str, most: int) -> str:
    """The text with at most so many characters; an ellipsis shows that it was longer."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def web_link(link: str) -> str:
    """The link if it leads to a web page; empty if not: a message may come from an untrusted run directory."""
    return link if link.startswith(("http://", "https://")) else ""
