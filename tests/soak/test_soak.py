"""A long run on which everything happens at random: agents, hubs and ranks are killed, the connection is cut, disks are
full, clocks are set.  No completed step is lost or doubled, and what the training prints is what it prints alone.

The seed is in the name of the test and in what it says when it fails: ``STEPSCOPE_SOAK_SEED=7 make soak``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from full_disk import fill_disk
from soak_node import SoakNode

from stepscope.store.file_io import run_bytes
from stepscope.store.inbox.journal import recover
from stepscope.store.live.sample_files import samples_end
from stepscope.store.load import open_run
from stepscope.store.sealed.seal import seal

DAY_S = 24 * 3600.0
SEEDS = [int(os.environ.get("STEPSCOPE_SOAK_SEED", "1"))]
MB = 1 << 20
JOB = """
import hashlib, sys, time
from pathlib import Path
told, line = Path(sys.argv[1]), "begin"
for number in range(int(sys.argv[2])):
    while int(told.read_text() or 0) < number:
        time.sleep(0.01)
    line = hashlib.sha256(line.encode()).hexdigest()
    print(number, line, flush=True)
    print("to stderr", number, file=sys.stderr, flush=True)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """File systems of 64 MB, or plain folders where none can be mounted (then none is ever full)."""
    mounted: list[Path] = []

    def make(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True).returncode == 0:
            mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    if os.path.ismount(folder):
        fill_disk(folder)


def free(*folders: Path) -> None:
    for folder in folders:
        (folder / "filler").unlink(missing_ok=True)


def bytes_beside_steps(run_dir: Path) -> int:
    """Steps are all kept, and grow with the job; so do the events that tell of its restarts."""
    steps = [run_dir / "events.jsonl", *(run_dir / "steps").glob("*"), *(run_dir / "parts").glob("steps-*")]
    sizes = 0
    for path in steps:
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_blocks * 512
    return run_bytes(run_dir) - sizes


class Soak:
    """What happens in which round follows from the seed."""

    def __init__(self, node: SoakNode, seed: int, disks: tuple[Path, Path]) -> None:
        self.node, self.disks = node, disks
        self.chance = random.Random(seed)
        self.happened: list[str] = []
        self.memory: dict[str, list[int]] = {"agent": [], "hub": []}
        self.taken: dict[str, list[int]] = {"agent": [], "hub": []}
        """Of the disk, beside the steps."""

    def round(self, seconds: float) -> None:
        node, chance = self.node, self.chance
        what = chance.choices(
            ["calm", "agent", "hub", "ranks", "cut", "full node", "full hub", "back", "forward", "mend"],
            [30, 4, 4, 3, 6, 3, 3, 5, 5, 12],
        )[0]
        self.happened.append(what)
        if what == "agent":
            node.start_agent()
        elif what == "hub":
            node.start_hub()
        elif what == "ranks":
            node.start_ranks()
        elif what == "cut":
            node.cable.cut()
        elif what.startswith("full"):
            fill(self.disks[what == "full hub"])
        elif what == "back":
            node.clocks.set_time(-3600.0)
        elif what == "forward":
            node.clocks.set_time(86400.0)
        elif what == "mend":
            node.cable.mend()
            free(*self.disks)
        node.steps(chance.randint(1, 40))
        node.clocks.advance(seconds * chance.uniform(0.2, 1.8))
        for name, one, paths in (("agent", node.agent, node.paths), ("hub", node.hub, node.hub_paths)):
            assert one is not None
            if one.process.poll() is not None:
                said = one.process.communicate()[1]
                assert name == "hub" and any(name == "full hub" for name in self.happened), f"the {name} died:\n{said}"
                free(*self.disks)
                node.start_hub()  # as the launcher does
            self.memory[name].append(one.memory_bytes())
            self.taken[name].append(bytes_beside_steps(paths.run_dir))

    def recover(self) -> None:
        self.node.cable.mend()
        free(*self.disks)

    def settle(self) -> None:
        """Wait until agent and hub are at work again, so that there is something to measure on a busy machine, too."""
        self.recover()
        node = self.node
        assert node.hub is not None
        if node.hub.process.poll() is not None:
            node.start_hub()
        before = samples_end(node.paths.run_dir)
        node.until(lambda: self._received() > before)

    def _received(self) -> int:
        """How far the hub is in the stream of samples."""
        spools = recover(self.node.hub_paths.run_dir).spools.values()
        return max((spool.files.get("samples.jsonl", 0) for spool in spools), default=0)


def check_steps(soak: Soak, run_dir: Path) -> None:
    """Every step that was completed is there, once, and in the attempt in which it was made."""
    made = {
        (attempt, rank): list(range(count))
        for attempt, ranks in enumerate(soak.node.made)
        for rank, count in enumerate(ranks)
        if count
    }
    run = open_run(run_dir)
    found = {(rank.identity.attempt, rank.rank): rank.steps["step"].tolist() for rank in run.ranks if len(rank.steps)}
    assert {key: len(steps) for key, steps in found.items()} == {key: len(steps) for key, steps in made.items()}
    assert found == made
    assert sum(rank.lost + rank.torn for rank in run.ranks) == 0


