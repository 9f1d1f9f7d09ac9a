"""What the hub refused, by reason: counted here, shown by ``/metrics``, ``nodes.json`` and the summary.

Everything that is turned away is turned away for one of ``REASONS``, so the counters are bounded whatever comes; whom
it came from is kept for the first few sources only.  Nothing of what was sent is kept.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from stepscope.errors import HubError

__all__ = ["REASONS", "Reason", "Refusals", "Refused"]

Reason = Literal[
    "connections",  # more of them than may be open
    "connection_rate",  # more of them in a short time than one address may make
    "tls",  # no handshake, or none of ours, or none in time
    "http",  # what came is no request, or one that could be read in two ways
    "head_large",
    "head_slow",
    "body_large",
    "body_slow",
    "reader_slow",  # does not take the answer
    "key",  # a join that was not signed with our key
    "join",  # a join that makes no sense here: another run, a node that does not exist
    "join_rate",
    "node_taken",  # another spool speaks for this node
    "token",
    "spool",  # a frame in the name of another spool
    "rank",  # a frame with a rank that another node has
    "frame",  # no frame, or not of ours
    "rate",  # more frames or bytes than one agent may send
    "busy",  # more at one time than there is memory for
    "disk",  # nothing can be written
    "fault",  # an error of ours; the connection was given up
]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
SOURCES: Final = 256


class Refused(HubError):
    """A request that is answered with ``status`` and counted under ``reason``.

    ``tell``: whether it is worth an event; None: the first time that this source is refused for this reason.
    """

    def __init__(
        self, status: int, reason: Reason, why: str, *, retry_s: float | None = None, tell: bool | None = None
    ) -> None:
        super().__init__(why)
        self.status = status
        self.reason: Reason = reason
        self.why = why
        self.retry_s = retry_s
        self.tell = tell


class Refusals:
    """Counters of one hub.  Used by its event loop only."""

    def __init__(self) -> None:
        self._counts: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._sources: set[tuple[Reason, str]] = set()
        self.total = 0

    def count(self, reason: Reason, source: str) -> bool:
        """True the first time that ``source`` is refused for this reason, as long as there is room to remember it."""
        self._counts[reason] += 1
        self.total += 1
        if (reason, source) in self._sources or len(self._sources) >= SOURCES:
            return False
        self._sources.add((reason, source))
        return True

    def by_reason(self) -> dict[str, int]:
        """Of every reason, also of those that never came up."""
        return {str(reason): count for reason, count in self._counts.items()}
