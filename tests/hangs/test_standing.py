"""What each rank is at while the job stands still: who holds it up is hung, the others wait."""

from __future__ import annotations

from dataclasses import replace

from hang_jobs import Job

from stepscope.hangs.report import hang_state_by_rank


def test_culprits_are_hung_though_they_wait_in_a_collective_themselves() -> None:
    job = Job()
    job.at(1, collective=job.waits("recv", peer=2)).at(2, collective=job.waits("recv", peer=1))
    job.at(3, collective=job.waits("recv", peer=1))
    hang = job.at(0, collective=job.waits("recv", peer=1)).hang()
    assert hang_state_by_rank([hang]) == {0: "waits in recv", 1: "hung", 2: "hung", 3: "waits in recv"}
    assert hang_state_by_rank([replace(hang, over="ended", over_wall_ns=1)]) == {}


def test_a_victim_waits_though_it_is_not_known_in_what() -> None:
    hang = Job().alone(1).hang()
    nowhere = tuple(replace(rank, waiting_in=None) for rank in hang.ranks)
    assert hang_state_by_rank([replace(hang, ranks=nowhere)]) == {0: "waits", 1: "hung", 2: "waits", 3: "waits"}
    assert hang_state_by_rank([replace(hang, ranks=nowhere, culprits=(), victims=())]) == dict.fromkeys(
        range(4), "hung"
    )
