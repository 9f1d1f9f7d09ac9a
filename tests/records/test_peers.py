"""Which user of this machine is at the other end of a connection."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from stepscope.hub.transport import peer_uid


def test_of_a_connection_of_our_own_and_of_none(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as ours:
            accepted, (host, theirs) = listening.accept()
            with accepted:
                assert peer_uid(host, theirs, port) == os.getuid()
                assert peer_uid(f"::ffff:{host}", theirs, port) == os.getuid()
                assert peer_uid("10.0.0.9", theirs, port) == -1
                assert peer_uid(host, theirs, port, (tmp_path / "none",)) is None
                ours.shutdown(socket.SHUT_RDWR)
                assert peer_uid(host, theirs, port) == -1, "whoever leaves at once is not known"
