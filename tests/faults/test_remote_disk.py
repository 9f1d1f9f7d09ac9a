"""A run directory on a real FUSE mount, and a server that stops answering or dies: the job never notices."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.records.files import is_remote
from stepscope.store.load import open_run

pytestmark = pytest.mark.faults
STEPS = 300
JOB = ("--steps", str(STEPS), "--pause-ms", "10")


class Disk:
    """What a file server is to a network file system: ``folder`` is served by a process of ours."""

    def __init__(self, place: Path) -> None:
        self._served, self.folder = place / "served", place / "mounted"
        self._served.mkdir(parents=True)
        self.folder.mkdir()
        self.serve()

    def serve(self) -> None:
        self.server = subprocess.Popen(["bindfs", "-f", str(self._served), str(self.folder)], stderr=subprocess.DEVNULL)
        while not self.folder.is_mount():
            if self.server.poll() is not None:
                pytest.skip("a FUSE file system can be mounted by root only")
            time.sleep(0.01)

    def die(self) -> None:
        self.server.kill()
        self.server.wait()

    def unmount(self) -> None:
        self.die()
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
    made = Disk(tmp_path_factory.mktemp("disk"))
    yield made
    made.unmount()


def begun(start: Callable[..., Any], toy: Path, disk: Disk) -> Any:
    patient = start("run", "--quiet", "--name", "far", "--dir", disk.folder, toy, *JOB)
    patient.wait_for("step 5 ")
    patient.until((disk.folder / "far" / "events.jsonl").exists)
    return patient


def test_while_it_does_not_answer_the_job_prints_and_trains_on(
    start: Callable[..., Any], toy: Path, disk: Disk
) -> None:
    patient = begun(start, toy, disk)
    disk.server.send_signal(signal.SIGSTOP)
    patient.wait_for(f"step {STEPS - 1} ")
    disk.server.send_signal(signal.SIGCONT)
    done = patient.finish()
    assert (done.code, done.stderr) == (0, "")
    run_dir = disk.folder / "far"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]["total"], summary["ranks"][0]["lost"]) == ("finished", STEPS, 0)
    assert (run_dir / "logs" / "main.log").read_text() == patient.printed + done.stdout
    meta = json.loads((run_dir / "run.json").read_text())
    assert meta["sealed"] is True
    assert not Path(meta["session"]).exists()


@pytest.mark.soak  # near: the test above
def test_when_its_server_died_and_it_is_mounted_again_nothing_is_missing(
    start: Callable[..., Any], toy: Path, disk: Disk, run_stepscope: Callable[..., Any]
) -> None:
    patient = begun(start, toy, disk)
    disk.die()
    done = patient.finish()
    assert done.code == 0
    assert done.stderr.endswith(
        f"stepscope: the recorded data is kept in memory; run `stepscope report {disk.folder / 'far'}` "
        "when the directory is available again\n"
    )
    disk.unmount()
    disk.serve()
    run_dir = disk.folder / "far"
    assert run_stepscope("report", "--quiet", run_dir).code == 0
    assert [len(rank.steps) for rank in open_run(run_dir).ranks] == [STEPS]
    assert (run_dir / "logs" / "main.log").read_text() == patient.printed + done.stdout
    assert not Path(json.loads((run_dir / "run.json").read_text())["session"]).exists()


def test_such_a_file_system_is_known_by_its_kind(disk: Disk, tmp_path: Path) -> None:
    assert is_remote(disk.folder)
    assert not is_remote(tmp_path)
    assert not is_remote(disk.folder / "missing")
