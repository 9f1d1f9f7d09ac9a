"""What is inside a page in one file: ``report.html``, and what ``trace --html`` and ``flight --html`` write."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from typing import Any

__all__ = ["data_in"]


def data_in(made: bytes) -> tuple[dict[str, Any], bytes]:
    """The document and the blobs; nothing but our script and style sheet may count, and nothing be fetched."""
    found = re.search(rb'id="stepscope-data">([^<]*)</script>', made)
    assert found is not None
    assert made.startswith(b"<!doctype html>")
    assert made.count(b"<script") == made.count(b"</script>") == 2
    assert made.count(b"<style>") == made.count(b"</style>") == 1
    policy = re.search(rb'http-equiv="Content-Security-Policy" content="([^"]*)"', made)
    assert policy is not None
    assert policy[1].startswith(b"default-src 'none'; script-src 'sha256-")
    assert b"unsafe" not in policy[1]
    data = gzip.decompress(base64.b64decode(found[1]))
    magic, version, _, length = struct.unpack_from("<4sHHI", data)
    assert (magic, version) == (b"STCP", 1)
    return json.loads(data[12 : 12 + length]), data[12 + length :]
