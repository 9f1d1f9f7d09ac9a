"""The agent as a process: what it records, what it notices, and what it survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.records import records_of
from rings import step_phases

from stepscope.store.documents import read_meta, write_meta
from stepscope.store.file_io import read_jsonl
from stepscope.store.sealed.seal import seal

STEPS = "steps"


def segments(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in (run_dir / STEPS).glob("*.seg"))


def no_launcher(stage: Any) -> None:
    write_meta(stage.run_dir, {**read_meta(stage.run_dir), "launcher": None})


def test_a_run_from_beginning_to_end(stage: Any) -> None:
    agent = stage.agent()
    ranks = [stage.rank(0), stage.rank(1)]
    for count, rank in zip((1500, 40), ranks, strict=True):
        rank.steps(count)
    stage.until_event("rank_start", 2)
    stage.until(lambda: segments(stage.run_dir) > 0)
    stage.until((stage.run_dir / "samples.jsonl").exists)
    for count, rank in enumerate(ranks, start=1):  # one after the other, or their ends may be noticed in any order
        rank.end()
        stage.until_event("rank_end", count)
    assert agent.end() == ""
    assert not stage.paths.session.exists()
    assert stage.steps() == {0: list(range(1500)), 1: list(range(40))}
    data = stage.data()
    assert [series.state for series in data.ranks] == ["exited", "exited"]
    assert records_of(data.ranks[1])[0]["phase_ns"].tolist() == [list(step_phases(step)) for step in range(40)]
    assert all(series.ended_wall_ns for series in data.ranks)
    (start,) = stage.events("agent_start")
    (end,) = stage.events("agent_end")
    assert start["pid"] == end["pid"] == agent.process.pid
    assert (end["reason"], end["end"]) == ("ended", {"exit_code": 0, "status": "finished"})
    assert sorted((e["rank"], e["pid"]) for e in stage.events("rank_start")) == [
        (i, r.pid) for i, r in enumerate(ranks)
    ]
    assert [(e["rank"], e["state"]) for e in stage.events("rank_end")] == [(0, "exited"), (1, "exited")]
    seal(stage.run_dir)
    assert stage.steps() == {0: list(range(1500)), 1: list(range(40))}


def test_samples_and_that_it_is_small_polite_and_bounded(stage: Any) -> None:
    """No torch, no numpy, no database; lower priority; two descriptors a rank, given back when it ends."""
    agent = stage.agent()
    stage.until_event("agent_start")
    own = psutil.Process(agent.process.pid)
    before = own.num_fds()
    ranks = [stage.rank(rank) for rank in range(3)]
    stage.until_event("rank_start", 3)
    assert own.num_fds() <= before + 2 * len(ranks)
    for rank in ranks:
        rank.steps(4000)
    stage.until(lambda: any(s["kind"] == "process" for s in read_jsonl(stage.run_dir / "samples.jsonl")[0]))
    for rank in ranks:
        rank.end()
    stage.until_event("rank_end", 3)
    stage.until(lambda: own.num_fds() <= before)
    loaded = {Path(mapped.path).name.split(".")[0] for mapped in own.memory_maps()}
    assert not any(name.startswith(("libtorch", "_multiarray", "_duckdb", "duckdb")) for name in loaded)
    assert own.nice() >= 5
    assert own.memory_info().rss < 48 << 20
    agent.end()
    samples = read_jsonl(stage.run_dir / "samples.jsonl")[0]
    host = next(sample for sample in samples if sample["kind"] == "host")
    process = next(sample for sample in samples if sample["kind"] == "process")
    assert {"wall_ns", "mono_ns", "node", "cpu_percent", "cpu_count", "load1", "mem_total", "mem_available"} <= set(
        host
    )
    assert {"swap_used", "net_rx_bps", "net_tx_bps"} <= set(host)
    assert process["pid"] == ranks[process["rank"]].pid
    assert process["rss"] > 1 << 20
    assert process["threads"] >= 1
    assert process["cpu_percent"] >= 0


FAKE_NVML = """
import sys
from types import SimpleNamespace
unknown = lambda *_: (_ for _ in ()).throw(OSError())
class Nvml:
    NVMLError = OSError
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_CLOCK_MEM = 0
    nvmlInit = lambda self: None
    nvmlDeviceGetCount = lambda self: 1
    nvmlDeviceGetHandleByIndex = lambda self, index: index
    nvmlDeviceGetUtilizationRates = lambda self, handle: SimpleNamespace(gpu=97, memory=5)
    __getattr__ = lambda self, name: unknown
