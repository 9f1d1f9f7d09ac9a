"""The ledger of an active run (``goodput/``), from sums of its steps: the hub does not keep the steps themselves.

``accounts_of`` only copies and runs in the event loop; ``ledger_document`` may run in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stepscope.goodput.accounts import ProcessAccount, process_account
from stepscope.goodput.ledger import AttemptAccount, RunAccount, hang_stretches, ledger_from
from stepscope.records.hang import HangRecord
from stepscope.records.run_clock import now_of
from stepscope.records.series import RankSeries

if TYPE_CHECKING:
    from stepscope.hub.live.live_run import LiveRun

__all__ = ["accounts_of", "ledger_document"]

MOST_EVENTS = 2000


def accounts_of(live: LiveRun, series: Mapping[int, RankSeries]) -> tuple[AttemptAccount, ...] | None:
    """Every attempt so far; None if earlier steps are unknown.  ``series``: the rings added up, without steps."""
    if live.partial or live.sums.full:
        return None
    ages = {
        (event.get("pid"), event.get("host")): event.get("age_s")
        for event in live.events(0, limit=MOST_EVENTS)
        if event.get("event") == "rank_start" and type(event.get("age_s")) in (int, float)
    }
    attempts: dict[int, list[ProcessAccount]] = {}
    for ring, about in series.items():
        age_s = ages.get((about.identity.pid, about.identity.host))
        own = process_account(about, live.sums.of(ring), age_s=age_s)
        attempts.setdefault(int(live.registry.of["attempt"][ring]), []).append(own)
    return tuple(
        AttemptAccount(
            number=number,
            processes=tuple([own for own in attempts[number] if own.sums.steps] or attempts[number]),
        )
        for number in sorted(attempts)
    )


def ledger_document(
    accounts: tuple[AttemptAccount, ...] | None, meta: Mapping[str, Any], hangs: Iterable[HangRecord]
) -> dict[str, Any] | None:
    """The document of ``stepscope goodput --json``, until now; None if it is unknown."""
    created = meta.get("created_wall_ns")
    if accounts is None or type(created) is not int:
        return None
    account = RunAccount(
        created_ns=created,
        until_ns=max(now_of(meta), created),
        active=True,
        attempts=accounts or (AttemptAccount(number=0, processes=()),),
        hangs=hang_stretches(hangs),
    )
    return ledger_from(account).to_dict()
