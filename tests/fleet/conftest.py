"""Records of a simulated cluster (``bench/fakes/fleet.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from fakes.fleet import FleetYear, MadeRun

from stepscope.fleet.catalog import fleet_of
from stepscope.fleet.columns import Fleet
from stepscope.fleet.record import RunRecord, record_of


def record(made: MadeRun) -> RunRecord:
    facts = {
        "created_wall_ns": made.meta["created_wall_ns"],
        "command": made.meta["command"],
        "host": made.meta["host"],
        "commit": made.meta["git"]["commit"],
        "status": made.summary["status"],
        "tags": list(made.tags),
    }
    return record_of(made.name, facts, made.meta, made.summary)


@pytest.fixture(scope="session")
def fleet_from() -> Callable[[Iterable[MadeRun]], Fleet]:
    return lambda runs: fleet_of(map(record, runs))


@pytest.fixture(scope="session")
def small_year() -> FleetYear:
    """Faults strong enough for 2,000 runs on 40 hosts."""
    from fakes.fleet import BadHost, BadLink, ImageChange

    return FleetYear(
        seed=3,
        count=2000,
        hosts=40,
        jobs=16,
        own_changes=1,
        ranks_per_host=1,
        bad_hosts=(BadHost(host=7, slow=0.08), BadHost(host=23, slow=0.12, share=0.4, ranks=1, throttled=True)),
        bad_links=(BadLink(hosts=(15, 16), ratio=2.0),),
        image_changes=(ImageChange(day=150.5, image="train:25.06", slower=0.05),),
    )
