"""A run near the limit of its disk: told once, logs and samples give way, steps never do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.agent import disk_space
from stepscope.agent.disk_space import DiskKeeper, SampleKeeper
from stepscope.agent.journal import Journal
from stepscope.cli.commands.run import add_arguments
from stepscope.store.file_io import MAX_DISK, disk_limit, read_jsonl, run_bytes
from stepscope.store.live.sample_files import open_sample_files, sample_segments

LIMIT = 4 << 20


class Node:
    def __init__(self, run_dir: Path, limit: int) -> None:
        self.run_dir = run_dir
        self.now_s = 0.0
        self.journal = Journal(run_dir)
        self.samples = SampleKeeper(run_dir, clock=lambda: self.now_s)
        self.keeper = DiskKeeper(run_dir, limit, journal=self.journal, samples=self.samples, clock=lambda: self.now_s)
        (run_dir / "steps").mkdir()
        (run_dir / "logs").mkdir()

    def minutes(self, minutes: int) -> None:
        for _ in range(minutes):
            second = int(self.now_s)
            power = {"kind": "gpu", "index": 0, "node": "a", "power_w": 300.0}
            self.journal.samples([{"wall_ns": (second + at) * 10**9, **power} for at in range(0, 60, 5)])
            self.journal.flush()
            with (self.run_dir / "steps" / "1.seg").open("ab") as file:
                file.write(bytes(1000))
            self.now_s += 60
            self.keeper.check()
            while self.samples.busy:
                self.keeper.check()

    def warnings(self) -> list[str]:
        self.journal.flush()
        return [event["message"] for event in read_jsonl(self.run_dir / "events.jsonl")[0]]

    def recorded(self) -> int:
        """How many samples, as they were taken or within coarser ones."""
        with open_sample_files(self.run_dir) as files:
            samples = [json.loads(line) for file in files for line in file]
        return sum(sample["over"]["samples"] if "over" in sample else 1 for sample in samples)


def test_below_the_limit_nothing_is_said(tmp_path: Path) -> None:
    node = Node(tmp_path, LIMIT)
    node.minutes(122)
    assert node.warnings() == []
    assert [segment.span_s for segment in sample_segments(tmp_path)] == [60, 0]


def test_near_the_limit_it_is_told_once_and_samples_of_the_past_get_coarser(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, LIMIT)
    node.minutes(122)
    (tmp_path / "large.bin").write_bytes(bytes(int(LIMIT * 0.8)))
    node.minutes(122)
    (warning,) = node.warnings()
    assert warning.endswith(
        "of the 4.0 MiB that --max-disk allows: from now on logs are shortened and past samples reduced to one per ten "
        "minutes; all steps are kept"
    )
    assert capsys.readouterr().err.count("--max-disk") == 1
    assert {segment.span_s for segment in sample_segments(tmp_path)} == {600}
    assert node.recorded() == 244 * 12
    assert (tmp_path / "steps" / "1.seg").stat().st_size == 244_000


def test_at_the_limit_samples_stop_and_steps_do_not_and_with_room_all_is_recorded_again(tmp_path: Path) -> None:
    node = Node(tmp_path, LIMIT)
    node.minutes(5)
    large = tmp_path / "large.bin"
    large.write_bytes(bytes(LIMIT))
    node.minutes(5)
    near, full = node.warnings()
    assert "from now on" in near
    assert full == (
        "the run uses all of the 4.0 MiB that --max-disk allows: no more samples are recorded; steps still are, and "
        "the job continues"
    )
    assert node.recorded() == 6 * 12
    assert (tmp_path / "steps" / "1.seg").stat().st_size == 10_000
    large.unlink()
    node.minutes(2)
    assert node.recorded() == 7 * 12
    large.write_bytes(bytes(LIMIT))
    node.minutes(5)
    assert len(node.warnings()) == 2, "each is told once"


def test_without_a_limit_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "run_bytes", lambda run_dir: pytest.fail("measured"))
    node = Node(tmp_path, 0)
    node.minutes(3)
    assert node.warnings() == []


def test_logs_that_cannot_be_bounded_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "bound_logs", lambda run_dir, **more: False)
    node = Node(tmp_path, LIMIT)
    node.minutes(5)
    assert node.warnings() == ["this file system cannot drop the middle of a long log; logs are kept in full"]


def test_near_the_limit_logs_get_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[int] = []

    def bound(run_dir: Path, *, all_bytes: int) -> bool:
        requests.append(all_bytes)
        return True

    monkeypatch.setattr(disk_space, "bound_logs", bound)
    node = Node(tmp_path, LIMIT)
    node.minutes(1)
    (tmp_path / "large.bin").write_bytes(bytes(int(LIMIT * 0.9)))
    node.minutes(2)
    assert requests == [disk_space.ALL_BYTES, disk_space.ALL_BYTES, LIMIT // 8]


def test_what_a_run_takes_is_what_its_files_take(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "a").write_bytes(bytes(8192))
    (tmp_path / "b").symlink_to("/dev/zero")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert 8192 <= run_bytes(tmp_path) < 1 << 20
    assert run_bytes(tmp_path / "not there") == 0


@pytest.mark.parametrize(
    ("said", "limit"), [({}, MAX_DISK), ({"max_disk": 5}, 5), ({"max_disk": 0}, 0), ({"max_disk": -1}, MAX_DISK)]
)
def test_the_limit_of_a_run(said: dict[str, Any], limit: int) -> None:
    assert disk_limit(said) == limit


@pytest.mark.parametrize(
    ("word", "size"), [("10G", 10 << 30), ("500m", 500 << 20), ("1.5T", 3 << 39), ("0", 0), ("2048", 2048)]
)
def test_sizes_on_the_command_line(word: str, size: int) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--max-disk", word]).max_disk == size


@pytest.mark.parametrize("word", ["much", "-1", "G", "1GG", "1.2.3", "nan", ""])
def test_what_is_no_size(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"--max-disk={word}"])
    assert "must be a size such as 10G or 500M" in capsys.readouterr().err
