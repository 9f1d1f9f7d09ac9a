"""A bad cable: carries frames between two TAP devices of this network namespace, late, not all of them, or slowly.

    python cable.py NEAR FAR      then, on standard input, a line per change: DELAY_S LOSS RATE_BPS

Each is told per direction; a rate of 0 is as fast as it goes.  Prints ``ready`` once and ``ok`` per line; ends with
its standard input.  Works where the kernel has no netem; the bridges before and behind hand it whole frames with their
checksums in them.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_INFO = 0x0002 | 0x1000
_LONGEST_FRAME = 65536
_QUEUE = 1000
"""Frames on the way in one direction; what comes beyond that is lost, as in a switch."""


def open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_INFO))
    return fd


class Direction:
    """Frames from one device, each with the time at which it comes out of the other."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self._sink = sink
        self._queue: deque[tuple[float, bytes]] = deque()
        self._free_s = 0.0
        self.delay_s = self.loss = self.rate_bps = 0.0

    def take(self, now_s: float) -> None:
        frame = os.read(self.source, _LONGEST_FRAME)
        if len(self._queue) >= _QUEUE or random.random() < self.loss:
            return
        self._free_s = max(self._free_s, now_s) + (len(frame) * 8 / self.rate_bps if self.rate_bps else 0.0)
        self._queue.append((self._free_s + self.delay_s, frame))

    def give(self, now_s: float) -> float | None:
        """Hand over what has arrived; when the next does."""
        while self._queue and self._queue[0][0] <= now_s:
            try:
                os.write(self._sink, self._queue.popleft()[1])
            except OSError:
                return self._queue[0][0] if self._queue else None  # the device is down or full: lost
        return self._queue[0][0] if self._queue else None


def main() -> None:
    near, far = open_tap(sys.argv[1]), open_tap(sys.argv[2])
    ways = [Direction(near, far), Direction(far, near)]
    print("ready", flush=True)
    while True:
        now_s = time.monotonic()
        due = [at_s for way in ways if (at_s := way.give(now_s)) is not None]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        for fd in select.select([0, near, far], [], [], timeout_s)[0]:
            if fd == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                for way in ways:
                    way.delay_s, way.loss, way.rate_bps = map(float, line.split())
                print("ok", flush=True)
            else:
                next(way for way in ways if way.source == fd).take(time.monotonic())


if __name__ == "__main__":
    main()
