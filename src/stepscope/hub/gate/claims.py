"""Which sender has which ranks and rings, so that none can speak for another's.

A rank belongs to the spool whose live ring claimed it first, for as long as that ring is live and that spool is heard
of; the ring itself, which is one process, belongs to its spool for good.  Processes that know of no world claim no
rank: each of them thinks that it is rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from stepscope.store.sidecar import RingSidecar
from stepscope.wire.blocks import ring_id

__all__ = ["RankClaims"]

_ATTEMPT_BITS = 40


class RankClaims:
    """Numbers, not names: there may be a hundred thousand ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, str] = {}
        """By attempt and rank, the spool."""
        self._rings: dict[int, str] = {}

    def contested(
        self, spool: str, rings: Iterable[RingSidecar], is_live: Callable[[str], bool]
    ) -> tuple[RingSidecar, str] | None:
        """The first of ``rings`` that is another spool's, and whose."""
        for about in rings:
            owner = self._rings.get(_ring(about), spool)
            if owner != spool:
                return about, owner
            rank = _rank(about)
            holder = self._ranks.get(rank, spool) if rank is not None else spool
            if holder != spool and is_live(holder):
                return about, holder
        return None

    def take(self, spool: str, rings: Iterable[RingSidecar]) -> None:
        """They are this spool's; a ring that ended lets go of its rank."""
        for about in rings:
            self._rings[_ring(about)] = spool
            rank = _rank(about)
            if rank is not None:
                self._ranks[rank] = spool
            elif self._ranks.get(_number(about)) == spool:
                del self._ranks[_number(about)]


def _ring(about: RingSidecar) -> int:
    return int.from_bytes(ring_id(about.key)[:8], "little")


def _rank(about: RingSidecar) -> int | None:
    """None for one that claims none."""
    ended = about.ended_wall_ns is not None or about.state not in ("starting", "running")
    return None if ended or about.identity.world_size <= 1 else _number(about)


def _number(about: RingSidecar) -> int:
    return about.identity.attempt << _ATTEMPT_BITS | about.identity.rank
