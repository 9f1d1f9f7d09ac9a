"""A webhook of the user, and a command: both get the message as JSON (``message_document``).

A webhook gets the message's id in ``X-Stepscope-Id``: one that comes twice has the same id.  With a secret the request
is signed: ``X-Stepscope-Signature: t=SECONDS,v1=HEX``, where HEX is the HMAC-SHA256 of ``SECONDS.BODY``.  The receiver
computes the same, compares in constant time, and refuses times that are minutes away, so that nobody can repeat an
intercepted request later (``signature_valid``).

A command gets the JSON on its standard input, and neither secrets nor the message on its command line.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import quote

from stepscope.alerts.message_text import message_document
from stepscope.alerts.model import Message
from stepscope.alerts.receivers.exchange import (
    CommandRequest,
    Context,
    Destination,
    Exchange,
    json_bytes,
    json_request,
    outcome_of_status,
)

__all__ = ["SIGNATURE", "command", "exchange", "signature", "signature_valid"]

SIGNATURE = "X-Stepscope-Signature"
OLDEST_S = 300


def exchange(destination: Destination, message: Message, context: Context) -> Exchange:
    document = message_document(message)
    headers = {"X-Stepscope-Id": quote(message.id, safe="/-_.:~"), "X-Stepscope-Status": message.status}
    if secret := destination.secrets.get("secret"):
        headers[SIGNATURE] = signature(secret, json_bytes(document), context.wall_ns // 1_000_000_000)
    if token := destination.secrets.get("token"):
        headers["Authorization"] = f"Bearer {token}"
    answer = yield json_request(destination.secrets["url"], document, headers)
    return outcome_of_status(answer)


def command(destination: Destination, message: Message, context: Context) -> Exchange:
    argv = destination.options["command"]
    answer = yield CommandRequest(
        argv=tuple(map(str, argv)) if isinstance(argv, list | tuple) else (str(argv),),
        stdin=json_bytes(message_document(message)) + b"\n",
    )
    return outcome_of_status(answer)


def signature(secret: str, body: bytes, seconds: int) -> str:
    return f"t={seconds},v1={_digest(secret, body, str(seconds))}"


def signature_valid(header: str, secret: str, body: bytes, now_s: float, *, oldest_s: float = OLDEST_S) -> bool:
    """Whether a request with that ``X-Stepscope-Signature`` is from us and recent; for receivers in Python."""
    parts = dict(part.partition("=")[::2] for part in header.split(","))
    when, digest = parts.get("t", ""), parts.get("v1", "")
    if not (when.isascii() and when.isdigit() and len(when) < 20) or abs(now_s - int(when)) > oldest_s:
        return False
    return hmac.compare_digest(_digest(secret, body, when).encode(), digest.encode("utf-8", "replace"))


def _digest(secret: str, body: bytes, seconds: str) -> str:
    return hmac.new(secret.encode(), f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
