"""``srun stepscope run``, on a real Slurm of this machine: its own daemons, on free ports, in a temporary folder."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
PATIENCE_S = 60.0
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed (Debian: slurm-wlm): no {', '.join(missing)}"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


class Slurm:
    """Two nodes of four slots each; both are this machine."""

    def __init__(self, folder: Path, stack: ExitStack, ports: list[int], settings: str = "") -> None:
        self.folder = folder
        self._stack = stack
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", "log"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        text = CONFIGURATION.format(host=platform.node(), folder=folder, ports=ports)
        (folder / "slurm.conf").write_text(text + settings)

    def begin(self) -> None:
        places = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        self._start(
            "munged", "--foreground", "--force", *(f"--{key}={self.folder / name}" for key, name in places.items())
        )
        self._until((self.folder / "munge.socket").exists)
        self._start("slurmctld", "-D", "-i")
        for node in ("n0", "n1"):
            self._start("slurmd", "-D", "-N", node)
        self._until(lambda: self.run(["sinfo", "-h", "-o", "%T"]).stdout.split() == ["idle"])

    def run(self, words: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **how.pop("env", {})}
        timeout_s = how.pop("timeout", PATIENCE_S)
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout_s, **how)

    def resume(self, node: str) -> None:
        self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=True)
        self._until(lambda: self.run(["sinfo", "-h", "-n", node, "-o", "%T"]).stdout.split() == ["idle"])

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.rglob("*.log"))

    def _start(self, program: str, *words: str) -> None:
        with (self.folder / "log" / f"{program}-{words[-1].rpartition('/')[2]}.log").open("w") as log:
            process = subprocess.Popen([program, *words], env=self.environment, stdout=log, stderr=log)
        self._stack.callback(_end, process)

    def _until(self, what: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
def start_slurm(tmp_path: Path, port: Callable[[], int]) -> Iterator[Callable[[str], Slurm]]:
    """Start a Slurm with these further lines in its configuration."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    with ExitStack() as stack:

        def start(settings: str) -> Slurm:
            folder = tmp_path / "slurm"
            folder.mkdir()
            slurm = Slurm(folder, stack, [port() for _ in range(3)], settings)
            slurm.begin()
            return slurm

        yield start


@pytest.fixture
def slurm(start_slurm: Callable[[str], Slurm]) -> Slurm:
    return start_slurm("")


TOY = """
import os, sys
import stepscope

for step in range(int(sys.argv[1])):
    with stepscope.step(), stepscope.phase("work"):
        pass
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "STEPSCOPE_KEY")
print(*(os.environ.get(name) for name in names))
codes = dict(word.split("=") for word in sys.argv[2:])
sys.exit(int(codes.get(os.environ["RANK"], 0)))
"""


STEPSCOPE = (sys.executable, "-m", "stepscope", "run", "--quiet")


