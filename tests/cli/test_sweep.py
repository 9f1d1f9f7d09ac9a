"""``stepscope sweep``: the plan, the order of trials, failures, and resuming.  Jobs are stood in for."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.cluster import Cluster
from made_runs import record
from page_files import data_in

from stepscope.cli.experiments import sweep
from stepscope.cli.main import run_command
from stepscope.errors import RunError, UsageError
from stepscope.reports import summarize
from stepscope.store.documents import save_summary
from stepscope.store.locks import take_lock

PLAN = """\
name = "small"
command = "train.py --steps 40"
options = "--nproc-per-node 2"
rounds = 2
timeout_s = 5

[env]
SHARED = 1

[[variant]]
name = "base"

[[variant]]
name = "slow"
args = ["--delay", 30]
env = { EXTRA = "yes" }

[[variant]]
name = "big"
args = "--batch 'a lot'"
"""


class Jobs:
    """Stands in for ``Popen``: makes the run that the job would have made."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.environments: list[dict[str, str]] = []
        self.commands: list[list[str]] = []
        self.act: Callable[[str], str | None] = lambda name: None
        """By the name of a run: how it fails; None: it finishes."""

    def __call__(self, command: list[str], **how: Any) -> Jobs.Job:
        return self.Job(self, command, how)

    class Job:
        def __init__(self, jobs: Jobs, command: list[str], how: dict[str, Any]) -> None:
            self.jobs = jobs
            self.words = command[command.index("stepscope") + 1 :]
            self.name = self.words[self.words.index("--name") + 1]
            self.runs = Path(self.words[self.words.index("--dir") + 1])
            self.returncode: int | None = None
            self.signals: list[int] = []
            jobs.commands.append(self.words)
            jobs.environments.append(how["env"])
            jobs.started.append(self.name)

        def wait(self, _timeout_s: float | None = None) -> int:
            said = self.jobs.act(self.name)
            if said == "hangs" and not self.signals:
                raise subprocess.TimeoutExpired("x", 5)
            if said == "interrupted" and not self.signals:
                raise KeyboardInterrupt
            self.returncode = 0 if said is None else 1
            if said is None or said == "out of memory":
                ms = 60.0 if "--delay" in self.words else 20.0
                steps = 40 if said is None else 0  # memory is often too small for the first step already
                data = Cluster(ranks=2, steps=steps, seed=len(self.name), phases_ms={"forward": ms}).run()
                summary = summarize(data)
                summary["memory"]["rss_peak"] = {"bytes": int(ms) << 20, "rank": 0}
                if said is not None:
                    summary |= {"status": "failed", "status_text": said, "status_severity": "critical"}
                else:
                    summary |= {"status": "finished", "status_severity": "info"}
                save_summary(record(self.runs, self.name, data), summary, "")
            return self.returncode

        def send_signal(self, number: int) -> None:
            self.signals.append(number)

        def kill(self) -> None:
            raise AssertionError


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    jobs = Jobs()
    monkeypatch.setattr(sweep, "Popen", jobs)
    return jobs


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def result(folder: Path) -> dict[str, dict[str, Any]]:
    document = json.loads((folder / "sweeps/small/result.json").read_text())
    return {row["variant"]: row for row in document["variants"]}


