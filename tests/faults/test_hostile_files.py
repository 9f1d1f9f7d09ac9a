"""Something else in place of any file of a run, for every command and every GET of the API.

Whatever it is, the result is an answer or one clear line with exit code 3: no traceback, no wait, no gigabytes, and
nothing of what a link points to.  ``tests/support/hostile_files.py`` makes the cases.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hostile_files
import httpx
import pytest

from stepscope.records.files import open_file
from stepscope.store import file_io
from stepscope.store.file_io import bounded_lines, read_jsonl
from stepscope.store.inbox.journal import FILE_HEAD as JOURNAL_HEAD
from stepscope.store.inbox.journal import FILE_MAGIC as JOURNAL_MAGIC
from stepscope.store.inbox.journal import VERSION as JOURNAL_VERSION
from stepscope.store.inbox.journal import read_journal
from stepscope.store.live import ring_files
from stepscope.store.live.ring_files import read_segment

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
MOST_BYTES = 600 << 20
"""The libraries alone take 150 MB."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and a copy of it while it was active; nobody may change them."""
    folder = tmp_path_factory.mktemp("hostile")
    words = [sys.executable, "-m", "stepscope", "run", "--quiet", "--name", "run"]
    job = [str(ROOT / "tests" / "toy_job.py"), "--steps", "1000000", "--pause-ms", "5"]
    process = subprocess.Popen([*words, *job], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    run_dir = folder / "runs" / "run"
    until = time.monotonic() + 60
    try:
        while not ([*run_dir.glob("steps/*.seg")] and (run_dir / "samples.jsonl").exists()):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until, sorted(run_dir.rglob("*"))
            time.sleep(0.05)
        shutil.copytree(run_dir, folder / "active")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    shutil.move(run_dir, folder / "finished")
    return folder


@pytest.fixture
def attack(
    recorded: Path, tmp_path_factory: pytest.TempPathFactory, run_python: Callable[..., Any]
) -> Callable[..., None]:
    """Try cases in one process; fail with every bad result, and if the process took much memory."""
    # Not the folder of the commands: whatever is in there is checked as a run that we recorded ourselves.
    work = tmp_path_factory.mktemp("attack")

    def tried(
        kinds: Sequence[str], actions: Sequence[str], names: Sequence[str] | None = None, runs: str = "finished active"
    ) -> None:
        document = {"runs": [str(recorded / run) for run in runs.split()], "kinds": kinds, "actions": actions}
        done = run_python(hostile_files.__file__, work, json.dumps({**document, "names": names}), timeout_s=280.0)
        cases = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.code == 0, f"the case after {cases[-1:]} never ended, or ended the process: {done.stderr}"
        peak_bytes = cases.pop()["peak_bytes"]
        bad = [case for case in cases if case["problem"]]
        assert not bad, "\n".join(
            f"{case['run']}/{case['name']} {case['kind']} {case['action']}: {case['problem']}" for case in bad
        )
        assert peak_bytes < MOST_BYTES

    return tried


OFTEN = (
    "events.jsonl",
    "layers.jsonl",
    "logs/main.log",
    "run.json",
    "stacks.jsonl",
    "steps.parquet",
    "steps/other.seg",
)
"""Files that are opened in different ways."""


def test_a_pipe_a_link_or_a_sparse_file_in_place_of_a_file(attack: Callable[..., None]) -> None:
    """Of one run in one process; every file, command and resource of both: the tests below."""
    attack(["pipe", "link", "sparse"], ["sql", "list"], OFTEN, runs="active")


@pytest.mark.soak
@pytest.mark.parametrize("run", ["finished", "active"])
@pytest.mark.parametrize("kind", sorted(hostile_files.KINDS))
@pytest.mark.parametrize("actions", [[*hostile_files.COMMANDS][at::4] for at in range(4)], ids=" ".join)
def test_every_file_and_every_command(attack: Callable[..., None], run: str, kind: str, actions: list[str]) -> None:
    attack([kind], actions, runs=run)


@pytest.mark.soak
@pytest.mark.parametrize("run", ["finished", "active"])
@pytest.mark.parametrize("kind", sorted(hostile_files.KINDS))
def test_every_file_and_every_get_of_the_api(attack: Callable[..., None], run: str, kind: str) -> None:
    attack([kind], [hostile_files.API], runs=run)


def test_a_hub_of_such_runs_answers_and_ends(recorded: Path, tmp_path: Path, commands: Any) -> None:
    """Six runs with a pipe as their log took all its threads, and SIGTERM waited for them."""
    folder = tmp_path / "many"
    names = [
        "logs/main.log",
        "events.jsonl",
        "labels.json",
        "samples.parquet",
        "layers.jsonl",
        "run.json",
        "steps.parquet",
    ]
    for number, name in enumerate(names):
        run_dir = folder / f"bad-{number}"
        shutil.copytree(recorded / "finished", run_dir)
        hostile_files.replace(run_dir, name, "pipe")
    shutil.copytree(recorded / "finished", folder / "good")
    (tmp_path / "token").write_text("token-of-this-test-only")
    (tmp_path / "token").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = commands.start("serve", folder, "--port", str(port), "--token-file", tmp_path / "token")
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers={"Authorization": "Bearer token-of-this-test-only"}
    ) as client:
        until = time.monotonic() + 60
        while True:
            try:
                client.get("/healthz")
                break
            except httpx.TransportError:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < until
                time.sleep(0.1)
        statuses = {
            path.name: client.get(f"/api/v1/runs/{path.name}", timeout=60).status_code
            for path in sorted(folder.iterdir())
        }
        listed = [run["id"] for run in client.get("/api/v1/runs", timeout=60).json()["runs"]]
    assert set(statuses.values()) == {200, 404}
    assert (statuses["good"], statuses["bad-0"]) == (200, 200), "its log is not needed"
    assert "good" in listed
    process.send_signal(signal.SIGTERM)
    assert commands.finish(process, timeout_s=30.0).code == 0