@pytest.mark.soak  # near: test_slurm_tasks.py, without a real Slurm
@pytest.mark.ranks
def test_tasks_of_slurms_are_ranks_of_one_run(slurm: Slurm, commands: Any, tmp_path: Path) -> None:
    """All in one test, since the daemons take a while to start."""
    (tmp_path / "toy.py").write_text(TOY)
    environment = commands.environment()

    # One task per rank.  Each has its own exit code, and the run that of the one that failed.
    done = slurm.run(["srun", "-N1", "-n3", "-l", *STEPSCOPE, "toy.py", "5", "1=7"], cwd=tmp_path, env=environment)
    assert done.returncode == 7
    assert "task 1: Exited with exit code 7" in done.stderr
    assert "task 0" not in done.stderr
    port = 10_000 + 17
    assert sorted(done.stdout.splitlines()) == [f"{n}: {n} 3 {n} 3 127.0.0.1 {port} None" for n in range(3)]
    summary = summary_of(tmp_path / "runs" / "toy-slurm-1")
    assert (summary["status"], summary["exit_code"]) == ("failed", 7)
    assert steps_of(summary) == [(0, 5), (1, 5), (2, 5)]
    meta = json.loads((tmp_path / "runs" / "toy-slurm-1" / "run.json").read_text())
    assert meta["slurm"] == {"job": 1, "step": 0, "restarts": 0}

    # One task per node, and torchrun.
    line = ["srun", "-N1", "-n1", *STEPSCOPE, "--nproc-per-node", "2", "toy.py", "5"]
    done = slurm.run(line, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert steps_of(summary_of(tmp_path / "runs" / "toy-slurm-2")) == [(0, 5), (1, 5)]

    # Two nodes: the first has the hub.  Their names are known to Slurm alone, so the address is given.
    several = {"MASTER_ADDR": "127.0.0.1", "STEPSCOPE_KEY": "a key of the tests alone"}
    line = ["srun", "-N2", "--ntasks-per-node=2", "-l", *STEPSCOPE, "toy.py", "6"]
    done = slurm.run(line, cwd=tmp_path, env={**environment, **several})
    assert done.returncode == 0, done.stderr
    shown = [f"{n}: {n} 4 {n % 2} 2 127.0.0.1 {10_000 + 3 * 17} None" for n in range(4)]
    assert sorted(done.stdout.splitlines()) == shown
    assert steps_of(summary_of(tmp_path / "runs" / "toy-slurm-3")) == [(rank, 6) for rank in range(4)]
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["toy-slurm-1", "toy-slurm-2", "toy-slurm-3"]


@pytest.mark.ranks
@pytest.mark.soak
def test_a_job_that_trains_together(slurm: Slurm, commands: Any, job: Path, tmp_path: Path) -> None:
    """Ranks that gloo brings together by the variables that we set, and by torchrun's."""
    for number, line in enumerate((["-n2", *STEPSCOPE], ["-n1", *STEPSCOPE, "--nproc-per-node", "2"]), 1):
        words = ["srun", "-N1", *line, str(job), "--steps", "8"]
        done = slurm.run(words, cwd=tmp_path, env=commands.environment())
        assert done.returncode == 0, done.stderr
        summary = summary_of(tmp_path / "runs" / f"job-slurm-{number}")
        assert (steps_of(summary), summary["world_size"]) == ([(0, 8), (1, 8)], 2)


def steps_of(summary: dict[str, Any]) -> list[tuple[int, int]]:
    return [(row["rank"], row["steps"]) for row in summary["ranks"]]


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"
DIES_ONCE = """
import os, pathlib, signal
import stepscope

for step in range(8):
    with stepscope.step(), stepscope.phase("work"):
        pass
    first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
    if "DIES" in os.environ and first and os.environ["RANK"] == "1" and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ranks
@pytest.mark.soak
def test_the_scripts_of_the_repository(slurm: Slurm, commands: Any, tmp_path: Path) -> None:
    """Submitted as they are: one node, two nodes, and two nodes of which a rank dies, so that the job is requeued."""
    (tmp_path / "train.py").write_text(DIES_ONCE)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**commands.environment(), "PATH": path, "MASTER_ADDR": "127.0.0.1", "RANKS_PER_NODE": "2"}
    for number, (name, ranks, more) in enumerate(
        [("one-node", 2, {}), ("several-nodes", 4, {}), ("requeue", 4, {"DIES": "1"})], 1
    ):
        submit = ["sbatch", "--wait", "--output", "job.log", str(SCRIPTS / f"{name}.sbatch")]
        done = slurm.run(submit, cwd=tmp_path, env={**environment, **more}, timeout=150)
        log = (tmp_path / "job.log").read_text()
        assert done.returncode == 0, done.stderr + log
        run = f"train-slurm-{number}" + ("-2" if more else "")
        assert steps_of(summary_of(tmp_path / "runs" / run)) == [(rank, 8) for rank in range(ranks)], log
    assert summary_of(tmp_path / "runs" / "train-slurm-3")["status"] == "crashed"
    meta = json.loads((tmp_path / "runs" / "train-slurm-3-2" / "run.json").read_text())
    assert meta["slurm"] == {"job": 3, "step": 0, "restarts": 1}
    goodput = commands.finish(commands.start("goodput", "--all", "--json", tmp_path / "runs"))
    job = next(job for job in json.loads(goodput.stdout)["jobs"] if "train-slurm-3" in job["runs"])
    assert job["runs"] == ["train-slurm-3", "train-slurm-3-2"]


CHECK = """#!{python}
import os, stepscope.node_check as check
from stepscope.cli.main import main

node = os.environ["SLURMD_NODENAME"]
check.measure_node = lambda *_: {{
    "version": 1, "host": node, "kind": "CPU", "wall_s": 1.0, "figures": {{"memory": 12.0}}, "skipped": {{}},
    "throttled": 0.9 if node == "n0" else 0.0, "cpu_quota": 0.5,
}}
main()
"""
"""The command on two nodes of which the first is measured as unfit."""
PROLOG = """#!/bin/bash
export STEPSCOPE_PROBE={folder}/check XDG_STATE_HOME={folder}/state
exec {scripts}/prolog-probe.sh
"""


@pytest.mark.soak  # near: tests/deploy/test_slurm_scripts.py, without a real Slurm
def test_a_prolog_keeps_jobs_off_an_unfit_node(start_slurm: Callable[[str], Slurm], tmp_path: Path) -> None:
    check, prolog = tmp_path / "check", tmp_path / "prolog"
    check.write_text(CHECK.format(python=sys.executable))
    prolog.write_text(PROLOG.format(folder=tmp_path, scripts=SCRIPTS))
    check.chmod(0o755)
    prolog.chmod(0o755)
    slurm = start_slurm(f"Prolog={prolog}\nPrologFlags=Alloc\nSchedulerParameters=nohold_on_prolog_fail\n")

    # A batch job is requeued, and starts on the other node.
    script = '#!/bin/sh\necho "$SLURM_JOB_NODELIST $SLURM_RESTART_COUNT"\n'
    submit = ["sbatch", "--wait", "--nodes=1", f"--output={tmp_path}/job.log"]
    done = slurm.run(submit, input=script, timeout=150)
    assert done.returncode == 0, done.stderr + slurm.logs()
    assert (tmp_path / "job.log").read_text() == "n1 1\n"
    nodes = slurm.run(["sinfo", "-h", "-N", "-o", "%N %T %E"]).stdout.splitlines()
    why = "n0 is unfit: its CPU quota of 0.5 CPUs is used up 90% of the time."
    assert nodes[0] == f"n0 drained stepscope probe: ✖ {why}"
    assert nodes[1].endswith("none")

    # srun waits for its nodes itself: it fails.
    slurm.resume("n0")
    done = slurm.run(["srun", "-w", "n0", "true"])
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "srun: Prolog failure on node n0"), slurm.logs()

    # A check that is not installed keeps no job from starting.
    check.unlink()
    slurm.resume("n0")
    done = slurm.run(["srun", "-w", "n0", "true"])
    assert done.returncode == 0, done.stderr + slurm.logs()