sys.modules["pynvml"] = Nvml()
import stepscope.agent.loop
stepscope.agent.loop.GPU_QUICK_FOR_S = {quick_s}
"""


@pytest.mark.parametrize("quick_s", [3600.0, pytest.param(0.0, marks=pytest.mark.soak)])
def test_gpus_are_sampled_more_often_while_ranks_are_new(stage: Any, quick_s: float) -> None:
    agent = stage.agent(prelude=FAKE_NVML.format(quick_s=quick_s))
    rank = stage.rank(0)

    def sampled(kind: str) -> list[dict[str, Any]]:
        return [line for line in read_jsonl(stage.run_dir / "samples.jsonl")[0] if line["kind"] == kind]

    stage.until_event("rank_start")
    if quick_s:
        stage.until(lambda: len(sampled("gpu")) >= len(sampled("host")) + 5)
    else:
        # As often as the host: whatever the machine does meanwhile, both are due at the same looks.
        stage.until(lambda: len(sampled("host")) >= 4)
        assert len(sampled("gpu")) <= len(sampled("host")) + 1
    rank.end()
    agent.end()
    sample = sampled("gpu")[0]
    assert (sample["index"], sample["util_percent"], sample["mem_util_percent"]) == (0, 97, 5)


@pytest.mark.faults
def test_a_killed_rank_is_noticed_and_loses_nothing(stage: Any) -> None:
    agent = stage.agent()
    first, second, third = stage.rank(0), stage.rank(1), stage.rank(2)
    for rank in (first, second, third):
        rank.steps(25)
    stage.until_event("rank_start", 3)
    second.kill()
    stage.until_event("rank_end", 1)
    first.end("EXCEPTION")
    stage.until_event("rank_end", 2)
    stage.until(lambda: not second.path.exists())
    third.end()
    agent.end(1, "failed")
    ends = stage.events("rank_end")
    assert [(end["rank"], end["pid"], end["state"]) for end in ends] == [
        (1, second.pid, "vanished"),
        (0, first.pid, "exception"),
        (2, third.pid, "exited"),
    ]
    assert ends[0]["wall_ns"] < ends[1]["wall_ns"] < ends[2]["wall_ns"]
    assert stage.steps() == {rank: list(range(25)) for rank in range(3)}
    assert [series.state for series in stage.data().ranks] == ["exception", "vanished", "exited"]


@pytest.mark.faults
def test_a_killed_agent_is_replaced_without_loss_or_repeat(stage: Any) -> None:
    rank = stage.rank(0)
    total = 0
    for _ in range(3):
        agent = stage.agent()
        rank.steps(700)
        total += 700
        before = segments(stage.run_dir)
        stage.until(lambda before=before: segments(stage.run_dir) > before)
        agent.kill()
        rank.steps(50)
        total += 50
    assert stage.steps() == {0: list(range(total))}
    assert stage.data().ranks[0].state == "running"
    agent = stage.agent()
    stage.until_event("agent_start", 4)
    rank.end()
    agent.end()
    assert stage.steps() == {0: list(range(total))}
    assert len(stage.events("rank_start")) == 1
    assert len(stage.events("rank_end")) == 1
    series = stage.data().ranks[0]
    assert (series.lost, series.torn, series.state) == (0, 0, "exited")


@pytest.mark.faults
def test_an_agent_killed_for_good_is_missed_but_its_steps_are_not(stage: Any) -> None:
    rank = stage.rank(0)
    agent = stage.agent()
    rank.steps(600)
    stage.until(lambda: segments(stage.run_dir) > 0)
    agent.kill()
    rank.steps(7)
    rank.kill()
    no_launcher(stage)
    data = stage.data()
    assert stage.steps() == {0: list(range(607))}
    assert data.ranks[0].state == "vanished"
    assert "The agent died before the run ended; there are no host and GPU samples after that." in data.notices


@pytest.mark.faults
def test_without_a_launcher_it_stays_until_the_ranks_are_gone(stage: Any) -> None:
    agent = stage.agent()
    rank = stage.rank(0)
    stage.until_event("rank_start")
    agent.leave()
    rank.steps(30)
    stage.until(lambda: segments(stage.run_dir) > 0)
    assert agent.process.poll() is None
    rank.end()
    agent.wait()
    (end,) = stage.events("agent_end")
    assert end["reason"] == "orphaned"
    assert stage.steps() == {0: list(range(30))}
    assert not stage.paths.session.exists()


@pytest.mark.faults
def test_without_a_launcher_it_waits_for_the_ranks_parent(stage: Any) -> None:
    """Between two attempts of an elastic job no rank is there; but torchrun is."""
    agent = stage.agent()
    quick_rank = [sys.executable, "-c", QUICK_RANK, str(stage.paths.session), str(stage.run_dir / "events.jsonl")]
    parent = subprocess.Popen(
        ["/bin/sh", "-c", '"$@"; read line', "torchrun", *quick_rank],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    stage.until_event("rank_end")
    agent.leave()
    second = stage.rank(1)
    stage.until_event("rank_start", 2)
    second.end()
    stage.until_event("rank_end", 2)
    assert agent.process.poll() is None
    parent.communicate("end\n")
    agent.wait()
    assert stage.events("agent_end")[0]["reason"] == "orphaned"


QUICK_RANK = """
import os, platform, sys, time
from pathlib import Path
from stepscope.records.identity import RankIdentity
from stepscope.ring import RingWriter
session, events = map(Path, sys.argv[1:])
RingWriter(session / f"{os.getpid()}.ring", RankIdentity(host=platform.node(), pid=os.getpid()))
while not events.exists() or "rank_start" not in events.read_text():
    time.sleep(0.01)
