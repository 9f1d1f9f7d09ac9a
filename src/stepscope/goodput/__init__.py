"""Goodput: which part of a run's time was useful training, over all its attempts, and whether to start it again.

    accounts        what each process of a run did, from its steps or from sums that the live hub keeps
    ledger          the parts of the wall time by attempt, which add up to it; steps that were lost and repeated
    jobs            several runs of one job: resubmitted by hand, or by Slurm
    restart_advice  after a failure: restart, restart without a host, or stop

Pure: no I/O, no clock.  docs/goodput.md has the definitions.  All names are loaded on first use: a hub that adds up
what processes did needs ``accounts`` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.goodput.ledger import PARTS, Ledger, evaluated_after_ns, ledger_of
    from stepscope.goodput.restart_advice import Advice, advise

__all__ = ["PARTS", "Advice", "Ledger", "advise", "evaluated_after_ns", "ledger_of"]


def __getattr__(name: str) -> Any:
    if name in ("Advice", "advise"):
        from stepscope.goodput import restart_advice

        return getattr(restart_advice, name)
    if name in __all__:
        from stepscope.goodput import ledger

        return getattr(ledger, name)
    raise AttributeError(f"module 'stepscope.goodput' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
