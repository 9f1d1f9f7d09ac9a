"""How large what goes over the network may be; both sides keep to these, and the hub insists."""

from __future__ import annotations

__all__ = [
    "BLOCK_RINGS",
    "BLOCK_ROWS",
    "FILE_BYTES",
    "FRAME_BYTES",
    "HEAD_BYTES",
    "HELLO_BYTES",
    "INFLATED_BYTES",
    "JOIN_BYTES",
    "LINES_BYTES",
    "PARTS",
]

FRAME_BYTES = 8 << 20
"""Of one frame as it travels."""
INFLATED_BYTES = 64 << 20
"""Of everything in one frame, unpacked."""
HEAD_BYTES = 256 << 10
"""Of a frame's header."""
PARTS = 512
"""Of one frame."""
BLOCK_ROWS = 65_536
BLOCK_RINGS = 4096
LINES_BYTES = 4 << 20
"""Of the lines in one part, unpacked; a line that is longer is not sent."""
FILE_BYTES = 8 << 20
"""Of a file that is sent as a whole, unpacked."""
HELLO_BYTES = 1 << 10
"""Of a hello, and of its answer."""
JOIN_BYTES = 64 << 10
"""Of what an agent says when it joins."""