"""


@pytest.mark.faults
def test_interrupts_are_for_the_launcher_and_sigterm_ends_it_in_order(stage: Any) -> None:
    agent = stage.agent()
    rank = stage.rank(0)
    rank.steps(10)
    stage.until_event("rank_start")
    agent.process.send_signal(signal.SIGINT)
    agent.process.send_signal(signal.SIGHUP)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 0
    assert stage.events("agent_end")[0]["reason"] == "terminated"
    assert segments(stage.run_dir) > 0
    assert rank.path.exists(), "its process lives: the ring is its own"
    rank.steps(5)
    assert stage.steps() == {0: list(range(15))}
    rank.end()


def test_a_rank_that_outlives_the_job_keeps_its_ring(stage: Any) -> None:
    agent = stage.agent()
    rank = stage.rank(4)
    rank.steps(3)
    agent.end()
    assert rank.path.exists()
    assert stage.events("warning")[0]["message"] == f"rank 4 (process {rank.pid}) was still running when the job ended"
    rank.steps(3)
    rank.end()
    seal(stage.run_dir)
    assert stage.steps() == {4: list(range(6))}
    assert not stage.paths.session.exists()


def test_short_lives_rings_elsewhere_what_is_no_ring_and_no_repository(stage: Any, tmp_path: Path) -> None:
    """Ranks that come and go between two looks, one of them in the run directory; files that cannot be read stay."""
    write_meta(stage.run_dir, {**read_meta(stage.run_dir), "cwd": str(tmp_path / "gone")})
    (stage.paths.session / "1.ring").write_bytes(b"hello")
    (stage.paths.session / "2.ring").write_bytes(b"STEPRING\x07" + bytes(5000))
    agent = stage.agent("--interval", "30")
    for rank, folder in enumerate((stage.paths.session, stage.run_dir / "rings")):
        one = stage.rank(rank, folder=folder)
        one.steps(4)
        one.end()
    agent.end()
    assert stage.steps() == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    assert list((stage.run_dir / "rings").iterdir()) == []
    assert [e["message"] for e in stage.events("warning")] == [
        f"A ring could not be read: {stage.paths.session}/2.ring has ring layout 7; this Stepscope reads layout 2."
    ]
    assert sorted(path.name for path in stage.paths.session.iterdir()) == ["1.ring", "2.ring", "run"]
    assert stage.events("context") == []


def test_a_writer_that_is_too_fast_is_counted(stage: Any) -> None:
    rank = stage.rank(0, capacity=4096)
    rank.steps(1000)
    agent = stage.agent()
    stage.until_event("rank_start")
    rank.end()
    agent.end()
    series = stage.data().ranks[0]
    kept = series.steps["step"].tolist()
    assert (series.lost, kept) == (1000 - len(kept), list(range(1000 - len(kept), 1000)))
    assert 100 < len(kept) < 4096 / 10
    assert f"rank 0: {series.lost} records were overwritten before they could be read" in [
        event["message"] for event in stage.events("warning")
    ]


def test_git_is_asked_without_waiting(stage: Any, tmp_path: Path) -> None:
    repository = tmp_path / "code"
    repository.mkdir()
    (repository / "train.py").write_text("1\n")
    for words in (
        ["init", "-q", "-b", "trunk"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True)
    (repository / "train.py").write_text("2\n")
    write_meta(stage.run_dir, {**read_meta(stage.run_dir), "cwd": str(repository)})
    agent = stage.agent()
    stage.until_event("context")
    agent.end()
    (context,) = stage.events("context")
    git = context["git"]
    assert len(git["commit"]) == 40
    assert (git["branch"], git["dirty"]) == ("trunk", True)
    assert "train.py | 2 +-" in git["diff_stat"]
    assert stage.data().meta["git"] == git


def test_a_folder_that_is_no_run_is_one_clear_line(stage: Any) -> None:
    (stage.run_dir / "run.json").unlink()
    agent = stage.agent()
    _, complaint = agent.process.communicate(timeout=30)
    assert agent.process.returncode == 3
    assert complaint == f"stepscope: agent: {stage.run_dir} is not a run: it contains no run.json\n"


LIMIT = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, resource.RLIM_INFINITY))"
RAISE_ON_USR1 = (
    "import signal, resource\n"
    "lift = lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
    "signal.signal(signal.SIGUSR1, lift)"
)


@pytest.mark.faults
def test_a_full_disk_is_waited_for_and_nothing_is_lost_or_doubled(stage: Any) -> None:
    """Files may not grow past 2 KB, so every write soon fails half way; then the limit is lifted."""
    rank = stage.rank(0)
    agent = stage.agent(prelude=f"{LIMIT.format(2000)}\n{RAISE_ON_USR1}")
    stage.until_event("rank_start")
    rank.steps(3000)
    assert agent.process.stderr is not None
    complaint = agent.process.stderr.readline()
    assert complaint.startswith(
        f"stepscope: cannot write to {stage.run_dir}: File too large; steps stay in their rings"
    )
    rank.steps(1000)
    assert segments(stage.run_dir) <= 2000
    assert stage.steps() == {0: list(range(4000))}
    agent.process.send_signal(signal.SIGUSR1)
    stage.until(lambda: segments(stage.run_dir) > 2000)
    rank.end()
    assert agent.end() == "", "it complains once"
    assert stage.steps() == {0: list(range(4000))}
    messages = [event["message"] for event in stage.events("warning")]
    assert messages == [f"cannot write to {stage.run_dir}: File too large", f"{stage.run_dir} is writable again"]
    series = stage.data().ranks[0]
    assert (series.lost, series.torn) == (0, 0)


@pytest.mark.faults
def test_a_disk_that_stays_full_leaves_the_rings(stage: Any) -> None:
    rank = stage.rank(0)
    agent = stage.agent(prelude=LIMIT.format(0))
    rank.steps(20)
    rank.end()
    complaint = agent.end()
    assert complaint.count("\n") == 1
    assert rank.path.exists()
    assert stage.steps() == {0: list(range(20))}
    seal(stage.run_dir)
    assert stage.steps() == {0: list(range(20))}


@pytest.fixture
def small_disk(stage: Any) -> Any:
    """The run directory on a file system of its own, 64 KB large; only root may mount one."""
    content = {path: path.read_bytes() for path in stage.run_dir.iterdir() if path.is_file()}
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(stage.run_dir)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    for path, data in content.items():
        path.write_bytes(data)
    for name in ("steps", "rings", "errors", "logs"):
        (stage.run_dir / name).mkdir()
    yield stage.run_dir
    stage.close()
    subprocess.run(["umount", str(stage.run_dir)], check=True)


@pytest.mark.faults
def test_a_really_full_disk(stage: Any, small_disk: Path) -> None:
    filler = small_disk / "filler"
    rank = stage.rank(0)
    agent = stage.agent()
    stage.until_event("rank_start")
    stage.until(lambda: any((small_disk / "steps").glob("*.json")))
    filler.write_bytes(bytes(36 << 10))
    rank.steps(4000)
    assert agent.process.stderr is not None
    assert "No space left on device" in agent.process.stderr.readline()
    filler.unlink()
    stage.until(lambda: segments(small_disk) > 0)
    rank.kill()
    agent.end()
    series = stage.data().ranks[0]
    assert series.steps["step"].tolist() == list(range(4000))
    assert (series.lost, series.torn) == (0, 0)


@pytest.mark.faults
def test_a_read_only_run_directory(stage: Any, small_disk: Path) -> None:
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True, capture_output=True)
    rank = stage.rank(0)
    agent = stage.agent()
    rank.steps(20)
    rank.end()
    complaint = agent.end()
    assert complaint == (
        f"stepscope: cannot write to {small_disk}: Read-only file system; "
        "steps stay in their rings until it is writable again\n"
    )
    assert stage.steps() == {0: list(range(20))}