def check_times(run_dir: Path) -> None:
    """However the time of day was set: nothing ends before it began, and attempts follow one another."""
    run = open_run(run_dir)
    began = [rank.anchor_wall_ns for rank in run.ranks]
    assert began == sorted(began)
    assert all(rank.ended_wall_ns is None or rank.ended_wall_ns >= rank.anchor_wall_ns for rank in run.ranks)
    events = [event["wall_ns"] for event in run.events if event["event"] in ("rank_start", "rank_end")]
    assert events == sorted(events)


def soak(tmp_path: Path, disk: Callable[[str], Path], seed: int, *, rounds: int, seconds: float) -> Soak:
    disks = disk("node"), disk("hub")
    node = SoakNode(tmp_path, node_disk=disks[0] / "runs", hub_disk=disks[1] / "runs")
    going = Soak(node, seed, disks)
    try:
        for number in range(rounds):
            going.round(seconds)
            if number % 40 == 39:
                going.settle()
        going.recover()
        node.until(lambda: node.agent is not None and node.agent.process.poll() is None)
        delivered = node.finish()
        assert delivered["delivered"] is True, delivered
        check_steps(going, node.hub_paths.run_dir)
        seal(node.hub_paths.run_dir)
        check_steps(going, node.hub_paths.run_dir)
        check_times(node.hub_paths.run_dir)
    except BaseException:
        print(f"seed {seed}: what happened in each round: {going.happened}")
        raise
    finally:
        free(*disks)
        node.close()
    return going


@pytest.mark.parametrize("rounds", [10, pytest.param(25, marks=pytest.mark.soak)])
def test_a_short_soak(tmp_path: Path, disk: Callable[[str], Path], rounds: int) -> None:
    soak(tmp_path, disk, 1, rounds=rounds, seconds=30.0)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_day(tmp_path: Path, disk: Callable[[str], Path], seed: int) -> None:
    done = soak(tmp_path, disk, seed, rounds=720, seconds=DAY_S / 720)
    assert done.node.clocks.passed_s >= 0.9 * DAY_S
    for name, seen in done.memory.items():
        half = len(seen) // 2
        assert max(seen[half:]) <= max(seen[:half]) + 8 * MB, f"seed {seed}: the {name} grew: {seen[::40]}"
    for name, seen in done.taken.items():
        half = len(seen) // 2
        assert max(seen[half:]) <= max(seen[:half]) + MB, f"seed {seed}: the disk of the {name} grew: {seen[::40]}"


def test_what_a_job_prints_is_what_it_prints_alone(commands: Any, disk: Callable[[str], Path], tmp_path: Path) -> None:
    small, folder, lines = disk("small"), tmp_path / "told", 60
    script = tmp_path / "job.py"
    script.write_text(JOB)
    folder.write_text("0")
    chance = random.Random(SEEDS[0])
    going = commands.start("run", "--quiet", "--dir", small / "runs", script, folder, str(lines))
    killed = 0
    for number in range(1, lines):
        folder.write_text(str(number))
        what = chance.choice(["calm", "calm", "kill", "fill", "free"])
        if what == "fill":
            fill(small)
        elif what == "free":
            free(small)
        elif what == "kill" and killed < 3:
            for agent in commands.running("stepscope.agent"):
                agent.kill()
                killed += 1
    free(small)
    done = commands.finish(going)
    line, expected = "begin", ""
    for number in range(lines):
        line = hashlib.sha256(line.encode()).hexdigest()
        expected += f"{number} {line}\n"
    assert (done.code, done.stdout) == (0, expected), f"seed {SEEDS[0]}"
    printed = [line for line in done.stderr.splitlines() if not line.startswith("stepscope")]
    assert printed == [f"to stderr {number}" for number in range(lines)], f"seed {SEEDS[0]}"


@pytest.mark.faults
def test_run_directories_on_fuse(tmp_path: Path) -> None:
    """A file system in user space, where locks, links and renames are another program's."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
    below, above = tmp_path / "below", tmp_path / "above"
    below.mkdir()
    above.mkdir()
    if subprocess.run(["bindfs", str(below), str(above)], capture_output=True).returncode:
        pytest.skip("FUSE file systems cannot be mounted here")
    try:
        node = SoakNode(tmp_path, node_disk=above / "node", hub_disk=above / "hub")
        try:
            node.steps(100)
            node.start_agent()
            node.steps(100)
            node.start_hub()
            node.steps(100)
            assert node.finish()["delivered"] is True
            seal(node.hub_paths.run_dir)
            check_steps(Soak(node, 0, (above, above)), node.hub_paths.run_dir)
        finally:
            node.close()
    finally:
        subprocess.run(["umount", "--lazy", str(above)], check=True)
