"""Jobs on NCCL that were recorded on an H200: who is late, where, and at what price, against what the job measured.

Each job made some steps with one rank slow, and 60 more without the fault: those are cut off, and only say what a step
takes then.  In the first of the two sets a job made 130 steps with its fault (420 where that comes late) and Python was
what a healthy step of FSDP2 or tensor parallelism waited for; in the second 120 (400), and the device was.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.cut import cut

from stepscope.diagnosis import build_window, diagnose
from stepscope.diagnosis.engine.view import view_of
from stepscope.records.finding import Finding
from stepscope.records.series import RunData
from stepscope.records.text import ms_text, share_text
from stepscope.reports.finding_text import finding_price
from stepscope.store.load import open_run

RUNS = Path(__file__).parent / "data" / "h200_nccl"
STEPS, LATE_STEPS = 130, 420
DEVICE_BOUND = RUNS.with_name("h200_device_bound")
DEVICE_BOUND_STEPS, DEVICE_BOUND_LATE_STEPS = 120, 400


def recorded(name: str) -> RunData:
    return _up_to(RUNS / name, LATE_STEPS if "late" in name else STEPS)


def device_bound(name: str) -> RunData:
    return _up_to(DEVICE_BOUND / name, DEVICE_BOUND_LATE_STEPS if "late" in name else DEVICE_BOUND_STEPS)


def _up_to(folder: Path, steps: int) -> RunData:
    """Up to where the fault ends, as if the job had ended there."""
    part = cut(open_run(folder), steps - 1)
    ends = [replace(each, state="exited", ended_wall_ns=1) for each in part.ranks]
    return replace(part, ranks=tuple(ends))


def blamed(findings: list[Finding]) -> list[Finding]:
    """Those that a user would read as an accusation."""
    return [finding for finding in findings if finding.ranks and finding.severity != "info"]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "kind", "rank", "phase", "side"),
    [
        ("ddp-2-forward-device", "compute_straggler", 0, "forward", None),
        ("ddp-4-backward-device", "compute_straggler", 3, "backward", None),
        ("ddp-4-between-device", "straggler", 1, "other", None),
        ("ddp-2-late-backward-device", "compute_straggler", 0, "backward", None),
        ("ddp-4-late-input-host", "input_straggler", 2, "input", None),
        ("fsdp2-2-backward-device", "compute_straggler", 1, "backward", None),
        ("fsdp2-4-optimizer-host", "compute_straggler", 0, "optimizer", "host"),
        ("tp-2-backward-host", "compute_straggler", 0, "backward", "host"),
    ],
)
def test_the_slow_rank_is_named_and_nobody_else(name: str, kind: str, rank: int, phase: str, side: str | None) -> None:
    (found,) = blamed(diagnose(recorded(name)))
    assert (found.kind, found.ranks, found.phase) == (kind, (rank,), phase)
    assert (found.evidence["clock"], found.evidence["wait_measured"]) == ("device", True)
    assert found.evidence["side"] == side


@pytest.mark.parametrize(
    ("name", "with_ms", "without_ms", "off"),
    [
        ("ddp-2-forward-device", 17.84, 10.35, 0.10),
        ("ddp-4-between-device", 27.36, 15.68, 0.10),
        ("fsdp2-4-optimizer-host", 50.62, 25.30, 0.10),
        ("tp-2-backward-host", 27.94, 10.82, 0.10),
        ("ddp-4-backward-device", 24.36, 16.35, 0.20),  # its buckets are hidden behind the fault, and show without it
        ("fsdp2-2-backward-device", 29.54, 18.86, 0.25),  # without it the host is what a step waits for
    ],
)
def test_a_price_is_what_the_job_gains_without_the_fault(
    name: str, with_ms: float, without_ms: float, off: float
) -> None:
    (found,) = blamed(diagnose(recorded(name)))
    promised_ms = found.cost["if_fixed"]["step_ms"] * (found.cost["if_fixed"]["speedup"] - 1)
    assert promised_ms == pytest.approx(with_ms - without_ms, rel=off)


@pytest.mark.parametrize(
    ("name", "gained_ms"), [("ddp-4-backward-device", 24.36 - 16.35), ("fsdp2-2-backward-device", 29.54 - 18.86)]
)
def test_where_the_exchange_hides_behind_the_fault_the_price_is_a_range(name: str, gained_ms: float) -> None:
    (found,) = blamed(diagnose(recorded(name)))
    assert found.evidence["least_gain_ms"] < gained_ms < found.evidence["gain_ms"]
    assert f" is about {ms_text(found.evidence['gain_ms'])} slower than " in found.title
    least = found.cost["least"]
    assert least["share"] < found.cost["share"]
    price = finding_price(found.kind, found.cost, found.evidence, over=True)
    assert price is not None
    assert price.startswith(f"{share_text(least['share'])} to {share_text(found.cost['share'])} of the training time (")
    assert price.endswith(": the exchange may take longer when all ranks arrive together.")


@pytest.mark.parametrize("name", ["ddp-2-forward-device", "fsdp2-4-optimizer-host", "tp-2-backward-host"])
def test_where_the_exchange_does_not_change_the_price_is_one_number(name: str) -> None:
    """No collective is called in that phase, or hardly any of it is hidden."""
    (found,) = blamed(diagnose(recorded(name)))
    assert "least" not in found.cost
    assert found.evidence["least_gain_ms"] == found.evidence["gain_ms"]
    assert "about" not in found.title


@pytest.mark.parametrize("name", ["ddp-2-late-backward-device", "ddp-4-late-input-host"])
def test_a_rank_that_is_slow_from_step_300_on_is_found_in_the_steps_that_were_timed(name: str) -> None:
    run = recorded(name)
    view = view_of(build_window(run))
    assert (np.diff(view.steps) >= 4).all()  # not all of them
    (found,) = blamed(diagnose(run))
    assert found.steps is not None
    assert 300 <= found.steps[0] <= 320


@pytest.mark.parametrize("name", ["ddp-2-healthy-1", "fsdp2-2-healthy-1", "tp-2-healthy-2"])
def test_nobody_is_accused_in_a_healthy_job(name: str) -> None:
    """In two of them the hosts set the pace: the device of one rank stands still for its own, and the other waits."""
    assert blamed(diagnose(recorded(name))) == []


def test_a_rank_that_the_flight_recorder_has_waiting_is_not_accused() -> None:
    """As where no mark tells of a wait: the same job, but in its collectives rank 3 waits, and the others come last."""
    run = recorded("ddp-4-backward-device")
    *others, last = run.ranks
    late = [replace(other, comm=last.comm, collectives=last.collectives) for other in others]
    waits = replace(last, comm=others[0].comm, collectives=others[0].collectives)
    assert blamed(diagnose(replace(run, ranks=(*late, waits)))) == []


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "kind", "rank", "phase", "with_ms", "without_ms"),
    [
        # Its device waits a little in every phase, and only the host knows that it is held up in the optimizer.
        ("ddp-2-optimizer-host", "compute_straggler", 0, "optimizer", 29.50, 27.88),
        ("ddp-2-input-host", "input_straggler", 1, "input", 30.11, 27.90),
        ("ddp-4-between-host", "between_steps", 3, "other", 31.54, 28.53),
        ("fsdp2-2-forward-host", "compute_straggler", 0, "forward", 47.88, 28.39),
        ("tp-2-input-host", "input_straggler", 1, "input", 41.74, 29.99),
        ("ddp-2-small-backward-device", "compute_straggler", 0, "backward", 30.68, 27.96),
        ("ddp-4-small-forward-device", "compute_straggler", 1, "forward", 31.19, 28.56),
        ("fsdp2-4-small-backward-device", "compute_straggler", 0, "backward", 31.94, 29.13),
    ],
)
def test_where_the_device_is_what_a_step_waits_for_a_tenth_of_a_step_has_its_rank_and_its_price(
    name: str, kind: str, rank: int, phase: str, with_ms: float, without_ms: float
) -> None:
    (found,) = blamed(diagnose(device_bound(name)))
    assert (found.kind, found.ranks, found.phase) == (kind, (rank,), phase)
    promised_ms = found.cost["if_fixed"]["step_ms"] * (found.cost["if_fixed"]["speedup"] - 1)
    assert promised_ms == pytest.approx(with_ms - without_ms, rel=0.10)


def test_one_stalled_step_does_not_hide_a_rank_that_is_slow_in_all_of_them() -> None:
    (found,) = blamed(diagnose(device_bound("ddp-2-forward-host-stalled")))
    assert (found.kind, found.ranks, found.phase) == ("compute_straggler", (0,), "forward")


@pytest.mark.parametrize(
    ("name", "rank", "phase", "with_ms", "without_ms"),
    [
        ("fsdp2-4-forward-host", 2, "forward", 53.68, 30.80),
        ("ddp-4-backward-host", 1, "backward", 31.79, 29.02),
    ],
)
def test_a_rank_whose_excess_varies_a_lot_is_found_by_some_forty_timed_steps(
    name: str, rank: int, phase: str, with_ms: float, without_ms: float
) -> None:
    """Later than its peers by 7 to 40 ms, in all of 43 steps; in the other job by 0 to 13, in 39 of 44."""
    (found,) = blamed(diagnose(_up_to(DEVICE_BOUND / name, 220)))
    assert (found.kind, found.ranks, found.phase) == ("compute_straggler", (rank,), phase)
    promised_ms = found.cost["if_fixed"]["step_ms"] * (found.cost["if_fixed"]["speedup"] - 1)
    assert promised_ms == pytest.approx(with_ms - without_ms, rel=0.17)


def test_a_rank_that_is_slow_from_step_300_on_is_found_where_the_device_is_busy() -> None:
    (found,) = blamed(diagnose(device_bound("fsdp2-2-late-forward-device")))
    assert (found.kind, found.ranks, found.phase) == ("compute_straggler", (0,), "forward")
    assert found.steps is not None
    assert 300 <= found.steps[0] <= 320


@pytest.mark.parametrize("name", ["ddp-4-healthy-1", "fsdp2-4-healthy-1"])
def test_nobody_is_accused_in_a_healthy_job_whose_device_is_busy(name: str) -> None:
    assert blamed(diagnose(device_bound(name))) == []