def test_variants_take_turns_and_each_is_an_ordinary_run(
    jobs: Jobs, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.act = lambda name: "out of memory" if name.startswith("big") else None
    assert run_command(["sweep", str(plan)]) == 0
    assert jobs.started == ["base-1", "slow-1", "big-1", "base-2", "slow-2"]  # what failed is not repeated
    assert jobs.commands[1][jobs.commands[1].index("--nproc-per-node") :] == [
        "--nproc-per-node", "2", "train.py", "--steps", "40", "--delay", "30",
    ]  # fmt: skip
    assert jobs.commands[2][-1] == "a lot"
    assert jobs.environments[1]["SHARED"] == "1"
    assert [environment.get("EXTRA") for environment in jobs.environments[:3]] == [None, "yes", None]
    rows = result(tmp_path)
    assert [(name, row["status"], row["front"]) for name, row in rows.items()] == [
        ("base", "finished", "front"),
        ("slow", "finished", "dominated"),
        ("big", "out of memory", "none"),
    ]
    assert rows["base"]["memory"] == 20 << 20
    shown = capsys.readouterr()
    assert shown.out.startswith("Fastest: base, ")
    assert "big failed: out of memory." in shown.out
    assert "stepscope: round 1 of 2, slow (2 of 6)" in shown.err
    assert (tmp_path / "sweeps/small/front.svg").read_text().startswith("<svg ")
    assert "| base | finished |" in (tmp_path / "sweeps/small/result.md").read_text()


def test_a_second_call_runs_what_is_missing(jobs: Jobs, plan: Path, tmp_path: Path) -> None:
    jobs.act = lambda name: "interrupted" if name == "big-1" else None
    assert run_command(["sweep", str(plan)]) == 130
    assert jobs.started == ["base-1", "slow-1", "big-1"]
    assert {name: row["status"] for name, row in result(tmp_path).items()}["big"] == "not run yet"
    jobs.act = lambda name: None
    jobs.started.clear()
    assert run_command(["sweep", str(plan)]) == 0
    assert jobs.started == ["big-1", "base-2", "slow-2", "big-2"]
    jobs.started.clear()
    assert run_command(["sweep", str(plan), "--json"]) == 0
    assert jobs.started == []
    assert run_command(["sweep", str(plan), "--rounds", "3"]) == 0
    assert jobs.started == ["base-3", "slow-3", "big-3"]
    jobs.started.clear()
    plan.write_text(PLAN.replace("--delay", "--wait"))
    assert run_command(["sweep", str(plan)]) == 0
    assert jobs.started == ["slow-1-2", "slow-2-2"]  # another command: earlier trials do not count


def test_the_result_so_far_is_there_after_each_trial(jobs: Jobs, plan: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def act(name: str) -> None:
        done = tmp_path / "sweeps/small/result.json"
        seen.append([row["status"] for row in result(tmp_path).values()] if done.is_file() else [])

    jobs.act = act
    assert run_command(["sweep", str(plan), "--rounds", "1"]) == 0
    assert seen == [[], ["finished", "not run yet", "not run yet"], ["finished", "finished", "not run yet"]]


def test_the_page_is_written_and_no_secret_is_in_it(jobs: Jobs, plan: Path, tmp_path: Path, small_page: Path) -> None:
    plan.write_text(PLAN.replace('EXTRA = "yes"', 'API_TOKEN = "hush"').replace("'a lot'", "'a lot' --password hush"))
    page = tmp_path / "front.html"
    assert run_command(["sweep", str(plan), "--html", str(page)]) == 0
    report = data_in(page.read_bytes())[0]["report"]
    assert (report["kind"], report["name"]) == ("sweep", "small")
    assert [point["name"] for point in report["parts"][0]["points"]] == ["base", "big", "slow"]
    assert jobs.environments[1]["API_TOKEN"] == "hush"
    rows = result(tmp_path)
    assert rows["slow"]["settings"]["env"] == {"API_TOKEN": "[redacted]"}
    assert rows["big"]["settings"]["args"] == ["--batch", "a lot", "--password", "[redacted]"]
    assert "hush" not in json.dumps([report, rows])
    with pytest.raises(UsageError, match="is an input file and would be overwritten"):
        run_command(["sweep", str(plan), "--html", str(plan)])


def test_a_trial_that_takes_too_long_is_ended(
    jobs: Jobs, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.act = lambda name: "hangs" if name.startswith("slow") else None
    assert run_command(["sweep", str(plan)]) == 0
    assert result(tmp_path)["slow"]["status"] == "timed out"
    jobs.act = lambda name: None
    jobs.started.clear()
    assert run_command(["sweep", str(plan), "--retry-failed"]) == 0
    assert jobs.started == ["slow-1", "slow-2"]
    assert result(tmp_path)["slow"]["status"] == "finished"


def test_a_sweep_without_any_result_fails(jobs: Jobs, plan: Path) -> None:
    jobs.act = lambda name: "exception"
    assert run_command(["sweep", str(plan)]) == 1


def test_the_number_of_ranks_can_be_given(jobs: Jobs, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sweep", str(plan), "--dry-run", "--nproc-per-node", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "base: SHARED=1 stepscope run --nproc-per-node 1 train.py --steps 40",
        "slow: SHARED=1 EXTRA=yes stepscope run --nproc-per-node 1 train.py --steps 40 --delay 30",
        "big: SHARED=1 stepscope run --nproc-per-node 1 train.py --steps 40 --batch 'a lot'",
    ]
    assert jobs.started == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("command = 'x'\n", r"needs at least one \[\[variant\]\]"),
        ("[[variant]]\nname = 'a'\n", "needs a `command`"),
        ("command = 'x'\n[[variant]]\n", "None is not a name"),
        ("command = 'x'\n[[variant]]\nname = '../a'\n", "is not a name"),
        ("command = 'x'\n[[variant]]\nname = 'a'\n[[variant]]\nname = 'a'\n", "two variants are named a"),
        ("command = 'x'\n[[variant]]\nname = 'a'\nsamples = 2\n[[variant]]\nname = 'b'\n", "either all variants"),
        ("command = 'x'\nround = 3\n[[variant]]\nname = 'a'\n", "unknown key 'round'"),
        ("command = 'x'\nrounds = 0\n[[variant]]\nname = 'a'\n", "`rounds` must be"),
        ("command = 'x'\ntimeout_s = 'long'\n[[variant]]\nname = 'a'\n", "`timeout_s` must be"),
        ('command = "x \'"\n[[variant]]\nname = "a"\n', "cannot be split into words"),
        ("command = 'x'\n[[variant]]\nname = 'a'\nenv = 3\n", "`env` must be a table"),
        ("command", "is not valid TOML"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(plan: Path, text: str, why: str) -> None:
    plan.write_text(text)
    with pytest.raises(UsageError, match=why):
        run_command(["sweep", str(plan)])


GRID = """
command = "train.py"

[grid]
args.--batch-size = [4, 8]
args.--compile = [false, true]
env.OMP_NUM_THREADS = [2]
samples.--batch-size = 2
"""


def test_a_grid_is_every_combination_of_its_values(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_text(GRID)
    assert [(variant.name, variant.samples) for variant in sweep.read_plan(plan).variants] == [
        ("batch-size-4-compile-false-omp_num_threads-2", 8),
        ("batch-size-4-compile-true-omp_num_threads-2", 8),
        ("batch-size-8-compile-false-omp_num_threads-2", 16),
        ("batch-size-8-compile-true-omp_num_threads-2", 16),
    ]
    assert run_command(["sweep", str(plan), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": OMP_NUM_THREADS=2 stepscope run train.py --batch-size 4")
    assert lines[3].endswith(": OMP_NUM_THREADS=2 stepscope run train.py --batch-size 8 --compile")


@pytest.mark.parametrize(
    ("grid", "why"),
    [
        ("args.--lr = 3", "args.--lr in [grid] must be a list of values"),
        ("loader.workers = [1]", "unknown key 'loader'"),
        ("args.--n = [" + "1, " * 201 + "]", "at most 200 variants"),
        ("samples.--batch-size = 2", "samples in [grid] names --batch-size, which has no positive numbers there"),
    ],
)
def test_a_wrong_grid_says_what_is_wrong(plan: Path, grid: str, why: str) -> None:
    plan.write_text(f'command = "train.py"\n[grid]\n{grid}\n')
    with pytest.raises(UsageError, match=re.escape(why)):
        sweep.read_plan(plan)


VARIANT = [{"name": "a"}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "is not valid JSON: it is nested too deep"),
        (json.dumps({"command": ["x\0y"], "variant": VARIANT}), "`command` has characters that cannot be passed"),
        (json.dumps({"command": ["x\ud800"], "variant": VARIANT}), "`command` has characters that cannot be passed"),
        (json.dumps({"command": "x", "env": {"a=b": 1}, "variant": VARIANT}), "cannot be named 'a=b'"),
        (json.dumps({"command": "x", "env": {"": 1}, "variant": VARIANT}), "cannot be named ''"),
        (json.dumps({"command": "x", "env": {"a": "\0"}, "variant": VARIANT}), "`env` has characters"),
        ('{"command": "x", "variant": [{"name": "a", "samples": NaN}]}', "`samples` of a must be a positive number"),
        ('{"command": "x", "variant": [{"name": "a", "samples": Infinity}]}', "`samples` of a must be a positive"),
        ('{"command": "x", "timeout_s": 1e300, "variant": [{"name": "a"}]}', "`timeout_s` must be a number of seconds"),
        (json.dumps({"command": "x", "variant": [{"name": "a\nb"}]}), "is not a name"),
    ],
)
def test_a_plan_that_was_made_to_hurt_is_refused(plan: Path, text: str, why: str) -> None:
    path = plan.with_suffix(".json")
    path.write_text(text)
    with pytest.raises(UsageError, match=why):
        run_command(["sweep", str(path)])


def test_a_plan_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.toml")
    with pytest.raises(UsageError, match="cannot be read: not a regular file"):
        run_command(["sweep", str(tmp_path / "plan.toml")])


def test_a_plan_in_json(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plan.with_suffix(".json")
    path.write_text(json.dumps({"command": ["x.py"], "variant": [{"name": "a", "args": ["1"]}]}))
    assert run_command(["sweep", str(path), "--dry-run"]) == 0
    assert capsys.readouterr().out == "a: stepscope run x.py 1\n"


def test_a_sweep_is_run_by_one_process_and_never_from_damaged_state(jobs: Jobs, plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweeps/small"
    folder.mkdir(parents=True)
    lock = take_lock(folder)
    try:
        with pytest.raises(UsageError, match="another sweep is running in"):
            run_command(["sweep", str(plan)])
    finally:
        os.close(lock)
    (folder / "sweep.json").write_text('{"schema": 1, "trials": [{}]}')
    with pytest.raises(RunError, match="is damaged"):
        run_command(["sweep", str(plan)])
    assert jobs.started == []
