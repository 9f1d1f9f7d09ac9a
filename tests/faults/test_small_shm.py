"""The 64 MB of ``/dev/shm`` that a container gets, and eight ranks in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rings import RingStream, write_steps

from stepscope.errors import RingNoSpace
from stepscope.recorder.output import MOST_SPOOLED
from stepscope.records.identity import RankIdentity
from stepscope.ring import RingReader
from stepscope.ring.layout import DEFAULT_CAPACITY, HEADER_BYTES, WORD_BYTES

RANKS = 8
pytestmark = pytest.mark.faults


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shm"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def ring(folder: Path, rank: int) -> RingStream:
    who = RankIdentity(host="node", pid=os.getpid(), rank=rank, world_size=RANKS)
    return RingStream(folder / f"{rank}.ring", who)


def test_eight_ranks_have_room(shm: Path) -> None:
    streams = [ring(shm, rank) for rank in range(RANKS)]
    for stream in streams:
        write_steps(stream, 3000)
    for rank, stream in enumerate(streams):
        reader = RingReader(shm / f"{rank}.ring")
        batch = reader.read(0)
        assert (len(batch.slots), batch.lost, batch.torn) == (3000, 0, 0)
        reader.close()
        stream.close()


def test_half_of_it_stays_for_the_job_whatever_is_held_there() -> None:
    """What ranks print waits there, too, while a remote run directory does not answer; a launcher has no ring."""
    ring_bytes = HEADER_BYTES + DEFAULT_CAPACITY * WORD_BYTES
    assert RANKS * ring_bytes + (RANKS + 1) * MOST_SPOOLED < 32 << 20


def test_a_ring_without_room_is_refused_and_the_others_go_on(shm: Path) -> None:
    first = ring(shm, 0)
    (shm / "of_the_job").write_bytes(bytes(os.statvfs(shm).f_bavail * os.statvfs(shm).f_frsize))
    with pytest.raises(RingNoSpace):
        ring(shm, 1)
    assert not (shm / "1.ring").exists()
    write_steps(first, 3000)  # its room was reserved: no SIGBUS
    reader = RingReader(shm / "0.ring")
    assert len(reader.read(0).slots) == 3000
    reader.close()
    first.close()