# -- the readers themselves -------------------------------------------------------------------------------------------


def test_one_function_opens_what_a_run_contains(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "run.json").write_text("{}")
    (run_dir / "logs" / "main.log").write_text("x")
    (tmp_path / "link").symlink_to(run_dir)
    with open_file(tmp_path / "link" / "logs" / "main.log") as file:
        assert file.read() == b"x", "a link to the run is the user's own"
    os.mkfifo(run_dir / "pipe")
    (run_dir / "inside").symlink_to("run.json")
    (run_dir / "device").symlink_to("/dev/zero")
    (run_dir / "hangs").symlink_to(tmp_path / "link" / "logs")
    for name, why in {
        "pipe": "not a regular file",
        "logs": "not a regular file",
        "inside": "a link, which a run does not contain",
        "device": "a link, which a run does not contain",
        "hangs/main.log": "its folder is a link, which a run does not contain",
    }.items():
        with pytest.raises(OSError, match=why):
            open_file(run_dir / name)
    with open_file(run_dir / "inside", links=True) as file:
        assert file.read() == b"{}"


def test_no_other_function_opens_files_to_read() -> None:
    """Outside ``open_file``, only what is not in a run: /proc and /sys, our page and cache, files that users name."""
    elsewhere = {
        "agent/hangs/rank_evidence.py", "agent/job_context.py", "agent/output_forwarder.py", "agent/procfs.py",
        "agent/sampling/host.py", "agent/sampling/off_cpu.py", "agent/stacks.py", "assistant/mcp_server.py",
        "captures/kineto_process.py", "cli/analysis/flight.py", "cli/commands/run.py", "cli/launch/live_view.py",
        "cli/launch/record.py", "cli/launch/slurm_tasks.py", "flight/decode.py", "hub/api/auth.py", "hub/api/runs.py",
        "hub/api/traces.py", "hub/traces/desk.py", "hub/transport.py", "integrations/exporter.py",
        "node_check/measure.py", "notebook/cells.py", "page/assets.py", "records/files.py", "records/run_clock.py",
        "ring/writer.py", "store/create.py", "store/liveness.py", "terminal/feed.py", "whatif/operations.py",
        "wire/handshake.py",
    }  # fmt: skip
    package = ROOT / "src" / "stepscope"
    opens = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in ("demo", "recorder", "traces")
        for line in path.read_text().splitlines()
        if any(call in line for call in ('.open("rb"', ".read_bytes()", ".read_text(", "os.O_RDONLY | os.O_CLOEXEC)"))
    }
    assert opens - elsewhere == set()


def test_lines_are_bounded_in_length_number_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io, "LONGEST_LINE", 32)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":1}\n' + b'{"b":"' + b"x" * 100 + b'"}\n{"c":3}\n')
    assert read_jsonl(path) == ([{"a": 1}, {"c": 3}], 1)
    with path.open("rb") as file, pytest.raises(OSError, match="it has more than 2 lines"):
        list(bounded_lines(file, most_lines=2))
    with path.open("rb") as file, pytest.raises(OSError, match="its lines have more than 0 MiB"):
        list(bounded_lines(file, most_bytes=10))


def test_holes_are_passed_over(tmp_path: Path) -> None:
    """A sparse file of terabytes is read as fast as what is in it."""
    lines, journal = tmp_path / "a.jsonl", tmp_path / "a.frames"
    with lines.open("wb") as file:
        file.write(b'{"a":1}\n')
        file.truncate(1 << 42)
        file.seek(1 << 42)
        file.write(b'\n{"b":2}\n')
    assert read_jsonl(lines) == ([{"a": 1}, {"b": 2}], 1)
    with journal.open("wb") as file:
        file.write(JOURNAL_HEAD.pack(JOURNAL_MAGIC, JOURNAL_VERSION, 0))
        file.truncate(1 << 42)
    assert list(read_journal(journal)) == []
    segment = tmp_path / "a.seg"
    with segment.open("wb") as file:
        file.write(ring_files.FILE_HEAD.pack(ring_files.FILE_MAGIC, ring_files.VERSION, 0))
        file.truncate(1 << 42)
    found = read_segment(segment)
    assert (found.slots, found.skipped_bytes) == (b"", (1 << 42) - ring_files.FILE_HEAD.size)


def test_a_segment_that_expands_a_thousandfold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.ring import RingBatch

    monkeypatch.setattr(ring_files, "MOST_UNPACKED", 1 << 20)
    path = tmp_path / "a.seg"
    writer = ring_files.SegmentWriter(path)
    for number in range(4):
        last = (number + 1) * ring_files.FRAME_SLOTS
        writer.append(RingBatch(slots=[bytes(256)] * ring_files.FRAME_SLOTS, last_seq=last, lost=0, torn=0))
    with pytest.raises(OSError, match="bytes expand to more than"):
        read_segment(path)
