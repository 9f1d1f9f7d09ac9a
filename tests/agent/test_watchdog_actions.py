"""What follows a hang: a command, the end of the job; and how it is known that the kernel ran out of memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from waiting import until

from stepscope.agent.hangs.on_hang import HangPolicy, OnHang, seconds_from
from stepscope.agent.journal import Journal
from stepscope.agent.sampling.host import OomWatch
from stepscope.cli.launch.helpers import aborted_end
from stepscope.cli.main import build_parser
from stepscope.errors import UsageError
from stepscope.records.hang import Culprit, HangRecord
from stepscope.store.file_io import read_jsonl

RECORD = HangRecord(
    number=3,
    host="node",
    kind="hang_host",
    title="Ranks 1 and 4 are stopped.",
    declared_wall_ns=2,
    stopped_wall_ns=1,
    threshold_s=10.0,
    culprits=(Culprit(rank=1, reason="is stopped"), Culprit(rank=4, reason="is stopped")),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_to_report_is_to_do_nothing(run_dir: Path) -> None:
    assert OnHang("report", run_dir, Journal(run_dir)).act(RECORD, run_dir / "x.json") == ""


def test_the_launcher_is_asked_to_end_the_job(run_dir: Path, pipe: tuple[int, int]) -> None:
    on_hang = OnHang("abort", run_dir, Journal(run_dir), launcher=pipe[1])
    assert not on_hang.aborted
    assert on_hang.act(RECORD, run_dir / "x.json") == "asked the launcher to end the job"
    assert on_hang.aborted
    assert json.loads(os.read(pipe[0], 4096)) == {"abort": {"number": 3, "kind": "hang_host"}}


@pytest.mark.filterwarnings("ignore")
def test_without_a_launcher_nobody_can_end_it(run_dir: Path, pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    on_hang = OnHang("abort", run_dir, Journal(run_dir), launcher=pipe[1])
    assert on_hang.act(RECORD, run_dir / "x.json") == "could not end the job: its launcher is gone"
    assert not on_hang.aborted


def test_a_command_knows_what_hangs(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEPSCOPE_CACHE_GB", "STEPSCOPE_HTML"):  # of the tests themselves
        monkeypatch.delenv(name, raising=False)
    journal = Journal(run_dir)
    command = "env | grep ^STEPSCOPE_ | sort; echo trouble >&2; exit 3"
    on_hang = OnHang(command, run_dir, journal)
    assert on_hang.act(RECORD, run_dir / "hangs" / "node-3.json").startswith("started the command (process ")
    until(lambda: on_hang.poll() or on_hang._running is None)
    assert (run_dir / "logs" / "on-hang.log").read_text().splitlines() == [
        f"STEPSCOPE_HANG_FILE={run_dir}/hangs/node-3.json",
        "STEPSCOPE_HANG_KIND=hang_host",
        "STEPSCOPE_HANG_RANKS=1,4",
        f"STEPSCOPE_RUN_DIR={run_dir}",
        "trouble",
    ]
    journal.flush()
    (event,) = read_jsonl(run_dir / "events.jsonl")[0]
    assert (event["event"], event["exit_code"]) == ("on_hang_end", 3)


def test_one_command_at_a_time(run_dir: Path) -> None:
    on_hang = OnHang(f"while [ ! -e {run_dir}/go ]; do sleep 0.01; done", run_dir, Journal(run_dir))
    on_hang.act(RECORD, run_dir / "x.json")
    repeated = on_hang.act(RECORD, run_dir / "x.json")
    assert repeated == "did not start the command: it is still running from an earlier hang"
    (run_dir / "go").touch()
    until(lambda: on_hang.poll() or on_hang._running is None)
    assert on_hang.act(RECORD, run_dir / "x.json").startswith("started the command")
    until(lambda: on_hang.poll() or on_hang._running is None)


def test_a_command_whose_log_cannot_be_written(tmp_path: Path) -> None:
    on_hang = OnHang("true", tmp_path / "none", Journal(tmp_path))
    assert on_hang.act(RECORD, tmp_path / "x.json") == "could not start the command: No such file or directory"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [({}, 10.0), ({"STEPSCOPE_HANG_AFTER": "2.5"}, 2.5), ({"STEPSCOPE_HANG_AFTER": "0"}, 0.0)]
    + [({"STEPSCOPE_HANG_AFTER": odd}, 10.0) for odd in ("", "soon", "-1", "nan", "inf")],
)
def test_seconds_from_the_environment(environ: dict[str, str], seconds: float) -> None:
    assert seconds_from(environ) == seconds


def test_options() -> None:
    parser = build_parser(["run"])
    args = parser.parse_args(["run"])
    assert (args.on_hang, args.hang_after, HangPolicy().action) == ("report", None, "report")
    args = parser.parse_args(["run", "--on-hang", "notify me", "--hang-after", "0.5"])
    assert (args.on_hang, args.hang_after) == ("notify me", 0.5)
    for odd in ("-1", "nan", "soon"):
        with pytest.raises(UsageError, match="hang-after"):
            parser.parse_args(["run", f"--hang-after={odd}"])


@pytest.mark.parametrize(("code", "exit_code"), [(0, 1), (-15, 1), (-9, 1), (1, 1), (7, 7), (255, 1)])
def test_a_job_that_was_ended_failed(code: int, exit_code: int) -> None:
    end = aborted_end(code)
    assert (end.exit_code, end.status) == (exit_code, "failed")


# -- out of memory ----------------------------------------------------------------------------------------------------


class Machine:
    """Kernel files under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/vmstat", "nr_free_pages 5\noom_kill 7\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/job/step\n", "sys/fs/cgroup/job/step/memory.events", "low 0\noom 9\noom_kill {}\noom_group_kill 0\n"),
        ("0::/\n", "sys/fs/cgroup/memory.events", "oom_kill {}\n"),
        (
            "5:memory:/a:b\n1:cpu:/x\n0::/\n",
            "sys/fs/cgroup/memory/a:b/memory.oom_control",
            "oom_kill_disable 0\noom_kill {}\n",
        ),
        ("0::/not/here\n", "proc/vmstat", "nr_free_pages 5\noom_kill {}\n"),
        ("", "proc/vmstat", "oom_kill {}\n"),
    ],
)
def test_the_kernels_counters(machine: Machine, cgroup: str, file: str, text: str) -> None:
    machine.write("proc/50/cgroup", cgroup)
    machine.write("proc/51/cgroup", cgroup)
    machine.write(file, text.format(2))
    watch = OomWatch(machine.root)
    watch.watch(50)
    watch.watch(51)
    machine.write(file, text.format(3))
    watch.sample()  # somebody else's, long ago
    assert not watch.killed(50)
    watch.watch(50)
    machine.write(file, text.format(4))
    assert watch.killed(50)
    assert not watch.killed(51)  # one kill, one victim
    assert not watch.killed(50)
    assert not watch.killed(99)


def test_where_nothing_is_counted(tmp_path: Path) -> None:
    watch = OomWatch(tmp_path)
    watch.watch(50)
    watch.sample()
    assert not watch.killed(50)
